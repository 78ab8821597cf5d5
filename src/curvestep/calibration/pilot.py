r"""What the other batches say of a step: their loss after it, and after a few trial steps of training.

A batch's own loss says how far its gradient may be followed. Whether that lowers the loss of training is
said by batches that had no part in the step. Along the gradient :math:`g_A` of one batch, their mean loss is

.. math::
    F(m) \approx -a\,m + b\,m^2, \qquad a = h \langle g_A, \nabla f \rangle, \quad
    b = \tfrac{h^2}{2} \langle g_A, \nabla^2 f\, g_A \rangle,

with :math:`m` in units of the safe step :math:`h`. Where gradients are mostly noise, :math:`a` is small and
:math:`b` is not: the loss of training is lowest at a fraction :math:`m = a/2b` of the step. At such a start,
a signal may still appear after some steps (a plain convolutional net), or not (a model near its optimum):
trial steps tell, by the loss of batches that they were not taken on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from curvestep.calibration.line import Line, losses_of
from curvestep.smoothness.replay import Replay
from curvestep.vectors import global_norm

Closure = Callable[[], Any]

STRAIGHT = 0.95  # of the fall that the slope promises: up to there a loss falls along a straight line
LONGEST = 2.0  # times the safe step: a straight line at the start says little of later steps
PART = 0.25  # of the step, for the slope
LEAST_FRACTION = 1 / 64  # of the step that curvature allows: taken where nothing says how far to go
MOST_FRACTION = 1 / 2
MOST_STEPS = 24  # of a trial
MOST_JUDGES = 8
LOOK_EVERY = 8  # steps of a trial
MOST_OTHERS = 16  # batches whose loss is watched along a line, where noise is the limit


class Others:
    """The mean loss of other batches along one batch's line, relative to the start; forward passes only."""

    def __init__(self, line: Line, closures: Sequence[Closure]) -> None:
        self._line, self._closures = line, closures
        self.num_losses = 0
        self._start = 0.0
        self._start = self.change(0.0)

    def change(self, step: float) -> float:
        """Change of the mean loss over the step."""
        self.num_losses += len(self._closures)
        return float(self._line.losses_of(self._closures, step).mean()) - self._start

    def straight(self, step: float, slope: float) -> float:
        r"""How many times ``step`` the loss falls by nearly all that its slope promises: from one to two.

        The gradient may turn over a step by as much as its own length while the slope along the step stays
        what it was: a language model's first gradient is that of its output bias, and as the bias moves, the
        gradients of all other parameters come up. Such a step is limited neither by its loss nor by its
        slope.

        Args:
            step: The safe step.
            slope: Fall of the loss per unit of step, over a small one.
        """
        if not slope > 0:
            return 1.0
        reached, share = 1.0, STRAIGHT
        for multiple in (1.0, LONGEST**0.5, LONGEST):
            found = -self.change(multiple * step) / (multiple * step * slope)
            if not found >= STRAIGHT:
                further = (share - STRAIGHT) / (share - found) if np.isfinite(found) else 0.0
                return reached * (multiple / reached) ** further
            reached, share = multiple, found
        return reached


def mean_and_error(rows: Any) -> tuple[list[float], list[float]]:
    """Mean of each column, and its standard error; NaN and infinite values stay what they are.

    Example:
        >>> mean_and_error([(1.0, 2.0), (3.0, 2.0)])
        ([2.0, 2.0], [1.0, 0.0])
    """
    with np.errstate(invalid="ignore"):
        values = np.asarray(rows, dtype=float)
        spread = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1])
    return values.mean(axis=0).tolist(), (spread / len(values) ** 0.5).tolist()


def lowest(part: float, whole: float) -> float:
    """The fraction of the step at which the other batches' loss is lowest, by a parabola.

    Args:
        part: Change of the loss over a quarter of the step.
        whole: Change over all of it.

    Example:
        >>> f = lambda m: -2.0 * m + 4.0 * m**2
        >>> lowest(f(0.25), f(1.0))
        0.25
    """
    b = (whole - part / PART) / (1.0 - PART)
    fraction = (b - whole) / (2.0 * b) if b > 0 else MOST_FRACTION
    return min(max(fraction, LEAST_FRACTION), MOST_FRACTION)


@dataclass(frozen=True)
class Trial:
    """A few steps of training that are put back.

    Args:
        model: The model.
        steps: Batches to step on, one after another.
        judges: Batches whose mean loss is watched.
        optimizer: The optimizer's name.
        max_norm: Its threshold, or offset.
        momentum: Its momentum.
        weight_decay: Its weight decay.
    """

    model: nn.Module
    steps: Sequence[Closure]
    judges: Sequence[Closure]
    optimizer: str
    max_norm: float
    momentum: float
    weight_decay: float

    def run(self, lr: float, num_steps: int) -> tuple[float, float, int]:
        """Change of the judges' loss, its standard error, and the steps taken.

        The change is averaged over the last quarter of the steps; the trial ends early, after every eighth
        step, once the loss is lower by twice its error.
        """
        with Replay(self.model, self.steps[0]) as replay:
            replay.keep_home()
            decay = self.weight_decay
            if self.optimizer in ("Adam", "AdamW"):
                kind: Any = getattr(torch.optim, self.optimizer)
                optimizer = kind(replay.parameters, lr=lr, weight_decay=decay)
            else:
                optimizer = torch.optim.SGD(
                    replay.parameters, lr=lr, momentum=self.momentum, weight_decay=decay
                )
            start, changes = np.zeros(len(self.judges)), []
            for step in range(num_steps):
                replay.closure = self.steps[step % len(self.steps)]
                gradients = replay.gradient().gradients
                if step == 0:
                    start = losses_of(self.judges, replay, weight_decay=decay)
                coefficient = self._coefficient(global_norm(gradients).item())
                for p, g in zip(replay.parameters, gradients, strict=True):
                    p.grad = None if g is None else (g.to_dense() if g.is_sparse else g).mul_(coefficient)
                optimizer.step()
                taken = step + 1
                if 4 * taken > 3 * num_steps:
                    changes.append(losses_of(self.judges, replay, weight_decay=decay) - start)
                elif taken % LOOK_EVERY == 0:
                    now = losses_of(self.judges, replay, weight_decay=decay) - start
                    (change,), (error,) = mean_and_error(now[:, None])
                    if change + 2.0 * error < 0:
                        return change, error, taken
        (change,), (error,) = mean_and_error(np.mean(changes, axis=0)[:, None])
        return change, error, num_steps

    def _coefficient(self, norm: float) -> float:
        if self.optimizer == "NormalizedSGD":
            return 1.0 / (norm + self.max_norm)
        return min(1.0, self.max_norm / norm) if norm > 0 else 1.0
