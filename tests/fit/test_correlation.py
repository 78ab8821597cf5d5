"""Correlations of gradient norm and smoothness, and their intervals."""

import numpy as np

from curvestep.fit.correlation import correlations_of
from curvestep.fit.fit import fit_smoothness
from tests.fit.traces import autoregression, make_trace, simulated


def test_blocks_are_as_long_as_ranks_ask_for_despite_outliers():
    rng = np.random.default_rng(0)
    x, y = (autoregression(rng, 400, 0.95) for _ in range(2))
    x += np.where(rng.random(400) < 0.05, 60 * rng.standard_normal(400), 0.0)
    assert correlations_of(np.exp(x), np.exp(y), level=0.9, resamples=20, rng=rng).block_length > 15


def test_intervals_of_correlations_are_fishers():
    g, ell = simulated(np.random.default_rng(0), num=60, noise=0.2)
    fit = fit_smoothness(make_trace(g, ell), control=False)
    for centre, (low, high) in ((fit.spearman, fit.spearman_interval), (fit.pearson, fit.pearson_interval)):
        assert -1 < low < centre < high < 1
        assert centre - low > 1.2 * (high - centre)
