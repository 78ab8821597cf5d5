"""When not to trust a fit: each reason by its kind and in words, with the numbers that raised it.

A new warning is a function here and a line of the table in ``docs/trust.md``.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

from curvestep.fit.correlation import correlation, spearman
from curvestep.fit.frontier import quantile_line
from curvestep.fit.intervals import block_length
from curvestep.fit.samples import Samples
from curvestep.fit.within import Within
from curvestep.notes import Note
from curvestep.trace.history import typical
from curvestep.trace.schema import ESTIMATORS

_WINDOWS = 8
_FEW = 5  # rows that make a pattern


def fit_warnings(samples: Samples, within: Within, *, L1: float, effective: float) -> tuple[Note, ...]:
    """Reasons to doubt a fit; ``effective`` is the number of rows over the block length."""
    notes = (
        few_points(samples, effective),
        narrow_range(samples),
        far_row(samples),
        saturation(samples, L1),
        edge_of_stability(samples),
        noise_floor(samples),
        inside_steps(within),
        time_as_cause(samples),
        kinks(samples),
        noisy_norms(samples),
        uneven_spread(samples),
        unconverged(samples),
    )
    return tuple(note for note in notes if note is not None)


def few_points(samples: Samples, effective: float) -> Note | None:
    """Too few rows, or too few independent ones.

    A norm whose neighbours correlate by r is worth n(1 - r)/(1 + r) rows: blocks do not see a drift that
    is longer than they are.
    """
    log = np.log(samples.grad_norm)
    r = float(np.fmax(correlation(log[None, :-1], log[None, 1:])[0], 0.0))  # 0 where it is NaN
    effective = min(effective, len(log) * (1 - r) / (1 + r))
    if len(samples) >= 50 and effective >= 10:
        return None
    return Note(
        "few-points",
        f"Few points: {len(samples)} rows count as only {max(effective, 1):.0f} independent ones. "
        "Read all intervals as rough; probe more often or longer.",
    )


def narrow_range(samples: Samples) -> Note | None:
    """A gradient norm that stays within a factor of 1.5 in nine rows of ten shows no slope."""
    low, high = np.quantile(samples.grad_norm, [0.05, 0.95])
    if high >= 1.5 * low:
        return None
    return Note(
        "narrow-range",
        f"Gradient norms stayed between {low:.3g} and {high:.3g} in nine rows of ten. That is too narrow to "
        "estimate L1.",
    )


def far_row(samples: Samples) -> Note | None:
    """Rows so far out that they alone set the slope: one beyond all measure, or a handful of bad batches."""
    middle, high = np.quantile(samples.grad_norm, [0.5, 0.9])
    largest = float(samples.grad_norm.max())
    far = samples.grad_norm > 8 * high
    if largest >= 1e6 * middle:
        fact = f"The largest gradient norm is {largest / middle:.1e} times the median"
    elif far.sum() >= 3 and far.mean() >= 0.01:
        fact = f"{far.sum()} rows have gradient norms above {8 * high:.3g}, eight times those of nine in ten"
    else:
        return None
    return Note(
        "far-row",
        f"{fact}: such rows alone set the slope, and the interval of L0 may be too narrow. Fit the trace "
        "without them if they are not part of the training you ask about.",
    )


def saturation(samples: Samples, L1: float) -> Note | None:
    """Where clipped steps all turn the gradient over by the same amount, the step length sets the slope."""
    known = samples.kappa[np.isfinite(samples.kappa)]
    if not len(known) or samples.clipped.mean() <= 0.5:
        return None
    low, kappa, high = np.quantile(known, [0.25, 0.5, 0.75])
    if kappa < 1.0 or high - low > 0.3 * kappa:
        return None
    length = np.median(samples.step_norm)
    return Note(
        "kappa-saturated",
        f"L1 is not reliable (κ is saturated): most steps change the gradient by {kappa:.2f} times its norm. "
        f"So L1, {L1:.3g}, mirrors the length of your steps, {length:.3g}: that gives {kappa / length:.3g}. "
        'Add `estimators={"local_smoothness": 1}` to the probe, and fit that `estimator`.',
    )


def edge_of_stability(samples: Samples) -> Note | None:
    """At the edge of stability smoothness is 2/lr, whatever the gradient: lr·L/2 near 1, unclipped."""
    plain = ~samples.clipped & np.isfinite(samples.step_size)
    if 2 * plain.sum() < len(samples):
        return None
    number = float(np.median((samples.step_size * samples.smoothness)[plain] / 2))
    rank = spearman(samples.grad_norm[None, plain], samples.smoothness[None, plain])[0]
    if not (0.65 <= number <= 1.35 and rank < 0.5):  # NaN where one of them is constant
        return None
    return Note(
        "edge-of-stability",
        f"Edge of stability: lr·L/2 is {number:.2f} in the median of the unclipped steps. Sharpness has "
        "settled near 2/lr whatever the gradient norm. So the fit measures your lr.",
    )


def noise_floor(samples: Samples) -> Note | None:
    """A change of the gradient near its rounding error, or near the error of a replay."""
    middle = typical(samples.kappa, missing=math.inf)
    change = f"Noise floor: a step changes the gradient by {middle:.1e} of its norm, near "
    # In half precision sums are kept in float32, so that the rounding of one gradient is about one eps.
    factor = 100 if samples.eps < 1e-4 else 10
    if middle < factor * samples.eps:
        return Note(
            "noise-floor",
            f"{change}the rounding error of the precision ({samples.eps:.1e}). Measure in a higher one "
            "(without autocast, in float64) or over longer steps.",
        )
    if middle < 10 * samples.self_test:
        return Note(
            "noise-floor",
            f"{change}the difference of two runs of the same gradient ({samples.self_test:.1e}). Take the "
            "randomness out of the closure, or measure over longer steps.",
        )
    return None


def inside_steps(within: Within) -> Note | None:
    """What the test inside steps could not tell."""
    return Note("inside-steps", str(within)) if within.doubt else None


def time_as_cause(samples: Samples) -> Note | None:
    """A correlation over the whole run that is not there within parts of it.

    Gradient norm and smoothness both change in the course of training, whatever one has to do with the other.
    The rank correlation within eight windows of consecutive rows, with a 99 % interval of their mean widened
    by 0.15, is held against that over all rows.
    """
    if len(samples) < 10 * _WINDOWS:
        return None
    g = samples.grad_norm
    ell = samples.smoothness
    parts = np.array_split(np.arange(len(g)), _WINDOWS)
    inside = np.array([spearman(g[None, part], ell[None, part])[0] for part in parts])
    pooled = float(spearman(g[None], ell[None])[0])
    mean = float(inside.mean())
    reach = float(stats.t.ppf(0.995, _WINDOWS - 1)) * float(inside.std(ddof=1)) / math.sqrt(_WINDOWS) + 0.15
    if not abs(pooled - mean) > reach:  # NaN where a window is constant
        return None
    return Note(
        "time-as-cause",
        f"Time may be the common cause: the rank correlation is {pooled:.2f} overall but {mean:.2f} within "
        f"{_WINDOWS} parts of the run. Both drift in training, and L0 and L1 mix the two. Believe `within`, "
        "or fit a shorter part.",
    )


def kinks(samples: Samples) -> Note | None:
    """Steps over kinks, as of a ReLU: the gradient jumps, however short the step.

    Then the secants of a row differ although the gradient hardly changes: by a factor of nearly two if the
    kink lies in the first half of the step, by more if in the second; on smooth functions by about κ/2.
    """
    short = (samples.kappa < 0.1) & (samples.kappa > 1000 * samples.eps)  # not those that rounding disturbs
    if short.mean() < 0.5:
        return None
    secants = samples.secants[short]
    secants = secants[(np.isfinite(secants) & (secants > 0)).all(axis=1)]
    apart = secants.max(axis=1, initial=1e-300) >= 1.5 * secants.min(axis=1, initial=np.inf)
    if apart.sum() < _FEW or apart.mean() < 0.1:
        return None
    return Note(
        "kinks",
        f"Kinks: in {apart.mean():.0%} of the short steps sharpness differs by half or more along the step. "
        'So it shows jumps of the gradient, not sharpness. Add `estimators={"local_smoothness": 1}`.',
    )


def noisy_norms(samples: Samples) -> Note | None:
    """A gradient norm of which a good part is the batch's noise, where that was measured."""
    share = samples.noise / samples.grad_norm
    share = share[np.isfinite(share)]
    if len(share) < _FEW or np.median(share) < 0.3:
        return None
    return Note(
        "noisy-norms",
        f"Noise in the gradient norm: {np.median(share):.0%} of the norm is noise. L0 and L1 hold for the "
        "gradient of a batch, not for that of all data. Use larger batches, or an oracle of "
        "fixed ones.",
    )


def uneven_spread(samples: Samples) -> Note | None:
    """A scatter around the middle line that grows with the gradient norm bends the upper line."""
    g = samples.grad_norm
    ell = samples.smoothness
    L0, L1 = quantile_line(g, ell, quantile=0.5)
    known = (ell > 0) & (L0 + L1 * g > 0)
    if known.sum() < 10 * _FEW:
        return None
    away = np.abs(np.log(ell[known] / (L0 + L1 * g[known])))
    rank = float(spearman(g[None, known], away[None])[0])
    if not (rank > 0.15 and rank * math.sqrt(len(away) / block_length(away, g[known])) > 0.9):
        return None
    return Note(
        "uneven-spread",
        f"The scatter of sharpness grows with the gradient norm (rank correlation {rank:.2f}). So L0 is "
        "too small, and its interval too narrow.",
    )


def unconverged(samples: Samples) -> Note | None:
    """Estimates that had to be left out."""
    if samples.num_unconverged == 0:
        return None
    return Note(
        "unconverged",
        f"{samples.num_unconverged} of {samples.num_estimates} estimates had not converged and are left out: "
        f"{ESTIMATORS[samples.estimator].if_not}.",
    )
