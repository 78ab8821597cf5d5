"""The next step after one run: a table of named conditions on the facts, read from the top.

The loss curve speaks first, then what steps do, then the start. The limits were chosen on the development
tasks of ``benchmarks/advice``, where the mean regret hardly depends on any of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from curvestep.advice.outcome import Outcome
from curvestep.bracket import LEAST_FALL
from curvestep.fit.samples import LEAST_ROWS
from curvestep.optimizer_family import Family

KEEP, RAISE, LOWER, DIVERGED, STUCK = "keep", "raise", "lower", "diverged", "stuck"
DATA, CANNOT_TELL, TAKE = "data", "cannot tell", "take"

NEXT = 3.0  # factor on lr, within which one run cannot rank
FAR = 10.0  # factor on lr where a run was lost or is stuck, and margin below what the start allowed
GOOD_START = 2.0  # largest working step at the start over the step of the best lr, about
HARDLY = 0.9  # of the first loss: no progress to speak of
SHORT_KAPPA = 0.1  # change of the gradient over a step, relative to its norm, below which steps are short
GOOD_KAPPA = NEXT * SHORT_KAPPA


@dataclass(frozen=True)
class Condition:
    """A line of the table."""

    kind: str  # by which words and tests know it
    action: str
    holds: Callable[[Outcome], bool]  # asked of the facts; one that is not known holds for nothing
    factor: Callable[[Outcome], float] = lambda run: math.nan  # on lr; NaN for no number


@dataclass(frozen=True)
class Answer:
    """The line of the table that holds: its name, its action, and lr to run next; None for no number."""

    kind: str
    action: str
    lr: float | None


def decide(run: Outcome) -> Answer:
    """The next step after a run: the first line of :data:`TABLE` that holds."""
    found = next(line for line in TABLE if line.holds(run))
    lr = run.lr * found.factor(run)
    return Answer(found.kind, found.action, lr if math.isfinite(lr) else None)


def was_falling(run: Outcome) -> bool:
    """Whether the loss fell and steps worked, as far as they were finite."""
    return run.last_loss < run.first_loss and run.kappa <= 1


def rise(run: Outcome, loss: float) -> float:
    """How far a loss lies above the first, in units of the first."""
    return (loss - run.first_loss) / max(abs(run.first_loss), 1e-300)


def hardly_fell(run: Outcome) -> bool:
    """Whether the last losses are about as high as the first."""
    return rise(run, run.last_loss) > HARDLY - 1


def rose_far(run: Outcome) -> bool:
    """Whether the last losses, or that after the last step, are three times the first."""
    return rise(run, run.last_loss) > NEXT - 1 or rise(run, run.end_loss) > NEXT - 1


def came_back_in_part(run: Outcome) -> bool:
    """Whether the loss rose to three times the first, and did not fall to half of it."""
    return rise(run, run.highest_loss) > NEXT - 1 and rise(run, run.last_loss) > -1 / 2


def change(run: Outcome) -> float:
    """κ; with momentum relative to the gradient's part along the step, for the rest of it is noise."""
    if run.family is Family.MOMENTUM:
        return run.kappa / max(run.agreement, LEAST_FALL)
    return run.kappa


def wastes_steps(run: Outcome) -> bool:
    """Whether steps hardly lower the loss of their own batch, and the loss has not fallen to half."""
    return run.efficiency < LEAST_FALL and rise(run, run.last_loss) > -1 / 2


def recovered(run: Outcome) -> bool:
    """Whether the loss fell to half, and steps lower their own batch's by half of what the slope promises."""
    return rise(run, run.last_loss) <= -1 / 2 and run.efficiency >= 1 / 2


def long_at_first(run: Outcome) -> bool:
    """Whether the start allowed clearly less than the step of its lr; a warm-up takes a peak beyond that."""
    if run.scheduled:
        return run.start_factor < 1 / FAR
    return run.start_factor < 1 / GOOD_START


def short_at_first(run: Outcome) -> bool:
    """Whether the start allowed more than twice the step of a good run, and steps are rather short still.

    Of Adam at a constant rate the start says nothing: its first steps are its longest.
    """
    says = run.scheduled or not run.family.is_adaptive
    return says and run.start_factor > 2 * GOOD_START and change(run) < GOOD_KAPPA


def far_below(run: Outcome) -> float:
    """A tenth of what the start allowed, or of lr if that is less; a thousandth where it is not known."""
    if math.isnan(run.start_factor):
        return 1 / FAR**3
    return min(run.start_factor, 1.0) / FAR


def as_started(run: Outcome) -> float:
    """To what the start allowed while steps stay rather short; three times at least, a hundred at most."""
    if math.isnan(run.start_factor):
        return NEXT
    return max(NEXT, min(run.start_factor / GOOD_START, GOOD_KAPPA / change(run), FAR**2))


def half_way(run: Outcome) -> float:
    """Half way, on a log scale, to what the start allowed; a third at most."""
    if math.isnan(run.start_factor):
        return 1 / NEXT
    return min(1 / NEXT, math.sqrt(run.start_factor))


# fmt: off
TABLE = (
    Condition("no-rows", CANNOT_TELL, lambda run: not (run.num_losses or run.lost_at or run.num_rows)),
    Condition("no-loss", CANNOT_TELL, lambda run: not (run.num_losses or run.lost_at)),
    Condition("bad-batch", DATA, lambda run: run.lost_at is not None and was_falling(run)),
    Condition("not-finite", DIVERGED, lambda run: run.lost_at is not None, far_below),
    Condition("rose-far", DIVERGED, rose_far, far_below),
    Condition("no-step", CANNOT_TELL, lambda run: run.num_rows == 0 and run.num_losses >= LEAST_ROWS),
    Condition("failed-rows", CANNOT_TELL, lambda run: run.num_rows < LEAST_ROWS and bool(run.failure)),
    Condition("few-rows", CANNOT_TELL, lambda run: run.num_rows < LEAST_ROWS),
    Condition("no-lr", CANNOT_TELL, lambda run: math.isnan(run.lr)),
    Condition("eval-mode", CANNOT_TELL, lambda run: run.in_eval_mode),
    Condition("rose-and-stuck", STUCK, came_back_in_part, far_below),
    Condition("long-and-stuck", STUCK, lambda run: hardly_fell(run) and run.start_factor < 1, far_below),
    Condition("inefficient", LOWER, wastes_steps, half_way),
    Condition("long-first-steps", LOWER, lambda run: long_at_first(run) and not recovered(run), half_way),
    Condition("short-steps", RAISE, lambda run: change(run) < SHORT_KAPPA, as_started),
    Condition("short-first-steps", RAISE, short_at_first, lambda run: NEXT),
    Condition("no-progress", STUCK, lambda run: hardly_fell(run) and run.should_have_fallen and not run.fell),
    Condition("no-sign", KEEP, lambda run: True, lambda run: 1.0),
)
# fmt: on
