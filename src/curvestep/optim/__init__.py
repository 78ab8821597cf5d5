"""The optimizers of the paper, and AdamW with the same clipping, as torch.optim.Optimizer subclasses."""

from curvestep.optim.adamw import ClippedAdamW as ClippedAdamW
from curvestep.optim.clipped import ClippedSGD as ClippedSGD
from curvestep.optim.counters import ClipStats as ClipStats
from curvestep.optim.normalized import NormalizedSGD as NormalizedSGD
from curvestep.optim.sgd import ScaledSGD as ScaledSGD
