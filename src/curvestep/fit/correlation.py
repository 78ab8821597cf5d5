r"""Correlations of gradient norm and smoothness, for many samples at once, with block-bootstrap intervals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import stats

from curvestep.fit.intervals import Interval, block_interval, block_length, coverage_length

UNKNOWN: Interval = (math.nan, math.nan)


@dataclass(frozen=True, kw_only=True)
class Correlations:
    """How gradient norm and smoothness go together, with block-bootstrap intervals."""

    spearman: float
    spearman_interval: Interval
    pearson: float
    pearson_interval: Interval
    exponent: float
    exponent_interval: Interval
    block_length: int


def correlations_of(
    grad_norm: np.ndarray,
    smoothness: np.ndarray,
    *,
    level: float,
    resamples: int,
    rng: np.random.Generator,
) -> Correlations:
    """Correlations of rows in the order of the steps; NaN with NaN intervals where a column is constant."""
    floor = smoothness[smoothness > 0].min(initial=np.inf)  # a smoothness of zero has no logarithm
    if not np.isfinite(floor):
        floor = 1.0
    x = np.log(grad_norm)
    y = np.log(np.maximum(smoothness, floor))
    chosen = block_length(_influence(ranks(x), ranks(y)), _influence(x, y))
    settings = {
        "length": coverage_length(len(x), chosen),
        "level": level,
        "resamples": resamples,
        "rng": rng,
    }

    def interval(statistic: Callable, scaled: Callable, back: Callable) -> Interval:
        if not np.isfinite(statistic(x[None], y[None])[0]):
            return UNKNOWN
        low, high = block_interval(lambda a, b: scaled(statistic(a, b)), x, y, **settings)
        return back(low), back(high)

    return Correlations(
        spearman=float(spearman(x[None], y[None])[0]),
        spearman_interval=interval(spearman, _fisher, math.tanh),
        pearson=float(correlation(x[None], y[None])[0]),
        pearson_interval=interval(correlation, _fisher, math.tanh),
        exponent=float(slope(x[None], y[None])[0]),
        exponent_interval=interval(slope, np.asarray, float),
        block_length=chosen,
    )


def _fisher(r: np.ndarray) -> np.ndarray:
    return np.arctanh(np.clip(np.nan_to_num(r), -1 + 1e-12, 1 - 1e-12))


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks along the last axis, ties sharing their mean."""
    return stats.rankdata(values, axis=-1)


def correlation(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Pearson's correlation of each row of ``x`` with that of ``y``; NaN where one is constant."""
    x = x - x.mean(axis=1, keepdims=True)
    y = y - y.mean(axis=1, keepdims=True)
    size = np.sqrt((x * x).sum(axis=1) * (y * y).sum(axis=1))
    # Rounding leaves a constant column with a spread of about eps: that is no correlation either.
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(size > 1e-24 * x.shape[1], (x * y).sum(axis=1) / size, np.nan)


def spearman(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Spearman's rank correlation, likewise."""
    return correlation(ranks(x), ranks(y))


def slope(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Least-squares slope of ``y`` on ``x``, row by row; NaN where ``x`` is constant."""
    x = x - x.mean(axis=1, keepdims=True)
    size = (x * x).sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(size > 1e-24 * x.shape[1], (x * y).sum(axis=1) / size, np.nan)


def _influence(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Share of each row in a correlation: the series whose autocorrelation sets the block length."""
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return np.zeros(len(x))
    x = (x - x.mean()) / x.std()
    y = (y - y.mean()) / y.std()
    return x * y - (x * y).mean() / 2 * (x * x + y * y)
