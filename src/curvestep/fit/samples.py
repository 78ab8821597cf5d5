"""Usable rows of a trace as arrays, and what follows from them without any fitting."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from curvestep.checks import check_choice, check_positive, nearest
from curvestep.trace.history import typical
from curvestep.trace.schema import ESTIMATORS, LEAST_ROWS
from curvestep.trace.trace import Trace

# Evenly spaced rows of a longer run: for intervals and control, for the test inside steps and for laws.
MOST_ROWS = 4000
MOST_TESTED_ROWS = 100_000
_LARGEST = 1e50
_COLUMNS = (
    "step", "loss", "grad_norm", "step_norm", "lr", "cosine", "noise", "secants", "grad_norms", "fractions",
    "grad_variance", "grad_signal",
)  # fmt: skip
_OF_RUN = ("step", "loss", "lr")  # the same for every layer
# By the type of the parameters.
_PRECISION = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


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
    layer: str  # whose norms and smoothness these are; empty for the whole model
    trace: Trace  # whose rows they are; it may have got more since

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


def usable_samples(trace: Trace, *, estimator: str = "smoothness", layer: str = "") -> Samples:
    """Rows of ``trace`` with status ok and a positive, finite gradient norm and smoothness.

    With a ``layer``, norms and smoothness are that layer's; what rows have of the whole model only is NaN.

    Raises:
        ValueError: If fewer than ten are left; it says how many there were and what became of the others.
    """
    check_choice("estimator", estimator, tuple(ESTIMATORS))
    if layer:
        _check_layer(trace, layer)
    norms = _column(trace, "grad_norm", layer)
    smoothness = _column(trace, estimator, layer)
    late = _unconverged(trace, estimator, smoothness)
    # Beyond 1e±50, which no float32 run reaches, squares of quotients are no longer finite.
    measured = (norms >= 1 / _LARGEST) & (norms <= _LARGEST) & (smoothness >= 0) & (smoothness <= _LARGEST)
    order = np.flatnonzero(trace.ok & measured & ~late)
    order = order[np.argsort(trace.column("step")[order], kind="stable")]
    if len(order) < LEAST_ROWS:
        raise ValueError(_too_few(trace, measured, late, estimator))
    column = {name: _column(trace, name, layer)[order] for name in _COLUMNS}
    ell = smoothness[order]
    kappa = _column(trace, "kappa", layer)[order]
    dtype = str(trace.header.get("dtype")).removeprefix("torch.")
    return Samples(
        **column,
        # The header knows the parameters' type but not autocast's.
        eps=typical(trace.column("eps")[order], missing=_PRECISION.get(dtype, _PRECISION["float32"])),
        self_test=typical(trace.column("self_test")[order], missing=0.0),
        smoothness=ell,
        kappa=np.where(np.isfinite(kappa), kappa, ell * column["step_norm"] / column["grad_norm"]),
        clip_norm=trace.clip_norm[order],
        skipped=len(trace) - len(order),
        num_estimates=int((trace.ok & np.isfinite(smoothness)).sum()),
        num_unconverged=int((trace.ok & late).sum()),
        estimator=estimator,
        layer=layer,
        trace=trace,
    )


def evenly_spaced(num: int, *, most: int) -> slice:
    """At most ``most`` of ``num`` rows, evenly spaced from the first.

    Example:
        >>> list(range(10))[evenly_spaced(10, most=4)], list(range(3))[evenly_spaced(3, most=4)]
        ([0, 3, 6, 9], [0, 1, 2])
    """
    return slice(None, None, -(-num // most) or None)


def steps_between(steps: np.ndarray) -> int:
    """Training steps from one row to the next, as a rule."""
    return max(1, int(typical(np.diff(steps), missing=1.0)))


def check_share(name: str, value: float) -> float:
    """``value`` if it lies between 0 and 1."""
    if check_positive(name, value) >= 1:
        raise ValueError(f"`{name}` must be between 0 and 1, got {value!r}.")
    return value


def _column(trace: Trace, name: str, layer: str) -> np.ndarray:
    """A column of the run, or of one of its layers; NaN where rows have none of the layer."""
    if not layer or name in _OF_RUN:
        return trace.column(name)
    own = f"layers/{layer}/{name}"
    return trace.column(own) if own in trace.names else np.full(trace.column(name).shape, math.nan)


def _check_layer(trace: Trace, layer: str) -> None:
    paths = [
        name.removeprefix("layers/").rpartition("/") for name in trace.names if name.startswith("layers/")
    ]
    layers = dict.fromkeys(name for name, _, _ in paths)
    if not layers:
        raise ValueError("No row has layers. Measure them: SmoothnessProbe(model, layers=True).")
    if layer not in layers:
        raise ValueError(
            f"`layer` must be one that was measured, got {layer!r}. Measured: {', '.join(layers)}."
            f"{nearest(layer, layers)}"
        )


def _unconverged(trace: Trace, estimator: str, smoothness: np.ndarray) -> np.ndarray:
    """Which rows have an estimate that had not converged, which is none."""
    converged = ESTIMATORS[estimator].converged
    if not converged:
        return np.zeros(len(trace), dtype=bool)
    return (trace.column(converged) == 0) & np.isfinite(smoothness)


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
    skipped = {
        "marked as not ok": ~trace.ok,
        "whose estimate had not converged": trace.ok & late,
        wanted: trace.ok & ~measured & ~late,
    }
    counts = ", ".join(f"{rows.sum()} {why}" for why, rows in skipped.items() if rows.any())
    reason = f" ({counts})" if counts else ""
    return (
        f"`trace` must have at least {LEAST_ROWS} usable rows, got "
        f"{(trace.ok & measured & ~late).sum()} of {len(trace)}"
        f"{reason}. Train longer, probe more often, or look at the `status` of the rows."
    )
