"""A learning rate, a clipping threshold and a plain answer, from what was measured along runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from curvestep._checks import check_count, check_positive
from curvestep.advice.rule import rule_for
from curvestep.advice.settings import Setting, best_of, neighbours, next_setting, settings_of
from curvestep.advice.verdict import is_inert, reasons, reasons_of_settings, verdict_on, verdict_on_settings
from curvestep.display.markup import html_table
from curvestep.fit.fit import SmoothnessFit, fit_samples, fit_smoothness
from curvestep.fit.intervals import Interval
from curvestep.fit.samples import check_share, check_trace
from curvestep.smoothness.trace import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True, repr=False)
class Advice:
    """What :func:`advise` recommends; ``print`` it for words.

    ``lr``, ``max_norm`` and ``step_cap`` (the longest step, their product) are None if advice was refused.
    ``clipped_fraction`` is the share of the measured steps that ``max_norm`` would clip, ``gain`` is the
    condition 1 + L1·M/L0 with M the largest gradient norm seen: how much larger a step clipping allows where
    the gradient is small. From several traces the intervals of ``lr`` and ``max_norm`` are the settings tried
    on either side. ``next_setting`` names an ``lr`` and ``max_norm`` worth trying, where there is one.
    ``fit`` is what the advice rests on; None if it was refused.
    """

    lr: float | None = None
    max_norm: float | None = None
    step_cap: float | None = None
    lr_interval: Interval | None = None
    max_norm_interval: Interval | None = None
    step_cap_interval: Interval | None = None
    clipped_fraction: float | None = None
    gain: float | None = None
    noise: float | None = None
    lr_is_inert: bool = False
    next_setting: dict[str, float] | None = None
    verdict: str
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    fit: SmoothnessFit | None = field(default=None, repr=False, compare=False)

    @property
    def refused(self) -> bool:
        """Whether the trace could not support advice; ``reasons`` say why."""
        return self.lr is None

    def __str__(self) -> str:
        lines = [self.verdict]
        lines += [f"  {name:<12}{value}" for name, value in self._table()]
        lines += [f"  - {reason}" for reason in self.reasons]
        return "\n".join(lines + [f"  ! {warning}" for warning in self.warnings])

    def __repr__(self) -> str:
        if self.lr is None or self.max_norm is None:
            return "<Advice: none, for the reasons in .reasons>"
        return f"<Advice: lr {self.lr:.3g}, max_norm {self.max_norm:.3g}>"

    def _repr_html_(self) -> str:
        return html_table(self.verdict, self._table(), (*self.reasons, *self.warnings))

    def plot(self) -> Figure:
        """Step sizes as taken, at the edge of stability and as advised; needs matplotlib."""
        from curvestep.display.drawing import figure_of
        from curvestep.display.results import advised

        if self.fit is None or self.lr is None or self.max_norm is None:
            raise ValueError(f"There is no setting to plot. {self.verdict}")
        return figure_of([advised(self.fit, lr=self.lr, max_norm=self.max_norm)])

    def _table(self) -> list[tuple[str, str]]:
        rows = [
            (name, f"{value:.3g}" + (f"  [{span[0]:.3g}, {span[1]:.3g}]" if span else ""))
            for name, value, span in (
                ("lr", self.lr, self.lr_interval),
                ("max_norm", self.max_norm, self.max_norm_interval),
                ("step_cap", self.step_cap, self.step_cap_interval),
            )
            if value is not None
        ]
        if self.next_setting is not None:
            rows.append(
                ("try next", ", ".join(f"{key} {value:.3g}" for key, value in self.next_setting.items()))
            )
        return rows


def advise(
    *runs: Trace | SmoothnessFit,
    constant: float = 1.5,
    quantile: float = 0.75,
    level: float = 0.9,
    resamples: int = 300,
    seed: int = 0,
) -> Advice:
    r"""A learning rate, ``max_norm`` and longest step for the task that was measured, and why.

    From one trace: the (L0, L1) line of the region that this run visited, and the clipped descent that stays
    below :math:`c/(L_0 + L_1 g)`. That is a local statement, because curvature adapts to the step; and lr
    stays where it is known to be stable (:func:`~curvestep.advice.rule.highest_lr`): below c over a spectral
    smoothness that was recorded, else at most three times the step size that was run. From several traces of
    the same task, or one run whose lr was raised in stages: the largest setting whose loss fell furthest,
    with the step that its region tolerates, and the next setting to try if the best one lies at the edge of
    what was tried.

    Args:
        runs: Probed runs of plain or clipped descent, at least one: traces, or their fits, which are then
            taken as they are (``level`` and ``seed`` of the fit were its own).
        constant: c in :math:`c/(L_0 + L_1 g)`; 0.5 is what theory proves, 1.5 what training needs.
        quantile: Share of the points below the line that stands for the region, in (0, 1).
        level: Level of the intervals, in (0, 1). They hold what the rule gives for every line that the
            rank-score test of :func:`~curvestep.fit.intervals.slope_interval` does not reject, and for a
            higher, a lower and a shifted range of points (block bootstrap). On simulated traces 90 %
            intervals cover what the rule gives for the true law in 89 to 99 % (``lr``), 83 to 99 %
            (``max_norm``) and 81 to 99 % (``step_cap``); the low ends are strongly autocorrelated runs and
            lines through the origin.
        resamples: Bootstrap samples, at least 50.
        seed: Of the bootstrap.

    Returns:
        An :class:`Advice`; if the traces cannot support one, an advice that is ``refused`` and says why.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> trace = Trace()
        >>> for step, g in enumerate(rng.lognormal(size=100)):
        ...     _ = trace.append({"step": step, "loss": 3 - step / 50, "grad_norm": g, "lr": 0.1,
        ...                       "smoothness": (1 + 2 * g) * rng.uniform(0.8, 1), "step_norm": 0.1 * g})
        >>> advice = advise(trace)
        >>> print(f"{advice.lr:.1f} {advice.max_norm:.1f}")    # three times the lr that was run, and no more
        0.3 2.1
    """
    if not runs:
        raise ValueError("`runs` must be at least one trace or fit, got none.")
    for run in runs:
        if not isinstance(run, SmoothnessFit):
            check_trace(run)
    check_positive("constant", constant)
    check_share("quantile", quantile)
    check_share("level", level)
    check_count("resamples", resamples, least=50)
    # A run without rows says nothing.
    runs = tuple(run for run in runs if isinstance(run, SmoothnessFit) or len(run)) or runs[:1]
    options = {
        "constant": constant,
        "quantile": quantile,
        "level": level,
        "resamples": resamples,
        "seed": seed,
    }
    try:
        settings = settings_of(runs)
        if len(settings) == 1:
            run = runs[0]
            fit = fit_smoothness(run, level=level, seed=seed) if isinstance(run, Trace) else run
            return _from_fit(fit, options)
        best = best_of(settings)
        assert best.samples is not None
        fit = best.fit or fit_samples(
            best.samples, quantile=0.95, level=level, resamples=400, seed=seed, control=True
        )
        return _from_settings(best, settings, _from_fit(fit, options))
    except ValueError as error:
        return Advice(verdict=f"No advice: {error}", reasons=(str(error),))


def _from_fit(fit: SmoothnessFit, options: dict[str, Any]) -> Advice:
    rule = rule_for(fit, **options)
    return Advice(
        lr=rule.lr,
        max_norm=rule.max_norm,
        step_cap=rule.step_cap,
        lr_interval=rule.lr_interval,
        max_norm_interval=rule.max_norm_interval,
        step_cap_interval=rule.step_cap_interval,
        clipped_fraction=float(np.mean(fit.samples.grad_norm > rule.max_norm)),
        gain=rule.gain,
        noise=rule.noise,
        lr_is_inert=is_inert(fit),
        verdict=verdict_on(fit, rule),
        reasons=reasons(fit, rule),
        warnings=rule.warnings,
        fit=fit,
    )


def _from_settings(best: Setting, settings: list[Setting], local: Advice) -> Advice:
    """The best setting as it was run; ``local`` is the advice from its trace alone."""
    assert best.samples is not None
    assert local.lr is not None
    assert local.step_cap is not None
    assert local.step_cap_interval is not None
    g = best.samples.grad_norm
    tolerated = local.step_cap if math.isfinite(local.step_cap) else local.lr * float(np.quantile(g, 0.95))
    # A length that was run and stayed stable is safe; without clipping the curvature has to say.
    cap = best.lr * best.max_norm if math.isfinite(best.max_norm) else tolerated
    max_norm = cap / best.lr
    low, high = local.step_cap_interval
    following = next_setting(best, settings)
    return replace(
        local,
        lr=best.lr,
        max_norm=max_norm,
        step_cap=cap,
        lr_interval=neighbours(best.lr, [s.lr for s in settings]),
        max_norm_interval=neighbours(max_norm, [s.max_norm for s in settings if s.lr == best.lr]),
        step_cap_interval=(min(cap, low), max(cap, high)),  # a length that was run is one of them
        clipped_fraction=float(np.mean(g > max_norm)),
        next_setting=following,
        verdict=verdict_on_settings(best, settings, at_edge=following is not None),
        reasons=reasons_of_settings(best, settings),
    )
