"""Theorems 4 and 6, Remark 5 and Assumption 4: their numbers, what was wrong with them, what they refuse."""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from curvestep.theory.complexity import descend, first_hits
from curvestep.theory.problems.polynomials import Quartic
from curvestep.theory.problems.walls import ExponentialWall, PrintedWall, SlowValley
from curvestep.theory.rules import FixedStep
from curvestep.theory.theorems.fixed_gd import (
    assumption4,
    gradient_bound,
    lower_bound_pair,
    remark5,
    theorem4,
    theorem6,
    wall_height,
)
from tests.theory.draws import rotated_walls

positive = st.floats(1e-3, 1e3)


# Row 14.
@given(M=positive, L0=positive, L1=positive)
def test_wall_height_is_the_gap_of_the_wall_and_above_its_quadratic_bound(M, L0, L1):
    height = wall_height(M, L0=L0, L1=L1)
    wall = ExponentialWall(L0=L0, L1=L1)
    assert height == pytest.approx(float(wall.value(np.array(wall.start(M=M)))), rel=1e-6)
    assert height >= M**2 / (2 * (L0 + L1 * M)) * (1 - 1e-9)
    assert gradient_bound(height, L0=L0, L1=L1) == pytest.approx(M, rel=1e-6)
    assert gradient_bound(height, L0=L0, L1=L1, version="corrected") >= M * (1 - 1e-9)


def test_assumption_4_is_assumed_as_printed_and_proved_otherwise():
    numbers = dict(L0=1.0, L1=2.0, gap=3.0)
    assert assumption4(**numbers, version="printed") == math.inf
    assert assumption4(**numbers) == gradient_bound(3.0, L0=1.0, L1=2.0)
    closed = 2 * 3 + math.sqrt(4 * 9 + 2 * 3)
    assert assumption4(**numbers, version="corrected") == pytest.approx(closed)


@pytest.mark.parametrize(
    "problem",
    [Quartic(), rotated_walls(L0=0.7, L1=3.0), SlowValley(0.2)],
    ids=lambda p: p.name,
)
def test_the_gradient_is_bounded_without_assumption_4(problem):
    x = 2 * np.random.default_rng(0).normal(size=(300, *problem.event_shape))
    L1 = 3.0
    L0 = problem.frontier(L1)
    for gap, g in zip(problem.gap(x), problem.grad_norm(x), strict=True):
        assert g <= gradient_bound(float(gap), L0=L0, L1=L1) * (1 + 1e-9)


@pytest.mark.parametrize("wall", [PrintedWall(L1=5.0), ExponentialWall(L0=1.0, L1=5.0)], ids=lambda w: w.name)
def test_fixed_steps_diverge_exactly_above_the_limit_of_the_wall(wall):
    steps = wall.largest_step(M=50.0) * np.array([0.999, 1.001])
    hits = first_hits(wall, FixedStep(lr=steps), wall.start(M=50.0), 1e-3, 2000)
    assert list(np.isfinite(hits)) == [True, False]
    runs = descend(wall, FixedStep(lr=steps), wall.start(M=50.0), 2000)
    assert list(np.isfinite(runs.grad_norms[-1])) == [True, False]


# Row 16.
def test_the_printed_lower_bound_on_its_own_pair():
    L1, M, eps = 5.0, 50.0, 0.01
    gap = 2 * 0.5 + 5 * eps / 4
    pair = lower_bound_pair(L0=1.0, L1=L1, M=M, gap=gap, eps=eps, version="printed")
    assert pair.valley_start == pytest.approx(1 + 0.5 / eps)
    rule = FixedStep(lr=pair.largest_step)
    assert first_hits(pair.valley, rule, pair.valley_start, eps, 70_000) == 64_671
    bound = theorem4(L0=1.0, L1=L1, M=M, gap=gap, eps=eps, version="printed").bound
    assert bound == pytest.approx(64_017, abs=1)


def test_theorem4_corrected_numbers():
    guarantee = theorem4(L0=2.0, L1=5.0, M=50.0, gap=12.0, eps=0.1)
    assert guarantee.bound == pytest.approx(5 * 50 * 12 / (8 * 0.01 * math.log(1 + 125)))


@given(share=st.floats(1e-3, 1.0), L0=positive, L1=positive, growth=st.floats(1.0, 1e4))
def test_theorem4_sharp_is_above_corrected_and_below_four_times_it(share, L0, L1, growth):
    M = growth * L0 / L1
    eps = share * min(L0 / 3, M / 2)
    gap = max(wall_height(M, L0=L0, L1=L1), 1.25 * eps) * 1.001
    numbers = dict(L0=L0, L1=L1, M=M, gap=gap, eps=eps)
    ratio = theorem4(**numbers, version="sharp").bound / theorem4(**numbers).bound
    assert 1 - 1e-9 <= ratio <= 4 * (1 + 1e-9)


# Row 17.
def test_remark5_is_an_order_with_another_logarithm():
    numbers = dict(L0=2.0, L1=5.0, gap=12.0, eps=0.1)
    for version, log in (("printed", math.log(50)), ("corrected", math.log(126))):
        order = remark5(**numbers, M=50.0, version=version)
        assert order.bound == pytest.approx((250 / log + 2) * 12 / 0.01)
        assert order.up_to_constant


# Row 18.
def test_theorem6_numbers_and_its_M_for_free():
    printed = theorem6(L0=1.0, L1=2.0, gap=1.0, eps=0.1, M=3.0, version="printed")
    assert printed.hyperparameters == {"lr": 1 / 14}
    assert printed.bound == pytest.approx(2800)
    sharp = theorem6(L0=1.0, L1=2.0, gap=1.0, eps=0.1, version="sharp")
    assert pytest.approx(gradient_bound(1.0, L0=1.0, L1=2.0)) == sharp.M
    assert sharp.bound == pytest.approx(2 * (1 + 2 * sharp.M) / 0.01)


GOOD = dict(L0=1.0, L1=5.0, gap=12.0, eps=0.1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: theorem4(**{**GOOD, "eps": 0.5}, M=50.0), "needs eps ≤ L0/3"),
        (lambda: theorem4(**{**GOOD, "gap": 5.0}, M=50.0), r"needs gap ≥ ψ\(M\)"),
        (lambda: theorem4(**GOOD, M=0.15), "needs eps ≤ M/2"),
        (lambda: theorem4(**{**GOOD, "L0": 0.5}, M=50.0, version="printed"), "needs L0 ≥ 1"),
        (lambda: theorem4(**GOOD, M=0.9, version="printed"), "needs M > 1"),
        (lambda: theorem4(**GOOD, M=-1.0), "`M` must be positive"),
        (lambda: theorem6(**GOOD, M=-1.0), "`M` must be zero or more"),
        (lambda: remark5(**GOOD, M=0.5, version="printed"), "needs M > 1"),
        (lambda: gradient_bound(-1.0, L0=1.0, L1=1.0), "`gap` must be zero or more"),
    ],
)
def test_inapplicable_numbers_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()
