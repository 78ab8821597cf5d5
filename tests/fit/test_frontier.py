import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from curvestep.fit.frontier import frontier, frontier_points, quantile_line, resampled_lines
from tests.reference import quantile_line_by_enumeration

numbers = st.floats(0.01, 100)
clouds = st.lists(st.tuples(numbers, numbers), min_size=3, max_size=14)


@settings(max_examples=50)
@given(cloud=clouds, quantile=st.sampled_from([0.5, 0.75, 0.9, 0.95]))
def test_quantile_line_has_the_least_loss_of_all_lines(cloud, quantile):
    g, ell = np.array(cloud).T
    best, loss = quantile_line_by_enumeration(g, ell, quantile=quantile)
    for line in (
        quantile_line(g, ell, quantile=quantile),
        resampled_lines(g[None], ell[None], quantile=quantile)[0],
    ):
        assert min(line) >= 0
        assert loss(line) <= loss(best) * (1 + 1e-6) + 1e-9


def test_quantile_line_equals_enumeration_where_it_is_unique():
    rng = np.random.default_rng(0)
    for _ in range(20):
        g = rng.lognormal(size=31)
        ell = (1 + rng.normal() * g) ** 2 * rng.lognormal(sigma=0.5, size=31)
        (L0, L1), _ = quantile_line_by_enumeration(g, ell, quantile=0.83)
        np.testing.assert_allclose(quantile_line(g, ell, quantile=0.83), (L0, L1), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("num", [300, 20_000])
def test_far_points_that_enter_by_their_sums_change_nothing(num):
    rng = np.random.default_rng(1)
    g = rng.lognormal(size=num)
    ell = (1 + 2 * g) * rng.lognormal(sigma=0.5, size=num)
    L0, L1 = quantile_line(g, ell, quantile=0.95)

    def loss(a, b):
        r = ell - a - b * g
        return np.maximum(0.95 * r, -0.05 * r).sum()

    # The loss is convex: a line that no small change improves is the best of all.
    least = loss(L0, L1)
    for da in (-1e-6, 0, 1e-6):
        for db in (-1e-6, 0, 1e-6):
            assert loss(L0 + da, L1 + db) >= least * (1 - 1e-12)
    assert abs(np.mean(ell <= L0 + L1 * g + 1e-9) - 0.95) <= 2 / num


@given(cloud=clouds, s=st.floats(0.001, 1000), t=st.floats(0.001, 1000))
def test_frontier_is_the_maximum_over_all_points(cloud, s, t):
    g, ell = np.array(cloud).T
    points = frontier_points(g, ell)
    for L1 in (0.0, 0.01, 0.3, 1.0, 7.0, 1e4):
        np.testing.assert_allclose(
            frontier(points, L1), max(0.0, (ell - L1 * g).max()), rtol=1e-12, atol=1e-12
        )
    # f -> s·f gives (s L0, L1); x -> x/t gives (L0/t², L1/t).
    scaled = frontier_points(g * s / t, ell * s / t**2)
    np.testing.assert_allclose(
        frontier(scaled, 0.3 / t), frontier(points, 0.3) * s / t**2, rtol=1e-9, atol=1e-9 * s / t**2
    )


def test_resampled_lines_follow_the_programme():
    rng = np.random.default_rng(2)
    g = rng.lognormal(size=(40, 150))
    ell = (0.5 + 2 * g) * rng.lognormal(sigma=0.4, size=g.shape)
    fast = resampled_lines(g, ell, quantile=0.93)
    slow = [quantile_line(a, b, quantile=0.93) for a, b in zip(g, ell, strict=True)]
    np.testing.assert_allclose(fast, slow, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("far", [1e6, 1e12, 1e15, 1e18, 1e30])
def test_quantile_line_holds_where_one_point_is_far_beyond_the_others(far):
    rng = np.random.default_rng(0)
    g = np.append(rng.lognormal(-1, 0.5, 30), far)
    for ell in ((1 + 4 * g) * rng.uniform(0.7, 1, 31), np.append(rng.uniform(1, 2, 30), far)):
        best, loss = quantile_line_by_enumeration(g, ell, quantile=0.95)
        line = quantile_line(g, ell, quantile=0.95)
        assert min(line) >= 0
        assert loss(line) <= loss(best) * (1 + 1e-6) + 1e-13 * far
