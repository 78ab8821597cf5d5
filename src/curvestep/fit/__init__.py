"""From the rows of a trace to (L0, L1): samples, frontier, correlation, intervals, control."""
