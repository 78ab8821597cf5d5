"""Functions against finite differences, their frontiers against grids, and the paper's claims about them."""

import math
from decimal import Decimal, getcontext

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from curvestep.theory.inequalities import (
    check_smoothness,
    gradient_change_bound,
    limsup_smoothness,
    sample_frontier,
    value_change_bound,
)
from curvestep.theory.problems.base import BoundedNoise
from curvestep.theory.problems.deep_linear import DeepLinear
from curvestep.theory.problems.polynomials import Polynomial, Quadratic, Quartic
from curvestep.theory.problems.walls import ExponentialWall, PrintedWall, SlowValley, phi
from tests.theory.draws import RareNoise, Rotated, rotated_walls

SCALAR = [
    Quartic(),
    Polynomial([1.0, -2.0, 0.5, 0.0, 0.3, 0.0, 0.1]),
    ExponentialWall(L0=0.7, L1=3.0),
    PrintedWall(L1=4.0),
    SlowValley(0.2),
    SlowValley(0.2, slope=1.3, width=0.4),
]
VECTOR = [
    Quadratic([100.0, 1.0, 0.0]),
    Rotated(Quadratic([3.0, 2.0, 0.5, 0.1]), 1),
    rotated_walls(L0=1.0, L1=2.0),
    DeepLinear([2, 3, 2, 2], seed=4),
]
PROBLEMS = SCALAR + VECTOR
SMOOTH = [p for p in PROBLEMS if not isinstance(p, DeepLinear)]


def points(problem, num=200, size=1.5, seed=0):
    return size * np.random.default_rng(seed).normal(size=(num, *problem.event_shape))


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
def test_gradient_is_the_derivative_of_the_value(problem):
    x, v = points(problem), points(problem, seed=1)
    h = 1e-5
    along = (problem.value(x + h * v) - problem.value(x - h * v)) / (2 * h)
    inner = problem.gradient(x) * v
    inner = inner.sum(axis=-1) if problem.event_shape else inner
    np.testing.assert_allclose(along, inner, rtol=1e-5, atol=1e-6 * np.abs(along).max())


def slopes(problem, x, v, h=1e-5):
    return (problem.gradient(x + h * v) - problem.gradient(x - h * v)) / (2 * h)


@pytest.mark.parametrize("problem", SCALAR, ids=lambda p: p.name)
def test_hessian_norm_is_the_size_of_the_derivative_of_the_gradient(problem):
    x = points(problem)
    along = slopes(problem, x, np.ones(()))
    close = {"rtol": 1e-4, "atol": 2e-5 * np.abs(along).max()}
    np.testing.assert_allclose(problem.hessian_norm(x), np.abs(along), **close)
    np.testing.assert_allclose(problem.curvature(x), along, **close)


@pytest.mark.parametrize("problem", VECTOR, ids=lambda p: p.name)
def test_hessian_norm_is_that_of_the_matrix_of_differences(problem):
    x = points(problem, num=20)
    hessian = np.stack([slopes(problem, x, e) for e in np.eye(problem.event_shape[0])], axis=-1)
    np.testing.assert_allclose(problem.hessian_norm(x), np.linalg.norm(hessian, 2, axis=(-2, -1)), rtol=1e-7)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
def test_many_points_at_once_are_the_points_one_by_one(problem):
    x = points(problem, num=6).reshape(2, 3, *problem.event_shape)
    for method in (problem.value, problem.gradient, problem.hessian_norm, problem.grad_norm):
        one_by_one = [[method(x[i, j]) for j in range(3)] for i in range(2)]
        np.testing.assert_allclose(method(x), np.array(one_by_one), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
def test_no_value_is_below_the_minimum(problem):
    slack = 1e-12 * (1 + abs(problem.minimum))
    assert (problem.value(points(problem, num=2000)) >= problem.minimum - slack).all()


@pytest.mark.parametrize("problem", SMOOTH, ids=lambda p: p.name)
@pytest.mark.parametrize("L1", [3.0, 4.0, 10.0])
def test_frontier_holds_on_a_sample_and_is_attained(problem, L1):
    num = 200_001 if not problem.event_shape else 3000
    x = np.linspace(-4, 4, num) if not problem.event_shape else points(problem, num=num)
    x = np.concatenate([x, np.zeros((1, *problem.event_shape))])
    g, ell = problem.grad_norm(x), problem.hessian_norm(x)
    L0 = problem.frontier(L1)
    if math.isinf(L0):
        assert L1 < 4.0
        return
    assert check_smoothness(g, ell, L0=L0, L1=L1).holds
    np.testing.assert_allclose(sample_frontier(g, ell, L1), L0, rtol=5e-4)  # a corner between grid points
    assert not check_smoothness(g, ell, L0=0.99 * L0, L1=L1).holds


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


def test_polynomials_of_low_degree_have_no_curvature_or_the_same_everywhere():
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


@pytest.mark.parametrize("problem", [p for p in SMOOTH if p.frontier(4.0) < math.inf], ids=lambda p: p.name)
def test_two_points_keep_the_gradient_and_value_inequalities(problem):
    L1 = 4.0
    L0 = problem.frontier(L1)
    x, y = points(problem), points(problem, seed=5)
    r, g = problem.norm(y - x), problem.grad_norm(x)
    change = problem.norm(problem.gradient(y) - problem.gradient(x))
    assert (change <= gradient_change_bound(r, grad_norm=g, L0=L0, L1=L1) * (1 + 1e-9)).all()
    inner = problem.gradient(x) * (y - x)
    inner = inner.sum(axis=-1) if problem.event_shape else inner
    off = np.abs(problem.value(y) - problem.value(x) - inner)
    assert (off <= value_change_bound(r, grad_norm=g, L0=L0, L1=L1) * (1 + 1e-9)).all()


def test_two_point_inequalities_are_equalities_on_the_wall():
    wall = ExponentialWall(L0=0.7, L1=3.0)
    x, r = np.meshgrid(np.linspace(0.01, 3, 20), np.linspace(0.01, 3, 20))
    g = wall.grad_norm(x)
    np.testing.assert_allclose(
        wall.gradient(x + r) - wall.gradient(x), gradient_change_bound(r, grad_norm=g, L0=0.7, L1=3.0)
    )
    off = wall.value(x + r) - wall.value(x) - g * r
    np.testing.assert_allclose(off, value_change_bound(r, grad_norm=g, L0=0.7, L1=3.0), rtol=1e-7)


# Rows 1 and 3.
@pytest.mark.parametrize("problem", SMOOTH, ids=lambda p: p.name)
def test_sampled_limsup_is_below_the_hessian_norm_and_near_it(problem):
    x = points(problem, num=1, seed=3)[0]
    sampled = limsup_smoothness(problem, x, radius=1e-5, num_samples=2000)
    norm = float(problem.hessian_norm(x))
    assert sampled <= norm * (1 + 1e-3) + 1e-6
    assert sampled >= 0.9 * norm - 1e-6


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


def test_norms_of_huge_vectors_do_not_overflow():
    f = Quadratic([1.0, 1.0])
    assert f.grad_norm(np.array([3e200, 4e200])) == pytest.approx(5e200)
    assert f.norm(np.zeros(2)) == 0


@pytest.mark.parametrize("law", [BoundedNoise, RareNoise])
@pytest.mark.parametrize("problem", [Quartic(), Quadratic([1.0, 2.0, 3.0])], ids=["line", "space"])
def test_bounded_noise_is_unbiased_bounded_and_seeded(law, problem):
    noise = law(0.5)
    z, again, other = (noise.draw(np.random.default_rng(seed), (40_000,), problem) for seed in (3, 3, 4))
    assert problem.norm(z).max() <= 0.5 + 1e-12
    np.testing.assert_allclose(z.mean(axis=0), 0, atol=0.01)
    np.testing.assert_array_equal(z, again)
    assert (z != other).any()
    if law is RareNoise:
        np.testing.assert_allclose(np.unique(z[z != 0]), [-0.5 / 9, 0.5])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ExponentialWall(L0=-1.0, L1=1.0), "`L0` must be positive"),
        (lambda: ExponentialWall(L0=1.0, L1=math.nan), "`L1` must be positive"),
        (lambda: PrintedWall(L1=0.0), "`L1` must be positive"),
        (lambda: SlowValley(0.0), "`eps` must be positive"),
        (lambda: SlowValley(1.0, slope=1.0), "`slope` must be more than 1"),
        (lambda: SlowValley(1.0).start(gap=0.1), "`gap` must be at least 1.25"),
        (lambda: Polynomial([1.0, math.nan]), "`coefficients` must be finite"),
        (lambda: Polynomial([1.0, 0.0]), "Drop the trailing zeros"),
        (lambda: Quartic().frontier(-1.0), "`L1` must be zero or more"),
        (lambda: Quadratic([1.0, -1.0]), r"`curvatures\[1\]` must be zero or more"),
        (lambda: Quadratic([]), "`curvatures` must have one entry"),
        (lambda: BoundedNoise(-1.0), "`tau` must be positive"),
        (lambda: sample_frontier([1.0], [1.0, 2.0], 1.0), "equal length"),
        (lambda: sample_frontier([math.nan], [1.0], 1.0), "`hessian_norms` must be finite"),
        (lambda: sample_frontier([1.0], [-1.0], 1.0), "`hessian_norms` must be finite"),
        (lambda: ExponentialWall(L0=1e3, L1=10.0).check_start(70.7), "outside the domain"),
        (lambda: sample_frontier([1.0], [1.0], -1.0), "`L1` must be zero or more"),
        (lambda: check_smoothness([1.0], [1.0], L0=-1.0, L1=1.0), "`L0` must be zero or more"),
        (lambda: Quartic().check_start(math.nan), "`x0` must be finite, got nan"),
        (lambda: Quadratic([1.0, 2.0]).check_start([1.0, 2.0, 3.0]), "`x0` must have 2 coordinates"),
        (lambda: ExponentialWall(L0=1.0, L1=1.0).check_start(1e4), "Start closer to the minimum"),
    ],
)
def test_bad_input_is_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()
