"""Polynomials: exact frontiers, and the paper's pair for x⁴."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from curvestep.theory.inequalities import (
    check_smoothness,
)
from curvestep.theory.problems.polynomials import Polynomial, Quadratic, Quartic


# Row 6.
@settings(max_examples=40)
@given(
    st.lists(st.floats(-3, 3).map(lambda c: round(c, 3)), min_size=3, max_size=6),
    st.floats(0.3, 3),
    st.floats(0.2, 20),
)
def test_polynomial_frontier_from_roots_is_that_of_a_refined_grid(lower, leading, L1):
    f = Polynomial([*lower, leading])

    def excess(x):
        return np.abs(f.curvature(x)) - L1 * np.abs(f.gradient(x))

    coarse = np.linspace(-100, 100, 40_001)
    top = coarse[np.argsort(excess(coarse))[-50:]]
    fine = np.concatenate([np.linspace(x - 0.005, x + 0.005, 2001) for x in top])
    assert f.frontier(L1) == pytest.approx(max(0, excess(fine).max()), rel=1e-3, abs=1e-6)
    assert f.frontier(L1) >= excess(fine).max() * (1 - 1e-9)


def test_quartic_frontier_is_sixteen_over_L1_squared():
    for L1 in (0.1, 1.0, 10.0, 12.65):
        assert Polynomial([0, 0, 0, 0, 1]).frontier(L1) == pytest.approx(16 / L1**2, rel=1e-12)
        assert Quartic().frontier(L1) == pytest.approx(16 / L1**2, rel=1e-15)
    assert Quartic().frontier(0.0) == math.inf


def test_polynomial_of_odd_degree_is_unbounded_below_and_still_smooth():
    f = Polynomial([0, 0, 0, 1])
    assert f.minimum == -math.inf
    assert f.frontier(2.0) == pytest.approx(1.5)
    assert Polynomial([0, 0, 0, -1]).minimum == Polynomial([0, 0, -1]).minimum == -math.inf
    assert Polynomial([-3.0]).minimum == -3
    assert f.frontier(0.0) == math.inf
    assert Polynomial([0, 1, 0, 0, 2]).minimum == pytest.approx(-0.375)


def test_polynomials_of_low_degree_have_constant_curvature():
    assert (Polynomial([3.0]).frontier(1.0), Polynomial([3.0]).minimum) == (0, 3)
    assert (Polynomial([3.0, 2.0]).frontier(1.0), Polynomial([3.0, 2.0]).minimum) == (0, -math.inf)
    assert (Polynomial([3.0, 2.0, 1.0]).frontier(0.0), Polynomial([3.0, 2.0, 1.0]).minimum) == (2, 2)
    assert Polynomial([0.0, 0.0, 0.0, 0.0, -1.0]).minimum == -math.inf


# Row 28.
def test_the_papers_pair_for_the_quartic_fails_between_0117_and_0264():
    f, x = Quartic(), np.linspace(0, 1, 100_001)
    violated = x[f.hessian_norm(x) > 10 * f.grad_norm(x) + 0.1]
    assert (violated.min(), violated.max()) == pytest.approx((0.1168, 0.2642), abs=1e-4)
    check = check_smoothness(f.grad_norm(x), f.hessian_norm(x), L0=0.1, L1=10.0)
    assert (check.excess, x[check.index]) == pytest.approx((0.06, 0.2))


# Row 2.
@given(height=st.floats(0.01, 100), width=st.floats(0.01, 100), L1=st.floats(0.01, 100))
def test_smoothness_scales_with_height_and_width(height, width, L1):
    stretched = Polynomial([0, 0, 0, 0, height / width**4])  # height · (x/width)⁴
    assert stretched.frontier(L1 / width) == pytest.approx(height / width**2 * Quartic().frontier(L1))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Polynomial([1.0, math.nan]), "`coefficients` must be finite"),
        (lambda: Polynomial([1.0, 0.0]), "Drop the trailing zeros"),
        (lambda: Quartic().frontier(-1.0), "`L1` must be zero or more"),
        (lambda: Quadratic([1.0, -1.0]), r"`curvatures\[1\]` must be zero or more"),
        (lambda: Quadratic([]), "`curvatures` must have one entry"),
    ],
)
def test_bad_input_is_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()
