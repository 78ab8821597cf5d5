"""Lines and quantiles that measured rows do not rule out: what the intervals of an advice are made of."""

from __future__ import annotations

import math

import numpy as np

from curvestep.fit.correlation import Interval
from curvestep.fit.intervals import block_interval
from curvestep.fit.scores import slope_interval

_LINES = 9  # looked at across an interval

Line = tuple[float, float]


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
