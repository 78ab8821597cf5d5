"""Several runs of one task, or the stages of one run: what was set, how far the loss fell, what to try next.

Curvature adapts to the step: a run with a small step walks into sharp regions where only a small step is
stable. So curvature alone cannot say which setting is best; how fast the loss falls can.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from curvestep.advice.outcome import diverged_at, peak
from curvestep.fit.fit import SmoothnessFit
from curvestep.fit.samples import History, Samples, final_loss, typical_clip_norm, usable_samples
from curvestep.optimizer_family import torch_name
from curvestep.smoothness.trace import Trace

_LEAST_STAGE = 10  # rows that make a change of lr a stage of its own

Key = TypeVar("Key")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One run, or one stage of a run: its setting and how it went."""

    lr: float  # the largest: the peak of a schedule
    max_norm: float  # inf if no step was clipped
    samples: Samples | None  # None if the run ended before it could be measured
    fit: SmoothnessFit | None  # where there is one already
    diverged: bool
    score: float  # lower is better: the final loss, or the fall per step for a stage
    error: float  # standard error of the score
    staged: bool
    ended_early: bool = False  # before the step at which runs are compared, and not because it diverged
    scheduled: bool = False  # whether lr changed along the run

    @property
    def label(self) -> str:
        """The setting as a person writes it."""
        clip = "no step clipped" if math.isinf(self.max_norm) else f"max_norm {self.max_norm:.3g}"
        return f"{rate_name(self.scheduled)} {self.lr:.3g}, {clip}"

    @property
    def outcome(self) -> str:
        """How it went, in words."""
        if self.diverged:
            return "diverged"
        if self.ended_early:
            return "ended too early to be compared"
        if not math.isfinite(self.score):
            return "no loss recorded"
        if self.staged:
            return f"loss falls by {-self.score:.3g} a step"
        return f"loss {self.score:.4g} ± {self.error:.2g}"


def rate_name(scheduled: bool) -> str:
    """What ``lr`` is: of a schedule its peak."""
    return "peak lr" if scheduled else "lr"


def best_setting(scores: Mapping[Key, Sequence[float]], *, errors: Mapping[Key, float] | None = None) -> Key:
    """Which of several settings won: the lowest mean score among those that lost no run.

    The one rule for "best" in the library: advice on several runs, sweeps and claims all use it.

    Args:
        scores: For each setting the score of each of its runs, lower is better: usually the final losses of
            its seeds. A setting with a score that is not finite lost a run and cannot win.
        errors: Standard error of each setting's mean, where there is one. Settings whose mean lies within
            the larger error of both of the lowest count as equal to it, and the first of them in the order
            of ``scores`` wins: hand them over from the largest step to the smallest, since of two equal
            settings the larger step is the better.

    Raises:
        ValueError: If every setting lost a run.

    Example:
        >>> best_setting({"lr 1": [2.0, 2.2], "lr 3": [1.5, 1.7], "lr 9": [1.0, float("inf")]})
        'lr 3'
        >>> best_setting({"lr 3": [1.52], "lr 1": [1.5]}, errors={"lr 3": 0.05, "lr 1": 0.01})
        'lr 3'
    """
    means = {key: float(np.mean(values)) for key, values in scores.items() if np.isfinite(values).all()}
    if not means:
        raise ValueError("No setting kept a finite score in all of its runs: there is no best one.")
    least = min(means, key=lambda key: means[key])
    if errors is None:
        return least
    return next(key for key in means if means[key] <= means[least] + max(errors[least], errors[key]))


def check_alike(histories: Sequence[History]) -> None:
    """Refuse runs that are not of one task, by what their headers and rows say of it.

    Raises:
        ValueError: It names what differs.
    """
    for name, unit in (
        ("model", "model"),
        ("num_parameters", "number of parameters"),
        ("optimizer", "optimizer"),
        ("momentum", "momentum"),
        ("batch_size", "batch size"),
    ):
        found: list[Any] = []
        for history in histories:
            value = _typical(history, name)
            if name == "optimizer" and value is not None:  # ours is torch's with the clip inside
                value = torch_name(str(value))
            if value is not None and not any(_same(value, other) for other in found):
                found.append(value)
        if len(found) > 1:
            words = " against ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in found)
            raise ValueError(
                f"these runs cannot be compared: they differ in {unit} ({words}). Ask about the runs of one "
                "task, optimizer and batch size at a time."
            )


def _typical(history: History, name: str) -> Any:
    """What a run's header or rows say of it: a word, a number, or None."""
    if name in history.header:
        value = history.header[name]
        return float(value) if isinstance(value, (int, float)) else value
    column = history.columns.get(name)
    if column is None:
        return None
    if column.dtype == object:
        return next((word for word in column if word is not None), None)
    known = column[np.isfinite(column)]
    return float(np.median(known)) if len(known) else None


def _same(one: Any, other: Any) -> bool:
    """Whether two facts agree; batches of text differ a little in length from seed to seed."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=0.1, abs_tol=1e-9)
    return one == other


def settings_of(runs: Sequence[Trace | SmoothnessFit]) -> list[Setting]:
    """One setting a run; for a single run whose lr was changed in stages, one a stage."""
    if len(runs) == 1:
        run = runs[0]
        samples = usable_samples(run) if isinstance(run, Trace) else run.samples
        stages = stages_of(samples)
        fit = None if isinstance(run, Trace) or len(stages) > 1 else run
        return [_stage(part, fit) for part in stages]
    histories = [History.of(run) if isinstance(run, Trace) else run.samples.history for run in runs]
    # Runs are compared up to a common step: all that got at least half as far as the longest. A run ends one
    # interval after its last row: of 200 steps measured at every fifth, the last row is 195.
    found = [history.step for history in histories if len(history.step) and history.ends_finite]
    ends = [(step[-1], step[-1] + (np.median(np.diff(step)) if len(step) > 1 else 0)) for step in found]
    longest = max((end for _, end in ends), default=0.0)
    horizon = float(min((last for last, end in ends if end >= longest / 2), default=math.inf))
    return [_whole(run, history, horizon) for run, history in zip(runs, histories, strict=True)]


def best_of(settings: Sequence[Setting]) -> Setting:
    """The largest step among the settings whose score is within its error of the best.

    Raises:
        ValueError: If no run both kept its loss finite and recorded it.
    """
    whole = [s for s in settings if not (s.diverged or s.ended_early) and s.samples is not None]
    alive = [s for s in whole if math.isfinite(s.score)]
    if not alive and whole:
        raise ValueError(
            "no run recorded its loss, which settings are compared by. Hand it to the probe: "
            "`with probe(closure, loss=loss): ...`."
        )
    if not alive:
        raise ValueError("no run kept a finite loss, so none can be recommended. Start from a smaller lr.")
    alive.sort(key=lambda s: (s.lr, s.max_norm), reverse=True)
    rows = range(len(alive))
    return alive[best_setting({i: [alive[i].score] for i in rows}, errors={i: alive[i].error for i in rows})]


def next_setting(best: Setting, settings: list[Setting]) -> dict[str, float] | None:
    """What to try if ``best`` lies at the edge of what was tried; None if both sides were seen.

    A larger lr is always tried with clipping: at the best run's threshold or, if it had none, at its median
    gradient norm. Without clipping it would most likely diverge, which says nothing about it with clipping.
    Where lr lies inside and several thresholds were tried with it, the threshold may still be at their edge.
    """
    assert best.samples is not None
    tried = sorted({s.lr for s in settings if math.isfinite(s.lr)})
    above = [s for s in settings if s.lr > best.lr]
    clipped = best.max_norm if math.isfinite(best.max_norm) else float(np.median(best.samples.grad_norm))
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


def _whole(run: Trace | SmoothnessFit, history: History, horizon: float) -> Setting:
    fit = None if isinstance(run, Trace) else run
    try:
        samples = usable_samples(run) if isinstance(run, Trace) else run.samples
    except ValueError:
        samples = None
    lr, scheduled = peak(history.lr)
    kept = np.isfinite(history.loss) & (history.step <= horizon)
    loss = history.loss[kept]
    score = final_loss(history.step[kept], loss)
    silent = not np.isfinite(history.loss).any() and history.measured  # nobody recorded the loss
    diverged = not silent and (len(loss) == 0 or diverged_at(history) is not None)
    return Setting(
        lr=lr,
        scheduled=scheduled,
        max_norm=typical_clip_norm(history.clip_norm if samples is None else samples.clip_norm),
        samples=samples,
        fit=fit,
        diverged=diverged,
        score=score,
        error=_final_error(loss),
        staged=False,
        ended_early=not diverged and not silent and bool(history.step[-1] < horizon),
    )


def _final_error(losses: np.ndarray) -> float:
    """Standard error of the final loss, by how much the last tenth of the rows (five at least) scatter."""
    last = losses[-max(5, len(losses) // 10) :]
    return float(last.std(ddof=1) / math.sqrt(len(last))) if len(last) > 1 else 0.0


def stages_of(samples: Samples) -> list[Samples]:
    """The samples cut where lr jumps by more than a tenth, without short pieces; whole if there is one."""
    with np.errstate(divide="ignore", invalid="ignore"):
        jumps = np.flatnonzero(np.abs(np.diff(np.log(samples.lr))) > 0.1) + 1
    edges = [0, *jumps.tolist(), len(samples)]
    parts = [(a, b) for a, b in pairwise(edges) if b - a >= _LEAST_STAGE]
    return [samples.rows(slice(a, b)) for a, b in parts] if len(parts) > 1 else [samples]


def _stage(samples: Samples, fit: SmoothnessFit | None) -> Setting:
    finite = np.isfinite(samples.loss)
    score, error = _fall(samples.step[finite], samples.loss[finite])
    return Setting(
        lr=float(np.median(samples.lr)),
        max_norm=typical_clip_norm(samples.clip_norm),
        samples=samples,
        fit=fit,
        diverged=score > 0 and score > 2 * error,
        score=score,
        error=error,
        staged=True,
    )


def _fall(step: np.ndarray, loss: np.ndarray) -> tuple[float, float]:
    """Least-squares slope of the loss per step, and its standard error."""
    if len(step) < 3:
        return math.nan, math.nan
    x = step - step.mean()
    slope = float(x @ loss / (x @ x))
    residual = loss - loss.mean() - slope * x
    return slope, math.sqrt(float(residual @ residual) / (len(step) - 2) / float(x @ x))
