"""Every row of a trace as arrays, and the facts of the run that follow without any fitting."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from curvestep.optimizer_family import Family, family_of, torch_name
from curvestep.trace.run import RUNNING, TRACE, read_status
from curvestep.trace.schema import FAILED, FIELDS, NONFINITE
from curvestep.trace.trace import Trace

Key = TypeVar("Key")
# Runs that differ in one of these are not told apart by lr and threshold alone.
_TASK_FACTS = ("model", "num_parameters", "optimizer", "momentum", "weight_decay", "batch_size")


@dataclass(frozen=True, kw_only=True)
class History:
    """Every row of a trace, usable or not: how the loss went, what was set, and how the run ended."""

    step: np.ndarray
    loss: np.ndarray
    lr: np.ndarray
    clip_norm: np.ndarray  # as ``Trace.clip_norm`` has it
    ends_finite: bool  # the last row has a finite loss and was not marked as nonfinite
    ok: np.ndarray  # which rows were measured without trouble
    failed: np.ndarray  # which rows tell of a measurement that failed; they have no loss
    columns: dict[str, np.ndarray]  # every key of the schema but the layers, as ``Trace.column`` gives it
    header: dict[str, Any]
    path: Path | None = None  # of the trace, if it has a file

    @property
    def name(self) -> str:
        """The run's folder, or its file where that has a name of its own; empty of a trace in memory."""
        if self.path is None:
            return ""
        return self.path.resolve().parent.name if self.path.name == TRACE else self.path.name

    @property
    def is_running(self) -> bool:
        """Whether the folder of the run says that it goes on."""
        if self.path is None or self.path.name != TRACE:
            return False
        try:
            return read_status(self.path.parent, {}).get("status") == RUNNING
        except ValueError:  # a damaged file says nothing
            return False

    @property
    def family(self) -> Family:
        """How the optimizer steps; an older trace has only its name."""
        word = self.header.get("optimizer_family")
        if word in list(Family):
            return Family(word)
        names = [name for name in (self.header.get("optimizer"), *self.columns["optimizer"]) if name]
        return family_of(names[0] if names else "")

    @property
    def threshold(self) -> str:
        """What the optimizer calls the norm at which its rule bends; of any other ``max_norm``."""
        older = "offset" if self.header.get("offset") is not None else "max_norm"
        return str(self.header.get("threshold") or older)

    @classmethod
    def of(cls, trace: Trace) -> History:
        """What ``trace`` holds now; rows appended to it later are not in here."""

        def read() -> History:
            loss, status = trace.column("loss"), trace.column("status")
            return cls(
                step=trace.column("step"),
                loss=loss,
                lr=trace.column("lr"),
                clip_norm=trace.clip_norm,
                ends_finite=len(loss) > 0 and bool(np.isfinite(loss[-1])) and status[-1] != NONFINITE,
                ok=trace.ok,
                failed=np.array([str(word).startswith(FAILED) for word in status], dtype=bool),
                columns={name: trace.column(name) for name, field in FIELDS.items() if field.kind != "group"},
                header=dict(trace.header),
                path=trace.path,
            )

        return trace.cached("history", read)


def lr_of_run(header: Mapping[str, object], rates: np.ndarray) -> float:
    """Its largest lr: the peak that its schedule was set to, where measured steps reach half of that."""
    largest = finite_max(rates)
    peak = header_number(header, "peak_lr", missing=largest)
    return peak if largest < peak <= 2 * largest else largest


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


def end_of_run(history: History, horizon: float = math.inf) -> tuple[float, float]:
    """The final loss up to a step, NaN if there is none, and the number of losses that it is a mean of.

    A probe that rests between rows keeps the mean loss since the last one: one batch would say little.
    """
    recent, kept = history.columns["recent_loss"], (history.step <= horizon) & ~history.failed
    is_mean = np.isfinite(recent)
    loss = np.where(is_mean, recent, history.loss)[kept]
    counts = np.where(is_mean, history.columns["recent_steps"], 1.0)[kept]
    final = _is_final(history.step[kept])
    return final_loss(history.step[kept], loss), float(counts[final].sum())


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
    step, loss = np.asarray(steps, dtype=float), np.asarray(losses, dtype=float)
    if len(step) == 0:
        return math.nan
    final = loss[_is_final(step)]
    return float(final.mean()) if np.isfinite(final).all() else math.nan


def _is_final(step: np.ndarray) -> np.ndarray:
    last = step.max(initial=0.0)
    window = min((last - step.min(initial=last) + 1) / 20, 50.0)
    return step > last - max(window, 1.0)


def best_setting(scores: Mapping[Key, Sequence[float]]) -> Key:
    """Which of several settings won: the lowest mean score among those that lost no run.

    The one rule for "best" in the library: advice on several runs, sweeps and claims all use it. Scores are
    final losses as a rule, not finite for a lost run; it raises where every setting lost one.

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
            f"got {reprlib.repr(trace)}. Unpack a list of several: advise(*runs), report(*runs)."
        )
    path = Path(trace)
    file = path / TRACE if path.is_dir() else path
    if not file.exists():
        raise FileNotFoundError(
            f"there is no trace at {file}. Name its file or the folder of its run; "
            f"SmoothnessProbe(model, trace={str(file)!r}) writes one."
        )
    return Trace.load(file)


def task_facts(history: History) -> dict[str, str]:
    """What a run was trained on and by, by its header or its middle row; what neither says is left out."""
    facts = {}
    for name in _TASK_FACTS:
        values = [history.header[name]] if name in history.header else history.columns.get(name, ())
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
