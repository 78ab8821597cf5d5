"""The optimizers of the paper, as torch.optim.Optimizer subclasses."""

from clipwise.optim._statistics import ClipStats as ClipStats
from clipwise.optim.clipped import ClippedSGD as ClippedSGD
from clipwise.optim.normalized import NormalizedSGD as NormalizedSGD
