"""Theorem 3 and normalized descent: their numbers, what was wrong with them, and what they refuse."""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from curvestep.theory.complexity import first_hits
from curvestep.theory.problems.polynomials import Polynomial, Quadratic, Quartic
from curvestep.theory.problems.walls import ExponentialWall, PrintedWall, SlowValley
from curvestep.theory.rules import ClippedStep, LogarithmicStep, NormalizedStep, SmoothClippedStep
from curvestep.theory.theorems.clipped_gd import (
    descent_constant,
    guaranteed_decrease,
    ngd_equivalence,
    normalized_gd,
    taylor_decrease,
    theorem3,
    wall_decrease,
)
from tests.theory.draws import Rotated, rotated_walls

positive = st.floats(1e-3, 1e3)
SHARP_FORMS = ["clipped", "smooth", "logarithmic"]


# Row 12.
@pytest.mark.parametrize(
    ("rule", "constants"),
    [
        (ClippedStep(lr=0.1, max_norm=1.0), (10.55, 10.53, 10.53)),
        (ClippedStep(lr=0.5, max_norm=2 / 3), (3.69, 3.6, 3.53)),
        (ClippedStep(lr=0.5, max_norm=1.0), (2.85, 8 / 3, 8 / 3)),
        (ClippedStep(lr=0.5, max_norm=1.14), (2.69, 2.69, 8 / 3)),
        (NormalizedStep(lr=2 / 3, offset=2 / 3), (2.59, 2.25, 2.055)),  # 1/(L0 + 1.5 L1 g)
        (LogarithmicStep(L0=1.0, L1=1.0), (2.59, 2.21, 2.0)),
        (SmoothClippedStep(L0=1.0, L1=1.0), (3.55, 2.0, 2.0)),  # 1/(L0 + L1 g)
    ],
)
def test_constants_of_the_step_rules(rule, constants):
    promises = (taylor_decrease, guaranteed_decrease, wall_decrease)
    found = [descent_constant(rule, decrease=promise) for promise in promises]
    assert found == pytest.approx(constants, abs=0.005)


def test_no_proof_covers_a_step_of_1_over_L0_up_to_L0_over_L1():
    assert descent_constant(ClippedStep(lr=1.0, max_norm=1.0)) == math.inf


def test_constants_used_in_bounds_are_rounded_up():
    assert descent_constant(ClippedStep(lr=0.5, max_norm=1.14)) <= 2.693
    assert descent_constant(LogarithmicStep(L0=1.0, L1=1.0)) <= 2.2079
    assert descent_constant(SmoothClippedStep(L0=1.0, L1=1.0)) <= 2.0 * (1 + 1e-9)


@given(g=positive, L0=positive, L1=positive)
def test_smooth_clip_is_sure_of_its_decrease(g, L0, L1):
    sure = guaranteed_decrease(1 / (L0 + L1 * g), g, L0=L0, L1=L1)
    assert sure == pytest.approx(g * g / (2 * (L0 + L1 * g)))


@given(g=positive, L0=positive, L1=positive, factor=st.floats(0.1, 3.0))
def test_no_step_is_sure_of_more_than_the_smooth_clip(g, L0, L1, factor):
    h = 1 / (L0 + L1 * g)
    best = guaranteed_decrease(h, g, L0=L0, L1=L1)
    assert guaranteed_decrease(factor * h, g, L0=L0, L1=L1) <= best * (1 + 1e-9)


@given(g=positive, L0=positive, L1=positive, factor=st.floats(0.01, 3.0))
def test_no_promise_exceeds_what_the_wall_gives(g, L0, L1, factor):
    h = factor / (L0 + L1 * g)
    sure = guaranteed_decrease(h, g, L0=L0, L1=L1)
    assert sure <= wall_decrease(h, g, L0=L0, L1=L1) + 1e-6 * g * g * h


@pytest.mark.parametrize(
    "problem",
    [
        Quartic(),
        Polynomial([1.0, -2.0, 0.5, 0.0, 0.3]),
        PrintedWall(L1=3.0),
        ExponentialWall(L0=0.7, L1=3.0),
        Rotated(Quadratic([2.0, 0.5, 0.1]), 0),
        rotated_walls(L0=0.7, L1=3.0),
        SlowValley(0.2),
    ],
    ids=lambda p: p.name,
)
def test_one_step_keeps_the_descent_inequality_on_every_problem(problem):
    L1 = 3.0
    L0 = problem.frontier(L1)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4000, *problem.event_shape))
    g = problem.grad_norm(x)
    h = rng.uniform(0, 3, size=g.shape) / (L0 + L1 * g)
    after = problem.value(x - problem.scale(h, problem.gradient(x)))
    sure = guaranteed_decrease(h, g, L0=L0, L1=L1)
    assert (after <= problem.value(x) - sure + 1e-9 * (np.abs(sure) + problem.value(x))).all()
    # The paper's inequality, for steps of length at most 1/L1.
    short = h * g <= 1 / L1
    paper = problem.value(x) - h * g**2 + (5 * L0 + 4 * L1 * g) / 2 * h**2 * g**2
    assert (after <= paper + 1e-12)[short].all()


def test_theorem3_printed_and_corrected_numbers():
    bounds = {"printed": 20 * 2 * 5 / 0.01 + 20 * 9 * 5 / 2, "corrected": 20 * 5 * max(2 / 0.01, 3 / 0.1)}
    for version, bound in bounds.items():
        found = theorem3(L0=2.0, L1=3.0, gap=5.0, eps=0.1, version=version)
        assert found.hyperparameters == {"lr": 1 / 20, "max_norm": pytest.approx(2 / 3)}
        assert found.bound == pytest.approx(bound)


# Row 5.
def test_theorem3_with_the_papers_radius_has_the_papers_threshold():
    for L1 in (0.01, 3.0):
        corrected = theorem3(L0=2.0, L1=L1, gap=5.0, eps=0.1, radius=1.0)
        printed = theorem3(L0=2.0, L1=L1, gap=5.0, eps=0.1, version="printed")
        assert corrected.hyperparameters["max_norm"] == pytest.approx(printed.hyperparameters["max_norm"])


@given(L0=positive, L1=positive, gap=positive, share=st.floats(1e-3, 1.0))
def test_theorem3_sharp_is_lowest_and_the_second_term_never_leads(L0, L1, gap, share):
    eps = share * L0 / L1
    numbers = dict(L0=L0, L1=L1, gap=gap, eps=eps)
    for form in SHARP_FORMS:
        assert theorem3(**numbers, version="sharp", form=form).bound < theorem3(**numbers).bound
    first, second = 20 * L0 * gap / eps**2, 20 * L1**2 * gap / L0
    assert second <= first * (1 + 1e-9)


# Row 12, the iterations observed on x⁴.
@pytest.mark.parametrize(
    ("version", "form", "iterations"),
    [("corrected", "clipped", 3208), ("sharp", "clipped", 567), ("sharp", "smooth", 321)],
)
def test_iterations_on_the_quartic_are_those_observed(version, form, iterations):
    guarantee = theorem3(L0=0.16, L1=10.0, gap=30.0**4, eps=1e-4, version=version, form=form)
    assert guarantee.bound > 1e10
    assert first_hits(Quartic(), guarantee.rule, 30.0, 1e-4, 5000) == iterations


def test_without_L1_clipping_is_plain_descent():
    guarantee = theorem3(L0=2.0, L1=0.0, gap=1.0, eps=0.1)
    assert guarantee.hyperparameters["max_norm"] == math.inf
    assert guarantee.bound == pytest.approx(20 * 2 / 0.01)


# Row 10.
@given(g=st.floats(0, 1e6), lr=positive, max_norm=positive)
def test_normalized_over_clipped_step_is_between_one_half_and_one(g, lr, max_norm):
    sharp = ngd_equivalence([g], lr=lr, max_norm=max_norm)
    assert sharp.holds
    assert ngd_equivalence([g], lr=lr, max_norm=max_norm, version="printed").holds
    assert sharp.upper == 1


def test_normalized_gd_sharp_is_the_smooth_clip():
    numbers = dict(L0=1.3, L1=2.0, gap=1.0, eps=0.1)
    assert normalized_gd(**numbers, version="sharp").bound == pytest.approx(2 * (1.3 / 0.01 + 2 / 0.1))
    g = np.logspace(-3, 3, 50)
    np.testing.assert_allclose(
        normalized_gd(**numbers, version="sharp").rule.at_norm(g),
        theorem3(**numbers, version="sharp", form="smooth").rule.at_norm(g),
    )


GOOD = dict(L0=1.0, L1=5.0, gap=12.0, eps=0.1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: theorem3(**{**GOOD, "L0": -1.0}), "`L0` must be positive"),
        (lambda: theorem3(**{**GOOD, "L1": -1.0}), "`L1` must be zero or more"),
        (lambda: theorem3(**{**GOOD, "eps": 0.0}), "`eps` must be positive"),
        (lambda: theorem3(**{**GOOD, "gap": math.nan}), "`gap` must be zero or more"),
        (lambda: theorem3(**GOOD, version="fixed"), "`version` must be one of 'printed'"),
        (lambda: theorem3(**GOOD, form="smooth"), "`form` must be 'clipped' unless"),
        (lambda: theorem3(**{**GOOD, "L1": 0.0}, version="printed"), "needs L1 > 0"),
        (lambda: theorem3(**GOOD, radius=-1.0), "`radius` must be positive"),
        (lambda: normalized_gd(**{**GOOD, "L1": 0.0}), "needs L1 > 0"),
        (lambda: ngd_equivalence([1.0], lr=0.0, max_norm=1.0), "`lr` must be positive"),
    ],
)
def test_inapplicable_numbers_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()
