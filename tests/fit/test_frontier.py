import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.optimize import linprog

from curvestep.fit.frontier import envelope, frontier_points, least_L0, quantile_line, quantile_lines
from curvestep.theory.inequalities import sample_frontier
from tests.reference import quantile_line_by_enumeration

numbers = st.floats(0.01, 100)
clouds = st.lists(st.tuples(numbers, numbers), min_size=3, max_size=14)


@settings(max_examples=50)
@given(cloud=clouds, quantile=st.sampled_from([0.5, 0.75, 0.9, 0.95]))
def test_quantile_line_has_the_least_loss_of_all_lines(cloud, quantile):
    g, ell = np.array(cloud).T
    best, loss = quantile_line_by_enumeration(g, ell, quantile=quantile)
    line = quantile_line(g, ell, quantile=quantile)
    assert min(line) >= 0
    assert loss(line) <= loss(best) * (1 + 1e-6) + 1e-9


def by_linear_programme(g, ell, quantile):
    """L0, L1 and the two parts of each residual, all at least zero, of least check loss."""
    num = len(g)
    cost = np.concatenate([[0.0, 0.0], np.full(num, quantile), np.full(num, 1 - quantile)])
    matrix = np.hstack([np.ones((num, 1)), g[:, None], np.eye(num), -np.eye(num)])
    return linprog(cost, A_eq=matrix, b_eq=ell, bounds=(0, None), method="highs").x[:2]


@pytest.mark.parametrize("quantile", [0.5, 0.75, 0.95])
def test_bisection_finds_the_line_of_the_linear_programme(quantile):
    rng = np.random.default_rng(3)
    for L0, L1 in ((0.0, 2.0), (1.0, 0.0), (1.0, 2.0), (1e-6, 3e4), (5e3, 1e-5)):
        g = rng.lognormal(sigma=0.7, size=211)  # 211 times the quantile is no whole number: one best line
        ell = (L0 + L1 * g) * rng.lognormal(sigma=0.5, size=211)
        exact = by_linear_programme(g, ell, quantile)
        unit = np.array([np.median(ell), np.median(ell) / np.median(g)])
        np.testing.assert_allclose(quantile_line(g, ell, quantile=quantile) / unit, exact / unit, atol=1e-7)


@given(cloud=clouds, s=st.floats(0.001, 1000), t=st.floats(0.001, 1000))
def test_frontier_is_the_maximum_over_all_points(cloud, s, t):
    g, ell = np.array(cloud).T
    points = frontier_points(g, ell)
    for L1 in (0.0, 0.01, 0.3, 1.0, 7.0, 1e4):
        np.testing.assert_allclose(
            sample_frontier(*points.T, L1), max(0.0, (ell - L1 * g).max()), rtol=1e-12, atol=1e-12
        )
    # f -> s·f gives (s L0, L1); x -> x/t gives (L0/t², L1/t).
    scaled = frontier_points(g * s / t, ell * s / t**2)
    expected = sample_frontier(*points.T, 0.3) * s / t**2
    np.testing.assert_allclose(sample_frontier(*scaled.T, 0.3 / t), expected, rtol=1e-9, atol=1e-9 * s / t**2)


def test_lines_of_many_samples_are_those_of_each():
    rng = np.random.default_rng(2)
    g = rng.lognormal(size=(40, 150))
    ell = (0.5 + 2 * g) * rng.lognormal(sigma=0.4, size=g.shape)
    each = [quantile_line(a, b, quantile=0.93) for a, b in zip(g, ell, strict=True)]
    np.testing.assert_array_equal(quantile_lines(g, ell, quantile=0.93), each)


@settings(max_examples=50)
@given(cloud=clouds)
def test_envelope_is_the_least_bound_above_every_point(cloud):
    g, ell = np.array(cloud).T
    bound = envelope(frontier_points(g, ell), g)
    assert (bound >= ell * (1 - 1e-9)).all()
    # The slow twin: the least over many pairs (L0, L1), each above all points.
    slopes = np.linspace(0, 2 * (ell / g).max(), 501)
    slow = (np.maximum((ell - slopes[:, None] * g).max(1), 0)[:, None] + slopes[:, None] * g).min(0)
    assert (bound <= slow * (1 + 1e-9)).all()


@pytest.mark.parametrize("far", [1e6, 1e12, 1e15, 1e18, 1e30])
def test_quantile_line_holds_where_one_point_is_far_beyond_the_others(far):
    rng = np.random.default_rng(0)
    g = np.append(rng.lognormal(-1, 0.5, 30), far)
    for ell in ((1 + 4 * g) * rng.uniform(0.7, 1, 31), np.append(rng.uniform(1, 2, 30), far)):
        best, loss = quantile_line_by_enumeration(g, ell, quantile=0.95)
        line = quantile_line(g, ell, quantile=0.95)
        assert min(line) >= 0
        assert loss(line) <= loss(best) * (1 + 1e-6) + 1e-13 * far


def test_no_line_needs_an_L0_below_zero():
    points = np.array([[1.0, 2.0], [3.0, 4.0]])
    assert least_L0(points, [0.0, 0.5, 2.0, 100.0]).tolist() == [4.0, 2.5, 0.0, 0.0]
