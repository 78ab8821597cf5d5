"""ℓ-smoothness: closed forms, random certificates, refused laws; the complexity of equation 9."""

import math

import numpy as np
import pytest

from curvestep.theory import (
    AssumptionError,
    ClippedStep,
    ExponentialWall,
    FixedStep,
    LogarithmicStep,
    Quadratic,
    certify_ell,
    ell_decrease,
    ell_smooth,
    ell_step,
    worst_case_complexity,
)
from curvestep.theory.theorems.ell_smooth import EllGuarantee


def wall(rng):
    """f'' = L0 + L1 |f'|, with equality."""
    L0, L1 = 10 ** rng.uniform(-1, 1, 2)
    value = lambda x: L0 / L1**2 * (np.expm1(L1 * np.abs(x)) - L1 * np.abs(x))  # noqa: E731
    gradient = lambda x: L0 / L1 * np.expm1(L1 * np.abs(x)) * np.sign(x)  # noqa: E731
    return value, gradient, lambda u: L0 + L1 * u, rng.uniform(1, 4) / L1


def power(rng):
    """μx²/2 + |x|ᵖ/p: exponents of ℓ from 1/3 to 6/7."""
    mu, p = 10 ** rng.uniform(-1, 1), rng.uniform(2.5, 8)
    value = lambda x: mu * x**2 / 2 + np.abs(x) ** p / p  # noqa: E731
    gradient = lambda x: mu * x + np.abs(x) ** (p - 1) * np.sign(x)  # noqa: E731
    return value, gradient, lambda u: mu + (p - 1) * u ** ((p - 2) / (p - 1)), rng.uniform(1, 4)


def barrier(rng):
    """(1 − x²)^−q, whose law has an exponent (q + 2)/(q + 1), between 1 and 2; its constants on a grid."""
    q = rng.uniform(0.5, 3)
    alpha = (q + 2) / (q + 1)

    def inside(x):
        return np.where(np.abs(x) < 1, 1 - np.minimum(x * x, 1), np.nan)

    value = lambda x: inside(x) ** -q  # noqa: E731
    gradient = lambda x: 2 * q * x * inside(x) ** (-q - 1)  # noqa: E731
    x = 1 - np.geomspace(1, 1e-9, 200_000)
    curvature = 2 * q * inside(x) ** (-q - 1) + 4 * q * (q + 1) * x**2 * inside(x) ** (-q - 2)
    slope = gradient(x)
    steep = 1.1 * float(np.max(curvature[slope > 1e6] / slope[slope > 1e6] ** alpha))
    flat = 1.001 * float(np.max(curvature - steep * slope**alpha))
    return value, gradient, lambda u: max(flat, 1e-6) + steep * u**alpha, rng.uniform(0.3, 0.9)


@pytest.mark.parametrize("make", [wall, power, barrier])
@pytest.mark.parametrize("step", ["adaptive", "constant"])
def test_random_certificates_hold(make, step):
    rng = np.random.default_rng(0)
    found = []
    for _ in range(100):
        value, gradient, ell, x0 = make(rng)
        gap = float(value(np.array(x0)) - value(np.array(0.0)))
        eps = 10 ** rng.uniform(-3, -1) * abs(float(gradient(np.array(x0))))
        guarantee = ell_smooth(ell, gap=gap, eps=eps, step=step)
        assert abs(float(gradient(np.array(x0)))) <= guarantee.M * (1 + 1e-9)
        found.append(certify_ell(guarantee, value, gradient, x0, max_steps=1000)[0])
    assert "violated" not in found
    assert found.count("holds") >= 30


def test_a_false_law_is_caught():
    value, gradient, ell, x0 = wall(np.random.default_rng(0))
    gap = float(value(np.array(x0)))
    eps = 1e-3 * float(gradient(np.array(x0)))
    small = ell_smooth(lambda u: ell(u) / 20, gap=gap, eps=eps)
    assert certify_ell(small, value, gradient, x0)[0] == "violated"


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
        assert guarantee.M == pytest.approx(math.sqrt(2 * 3 * 2))


def test_adaptive_steps_are_seen_to_be_faster_where_gradients_are_large():
    value, gradient, ell, x0 = wall(np.random.default_rng(1))
    gap, eps = float(value(np.array(x0))), 1e-2 * float(gradient(np.array(x0)))
    taken = [
        certify_ell(ell_smooth(ell, gap=gap, eps=eps, step=step), value, gradient, x0)[1]
        for step in ("adaptive", "constant")
    ]
    assert taken[0] < taken[1]


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


def test_complexity_of_clipping_is_below_that_of_fixed_steps():
    wall_of_ten = ExponentialWall(L0=1.0, L1=1.0)
    family = [(wall_of_ten, 6.0), (Quadratic([0.01]), [10.0])]
    gap = float(wall_of_ten.gap(np.array(6.0)))
    fixed = worst_case_complexity(
        [FixedStep(lr=lr) for lr in np.geomspace(1e-3, 1, 13)], family, gap=gap, eps=0.01
    )
    clipped = worst_case_complexity(
        [ClippedStep(lr=lr, max_norm=1 / lr) for lr in (0.5, 1.0)], family, gap=gap, eps=0.01
    )
    assert clipped < fixed / 5
    with pytest.raises(ValueError, match="above its minimum"):
        worst_case_complexity([FixedStep(lr=1.0)], family, gap=1.0, eps=0.01)
