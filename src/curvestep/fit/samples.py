"""Usable rows of a trace as arrays, and what follows from them without any fitting."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike

from curvestep.checks import check_choice, check_positive
from curvestep.optimizer_family import Family, family_of, torch_name
from curvestep.smoothness.probe import SmoothnessProbe
from curvestep.smoothness.schedule import FIRST_ROWS
from curvestep.trace.schema import ESTIMATORS, FAILED, FIELDS, NONFINITE
from curvestep.trace.trace import Trace

LEAST_ROWS = FIRST_ROWS  # that the probe measures whatever they cost
MOST_ROWS = 4000  # evenly spaced ones of a longer run bear the intervals and the control
_LARGEST = 1e50
Key = TypeVar("Key")
_ALIKE = ("model", "num_parameters", "optimizer", "momentum", "batch_size")  # facts of a task
_COLUMNS = (
    "step", "loss", "grad_norm", "step_norm", "lr", "kappa", "cosine", "noise", "secants", "grad_norms",
    "fractions", "grad_variance", "grad_signal", "eps", "self_test",
)  # fmt: skip
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


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

    @property
    def family(self) -> Family:
        """How the optimizer steps; an older trace has only its name."""
        word = self.header.get("optimizer_family")
        if word not in list(Family):
            return family_of(
                self.header.get("optimizer") or next(filter(None, self.columns["optimizer"]), "")
            )
        return Family(word)

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
            )

        return trace.cached("history", read)


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Usable rows of a trace, in the order of the steps; NaN where a quantity was not measured."""

    step: np.ndarray
    loss: np.ndarray
    grad_norm: np.ndarray
    smoothness: np.ndarray
    step_norm: np.ndarray
    lr: np.ndarray
    kappa: np.ndarray
    cosine: np.ndarray  # between the step and −g
    noise: np.ndarray
    clip_norm: np.ndarray  # as ``Trace.clip_norm`` has it
    grad_variance: np.ndarray  # tr Σ of the gradient of one sample
    grad_signal: np.ndarray  # ‖G‖², without the noise
    secants: np.ndarray  # shape (rows, fractions)
    grad_norms: np.ndarray  # gradient norm on the same batch at each fraction, likewise
    fractions: np.ndarray  # likewise; NaN in rows that have fewer
    skipped: int
    num_estimates: int  # of rows without trouble, converged or not
    num_unconverged: int
    eps: float  # relative precision of the gradients
    self_test: float  # by how much a gradient replayed twice differs, relative to its norm; 0 if unknown
    estimator: str  # the column that ``smoothness`` is
    history: History

    def __len__(self) -> int:
        return len(self.step)

    def rows(self, part: slice | np.ndarray) -> Samples:
        """These rows alone."""
        arrays = {name: value[part] for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        return replace(self, **arrays)

    @property
    def clipped(self) -> np.ndarray:
        """Which steps were clipped."""
        return np.isfinite(self.clip_norm)

    @property
    def step_size(self) -> np.ndarray:
        """Length of the step over the gradient norm; the learning rate for plain descent."""
        return self.step_norm / self.grad_norm

    @property
    def noise_scale(self) -> float | None:
        r"""Gradient noise scale :math:`\operatorname{tr}\Sigma/\lVert G\rVert^2`, in samples of a batch.

        :math:`\Sigma` is the covariance of the gradient of one sample, G the full gradient: batches below
        this size are mostly noise (McCandlish et al., 2018). Numerator and denominator are averaged over the
        rows each by itself, since a mean of ratios is far too large. None where they were not recorded; inf
        where nothing but noise is left.
        """
        known = np.isfinite(self.grad_variance) & np.isfinite(self.grad_signal)
        if not known.any():
            return None
        signal = float(self.grad_signal[known].mean())
        return float(self.grad_variance[known].mean()) / signal if signal > 0 else math.inf

    @property
    def stride(self) -> int:
        """Training steps from one row to the next."""
        between = np.diff(self.step)
        return max(1, int(typical(between, missing=1.0)))


def usable_samples(trace: Trace, *, estimator: str = "smoothness") -> Samples:
    """Rows of ``trace`` with status ok and a positive, finite gradient norm and smoothness.

    Raises:
        ValueError: If fewer than ten are left; it says how many there were and what became of the others.
    """
    check_choice("estimator", estimator, ESTIMATORS)
    return trace.cached(("samples", estimator), lambda: _read_samples(trace, estimator))


def _read_samples(trace: Trace, estimator: str) -> Samples:
    norms, smoothness = trace.column("grad_norm"), trace.column(estimator)
    late = _unconverged(trace, estimator)
    # Beyond 1e±50, which no float32 run reaches, squares of quotients are no longer finite.
    measured = (norms >= 1 / _LARGEST) & (norms <= _LARGEST) & (smoothness >= 0) & (smoothness <= _LARGEST)
    order = np.flatnonzero(trace.ok & measured & ~late)
    order = order[np.argsort(trace.column("step")[order], kind="stable")]
    if len(order) < LEAST_ROWS:
        raise ValueError(_too_few(trace, measured, late, estimator))
    column = {name: trace.column(name)[order] for name in _COLUMNS}
    g, ell, kappa = column["grad_norm"], smoothness[order], column.pop("kappa")
    rounding = {str(dtype).removeprefix("torch."): torch.finfo(dtype).eps for dtype in _FLOATS}
    dtype = str(trace.header.get("dtype")).removeprefix("torch.")
    return Samples(
        # The header knows the parameters' type but not autocast's.
        eps=typical(column.pop("eps"), missing=rounding.get(dtype, rounding["float32"])),
        self_test=typical(column.pop("self_test"), missing=0.0),
        **column,
        smoothness=ell,
        kappa=np.where(np.isfinite(kappa), kappa, ell * column["step_norm"] / g),
        clip_norm=trace.clip_norm[order],
        skipped=len(trace) - len(order),
        num_estimates=int((trace.ok & np.isfinite(smoothness)).sum()),
        num_unconverged=int((trace.ok & late).sum()),
        estimator=estimator,
        history=History.of(trace),
    )


def lr_of_run(header: Mapping[str, object], rates: np.ndarray) -> float:
    """Its largest lr: the peak that its schedule was set to, where measured steps reach half of that."""
    largest = of_finite(np.max, rates)
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
    return of_finite(np.median, values, missing=missing)


def of_finite(how: Callable[[np.ndarray], Any], values: np.ndarray, *, missing: float = math.nan) -> float:
    """A mean, median or end of the finite values; ``missing`` if there is none."""
    known = values[np.isfinite(values)]
    if not len(known):
        return missing
    return float(how(known))


def evenly_spaced(num: int, *, most: int) -> slice:
    """At most ``most`` of ``num`` rows, evenly spaced from the first.

    Example:
        >>> list(range(10))[evenly_spaced(10, most=4)], list(range(3))[evenly_spaced(3, most=4)]
        ([0, 3, 6, 9], [0, 1, 2])
    """
    return slice(None, None, -(-num // most) or None)


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


def check_trace(trace: Trace | SmoothnessProbe | str | Path) -> Trace:
    """``trace`` itself, that of a probe, or the trace in a file or in the folder of a run."""
    if isinstance(trace, SmoothnessProbe):
        return trace.trace
    if isinstance(trace, (str, Path)):
        path = Path(trace)
        file = path / "trace.jsonl" if path.is_dir() else path
        if not file.exists():
            raise FileNotFoundError(
                f"there is no trace at {file}. Name its file or the folder of its run; "
                f"SmoothnessProbe(model, trace={str(file)!r}) writes one."
            )
        return Trace.load(file)
    if not isinstance(trace, Trace):
        raise TypeError(
            "`trace` must be a Trace, a probe, a path to a trace or its run folder, "
            f"got {reprlib.repr(trace)}. Give several as advise(*runs)."
        )
    return trace


def difference_of(histories: Sequence[History]) -> str:
    """In what runs differ that are not of one task, by their headers and rows; empty for nothing."""
    for name in _ALIKE:
        facts = [fact for history in histories if (fact := _typical(history, name))]
        for other in facts:
            if not _same(facts[0], other):
                return f"{name.replace('_', ' ')} ({facts[0]} against {other})"
    return ""


def _typical(history: History, name: str) -> str:
    """Entry of a run's header or of its middle row, a word or a number, as it is printed; empty for none."""
    values = history.columns.get(name, ())
    if name in history.header:
        values = [history.header[name]]
    known = [value for value in values if value is not None and value == value]  # NaN is not itself
    middle = known[len(known) // 2] if known else ""
    if isinstance(middle, (int, float)):
        return f"{middle:g}"
    return torch_name(str(middle))  # ours is torch's with the clip inside


def _same(one: str, other: str) -> bool:
    """Whether two facts agree; batches of text differ a little in length from seed to seed."""
    try:
        return math.isclose(float(one), float(other), rel_tol=0.1, abs_tol=1e-9)
    except ValueError:
        return one == other


def check_share(name: str, value: float) -> float:
    """``value`` if it lies between 0 and 1."""
    if check_positive(name, value) >= 1:
        raise ValueError(f"`{name}` must be between 0 and 1, got {value!r}.")
    return value


def _unconverged(trace: Trace, estimator: str) -> np.ndarray:
    """Which rows have a local or spectral estimate that had not converged, which is none."""
    if estimator == "smoothness":  # nothing is iterated for it
        return np.zeros(len(trace), dtype=bool)
    flag = trace.column(estimator.replace("smoothness", "converged"))
    return (flag == 0) & np.isfinite(trace.column(estimator))


def _too_few(trace: Trace, measured: np.ndarray, late: np.ndarray, estimator: str) -> str:
    if not len(trace):
        return (
            "`trace` has no rows: no step was measured. Let the probe see every step, by `with "
            "probe(loss_fn):` around it or by `probe.watch(optimizer)` and `probe.record`."
        )
    others = [name for name in ESTIMATORS if np.isfinite(trace.column(name)).any()]
    if others and estimator not in others:
        there = " and ".join(f"`{name}`" for name in others)
        return (
            f"`{estimator}` was not measured in any row, only {there}. "
            "Let the probe measure it (`estimators`), or fit what there is: "
            f'fit_smoothness(trace, estimator="{others[0]}").'
        )
    wanted = f"without a positive finite `grad_norm` and a finite `{estimator}`, within 1e±50"
    lost = {
        "marked as not ok": ~trace.ok,
        "whose estimate had not converged": trace.ok & late,
        wanted: trace.ok & ~measured & ~late,
    }
    told = ", ".join(f"{rows.sum()} {why}" for why, rows in lost.items() if rows.any())
    reason = f" ({told})" if told else ""
    return (
        f"`trace` must have at least {LEAST_ROWS} usable rows, got "
        f"{(trace.ok & measured & ~late).sum()} of {len(trace)}"
        f"{reason}. Train longer, probe more often, or look at the `status` of the rows."
    )
