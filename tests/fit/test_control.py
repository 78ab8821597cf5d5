"""The control: what a constant Hessian would show."""

import math

import numpy as np
import pytest

from curvestep.fit.fit import fit_smoothness
from tests.fit.traces import make_trace, quadratic_run, simulated


def quadratic_trace(*, seed=0, lr=0.05, max_norm=0.5, **kwargs):
    g, ell, length = quadratic_run(np.random.default_rng(seed), lr=lr, max_norm=max_norm, **kwargs)
    return make_trace(g, ell, step_norm=length, lr=lr)


def test_control_shows_the_correlation_that_a_spread_spectrum_makes():
    # A constant Hessian, yet rank correlation near 1 with clipping: the control must allow for it.
    fit = fit_smoothness(quadratic_trace(curvature=np.geomspace(0.1, 5, 20), noise=0.02, steps=250))
    assert fit.spearman > 0.9
    assert fit.control is not None
    assert fit.control.spearman > 0.6
    assert fit.control.spearman_interval[1] > 0.97


@pytest.mark.slow
@pytest.mark.parametrize("max_norm", [0.2, 0.5, np.inf])
@pytest.mark.parametrize("noise", [0.02, 0.3])
def test_runs_on_constant_hessians_stay_within_their_control(max_norm, noise):
    for num, low, high in ((20, 0.1, 5.0), (20, 0.01, 20.0), (100, 0.5, 5.0)):
        trace = quadratic_trace(
            curvature=np.geomspace(low, high, num), noise=noise, max_norm=max_norm, steps=200, seed=num
        )
        fit = fit_smoothness(trace)
        assert fit.control is not None
        assert fit.spearman_interval[0] < fit.control.spearman_interval[1] + 0.02


def test_control_stays_low_where_norm_and_smoothness_have_no_trend():
    # Norm and smoothness rise and fall together with no trend: no constant Hessian does that.
    rng = np.random.default_rng(1)
    g, ell = simulated(rng, phi=0.8, L0=0.2, noise=0.1)
    fit = fit_smoothness(make_trace(g, ell, step_norm=0.02, lr=1.0))
    assert fit.control is not None
    assert fit.control.spearman_interval[1] < fit.spearman_interval[0]


def test_a_few_rows_without_step_length_leave_the_control_to_the_others():
    g, ell = simulated(np.random.default_rng(0), num=60)
    lengths = [None if row in (3, 20) else 0.1 for row in range(60)]
    assert fit_smoothness(make_trace(g, ell, step_norm=lengths, lr=0.1)).control is not None
    lengths = [0.1 if row < 9 else None for row in range(60)]
    assert fit_smoothness(make_trace(g, ell, step_norm=lengths, lr=0.1)).control is None


def test_steps_that_no_quadratic_carries_give_a_control_of_nan():
    # Every other step is far beyond 2/λ: gradients overflow before λ times them does, and their ratio is 0.
    g, ell = simulated(np.random.default_rng(1), num=60, L0=1e-3, L1=2e-3)
    step_size = np.resize([100.0, 0.3], 60) / np.median(ell)
    fit = fit_smoothness(make_trace(g, ell, every=13, step_norm=step_size * g))
    assert math.isnan(fit.control.spearman)
