r"""Pilots: short trials of the whole run at one learning rate each, its arms, and the choice among them.

An arm trains from the start for a few steps, the run's schedule compressed into them. All arms see the same
batches and the same randomness, and are judged by batches that they do not step on:

.. math::
    \text{gain}(\eta) = \frac1J \sum_{j=1}^{J} f_j(x_0) - f_j(x_K(\eta)) .

In a few steps a language model reaches the frequencies of its symbols at any of several rates, and the
largest of them destroys the long run: the *smallest sufficient* rate transfers where the *best* does not. Of
SGD under a schedule it is far too small, and a share of the best of longer arms transfers
(``reproduction/benchmarks/calibrate``).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from curvestep.calibration.loaders import Batch, Supply
from curvestep.calibration.lr_schedules import SCHEDULES, shares_of_groups
from curvestep.calibration.method import Method
from curvestep.smoothness.estimators import each
from curvestep.smoothness.oracle import BatchReplay
from curvestep.tensors.vectors import global_norm

NUM_STEPS = 16  # of an arm; twice as many where noise hides the gains
LONG_STEPS = 3 * NUM_STEPS  # of an arm of SGD under a schedule
NUM_JUDGES = NUM_STEPS // 2  # batches that an arm is judged by
MOST_ARMS = 5
FIRST_OCTAVES = tuple(range(-2, 3, 2))  # arms begin a factor of four apart
SUFFICIENT = 0.96  # of the best arm's gain
NEARLY = 0.9  # of the best arm's gain: hardly worse
FACTOR, LONG_FACTOR = 1.1, 0.7  # peak of the run in units of the arm's: short, doubled or long
CLEAR, BLIND = 5.0, 2.0  # standard errors of the best arm's gain: below, arms are doubled; nothing is known


@dataclass(frozen=True)
class ArmRule:
    """How arms run, and how the answer is read from them.

    Momentum builds up over ten steps: no time in a run, half of an arm. So arms of which the best is taken
    are long and take plain steps, which have the length of momentum's in the end.
    """

    num_steps: int  # of an arm
    factor: float  # peak of the run in units of the arm's
    takes_best: bool = False  # else the smallest sufficient
    stride: int = 1  # octaves to the neighbours that bracket it


SHORT, DOUBLED = ArmRule(NUM_STEPS, FACTOR), ArmRule(2 * NUM_STEPS, LONG_FACTOR)
LONG = ArmRule(LONG_STEPS, LONG_FACTOR, takes_best=True, stride=2)
RULES = {rule.num_steps: rule for rule in (SHORT, DOUBLED, LONG)}


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Gain of one trial."""

    lr: float  # the peak, under a schedule
    num_steps: int
    gain: float  # mean fall of the judges' loss; minus infinity if it broke
    error: float  # standard error of ``gain`` over the judges


@dataclass(frozen=True)
class Pilots:
    """Arms from one start around ``center``; ``show`` is told of each."""

    passes: BatchReplay
    method: Method
    schedule: str
    max_norm: float
    center: float
    show: Callable[[str], None]

    def tried(self, supply: Supply, rule: ArmRule, turns: int, most: int, *, may_double: bool) -> list[Arm]:
        """Every arm; of another search with doubled ones too, where noise hides the gains."""
        least = CLEAR if may_double else 0.0
        arms = self.search(rule, *supply.split(NUM_JUDGES, turns * rule.num_steps), most, least)
        if clarity(arms) < least:
            doubled = supply.split(2 * NUM_JUDGES, turns * DOUBLED.num_steps)
            arms += self.search(DOUBLED, *doubled, MOST_ARMS, 0.0)
        return arms

    def search(
        self, rule: ArmRule, judges: list[Batch], steps: list[Batch], most: int, least: float
    ) -> list[Arm]:
        """Arms, ascending in ``lr``, until the one to choose is bracketed or ``most`` were tried.

        Several times the batches that an arm steps on are as many repetitions. Where the best gain is below
        ``least`` standard errors, the search ends.
        """
        start, endless, length = self.passes.losses_of(judges), cycle(steps), rule.num_steps
        turns = [list(islice(endless, length)) for _ in range(max(1, len(steps) // length))]

        def arm(octave: int) -> Arm:
            lr = self.center * 2.0**octave
            self.show(f"  {length} steps at lr {lr:.3g}")
            falls = sum([(start - self.losses_after(lr, turn, judges, rule)) / len(turns) for turn in turns])
            if not np.isfinite(falls).all():
                return Arm(lr=lr, num_steps=length, gain=-math.inf, error=0.0)
            error = np.std(falls, ddof=1).item() / math.sqrt(len(judges))
            return Arm(lr=lr, num_steps=length, gain=np.mean(falls).item(), error=error)

        arms = {octave: arm(octave) for octave in FIRST_OCTAVES}
        while len(arms) < most and clarity(arms.values()) > least:
            octave = next_octave({octave: arm.gain for octave, arm in arms.items()}, rule)
            if octave is None:
                break
            arms[octave] = arm(octave)
        return sorted(arms.values(), key=lambda arm: arm.lr)

    def losses_after(self, lr: float, steps: list[Batch], judges: list[Batch], rule: ArmRule) -> np.ndarray:
        """The judges' losses after training on ``steps``; infinite if it breaks. The parameters come back."""
        optimizer = self.method.copy(self.max_norm)
        if rule.takes_best:
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
        for group, share in zip(optimizer.param_groups, shares_of_groups(self.method.optimizer), strict=True):
            group["lr"] = lr * share
        optimizer.step()


def next_octave(gains: Mapping[int, float], rule: ArmRule = SHORT) -> int | None:
    """The arm to try next, until the one to choose has neighbours on both sides, near enough.

    Example:
        >>> next_octave({-2: 0.1, 0: 1.0, 2: 0.9}), next_octave({-2: 0.1, 0: 0.9, 2: 1.0}, LONG)
        (-1, 4)
    """
    octaves = sorted(gains)
    values = np.array([gains[octave] for octave in octaves])
    here = octaves[_chosen(values, rule)]
    sides = [here - rule.stride, here + rule.stride]
    if here == octaves[-1] and values[-2] <= NEARLY * values.max():  # what is better lies above, not between
        sides = [here + rule.stride]
    return next((octave for octave in sides if octave not in gains), None)


def _chosen(gains: np.ndarray, rule: ArmRule) -> int:
    """Place of the arm that the answer comes from, by the gains of ascending ones."""
    if rule.takes_best:
        return int(gains.argmax())
    return int(np.argmax(gains >= SUFFICIENT * gains.max()))


def clarity(arms: Iterable[Arm]) -> float:
    """Gain of the best arm in standard errors; zero if there is none."""
    best = max(arms, key=lambda arm: arm.gain)
    return max(best.gain, 0.0) / max(best.error, sys.float_info.min)


def longest(arms: Sequence[Arm]) -> list[Arm]:
    """The arms to read the answer from, ascending in ``lr``."""
    return [arm for arm in arms if arm.num_steps == arms[-1].num_steps]


def read(arms: Sequence[Arm], schedule: str, scale: float) -> tuple[float, list[str]]:
    """The learning rate of the run from ascending arms of one rule, and the kinds of doubts that they leave.

    Where no arm gained for sure, it is half of the lowest one tried.
    """
    rule, gains = RULES[arms[0].num_steps], np.array([arm.gain for arm in arms])
    logs, best, place = [math.log(arm.lr) for arm in arms], gains.max(), _chosen(gains, rule)
    if clarity(arms) < BLIND:
        return arms[0].lr / 2, ["unknown"]
    # Where the gain, linear in log lr between arms, first reaches its share of the best.
    reached = np.maximum.accumulate(np.maximum(gains, -best)) / best
    sufficient = math.exp(np.interp(SUFFICIENT, reached, logs))
    lr = rule.factor * sufficient
    if rule.takes_best:
        lr = rule.factor * arms[place].lr
    elif schedule == "constant":  # a long run at one rate: half way, in logarithms, to the scale
        lr = math.sqrt(sufficient * scale)
    half = np.interp(math.log(lr / 2), logs, np.maximum(gains, 0.0))
    doubts = {
        "noise": rule is DOUBLED or clarity(arms) < CLEAR,
        "edge": not 0 < place < len(arms) - 1,
        "flat": not rule.takes_best and half >= NEARLY * best,  # arms so short hardly tell rates apart
    }
    return lr, [kind for kind, holds in doubts.items() if holds]
