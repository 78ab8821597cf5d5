r"""How far a statistic of autocorrelated steps could have come out otherwise: blocks, and a rank-score test.

Consecutive steps of a training run resemble each other, so resampling single rows would pretend to more
evidence than there is. Blocks of consecutive rows are resampled instead (Künsch, 1989), their length chosen
from the series itself (Politis and White, 2004).

For the slope of a quantile line resampling serves badly: a 0.95 line rests on the few points near it, and its
slope is skewed. The score of the check loss does not need them: for the true slope, whether a point lies
above the line has nothing to do with its gradient norm (Koenker's rank-score test), and this can be tested
without any density.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy import stats

Interval = tuple[float, float]

_GRID = 240  # slopes tested across an interval


def block_length(*series: np.ndarray) -> int:
    r"""Block length for a moving-block bootstrap of a mean over each of ``series``: the largest of them.

    Politis and White (2004), corrected by Patton, Politis and White (2009):

    .. math::
        b = \Bigl(\frac{2\hat G^2}{\hat D}\Bigr)^{1/3} n^{1/3}, \quad
        \hat G = \sum_k \lambda(k/M)\,|k|\,\hat R(k), \quad
        \hat D = \tfrac43 \Bigl(\sum_k \lambda(k/M)\,\hat R(k)\Bigr)^2

    with the autocovariances :math:`\hat R`, the trapezoid :math:`\lambda` and :math:`M` twice the lag beyond
    which the correlogram is silent. At least 1, at most a third of the series.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> noise = rng.standard_normal(500)
        >>> block_length(noise), block_length(np.convolve(noise, np.ones(20), "valid"))
        (1, 29)
    """
    return max(_politis_white(np.asarray(values, dtype=float)) for values in series)


def moving_blocks(num: int, *, length: int, resamples: int, rng: np.random.Generator) -> np.ndarray:
    """Row numbers of each resample: blocks of ``length`` consecutive rows, laid end to end, cut at ``num``.

    Example:
        >>> moving_blocks(6, length=3, resamples=2, rng=np.random.default_rng(0)).shape
        (2, 6)
    """
    blocks = math.ceil(num / length)
    starts = rng.integers(0, num - length + 1, size=(resamples, blocks))
    return (starts[:, :, None] + np.arange(length)).reshape(resamples, -1)[:, :num]


def block_interval(
    statistic: Callable[[np.ndarray, np.ndarray], np.ndarray],
    x: np.ndarray,
    y: np.ndarray,
    *,
    length: int,
    level: float,
    resamples: int,
    rng: np.random.Generator,
) -> Interval:
    r"""Confidence interval of a statistic of paired series, from block bootstraps at two block lengths.

    .. math::
        \hat\theta \pm t_\nu\,\hat\sigma, \qquad
        \hat\sigma^2 = \max\{2V(2b) - V(b),\ V(2b)\}, \qquad \nu = \tfrac32\Bigl(\frac{n}{2b} - 1\Bigr)

    :math:`V(b)` is the bootstrap variance with blocks of ``length`` b, times :math:`n/(n - b + 1)`. It falls
    short of the truth in proportion to 1/b, because blocks are cut apart; the extrapolation from two lengths
    takes that away. The quantile of Student's law pays for a variance known from few blocks (its degrees of
    freedom are those of overlapping batch means).

    ``statistic`` takes samples as rows, shape (samples, points), and returns one number each, on a scale
    where it is roughly normal.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> x = rng.standard_normal(400)
        >>> low, high = block_interval(
        ...     lambda a, b: a.mean(axis=1), x, x, length=4, level=0.9, resamples=400, rng=rng)
        >>> bool(low < 0 < high), bool(0.06 < (high - low) / 2 < 0.11)    # 1.64/20 = 0.08
        (True, True)
    """
    num = len(x)
    short = max(1, min(length, num // 6))

    def variance(block: int) -> float:
        rows = moving_blocks(num, length=block, resamples=resamples, rng=rng)
        return float(np.var(statistic(x[rows], y[rows]))) * num / (num - block + 1)

    longer = variance(2 * short)
    spread = math.sqrt(max(2.0 * longer - variance(short), longer))
    freedom = max(2.0, 1.5 * (num / (2 * short) - 1.0))
    reach = float(stats.t.ppf(0.5 + level / 2, freedom)) * spread
    centre = float(statistic(x[None], y[None])[0])
    return centre - reach, centre + reach


def coverage_length(num: int, chosen: int) -> int:
    """Block length for intervals: the ``chosen`` one, but no less than 1.3 times the root of ``num``.

    The length that estimates a variance best is too short for intervals; 1.3 √n is what Lazarus, Lewis, Stock
    and Watson (2018) recommend for the level of tests under autocorrelation.

    Example:
        >>> coverage_length(400, 3), coverage_length(400, 40)
        (26, 40)
    """
    return max(1, min(max(chosen, int(1.3 * math.sqrt(num))), num // 6))


def slope_interval(x: np.ndarray, y: np.ndarray, *, quantile: float, level: float, slope: float) -> Interval:
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
    ``slope``, the estimate, always lies inside.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> g = rng.lognormal(size=400)
        >>> low, high = slope_interval(
        ...     g, (1 + 2 * g) * rng.uniform(size=400), quantile=0.95, level=0.9, slope=1.9)
        >>> bool(low < 1.9 < high), bool(low > 1.2), bool(high < 2.8)
        (True, True, True)
    """
    num = len(x)
    every_sign, intercepts = _signs(x, y, np.array([slope]), quantile)
    signs = every_sign[0]
    goes_through_origin = bool(intercepts[0] <= 1e-9 * np.abs(y).max())
    length = coverage_length(num, 2 * block_length(signs * (x - x.mean()), signs))
    keep = _Test(x, y, quantile=quantile, level=level, length=length, bound=goes_through_origin)
    ray = y / np.maximum(x, 1e-300)
    # With an intercept of at least zero no slope exceeds the steepest ray.
    top = float(ray.max())
    usual = min(top, 2.0 * max(slope, float(np.quantile(ray, quantile))))
    grid = np.unique(np.concatenate([np.linspace(0, usual, _GRID), np.linspace(usual, top, _GRID // 4)]))
    kept = np.append(grid[keep(grid)], slope)
    low = float(kept.min())
    high = float(kept.max())
    return _edge(keep, low, grid[grid < low]), _edge(keep, high, grid[grid > high][::-1])


class _Test:
    """Which slopes are not rejected."""

    def __init__(
        self, x: np.ndarray, y: np.ndarray, *, quantile: float, level: float, length: int, bound: bool
    ) -> None:
        self.x = x
        self.y = y
        self.quantile = quantile
        self.length = length
        self.bound = bound  # whether lines through the origin are tested, too
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


def _politis_white(values: np.ndarray) -> int:
    num = len(values)
    centred = values - values.mean()
    variance = centred @ centred / num
    if num < 4 or variance <= 1e-24 * np.max(np.abs(values)) ** 2:
        return 1
    most = min(num - 1, math.ceil(math.sqrt(num)) + max(5, math.ceil(math.sqrt(math.log10(num)))))
    covariance = np.array([centred[: num - k] @ centred[k:] / num for k in range(most + 1)])
    silent = np.abs(covariance[1:]) < 2 * math.sqrt(math.log10(num) / num) * covariance[0]
    run = max(5, math.ceil(math.sqrt(math.log10(num))))
    quiet = [k for k in range(most - run + 1) if silent[k : k + run].all()]
    last = quiet[0] if quiet else int(np.flatnonzero(~silent).max(initial=0)) + 1
    window = min(2 * max(last, 1), most)
    lags = np.arange(-window, window + 1)
    weight = np.minimum(1.0, 2.0 * (1.0 - np.abs(lags) / window)) * covariance[np.abs(lags)]
    G = np.sum(np.abs(lags) * weight)
    D = 4.0 / 3.0 * np.sum(weight) ** 2
    length = (2.0 * G**2 / max(D, 1e-300)) ** (1 / 3) * num ** (1 / 3)
    return int(np.clip(round(length), 1, max(1, num // 3)))
