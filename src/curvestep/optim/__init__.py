"""The optimizers of the paper, and AdamW with the same clipping, as torch.optim.Optimizer subclasses."""
