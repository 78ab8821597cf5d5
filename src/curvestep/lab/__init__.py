"""The experiments of the paper (extra `lab`)."""
