r"""Moving-block bootstrap: how far a statistic of autocorrelated steps could have come out otherwise.

Consecutive steps of a training run resemble each other, so resampling single rows would pretend to more
evidence than there is. Blocks of consecutive rows are resampled instead (Künsch, 1989), their length chosen
from the series itself (Politis and White, 2004).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy import stats


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
) -> tuple[float, float]:
    r"""Confidence interval of a statistic of paired series, from block bootstraps at two block lengths.

    .. math::
        \hat\theta \pm t_\nu\,\hat\sigma, \qquad
        \hat\sigma^2 = \max\{2V(2b) - V(b),\ V(2b)\}, \qquad \nu = \tfrac32\Bigl(\frac{n}{2b} - 1\Bigr)

    :math:`V(b)` is the bootstrap variance with blocks of ``length`` b, times :math:`n/(n - b + 1)`. It falls
    short of the truth in proportion to 1/b, because blocks are cut apart; the extrapolation from two lengths
    takes that away. The quantile of Student's law pays for a variance known from few blocks (its degrees of
    freedom are those of overlapping batch means).

    Args:
        statistic: Takes samples as rows, shape (samples, points), and returns one number each, on a scale
            where it is roughly normal.
        x: First series, in the order of the steps.
        y: Second series.
        length: Block length b, at least 1.
        level: Confidence level in (0, 1).
        resamples: Bootstrap samples at each of the two lengths.
        rng: Where the samples come from.

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
    G, D = np.sum(np.abs(lags) * weight), 4.0 / 3.0 * np.sum(weight) ** 2
    length = (2.0 * G**2 / max(D, 1e-300)) ** (1 / 3) * num ** (1 / 3)
    return int(np.clip(round(length), 1, max(1, num // 3)))
