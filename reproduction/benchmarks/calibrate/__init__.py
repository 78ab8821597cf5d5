"""What calibrate is worth: tasks, methods, cached runs and the table, shared with the benchmark of advise."""
