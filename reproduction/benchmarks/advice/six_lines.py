"""A rule of six decisions that advise has to beat; it reads the rows of a trace and nothing else of advise.

Its numbers were set by eye on other tasks, and do not change when advise does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from curvestep.trace.trace import Trace

START_ROWS = 5


@dataclass(frozen=True)
class Facts:
    """What the rule looks at.

    Args:
        losses: Of all rows.
        kappa: Change of the gradient over a step by its norm: median of late rows near the peak rate.
        efficiency: Fall of a batch's loss over what its slope promises, in the same rows.
        start: The largest step that works at the start over the step of the peak rate there.
    """

    losses: np.ndarray
    kappa: float
    efficiency: float
    start: float


def six_lines(trace: Trace) -> tuple[str, float]:
    """What the rule says of a run, and its factor on the learning rate."""
    return decide(facts_of(trace))


def decide(facts: Facts) -> tuple[str, float]:
    """The six decisions, in their order.

    Example:
        >>> falling = np.linspace(2.0, 0.5, 30)
        >>> decide(Facts(falling, kappa=0.02, efficiency=0.9, start=1.0))
        ('raise', 10.0)
        >>> decide(Facts(falling, kappa=0.5, efficiency=0.9, start=1.0))
        ('keep', 1.0)
        >>> decide(Facts(falling * np.array([1.0] * 29 + [np.nan]), kappa=3.0, efficiency=0.1, start=0.01))
        ('diverged', 0.05)
    """
    sound = facts.losses[np.isfinite(facts.losses)]
    first = facts.losses[0]
    highest = sound.max()
    last = sound[-max(5, len(facts.losses) // 10) :].mean()
    if len(sound) < len(facts.losses) or highest > 8 * first:
        return "diverged", min(max(5 * facts.start, 0.003), 0.1)
    if highest > 1.3 * first and last > 0.7 * first:
        return "stuck", 0.1 if facts.start > 0.02 else max(5 * facts.start, 0.01)
    if last > 0.88 * first and facts.kappa > 0.1:
        return "stuck", 0.1
    if highest > 2 * first or facts.efficiency < 0.2:
        return "lower", 1 / 3
    if facts.kappa < 0.1:
        return "raise", min(max(0.25 / facts.kappa, 3.0), 10.0)
    return "keep", 1.0


def facts_of(trace: Trace) -> Facts:
    """The facts in the rows of a trace."""
    lr = trace.column("lr")
    length = trace.column("step_norm")
    slope = trace.column("grad_norm")
    with np.errstate(all="ignore"):  # the numbers of a lost run overflow
        kappa = trace.column("kappa")
        fall = trace.column("loss") - trace.column("loss_after")
        cosine = trace.column("cosine")
        promise = np.where(np.isfinite(cosine), cosine, 1.0) * slope * length
        near = np.flatnonzero(np.isfinite(kappa) & (lr >= np.nanmedian(lr)))
        steps = trace.column("step")[near]
        is_late = 2 * steps >= steps.min(initial=math.inf) + steps.max(initial=0.0)
        late = near[-max(START_ROWS, is_late.sum()) :]
        efficiency = _median(fall[late]) / _median(promise[late])
        return Facts(trace.column("loss"), _median(kappa[late]), efficiency, _start(trace))


def _median(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else math.nan


def _start(trace: Trace) -> float:
    """Median over the first rows, up to the first whose step is too long; kappa is linear in the step."""
    lr = trace.column("lr")
    momentum = float(trace.header.get("momentum") or 0.0)
    found = []
    for row in range(min(START_ROWS, len(trace))):
        fractions = trace.column("fractions")[row]
        unit = trace.column("step_norm")[row] / trace.column("grad_norm")[row]
        kappa = trace.column("secants")[row] * fractions * unit
        if not np.isfinite(kappa).all() or kappa[0] <= 0:
            break
        built_up = 1 - momentum ** (trace.column("step")[row] + 1)
        found.append(_works(fractions, kappa) * built_up * lr[row] / np.nanmax(lr))
        if kappa[-1] > 1:
            break
    return float(np.median(found)) if found else 0.0


def _works(fractions: np.ndarray, kappa: np.ndarray) -> float:
    if kappa[-1] <= 1:
        return 1 / float(kappa[-1])
    if kappa[0] > 1:
        return float(fractions[0] / kappa[0])
    return math.exp(float(np.interp(0.0, np.log(kappa), np.log(fractions))))
