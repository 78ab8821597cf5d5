r"""Arms: short trials of the whole run at one learning rate each, judged by batches that they do not step on.

An arm trains from the start for a few steps, the run's schedule compressed into them. All arms see the same
batches and the same randomness, so their gains are paired:

.. math::
    \text{gain}(\eta) = \frac1J \sum_{j=1}^{J} f_j(x_0) - f_j(x_K(\eta)) .
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from curvestep.calibration.choice import NUM_STEPS, Arm, clarity, next_octave
from curvestep.calibration.method import Method
from curvestep.calibration.passes import Passes
from curvestep.calibration.refusals import check_enough
from curvestep.loaders import Batch
from curvestep.smoothness.estimators import each
from curvestep.vectors import global_norm

NUM_JUDGES = NUM_STEPS // 2  # batches that an arm is judged by
MOST_ARMS = 5

FIRST_OCTAVES = tuple(range(-2, 3, 2))  # arms begin a factor of four apart


def constant(num_steps: int) -> list[float]:
    """The same rate at every step."""
    return [1.0] * num_steps


def warmup_decay(num_steps: int) -> list[float]:
    """A linear warm-up over a tenth of the steps, then a cosine to zero, as multiples of the peak.

    Example:
        >>> [round(share, 3) for share in warmup_decay(12)]
        [1.0, 1.0, 0.98, 0.921, 0.827, 0.708, 0.571, 0.429, 0.292, 0.173, 0.079, 0.02]
    """
    warm = max(1, round(num_steps / 10))
    decay = [0.5 * (1 + math.cos(math.pi * k / (num_steps - warm))) for k in range(num_steps - warm)]
    return [(k + 1) / warm for k in range(warm)] + decay


SCHEDULES: dict[str, Callable[[int], list[float]]] = {"constant": constant, "warmup-decay": warmup_decay}


class Supply:
    """Batches to judge by and others to step on, read only as far as needed."""

    def __init__(self, stream: Iterator[Batch], repetitions: int) -> None:
        self._stream, self._repetitions = stream, repetitions
        self._known: list[Batch] = []

    def split(self, times: int) -> tuple[list[Batch], list[Batch]]:
        """Judges and steps of trials so many times as long; of few batches a third and the rest."""
        most = times * NUM_JUDGES
        wanted = most + times * self._repetitions * NUM_STEPS
        self._known.extend(islice(self._stream, wanted - len(self._known)))
        check_enough(len(self._known))
        num_judges = max(2, min(most, len(self._known) // 3))
        return self._known[:num_judges], self._known[num_judges:]


@dataclass(frozen=True)
class Pilots:
    """Arms from one start around ``center``; ``show`` is told the steps and the rate of each."""

    passes: Passes
    method: Method
    schedule: str
    max_norm: float
    center: float
    show: Callable[[int, float], None] = lambda num_steps, lr: None

    def search(
        self,
        steps: Sequence[Batch],
        judges: Sequence[Batch],
        *,
        length: int = NUM_STEPS,
        most: int = MOST_ARMS,
        least_clarity: float = 0.0,
    ) -> list[Arm]:
        """Arms, ascending in ``lr``, until the smallest sufficient one is bracketed or ``most`` were tried.

        Several times ``length`` batches to step on are as many repetitions. The search ends after the first
        arms if the best gain is fewer standard errors than ``least_clarity``.
        """
        start, endless = self.passes.losses_of(judges), cycle(steps)
        turns = [list(islice(endless, length)) for _ in range(max(1, len(steps) // length))]

        def arm(octave: int) -> Arm:
            lr = self.center * 2.0**octave
            self.show(length, lr)
            falls = sum((start - self.losses_after(lr, turn, judges)) / len(turns) for turn in turns)
            return _arm(lr, length, np.asarray(falls))

        arms = {octave: arm(octave) for octave in FIRST_OCTAVES}
        while len(arms) < most and clarity(list(arms.values())) > least_clarity:
            octave = next_octave({octave: arm.gain for octave, arm in arms.items()})
            if octave is None:
                break
            arms[octave] = arm(octave)
        return sorted(arms.values(), key=lambda arm: arm.lr)

    def losses_after(self, lr: float, steps: Sequence[Batch], judges: Sequence[Batch]) -> np.ndarray:
        """The judges' losses after training on ``steps``; infinite if it breaks. The parameters come back."""
        optimizer = self.method.copy(self.max_norm)
        try:
            for k, multiple in enumerate(SCHEDULES[self.schedule](len(steps))):
                loss, gradients = self.passes.gradient_of(steps[k], seed=k)
                norm = global_norm(gradients).item()
                if not math.isfinite(loss + norm):
                    return np.full(len(judges), math.inf)
                self._step(optimizer, lr * multiple, gradients, norm)
            return self.passes.losses_of(judges)
        finally:
            self.passes.restart()

    def _step(self, optimizer: Optimizer, lr: float, gradients: Sequence[Tensor | None], norm: float) -> None:
        """A step by these gradients, clipped here where the optimizer does not clip by itself."""
        if norm > self.max_norm and not self.method.clips_itself:
            each(lambda gradient: gradient.mul_(self.max_norm / norm), gradients)
        for p, g in zip(self.passes.parameters, gradients, strict=True):
            p.grad = g
        for group, share in zip(optimizer.param_groups, self.method.shares, strict=True):
            group["lr"] = lr * share
        optimizer.step()


def _arm(lr: float, num_steps: int, falls: np.ndarray) -> Arm:
    """The trial whose judges' losses fell by ``falls``."""
    if not np.isfinite(falls).all():
        return Arm(lr=lr, num_steps=num_steps, gain=-math.inf, error=0.0)
    error = float(falls.std(ddof=1)) / math.sqrt(len(falls))
    return Arm(lr=lr, num_steps=num_steps, gain=float(falls.mean()), error=error)
