"""Functions against finite differences and their frontiers against grids; norms and noise."""

import math

import numpy as np
import pytest

from curvestep.theory.inequalities import (
    check_smoothness,
    sample_frontier,
)
from curvestep.theory.problems.base import BoundedNoise
from curvestep.theory.problems.polynomials import Quadratic, Quartic
from curvestep.theory.problems.walls import ExponentialWall
from tests.theory.draws import RareNoise
from tests.theory.problems.samples import PROBLEMS, SCALAR, SMOOTH, VECTOR, points


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
        (lambda: BoundedNoise(-1.0), "`tau` must be positive"),
        (lambda: ExponentialWall(L0=1e3, L1=10.0).check_start(70.7), "outside the domain"),
        (lambda: Quartic().check_start(math.nan), "`x0` must be finite, got nan"),
        (lambda: Quadratic([1.0, 2.0]).check_start([1.0, 2.0, 3.0]), "`x0` must have 2 coordinates"),
        (lambda: ExponentialWall(L0=1.0, L1=1.0).check_start(1e4), "Start closer to the minimum"),
    ],
)
def test_bad_input_is_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()
