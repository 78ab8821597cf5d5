r"""Confidence interval of the slope of a quantile line, by asking which slopes the data do not reject.

Resampling serves badly here: a 0.95 line rests on the few points near it, and its slope is skewed. The score
of the check loss does not need them: for the true slope, whether a point lies above the line has nothing to
do with its gradient norm (Koenker's rank-score test), and this can be tested without any density.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

from curvestep.fit.intervals import block_length, coverage_length

_GRID = 240


def slope_interval(
    x: np.ndarray, y: np.ndarray, *, quantile: float, level: float, slope: float
) -> tuple[float, float]:
    r"""Slopes :math:`b \ge 0` that a test at this level keeps, as the smallest interval that holds them all.

    For a slope b, the line through the q-quantile a of :math:`y - bx` leaves residual signs
    :math:`\psi_i = q - 1[y_i < a + b x_i]`, and

    .. math::
        \frac{\sum_i \psi_i x_i}{\sqrt{n V}}, \qquad
        V = \sum_{|k| < l} \Bigl(1 - \frac{|k|}{l}\Bigr) R_\psi(k)\,\bigl[R_x(k) + (x_w - \bar x)^2\bigr]

    is compared with Student's law. The autocovariances R of signs and norms enter as a product because, under
    the slope tested, the two are independent; :math:`x_w` is the mean of x weighted by 1/(a + bx), as for
    noise in proportion to the line. If the estimate itself goes through the origin, so that the condition on
    its intercept binds, lines through the origin are tested as well.

    The truth that the interval covers: the slope of the q-quantile line of the law that the steps come from.
    With x = 1/g and y = ℓ/g the same line has slope L0 and intercept L1, so this gives both intervals.

    Args:
        x: Gradient norms, in the order of the steps.
        y: Smoothness, likewise.
        quantile: q in (0, 1).
        level: Confidence level in (0, 1).
        slope: The estimate; always inside the interval.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> g = rng.lognormal(size=400)
        >>> low, high = slope_interval(
        ...     g, (1 + 2 * g) * rng.uniform(size=400), quantile=0.95, level=0.9, slope=1.9)
        >>> bool(low < 1.9 < high), bool(low > 1.2), bool(high < 2.8)
        (True, True, True)
    """
    num = len(x)
    signs, intercept = _signs(x, y, np.array([slope]), quantile)
    signs, bound = signs[0], bool(intercept[0] <= 1e-9 * np.abs(y).max())
    length = coverage_length(num, 2 * block_length(signs * (x - x.mean()), signs))
    keep = _Test(x, y, quantile=quantile, level=level, length=length, bound=bound)
    ray = y / np.maximum(x, 1e-300)
    # With an intercept of at least zero no slope exceeds the steepest ray.
    top = float(ray.max())
    usual = min(top, 2.0 * max(slope, float(np.quantile(ray, quantile))))
    grid = np.unique(np.concatenate([np.linspace(0, usual, _GRID), np.linspace(usual, top, _GRID // 4)]))
    kept = np.append(grid[keep(grid)], slope)
    low, high = float(kept.min()), float(kept.max())
    return _edge(keep, low, grid[grid < low]), _edge(keep, high, grid[grid > high][::-1])


class _Test:
    """Which slopes are not rejected."""

    def __init__(
        self, x: np.ndarray, y: np.ndarray, *, quantile: float, level: float, length: int, bound: bool
    ) -> None:
        self.x, self.y, self.quantile, self.length, self.bound = x, y, quantile, length, bound
        num = len(x)
        freedom = max(2.0, 1.5 * (num / length - 1.0))
        self.critical = float(stats.t.ppf(0.5 + level / 2, freedom)) * math.sqrt(num / (num - length + 1))
        self.weight = np.append(1.0, 2.0 * (1.0 - np.arange(1, length) / length))
        self.covariance = _autocovariance(x[None], length)

    def __call__(self, slopes: np.ndarray) -> np.ndarray:
        x = self.x
        signs, intercept = _signs(x, self.y, slopes, self.quantile)
        weight = 1.0 / np.maximum(np.maximum(intercept, 0.0)[:, None] + slopes[:, None] * x, 1e-300)
        shift = (weight * x).sum(axis=1) / weight.sum(axis=1) - x.mean()
        product = _autocovariance(signs, self.length) * (self.covariance + shift[:, None] ** 2)
        kept = self._small(signs @ x, product)
        if not self.bound:
            return kept
        through_origin = self.quantile - (self.y < slopes[:, None] * x)
        product = _autocovariance(through_origin, self.length) * (self.covariance + x.mean() ** 2)
        return kept | ((intercept < 0) & self._small(through_origin @ x, product))

    def _small(self, score: np.ndarray, product: np.ndarray) -> np.ndarray:
        variance = np.maximum(product @ self.weight, 0.0)
        return np.abs(score) <= self.critical * np.sqrt(len(self.x) * variance) + 1e-12 * np.abs(self.x).sum()


def _signs(
    x: np.ndarray, y: np.ndarray, slopes: np.ndarray, quantile: float
) -> tuple[np.ndarray, np.ndarray]:
    """ψ for each slope, as rows that sum to zero, and the intercepts."""
    residual = y - slopes[:, None] * x
    rank = max(0, math.ceil(quantile * len(x)) - 1)
    intercept = np.partition(residual, rank, axis=1)[:, rank]
    residual -= intercept[:, None]
    on = np.abs(residual) <= 1e-12 * np.abs(y).max()
    signs = np.where(on, 0.0, quantile - (residual < 0))
    carried = -signs.sum(axis=1) / on.sum(axis=1)  # the points on the line make up the difference
    return np.where(on, carried[:, None], signs), intercept


def _autocovariance(rows: np.ndarray, length: int) -> np.ndarray:
    num = rows.shape[1]
    centred = rows - rows.mean(axis=1, keepdims=True)
    lags = [np.einsum("ij,ij->i", centred[:, : num - k], centred[:, k:]) / num for k in range(length)]
    return np.stack(lags, axis=1)


def _edge(keep: _Test, kept: float, beyond: np.ndarray) -> float:
    """The end of the interval between a kept slope and its rejected neighbour on the grid, by bisection."""
    if len(beyond) == 0:
        return kept
    rejected = float(beyond[-1])
    for _ in range(12):
        middle = 0.5 * (kept + rejected)
        if keep(np.array([middle]))[0]:
            kept = middle
        else:
            rejected = middle
    return kept
