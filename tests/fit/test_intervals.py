"""Blocks and intervals of autocorrelated steps against simulated truths."""

import math

import numpy as np
import pytest
from scipy import stats

from curvestep.fit.correlation import correlations_of
from curvestep.fit.frontier import quantile_lines
from curvestep.fit.intervals import block_length, moving_blocks, slope_interval
from tests.fit.traces import autoregression, simulated


def stationary_spearman():
    z = np.random.default_rng(0).standard_normal((2, 2_000_000))
    g = np.exp(0.5 * z[0])
    return stats.spearmanr(g, (1 + 2 * g) * np.exp(0.4 * z[1])).statistic


@pytest.mark.slow
@pytest.mark.parametrize("phi", [0.5, 0.8])
def test_ninety_percent_intervals_cover_the_truth_in_85_to_95_of_100(phi):
    # Truth: the 0.95 line of (L0 + L1 g)·e^{0.4 z} has slope L1·e^{0.4·1.645}; the rank correlation is that
    # of the stationary law, by two million independent draws.
    rank, slope = stationary_spearman(), 2 * math.exp(0.4 * stats.norm.ppf(0.95))
    covered = {"spearman": 0, "L1": 0}
    for seed in range(200):
        g, ell = simulated(np.random.default_rng([seed, 300]), num=300, phi=phi)
        few = correlations_of(g, ell, level=0.9, resamples=200, rng=np.random.default_rng(seed))
        covered["spearman"] += few.spearman_interval[0] <= rank <= few.spearman_interval[1]
        _, L1 = quantile_lines(g[None], ell[None], quantile=0.95)[0]
        low, high = slope_interval(g, ell, quantile=0.95, level=0.9, slope=L1)
        covered["L1"] += low <= slope <= high
    print(f"phi={phi}: covered {covered} of 200")
    assert 170 <= covered["spearman"] <= 190
    assert 170 <= covered["L1"] <= 190


def test_block_length_grows_with_autocorrelation():
    rng = np.random.default_rng(0)
    lengths = [
        np.median([block_length(autoregression(rng, 500, phi)) for _ in range(9)]) for phi in (0, 0.5, 0.9)
    ]
    assert lengths[0] <= 4 < lengths[1] < lengths[2]
    assert block_length(np.ones(50)) == 1


def test_moving_blocks_are_runs_of_consecutive_rows():
    rows = moving_blocks(50, length=7, resamples=30, rng=np.random.default_rng(0))
    steps = np.diff(rows, axis=1)
    inside = (np.arange(49) + 1) % 7 != 0
    assert (steps[:, inside] == 1).all()
    assert rows.min() >= 0
    assert rows.max() <= 49
