"""Several runs of one task, or the stages of one run: what was set, how far the loss fell, what to try next.

Curvature adapts to the step: a run with a small step walks into sharp regions where only a small step is
stable. So curvature alone cannot say which setting is best; how fast the loss falls can.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from curvestep.fit.samples import Points, usable_points
from curvestep.smoothness.trace import Trace

_LEAST_STAGE = 10  # rows that make a change of lr a stage of its own


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One run, or one stage of a run: its setting and how it went."""

    lr: float
    max_norm: float  # inf if no step was clipped
    points: Points | None  # None if the run ended before it could be measured
    diverged: bool
    score: float  # lower is better: the loss at the end, or the fall per step for a stage
    error: float  # standard error of the score
    ended_early: bool = False  # before the step at which runs are compared, and not because it diverged

    @property
    def words(self) -> str:
        """The setting as a person writes it."""
        clip = "no clipping" if math.isinf(self.max_norm) else f"max_norm {self.max_norm:.3g}"
        return f"lr {self.lr:.3g}, {clip}"


def settings_of(traces: tuple[Trace, ...]) -> list[Setting]:
    """One setting a trace; for a single trace whose lr was changed in stages, one a stage."""
    if len(traces) == 1:
        points = usable_points(traces[0])
        return [_stage(part) for part in _stages(points)]
    horizon = _common_end(traces)
    return [_whole(trace, horizon) for trace in traces]


def best_of(settings: list[Setting]) -> Setting:
    """The largest step among the settings whose score is within its error of the best.

    Raises:
        ValueError: If no run both kept its loss finite and recorded it.
    """
    whole = [s for s in settings if not (s.diverged or s.ended_early) and s.points is not None]
    alive = [s for s in whole if math.isfinite(s.score)]
    if not alive and whole:
        raise ValueError(
            "no run recorded its loss, which settings are compared by. Hand it to the probe: "
            "`with probe(closure, loss=loss): ...`."
        )
    if not alive:
        raise ValueError("no run kept a finite loss, so none can be recommended. Start from a smaller lr.")
    least = min(alive, key=lambda s: s.score)
    near = [s for s in alive if s.score <= least.score + max(least.error, s.error)]
    return max(near, key=lambda s: (s.lr, s.max_norm))


def next_setting(best: Setting, settings: list[Setting]) -> dict[str, float] | None:
    """What to try if ``best`` lies at the edge of what was tried; None if both sides were seen.

    A larger lr is always tried with clipping: at the best run's threshold or, if it had none, at its median
    gradient norm. Without clipping it would most likely diverge, which says nothing about it with clipping.
    Where lr lies inside and several thresholds were tried with it, the threshold may still be at their edge.
    """
    assert best.points is not None
    tried = sorted({s.lr for s in settings if math.isfinite(s.lr)})
    above = [s for s in settings if s.lr > best.lr]
    clipped = best.max_norm if math.isfinite(best.max_norm) else float(np.median(best.points.grad_norm))
    ratio = _ratio(tried)
    if not above:
        return {"lr": best.lr * ratio, "max_norm": clipped}
    if all(s.diverged and math.isinf(s.max_norm) for s in above):
        return {"lr": min(s.lr for s in above), "max_norm": clipped}
    if best.lr == tried[0]:
        return {"lr": best.lr / ratio, "max_norm": best.max_norm}
    threshold = _threshold_beyond(best, [s.max_norm for s in settings if s.lr == best.lr])
    return None if threshold is None else {"lr": best.lr, "max_norm": threshold}


def neighbours(value: float, tried: list[float]) -> tuple[float, float]:
    """The tried values below and above ``value``: the optimum lies between them, if it lies inside.

    Example:
        >>> neighbours(10.0, [1.0, 3.0, 10.0, 30.0]), neighbours(30.0, [1.0, 30.0])
        ((3.0, 30.0), (1.0, 30.0))
    """
    below = [other for other in tried if other < value]
    above = [other for other in tried if other > value]
    return max(below, default=value), min(above, default=value)


def _threshold_beyond(best: Setting, tried: list[float]) -> float | None:
    """The next threshold outwards if several were tried and the best lies at their edge."""
    lower = [m for m in tried if m < best.max_norm * (1 - 1e-3)]  # measured, so equal ones differ by rounding
    higher = [m for m in tried if m > best.max_norm * (1 + 1e-3)]
    if bool(lower) == bool(higher) or math.isinf(best.max_norm):
        return None
    ratio = _ratio(sorted(m for m in (*lower, best.max_norm, *higher) if math.isfinite(m)))
    return best.max_norm * ratio if lower else best.max_norm / ratio


def _ratio(tried: list[float]) -> float:
    steps = [b / a for a, b in pairwise(tried)]
    return float(np.clip(np.median(steps), 2.0, 4.0)) if steps else 3.0


def _whole(trace: Trace, horizon: float) -> Setting:
    losses = trace.column("loss")
    try:
        points = usable_points(trace)
    except ValueError:
        points = None
    lr = float(np.nanmedian(trace.column("lr"))) if np.isfinite(trace.column("lr")).any() else math.nan
    finite = losses[np.isfinite(losses) & (trace.column("step") <= horizon)]
    score, error = _level(finite)
    blown_up = len(finite) == 0 or not _ends_finite(trace) or finite[-1] > 1.5 * finite[0]
    silent = not np.isfinite(losses).any() and trace.ok.any()  # nobody told the loss
    diverged = not silent and blown_up
    return Setting(
        lr=lr,
        max_norm=_max_norm(points) if points is not None else _told_max_norm(trace),
        points=points,
        diverged=diverged,
        score=score,
        error=error,
        ended_early=not diverged and not silent and trace.column("step")[-1] < horizon,
    )


def _stage(points: Points) -> Setting:
    finite = np.isfinite(points.loss)
    score, error = _fall(points.step[finite], points.loss[finite])
    lr = float(np.median(points.lr))
    return Setting(
        lr=lr,
        max_norm=_max_norm(points),
        points=points,
        diverged=score > 0 and score > 2 * error,
        score=score,
        error=error,
    )


def _stages(points: Points) -> list[Points]:
    """The points cut where lr jumps by more than a tenth, short pieces left out; whole if there is one."""
    with np.errstate(divide="ignore", invalid="ignore"):
        jumps = np.flatnonzero(np.abs(np.diff(np.log(points.lr))) > 0.1) + 1
    edges = [0, *jumps.tolist(), len(points)]
    parts = [(a, b) for a, b in pairwise(edges) if b - a >= _LEAST_STAGE]
    if len(parts) < 2:
        return [points]
    arrays = [name for name, value in vars(points).items() if isinstance(value, np.ndarray)]
    return [replace(points, **{name: getattr(points, name)[a:b] for name in arrays}) for a, b in parts]


def _max_norm(points: Points) -> float:
    """Gradient norm at which clipping starts: step length over lr, where steps were clipped."""
    threshold = (points.step_norm / points.lr)[points.clipped]
    threshold = threshold[np.isfinite(threshold)]
    return float(np.median(threshold)) if len(threshold) else math.inf


def _told_max_norm(trace: Trace) -> float:
    coefficient, norm = trace.column("coefficient"), trace.column("grad_norm")
    threshold = (coefficient * norm)[coefficient < 1 - 1e-6]
    threshold = threshold[np.isfinite(threshold)]
    return float(np.median(threshold)) if len(threshold) else math.inf


def _common_end(traces: tuple[Trace, ...]) -> float:
    """The step up to which runs are compared: all that got at least half as far as the longest.

    A run ends one interval after its last row: of 200 steps measured at every fifth, the last row is 195.
    """
    found = [trace.column("step") for trace in traces if len(trace) and _ends_finite(trace)]
    ends = [(steps[-1], steps[-1] + (np.median(np.diff(steps)) if len(steps) > 1 else 0)) for steps in found]
    longest = max((end for _, end in ends), default=0.0)
    return float(min((last for last, end in ends if end >= longest / 2), default=math.inf))


def _ends_finite(trace: Trace) -> bool:
    return bool(len(trace) and np.isfinite(trace.column("loss")[-1]) and trace[-1]["status"] != "nonfinite")


def _level(losses: np.ndarray) -> tuple[float, float]:
    """Mean loss over the last tenth (five rows at least), and its standard error."""
    if len(losses) == 0:
        return math.nan, math.nan
    last = losses[-max(5, len(losses) // 10) :]
    return float(last.mean()), float(last.std(ddof=1) / math.sqrt(len(last))) if len(last) > 1 else 0.0


def _fall(step: np.ndarray, loss: np.ndarray) -> tuple[float, float]:
    """Least-squares slope of the loss per step, and its standard error."""
    if len(step) < 3:
        return math.nan, math.nan
    x = step - step.mean()
    slope = float(x @ loss / (x @ x))
    residual = loss - loss.mean() - slope * x
    return slope, math.sqrt(float(residual @ residual) / (len(step) - 2) / float(x @ x))
