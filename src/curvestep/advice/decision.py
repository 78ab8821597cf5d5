"""What to run next after one run: the same setting, shorter steps, or longer ones.

The yield of a step says which (:mod:`curvestep.advice.outcome`), the first rows how far: where training
starts, curvature has not adapted to the step, and the step that changes the gradient by its own norm is the
one to take. The constants were chosen on the development tasks of ``benchmarks/advice.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from curvestep.advice.outcome import Method, Outcome
from curvestep.fit.samples import LEAST_ROWS

FAR = 3.0  # times the step that was run: where the start's is further, steps are too short
OVER = 0.5  # times the step that was run: where the start's is nearer, they may be too long
WORTH = 0.4  # yield from which longer steps are worth a try, if the start allows them
SHORT = 0.75  # and if the start was not measured
LONG = 0.2  # yield below which steps are too long
NOISY = 5.0  # times the scatter of the loss, that steps took off their own batches without lowering it
MOST = 3.0  # times the step that was run: further than that no trace can vouch for
ENOUGH = 0.8  # times the step that was run: where the start's is no shorter, it was not too long there
CLIP_AT = 0.6  # of the start's gradient norm, after a lost run: calibrate's, where batches may not agree
ONE_BATCH = (
    0.9  # of the safe step, where only one batch measured it: shorter costs little, longer may be lost
)
LESS = 3.0  # by which lr is divided where nothing says how far

INERT = 0.9  # share of clipped steps from which lr no longer matters by itself

KEEP, RAISE, LOWER, RESCUE, TRY = "keep", "raise", "lower", "rescue", "try"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The setting to run next, and why."""

    action: str  # one of KEEP, RAISE, LOWER, RESCUE, TRY
    lr: float
    max_norm: float
    why: str


def decide(outcome: Outcome, *, most_factor: float = math.inf) -> Decision:
    """What to do after a run.

    Args:
        outcome: How it went.
        most_factor: Most by which its steps may become longer; never more than three.
    """
    if outcome.diverged_at is not None:
        return shorter(outcome, RESCUE, "")
    gained, start = step_yield(outcome), outcome.start
    keep = Decision(action=KEEP, lr=outcome.lr, max_norm=outcome.max_norm, why=_yielded(gained))
    if outcome.rise is not None:
        first, last = outcome.rise
        why = f"the loss rose, from {first:.3g} to {last:.3g}: steps were too long, or batches too noisy"
        return shorter(outcome, LOWER, why)
    factor = start.factor if start is not None else math.inf if gained > SHORT else math.nan
    # Short steps that took much off their own batches and nothing off the loss followed the noise.
    if outcome.fell is False and not (factor > FAR and not outcome.own_fall > NOISY * outcome.scatter):
        return shorter(outcome, LOWER, "the loss did not fall below its first value")
    if gained < LONG and not factor > OVER:
        return shorter(outcome, LOWER, f"{_yielded(gained)}: steps are too long")
    if factor > FAR and gained > WORTH:
        if outcome.fell and outcome.falling is False:
            when = " near the peak of lr" if outcome.scheduled else ""
            why = f"{keep.why}, but the loss has stopped falling{when}: noise may be the limit"
            return replace(keep, why=why)
        return longer(outcome, min(factor, most_factor), f"{_yielded(gained)}: steps are short")
    return keep


def room(method: Method) -> float:
    """By how much lr may grow until half the edge of stability in the optimizer's own metric is reached."""
    largest = max(method.spectral, method.product if math.isfinite(method.product) else 0.0)
    return 0.5 * method.limit / largest if largest > 0 and math.isfinite(method.limit) else math.inf


def untold(outcome: Outcome) -> Decision:
    """From too few rows to judge a run: towards the step that the start measured, by three at most."""
    start, lr, max_norm = outcome.start, outcome.lr, outcome.max_norm
    why = (
        f"measured rows: {outcome.num_rows}. A run is judged by {LEAST_ROWS} or more: let it go on, or probe "
        "more often"
    )
    if start is not None and not 0.5 <= start.factor <= 2:
        lr *= min(max(start.factor, 1 / LESS), MOST)
        if not outcome.method.normalized:
            max_norm = min(max_norm, start.grad_norm)
    return Decision(action=TRY, lr=lr, max_norm=max_norm, why=why)


def step_yield(outcome: Outcome) -> float:
    """The yield that was measured; else 1 − κ/2, which it is at least on a parabola."""
    return outcome.step_yield if math.isfinite(outcome.step_yield) else 1 - outcome.kappa / 2


def longer(outcome: Outcome, most_factor: float, why: str) -> Decision:
    """Steps up to three times as long, if the start and ``most_factor`` allow them."""
    start, factor = outcome.start, min(MOST, most_factor)
    if factor < 1.5:
        return Decision(action=KEEP, lr=outcome.lr, max_norm=outcome.max_norm, why=why)
    if outcome.clipped > 0.5:  # the threshold is what makes them short
        return Decision(action=RAISE, lr=outcome.lr, max_norm=outcome.max_norm * factor, why=why)
    # Calibrate's trust radius: no step longer than what the start's gradient gets.
    guard = outcome.grad_norm if start is None else start.grad_norm
    max_norm = outcome.max_norm if math.isfinite(outcome.max_norm) else guard
    return Decision(action=RAISE, lr=outcome.lr * factor, max_norm=max_norm, why=why)


def shorter(outcome: Outcome, action: str, why: str) -> Decision:
    """The step that the start measured; at most a third of today's, and clipped below the start's norm."""
    start, lr, max_norm = outcome.start, outcome.lr / LESS, outcome.max_norm
    if outcome.rise is not None and not (start is not None and start.searched):
        first, last = outcome.rise
        lr = outcome.lr / min(max(last / first if first > 0 else LESS, LESS), 10.0)
    if start is not None and outcome.lr > 0:
        if action == RESCUE and outcome.rise is None and start.factor > ENOUGH and math.isinf(max_norm):
            lr = outcome.lr  # the start bears this step: what the run lacked is clipping
        lr = min(lr, ONE_BATCH * start.lr if start.searched and start.batches == 1 else start.lr)
        if outcome.method.normalized:  # a smaller offset would make steps longer
            return Decision(action=action, lr=lr, max_norm=max_norm, why=why)
        # Adam divides by the gradient's own size: a threshold below its usual norms would be no limit.
        max_norm = min(max_norm, (1.0 if outcome.method.adaptive else CLIP_AT) * start.grad_norm)
    return Decision(action=action, lr=lr, max_norm=max_norm, why=why)


def _yielded(gained: float) -> str:
    return f"a step lowers the loss of its own batch by {gained:.0%} of what its slope promises"
