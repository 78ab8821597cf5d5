"""The optimizers of the paper, as torch.optim.Optimizer subclasses."""

from curvestep.optim._statistics import ClipStats as ClipStats
from curvestep.optim.clipped import ClippedSGD as ClippedSGD
from curvestep.optim.normalized import NormalizedSGD as NormalizedSGD
