"""ℓ-smoothness: closed forms, random certificates, refused laws; the complexity of equation 9."""

import math
from dataclasses import replace

import numpy as np
import pytest

from curvestep.theory.complexity import worst_case_complexity
from curvestep.theory.problems.polynomials import Quadratic
from curvestep.theory.problems.walls import ExponentialWall, SlowValley
from curvestep.theory.rules import ClippedStep, FixedStep, LogarithmicStep
from curvestep.theory.theorems.clipped_gd import theorem3
from curvestep.theory.theorems.ell_smooth import EllGuarantee, certify_ell, ell_decrease, ell_smooth, ell_step
from curvestep.theory.theorems.guarantee import AssumptionError


def wall(rng):
    """f'' = L0 + L1 |f'|, with equality."""
    L0, L1 = 10 ** rng.uniform(-1, 1, 2)
    value = lambda x: L0 / L1**2 * (np.expm1(L1 * np.abs(x)) - L1 * np.abs(x))  # noqa: E731
    gradient = lambda x: L0 / L1 * np.expm1(L1 * np.abs(x)) * np.sign(x)  # noqa: E731
    curvature = lambda x: L0 * np.exp(L1 * np.abs(x))  # noqa: E731
    return value, gradient, curvature, lambda u: L0 + L1 * u, rng.uniform(1, 4) / L1


def power(rng):
    """μx²/2 + |x|ᵖ/p: exponents of ℓ from 1/3 to 6/7."""
    mu, p = 10 ** rng.uniform(-1, 1), rng.uniform(2.5, 8)
    value = lambda x: mu * x**2 / 2 + np.abs(x) ** p / p  # noqa: E731
    gradient = lambda x: mu * x + np.abs(x) ** (p - 1) * np.sign(x)  # noqa: E731
    curvature = lambda x: mu + (p - 1) * np.abs(x) ** (p - 2)  # noqa: E731
    return value, gradient, curvature, lambda u: mu + (p - 1) * u ** ((p - 2) / (p - 1)), rng.uniform(1, 4)


def barrier(rng):
    """(1 − x²)^−q, whose law has an exponent (q + 2)/(q + 1), between 1 and 2; its constants on a grid."""
    q = rng.uniform(0.5, 3)
    alpha = (q + 2) / (q + 1)

    def inside(x):
        return np.where(np.abs(x) < 1, 1 - np.minimum(x * x, 1), np.nan)

    value = lambda x: inside(x) ** -q  # noqa: E731
    gradient = lambda x: 2 * q * x * inside(x) ** (-q - 1)  # noqa: E731
    curvature = lambda x: 2 * q * (inside(x) + 2 * (q + 1) * x**2) * inside(x) ** (-q - 2)  # noqa: E731
    x = 1 - np.geomspace(1, 1e-9, 20_000)
    bent, slope = curvature(x), gradient(x)
    steep = 1.1 * float(np.max(bent[slope > 1e6] / slope[slope > 1e6] ** alpha))
    flat = 1.01 * float(np.max(bent - steep * slope**alpha))
    return value, gradient, curvature, lambda u: max(flat, 1e-6) + steep * u**alpha, rng.uniform(0.2, 0.7)


# Six cases of a hundred or more that hold: over 600 certificates, hypotheses checked along every step.
@pytest.mark.parametrize("make", [wall, power, barrier])
@pytest.mark.parametrize("step", ["adaptive", "constant"])
def test_random_certificates_hold(make, step):
    rng = np.random.default_rng(0)
    found = []
    for _ in range(130):
        value, gradient, curvature, ell, x0 = make(rng)
        gap = float(value(np.array(x0)) - value(np.array(0.0)))
        start = abs(float(gradient(np.array(x0))))
        guarantee = ell_smooth(ell, gap=gap, eps=10 ** rng.uniform(-1, -0.1) * start, step=step)
        assert start <= guarantee.M * (1 + 1e-9)
        found.append(certify_ell(guarantee, value, gradient, curvature, x0, max_steps=300)[0])
    assert set(found) <= {"holds", "undecided"}
    assert found.count("holds") >= 100


def test_false_hypotheses_and_broken_promises_are_caught():
    value, gradient, curvature, ell, x0 = wall(np.random.default_rng(0))
    gap = float(value(np.array(x0)))
    eps = 1e-3 * float(gradient(np.array(x0)))
    small = ell_smooth(lambda u: ell(u) / 20, gap=gap, eps=eps)
    assert certify_ell(small, value, gradient, curvature, x0)[0] == "outside-class"
    near = ell_smooth(ell, gap=gap / 20, eps=eps)
    assert certify_ell(replace(near, M=np.inf), value, gradient, curvature, x0)[0] == "outside-class"
    right = ell_smooth(ell, gap=gap, eps=eps)
    steep = gradient(np.array(x0)) / 2
    for wrong in ({"bound": 1.0}, {"M": float(steep)}):
        assert certify_ell(replace(right, **wrong), value, gradient, curvature, x0)[0] == "violated"
    assert certify_ell(right, value, gradient, curvature, x0, max_steps=1)[0] == "undecided"


def test_iterations_are_seen_to_grow_like_one_over_eps_squared():
    # A slope of 2ε towards a valley: every step lowers f by the least that a gradient above ε can.
    taken, bounds = [], []
    for eps in (0.1, 0.03, 0.01):
        valley = SlowValley(eps)
        x0 = 1 + 3 / eps
        gap = float(valley.gap(np.array(x0)))
        guarantee = ell_smooth(lambda u: 1.0 + u, gap=gap, eps=eps)
        functions = valley.value, valley.gradient, valley.hessian_norm
        status, num = certify_ell(guarantee, *functions, x0)
        assert status == "holds"
        taken.append(num)
        bounds.append(guarantee.bound)
    slope = np.polyfit(np.log([0.1, 0.03, 0.01]), np.log(taken), 1)[0]
    assert slope == pytest.approx(-2, abs=0.15)
    assert np.all(np.array(bounds) / taken < 10)


def test_affine_law_gives_the_logarithmic_step_and_a_constant_the_classical_bounds():
    g = np.geomspace(1e-3, 1e3, 20)
    log_step = LogarithmicStep(L0=0.5, L1=2.0)
    np.testing.assert_allclose(ell_step(lambda u: 0.5 + 2 * u, g), log_step(g), rtol=1e-10)
    np.testing.assert_allclose(ell_decrease(lambda u: 3.0 + 0 * u, g), g**2 / 6)
    assert np.all(ell_decrease(lambda u: 0.5 + u**1.5, g) >= g**2 / (2 * (0.5 + (2 * g) ** 1.5)))
    for step in ("adaptive", "constant"):
        guarantee = ell_smooth(lambda u: 3.0 + 0 * u, gap=2.0, eps=0.1, step=step)
        assert isinstance(guarantee, EllGuarantee)
        assert guarantee.bound == pytest.approx(2 * 3 * 2 / 0.01)
        np.testing.assert_allclose(guarantee.step_size(g), 1 / 3)
        assert guarantee.M == pytest.approx(math.sqrt(2 * 3 * 2))


@pytest.mark.parametrize(
    ("ell", "words"),
    [
        (lambda u: 1 + u**2.5, "more slowly than a square"),
        (lambda u: 1 / (1 + u), "nondecreasing"),
        (lambda u: 0 * u, "positive"),
    ],
)
def test_laws_without_a_bound_are_refused(ell, words):
    with pytest.raises(AssumptionError, match=words):
        ell_smooth(ell, gap=1.0, eps=0.1)


@pytest.mark.slow
def test_complexity_lies_below_theorem_3_on_500_random_classes():
    rng = np.random.default_rng(0)
    for _ in range(500):
        L0, L1 = 10 ** rng.uniform(-1, 1, 2)
        wall = ExponentialWall(L0=L0, L1=L1)
        starts = rng.uniform(0.2, 3, 3) / L1
        gap = float(wall.gap(starts).max())
        eps = 10 ** rng.uniform(-1, -0.3) * float(wall.grad_norm(starts).min())
        upper = theorem3(L0=L0, L1=L1, gap=gap, eps=eps, version="sharp")
        family = [(wall, x0) for x0 in starts]
        worst = worst_case_complexity([upper.rule], family, gap=gap, eps=eps, max_steps=300)
        assert 0 < worst <= upper.bound
        # More settings can only lower it, more functions only raise it.
        rules = [upper.rule, FixedStep(lr=1 / L0)]
        assert worst_case_complexity(rules, family, gap=gap, eps=eps, max_steps=300) <= worst
        assert worst_case_complexity([upper.rule], family[:1], gap=gap, eps=eps, max_steps=300) <= worst


def test_complexity_of_clipping_is_below_that_of_fixed_steps():
    wall_of_ten = ExponentialWall(L0=1.0, L1=1.0)
    family = [(wall_of_ten, 6.0), (Quadratic([0.01]), [10.0])]
    gap = float(wall_of_ten.gap(np.array(6.0)))
    steps = [FixedStep(lr=lr) for lr in (0.01, 0.018, 0.03)]  # the smallest are too slow, the largest diverge
    fixed = worst_case_complexity(steps, family, gap=gap, eps=0.01, max_steps=20_000)
    rules = [ClippedStep(lr=lr, max_norm=1 / lr) for lr in (0.5, 1.0)]
    clipped = worst_case_complexity(rules, family, gap=gap, eps=0.01)
    assert 5 * clipped < fixed < math.inf
    with pytest.raises(ValueError, match="above its minimum"):
        worst_case_complexity([FixedStep(lr=1.0)], family, gap=1.0, eps=0.01)
