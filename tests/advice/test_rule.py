"""What an advice makes of a slope that a constant Hessian would show as well, and of a loss that rose."""

import math

import numpy as np
import pytest

from curvestep.advice.advice import advise
from curvestep.advice.outcome import loss_rise
from curvestep.fit.fit import fit_smoothness
from tests.fit.traces import make_trace, quadratic_run, simulated

SPECTRUM = np.geomspace(0.01, 5, 20)


def quadratic_trace():
    g, ell, length = quadratic_run(
        np.random.default_rng(1), curvature=SPECTRUM, lr=0.1, max_norm=0.5, noise=0.0, steps=150
    )
    return make_trace(g, ell, step_norm=length, lr=0.1)


def loss_after(lr, max_norm, *, steps=600):
    x = np.ones(len(SPECTRUM))
    for _ in range(steps):
        g = SPECTRUM * x
        x = x - min(lr, lr * max_norm / np.linalg.norm(g)) * g
    return 0.5 * float(SPECTRUM @ x**2)


def test_slope_that_a_constant_hessian_would_show_does_not_raise_lr_beyond_its_curvature():
    trace = quadratic_trace()
    advice = advise(trace)
    assert fit_smoothness(trace).spearman > 0.99
    assert "cannot be told from this trace" in advice.clipping
    assert "a constant Hessian" in advice.clipping
    assert advice.verdict.startswith("Raise max_norm to 1.5")  # most steps are clipped, and short
    assert advice.step_cap == pytest.approx(3 * 0.1 * 0.5, rel=0.01)
    assert advice.lr < 1 / trace.column("smoothness").max()
    assert advice.lr < 2 / SPECTRUM.max()
    assert any("no further: today's step size is" in reason for reason in advice.reasons)
    # What would hold if the slope were real stays inside the interval: it is what cannot be told.
    assert advice.lr_interval[1] > 10 * advice.lr
    assert loss_after(advice.lr, advice.max_norm) < loss_after(0.1, 0.5)


def test_advice_on_a_fit_is_the_advice_on_its_trace():
    trace = quadratic_trace()
    fit = fit_smoothness(trace)
    assert fit.explained
    assert advise(fit) == advise(trace)


def test_step_size_that_was_run_is_not_taken_away():
    # κ is 10·0.15 at the most: steady, at a step far above one over the largest smoothness of a stray row.
    g = np.geomspace(1.0, 0.1, 100)
    ell = 0.05 + 0.1 * g
    ell[3] = 5.0
    advice = advise(make_trace(g, ell, step_norm=10 * g, lr=10.0, coefficient=1.0, loss=g))
    assert any("a constant Hessian" in reason for reason in advice.reasons)
    assert 1 / 5 < advice.lr <= 10


def test_gradient_norm_that_hardly_varies_is_no_evidence_for_clipping():
    rng = np.random.default_rng(0)
    g = rng.uniform(1.0, 1.2, 100)
    advice = advise(make_trace(g, 10 * (g - 0.9) * rng.uniform(0.9, 1, 100), step_norm=0.1 * g, lr=0.1))
    assert "hardly varies" in advice.clipping
    assert "Clipping pays" not in advice.clipping


def test_loss_that_rose_is_said_and_lr_is_lowered():
    rng = np.random.default_rng(0)
    g = rng.lognormal(size=60) * 1.2 ** np.arange(60)
    trace = make_trace(g, 1 + 2 * g, loss=1.2 ** np.arange(60), step_norm=0.1 * g, lr=0.1)
    advice = advise(trace)
    assert advice.verdict.startswith("Diverged at step 52: try lr 0.01, max_norm")  # it rose over tenfold
    rising = np.linspace(2.0, 3.0, 200) + 0.1 * rng.standard_normal(200)
    g, ell = simulated(rng, num=200)
    columns = {"step_norm": 0.01 * g, "lr": 0.01}
    rose = advise(make_trace(g, ell, loss=rising, **columns))
    assert rose.lr == pytest.approx(0.01 / 3)
    assert rose.verdict.startswith("Lower lr to 0.00333")
    assert rose.reasons[0].startswith("the loss rose, from 2.")
    assert advise(make_trace(g, ell, loss=rising[::-1], **columns)).lr == pytest.approx(0.03)


def test_a_start_that_was_searched_says_more_than_how_far_the_loss_rose():
    """It rose tenfold, by steps four times too long for all three batches of the start."""
    g, ell = simulated(np.random.default_rng(0), num=200)
    columns = {"step_norm": 0.1 * g, "lr": 0.1, "loss": np.linspace(2.0, 30.0, 200)}
    again = {name: [None, value, value, *[None] * 197] for name, value in (("start_step", 0.025),)}
    again["start_grad_norm"] = [None, 1.0, 1.0, *[None] * 197]
    searched = {"safe_fraction": [0.25, *[None] * 199], **again}
    assert advise(make_trace(g, 20 * ell, **columns, **searched)).lr == pytest.approx(0.025)
    assert advise(make_trace(g, 20 * ell, **columns)).lr < 0.011


def test_noise_alone_is_no_rise_of_the_loss():
    rng = np.random.default_rng(0)
    rises = [loss_rise(5 + rng.standard_normal(100)) is not None for _ in range(400)]
    assert np.mean(rises) < 0.01
    assert loss_rise(np.full(50, math.nan)) is None
    assert loss_rise(np.array([1.0, 2.0])) is None
