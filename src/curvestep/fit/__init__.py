"""From the rows of a trace to (L0, L1): samples, frontier, intervals, correlation and its control."""
