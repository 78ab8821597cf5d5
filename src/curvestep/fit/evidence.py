"""What a run says about clipping beyond what a constant Hessian would show, and beyond a loss that rose."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from curvestep.fit.control import control_of
from curvestep.fit.correlation import Correlations
from curvestep.fit.diagnostics import hardly_varies
from curvestep.fit.samples import Points

_MOST_ROWS = 4000  # as in the fit, so that both print the same numbers
_RESAMPLES = 400


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Whether smoothness follows the gradient norm by more than a trend, and how the loss went.

    ``rank`` is the lower end of the run's rank correlation of gradient norm and smoothness, ``control`` the
    highest that a constant Hessian shows with the same steps; NaN where one is unknown. ``rise`` holds the
    loss of the first and the last rows if it rose.
    """

    rank: float
    control: float
    varies: bool
    rise: tuple[float, float] | None

    @property
    def explained(self) -> bool:
        """Whether a constant Hessian would show as much."""
        return self.rank <= self.control

    @property
    def supports_slope(self) -> bool:
        """Whether L1 may be used to take larger steps than were taken where the gradient is small."""
        return self.varies and not self.explained


def weigh(points: Points, *, level: float, seed: int) -> Evidence:
    """A run against its control (:mod:`curvestep.fit.control`), and its last losses against its first.

    Args:
        points: What was measured, in the order of the steps.
        level: Of the intervals of run and control.
        seed: Of the bootstrap and the control.
    """
    g, ell = points.grad_norm, points.smoothness
    few = slice(None, None, -(-len(g) // _MOST_ROWS))
    rng = np.random.default_rng(seed)
    found = Correlations.of(g[few], ell[few], level=level, resamples=_RESAMPLES, rng=rng)
    control = control_of(points, quantile=0.95, level=level, rng=rng)
    return Evidence(
        rank=found.spearman_interval[0],
        control=math.nan if control is None else control.spearman_interval[1],
        varies=not hardly_varies(points),
        rise=loss_rise(points.loss),
    )


def loss_rise(losses: np.ndarray) -> tuple[float, float] | None:
    """Mean loss over the first and the last tenth (five rows at least), if the last lies clearly above.

    Clearly: by more than three standard errors. Losses that are not finite are left out.

    Example:
        >>> loss_rise(np.arange(20.0))
        (2.0, 17.0)
        >>> loss_rise(-np.arange(20.0)) is None
        True
    """
    losses = losses[np.isfinite(losses)]
    part = max(5, len(losses) // 10)
    if len(losses) < 2 * part:
        return None
    first, last = losses[:part], losses[-part:]
    error = math.sqrt((first.var(ddof=1) + last.var(ddof=1)) / part)
    low, high = float(first.mean()), float(last.mean())
    return (low, high) if high - low > 3 * error else None
