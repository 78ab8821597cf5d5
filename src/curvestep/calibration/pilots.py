r"""Pilots: short trials of the whole run at one learning rate each, its arms, and the choice among them.

An arm trains from the start for a few steps, the run's schedule compressed into them. All arms see the same
batches and the same randomness, and are judged by batches that they do not step on:

.. math::
    \text{gain}(\eta) = \frac1J \sum_{j=1}^{J} f_j(x_0) - f_j(x_K(\eta)) .

In a few steps a language model reaches the frequencies of its symbols at any of several rates, and the
largest of them destroys the long run: the *smallest sufficient* rate transfers where the *best* does not. Of
SGD under a schedule it is far too small, and a share of the best of longer arms transfers. The constants were
chosen on the development tasks of ``benchmarks/calibrate``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from curvestep.calibration.method import Method
from curvestep.calibration.passes import Passes
from curvestep.loaders import Batch
from curvestep.lr_schedules import SCHEDULES
from curvestep.smoothness.estimators import each
from curvestep.vectors import global_norm

NUM_STEPS = 16  # of an arm; twice as many where noise hides the gains
LONG_STEPS = 3 * NUM_STEPS  # of an arm of SGD under a schedule
NUM_JUDGES = NUM_STEPS // 2  # batches that an arm is judged by
MOST_ARMS = 5
FIRST_OCTAVES = tuple(range(-2, 3, 2))  # arms begin a factor of four apart
SUFFICIENT = 0.96  # of the best arm's gain
NEARLY = 0.9  # of the best arm's gain: hardly worse
FACTOR, LONG_FACTOR = 1.1, 0.7  # peak of the run in units of the arm's: short, doubled or long
CLEAR, BLIND = 5.0, 2.0  # standard errors of the best arm's gain: below, arms are doubled; nothing is known


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Gain of one trial."""

    lr: float  # the peak, under a schedule
    num_steps: int
    gain: float  # mean fall of the judges' loss; minus infinity if it broke
    error: float  # standard error of ``gain`` over the judges


class Supply:
    """Batches to judge by and others to step on, read only as far as needed."""

    def __init__(self, stream: Iterator[Batch], num_steps: int) -> None:
        self._stream, self._num_steps = stream, num_steps
        self._known: list[Batch] = []

    def split(self, times: int) -> tuple[list[Batch], list[Batch]]:
        """Judges and steps of trials so many times as long; of few batches a third and the rest."""
        most = times * NUM_JUDGES
        self._known.extend(islice(self._stream, most + times * self._num_steps - len(self._known)))
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

    Momentum builds up over ten steps: no time in a run, half of an arm. So long arms take plain steps, which
    have the length of momentum's in the end.
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
                del gradients  # before the next ones come
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
    if not np.isfinite(falls).all():
        return Arm(lr=lr, num_steps=num_steps, gain=-math.inf, error=0.0)
    error = float(falls.std(ddof=1)) / math.sqrt(len(falls))
    return Arm(lr=lr, num_steps=num_steps, gain=float(falls.mean()), error=error)


def next_octave(gains: Mapping[int, float], length: int = NUM_STEPS) -> int | None:
    """The arm to try next, until the smallest sufficient one has neighbours a factor of two away.

    Of long arms: until the best has neighbours a factor of four away.

    Example:
        >>> next_octave({-2: 0.1, 0: 1.0, 2: 0.9}), next_octave({-2: 0.1, 0: 0.9, 2: 1.0}, LONG_STEPS)
        (-1, 4)
    """
    best = max(gains.values())
    here = min(octave for octave, gain in gains.items() if gain >= SUFFICIENT * best)
    *_, second, top = sorted(gains)
    sides = (here - 1, here + 1)
    if here == top and gains[second] <= NEARLY * best:  # what is better lies above, not between
        sides = (here + 1,)
    if length == LONG_STEPS:
        here = max(gains, key=lambda octave: gains[octave])
        sides = (here - 2, here + 2)
    return next((octave for octave in sides if octave not in gains), None)


def answer(arms: Sequence[Arm], schedule: str, scale: float) -> float:
    """The learning rate of the run; half of the lowest one tried where no arm gained for sure."""
    if clarity(arms) < BLIND:
        return arms[0].lr / 2
    if is_long(arms):
        return LONG_FACTOR * _best(arms).lr
    if schedule == "constant":  # a long run at one rate: half way, in logarithms, to the scale
        return math.sqrt(smallest_sufficient(arms) * scale)
    factor = LONG_FACTOR if is_doubled(arms) else FACTOR
    return factor * smallest_sufficient(arms)


def smallest_sufficient(arms: Sequence[Arm]) -> float:
    """Where the gain, linear in log lr between ascending arms, first reaches its share of the best."""
    gains = _gains(arms)
    reached = np.maximum.accumulate(np.maximum(gains, -gains.max()))
    return math.exp(np.interp(SUFFICIENT, reached / gains.max(), _logs(arms)))


def confidence(arms: Sequence[Arm], lr: float, *, is_proven: bool) -> str:
    """How far to trust the answer, in a word; ``is_proven``: it was good so before."""
    if clarity(arms) < BLIND:
        return "cannot tell"
    is_clear = clarity(arms) >= CLEAR and not is_doubled(arms)
    is_sure = all((is_proven, is_clear, is_bracketed(arms), not is_flat(arms, lr)))
    return "high" if is_sure else "medium"


def clarity(arms: Sequence[Arm]) -> float:
    """Gain of the best arm in standard errors; zero if there is none."""
    best = _best(arms)
    return max(best.gain, 0.0) / max(best.error, sys.float_info.min)


def is_bracketed(arms: Sequence[Arm]) -> bool:
    """Whether the arm that the answer comes from, of ascending ones, has others on both sides."""
    gains = _gains(arms)
    place = np.argmax(gains >= SUFFICIENT * gains.max())
    if is_long(arms):
        place = np.argmax(gains)
    return bool(0 < place < len(arms) - 1)


def is_flat(arms: Sequence[Arm], lr: float) -> bool:
    """Whether half of the answer gains nearly as much as any arm: trials so short hardly tell rates apart."""
    gains = np.maximum(_gains(arms), 0.0)
    half = np.interp(math.log(lr / 2), _logs(arms), gains)
    return bool(half >= NEARLY * gains.max())


def longest(arms: Sequence[Arm]) -> list[Arm]:
    """The arms to read the answer from, ascending in ``lr``."""
    return [arm for arm in arms if arm.num_steps == arms[-1].num_steps]


def is_doubled(arms: Sequence[Arm]) -> bool:
    """Whether noise hid the gains of shorter arms."""
    return arms[0].num_steps == 2 * NUM_STEPS


def is_long(arms: Sequence[Arm]) -> bool:
    """Whether they are SGD's under a schedule."""
    return arms[0].num_steps == LONG_STEPS


def _best(arms: Sequence[Arm]) -> Arm:
    return max(arms, key=lambda arm: arm.gain)


def _gains(arms: Sequence[Arm]) -> np.ndarray:
    return np.array([arm.gain for arm in arms])


def _logs(arms: Sequence[Arm]) -> list[float]:
    return [math.log(arm.lr) for arm in arms]
