"""Normalized SGD with momentum: its certificate on runs, its closed form, and what its proof needs."""

import math

import numpy as np
import pytest

from curvestep.theory.complexity import descend_with_momentum, first_hit
from curvestep.theory.problems.base import BoundedNoise
from curvestep.theory.problems.walls import phi
from curvestep.theory.theorems.fixed_gd import gradient_bound
from curvestep.theory.theorems.guarantee import AssumptionError
from curvestep.theory.theorems.normalized_momentum import (
    agnostic_schedule,
    momentum_budget,
    momentum_gradient_bound,
    momentum_lower_bound,
)
from tests.theory.draws import RareNoise, SymmetricNoise, draw_walls, log_uniform

NUMBERS = dict(L0=1.0, L1=1.0, gap=1.0, sigma=0.1, lr=0.2)


def run(problem, x0, lr, num_steps, *, noise=None, num_runs=1, seed=0):
    """Gradient norms of the iterates from which steps are taken, shape (steps, runs)."""
    schedule = agnostic_schedule(lr, num_steps)
    starts = np.broadcast_to(x0, (num_runs, *problem.event_shape))
    descent = descend_with_momentum(
        problem, starts, lrs=schedule.lrs, betas=schedule.betas, noise=noise, seed=seed
    )
    return descent.grad_norms[:-1]


def draws(num, rng, *, low, high):
    for seed in range(num):
        problem, constants, x0 = draw_walls(rng, dim=int(rng.integers(1, 4)))
        constants["gap"] = float(problem.gap(x0))
        yield problem, constants, x0, log_uniform(rng, low, high) / constants["L1"], seed


def check_without_noise(found, num_steps):
    shares = []
    for problem, constants, x0, lr, _ in found:
        norms = run(problem, x0, lr, num_steps)
        budget = momentum_budget(**constants, sigma=0.0, lr=lr, num_steps=num_steps)
        inequality = budget.sum_of(norms)
        assert inequality.holds.all()
        assert (norms[:, 0] <= budget.largest * (1 + 1e-9)).all()
        shares.append((inequality.left / inequality.right).item())
        least = np.minimum.accumulate(norms[:, 0])
        for T in (2, 10, 100, num_steps):
            bound = momentum_gradient_bound(T, **constants, sigma=0.0, lr=lr)
            assert least[T - 1] <= bound
            eps = bound * 1.01
            if momentum_budget(**constants, sigma=0.0, lr=lr, num_steps=T).reaches(eps, noisy=False):
                assert first_hit(norms, eps) < T
    return shares


def check_with_noise(found, num_steps, num_runs=24):
    shares = []
    for problem, constants, x0, lr, seed in found:
        sigma = float(problem.grad_norm(x0)) * 10 ** np.random.default_rng(seed).uniform(-1.5, 0.2)
        laws = (BoundedNoise(sigma), RareNoise(sigma), SymmetricNoise("normal", sigma))
        noise = laws[seed % 3]
        norms = run(problem, x0, lr, num_steps, noise=noise, num_runs=num_runs, seed=seed)
        budget = momentum_budget(**constants, sigma=sigma, lr=lr, num_steps=num_steps)
        shares.append(budget.sum_of(norms).left.mean() / budget.budget)
        assert (norms <= budget.largest[:, None] * (1 + 1e-9)).all()
        bound = momentum_gradient_bound(num_steps, **constants, sigma=sigma, lr=lr)
        assert norms.mean(axis=1).min() <= bound
    return shares


def test_certificate_holds_without_noise():
    shares = check_without_noise(draws(15, np.random.default_rng(0), low=0.05, high=0.2), 1000)
    assert 0.3 < max(shares) <= 1
    check_without_noise(draws(15, np.random.default_rng(1), low=0.2, high=2.5), 1000)


def test_certificate_holds_with_noise_in_the_mean():
    assert max(check_with_noise(draws(12, np.random.default_rng(2), low=0.05, high=0.2), 500)) <= 0.95
    assert max(check_with_noise(draws(12, np.random.default_rng(3), low=0.2, high=1.9), 500)) <= 0.95


@pytest.mark.slow
def test_certificate_holds_on_240_problems():
    check_without_noise(draws(60, np.random.default_rng(4), low=0.05, high=0.2), 4000)
    check_without_noise(draws(60, np.random.default_rng(5), low=0.2, high=2.5), 4000)
    assert max(check_with_noise(draws(60, np.random.default_rng(6), low=0.05, high=0.2), 1200)) <= 0.95
    assert max(check_with_noise(draws(60, np.random.default_rng(7), low=0.2, high=1.9), 1200)) <= 0.95


def test_budget_is_its_definition_written_out():
    L0, L1, gap, sigma, lr, T = 0.7, 2.0, 1.5, 0.3, 0.4, 12
    lrs = [lr * t**-0.75 for t in range(1, T + 1)]
    betas = [1 - t**-0.5 for t in range(1, T + 1)]
    A = [math.expm1(L1 * h) / (L1 * h) for h in lrs]
    B = [float(phi(L1 * h)) / (L1 * h) ** 2 for h in lrs]
    drift = [
        sum(lrs[s] * math.prod(betas[t + 1 : s + 1]) for s in range(t + 1, T)) for t in range(T)
    ]  # how often what step t changes the gradient by is counted
    noise = [
        math.sqrt(sum(math.prod(betas[s + 1 : t + 1]) ** 2 / (s + 1) for s in range(t + 1))) for t in range(T)
    ]
    weights = [lrs[t] * (1 - L1 * lrs[t] * B[t] - 2 * L1 * drift[t] * A[t]) for t in range(T)]
    total = gap + 2 * sigma * sum(lrs[t] * noise[t] for t in range(T))
    total += L0 * sum(B[t] * lrs[t] ** 2 + 2 * drift[t] * lrs[t] * A[t] for t in range(T))
    budget = momentum_budget(L0=L0, L1=L1, gap=gap, sigma=sigma, lr=lr, num_steps=T)
    np.testing.assert_allclose(budget.weights, weights, rtol=1e-12)
    assert budget.budget == pytest.approx(total)
    first = gradient_bound(gap, L0=L0, L1=L1)
    last = (first + L0 / L1) * math.exp(L1 * sum(lrs[:-1])) - L0 / L1
    assert budget.largest[[0, -1]] == pytest.approx([first, last])


def test_closed_form_keeps_what_its_proof_needs():
    t = np.arange(1.0, 20_001)
    schedule = agnostic_schedule(1.0, 20_000)
    noise = 0.0
    for i, beta in enumerate(schedule.betas):
        noise = math.sqrt((beta * noise) ** 2 + 1 / (i + 1))
        assert 0.7 <= noise * (i + 1) ** 0.25 <= 1 + 1e-12
    later = 0.0
    for i in range(19_999, -1, -1):
        later = schedule.betas[i] * (schedule.lrs[i] + later)
        assert later <= (i + 1) ** -0.25
    a = 0.2 * schedule.lrs
    kappa = phi(a) / a + 2 * 0.2 * np.expm1(a) / a * (t + 1) ** -0.25
    assert kappa[0] == pytest.approx(0.4794, abs=1e-4)
    assert (np.diff(kappa) < 0).all()
    assert np.sum(t**-1.5) <= 2.62
    first = 2.62 * float(phi(0.2)) / 0.04 + 2 * math.expm1(0.2) / 0.2
    assert first <= 3.7
    assert 2 * math.expm1(0.2) / 0.2 <= 2.3


def test_closed_form_is_never_below_the_certificate():
    for lr in (0.05, 0.2, 0.5):
        for T in (10, 300, 3000):
            numbers = {**NUMBERS, "lr": lr}
            budget = momentum_budget(**numbers, num_steps=T)
            positive = budget.weights.clip(min=0)
            spent = budget.budget - np.minimum(budget.weights, 0) @ budget.largest
            assert spent / positive.sum() <= momentum_gradient_bound(T, **numbers) * (1 + 1e-9)


def test_a_step_far_too_long_has_no_bound():
    assert momentum_gradient_bound(10**9, **{**NUMBERS, "lr": 50.0}) == math.inf
    assert momentum_gradient_bound(10**7, **{**NUMBERS, "lr": 7.0}) == math.inf
    assert momentum_gradient_bound(10**7, **{**NUMBERS, "lr": 5.0}) < math.inf


def test_a_certificate_that_is_too_strong_is_caught():
    problem, constants, x0 = draw_walls(np.random.default_rng(0))
    constants["gap"] = float(problem.gap(x0))
    norms = run(problem, x0, 0.2 / constants["L1"], 1000)
    budget = momentum_budget(
        L0=constants["L0"] / 50,
        L1=constants["L1"] / 50,
        gap=constants["gap"] / 50,
        sigma=0.0,
        lr=0.2 / constants["L1"],
        num_steps=1000,
    )
    assert not budget.sum_of(norms).holds.any()


def test_the_lower_bound_grows_like_the_square_of_the_exponential():
    bounds = [momentum_lower_bound(L0=1.0, L1=1.0, eps=0.1, lr=lr) for lr in (20.0, 21.0)]
    assert math.log(bounds[1] / bounds[0]) == pytest.approx(2, abs=0.3)
    with pytest.raises(AssumptionError, match="a larger lr"):
        momentum_lower_bound(L0=1.0, L1=1.0, eps=1.0, lr=1.0)


@pytest.mark.parametrize("name", ["L0", "L1", "gap", "lr"])
def test_bad_numbers_are_named(name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        momentum_budget(**{**NUMBERS, name: -1.0}, num_steps=3)
    with pytest.raises(ValueError, match=f"`{name}`"):
        momentum_gradient_bound(3, **{**NUMBERS, name: -1.0})
