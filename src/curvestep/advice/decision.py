"""The next step after one run: a table of named conditions on the facts, read from the top.

The loss curve speaks first, then what steps do, then the start. The limits were chosen on the development
tasks of ``reproduction/benchmarks/advice``, where the mean regret hardly depends on any of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from curvestep.advice.outcome import Outcome
from curvestep.optimizer_family import Family
from curvestep.steps import LEAST_FALL
from curvestep.trace.schema import LEAST_ROWS

KEEP = "keep"
RAISE = "raise"
LOWER = "lower"
DIVERGED = "diverged"
STUCK = "stuck"
DATA = "data"  # a batch or the loss was not finite
CANNOT_TELL = "cannot tell"
TAKE = "take"  # one of several settings

# Where an answer moves lr.
UP = "up"
SAME = "same"
DOWN = "down"
NOWHERE = "nowhere"  # lr is not the question

LR_FACTOR = 3.0  # factor on lr, within which one run cannot rank
LARGE_FACTOR = 10.0  # factor on lr where a run diverged or is stuck, and margin below what the start allowed
GOOD_START = 2.0  # largest working step at the start over the step of the best lr, about
MIN_PROGRESS = 0.9  # of the first loss: no progress to speak of
SHORT_KAPPA = 0.1  # change of the gradient over a step, relative to its norm, below which steps are short
GOOD_KAPPA = LR_FACTOR * SHORT_KAPPA


class Condition(NamedTuple):
    """A line of the table."""

    kind: str  # by which words and tests know it
    action: str
    holds: Callable[[Outcome], bool]  # a fact that is not known is NaN, and holds for nothing
    factor: Callable[[Outcome], float] = lambda run: math.nan  # on lr; NaN for no number

    @property
    def direction(self) -> str:
        """Where it moves lr."""
        if self.action in (LOWER, DIVERGED) or (self.action == STUCK and self.kind != "no-progress"):
            return DOWN
        return {RAISE: UP, KEEP: SAME}.get(self.action, NOWHERE)

    def next_lr(self, run: Outcome) -> float | None:
        """What to run next; None for no number."""
        lr = run.lr * self.factor(run)
        return lr if math.isfinite(lr) else None


def decide(run: Outcome) -> Condition:
    """The first line of the table that holds."""
    return next(line for line in TABLE if line.holds(run))


def change(run: Outcome) -> float:
    """κ; with momentum relative to the gradient's part along the step, for the rest of it is noise."""
    if run.family is Family.MOMENTUM:
        return run.kappa / max(run.agreement, LEAST_FALL)
    return run.kappa


def long_at_first(run: Outcome) -> bool:
    """Whether the start allowed clearly less than the step of its lr, and the run has not recovered."""
    limit = (
        LARGE_FACTOR if run.scheduled else GOOD_START
    )  # a warm-up takes a peak beyond what the start allowed
    recovered = run.rise <= -1 / 2 and run.efficiency >= 1 / 2
    return run.start_factor < 1 / limit and not recovered


def short_at_first(run: Outcome) -> bool:
    """Whether the start allowed more than twice the step of a good run, and steps are rather short still."""
    if run.family.is_adaptive and not run.scheduled:
        return False  # the first steps of Adam at a constant rate are its longest
    return run.start_factor > 2 * GOOD_START and change(run) < GOOD_KAPPA


def far_below(run: Outcome) -> float:
    """A tenth of what the start allowed, or of lr if that is less; a thousandth where it is not known."""
    if math.isnan(run.start_factor):
        return 1 / LARGE_FACTOR**3
    return min(run.start_factor, 1.0) / LARGE_FACTOR


def as_started(run: Outcome) -> float:
    """To what the start allowed while steps stay rather short; three times at least, a hundred at most."""
    if math.isnan(run.start_factor):
        return LR_FACTOR
    by_start = run.start_factor / GOOD_START
    by_kappa = GOOD_KAPPA / max(change(run), 1e-300)
    return max(LR_FACTOR, min(by_start, by_kappa, LARGE_FACTOR**2))


def half_way(run: Outcome) -> float:
    """Half way, on a log scale, to what the start allowed; a third at most, and where it is not known."""
    if math.isnan(run.start_factor):
        return 1 / LR_FACTOR
    return min(1 / LR_FACTOR, math.sqrt(run.start_factor))


TABLE = (
    Condition("no-rows", CANNOT_TELL, lambda run: not (run.num_losses or run.nonfinite_at or run.num_rows)),
    Condition("no-loss", CANNOT_TELL, lambda run: not (run.num_losses or run.nonfinite_at)),
    Condition(
        "bad-batch", DATA, lambda run: run.nonfinite_at is not None and run.rise < 0 and run.kappa <= 1
    ),
    Condition("not-finite", DIVERGED, lambda run: run.nonfinite_at is not None, far_below),
    Condition(
        "rose-far", DIVERGED, lambda run: run.rise > LR_FACTOR - 1 or run.end_rise > LR_FACTOR - 1, far_below
    ),
    Condition("no-step", CANNOT_TELL, lambda run: run.num_rows == 0 and run.num_losses >= LEAST_ROWS),
    Condition("failed-rows", CANNOT_TELL, lambda run: run.num_rows < LEAST_ROWS and bool(run.failure)),
    Condition("few-rows", CANNOT_TELL, lambda run: run.num_rows < LEAST_ROWS),
    Condition("no-lr", CANNOT_TELL, lambda run: math.isnan(run.lr)),
    Condition("eval-mode", CANNOT_TELL, lambda run: run.in_eval_mode),
    # It rose to three times the first loss, and did not fall to half of it.
    Condition(
        "rose-and-stuck", STUCK, lambda run: run.peak_rise > LR_FACTOR - 1 and run.rise > -1 / 2, far_below
    ),
    Condition(
        "long-and-stuck", STUCK, lambda run: run.rise > MIN_PROGRESS - 1 and run.start_factor < 1, far_below
    ),
    # Steps hardly lower the loss of their own batch, and it has not fallen to half.
    Condition("inefficient", LOWER, lambda run: run.efficiency < LEAST_FALL and run.rise > -1 / 2, half_way),
    Condition("long-first-steps", LOWER, long_at_first, half_way),
    Condition("short-steps", RAISE, lambda run: change(run) < SHORT_KAPPA, as_started),
    Condition("short-first-steps", RAISE, short_at_first, lambda run: LR_FACTOR),
    Condition("no-progress", STUCK, lambda run: run.rise > MIN_PROGRESS - 1 and run.stood_still),
    Condition("no-sign", KEEP, lambda run: True, lambda run: 1.0),
)
