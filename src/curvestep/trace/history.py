"""Facts of a run that follow from its trace without any fitting: optimizer, final loss, clipped share."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from curvestep.optimizer_family import Family, family_of, torch_name
from curvestep.trace.schema import FIELDS, NONFINITE
from curvestep.trace.trace import TRACE, Trace

Key = TypeVar("Key")
# Runs that differ in one of these are not told apart by lr and threshold alone.
_TASK_FACTS = ("model", "num_parameters", "optimizer", "momentum", "weight_decay", "batch_size")


def optimizer_family(trace: Trace) -> Family:
    """How the optimizer of a run steps; an older trace has only its name."""
    word = trace.header.get("optimizer_family")
    if word in list(Family):
        return Family(word)
    names = [trace.header.get("optimizer"), *trace.column("optimizer")]
    return family_of(next((name for name in names if name), ""))


def threshold_name(trace: Trace) -> str:
    """What the optimizer calls the norm at which its rule bends; of any other ``max_norm``."""
    older = "offset" if trace.header.get("offset") is not None else "max_norm"
    return str(trace.header.get("threshold") or older)


def ends_finite(trace: Trace) -> bool:
    """Whether the last row has a finite loss and was not marked as not finite."""
    loss = trace.column("loss")[-1:]
    return bool(np.isfinite(loss).any()) and trace.column("status")[-1] != NONFINITE


def lr_of_run(header: Mapping[str, object], rates: np.ndarray) -> float:
    """Its largest lr: the peak that its schedule was set to, where measured steps reach half of that."""
    largest = finite_max(rates)
    peak = header_number(header, "peak_lr", missing=largest)
    return peak if largest < peak <= 2 * largest else largest


def planned_lr(header: Mapping[str, object], rates: np.ndarray) -> float:
    """The peak of its schedule while lr still rises to it, else :func:`lr_of_run`.

    Example:
        >>> planned_lr({"peak_lr": 0.03}, np.array([0.001, 0.004, 0.008]))
        0.03
    """
    known = rates[np.isfinite(rates)]
    lr = lr_of_run(header, rates)
    if len(known) == 0 or known[0] == known[-1] or known[-1] < known.max():
        return lr
    return max(header_number(header, "peak_lr", missing=lr), lr)


def header_number(header: Mapping[str, object], name: str, *, missing: float) -> float:
    """Number in the header of a trace; ``missing`` if there is none."""
    value = header.get(name)
    if isinstance(value, (int, float)):
        return float(value)
    return missing


def clipped_share(step: np.ndarray, clip_norm: np.ndarray) -> float:
    """Share of the steps that were clipped; a row stands for those since the one before. NaN: no row says so.

    Example:
        >>> round(clipped_share(np.array([0.0, 1.0, 8.0]), np.array([0.5, 0.5, np.inf])), 2)
        0.22
    """
    known = ~np.isnan(clip_norm)
    spans = np.maximum(np.diff(step[known], prepend=step[known][:1] - 1), 1)
    return float(np.average(np.isfinite(clip_norm[known]), weights=spans)) if len(spans) else math.nan


def typical(values: np.ndarray, *, missing: float = math.nan) -> float:
    """Median of the finite values; ``missing`` if there is none."""
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else missing


def finite_mean(values: np.ndarray) -> float:
    """Mean of the finite values; NaN if there is none."""
    known = values[np.isfinite(values)]
    return float(np.mean(known)) if len(known) else math.nan


def finite_min(values: np.ndarray) -> float:
    """Least of the finite values; NaN if there is none."""
    known = values[np.isfinite(values)]
    return float(np.min(known)) if len(known) else math.nan


def finite_max(values: np.ndarray) -> float:
    """Largest of the finite values; NaN if there is none."""
    known = values[np.isfinite(values)]
    return float(np.max(known)) if len(known) else math.nan


def end_of_run(trace: Trace, horizon: float = math.inf) -> tuple[float, float]:
    """The final loss up to a step, NaN if there is none, and the number of losses that it is a mean of.

    A probe that rests between rows keeps the mean loss since the last one: one batch would say little.
    """
    step = trace.column("step")
    recent = trace.column("recent_loss")
    kept = (step <= horizon) & ~trace.failed
    is_mean = np.isfinite(recent)
    loss = np.where(is_mean, recent, trace.column("loss"))[kept]
    counts = np.where(is_mean, trace.column("recent_steps"), 1.0)[kept]
    final = _is_final(step[kept])
    return final_loss(step[kept], loss), float(counts[final].sum())


def final_loss(steps: ArrayLike, losses: ArrayLike) -> float:
    """Training loss at the end of a run: the mean over the last twentieth of its steps, at most the last 50.

    NaN if a loss in there is not finite: a run that ended so has no final loss. The only definition of it;
    a training run stores the value, and everything else reads that.

    Example:
        >>> final_loss(range(100), [9.0] * 95 + [1.0, 2.0, 3.0, 4.0, 5.0])
        3.0
        >>> final_loss([0, 50, 100], [9.0, 5.0, 4.0])    # at least the last row
        4.0
        >>> final_loss([0, 1], [1.0, float("inf")]), final_loss([], [])
        (nan, nan)
    """
    step = np.asarray(steps, dtype=float)
    loss = np.asarray(losses, dtype=float)
    if len(step) == 0:
        return math.nan
    final = loss[_is_final(step)]
    return float(final.mean()) if np.isfinite(final).all() else math.nan


def _is_final(step: np.ndarray) -> np.ndarray:
    last = step.max(initial=0.0)
    window = min((last - step.min(initial=last) + 1) / 20, 50.0)
    return step > last - max(window, 1.0)


def best_setting(scores: Mapping[Key, Sequence[float]]) -> Key:
    """Which of several settings won: the lowest mean score among those whose runs all have one.

    The one rule for "best" in the library: advice on several runs, sweeps and claims all use it. Scores are
    final losses as a rule, not finite for a run that diverged; it raises where every setting has such a run.

    Example:
        >>> best_setting({"lr 1": [2.0, 2.2], "lr 3": [1.5, 1.7], "lr 9": [1.0, float("inf")]})
        'lr 3'
    """
    means = {key: float(np.mean(values)) for key, values in scores.items() if np.isfinite(values).all()}
    if not means:
        raise ValueError("No setting kept a finite score in all of its runs: there is no best one.")
    return min(means, key=lambda key: means[key])


class HasTrace(Protocol):
    """What writes a trace: a probe."""

    @property
    def trace(self) -> Trace:
        """The rows so far."""
        ...


def check_trace(trace: Trace | HasTrace | str | Path) -> Trace:
    """``trace`` itself, that of a probe, or the trace in a file or in the folder of a run."""
    written = getattr(trace, "trace", trace)  # a probe has the trace that it writes
    if isinstance(written, Trace):
        return written
    if not isinstance(trace, (str, Path)):
        raise TypeError(
            "`trace` must be a Trace, a probe, a path to a trace or its run folder, "
            f"got {reprlib.repr(trace)}. Unpack a list of several: report(*runs)."
        )
    path = Path(trace)
    file = path / TRACE if path.is_dir() else path
    if not file.exists():
        raise FileNotFoundError(
            f"there is no trace at {file}. Name its file or the folder of its run; "
            f"SmoothnessProbe(model, trace={str(file)!r}) writes one."
        )
    return Trace.load(file)


def task_facts(trace: Trace) -> dict[str, str]:
    """What a run was trained on and by, by its header or its middle row; what neither says is left out."""
    facts = {}
    for name in _TASK_FACTS:
        values: Sequence[Any] = ()
        if name in trace.header:
            values = [trace.header[name]]
        elif name in FIELDS:
            values = trace.column(name).tolist()
        known = [value for value in values if value is not None and value == value]  # NaN is not itself
        if not known:
            continue
        middle = known[len(known) // 2]
        if isinstance(middle, (int, float)):
            facts[name] = f"{middle:g}"
        else:
            facts[name] = torch_name(str(middle))  # ours is torch's with the clip inside
    return facts


def difference_of(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    """The first of the facts in which two runs differ, in words; empty for none."""
    for name in _TASK_FACTS:
        if name in one and name in other and not _same(one[name], other[name]):
            return f"{name.replace('_', ' ')} ({one[name]} against {other[name]})"
    return ""


def _same(one: str, other: str) -> bool:
    """Whether two facts agree; batches of text differ a little in length from seed to seed."""
    try:
        return math.isclose(float(one), float(other), rel_tol=0.1, abs_tol=1e-9)
    except ValueError:
        return one == other
