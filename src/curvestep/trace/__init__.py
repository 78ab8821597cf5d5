"""What was measured: rows, their columns, the facts of a run, and the folders of runs."""
