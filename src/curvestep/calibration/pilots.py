r"""Pilots: short trials of the whole run at one learning rate each, and the choice among them.

A trial trains from the start for a few steps, the run's schedule compressed into them. All trials see the
same batches and the same randomness, and are judged by batches that they do not step on:

.. math::
    \text{gain}(\eta) = \frac1J \sum_{j=1}^{J} f_j(x_0) - f_j(x_K(\eta)) .

In a few steps a language model reaches the frequencies of its symbols at any of several rates, and the
largest of them destroys the long run: the *smallest sufficient* rate transfers where the *best* does not. Of
SGD under a schedule it is far too small, and a share of the best of longer trials transfers
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

NUM_STEPS = 16  # of a trial; twice as many where noise hides the gains
LONG_STEPS = 3 * NUM_STEPS  # of a trial of SGD under a schedule
NUM_JUDGES = NUM_STEPS // 2  # batches that a trial is judged by
MOST_TRIALS = 5
FIRST_OCTAVES = tuple(range(-2, 3, 2))  # trials begin a factor of four apart
SUFFICIENT = 0.96  # of the best trial's gain
NEARLY = 0.9  # of the best trial's gain: hardly worse
FACTOR, LONG_FACTOR = 1.1, 0.7  # peak of the run in units of the trial's: short, doubled or long
CLEAR, BLIND = (
    5.0,
    2.0,
)  # standard errors of the best trial's gain: below, trials are doubled; nothing is known


@dataclass(frozen=True)
class TrialRule:
    """How trials run, and how the answer is read from them.

    Momentum builds up over ten steps: no time in a run, half of a trial. So trials of which the best is taken
    are long and take plain steps, which have the length of momentum's in the end.
    """

    num_steps: int  # of a trial
    factor: float  # peak of the run in units of the trial's
    takes_best: bool = False  # else the smallest sufficient
    stride: int = 1  # octaves to the neighbours that bracket it


SHORT, DOUBLED = TrialRule(NUM_STEPS, FACTOR), TrialRule(2 * NUM_STEPS, LONG_FACTOR)
LONG = TrialRule(LONG_STEPS, LONG_FACTOR, takes_best=True, stride=2)
RULES = {rule.num_steps: rule for rule in (SHORT, DOUBLED, LONG)}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Gain of one trial."""

    lr: float  # the peak, under a schedule
    num_steps: int
    gain: float  # mean fall of the judges' loss; minus infinity if it broke
    error: float  # standard error of ``gain`` over the judges


@dataclass(frozen=True)
class Pilots:
    """Trials from one start around ``center``; ``show`` is told of each."""

    passes: BatchReplay
    method: Method
    schedule: str
    max_norm: float
    center: float
    show: Callable[[str], None]

    def tried(
        self, supply: Supply, rule: TrialRule, turns: int, most: int, *, may_double: bool
    ) -> list[Trial]:
        """Every trial; of another search with doubled ones too, where noise hides the gains."""
        least = CLEAR if may_double else 0.0
        trials = self.search(rule, *supply.split(NUM_JUDGES, turns * rule.num_steps), most, least)
        if clarity(trials) < least:
            doubled = supply.split(2 * NUM_JUDGES, turns * DOUBLED.num_steps)
            trials += self.search(DOUBLED, *doubled, MOST_TRIALS, 0.0)
        return trials

    def search(
        self, rule: TrialRule, judges: list[Batch], steps: list[Batch], most: int, least: float
    ) -> list[Trial]:
        """Trials, ascending in ``lr``, until the one to choose is bracketed or ``most`` were tried.

        Several times the batches that a trial steps on are as many repetitions. Where the best gain is below
        ``least`` standard errors, the search ends.
        """
        start, endless, length = self.passes.losses_of(judges), cycle(steps), rule.num_steps
        turns = [list(islice(endless, length)) for _ in range(max(1, len(steps) // length))]

        def trial(octave: int) -> Trial:
            lr = self.center * 2.0**octave
            self.show(f"  {length} steps at lr {lr:.3g}")
            falls = sum([(start - self.losses_after(lr, turn, judges, rule)) / len(turns) for turn in turns])
            if not np.isfinite(falls).all():
                return Trial(lr=lr, num_steps=length, gain=-math.inf, error=0.0)
            error = np.std(falls, ddof=1).item() / math.sqrt(len(judges))
            return Trial(lr=lr, num_steps=length, gain=np.mean(falls).item(), error=error)

        trials = {octave: trial(octave) for octave in FIRST_OCTAVES}
        while len(trials) < most and clarity(trials.values()) > least:
            octave = next_octave({octave: trial.gain for octave, trial in trials.items()}, rule)
            if octave is None:
                break
            trials[octave] = trial(octave)
        return sorted(trials.values(), key=lambda trial: trial.lr)

    def losses_after(self, lr: float, steps: list[Batch], judges: list[Batch], rule: TrialRule) -> np.ndarray:
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


def next_octave(gains: Mapping[int, float], rule: TrialRule = SHORT) -> int | None:
    """The trial to try next, until the one to choose has neighbours on both sides, near enough.

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


def _chosen(gains: np.ndarray, rule: TrialRule) -> int:
    """Place of the trial that the answer comes from, by the gains of ascending ones."""
    if rule.takes_best:
        return int(gains.argmax())
    return int(np.argmax(gains >= SUFFICIENT * gains.max()))


def clarity(trials: Iterable[Trial]) -> float:
    """Gain of the best trial in standard errors; zero if there is none."""
    best = max(trials, key=lambda trial: trial.gain)
    return max(best.gain, 0.0) / max(best.error, sys.float_info.min)


def longest(trials: Sequence[Trial]) -> list[Trial]:
    """The trials to read the answer from, ascending in ``lr``."""
    return [trial for trial in trials if trial.num_steps == trials[-1].num_steps]


def read(trials: Sequence[Trial], schedule: str, scale: float) -> tuple[float, list[str]]:
    """The learning rate of the run from ascending trials of one rule, and the kinds of doubts they leave.

    Where no trial gained for sure, it is half of the lowest one tried.
    """
    rule, gains = RULES[trials[0].num_steps], np.array([trial.gain for trial in trials])
    logs, best, place = [math.log(trial.lr) for trial in trials], gains.max(), _chosen(gains, rule)
    if clarity(trials) < BLIND:
        return trials[0].lr / 2, ["unknown"]
    # Where the gain, linear in log lr between trials, first reaches its share of the best.
    reached = np.maximum.accumulate(np.maximum(gains, -best)) / best
    sufficient = math.exp(np.interp(SUFFICIENT, reached, logs))
    lr = rule.factor * sufficient
    if rule.takes_best:
        lr = rule.factor * trials[place].lr
    elif schedule == "constant":  # a long run at one rate: half way, in logarithms, to the scale
        lr = math.sqrt(sufficient * scale)
    half = np.interp(math.log(lr / 2), logs, np.maximum(gains, 0.0))
    doubts = {
        "noise": rule is DOUBLED or clarity(trials) < CLEAR,
        "edge": not 0 < place < len(trials) - 1,
        "flat": not rule.takes_best and half >= NEARLY * best,  # trials so short hardly tell rates apart
    }
    return lr, [kind for kind, holds in doubts.items() if holds]
