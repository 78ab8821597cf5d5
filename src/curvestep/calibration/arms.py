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

from curvestep.calibration.choice import CLEAR, LONG_STEPS, NUM_STEPS, Arm, clarity, next_octave
from curvestep.calibration.method import Method
from curvestep.calibration.passes import Passes
from curvestep.loaders import Batch
from curvestep.lr_schedules import SCHEDULES
from curvestep.smoothness.estimators import each
from curvestep.vectors import global_norm

NUM_JUDGES = NUM_STEPS // 2  # batches that an arm is judged by
MOST_ARMS = 5

FIRST_OCTAVES = tuple(range(-2, 3, 2))  # arms begin a factor of four apart


class Supply:
    """Batches to judge by and others to step on, read only as far as needed."""

    def __init__(self, stream: Iterator[Batch], num_steps: int) -> None:
        self._stream, self._num_steps = stream, num_steps
        self._known: list[Batch] = []

    def split(self, times: int) -> tuple[list[Batch], list[Batch]]:
        """Judges and steps of trials so many times as long; of few batches a third and the rest."""
        most = times * NUM_JUDGES
        wanted = most + times * self._num_steps
        self._known.extend(islice(self._stream, wanted - len(self._known)))
        count = len(self._known)
        if count < 3:
            raise ValueError(
                "`batches` must hold at least three batches, one to step on and two others to judge by, got "
                f"{count}. Is it a used-up iterator? Else use smaller batches; 24 are better."
            )
        num_judges = max(2, min(most, count // 3))
        return self._known[:num_judges], self._known[num_judges:]


@dataclass(frozen=True)
class Pilots:
    """Arms of a ``length`` from one start around ``center``; ``show`` is told the steps and the rate of each.

    Momentum builds up over about ten steps of a run, which is no part of it and half of an arm. So long arms
    take plain steps, as long as momentum's in the end.
    """

    passes: Passes
    method: Method
    schedule: str
    max_norm: float
    center: float
    length: int = NUM_STEPS
    show: Callable[[int, float], None] = lambda num_steps, lr: None

    def tried(self, supply: Supply, most: int, *, may_double: bool) -> tuple[list[Arm], int]:
        """Every arm, and the judges of the last ones; doubled where noise hides the gains."""
        least = CLEAR if may_double else 0.0
        judges, steps = supply.split(1)
        arms = self.search(steps, judges, self.length, most, least)
        if clarity(arms) >= least:
            return arms, len(judges)
        judges, steps = supply.split(2)
        return arms + self.search(steps, judges, 2 * self.length, MOST_ARMS, 0.0), len(judges)

    def search(
        self, steps: Sequence[Batch], judges: Sequence[Batch], length: int, most: int, least_clarity: float
    ) -> list[Arm]:
        """Arms, ascending in ``lr``, until the one to choose is bracketed or ``most`` were tried.

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
            octave = next_octave({octave: arm.gain for octave, arm in arms.items()}, length)
            if octave is None:
                break
            arms[octave] = arm(octave)
        return sorted(arms.values(), key=lambda arm: arm.lr)

    def losses_after(self, lr: float, steps: Sequence[Batch], judges: Sequence[Batch]) -> np.ndarray:
        """The judges' losses after training on ``steps``; infinite if it breaks. The parameters come back."""
        optimizer = self.method.copy(self.max_norm)
        if self.length == LONG_STEPS:
            lr /= 1.0 - self.method.momentum
            for group in optimizer.param_groups:
                group["momentum"] = 0.0
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
