"""The training figures of the paper, drawn from run folders alone."""
