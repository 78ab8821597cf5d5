"""The next step after one run: a table of named conditions on the facts, read from the top.

The loss curve speaks first, then what steps do, then the start. The limits were chosen on the development
tasks of ``reproduction/benchmarks/advice``, where the mean regret hardly depends on any of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from curvestep.advice.outcome import Outcome
from curvestep.steps import LEAST_FALL
from curvestep.trace.history import finite_min
from curvestep.trace.schema import LEAST_ROWS

RAISE = "raise"
LOWER = "lower"
NO_SIGN = "no sign"  # lr is not far too high or too low, as far as one run can tell
DIVERGED = "diverged"
STUCK = "stuck"
DATA = "data"  # a batch or the loss was not finite
CANNOT_TELL = "cannot tell"
TAKE = "take"  # one of several settings
FACTS = "facts"  # of a trainer's log, which cannot judge lr

# Where an answer moves lr.
UP = "up"
SAME = "same"
DOWN = "down"
NOWHERE = "nowhere"  # lr is not the question

LR_FACTOR = 3.0  # factor on lr, within which one run cannot rank
LARGE_FACTOR = 10.0  # the most by which one answer raises lr; how far beyond its start a run may not go
STABLE_SHARE = 0.5  # of the limit of stability: steps see half of the largest sharpness at least, as a rule
LEAST_RAISE = 2.0  # room below that limit, without which lr is not raised
GOOD_WASTE = 0.3  # share of the predicted fall that curvature takes back at a good lr, about
MOSTLY_CLIPPED = 0.8  # share of the steps
MIN_PROGRESS = 0.9  # of the first loss: no progress to speak of
UNKNOWN_START = 1e-3  # factor on lr of a run that diverged, where the rows do not begin with it


class Condition(NamedTuple):
    """A line of the table."""

    kind: str  # by which words and tests know it
    action: str
    holds: Callable[[Outcome], bool]  # a fact that is not known is NaN, and holds for nothing
    factor: Callable[[Outcome], float] = lambda run: math.nan  # on lr; NaN for no number
    by_progress: bool = False  # whether it takes the loss for a measure of progress
    widens: bool = False  # whether it raises max_norm in place of lr

    @property
    def direction(self) -> str:
        """Where it moves lr."""
        if self.action in (LOWER, DIVERGED) or (self.action == STUCK and self.kind != "no-progress"):
            return DOWN
        return {RAISE: UP, NO_SIGN: SAME}.get(self.action, NOWHERE)

    def next_lr(self, run: Outcome) -> float | None:
        """What to run next; None for no number. A new lr stays below what the rows show to be stable."""
        lr = run.lr * self.factor(run)
        if self.action != NO_SIGN and lr > run.stable_lr:
            lr = run.stable_lr
        return lr if math.isfinite(lr) else None

    def next_max_norm(self, run: Outcome) -> float:
        """The threshold that goes with the next lr."""
        return run.max_norm * raised(run, LARGE_FACTOR) if self.widens else run.max_norm


def decide(run: Outcome, *, progress: bool = True) -> Condition:
    """The first line of the table that holds.

    Lines that judge by the fall of the loss are left out without ``progress``, or if it starts below zero.
    """
    progress = progress and not run.starts_below_zero
    return next(line for line in TABLE if (progress or not line.by_progress) and line.holds(run))


def times_longer(run: Outcome) -> float:
    """How many times longer steps could be: the smallest of three gauges, each about 1 at a good lr.

    They are the largest working step at the start, 1/κ, and what curvature takes back of the predicted fall.
    """
    waste = max(1 - run.efficiency, 1e-9)
    gauges = np.array([run.start_factor, 1 / max(run.kappa, 1e-9), GOOD_WASTE / waste])
    return finite_min(gauges)


def most_raised(run: Outcome) -> float:
    """The factor up to which lr may be raised: ten, and half of what the sharpness of every row allows.

    Rows that begin later no longer show the directions that were worked off before, unless they measured
    the sharpness over all directions.
    """
    if not (run.from_start or run.has_spectral):
        return 1.0
    most = LARGE_FACTOR if run.from_start else LR_FACTOR
    if math.isnan(run.stable_lr):
        return LR_FACTOR
    return min(most, STABLE_SHARE * run.stable_lr / run.lr)


def raised(run: Outcome, most: float) -> float:
    """The factor that the gauges allow, three at least, but no more than ``most``."""
    return min(max(LR_FACTOR, times_longer(run)), most)


def is_short_by_clipping(run: Outcome) -> bool:
    """Whether nearly every step has the length lr x max_norm, from the start on."""
    is_plain = run.threshold == "max_norm" and not run.family.is_adaptive
    return is_plain and run.clipped >= MOSTLY_CLIPPED and run.from_start


def long_at_first(run: Outcome) -> bool:
    """Whether the start allowed much less than the step of its lr; a run that has recovered may be longer."""
    # A warm-up takes the peak beyond what the start allowed.
    recovered = run.scheduled or (run.rise <= -1 / 2 and run.efficiency >= 1 / 2)
    return run.start_factor < (1 / LARGE_FACTOR if recovered else 1 / 2)


def lowered(run: Outcome) -> float:
    """To twice what the start allowed; a third at most, and where it is not known."""
    if math.isnan(run.start_factor):
        return 1 / LR_FACTOR
    return min(1 / LR_FACTOR, 2 * run.start_factor)


def far_below(run: Outcome) -> float:
    """To half of what the start allowed; a third at most."""
    if math.isnan(run.start_factor):
        return UNKNOWN_START
    return min(1 / LR_FACTOR, run.start_factor / 2)


TABLE = (
    Condition("no-rows", CANNOT_TELL, lambda run: not (run.num_losses or run.nonfinite_at or run.num_rows)),
    Condition("no-loss", CANNOT_TELL, lambda run: not (run.num_losses or run.nonfinite_at)),
    Condition(
        "bad-batch", DATA, lambda run: run.nonfinite_at is not None and run.rise < 0 and run.kappa <= 1
    ),
    Condition("not-finite", DIVERGED, lambda run: run.nonfinite_at is not None, far_below),
    Condition(
        "rose-far",
        DIVERGED,
        lambda run: max(run.rise, run.end_rise) > (LR_FACTOR if run.from_start else LARGE_FACTOR) - 1,
        far_below,
        by_progress=True,
    ),
    Condition("no-step", CANNOT_TELL, lambda run: run.num_rows == 0 and run.num_losses >= LEAST_ROWS),
    Condition("failed-rows", CANNOT_TELL, lambda run: run.num_rows < LEAST_ROWS and bool(run.failure)),
    Condition("few-rows", CANNOT_TELL, lambda run: run.num_rows < LEAST_ROWS),
    Condition("no-lr", CANNOT_TELL, lambda run: math.isnan(run.lr)),
    Condition("eval-mode", CANNOT_TELL, lambda run: run.in_eval_mode),
    # It rose to three times the first loss, and did not fall to half of it.
    Condition(
        "rose-and-stuck",
        STUCK,
        lambda run: run.peak_rise > LR_FACTOR - 1 and run.rise > -1 / 2,
        far_below,
        by_progress=True,
    ),
    Condition(
        "long-and-stuck",
        STUCK,
        lambda run: run.rise > MIN_PROGRESS - 1 and run.start_factor < 1,
        far_below,
        by_progress=True,
    ),
    # Steps hardly lower the loss of their own batch, and it has not fallen to half.
    Condition("inefficient", LOWER, lambda run: run.efficiency < LEAST_FALL and run.rise > -1 / 2, lowered),
    Condition("long-first-steps", LOWER, long_at_first, lowered, by_progress=True),
    Condition(
        "no-progress",
        STUCK,
        lambda run: run.rise > MIN_PROGRESS - 1 and run.stood_still,
        by_progress=True,
    ),
    Condition(
        "short-steps",
        RAISE,
        lambda run: times_longer(run) >= LR_FACTOR and most_raised(run) >= LEAST_RAISE,
        lambda run: raised(run, most_raised(run)),
        by_progress=True,
    ),
    Condition(
        "short-clipped-steps",
        RAISE,
        lambda run: times_longer(run) >= LR_FACTOR and is_short_by_clipping(run),
        lambda run: 1.0,
        by_progress=True,
        widens=True,
    ),
    Condition("no-sign", NO_SIGN, lambda run: True, lambda run: 1.0),
)
