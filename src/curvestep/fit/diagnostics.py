"""When not to trust a fit: each reason in words, with the numbers that raised it."""

from __future__ import annotations

import numpy as np

from curvestep.fit.samples import Samples
from curvestep.fit.within import LEAST_ELASTICITY, SHORT, Within


def fit_warnings(samples: Samples, within: Within, *, L1: float, effective: float) -> tuple[str, ...]:
    """Reasons to doubt a fit of these samples; empty if there is none.

    Args:
        samples: What was fitted.
        within: What the steps say by themselves.
        L1: The slope that came out.
        effective: Number of rows over the block length: how many independent pieces of evidence there are.
    """
    found = (
        few_points(samples, effective),
        narrow_range(samples),
        far_row(samples),
        saturation(samples, L1),
        edge_of_stability(samples),
        noise_floor(samples),
        silent_steps(within),
    )
    return tuple(warning for warning in found if warning)


def kappa_saturated(samples: Samples) -> bool:
    """Whether the gradient turns over by the same amount at every step, so that κ carries no information."""
    kappa = samples.kappa[np.isfinite(samples.kappa)]
    if len(kappa) == 0:
        return False
    low, middle, high = np.quantile(kappa, [0.25, 0.5, 0.75])
    return bool(middle >= 1.0 and (high - low) <= 0.3 * middle)


def at_edge_of_stability(samples: Samples) -> bool:
    """Whether smoothness follows the learning rate instead of the gradient norm: lr·L/2 near 1, unclipped."""
    return 0.65 <= _stability_number(samples) <= 1.35


def hardly_varies(samples: Samples) -> bool:
    """Whether nine gradient norms in ten lie within a factor of 1.5, so that no slope can be seen."""
    low, high = np.quantile(samples.grad_norm, [0.05, 0.95])
    return bool(high < 1.5 * low)


def silent_steps(within: Within) -> str | None:
    """Where the steps by themselves cannot say whether smoothness follows the gradient norm."""
    low, high = within.elasticity_interval
    short = within.kappa < SHORT and low <= LEAST_ELASTICITY < high
    return str(within) if within.missing or short else None


def few_points(samples: Samples, effective: float) -> str | None:
    """Too few rows, or too few independent ones."""
    if len(samples) >= 50 and effective >= 10:
        return None
    return (
        f"Few points: {len(samples)} rows, worth about {effective:.0f} independent ones. "
        "The intervals are wide, and may still be too narrow; probe more often or longer."
    )


def narrow_range(samples: Samples) -> str | None:
    """A gradient norm that hardly varies shows no slope."""
    if not hardly_varies(samples):
        return None
    low, high = np.quantile(samples.grad_norm, [0.05, 0.95])
    return (
        f"The gradient norm hardly varies ({low:.3g} to {high:.3g} for nine rows in ten), so L1 is not "
        "identified: many pairs on the frontier describe these points equally well."
    )


def far_row(samples: Samples) -> str | None:
    """A row so far out that it alone sets the slope."""
    middle, largest = float(np.median(samples.grad_norm)), float(samples.grad_norm.max())
    if largest < 1e6 * middle:
        return None
    return (
        f"The largest gradient norm is {largest / middle:.1e} times the median: such rows alone set the "
        "slope. Fit the trace without them if they are not part of the training you ask about."
    )


def saturation(samples: Samples, L1: float) -> str | None:
    """With κ saturated the step length sets the slope."""
    mostly_clipped = samples.clipped.mean() > 0.5
    if not (mostly_clipped and kappa_saturated(samples)):
        return None
    kappa, length = np.nanmedian(samples.kappa), np.median(samples.step_norm)
    return (
        f"κ is saturated: one step changes the gradient by {kappa:.2f} times its norm, nearly always. With "
        f"clipped steps of length {length:.3g} that alone gives a slope of {kappa / length:.3g} (the fit's "
        f"L1 is {L1:.3g}): the slope is set by the step length. Look at local or spectral smoothness."
    )


def edge_of_stability(samples: Samples) -> str | None:
    """At the edge of stability smoothness is 2/lr, whatever the gradient."""
    if not at_edge_of_stability(samples):
        return None
    return (
        f"Edge of stability: lr·L/2 is {_stability_number(samples):.2f} in the median. Smoothness has "
        "settled at 2/lr whatever the gradient norm, so the fit measures the learning rate."
    )


def _stability_number(samples: Samples) -> float:
    """lr·L/2 in the median of the unclipped steps; NaN if those are not the majority."""
    plain = ~samples.clipped & np.isfinite(samples.step_size)
    if plain.mean() < 0.5:
        return float("nan")
    return float(np.median(samples.step_size[plain] * samples.smoothness[plain] / 2))


def noise_floor(samples: Samples) -> str | None:
    """A change of the gradient near its rounding error, or near the error of a replay."""
    kappa = samples.kappa[np.isfinite(samples.kappa)]
    if len(kappa) == 0:
        return None
    middle = float(np.median(kappa))
    said = f"Noise floor: a step changes the gradient by {middle:.1e} of its norm, near "
    # In half precision sums are kept in float32, so that the rounding of one gradient is about one eps.
    if middle < (100 if samples.eps < 1e-4 else 10) * samples.eps:
        return (
            said
            + f"the rounding error of the precision ({samples.eps:.1e}). Measure in a higher one (without "
            "autocast, in float64) or over longer steps."
        )
    if middle < 10 * samples.self_test:
        return (
            said + f"what a replay of the same gradient differs by ({samples.self_test:.1e}). Take the "
            "randomness out of the closure, or measure over longer steps."
        )
    return None
