"""Theorems as functions: their numbers, what was wrong with them, and what they refuse."""

import math

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from curvestep.theory.complexity import descend, first_hits
from curvestep.theory.problems.polynomials import Polynomial, Quadratic, Quartic
from curvestep.theory.problems.walls import ExponentialWall, PrintedWall, SlowValley
from curvestep.theory.rules import ClippedStep, FixedStep, LogarithmicStep, NormalizedStep, SmoothClippedStep
from curvestep.theory.theorems.clipped_gd import (
    descent_constant,
    guaranteed_decrease,
    ngd_equivalence,
    normalized_gd,
    taylor_decrease,
    theorem3,
    wall_decrease,
)
from curvestep.theory.theorems.clipped_sgd import theorem7, theorem8
from curvestep.theory.theorems.fixed_gd import (
    assumption4,
    gradient_bound,
    lower_bound_pair,
    remark5,
    theorem4,
    theorem6,
    wall_height,
)
from curvestep.theory.theorems.guarantee import AssumptionError
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


def test_no_proof_covers_a_step_of_1_over_L0_up_to_the_threshold_L0_over_L1():
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
def test_theorem3_sharp_is_below_corrected_and_the_printed_second_term_never_leads(L0, L1, gap, share):
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


def test_normalized_descent_is_biased_by_skewed_noise_where_clipping_is_not():
    # At the minimum of x²/2, noise −1 with probability 0.9 and +9 with 0.1: the mean step.
    g = np.array([-1.0, 9.0])
    rules = ClippedStep(lr=1.0, max_norm=10.0), NormalizedStep(lr=10.0, offset=10.0)
    means = [([0.9, 0.1] * rule.at_norm(np.abs(g)) * g).sum() for rule in rules]
    assert means == pytest.approx([0.0, 0.9 / 1.9 - 9 / 11])


def test_normalized_gd_sharp_is_the_smooth_clip():
    numbers = dict(L0=1.3, L1=2.0, gap=1.0, eps=0.1)
    assert normalized_gd(**numbers, version="sharp").bound == pytest.approx(2 * (1.3 / 0.01 + 2 / 0.1))
    g = np.logspace(-3, 3, 50)
    np.testing.assert_allclose(
        normalized_gd(**numbers, version="sharp").rule.at_norm(g),
        theorem3(**numbers, version="sharp", form="smooth").rule.at_norm(g),
    )


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


@given(h=st.floats(0.01, 1.99))
def test_theorem6_every_step_below_two_over_K_descends_by_its_inequality(h):
    wall = ExponentialWall(L0=1.0, L1=2.0)
    M = 20.0
    x0, K = wall.start(M=M), 1.0 + 2.0 * M
    x = np.linspace(-x0, x0, 501)
    g = wall.grad_norm(x)
    after = wall.value(x - h / K * wall.gradient(x))
    assert (after <= wall.value(x) - h / K * (1 - h / 2) * g**2 + 1e-12).all()


# Row 19.
def test_theorem7_numbers():
    L0, L1, tau, eps, gap = 1.0, 5.0, 0.1, 0.5, 2.0
    V = (5 * L0 + 2 * L1 * tau) * tau**2
    delta = gap + V + 9 * tau * L0**2 / L1
    numbers = dict(L0=L0, L1=L1, gap=gap, eps=eps, tau=tau)
    printed, corrected = theorem7(**numbers, version="printed"), theorem7(**numbers)
    largest = max(128 * L1 / eps, 4 * delta / eps**4, (80 * L0 + 512 * L1 * tau) / eps**2)
    assert printed.bound == pytest.approx(delta * largest)
    largest = max(256 * L1 / eps, 64 * delta / eps**4, 160 * L0 / eps**2, 1024 * L1 * tau / eps**2)
    assert corrected.bound == pytest.approx(delta * largest)
    lr = min(1 / 20, 1 / (128 * 0.5), 1 / math.sqrt(math.ceil(corrected.bound)))
    assert corrected.hyperparameters == {"lr": lr, "cap": 1 / 80, "shift": tau}
    assert printed.hyperparameters["cap"] == pytest.approx(1 / (80 * printed.hyperparameters["lr"]))


@given(L0=positive, L1=positive, tau=positive, gap=positive, eps=positive)
def test_theorem7_sharp_is_never_above_corrected_nor_above_its_simple_form(L0, L1, tau, gap, eps):
    numbers = dict(L0=L0, L1=L1, gap=gap, eps=eps, tau=tau)
    sharp = theorem7(**numbers, version="sharp").bound
    assert sharp <= theorem7(**numbers).bound * (1 + 1e-9)
    V = (5 * L0 + 2 * L1 * tau) * tau**2
    simple = max(20 * L0 / eps**2, 128 * L1 * tau / eps**2, 32 * L1 / eps, 16 * V / eps**4)
    assert sharp <= 16 * gap * simple * (1 + 1e-9)


@given(L0=positive, L1=positive, tau=positive, gap=positive, eps=positive)
def test_theorem7_sharp_satisfies_what_its_proof_needs(L0, L1, tau, gap, eps):
    guarantee = theorem7(L0=L0, L1=L1, gap=gap, eps=eps, tau=tau, version="sharp")
    lr, T = guarantee.hyperparameters["lr"], math.ceil(guarantee.bound)
    V = (5 * L0 + 2 * L1 * tau) * tau**2
    # While the gradient exceeds ε, the sum grows by min{ηε², ε/(32 L1)}; Markov wants it past 8(Δ0 + η²TV).
    assert T * min(lr * eps**2, eps / (32 * L1)) >= 8 * (gap + lr**2 * T * V) * (1 - 1e-6)
    assert lr <= 1 / (20 * L0)
    assert lr <= 1 / (128 * L1 * tau)


def theorem7_progress(version, **numbers):
    """What the proof's sum reaches over what it needs, after the bound's iterations, rounded up or not."""
    L0, L1, tau, gap, eps = (numbers[name] for name in ("L0", "L1", "tau", "gap", "eps"))
    guarantee = theorem7(**numbers, version=version)
    delta = gap + (5 * L0 + 2 * L1 * tau) * tau**2 + 9 * tau * L0**2 / L1
    each = min(guarantee.hyperparameters["lr"] * eps**2, eps / (32 * L1)) / (8 * delta)
    return math.ceil(guarantee.bound) * each, guarantee.bound * each


@given(L0=positive, L1=positive, tau=positive, gap=positive, eps=positive)
def test_theorem7_corrected_satisfies_what_its_proof_needs_and_printed_does_not(L0, L1, tau, gap, eps):
    numbers = dict(L0=L0, L1=L1, gap=gap, eps=eps, tau=tau)
    assert theorem7_progress("corrected", **numbers)[0] >= 1 - 1e-6
    assert theorem7_progress("printed", **numbers)[1] <= 1 + 1e-9  # too few iterations, by up to a factor 16


# Row 21.
def test_theorem8_numbers():
    numbers = dict(L0=1.0, L1=2.0, gap=3.0, eps=0.5, M=4.0, tau=0.5)
    V, K = (5 + 4 * 2 * 4) * 4.5**2, 9.0
    assert theorem8(**numbers, version="printed").bound == pytest.approx((3 + V) ** 2 / 0.5**4)
    assert theorem8(**numbers).bound == pytest.approx((6 + V) ** 2 / 0.5**4)
    sharp = theorem8(**numbers, version="sharp")
    assert sharp.bound == pytest.approx(8 * K * 3 / 0.25 * 4)
    assert sharp.hyperparameters == {"lr": pytest.approx(min(1 / K, 0.25 / (4 * K * 0.25)))}


@given(L0=positive, L1=positive, tau=positive, gap=positive, eps=positive, M=positive)
def test_theorem8_satisfies_what_its_proof_needs(L0, L1, tau, gap, eps, M):
    numbers = dict(L0=L0, L1=L1, gap=gap, eps=eps, M=M, tau=tau)
    K, sharp = L0 + L1 * M, theorem8(**numbers, version="sharp")
    h, T = sharp.hyperparameters["lr"], math.ceil(sharp.bound)
    assert 2 * gap / (h * T) + K * h * tau**2 <= eps**2 / 2 * (1 + 1e-6)
    corrected = theorem8(**numbers)
    h, T = corrected.hyperparameters["lr"], math.ceil(corrected.bound)
    V = (5 * L0 + 4 * L1 * M) * (M + tau) ** 2
    assert h * (M + tau) <= 1 / L1 * (1 + 1e-9)
    assert (gap + V / 2) / math.sqrt(T) <= eps**2 / 2 * (1 + 1e-6)


@example(1.0, 1.0, 1.0, 7.0, 5.0, 1.0)  # gradients below eps from the start: there corrected is lower
@given(positive, positive, positive, positive, positive, positive)
def test_theorem8_sharp_never_loses_where_there_is_something_to_do(L0, L1, tau, gap, eps, M):
    numbers = dict(L0=L0, L1=L1, gap=gap, eps=min(eps, M), M=M, tau=tau)
    assert theorem8(**numbers, version="sharp").bound <= theorem8(**numbers).bound * (1 + 1e-9)


def test_a_guarantee_reads_as_a_sentence():
    text = str(theorem3(L0=1.0, L1=2.0, gap=1.0, eps=0.1))
    assert text.startswith(
        "Theorem 3 (corrected): it takes at most 2000 iterations to gradient norm 0.1, with"
    )
    assert "at least of order" in str(remark5(L0=1.0, L1=5.0, M=50.0, gap=12.0, eps=0.1))


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
        (lambda: theorem4(**{**GOOD, "eps": 0.5}, M=50.0), "needs eps ≤ L0/3"),
        (lambda: theorem4(**{**GOOD, "gap": 5.0}, M=50.0), r"needs gap ≥ ψ\(M\)"),
        (lambda: theorem4(**GOOD, M=0.15), "needs eps ≤ M/2"),
        (lambda: theorem4(**{**GOOD, "L0": 0.5}, M=50.0, version="printed"), "needs L0 ≥ 1"),
        (lambda: theorem4(**GOOD, M=0.9, version="printed"), "needs M > 1"),
        (lambda: theorem4(**GOOD, M=-1.0), "`M` must be positive"),
        (lambda: theorem6(**GOOD, M=-1.0), "`M` must be zero or more"),
        (lambda: theorem7(**GOOD, tau=-0.1), "`tau` must be zero or more"),
        (lambda: theorem7(**{**GOOD, "L1": 0.0}, tau=0.1), "needs L1 > 0"),
        (lambda: theorem8(**GOOD, M=0.0, tau=0.1), "`M` must be positive"),
        (lambda: remark5(**GOOD, M=0.5, version="printed"), "needs M > 1"),
        (lambda: gradient_bound(-1.0, L0=1.0, L1=1.0), "`gap` must be zero or more"),
        (lambda: ngd_equivalence([1.0], lr=0.0, max_norm=1.0), "`lr` must be positive"),
    ],
)
def test_inapplicable_numbers_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_a_broken_assumption_has_its_own_error():
    with pytest.raises(AssumptionError, match="does not apply"):
        theorem4(**{**GOOD, "eps": 0.5}, M=50.0)
