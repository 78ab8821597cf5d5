r"""A learning rate, a clipping threshold and a plain answer, from what was measured along a run.

Where :math:`\lVert\nabla^2 f\rVert \le L_0 + L_1 g`, a step size of :math:`h(g) = c/(L_0 + L_1 g)` is stable
for :math:`c < 2` along the direction measured. Clipped descent with threshold :math:`\gamma` stays below it
at every gradient norm exactly if

.. math::
    \eta \le \frac{c}{L_0 + L_1 \gamma}, \qquad \text{so that the longest step is } \eta\gamma .

The constant: theory can prove descent for c up to about 0.57 and c = 0.5 is its round value. On networks that
is far too small, because small steps lead into sharp regions where only smaller steps are stable. On a
character-level RNN and LSTM, c = 1.5 with the 75 % line came within 0.6 to 4.5 % of a tuned grid (one or two
seeds, c chosen on one of them), c = 1.0 and c = 0.5 were clearly worse, c = 2 unstable. On Penn Treebank the
product of step size and smoothness sat between 1.4 and 1.9 wherever training worked.
"""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from curvestep._checks import check_count, check_positive
from curvestep.advice.rule import Line, plausible_lines, quantile_factors
from curvestep.advice.settings import Setting, best_of, neighbours, next_setting, settings_of
from curvestep.advice.verdict import LITTLE_GAIN, does_clipping_pay, loss_rose, reasons, tolerated, went
from curvestep.fit.correlation import Interval
from curvestep.fit.diagnostics import doubts_about
from curvestep.fit.evidence import Evidence, weigh
from curvestep.fit.frontier import quantile_line
from curvestep.fit.intervals import block_length
from curvestep.fit.samples import Points, check_share, check_trace, usable_points
from curvestep.smoothness.trace import Trace

_LEAST_ROWS = 20
_MOST_ROWS = 2000  # longer runs are resampled at evenly spaced rows
_INERT = 0.9  # share of clipped steps from which lr no longer matters by itself


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What :func:`advise` recommends; ``print`` it for words.

    ``lr``, ``max_norm`` and ``step_cap`` (the longest step, their product) are None if advice was refused.
    ``clipped_fraction`` is the share of the measured steps that ``max_norm`` would clip, ``gain`` is
    κ = 1 + L1·M/L0 with M the largest gradient norm seen: how much larger a step clipping allows where the
    gradient is small. From several traces the intervals of ``lr`` and ``max_norm`` are the settings tried on
    either side. ``next_setting`` names an ``lr`` and ``max_norm`` worth trying, where there is one.
    """

    lr: float | None
    max_norm: float | None
    step_cap: float | None
    lr_interval: Interval | None
    max_norm_interval: Interval | None
    step_cap_interval: Interval | None
    clipped_fraction: float | None
    gain: float | None
    noise: float | None
    lr_is_inert: bool
    next_setting: dict[str, float] | None
    verdict: str
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def refused(self) -> bool:
        """Whether the trace could not support advice; ``reasons`` say why."""
        return self.lr is None

    def __str__(self) -> str:
        lines = [self.verdict]
        lines += [f"  {name:<12}{value}" for name, value in self._table()]
        lines += [f"  - {reason}" for reason in self.reasons]
        return "\n".join(lines + [f"  ! {warning}" for warning in self.warnings])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{html.escape(a)}</th><td>{html.escape(b)}</td></tr>" for a, b in self._table()
        )
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in (*self.reasons, *self.warnings))
        return f"<p>{html.escape(self.verdict)}</p><table>{rows}</table><ul>{notes}</ul>"

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
    *traces: Trace,
    constant: float = 1.5,
    quantile: float = 0.75,
    level: float = 0.9,
    resamples: int = 300,
    seed: int = 0,
) -> Advice:
    r"""A learning rate, ``max_norm`` and longest step for the task that was measured, and why.

    From one trace: the (L0, L1) line of the region that this run visited, and the clipped descent that stays
    below :math:`c/(L_0 + L_1 g)`. That is a local statement, because curvature adapts to the step; and an L1
    that a constant Hessian would show as well does not raise lr (:func:`highest_lr`). From
    several traces of the same task, or one run whose lr was raised in stages: the largest setting whose
    loss fell furthest, with the step that its region tolerates, and the next setting to try if the best one
    lies at the edge of what was tried.

    Args:
        traces: Probed runs of plain or clipped descent, at least one.
        constant: c in :math:`c/(L_0 + L_1 g)`; 0.5 is what theory proves, 1.5 what training needs.
        quantile: Share of the points below the line that stands for the region, in (0, 1).
        level: Level of the intervals, in (0, 1). They hold what the rule gives for every line that the
            rank-score test of :func:`~curvestep.fit.scores.slope_interval` does not reject, and for a
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
        >>> print(f"{advice.lr:.1f} {advice.max_norm:.1f}")
        0.8 0.5
    """
    if not traces:
        raise ValueError("`traces` must be at least one trace, got none.")
    for trace in traces:
        check_trace(trace)
    check_positive("constant", constant)
    check_share("quantile", quantile)
    check_share("level", level)
    check_count("resamples", resamples, least=50)
    traces = tuple(trace for trace in traces if len(trace)) or traces[:1]  # a run without rows says nothing
    try:
        settings = settings_of(traces)
        if len(settings) == 1:
            points = usable_points(traces[0])
            _check_supports(points)
            return _from_one(
                points, constant=constant, quantile=quantile, level=level, resamples=resamples, seed=seed
            )
        best = best_of(settings)
        assert best.points is not None
        _check_supports(best.points)
        local = _from_one(
            best.points, constant=constant, quantile=quantile, level=level, resamples=resamples, seed=seed
        )
        return _from_several(best, settings, local, staged=len(traces) == 1)
    except ValueError as error:
        return _refusal(str(error))


def clipping_below(
    L0: float, L1: float, *, constant: float, least: float, most: float, most_lr: float = math.inf
) -> tuple[float, float]:
    r"""``(lr, max_norm)`` of the clipped descent that stays below :math:`c/(L_0 + L_1 g)` at every g.

    The corner :math:`\gamma = L_0/L_1`, where both parts of the bound are equal, moved into [least, most],
    and :math:`\eta = c/(L_0 + L_1\gamma)`. With c = 1 and the corner inside this is lr 1/(2 L0), max_norm
    L0/L1, the simplest recipe with a descent guarantee (lr 1/L0 with the same threshold has none). Where
    that lr is above ``most_lr``, the threshold rises to where the bound meets ``most_lr``.

    Example:
        >>> clipping_below(2.0, 4.0, constant=1.0, least=0.0, most=9.0)
        (0.25, 0.5)
        >>> clipping_below(2.0, 0.0, constant=1.0, least=0.0, most=9.0)
        (0.5, inf)
        >>> clipping_below(2.0, 4.0, constant=1.0, least=0.0, most=9.0, most_lr=0.1)
        (0.1, 2.0)
    """
    if L1 == 0:
        return min(constant / L0, most_lr), math.inf
    corner = max(L0, constant / most_lr - L0) / L1
    max_norm = min(max(corner, least), most)
    return min(constant / (L0 + L1 * max_norm), most_lr), max_norm


def highest_lr(points: Points, evidence: Evidence, *, constant: float, gain: float) -> float:
    """What lr is kept to; infinity where smoothness follows the gradient norm and the loss did not rise.

    Where a constant Hessian would show as much, a small smoothness at a small gradient may only mean that the
    sharp directions were worked off; they are still there. Then an L1 that matters must not raise lr beyond
    the textbook's step for a constant Hessian, one over the largest smoothness measured (a direction's, so it
    may fall short of the Hessian's), or today's step size, which was run. Where the loss rose, today's is
    already too large.
    """
    careful = (
        math.inf
        if evidence.supports_slope or gain < LITTLE_GAIN
        else min(constant, 1.0) / float(points.smoothness.max())
    )
    today = float(np.nanmedian(points.step_size))
    return max(careful, today) if evidence.rise is None else min(careful, today)


def _from_one(
    points: Points,
    *,
    constant: float,
    quantile: float,
    level: float,
    resamples: int,
    seed: int,
) -> Advice:
    g, ell, rng = points.grad_norm, points.smoothness, np.random.default_rng(seed)
    L0, L1 = quantile_line(g, ell, quantile=quantile)
    if L0 == 0 and L1 == 0:
        raise ValueError("the smoothness is zero at nearly every step: no curvature bounds no step.")
    noise = float(np.nanmedian(points.noise)) if np.isfinite(points.noise).any() else None
    low, high = np.quantile(g, [0.05, 0.95])
    # Below the smallest norms seen a threshold rests on nothing; below five times the noise it clips noise.
    least = max(float(low), 5.0 * noise if noise is not None else 0.0)
    most = max(float(high), least)

    gain = 1 + L1 * float(g.max()) / L0 if L0 > 0 else math.inf
    evidence = weigh(points, level=level, seed=seed)
    most_lr = highest_lr(points, evidence, constant=constant, gain=gain)

    def recommend(
        line: Line, least: float, most: float, *, most_lr: float = math.inf
    ) -> tuple[float, float, float]:
        most = max(most, least)
        lr, max_norm = clipping_below(*line, constant=constant, least=least, most=most, most_lr=most_lr)
        return lr, max_norm, lr * max_norm

    few = slice(None, None, -(-len(g) // _MOST_ROWS))
    chosen = block_length(g[few], ell[few])
    factors = partial(quantile_factors, length=chosen, level=level, resamples=resamples, rng=rng)
    height = factors((ell / (L0 + L1 * g))[few], quantile)
    lines = plausible_lines(g[few], ell[few], (L0, L1), height, quantile=quantile, level=level)
    ranges = zip((1.0, *factors(g[few], 0.05)), (1.0, *factors(g[few], 0.95)), strict=True)
    point = recommend((L0, L1), least, most, most_lr=most_lr)
    # The intervals go on to where L1 would lead if it is real: whether it is, is what cannot be told.
    drawn = [point] + [recommend(line, least * a, most * b) for a, b in ranges for line in lines]
    spans = [(min(values), max(values)) for values in zip(*drawn, strict=True)]
    lr, max_norm, cap = point
    held = math.isclose(lr, most_lr, rel_tol=1e-9)
    inert = bool(points.clipped.mean() >= _INERT)
    sentences = (
        loss_rose(evidence),
        does_clipping_pay(points, L0, L1, gain, noise, evidence),
        tolerated(points, L0, L1, constant, most_lr=most_lr, evidence=evidence),
    )
    return Advice(
        lr=lr,
        max_norm=max_norm,
        step_cap=cap,
        lr_interval=spans[0],
        max_norm_interval=spans[1],
        step_cap_interval=spans[2],
        clipped_fraction=float(np.mean(g > max_norm)),
        gain=gain,
        noise=noise,
        lr_is_inert=inert,
        next_setting=None,
        verdict=" ".join(sentence for sentence in sentences if sentence),
        reasons=reasons(points, L0, L1, gain, noise, inert, constant, held=held, evidence=evidence),
        warnings=doubts_about(points, L1=L1, effective=len(g[few]) / chosen),
    )


def _from_several(best: Setting, settings: list[Setting], local: Advice, *, staged: bool) -> Advice:
    assert best.points is not None
    assert local.step_cap is not None
    assert local.lr is not None
    span = local.step_cap_interval
    assert span is not None
    high = float(np.quantile(best.points.grad_norm, 0.95))
    tolerated = local.step_cap if math.isfinite(local.step_cap) else local.lr * high
    # A length that was run and stayed stable is safe; without clipping the curvature has to say.
    cap = best.lr * best.max_norm if math.isfinite(best.max_norm) else tolerated
    max_norm = cap / best.lr
    following = next_setting(best, settings)
    lost = [s.words for s in settings if s.diverged]
    how = "its loss fell fastest" if staged else "its loss ended lowest"
    verdict = (
        f"Take {best.words}: of the {len(settings)} settings measured {how}, or as low with a larger step."
    )
    if following is not None:
        verdict += " It lies at the edge of what was tried, so try the next one before settling."
    else:
        verdict += " Settings on both sides of it did worse."
    kappa = float(np.nanmedian(best.points.kappa))
    why = [f"{s.words}: {went(s, staged=staged)}" for s in sorted(settings, key=lambda s: s.lr)]
    why.append(f"in the region of the best run one step changes the gradient by {kappa:.2f} times its norm")
    if math.isinf(best.max_norm):
        why.append("the best run did not clip; the max_norm given only guards against a stray long step")
    if lost:
        why.append(f"diverged: {'; '.join(lost)}")
    if staged:
        why.append("stages follow each other, so a later one starts from a lower loss: a hint, not a race")
    return Advice(
        lr=best.lr,
        max_norm=max_norm,
        step_cap=cap,
        lr_interval=neighbours(best.lr, [s.lr for s in settings]),
        max_norm_interval=neighbours(max_norm, [s.max_norm for s in settings if s.lr == best.lr]),
        step_cap_interval=(min(cap, span[0]), max(cap, span[1])),  # a length that was run is one of them
        clipped_fraction=float(np.mean(best.points.grad_norm > max_norm)),
        gain=local.gain,
        noise=local.noise,
        lr_is_inert=local.lr_is_inert,
        next_setting=following,
        verdict=verdict,
        reasons=tuple(why),
        warnings=local.warnings,
    )


def _check_supports(points: Points) -> None:
    if len(points) < _LEAST_ROWS:
        raise ValueError(
            f"{len(points)} usable rows are too few; {_LEAST_ROWS} are needed. Probe more often or longer."
        )
    known = np.isfinite(points.lr) & np.isfinite(points.step_norm)
    if not known.any():
        raise ValueError("neither lr nor step lengths were recorded, so the step taken is unknown.")
    told = np.isfinite(points.coefficient)
    expected = points.lr * points.grad_norm * np.where(told, points.coefficient, 1.0)
    ratio = float(np.median((points.step_norm / expected)[known]))
    # Where no coefficient was told, a step shorter than lr·‖g‖ may simply have been clipped.
    if ratio > 1.1 or (ratio < 0.9 and told[known].all()):
        if ratio > 0:
            _check_not_normalized(points)
        raise ValueError(
            f"steps are {ratio:.3g} times what lr, gradient and clipping give. So they are no plain or "
            "clipped descent (momentum, Adam, weight decay), or were measured on other batches than "
            "they were taken on, and lr and max_norm do not follow from L0 and L1. Probe plain SGD on its "
            "training batches, or read the fit itself."
        )


def _check_not_normalized(points: Points) -> None:
    r"""Steps of length :math:`\rho = \eta g/(g + \beta)` have the same :math:`\eta g/\rho - g` all along."""
    moved = np.isfinite(points.lr) & (points.step_norm > 0)
    g = points.grad_norm[moved]
    low, middle, high = np.quantile(points.lr[moved] * g / points.step_norm[moved] - g, [0.1, 0.5, 0.9])
    if middle > 0 and high - low <= 0.01 * middle + 1e-4 * float(np.median(g)):
        lr = float(np.nanmedian(points.lr))
        raise ValueError(
            f"these are steps of normalized descent (NormalizedSGD, lr {lr:.3g}, offset {middle:.3g}), whose "
            "lr is a length; lr and max_norm are those of clipped descent. Probe a run of ClippedSGD, for "
            f"steps alike lr {lr / middle:.3g} with max_norm {middle:.3g}, or read the fit itself."
        )


def _refusal(reason: str) -> Advice:
    return Advice(
        lr=None,
        max_norm=None,
        step_cap=None,
        lr_interval=None,
        max_norm_interval=None,
        step_cap_interval=None,
        clipped_fraction=None,
        gain=None,
        noise=None,
        lr_is_inert=False,
        next_setting=None,
        verdict=f"No advice: {reason}",
        reasons=(reason,),
        warnings=(),
    )
