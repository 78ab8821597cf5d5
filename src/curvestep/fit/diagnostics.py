"""When not to trust a fit: each doubt in words, with the numbers that raised it."""

from __future__ import annotations

import numpy as np

from curvestep.fit.samples import Points


def doubts_about(points: Points, *, L1: float, effective: float) -> tuple[str, ...]:
    """Reasons to doubt a fit of these points; empty if there is none.

    Args:
        points: What was fitted.
        L1: The slope that came out.
        effective: Number of rows over the block length: how many independent pieces of evidence there are.
    """
    found = (
        _few_points(points, effective),
        _narrow_range(points),
        _far_row(points),
        _saturated(points, L1),
        _edge_of_stability(points),
        _noise_floor(points),
    )
    return tuple(doubt for doubt in found if doubt)


def kappa_saturated(points: Points) -> bool:
    """Whether the gradient turns over by the same amount at every step, so that κ carries no information."""
    kappa = points.kappa[np.isfinite(points.kappa)]
    if len(kappa) == 0:
        return False
    low, middle, high = np.quantile(kappa, [0.25, 0.5, 0.75])
    return bool(middle >= 1.0 and (high - low) <= 0.3 * middle)


def at_edge_of_stability(points: Points) -> bool:
    """Whether smoothness follows the learning rate instead of the gradient norm: lr·L/2 near 1, unclipped."""
    return 0.65 <= _stability_number(points) <= 1.35


def hardly_varies(points: Points) -> bool:
    """Whether nine gradient norms in ten lie within a factor of 1.5, so that no slope can be seen."""
    low, high = np.quantile(points.grad_norm, [0.05, 0.95])
    return bool(high < 1.5 * low)


def _few_points(points: Points, effective: float) -> str | None:
    if len(points) >= 50 and effective >= 10:
        return None
    return (
        f"Few points: {len(points)} rows, worth about {effective:.0f} independent ones. "
        "The intervals are wide, and may still be too narrow; probe more often or longer."
    )


def _narrow_range(points: Points) -> str | None:
    if not hardly_varies(points):
        return None
    low, high = np.quantile(points.grad_norm, [0.05, 0.95])
    return (
        f"The gradient norm hardly varies ({low:.3g} to {high:.3g} for nine rows in ten), so L1 is not "
        "identified: many pairs on the frontier describe these points equally well."
    )


def _far_row(points: Points) -> str | None:
    middle, largest = float(np.median(points.grad_norm)), float(points.grad_norm.max())
    if largest < 1e6 * middle:
        return None
    return (
        f"The largest gradient norm is {largest / middle:.1e} times the median: such rows alone set the "
        "slope. Fit the trace without them if they are not part of the training you ask about."
    )


def _saturated(points: Points, L1: float) -> str | None:
    mostly_clipped = points.clipped.mean() > 0.5
    if not (mostly_clipped and kappa_saturated(points)):
        return None
    kappa, length = np.nanmedian(points.kappa), np.median(points.step_norm)
    return (
        f"κ is saturated: one step changes the gradient by {kappa:.2f} times its norm, nearly always. With "
        f"clipped steps of length {length:.3g} that alone gives a slope of {kappa / length:.3g} (the fit's "
        f"L1 is {L1:.3g}): the slope is set by the step length. Look at local or spectral smoothness."
    )


def _edge_of_stability(points: Points) -> str | None:
    if not at_edge_of_stability(points):
        return None
    return (
        f"Edge of stability: lr·L/2 is {_stability_number(points):.2f} in the median. Smoothness has settled "
        "at 2/lr whatever the gradient norm, so the fit measures the learning rate."
    )


def _stability_number(points: Points) -> float:
    """lr·L/2 in the median of the unclipped steps; NaN if those are not the majority."""
    plain = ~points.clipped & np.isfinite(points.step_size)
    if plain.mean() < 0.5:
        return float("nan")
    return float(np.median(points.step_size[plain] * points.smoothness[plain] / 2))


def _noise_floor(points: Points) -> str | None:
    kappa = points.kappa[np.isfinite(points.kappa)]
    if len(kappa) == 0:
        return None
    middle = float(np.median(kappa))
    said = f"Noise floor: a step changes the gradient by {middle:.1e} of its norm, near "
    # In half precision sums are kept in float32, so that the rounding of one gradient is about one eps.
    if middle < (100 if points.eps < 1e-4 else 10) * points.eps:
        return (
            said
            + f"the rounding error of the precision ({points.eps:.1e}). Measure in a higher one (without "
            "autocast, in float64) or over longer steps."
        )
    if middle < 10 * points.self_test:
        return (
            said + f"what a replay of the same gradient differs by ({points.self_test:.1e}). Take the "
            "randomness out of the closure, or measure over longer steps."
        )
    return None
