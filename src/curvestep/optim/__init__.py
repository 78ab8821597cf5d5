"""The optimizers of the paper, and AdamW with the same clipping, as torch.optim.Optimizer subclasses."""

from curvestep.optim.adamw import ClippedAdamW as ClippedAdamW
from curvestep.optim.counters import ClipStats as ClipStats
from curvestep.optim.sgd import (
    ClippedSGD as ClippedSGD,
    NormalizedSGD as NormalizedSGD,
    ScaledSGD as ScaledSGD,
)
