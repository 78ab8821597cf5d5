"""Inequalities between two points, and samples held against a claimed pair."""

import math

import numpy as np
import pytest

from curvestep.theory.inequalities import (
    check_smoothness,
    gradient_change_bound,
    limsup_smoothness,
    sample_frontier,
    value_change_bound,
)
from curvestep.theory.problems.walls import ExponentialWall
from tests.theory.problems.samples import SMOOTH, points


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


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: sample_frontier([1.0], [1.0, 2.0], 1.0), "equal length"),
        (lambda: sample_frontier([math.nan], [1.0], 1.0), "`hessian_norms` must be finite"),
        (lambda: sample_frontier([1.0], [-1.0], 1.0), "`hessian_norms` must be finite"),
        (lambda: sample_frontier([1.0], [1.0], -1.0), "`L1` must be zero or more"),
        (lambda: check_smoothness([1.0], [1.0], L0=-1.0, L1=1.0), "`L0` must be zero or more"),
    ],
)
def test_bad_input_is_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()
