"""Walls and the slow valley: joints, class, limits, digits."""

import math
from decimal import Decimal, getcontext

import numpy as np
import pytest
from hypothesis import given, strategies as st

from curvestep.theory.inequalities import (
    check_smoothness,
    sample_frontier,
)
from curvestep.theory.problems.walls import ExponentialWall, PrintedWall, SlowValley, phi


# Row 14.
@pytest.mark.parametrize("L1", [2.0, 5.0, 10.0])
def test_printed_wall_is_twice_differentiable_but_needs_L0_of_L1(L1):
    wall = PrintedWall(L1=L1)
    for side in (1 - 1e-9, 1 + 1e-9):  # of the joint
        for method, value in ((wall.value, 1 / L1), (wall.gradient, 1.0), (wall.curvature, L1)):
            assert method(np.array(side / L1)) == pytest.approx(value)
    x = np.linspace(-3, 3, 60_001)
    check = check_smoothness(wall.grad_norm(x), wall.hessian_norm(x), L0=1.0, L1=L1)
    assert not check.holds
    assert sample_frontier(wall.grad_norm(x), wall.hessian_norm(x), L1) == pytest.approx(L1, rel=1e-9)
    assert wall.grad_norm(np.array(wall.start(M=50.0))) == pytest.approx(50)
    assert wall.start(M=50.0) == pytest.approx((math.log(50) + 1) / L1)


def test_corrected_wall_has_its_hessian_on_the_line_everywhere():
    wall, x = ExponentialWall(L0=0.7, L1=3.0), np.linspace(-5, 5, 10_001)
    np.testing.assert_allclose(wall.hessian_norm(x), 0.7 + 3.0 * wall.grad_norm(x), rtol=1e-12)
    assert wall.grad_norm(np.array(wall.start(M=50.0))) == pytest.approx(50)
    assert wall.largest_step(M=50.0) == pytest.approx(2 * math.log(1 + 3 * 50 / 0.7) / (3 * 50))


# Row 15.
@pytest.mark.parametrize(("slope", "width"), [(2.0, 1.0), (1.2, 0.3)])
def test_slow_valley_is_twice_differentiable_with_curvature_three_eps(slope, width):
    eps = 0.5
    valley = SlowValley(eps, slope=slope, width=width)
    for method in (valley.value, valley.gradient, valley.curvature):
        near = method(width * np.array([1 - 1e-9, 1 + 1e-9]))
        assert near[0] == pytest.approx(near[1], abs=1e-7)
    x = np.linspace(-5, 5, 100_001)
    assert valley.grad_norm(x).max() == pytest.approx(slope * eps)
    assert valley.hessian_norm(x).max() == pytest.approx(1.5 * slope * eps / width)


def test_slow_valley_at_one_half_by_hand():
    valley = SlowValley(0.5)
    np.testing.assert_allclose(valley.value(np.array([0.0, 1.0, 3.0, 5.0])), [0, 0.625, 2.625, 4.625])
    assert valley.start(gap=4.625) == pytest.approx(5)


@given(st.floats(-12, 2.5).map(lambda e: 10.0**e))
def test_phi_keeps_its_digits(a):
    getcontext().prec = 60
    exact = Decimal(a).exp() - Decimal(a) - 1
    assert float(phi(a)) == pytest.approx(float(exact), rel=1e-14)


@pytest.mark.parametrize("wall", [ExponentialWall(L0=1.0, L1=5.0), PrintedWall(L1=5.0)])
def test_walls_overflow_to_infinity_without_warning_or_nan(wall):
    x = np.array([-1e6, 1e6])
    assert (wall.value(x) == math.inf).all()
    np.testing.assert_array_equal(wall.gradient(x), [-math.inf, math.inf])
    assert (wall.hessian_norm(x) == math.inf).all()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ExponentialWall(L0=-1.0, L1=1.0), "`L0` must be positive"),
        (lambda: ExponentialWall(L0=1.0, L1=math.nan), "`L1` must be positive"),
        (lambda: PrintedWall(L1=0.0), "`L1` must be positive"),
        (lambda: SlowValley(0.0), "`eps` must be positive"),
        (lambda: SlowValley(1.0, slope=1.0), "`slope` must be more than 1"),
        (lambda: SlowValley(1.0).start(gap=0.1), "`gap` must be at least 1.25"),
    ],
)
def test_bad_input_is_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()
