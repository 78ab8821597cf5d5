r"""(L0, L1) along a training run: what was seen, how sure that is, and what a constant Hessian would show.

.. math::
    \lVert \nabla^2 f(x) \rVert \le L_0 + L_1 \lVert \nabla f(x) \rVert

is fitted to the rows of a trace. It is a statement about this trajectory, never about the model: networks of
depth two or more are not (L0, L1)-smooth, not even on a sublevel set.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from curvestep.checks import check_choice, check_nonnegative
from curvestep.fit import fit_words as words
from curvestep.fit.control import Control, control_of
from curvestep.fit.correlation import Correlations, correlations_of
from curvestep.fit.diagnostics import fit_warnings
from curvestep.fit.frontier import envelope, frontier_points, least_L0, quantile_line
from curvestep.fit.intervals import Interval, slope_interval
from curvestep.fit.samples import (
    MOST_ROWS,
    MOST_TESTED_ROWS,
    Samples,
    check_share,
    evenly_spaced,
    usable_samples,
)
from curvestep.fit.within import Within, mean_norms, within_steps
from curvestep.notes import Note
from curvestep.report.markup import html_table
from curvestep.trace.history import HasTrace, check_trace
from curvestep.trace.trace import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvestep.fit.laws import LawComparison

LAWS = ("affine", "power", "loss")
SATURATED = 0.95  # a control that reaches further cannot be exceeded in a way that means anything


@dataclass(frozen=True, kw_only=True, repr=False)
class SmoothnessFit(Correlations):
    """Result of :func:`fit_smoothness`; ``print`` it for the answer, ``print(fit.details())`` for the rest.

    ``L0`` and ``L1`` are the quantile line's; ``frontier(L1)`` is the line above every point. ``spearman``
    and ``pearson`` (of logarithms) relate gradient norm and smoothness. ``control`` is what a constant
    Hessian would show across the rows, ``within`` whether smoothness grows with the gradient norm inside
    single steps, where a constant Hessian shows nothing: the evidence that counts where it was measured.
    ``noise_scale`` is the gradient noise scale in samples of a batch, if the noise was measured. ``samples``
    are the rows themselves, ``trace`` has those that could not be used, too. ``law`` is the law that was
    asked for; of ``law="best"`` the winner's name, empty where the run does not tell; ``laws`` compares them.
    """

    L0: float
    L1: float
    L0_interval: Interval
    L1_interval: Interval
    control: Control | None
    within: Within
    noise_scale: float | None
    num_points: int
    num_skipped: int
    grad_norm_range: Interval
    estimator: str
    quantile: float
    level: float
    frontier_points: tuple[tuple[float, float], ...]
    warnings: tuple[Note, ...]
    samples: Samples = field(repr=False, compare=False)
    layer: str = ""
    law: str = "affine"
    laws: LawComparison | None = None

    @property
    def trace(self) -> Trace:
        """The trace whose rows were fitted; it may have got more since."""
        return self.samples.trace

    @property
    def explained(self) -> bool:
        """Whether a constant Hessian would show as much across the rows, by the control.

        It would unless the run's rank correlation and exponent are positive and their intervals lie above
        the control's. A control that reaches 0.95 is saturated: then 0.999 above 0.998 says nothing. Without
        a control, or with one that is not a number, nothing speaks against a constant Hessian.
        """
        if self.control is None or not self.control.spearman_interval[1] < SATURATED:
            return True
        pairs = (
            (self.spearman_interval[0], self.control.spearman_interval[1]),
            (self.exponent_interval[0], self.control.exponent_interval[1]),
        )
        return not all(low > max(high, 0.0) for low, high in pairs)

    @property
    def grows(self) -> bool:
        """Whether smoothness is shown to grow with the gradient norm.

        Within steps, wherever that could be tested; else across the rows, beyond the control.
        """
        if self.within.missing:
            return not self.explained
        return self.within.grows

    def frontier(self, L1: float) -> float:
        r"""Smallest L0 with every measured point below: :math:`\max_i(\ell_i - L_1 g_i)_+`."""
        return float(least_L0(np.array(self.frontier_points), check_nonnegative("L1", L1)))

    def envelope(self, grad_norm: np.ndarray) -> np.ndarray:
        """The least that any pair on the frontier allows at each gradient norm: above every point."""
        return envelope(np.array(self.frontier_points), grad_norm)

    def changes_within(self) -> tuple[np.ndarray, np.ndarray]:
        """Change of log gradient norm and of log smoothness over the last part of each step."""
        samples = self.samples
        norms = mean_norms(samples.grad_norm, samples.grad_norms, samples.fractions)
        with np.errstate(divide="ignore", invalid="ignore"):
            x, y = (np.diff(np.log(values), axis=1)[:, -1] for values in (norms, samples.secants))
        return x, y

    @property
    def _headline(self) -> str:
        rows = f"{self.num_points} rows, {self.num_skipped} skipped"
        of_layer = f" of layer {self.layer}" if self.layer else ""
        return f"(L0, L1) along this trajectory: {rows}, {self.estimator}{of_layer}"

    def __str__(self) -> str:
        return words.fit_words(self)

    def details(self) -> str:
        """Every number of the fit, and every warning in full."""
        rows = (f"  {name:<18}{value:<9}{note}" for name, value, note in self._table())
        return "\n".join([self._headline, *rows, *(f"  ! {warning}" for warning in self.warnings)])

    def __repr__(self) -> str:
        return f"<SmoothnessFit: L0 {self.L0:.4g}, L1 {self.L1:.4g}, {self.num_points} rows>"

    def _repr_html_(self) -> str:
        return html_table(self._headline, self._table(), [str(warning) for warning in self.warnings])

    def plot(self) -> Figure:
        """Smoothness against gradient norm with the line, and inside single steps; needs matplotlib."""
        from curvestep.report.results import draw_charts, fit_charts

        return draw_charts(fit_charts(self))

    def _table(self) -> list[tuple[str, str, str]]:
        span = words.span
        control = self.control
        within = self.within
        meaning = f"{self.quantile:.0%} line, {self.level:.0%} intervals"
        exponent = f"{span(self.exponent_interval)}  smoothness ~ ‖g‖^exponent"
        table = [
            ("L0", f"{self.L0:.4g}", f"{span(self.L0_interval)}  {meaning}"),
            ("L1", f"{self.L1:.4g}", span(self.L1_interval)),
            ("exponent", f"{self.exponent:.2f}", exponent),
            ("rank corr.", f"{self.spearman:.2f}", span(self.spearman_interval)),
            ("corr. of logs", f"{self.pearson:.2f}", span(self.pearson_interval)),
            ("all points below", f"{self.frontier(self.L1):.4g}", "+ L1 ‖g‖: the frontier at this L1"),
        ]
        if control is not None:
            note = f"rank corr. that a constant Hessian would show, L1 {control.L1:.3g}"
            table.append(("control", f"{control.spearman:.2f}", f"{span(control.spearman_interval)}  {note}"))
        if not within.missing:
            note = f"elasticity d log L/d log ‖g‖ inside steps, p {within.p_value:.1g}"
            value = f"{within.elasticity:.2f}" if within.size_known else "unknown"
            table.append(("within steps", value, f"{span(within.elasticity_interval)}  {note}"))
        if self.noise_scale is not None:
            meaning = "samples a batch: below it, mostly noise"
            table.append(("noise scale", f"{self.noise_scale:.3g}", meaning))
        return table


def fit_smoothness(
    trace: Trace | HasTrace | str | Path,
    *,
    estimator: str = "smoothness",
    quantile: float = 0.95,
    level: float = 0.9,
    control: bool = True,
    law: str = "affine",
    loss_floor: float = 0.0,
    layer: str = "",
) -> SmoothnessFit:
    r"""(L0, L1) of a measured run, with intervals, a control and warnings.

    - ``L0``, ``L1``: the line :math:`L_0 + L_1 g`, both at least zero, that has a share ``quantile`` of the
      points below it (:func:`~curvestep.fit.frontier.quantile_line`). Intervals by inverting a
      rank-score test under autocorrelation (:func:`~curvestep.fit.intervals.slope_interval`).
    - ``spearman``, ``pearson`` of logarithms, ``exponent`` α of :math:`\ell \propto g^\alpha`: intervals by
      moving-block bootstrap (:func:`~curvestep.fit.intervals.block_interval`), for correlations on
      Fisher's scale :math:`\operatorname{artanh} r`.
    - ``control``: see :mod:`curvestep.fit.control`.
    - ``within``: see :mod:`curvestep.fit.within`.

    The intervals are for the law that the steps of this run come from, as if it went on and on like this.
    Of a longer run they rest on 4,000 evenly spaced rows, and the test inside steps on 100,000.
    Bootstrap and control have a seed of their own: the same trace gives the same fit.

    Args:
        trace: A trace, the probe that wrote it, its file or run folder, with at least ten usable rows; rows
            not marked ok, or without numbers, are skipped and counted.
        estimator: Which estimate to fit: ``"smoothness"`` (the paper's), ``"local_smoothness"`` or
            ``"spectral_smoothness"``.
        quantile: Share of points below the line, in (0, 1).
        level: Confidence level, in (0, 1).
        control: Whether to simulate the control (about a second).
        law: ``"affine"`` (the paper's), ``"power"``, ``"loss"``, or ``"best"``: the one that best predicts
            held-out parts of the run (:mod:`curvestep.fit.laws`). L0 and L1 are always the affine law's.
        loss_floor: Least loss that can be reached, for the law of the loss.
        layer: Name of a layer that the probe measured (``layers=True``): L0 and L1 relate its smoothness to
            the norm of its own gradient. Empty for the whole model.

    Returns:
        The fit: print it, or read ``L0``, ``L1``, ``within`` and ``warnings``.

    Raises:
        ValueError: there are too few usable rows, or an argument is outside of its range.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> trace = Trace()
        >>> for step, g in enumerate(rng.lognormal(size=200)):
        ...     ell = (1 + 2 * g) * rng.uniform(0.9, 1)
        ...     _ = trace.append({"step": step, "grad_norm": g, "smoothness": ell})
        >>> fit = fit_smoothness(trace)
        >>> print(f"{fit.L0:.2f} {fit.L1:.2f} {fit.spearman:.2f}")
        1.00 1.98 1.00
    """
    trace = check_trace(trace)
    check_share("quantile", quantile)
    check_share("level", level)
    check_choice("law", law, (*LAWS, "best"))
    samples = usable_samples(trace, estimator=estimator, layer=layer)
    fit = fit_samples(samples, quantile=quantile, level=level, control=control)
    if law == "affine":
        return fit
    from curvestep.fit.laws import compare_laws

    laws = compare_laws(samples, level=level, loss_floor=loss_floor)
    if law == "best":
        law = laws.best
    elif law not in laws.laws:
        raise ValueError(f'`law="{law}"` cannot be fitted. {laws.doubt}')
    return replace(fit, law=law, laws=laws)


def fit_samples(samples: Samples, *, quantile: float, level: float, control: bool) -> SmoothnessFit:
    """The fit of rows that were chosen already; arguments as of :func:`fit_smoothness`."""
    g = samples.grad_norm
    ell = samples.smoothness
    L0, L1 = quantile_line(g, ell, quantile=quantile)
    rng = np.random.default_rng(0)
    few = evenly_spaced(len(g), most=MOST_ROWS)
    correlations = correlations_of(g[few], ell[few], level=level, resamples=400, rng=rng)
    within = _within(samples, level=level)
    return SmoothnessFit(
        L0=L0,
        L1=L1,
        # In the coordinates (1/g, ℓ/g) the same line has slope L0 and intercept L1.
        L0_interval=slope_interval(1 / g[few], (ell / g)[few], quantile=quantile, level=level, slope=L0),
        L1_interval=slope_interval(g[few], ell[few], quantile=quantile, level=level, slope=L1),
        **vars(correlations),
        control=control_of(samples, quantile=quantile, level=level, rng=rng) if control else None,
        within=within,
        noise_scale=samples.noise_scale,
        num_points=len(samples),
        num_skipped=samples.skipped,
        grad_norm_range=(float(g.min()), float(g.max())),
        estimator=samples.estimator,
        layer=samples.layer,
        quantile=quantile,
        level=level,
        frontier_points=tuple((float(a), float(b)) for a, b in frontier_points(g, ell)),
        warnings=fit_warnings(samples, within, L1=L1, effective=len(g[few]) / correlations.block_length),
        samples=samples,
    )


def _within(samples: Samples, *, level: float) -> Within:
    """The test inside steps; of very many rows it takes evenly spaced ones."""
    if samples.layer:
        return Within(level=level, missing=words.doubt("one-layer"))
    rows = samples.rows(evenly_spaced(len(samples), most=MOST_TESTED_ROWS))
    return within_steps(
        secants=rows.secants,
        grad_norm=rows.grad_norm,
        grad_norms=rows.grad_norms,
        fractions=rows.fractions,
        kappa=rows.kappa,
        eps=rows.eps,
        cosine=rows.cosine,
        level=level,
    )
