"""Symmetric noise: the lemma on random laws, certificates of the theorem, and what does not hold."""

import math
from dataclasses import replace

import numpy as np
import pytest

from curvestep.theory.certificates import certify
from curvestep.theory.problems.base import BoundedNoise
from curvestep.theory.problems.polynomials import Quadratic
from curvestep.theory.theorems.guarantee import AssumptionError
from curvestep.theory.theorems.symmetric_noise import (
    least_threshold,
    mean_step,
    symmetric_lemma,
    symmetric_noise,
)
from tests.theory.draws import RareNoise, SymmetricNoise, draw_walls, log_uniform

CONCAVE = {
    "clip": lambda r: np.minimum(r, 1.0),
    "smooth clip": lambda r: r / (1 + r),
    "root": np.sqrt,
    "logarithm": np.log1p,
    "corner": lambda r: np.minimum(r, 0.3 + 0.1 * r),
}


def clip(r):
    return np.minimum(r, 1.0)


@pytest.mark.parametrize("size", CONCAVE.values(), ids=CONCAVE.keys())
@pytest.mark.parametrize("dim", [1, 2, 3, 8])
def test_lemma_holds_on_random_symmetric_laws(size, dim):
    rng = np.random.default_rng(dim)
    num = 20_000
    gradient = rng.normal(size=(num, dim)) * 10 ** rng.uniform(-2, 2, size=(num, 1))
    noise = rng.normal(size=(num, 3, dim)) * 10 ** rng.uniform(-2, 2, size=(num, 3, 1))
    found = symmetric_lemma(size, gradient, noise, rng.dirichlet(np.ones(3), size=num))
    norms = np.linalg.norm(gradient, axis=-1)
    scale = norms * size(np.linalg.norm(noise, axis=-1).max(axis=-1) + norms)
    assert (found.right - found.left >= -1e-14 * scale).all()
    assert (found.left >= 0).all()
    assert ((found.right - found.left) / scale).min() < 1e-3  # it is nearly attained


def certificates(num, laws, rng):
    for i in range(num):
        problem, constants, x0 = draw_walls(rng)
        start = float(problem.grad_norm(x0))
        sigma = start * log_uniform(rng, 0.05, 1.5)
        eps = start * log_uniform(rng, 0.1, 0.8)
        numbers = dict(gap=float(problem.gap(x0)), eps=eps, sigma=sigma)
        threshold = least_threshold(sigma=sigma, eps=eps) * rng.choice([1.0, 3.0])
        guarantee = symmetric_noise(**constants, **numbers, max_norm=threshold)
        if guarantee.bound < 20_000:
            noise = SymmetricNoise(laws[i % len(laws)], sigma)
            yield certify(problem, guarantee, x0, noise=noise, num_runs=40, seed=i)


def check(found, least):
    found = list(found)
    assert {certificate.status for certificate in found} == {"holds"}
    assert len(found) >= least
    # The mean is promised half of the bound; the median lies far below it.
    assert max(certificate.measured / certificate.bound for certificate in found) < 0.2
    assert sum(certificate.measured > 0 for certificate in found) == len(found)


def test_certificates_hold_for_three_symmetric_laws():
    check(certificates(20, ["normal", "student", "spikes"], np.random.default_rng(0)), least=8)


@pytest.mark.slow
def test_certificates_hold_on_300_random_problems():
    check(certificates(300, ["normal", "student", "spikes"], np.random.default_rng(1)), least=120)


def test_numbers_are_those_of_the_formula():
    guarantee = symmetric_noise(L0=2.0, L1=3.0, gap=5.0, eps=0.1, sigma=1.0, max_norm=4.0)
    inverse = max(40, 120, 2.6 * 8 / 0.01)
    assert guarantee.hyperparameters == {"lr": pytest.approx(1 / inverse), "max_norm": 4.0}
    assert guarantee.bound == pytest.approx(50 * inverse / 0.01)
    quiet = symmetric_noise(L0=2.0, L1=0.0, gap=5.0, eps=0.1, sigma=0.0)
    assert quiet.bound == pytest.approx(10 * 5 * 40 / 0.01)
    with pytest.raises(AssumptionError, match="needs max_norm ≥"):
        symmetric_noise(L0=2.0, L1=3.0, gap=5.0, eps=0.1, sigma=1.0, max_norm=2.0)


def test_the_proof_keeps_its_numbers():
    rng = np.random.default_rng(0)
    A = 200 * (math.expm1(0.1) - 0.1)
    assert A < 1.035
    for _ in range(2000):
        L0, L1, sigma, eps = 10 ** rng.uniform(-3, 3, size=4)
        threshold = least_threshold(sigma=sigma, eps=eps) * 10 ** rng.uniform(0, 2)
        guarantee = symmetric_noise(L0=L0, L1=L1, gap=1.0, eps=eps, sigma=sigma, max_norm=threshold)
        lr = float(guarantee.hyperparameters["lr"])
        norms = np.geomspace(eps, 1e6 * eps, 400)
        # The lemma's progress, with probability one half of noise below threshold/2, less the remainder.
        square = np.minimum(threshold**2, norms**2 + sigma**2)
        progress = lr * norms * np.minimum(norms, threshold / 2) / 2
        decrease = progress - A / 2 * (L0 + L1 * norms) * lr**2 * square
        assert (decrease >= 0.2 * lr * eps**2).all()


# What does not hold.
@pytest.mark.parametrize(("angle", "size", "degrees"), [(0.7, 10, 49.6), (0.2, 100, 78.5), (0.02, 1e4, 88.9)])
def test_in_two_dimensions_the_direction_is_biased(angle, size, degrees):
    noise = size * np.array([[1.0, 0.0], [-1.0, 0.0]])
    gradient = np.array([math.cos(angle), math.sin(angle)])
    mean = mean_step(clip, gradient, noise)
    cosine = mean @ gradient / np.linalg.norm(mean)
    assert math.degrees(math.acos(cosine)) == pytest.approx(degrees, abs=0.06)
    assert cosine > 0


def test_noise_above_the_threshold_hides_the_gradient():
    # Noise ±B with B ≥ 1 + |a|: the clipped gradient has mean zero, and f = x²/2 rises in the mean.
    for size in (1.5, 3.0, 100.0):
        a = np.array([0.5])
        noise = np.array([[-size], [size]])
        assert mean_step(clip, a, noise) == 0
        for lr in (1e-3, 0.1):
            after = (a - lr * np.array([[-1.0], [1.0]])) ** 2 / 2
            assert after.mean() - 0.5**2 / 2 == pytest.approx(lr**2 / 2)


def test_a_law_that_is_not_covered_is_refused():
    problem = Quadratic([1.0])
    guarantee = symmetric_noise(L0=1.0, L1=0.0, gap=0.5, eps=0.1, sigma=0.2)
    with pytest.raises(ValueError, match="deviate by at most"):
        certify(problem, guarantee, [1.0], noise=SymmetricNoise("normal", 0.3))
    with pytest.raises(ValueError, match="must be symmetric"):
        certify(problem, guarantee, [1.0], noise=RareNoise(0.1))


def test_a_step_that_is_too_long_for_the_noise_is_caught():
    honest = symmetric_noise(L0=1.0, L1=0.0, gap=8.0, eps=0.05, sigma=0.5)
    rule = replace(honest.rule, lr=1.9)
    false = replace(honest, rule=rule, bound=300.0)
    certificate = certify(Quadratic([1.0] * 20), false, [0.5] * 20, noise=BoundedNoise(0.5))
    assert [reason.kind for reason in certificate.reasons] == ["slower"]
