"""Theorems 7 and 8 and the clipping floor: their numbers, proofs and attained cases."""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from curvestep.theory.theorems.clipped_sgd import clipping_floor, floor_noise, theorem7, theorem8

positive = st.floats(1e-3, 1e3)


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
def test_theorem7_sharp_is_below_corrected_and_its_simple_form(L0, L1, tau, gap, eps):
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
def test_theorem7_corrected_keeps_what_its_proof_needs(L0, L1, tau, gap, eps):
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


@settings(max_examples=500, deadline=None)
@given(sigma=positive, max_norm=positive)
def test_expected_clipped_gradient_vanishes_at_the_floor(sigma, max_norm):
    noise, floor = floor_noise(sigma, max_norm), clipping_floor(sigma, max_norm)
    values, probabilities = np.array(noise.values), np.array(noise.probabilities)
    assert probabilities.sum() == pytest.approx(1)
    assert values @ probabilities == pytest.approx(0, abs=1e-9 * np.abs(values).max())
    assert values**2 @ probabilities == pytest.approx(sigma**2)
    assert noise.clipped_mean(floor, max_norm) == pytest.approx(0, abs=1e-9 * max(sigma, max_norm))
    assert min(sigma, sigma**2 / max_norm) / 4 <= floor * (1 + 1e-12)
    assert floor <= min(sigma, sigma**2 / max_norm) * (1 + 1e-12)


def test_no_noise_has_no_floor():
    assert clipping_floor(0.0, 1.0) == 0
    with pytest.raises(ValueError, match="max_norm"):
        clipping_floor(1.0, 0.0)


GOOD = dict(L0=1.0, L1=5.0, gap=12.0, eps=0.1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: theorem7(**GOOD, tau=-0.1), "`tau` must be zero or more"),
        (lambda: theorem7(**{**GOOD, "L1": 0.0}, tau=0.1), "needs L1 > 0"),
        (lambda: theorem8(**GOOD, M=0.0, tau=0.1), "`M` must be positive"),
    ],
)
def test_inapplicable_numbers_are_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()
