"""ℓ-smoothness: closed forms, certificates on random laws, what is refused, and how far the steps can go."""

import math
from dataclasses import replace

import numpy as np
import pytest

from curvestep.theory.certificates import certify
from curvestep.theory.problems.formula import FormulaProblem
from curvestep.theory.problems.walls import ExponentialWall
from curvestep.theory.rules import LogarithmicStep
from curvestep.theory.theorems.clipped_gd import theorem3
from curvestep.theory.theorems.ell_smooth import (
    ell_decrease,
    ell_gradient_bound,
    ell_height,
    ell_secant,
    ell_smooth,
    ell_step,
)
from curvestep.theory.theorems.fixed_gd import gradient_bound, theorem6, wall_height
from curvestep.theory.theorems.guarantee import AssumptionError
from tests.theory.draws import Rotated, log_uniform
from tests.theory.laws import Affine, LawProblem, Piecewise, Power, Separable, Square, draw_law

STEPS = ["constant", "secant", "doubling", "adaptive"]


def draw(rng):
    """A law, a random function that keeps it, and how far it goes."""
    law = draw_law(rng)
    steepest = log_uniform(rng, 0.5, 8)
    reach = float(law.length(steepest))
    return law, LawProblem(law, rng, reach=reach), steepest


def starts_of(problem, rng, num):
    return rng.uniform(problem.knots[0], problem.knots[-1], size=num)


def certificates(num, rng):
    """Certificates of every step on random laws, starts of one function side by side."""
    for _ in range(num):
        law, problem, steepest = draw(rng)
        starts = starts_of(problem, rng, 8)
        gap = float(problem.gap(starts).max())
        eps = steepest * log_uniform(rng, 0.01, 0.5)
        for step in STEPS:
            yield certify(problem, ell_smooth(law, gap=gap, eps=eps, step=step), starts, max_steps=1000)


def several_dimensions(num, rng):
    """The same where the functions of the coordinates keep one law, seen in a rotated frame."""
    for _ in range(num):
        law, first, steepest = draw(rng)
        dim = int(rng.integers(2, 7))
        parts = [first, *[LawProblem(law, rng, reach=float(law.length(steepest))) for _ in range(dim - 1)]]
        problem = Separable(parts)
        starts = np.stack([starts_of(part, rng, 8) for part in parts], axis=-1)
        gap = float(problem.gap(starts).max())
        eps = steepest * log_uniform(rng, 0.05, 0.7)
        rotated = Rotated(problem, int(rng.integers(1000)))
        rotated.minimum = problem.minimum
        turned = starts @ rotated.rotation
        for step in STEPS:
            try:
                guarantee = ell_smooth(law, gap=gap, eps=eps, step=step)
            except AssumptionError:  # the law bounds no gradient in so large a gap
                assert law.height(1e80) <= gap
                continue
            yield certify(rotated, guarantee, turned, max_steps=1000)


def check(found, least):
    found = list(found)
    assert {certificate.status for certificate in found} <= {"holds", "undecided"}
    held = [certificate for certificate in found if certificate.status == "holds"]
    assert len(held) >= least
    assert sum(certificate.measured > 0 for certificate in held) >= least / 2
    assert max(certificate.descent_excess or 0.0 for certificate in found) <= 1e-9


def test_certificates_hold_on_random_laws():
    check(certificates(25, np.random.default_rng(0)), least=70)


def test_certificates_hold_in_several_dimensions():
    check(several_dimensions(10, np.random.default_rng(1)), least=25)


@pytest.mark.slow
def test_certificates_hold_on_500_random_laws():
    check(certificates(500, np.random.default_rng(2)), least=1500)


@pytest.mark.slow
def test_certificates_hold_in_several_dimensions_on_200_random_laws():
    check(several_dimensions(200, np.random.default_rng(3)), least=500)


def test_no_gradient_is_higher_than_its_gap_allows_and_some_reach_it():
    rng = np.random.default_rng(0)
    closest = []
    for _ in range(40):
        law, problem, _ = draw(rng)
        x = starts_of(problem, rng, 200)
        gap = problem.gap(x)
        share = law.height(problem.grad_norm(x))[gap > 1e-9] / gap[gap > 1e-9]
        assert share.max() <= 1 + 1e-7
        closest.append(share.max())
    assert np.mean(np.array(closest) > 0.999) > 0.3


@pytest.mark.parametrize(
    "law",
    [Affine(0.7, 3.0), Square(0.5, 2.0), Power(1.3, 0.2, 1.8), Piecewise([0, 1, 1.5, 4], [1, 1.1, 6, 7])],
)
def test_height_and_gradient_bound_are_their_closed_forms(law):
    for u in (0.01, 1.0, 3.7):
        assert ell_height(law, u) == pytest.approx(law.height(u), rel=1e-10)
        assert ell_gradient_bound(law, float(law.height(u))) == pytest.approx(u, rel=1e-9)


def test_affine_law_gives_the_wall_and_the_gradient_bound():
    law = Affine(0.7, 3.0)
    assert ell_height(law, 5.0) == pytest.approx(wall_height(5.0, L0=0.7, L1=3.0), rel=1e-12)
    assert ell_gradient_bound(law, 2.0) == pytest.approx(gradient_bound(2.0, L0=0.7, L1=3.0), rel=1e-9)


def test_affine_law_gives_theorems_3_and_6_in_their_sharp_forms():
    numbers = dict(gap=2.0, eps=0.01)
    secant = ell_smooth(Affine(0.7, 3.0), **numbers, step="secant")
    sharp = theorem3(L0=0.7, L1=3.0, **numbers, version="sharp", form="smooth")
    assert secant.bound == pytest.approx(sharp.bound, rel=1e-9)
    g = np.geomspace(0.01, secant.M, 50)
    np.testing.assert_allclose(secant.rule.at_norm(g), sharp.rule.at_norm(g), rtol=1e-12)
    constant = ell_smooth(Affine(0.7, 3.0), **numbers, step="constant")
    assert constant.bound == pytest.approx(theorem6(L0=0.7, L1=3.0, **numbers, version="sharp").bound)


def test_doubling_step_of_an_affine_law_is_logarithmic():
    g = np.geomspace(1e-3, 1e3, 20)
    np.testing.assert_allclose(ell_step(Affine(0.5, 2.0), g), LogarithmicStep(L0=0.5, L1=2.0).at_norm(g))
    np.testing.assert_allclose(ell_decrease(lambda u: 3.0 + 0 * u, g), g**2 / 6)
    assert np.all(ell_decrease(lambda u: 0.5 + u**1.5, g) >= g**2 / (2 * (0.5 + (2 * g) ** 1.5)))


@pytest.mark.parametrize("step", STEPS)
def test_constant_law_gives_the_classical_bound(step):
    guarantee = ell_smooth(lambda u: 3.0 + 0 * u, gap=2.0, eps=0.1, step=step)
    assert guarantee.bound == pytest.approx(2 * 3 * 2 / 0.01)
    np.testing.assert_allclose(guarantee.rule.at_norm(np.array([0.1, 1.0])), 1 / 3)
    assert guarantee.M == pytest.approx(math.sqrt(2 * 3 * 2))


def test_law_of_log_cosine_has_a_bound_and_descent_arrives():
    f = FormulaProblem(
        lambda x: -np.log(np.cos(x)), np.tan, lambda x: 1 / np.cos(x) ** 2, minimum=0.0, name="−ln cos"
    )
    guarantee = ell_smooth(lambda u: 1 + u**2, gap=1.0, eps=1e-3, step="constant")
    assert pytest.approx(math.sqrt(math.e**2 - 1), rel=1e-12) == guarantee.M
    assert guarantee.bound == pytest.approx(2 * math.e**2 / 1e-6)
    certificate = certify(f, guarantee, math.acos(math.exp(-1)))
    assert (certificate.status, certificate.measured) == ("holds", 47)


def test_a_law_may_vanish_at_zero_and_the_function_need_no_minimum():
    # f = 4/x on the positive numbers has |f''| = |f'|^1.5, and its gradient is as steep as its gap allows.
    for x in (0.1, 1.0, 30.0):
        assert ell_gradient_bound(lambda u: u**1.5, 4 / x) == pytest.approx(4 / x**2, rel=1e-9)


def test_fast_laws_prefer_the_doubling_step():
    height = 2 * math.sqrt(20)  # of a gradient norm of 20
    bounds = {s: ell_smooth(lambda u: u**1.5, gap=height, eps=0.01, step=s).bound for s in STEPS}
    assert bounds["adaptive"] == bounds["doubling"] == pytest.approx(260.7, rel=1e-3)
    assert bounds["secant"] == pytest.approx(8000, rel=0.01)


def test_secant_is_the_law_where_the_ratio_falls_and_never_too_small():
    g = np.geomspace(0.01, 5, 300)
    concave = Power(1.0, 0.3, 0.5)
    np.testing.assert_array_equal(ell_secant(concave, 5.0, least=0.01)(g), concave(g))
    rng = np.random.default_rng(0)
    for _ in range(20):
        law = draw_law(rng)
        k = ell_secant(law, 5.0, least=0.01)(g)
        v = np.geomspace(0.01, 5, 5000)
        exact = g * np.array([np.max(law(v[v >= low]) / v[v >= low]) for low in g])
        assert (k >= exact * (1 - 1e-9)).all()
        assert (k <= np.maximum(exact, law(g)) * 1.02).all()


def test_false_hypotheses_and_broken_promises_are_caught():
    wall = ExponentialWall(L0=1.0, L1=2.0)
    law = Affine(1.0, 2.0)
    x0 = 1.5
    gap = float(wall.gap(np.array(x0)))
    kinds = lambda guarantee: [note.kind for note in certify(wall, guarantee, x0).reasons]  # noqa: E731
    assert "outside-class" in kinds(ell_smooth(lambda u: law(u) / 20, gap=gap, eps=1e-2))
    assert kinds(ell_smooth(law, gap=gap / 20, eps=1e-2)) == ["gap"]
    right = ell_smooth(law, gap=gap, eps=1e-2)
    assert kinds(replace(right, M=right.M / 2)) == ["gradient-norm"]
    assert kinds(replace(right, bound=1.0)) == ["slower"]
    assert "decrease" in kinds(replace(right, decrease=lambda g: 3 * right.decrease(g)))
    assert certify(wall, right, x0, max_steps=1).status == "undecided"


def test_a_fast_law_bounds_gradients_in_small_gaps_only():
    fast = lambda u: 1 + u**2.5  # noqa: E731  # its integral of u/ℓ is 2.14
    assert ell_gradient_bound(fast, 0.5) < math.inf
    with pytest.raises(AssumptionError, match="bounds no gradient"):
        ell_smooth(fast, gap=3.0, eps=0.1)


@pytest.mark.parametrize(
    ("ell", "words"), [(lambda u: 1 / (1 + u), "nondecreasing"), (lambda u: 0 * u, "positive")]
)
def test_laws_that_are_none_are_refused(ell, words):
    with pytest.raises(AssumptionError, match=words):
        ell_smooth(ell, gap=1.0, eps=0.1)
