"""The overshoot well: a function of its class, and what it costs those who jump over its well."""

import math

import numpy as np
import pytest

from curvestep.theory.certificates import certify
from curvestep.theory.complexity import descend_with_momentum, first_hit
from curvestep.theory.inequalities import sample_frontier
from curvestep.theory.problems.overshoot import OvershootWell
from curvestep.theory.theorems.armijo import armijo
from curvestep.theory.theorems.fixed_gd import wall_height
from curvestep.theory.theorems.normalized_momentum import agnostic_schedule, momentum_lower_bound

WELL = dict(L0=0.7, L1=2.0, eps=0.1, jump=2.0)


def test_gradient_and_curvature_are_derivatives_on_every_piece():
    well = OvershootWell(**WELL)
    x = np.linspace(-1, well.end + 1, 20_001) + 1e-4
    h = 1e-6
    np.testing.assert_allclose(
        well.gradient(x), (well.value(x + h) - well.value(x - h)) / (2 * h), rtol=1e-5, atol=1e-7
    )
    slopes = (well.gradient(x + h) - well.gradient(x - h)) / (2 * h)
    smooth = np.abs(slopes - well.curvature(x)) < 1e-4 * (1 + np.abs(slopes))
    assert smooth.mean() > 0.999  # f'' jumps at five points


def test_value_and_gradient_are_continuous_with_two_minima():
    well = OvershootWell(**WELL)
    joints = np.array([0.0, well.jump / 2, well.jump, well.end])
    for method in (well.value, well.gradient):
        np.testing.assert_allclose(method(joints - 1e-9), method(joints + 1e-9), atol=1e-6)
    x = np.linspace(-1, well.end + 2, 200_001)
    assert well.value(x).min() == pytest.approx(0.0, abs=1e-8)
    assert (well.value(x) >= 0).all()
    assert well.value(np.array(well.end + 5)) == 0
    first = x[x < well.jump / 2]
    assert well.value(first).min() == pytest.approx(0.0, abs=1e-8)


@pytest.mark.parametrize("L1", [0.5, 1.0, 2.0, 5.0])
def test_frontier_is_that_of_a_sample(L1):
    well = OvershootWell(**WELL)
    x = np.linspace(-1, well.end + 1, 400_001)
    found = sample_frontier(well.grad_norm(x), well.hessian_norm(x), L1)
    assert found == pytest.approx(well.frontier(L1), rel=1e-3)
    assert found <= well.frontier(L1) * (1 + 1e-9)


def test_gap_and_hill_are_their_closed_forms():
    well = OvershootWell(**WELL)
    assert well.gap(np.array(0.0)) == pytest.approx(wall_height(0.2, L0=0.7, L1=2.0))
    assert well.value(np.array(2.0)) - well.value(np.array(0.0)) == pytest.approx(well.hill)
    growth = math.exp(2.0 * 2.0 / 2) / (1 + 2 * 0.1 * 2.0 / 0.7)
    assert well.steepest == pytest.approx(0.7 / 2.0 * (growth - 1))


# Row 34.
@pytest.mark.parametrize(
    ("lr", "bound", "taken"),
    [
        (4.0, 90, 104),
        (6.0, 1650, 1774),
        (8.0, 35_300, 36_481),
        pytest.param(9.0, 172_000, 175_510, marks=pytest.mark.slow),
    ],
)
def test_the_jump_costs_exponentially_many_steps_and_backtracking_none(lr, bound, taken):
    well = OvershootWell(L0=1.0, L1=1.0, eps=0.1, jump=lr)
    lower = momentum_lower_bound(L0=1.0, L1=1.0, eps=0.1, lr=lr)
    assert lower == pytest.approx(bound, rel=5e-3)
    schedule = agnostic_schedule(lr, taken)
    run = descend_with_momentum(well, 0.0, lrs=schedule.lrs, betas=schedule.betas)
    assert first_hit(run.grad_norms, 0.1) == taken
    assert taken >= lower
    gap = float(well.gap(np.array(0.0)))
    certificate = certify(well, armijo(L0=1.0, L1=1.0, gap=gap, eps=0.1, first=4.0), 0.0)
    assert (certificate.status, certificate.measured) == ("holds", 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"eps": -1.0}, "`eps` must be positive"), ({"jump": 0.1}, "`jump` must be more than")],
)
def test_bad_input_is_named(change, words):
    with pytest.raises(ValueError, match=words):
        OvershootWell(**{**WELL, **change})
