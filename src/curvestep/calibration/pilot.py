r"""What the other batches say: of a step, of a few trial steps, of short runs of the whole schedule.

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
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from curvestep.calibration.line import Line, losses_of
from curvestep.calibration.method import Method, warmup_decay
from curvestep.smoothness.replay import Replay
from curvestep.vectors import global_norm

Closure = Callable[[], Any]

STRAIGHT, BENT = 0.9, 0.8  # of the fall that the slope promises: stretch the step fully, not at all
LONGEST = 2**0.5  # times the safe step: a straight line at the start says little of later steps
PART = 0.25  # of the step, for the slope
LEAST_FRACTION = 1 / 64  # of the step that curvature allows: taken where nothing says how far to go
MOST_FRACTION = 1 / 2
MOST_STEPS = 24  # of a trial
MOST_JUDGES = 8
LOOK_EVERY = 8  # steps of a trial
ARM_STEPS = 12  # of each of two trials: after six, the smaller learning rate leads nearly everywhere
MOST_OTHERS = 16  # batches whose loss is watched along a line, where noise is the limit
SPREAD = 3.0  # between the peaks of pilots
MOST_PEAKS = 5


class Others:
    """The mean loss of other batches along one batch's line, relative to the start; forward passes only."""

    def __init__(self, line: Line, closures: Sequence[Closure]) -> None:
        self._line, self._closures = line, closures
        self._start = 0.0
        self._start = self.change(0.0)

    def change(self, step: float) -> float:
        """Change of the mean loss over the step."""
        return float(self._line.losses_of(self._closures, step).mean()) - self._start

    def straight(self, step: float, slope: float) -> float:
        r"""By how much to stretch ``step`` because the loss falls nearly straight on to twice its length.

        The gradient may turn over a step by as much as its own length while the slope along the step stays
        what it was: a language model's first gradient is that of its output bias, and as the bias moves, the
        gradients of all other parameters come up. Such a step is limited neither by its loss nor by its
        slope. Along a parabola that ends the safe step, nothing of the fall is left at twice its length.

        Args:
            step: The safe step.
            slope: Fall of the loss per unit of step, over a small one.

        Returns:
            From one to the square root of two.
        """
        share = -self.change(2.0 * step) / (2.0 * step * slope) if slope > 0 else 0.0
        return LONGEST ** min((share - BENT) / (STRAIGHT - BENT), 1.0) if share > BENT else 1.0


def mean_and_error(values: Any) -> tuple[float, float]:
    """Mean and its standard error, zero for a single value; NaN and infinite values stay what they are.

    Example:
        >>> mean_and_error([1.0, 3.0])
        (2.0, 1.0)
    """
    values = np.asarray(values, dtype=float)
    with np.errstate(invalid="ignore"):
        spread = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    return float(values.mean()), spread / len(values) ** 0.5


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
    """Training for some steps, which are put back.

    The judges' loss is read with the same randomness every time, so that its changes are paired.

    Args:
        model: The model.
        method: The optimizer.
        max_norm: Its threshold, or offset.
        steps: Batches to step on, one after another, then from the first again.
        judges: Batches whose loss is watched.
    """

    model: nn.Module
    method: Method
    max_norm: float
    steps: Sequence[Closure]
    judges: Sequence[Closure]

    def run(self, rates: Sequence[float], *, window: int = 1, look_every: int = 0) -> tuple[np.ndarray, int]:
        """Change of each judge's loss, averaged over the last steps, and the steps taken.

        Args:
            rates: The learning rate of each step.
            window: Number of last steps after which the judges are asked.
            look_every: End after such a multiple of steps once their loss is lower by twice its error.
        """
        changes = []
        with Replay(self.model, self.steps[0]) as replay:
            replay.keep_home()
            start = np.zeros(len(self.judges))
            optimizer = self.method.build(replay.parameters, 1.0)
            shares = [group["lr"] for group in optimizer.param_groups]
            for taken, lr in enumerate(rates, 1):
                replay.closure = partial(_reseeded, self.steps[(taken - 1) % len(self.steps)], taken)
                gradients = replay.gradient().gradients
                if taken == 1:  # after a gradient the replay knows whether closures run backward() themselves
                    start = losses_of(self.judges, replay, self.method)
                coefficient = self.method.coefficient(global_norm(gradients).item(), self.max_norm)
                for p, g in zip(replay.parameters, gradients, strict=True):
                    p.grad = None if g is None else (g.to_dense() if g.is_sparse else g).mul_(coefficient)
                for group, share in zip(optimizer.param_groups, shares, strict=True):
                    group["lr"] = lr * share
                optimizer.step()
                if taken > len(rates) - window or (look_every and taken % look_every == 0):
                    changes.append(losses_of(self.judges, replay, self.method) - start)
                    change, error = mean_and_error(changes[-1])
                    if taken <= len(rates) - window and change + 2.0 * error < 0:
                        return changes[-1], taken
        return np.mean(changes[-window:], axis=0), len(rates)


def _reseeded(closure: Closure, seed: int) -> Any:
    """The closure with randomness of its own: a replay would give every step the same dropout masks."""
    torch.manual_seed(seed)
    return closure()


@dataclass(frozen=True)
class Pilot:
    """Short runs of the whole schedule at several peaks.

    Args:
        rates: The peaks, ascending.
        changes: Change of the judges' mean loss over each run; zero for one that ends above its start.
        lr: The peak at which a parabola through the best three is lowest; None if they cannot be told apart.
        num_gradients: Gradients evaluated.
    """

    rates: tuple[float, ...]
    changes: tuple[float, ...]
    lr: float | None
    num_gradients: int


def run_pilots(trial: Trial, lr: float, num_steps: int) -> Pilot:
    """Run the schedule, compressed to ``num_steps``, at peaks three times apart around ``lr``.

    It begins with three peaks and adds further ones while the best is at an end, five at most.
    """
    shape, found = warmup_decay(num_steps), dict[float, np.ndarray]()
    multiples = [1 / SPREAD, 1.0, SPREAD]
    while True:
        for multiple in multiples:
            if multiple not in found:
                changes, _ = trial.run([multiple * lr * share for share in shape])
                found[multiple] = np.where(np.isfinite(changes), np.minimum(changes, 0.0), 0.0)
        multiples = sorted(found)
        means = [float(found[multiple].mean()) for multiple in multiples]
        best = int(np.argmin(means))
        if 0 < best < len(means) - 1 or len(means) == MOST_PEAKS:
            break
        multiples = [multiples[0] / SPREAD if best == 0 else multiples[-1] * SPREAD]
    gain, error = mean_and_error(found[multiples[best]] - found[multiples[int(np.argmax(means))]])
    peak = None
    if gain + 2.0 * error < 0:
        middle = min(max(best, 1), len(means) - 2)
        below, here, above = means[middle - 1 : middle + 2]
        bend = below - 2.0 * here + above
        shift = 0.5 * (below - above) / bend if bend > 0 else float(best - middle)
        peak = lr * multiples[middle] * SPREAD ** min(max(shift, -1.0), 1.0)
    rates = tuple(lr * multiple for multiple in multiples)
    return Pilot(rates, tuple(means), peak, len(means) * num_steps)
