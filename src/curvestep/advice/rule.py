r"""The clipped descent that stays below c/(L0 + L1 g), with intervals.

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

import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from curvestep.advice.decision import INERT, KEEP, LOWER, MOST, RAISE, Decision
from curvestep.advice.outcome import Start, share_of_peak
from curvestep.fit.fit import SmoothnessFit
from curvestep.fit.frontier import quantile_line
from curvestep.fit.intervals import Interval, block_interval, block_length, slope_interval
from curvestep.fit.samples import Samples, evenly_spaced, typical_clip_norm
from curvestep.fit.within import LEAST_ELASTICITY

LITTLE_GAIN = 1.5  # below it clipping is not worth its threshold
_MOST_ROWS = 2000  # longer runs are resampled at evenly spaced rows
_LINES = 9  # looked at across an interval
_ALIKE = 1.1  # by which nine tenths and one tenth of the later smoothness differ where it is constant

Line = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The clipped descent for the region that a run visited, and the numbers that it follows from."""

    L0: float
    L1: float
    constant: float
    gain: float  # 1 + L1·M/L0, the condition of the region, with M the largest gradient norm
    noise: float | None
    today: float  # the step size that was run, at the peak of lr
    most_lr: float
    limit: str  # what ``most_lr`` comes from
    lr: float
    max_norm: float
    lr_interval: Interval
    max_norm_interval: Interval
    step_cap_interval: Interval
    warnings: tuple[str, ...]

    @property
    def step_cap(self) -> float:
        """The longest step."""
        return self.lr * self.max_norm


def rule_for(
    fit: SmoothnessFit,
    start: Start | None,
    *,
    constant: float,
    quantile: float,
    level: float,
    resamples: int,
    seed: int,
) -> Rule:
    """The clipped descent below ``constant`` over the quantile line of the samples of a fit.

    Raises:
        ValueError: If the samples show no curvature.
    """
    samples = fit.samples
    g, ell, rng = samples.grad_norm, samples.smoothness, np.random.default_rng(seed)
    L0, L1 = quantile_line(g, ell, quantile=quantile)
    if L0 == 0 and L1 == 0:
        raise ValueError("the smoothness is zero at nearly every step: no curvature bounds no step.")
    noise = float(np.nanmedian(samples.noise)) if np.isfinite(samples.noise).any() else None
    low, high = np.quantile(g, [0.05, 0.95])
    # Below the smallest norms seen a threshold rests on nothing; below five times the noise it clips noise.
    least = max(float(low), 5.0 * noise if noise is not None else 0.0)
    most = max(float(high), least)
    gain = 1 + L1 * float(g.max()) / L0 if L0 > 0 else math.inf
    # A step beyond κ = 2 overshoots, so that it was run is no sign that it is stable.
    sizes = np.minimum(samples.step_size, 2 / np.maximum(samples.smoothness, 1e-300))
    today = float(np.nanmedian(sizes[~(share_of_peak(samples.lr) < 0.9)]))
    most_lr, limit = highest_lr(fit, start, today, constant=constant, gain=gain)
    lr, max_norm = clipping_below(L0, L1, constant=constant, least=least, most=most, most_lr=most_lr)
    lr = below_spectral(samples, lr, max_norm, constant=constant)

    few = evenly_spaced(len(g), most=_MOST_ROWS)
    length = block_length(g[few], ell[few])
    factors = partial(quantile_factors, length=length, level=level, resamples=resamples, rng=rng)
    height = factors((ell / (L0 + L1 * g))[few], quantile)
    lines = plausible_lines(g[few], ell[few], (L0, L1), height, quantile=quantile, level=level)
    ranges = zip((1.0, *factors(g[few], 0.05)), (1.0, *factors(g[few], 0.95)), strict=True)
    drawn = [(lr, max_norm, lr * max_norm)]
    for lower, upper in ranges:
        for line in lines:
            ends = {"least": least * lower, "most": max(most * upper, least * lower)}
            # Without `most_lr`: the intervals also cover the case that L1 is real.
            one, other = clipping_below(*line, constant=constant, **ends)
            drawn.append((one, other, one * other))
    spans = [(min(values), max(values)) for values in zip(*drawn, strict=True)]
    return Rule(
        L0=L0,
        L1=L1,
        constant=constant,
        gain=gain,
        noise=noise,
        today=today,
        most_lr=most_lr,
        limit=limit,
        lr=lr,
        max_norm=max_norm,
        lr_interval=spans[0],
        max_norm_interval=spans[1],
        step_cap_interval=spans[2],
        warnings=(*map(str, fit.warnings), *noise_bias(samples, max_norm, noise)),
    )


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


def highest_lr(
    fit: SmoothnessFit, start: Start | None, today: float, *, constant: float, gain: float
) -> tuple[float, str]:
    """What lr is kept to, and where that comes from; what was not run is never far from what was.

    - Where a spectral value was recorded and nothing shows that smoothness follows the gradient norm: c over
      the largest. It knows every direction.
    - Without one, at most three times the step size that was run: directions in which the gradient has no
      part, because they were worked off or drown in noise, do not show along the steps.
    - Where nothing shows that smoothness follows the gradient norm, a small smoothness at a small gradient
      may only mean that the sharp directions were worked off. At the start they were not: lr stays below the
      step that changes the gradient there by its own norm, by the very first row if its step was long.
      Without the start's rows, and with a gain that matters, lr stays below the textbook's step for a
      constant Hessian, one over the largest smoothness measured; with little gain below c over the upper
      quantile. Today's step size was run, so it stays allowed.
    """
    samples = fit.samples
    run = f"today's step size is {today:.3g}"
    spectral = samples.spectral[np.isfinite(samples.spectral)]
    if len(spectral):
        if fit.supports_slope:
            return math.inf, ""
        largest = float(spectral.max())
        return constant / largest, f"{constant:g} over the largest spectral smoothness, {largest:.3g}"
    limits = [(MOST * today, f"{run}, and three times that is the most that it can vouch for")]
    if fit.supports_slope:
        return limits[0]
    if start is not None:
        careful = start.lr
        if start.edge > 0.25:  # one long step may work off what is sharp: rows after it say nothing of that
            careful = min(careful, min(constant, 1.0) / float(samples.smoothness[0]))
        words = f"{run}, and a step size of {careful:.3g} changes the start's gradient by its norm"
        limits.append((max(careful, today), words))
    elif gain < LITTLE_GAIN:
        careful = constant / float(np.quantile(samples.smoothness, 0.95))
        words = f"{constant:g} over the largest smoothness measured, but for one in twenty, is {careful:.3g}"
        limits.append((max(careful, today), f"{run}, and {words}"))
    else:
        careful = min(constant, 1.0) / float(samples.smoothness.max())
        words = f"{run}, and one over the largest smoothness measured is {careful:.3g}"
        limits.append((max(careful, today), words))
    return min(limits)


def below_spectral(samples: Samples, lr: float, max_norm: float, *, constant: float) -> float:
    r"""``lr`` lowered until no step is beyond c over the spectral smoothness recorded with its gradient.

    .. math::
        r_i\,\eta\,\min\{1, \gamma/g_i\} \le c/\lambda_i \quad\text{for every row } i \text{ with } \lambda_i

    with :math:`r_i` the share of its peak that lr had there: the schedule stays what it was.
    """
    share = share_of_peak(samples.lr)
    known = np.isfinite(samples.spectral) & (samples.spectral > 0) & (share > 0)
    bounds = constant / (share * samples.spectral)[known]
    bounds = bounds * np.maximum(samples.grad_norm[known] / max_norm, 1.0)
    return min(lr, float(bounds.min(initial=math.inf)))


def highest_unclipped_lr(fit: SmoothnessFit, decision: Decision, *, constant: float) -> tuple[float, str]:
    """The most that lr may be where steps are not clipped, and where that comes from.

    What was run is kept while lr times the smoothness is at most 2; what is new stays at c. Where nearly
    every step was clipped and longer ones are advised, lr is at most three times the largest step size: that
    was run, and lr was not.
    """
    samples, lr = fit.samples, decision.lr
    spectral, inert = np.isfinite(samples.spectral).any(), samples.clipped.mean() >= INERT
    edge = 2.0 if decision.action == KEEP else min(constant, 2.0)
    largest, kind = math.nan, "smoothness"
    if spectral:
        largest, kind = spectral_below(fit, decision.max_norm), "spectral smoothness"
    elif inert and decision.action != LOWER:  # shorter steps lead elsewhere
        largest = constant_smoothness(fit)
    if lr * largest > edge * (1 + 1e-9):
        return min(constant, 2.0) / largest, f"lr times the {kind} was {lr * largest:.3g}, above {edge:g}"
    if decision.action == RAISE and inert and not spectral:
        tried = float(np.nanmax(samples.step_size / share_of_peak(samples.lr)))
        return MOST * tried, f"the largest step size that was run is {tried:.3g}"
    return math.inf, ""


def spectral_below(fit: SmoothnessFit, max_norm: float) -> float:
    r"""The largest :math:`r_i \lambda_i`, with :math:`r_i` the share of its peak that lr had; NaN if unknown.

    Where inside the steps smoothness follows the gradient norm, or may do so, only rows with gradients up to
    the threshold count, and the tenth with the smallest: they are nearest to where clipping ends. And none,
    where the spectral values themselves follow it.
    """
    samples, g = fit.samples, fit.samples.grad_norm
    asked = np.isfinite(samples.spectral)
    if fit.supports_slope and fit.spectral is not None and fit.spectral.spearman_interval[0] > 0:
        return math.nan
    if fit.supports_slope or fit.within.missing:
        asked = asked & (g <= max(max_norm, float(np.quantile(g[asked], 0.1))))
    return float((share_of_peak(samples.lr) * samples.spectral)[asked].max())


def constant_smoothness(fit: SmoothnessFit) -> float:
    """The smoothness that all later steps show alike, whatever the gradient; NaN where they do not.

    Clipped steps too long for a constant Hessian end so: they go back and forth where it is sharpest.
    """
    later = (share_of_peak(fit.samples.lr) * fit.samples.smoothness)[len(fit.samples) // 2 :]
    low, high = np.quantile(later, [0.1, 0.9])
    grows = not fit.within.missing and fit.within.elasticity_interval[1] > LEAST_ELASTICITY
    return math.nan if grows or high > _ALIKE * low else float(high)


def noise_bias(samples: Samples, max_norm: float, noise: float | None) -> tuple[str, ...]:
    r"""A warning where a threshold, run or advised, lies below five times the gradient noise.

    Clipping below it cuts the noise unevenly and biases the mean step: gradients stay above a floor of
    :math:`\min\{\sigma, \sigma^2/\gamma\}` whatever lr is (Koloskova, Hendrikx and Stich, 2023).
    """
    if noise is None:
        return ()
    run = typical_clip_norm(samples.clip_norm)
    return tuple(
        f"{name} is below five times the gradient noise ({noise:.3g}). Clipping then biases the mean step: "
        f"no lr brings the gradient below about {min(noise, noise**2 / norm):.2g}. Raise max_norm or the "
        "batch size."
        for name, norm in ((f"The run's max_norm, {run:.3g},", run), (f"max_norm {max_norm:.3g}", max_norm))
        if norm < 5 * noise * (1 - 1e-9)
    )


def quantile_factors(
    values: np.ndarray, share: float, *, length: int, level: float, resamples: int, rng: np.random.Generator
) -> Interval:
    """By which factors a quantile of ``values``, all at least zero, may be off."""
    logs = np.log(np.maximum(values, 1e-300))
    low, high = block_interval(
        lambda x, _: np.quantile(x, share, axis=1),
        logs,
        logs,
        length=length,
        level=level,
        resamples=resamples,
        rng=rng,
    )
    middle = float(np.quantile(logs, share))
    return math.exp(low - middle), math.exp(high - middle)


def plausible_lines(
    g: np.ndarray, ell: np.ndarray, line: Line, level_interval: Interval, *, quantile: float, level: float
) -> list[Line]:
    """Lines (L0, L1) that the data do not reject.

    Each kept slope with the intercept that goes with it, and the line itself moved as a whole. In the
    coordinates (1/g, ℓ/g) the same line has slope L0 and intercept L1, so both slopes have their turn.
    """
    found = [(scale * line[0], scale * line[1]) for scale in (1.0, *level_interval)]
    for x, y, estimate, turned in ((g, ell, line[1], False), (1 / g, ell / g, line[0], True)):
        low, high = slope_interval(x, y, quantile=quantile, level=level, slope=estimate)
        for slope in np.linspace(low, high, _LINES):
            intercept = max(0.0, float(np.quantile(y - slope * x, quantile)))
            found.append((float(slope), intercept) if turned else (intercept, float(slope)))
    return [one for one in found if max(one) > 0]


def check_steps(samples: Samples) -> None:
    """Refuse steps that are unknown."""
    if not (np.isfinite(samples.lr) & np.isfinite(samples.step_norm)).any():
        raise ValueError("neither lr nor step lengths were recorded, so the step taken is unknown.")
