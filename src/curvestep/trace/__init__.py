"""What was measured: folders of runs, found and read."""
