"""The choice among arms: the smallest learning rate that is nearly as good as the best, and how sure that is.

In a few steps a language model reaches the frequencies of its symbols at any of several rates, and the
largest of them destroys the long run: *sufficient* transfers to long runs where *best* does not. Of SGD under
a schedule it is far too small, and a share of the *best* of longer arms transfers. The constants were chosen
on the development tasks of ``benchmarks/calibrate``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

NUM_STEPS = 16  # of an arm; twice as many where noise hides the gains
LONG_STEPS = 3 * NUM_STEPS  # of an arm of SGD under a schedule
SUFFICIENT = 0.96  # of the best arm's gain
FACTOR, LONG_FACTOR = 1.1, 0.7  # peak of the run in units of the arm's: short, doubled or long
NEARLY = 0.9  # of the best arm's gain: hardly worse
CLEAR, BLIND = 5.0, 2.0  # standard errors of the best arm's gain: below, arms are doubled; nothing is known


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Gain of one trial."""

    lr: float  # the peak, under a schedule
    num_steps: int
    gain: float  # mean fall of the judges' loss; minus infinity if it broke
    error: float  # standard error of ``gain`` over the judges


def next_octave(gains: Mapping[int, float], length: int = NUM_STEPS) -> int | None:
    """The arm to try next, until the smallest sufficient one has neighbours a factor of two away.

    Of long arms: until the best has neighbours a factor of four away.

    Example:
        >>> next_octave({-2: 0.1, 0: 1.0, 2: 0.9}), next_octave({-2: 0.1, -1: 0.5, 0: 1.0, 2: 0.9})
        (-1, 1)
        >>> next_octave({-2: 0.1, 0: 0.9, 2: 1.0}, LONG_STEPS)
        4
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


def smallest_sufficient(arms: Sequence[Arm]) -> float:
    """Where the gain, linear in log lr between ascending arms, first reaches its share of the best."""
    gains = _gains(arms)
    reached = np.maximum.accumulate(np.maximum(gains, -gains.max()))
    return math.exp(np.interp(SUFFICIENT, reached / gains.max(), _logs(arms)))


def clarity(arms: Sequence[Arm]) -> float:
    """Gain of the best arm in standard errors; zero if there is none."""
    best = max(arms, key=lambda arm: arm.gain)
    return max(best.gain, 0.0) / max(best.error, sys.float_info.min)


def is_bracketed(arms: Sequence[Arm]) -> bool:
    """Whether the arm that the answer comes from, of ascending ones, has others on both sides."""
    gains = _gains(arms)
    place = np.argmax(gains >= SUFFICIENT * gains.max())
    if is_long(arms):
        place = np.argmax(gains)
    return bool(0 < place < len(arms) - 1)


def answer(arms: Sequence[Arm], schedule: str, scale: float) -> float:
    """The learning rate of the run; half of the lowest one tried where no arm gained for sure."""
    if clarity(arms) < BLIND:
        return arms[0].lr / 2
    if schedule == "constant":  # a long run at one rate: half way, in logarithms, to the scale
        return math.sqrt(smallest_sufficient(arms) * scale)
    if is_long(arms):
        return LONG_FACTOR * max(arms, key=lambda arm: arm.gain).lr
    factor = LONG_FACTOR if is_doubled(arms) else FACTOR
    return factor * smallest_sufficient(arms)


def confidence(arms: Sequence[Arm], lr: float, *, is_proven: bool) -> str:
    """How far to trust the answer, in a word; ``is_proven``: it was good so before."""
    if clarity(arms) < BLIND:
        return "cannot tell"
    is_clear = clarity(arms) >= CLEAR and not is_doubled(arms)
    is_sure = all((is_proven, is_clear, is_bracketed(arms), not is_flat(arms, lr)))
    return "high" if is_sure else "medium"


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


def _gains(arms: Sequence[Arm]) -> np.ndarray:
    return np.array([arm.gain for arm in arms])


def _logs(arms: Sequence[Arm]) -> list[float]:
    return [math.log(arm.lr) for arm in arms]
