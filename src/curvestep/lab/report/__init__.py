"""Run folders as one HTML page that needs nothing else: no network, no server, no Python."""
