r"""Short trials of the whole run, and the smallest learning rate that is nearly as good as the best of them.

An arm trains from the start for a few steps, the run's schedule compressed into them. It is judged by batches
that it does not step on. All arms see the same batches and the same randomness, so their gains are paired:

.. math::
    \text{gain}(\eta) = \frac1J \sum_{j=1}^{J} f_j(x_0) - f_j(x_K(\eta)) .

In a few steps a language model reaches the frequencies of its symbols at any of several rates, and the
largest of them destroys the long run: *sufficient* transfers to long runs where *best* does not. The
constants were chosen on the development tasks of ``benchmarks/calibrate``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from curvestep.calibration.method import Method
from curvestep.calibration.passes import Passes
from curvestep.loaders import Batch
from curvestep.vectors import global_norm

NUM_STEPS = 16  # of an arm
NUM_JUDGES = 8  # batches that an arm is judged by
MOST_ARMS = 5
SUFFICIENT = 0.96  # of the best arm's gain
FACTOR, NOISY_FACTOR = 1.1, 0.7  # peak of the run in units of the smallest sufficient one
CLEAR, BLIND = 5.0, 2.0  # standard errors of the best arm's gain: below, arms are doubled; nothing is known
ADAM_SCALE, ADAM_MAX_NORM = 0.004, 1.0  # what Adam's lr is tried around; its threshold where there is none

FIRST_OCTAVES = tuple(range(-2, 3, 2))  # arms begin a factor of four apart


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Gain of one trial.

    Args:
        lr: Its learning rate; the peak, under a schedule.
        num_steps: Steps that it took.
        gain: Mean fall of the judges' loss; minus infinity if it broke.
        error: Standard error of ``gain`` over the judges.
    """

    lr: float
    num_steps: int
    gain: float
    error: float


def warmup_decay(num_steps: int) -> list[float]:
    """A linear warm-up over a tenth of the steps, then a cosine to zero, as multiples of the peak.

    Example:
        >>> [round(share, 3) for share in warmup_decay(12)]
        [1.0, 1.0, 0.98, 0.921, 0.827, 0.708, 0.571, 0.429, 0.292, 0.173, 0.079, 0.02]
    """
    warm = max(1, round(num_steps / 10))
    decay = [0.5 * (1 + math.cos(math.pi * k / (num_steps - warm))) for k in range(num_steps - warm)]
    return [(k + 1) / warm for k in range(warm)] + decay


SCHEDULES: dict[str, Callable[[int], list[float]]] = {
    "constant": lambda num_steps: [1.0] * num_steps,
    "warmup-decay": warmup_decay,
}


def next_octave(gains: Mapping[int, float]) -> int | None:
    """The arm to try next, until the smallest sufficient one has neighbours a factor of two away.

    Example:
        >>> next_octave({-2: 0.1, 0: 1.0, 2: 0.9}), next_octave({-2: 0.1, -1: 0.5, 0: 1.0, 2: 0.9})
        (-1, 1)
        >>> next_octave({-1: 0.5, 0: 1.0, 1: 0.9}) is None
        True
    """
    octaves, best = sorted(gains), max(gains.values())
    place = next(i for i, octave in enumerate(octaves) if gains[octave] >= SUFFICIENT * best)
    here, is_top = octaves[place], place == len(octaves) - 1
    if place == 0:
        return here - 1
    below = octaves[place - 1]
    if here - below > 1 and (not is_top or gains[below] > 0.9 * best):
        return here - 1
    if is_top or octaves[place + 1] - here > 1:
        return here + 1
    return None


def smallest_sufficient(arms: Sequence[Arm]) -> float:
    """Where the gain, linear in log lr between ascending arms, first reaches its share of the best."""
    best = max(arm.gain for arm in arms)
    reached = np.maximum.accumulate([max(arm.gain, -best) for arm in arms])
    return math.exp(np.interp(SUFFICIENT, reached / best, [math.log(arm.lr) for arm in arms]))


def clarity(arms: Sequence[Arm]) -> float:
    """Gain of the best arm in standard errors; zero if there is none."""
    best = max(arms, key=lambda arm: arm.gain)
    if not best.gain > 0:
        return 0.0
    return best.gain / best.error if best.error > 0 else math.inf


def is_bracketed(arms: Sequence[Arm]) -> bool:
    """Whether the smallest sufficient of ascending arms has others on both sides."""
    best = max(arm.gain for arm in arms)
    sufficient = [arm.gain >= SUFFICIENT * best for arm in arms]
    return 0 < sufficient.index(True) < len(arms) - 1


def answer(arms: Sequence[Arm], schedule: str, scale: float) -> float:
    """The learning rate of the run; half of the lowest one tried where no arm gained for sure."""
    if clarity(arms) < BLIND:
        return arms[0].lr / 2
    if schedule == "constant":  # a long run at one rate: half way, in logarithms, to the scale
        return math.sqrt(smallest_sufficient(arms) * scale)
    if arms[0].num_steps > NUM_STEPS:
        return NOISY_FACTOR * smallest_sufficient(arms)
    return FACTOR * smallest_sufficient(arms)


@dataclass(frozen=True)
class Pilots:
    """Arms from one start; ``show`` is told the steps and the rate of each."""

    passes: Passes
    method: Method
    schedule: str
    max_norm: float
    scale: float
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
        start = np.array([self.passes.loss_of(judge) for judge in judges])
        rounds = max(1, len(steps) // length)
        turns = [[steps[(r * length + k) % len(steps)] for k in range(length)] for r in range(rounds)]
        center = self.scale / 2 if self.schedule == "constant" else self.scale * 2
        arms: dict[int, Arm] = {}
        waiting: list[int] = list(FIRST_OCTAVES)
        while waiting and len(arms) < most:
            octave = waiting.pop(0)
            lr = center * 2.0**octave
            self.show(length, lr)
            falls = sum((start - self.losses_after(lr, turn, judges)) / rounds for turn in turns)
            arms[octave] = _arm(lr, length, np.asarray(falls))
            if not waiting and clarity(list(arms.values())) > least_clarity:
                octave = next_octave({octave: arm.gain for octave, arm in arms.items()})
                waiting += [] if octave is None else [octave]
        return [arms[octave] for octave in sorted(arms)]

    def losses_after(self, lr: float, steps: Sequence[Batch], judges: Sequence[Batch]) -> np.ndarray:
        """The judges' losses after training on ``steps``; infinite if it breaks. The parameters come back."""
        optimizer, shares = self.method.copy(self.max_norm)
        try:
            for k, multiple in enumerate(SCHEDULES[self.schedule](len(steps))):
                loss, gradients = self.passes.gradient_of(steps[k], seed=k)
                norm = global_norm(gradients).item()
                if not (math.isfinite(loss) and math.isfinite(norm)):
                    return np.full(len(judges), math.inf)
                self._set_gradients(gradients, norm)
                for group, share in zip(optimizer.param_groups, shares, strict=True):
                    group["lr"] = lr * multiple * share
                optimizer.step()
            return np.array([self.passes.loss_of(judge) for judge in judges])
        finally:
            self.passes.restart()

    def _set_gradients(self, gradients: Sequence[Tensor | None], norm: float) -> None:
        is_clipped = norm > self.max_norm and not self.method.clips_itself
        for p, g in zip(self.passes.parameters, gradients, strict=True):
            p.grad = g
            if g is not None and is_clipped:
                g.mul_(self.max_norm / norm)


def _arm(lr: float, num_steps: int, falls: np.ndarray) -> Arm:
    """The trial whose judges' losses fell by ``falls``."""
    if not np.isfinite(falls).all():
        return Arm(lr=lr, num_steps=num_steps, gain=-math.inf, error=0.0)
    error = float(falls.std(ddof=1)) / math.sqrt(len(falls))
    return Arm(lr=lr, num_steps=num_steps, gain=float(falls.mean()), error=error)
