"""The optimizers of the paper, as torch.optim.Optimizer subclasses."""
