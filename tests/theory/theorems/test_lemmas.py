"""Lemmas 2, 9 and 11 to 13: random search for a counterexample, and none may turn up (rows 6, 13, 20)."""

import math
from dataclasses import replace

import numpy as np
import pytest

from curvestep.theory.problems.polynomials import Quartic
from curvestep.theory.problems.walls import ExponentialWall
from curvestep.theory.theorems.guarantee import AssumptionError
from curvestep.theory.theorems.lemmas import NoisyStep, lemma2, lemma9, lemma11, lemma12, lemma13
from tests.theory.draws import rotated_walls


def random_laws(num, num_values, dim, seed):
    """Noisy steps with discrete unbiased noise within tau, of all sizes and shapes."""
    rng = np.random.default_rng(seed)
    log = lambda low, high: 10 ** rng.uniform(low, high, size=num)  # noqa: E731  # short and used at once
    L0, L1, tau = log(-2, 2), log(-2, 2), log(-2, 2)
    probabilities = rng.dirichlet(np.full(num_values, 0.5), size=num)
    noise = rng.normal(size=(num, num_values, dim)) * 10 ** rng.uniform(-2, 2, size=(num, num_values, 1))
    noise -= (probabilities[..., None] * noise).sum(axis=-2, keepdims=True)
    noise *= tau[:, None, None] / np.linalg.norm(noise, axis=-1).max(axis=-1)[:, None, None]
    lr = np.minimum(1 / (20 * L0), 1 / (128 * L1 * tau)) * 10 ** rng.uniform(-2, 0, size=num)
    # Gradients around every scale at which something changes: τ, L0/L1, and where clipping begins.
    scale = np.choose(rng.integers(0, 3, size=num), [tau, L0 / L1, 1 / (16 * L1 * lr)])
    gradient = rng.normal(size=(num, dim)) * (scale * log(-1, 1))[:, None]
    return NoisyStep(
        gradient=gradient, noise=noise, probabilities=probabilities, L0=L0, L1=L1, tau=tau, lr=lr
    )


@pytest.mark.parametrize(("num_values", "dim", "seed"), [(2, 1, 0), (3, 1, 1), (4, 2, 2), (6, 3, 3)])
def test_lemmas_11_to_13_hold_for_ten_thousand_noise_laws(num_values, dim, seed):
    step = random_laws(10_000, num_values, dim, seed)
    clipped = (step.steps < np.asarray(step.lr)[:, None]).any(axis=-1)
    assert 0.1 < clipped.mean() < 0.9  # both regimes are tried
    assert lemma11(step).holds.all()
    for options in ({}, {"version": "sharp"}):
        assert lemma12(step, **options).holds.all()
        assert lemma13(step, **options).holds.all()


@pytest.mark.parametrize("size", [1e-8, 1e-16, 1e-200, 0.0])
def test_lemmas_hold_for_gradients_lost_in_the_noise(size):
    step = random_laws(10_000, 3, 2, 5)
    small = replace(step, gradient=step.gradient * size / np.maximum(step.grad_norm, step.tau)[:, None])
    for inequality in (lemma11(small), lemma12(small, version="sharp"), lemma13(small, version="sharp")):
        assert inequality.holds.all()


def test_left_sides_are_the_expectations_of_the_paper():
    step = random_laws(1000, 3, 2, 6)
    h = step.steps
    size = step.mean(np.abs(step.inner))
    of_11 = step.mean(-h * step.inner)
    of_12 = step.curvature * step.mean(h**2 * step.inner)
    assert np.all(np.abs(lemma11(step).left - of_11) <= 1e-9 * step.lr * size)
    assert np.all(np.abs(lemma12(step).left - of_12) <= 1e-9 * step.curvature * step.lr**2 * size)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(lr=1.0), r"lr ≤ 1/\(20·L0\)"),
        (dict(tau=0.01), "noise ≤ tau"),
        (dict(probabilities=np.array([0.9, 0.1])), "unbiased noise"),
        (dict(L0=1e-3, L1=10.0), r"lr ≤ 1/\(128·L1·tau\)"),
        (dict(L0=-1.0), "`L0` must be finite, and the constants positive"),
        (dict(gradient=np.array([math.nan])), "`gradient` must be finite"),
    ],
)
def test_a_noisy_step_that_breaks_an_assumption_is_refused(change, words):
    law = dict(noise=np.array([[-0.1], [0.1]]), probabilities=np.array([0.5, 0.5]))
    numbers = dict(gradient=np.array([1.0]), **law, L0=1.0, L1=1.0, tau=0.1, lr=0.05)
    with pytest.raises(ValueError, match=words):
        NoisyStep(**{**numbers, **change})


def test_lemma2_gives_every_L1_its_L0():
    for L1 in (0.01, 1.0, 100.0):
        assert lemma2([0, 0, 0, 0, 1], L1) == pytest.approx(Quartic().frontier(L1))
    with pytest.raises(ValueError, match="`L1` must be positive"):
        lemma2([0, 0, 0, 1], 0.0)
    with pytest.raises(AssumptionError, match="needs degree ≥ 3"):
        lemma2([0, 0, 1], 1.0, version="printed")


@pytest.mark.parametrize("version", ["printed", "corrected", "sharp"])
def test_lemma9_bounds_gradients_nearby(version):
    f = rotated_walls(L0=0.7, L1=1.5)
    rng = np.random.default_rng(0)
    for _ in range(300):
        x, d = rng.normal(size=3), rng.normal(size=3)
        r = rng.uniform(0, min(1, 1 / 1.5))
        y = x + r * d / np.linalg.norm(d)
        bound = lemma9(float(f.grad_norm(x)), distance=r, L0=0.7, L1=1.5, version=version)
        assert f.grad_norm(y) <= bound * (1 + 1e-12)
        assert f.hessian_norm(y) <= (0.7 + 1.5 * bound) * (1 + 1e-12)


def test_lemma9_sharp_is_an_equality_on_the_wall_and_below_the_others():
    wall = ExponentialWall(L0=0.7, L1=1.5)
    for x, r in [(0.0, 0.5), (1.0, 0.1), (2.0, 0.6)]:
        g = float(wall.grad_norm(np.array(x)))
        sharp = lemma9(g, distance=r, L0=0.7, L1=1.5)
        assert sharp == pytest.approx(float(wall.grad_norm(np.array(x + r))))
        assert 0.7 + 1.5 * sharp == pytest.approx(math.exp(1.5 * r) * (0.7 + 1.5 * g))
        corrected = lemma9(g, distance=r, L0=0.7, L1=1.5, version="corrected")
        assert sharp < corrected < lemma9(g, distance=r, L0=0.7, L1=1.5, version="printed")


def test_lemma9_as_printed_says_where_it_ends():
    with pytest.raises(AssumptionError, match="distance ≤ 1"):
        lemma9(1.0, distance=1.5, L0=1.0, L1=0.1, version="printed")
    with pytest.raises(AssumptionError, match="distance ≤ 10"):
        lemma9(1.0, distance=11.0, L0=1.0, L1=0.1, version="corrected")
