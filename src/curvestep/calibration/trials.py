r"""Trials: short runs of the whole schedule at one learning rate each, from the same start.

All trials of a length see the same batches and the same randomness, and are judged by batches that they do
not step on:

.. math::
    \text{gain}(\eta) = \frac1J \sum_{j=1}^{J} f_j(x_0) - f_j(x_K(\eta)) .
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from curvestep.calibration.ladder import Trial
from curvestep.calibration.loaders import Batch, Supply
from curvestep.calibration.lr_schedules import SCHEDULES, shares_of_groups
from curvestep.calibration.method import Method
from curvestep.smoothness.estimators import each
from curvestep.smoothness.oracle import BatchReplay
from curvestep.tensors.vectors import global_norm


class Judging(NamedTuple):
    """A batch to judge by: the metric's, where there is one."""

    batch: Batch


@dataclass
class Trials:
    """Trials from one start.

    Args:
        passes: Losses and gradients of the model.
        method: The optimizers.
        schedule: What each trial compresses.
        supply: Batches to judge by and to step on.
        show: Is told of each trial.
    """

    passes: BatchReplay
    method: Method
    schedule: str
    supply: Supply
    show: Callable[[str], None]

    def __post_init__(self) -> None:
        self._judges = [Judging(batch) for batch in self.supply.judges]
        self._start = self.passes.losses_of(self._judges)

    def run(self, lr: float, max_norm: float, num_steps: int, first: int) -> Trial:
        """The trial of a rate that steps on so many batches from the ``first``."""
        steps = self.supply.steps(first, num_steps)
        falls = self._start - self.losses_after(lr, max_norm, steps)
        trial = Trial(lr=lr, num_steps=num_steps, gain=-math.inf, error=0.0, max_norm=max_norm)
        if np.isfinite(falls).all():
            trial = Trial.of(falls, lr=lr, num_steps=num_steps, max_norm=max_norm)
        self.show(f"  {num_steps} steps at lr {lr:.3g}: gain {trial.gain:.3g}")
        return trial

    def losses_after(self, lr: float, max_norm: float, steps: Sequence[Batch]) -> np.ndarray:
        """The judges' losses after training on ``steps``; infinite if it breaks. The parameters come back."""
        optimizers = self.method.copies(max_norm)
        try:
            for k, multiple in enumerate(SCHEDULES[self.schedule](len(steps))):
                loss, gradients = self.passes.gradient_of(steps[k], seed=k)
                norm = global_norm(gradients).item()
                if not math.isfinite(loss + norm):
                    return np.full(len(self._judges), math.inf)
                self._step(optimizers, lr * multiple, gradients, norm, max_norm)
                del gradients  # before the next ones come
            return self.passes.losses_of(self._judges)
        finally:
            self.passes.restart()

    def _step(
        self,
        optimizers: Sequence[Optimizer],
        lr: float,
        gradients: Sequence[Tensor | None],
        norm: float,
        max_norm: float,
    ) -> None:
        """A step by these gradients, clipped here where the optimizer does not clip by itself."""
        if norm > max_norm and not self.method.clips_itself:
            each(lambda gradient: gradient.mul_(max_norm / norm), gradients)
        for p, g in zip(self.passes.parameters, gradients, strict=True):
            p.grad = g
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group, share in zip(groups, shares_of_groups(self.method.optimizers), strict=True):
            group["lr"] = lr * share
        for optimizer in optimizers:
            optimizer.step()
