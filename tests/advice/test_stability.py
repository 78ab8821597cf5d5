"""Advice on functions whose largest stable step is known: it must not lead beyond it."""

import math

import numpy as np
import pytest

from curvestep.advice.advice import advise
from tests.fit.traces import make_trace

FRACTIONS = (0.5, 1.0)


def descend(gradient, loss, x, *, lr, max_norm=math.inf, steps=200, skip=0, noise=0.0, seed=0, **columns):
    """Clipped descent with gradient noise, as the probe records it from step ``skip`` on; and the end."""
    rng, rows = np.random.default_rng(seed), []
    for step in range(steps + skip):
        xi = noise * rng.standard_normal(len(x)) / math.sqrt(len(x))
        g = gradient(x) + xi
        norm = np.linalg.norm(g)
        move = -lr * min(1.0, max_norm / max(norm, 1e-300)) * g
        if step >= skip:
            length = np.linalg.norm(move)
            if length == 0:
                break
            ends = [gradient(x + fraction * move) + xi for fraction in FRACTIONS]
            secants = [np.linalg.norm(e - g) / (f * length) for f, e in zip(FRACTIONS, ends, strict=True)]
            norms = [float(np.linalg.norm(end)) for end in ends]
            rows.append((norm, max(secants), length, loss(x), [float(s) for s in secants], norms))
        x = x + move
    g, ell, length, losses, secants, norms = zip(*rows, strict=True)
    trace = make_trace(
        g,
        ell,
        step_norm=length,
        lr=lr,
        coefficient=np.minimum(1.0, max_norm / np.array(g)),
        loss=losses,
        header={"fractions": list(FRACTIONS), "dtype": "float64"},
        **{"secants": secants, "grad_norms": norms} | columns,
    )
    return trace, loss(x)


SHARP = np.array([100.0, 1.0, 1.0, 1.0])
NO_SECANTS = {"secants": None, "grad_norms": None}


def quadratic(curvature):
    return (lambda x: curvature * x), (lambda x: 0.5 * float(curvature @ x**2))


@pytest.mark.parametrize("noise", [0.0, 0.003])
@pytest.mark.parametrize(
    "columns", [{}, NO_SECANTS, {"spectral_smoothness": 100.0, "spectral_converged": 1.0}]
)
def test_a_sharp_direction_that_was_worked_off_is_still_there(noise, columns):
    """From step 200 on only curvature 1 shows along the steps; 2/λ is 0.02."""
    trace, _ = descend(*quadratic(SHARP), np.ones(4), lr=0.005, skip=200, noise=noise, **columns)
    advice = advise(trace)
    assert advice.lr is not None
    assert advice.lr * 100 < 2
    if "spectral_smoothness" in columns:
        assert advice.lr == pytest.approx(1.5 / 100)


BOWL = np.linspace(0.1, 1.0, 20)


@pytest.mark.parametrize(("noise", "worst"), [(0.3, 5.0), (3.0, 10.0), (30.0, 10.0)])
def test_noise_that_hides_the_sharp_directions_does_not_lead_beyond_stability(noise, worst):
    """Random directions show a smoothness of half the largest: the line alone would allow lr 2.8."""
    start = np.full(20, 0.85)
    gradient, loss = quadratic(BOWL)
    trace, end = descend(gradient, loss, start, lr=0.1, noise=noise)
    advice = advise(trace)
    assert advice.lr * BOWL.max() < 2
    _, advised = descend(gradient, loss, start, lr=advice.lr, max_norm=advice.max_norm, noise=noise, seed=1)
    best = min(
        descend(gradient, loss, start, lr=lr, noise=noise, seed=1)[1] for lr in (0.003, 0.01, 0.03, 0.1)
    )
    assert advised < worst * best
    if noise == 30.0:
        assert advice.verdict.startswith("Lower lr to 0.0")
        assert advice.reasons[0].startswith("the loss rose, from")
        assert advice.lr <= 0.1 / 3
        assert advised < end
    else:
        assert advised < loss(start)


WALLS = {
    "cosh": (lambda x: np.sinh(x), lambda x: float(np.cosh(x).sum()), np.array([4.0, -3.0, 5.0])),
    "quartic": (
        lambda x: 0.1 * x + x**3,
        lambda x: float((0.05 * x**2 + x**4 / 4).sum()),
        np.array([3.0, -2.0]),
    ),
    "exp": (
        lambda x: np.exp(x) - np.exp(-x / 3),
        lambda x: float((np.exp(x) + 3 * np.exp(-x / 3)).sum()),
        np.array([4.0, 2.0, 3.0]),
    ),
}


@pytest.mark.parametrize("clipped", [True, False])
@pytest.mark.parametrize("name", WALLS)
def test_clipping_pays_where_smoothness_grows_inside_the_steps(name, clipped):
    gradient, loss, start = WALLS[name]
    norm = np.linalg.norm(gradient(start))
    curvature = np.linalg.norm(gradient(start * (1 + 1e-6)) - gradient(start)) / (
        1e-6 * np.linalg.norm(start)
    )
    setting = {"lr": 0.3 / curvature}
    if clipped:
        setting = {"lr": 3.0 / curvature, "max_norm": 0.05 * norm}
    trace, _ = descend(gradient, loss, start, **setting, steps=120, noise=0.01 * norm)
    advice = advise(trace)
    assert "Clipping pays here" in advice.clipping
    assert "inside single steps" in advice.clipping
    assert any("elasticity" in reason for reason in advice.reasons)
    _, advised = descend(gradient, loss, start, lr=advice.lr, max_norm=advice.max_norm, steps=120)
    assert advised < loss(start)


def test_inside_the_steps_of_a_constant_hessian_nothing_grows():
    curvature = np.geomspace(0.01, 5, 20)
    trace, _ = descend(*quadratic(curvature), np.ones(20), lr=0.1, max_norm=0.5, noise=0.01)
    advice = advise(trace)
    assert "Clipping pays" not in advice.clipping
    assert "inside single steps" in advice.clipping
    assert advice.lr * 5 < 2


def test_improving_losses_below_zero_are_compared():
    rng = np.random.default_rng(0)
    runs = []
    for lr, fall in ((0.1, 2.0), (0.3, 4.0)):
        g = np.exp(0.3 * rng.standard_normal(60))
        loss = -10 - fall * np.arange(60) / 60 + 0.01 * rng.standard_normal(60)
        runs.append(make_trace(g, 1 + g, lr=lr, step_norm=lr * g, loss=loss))
    advice = advise(*runs)
    assert advice.lr == 0.3
    assert not any("diverged" in reason for reason in advice.reasons)


@pytest.mark.parametrize("offset", [0.0, -100.0, 100.0])
def test_a_loss_that_runs_away_is_diverged_whatever_its_sign(offset):
    g = np.exp(0.3 * np.random.default_rng(0).standard_normal(60))
    fine = make_trace(g, 1 + g, lr=0.1, step_norm=0.1 * g, loss=offset + 9 - np.arange(60) / 20)
    lost = make_trace(g, 1 + g, lr=1.0, step_norm=g, loss=offset + 9 + 1.3 ** np.arange(60))
    advice = advise(fine, lost)
    assert advice.lr == 0.1
    assert any("lr 1, no step clipped: diverged" in reason for reason in advice.reasons)


def test_one_row_without_a_step_length_does_not_turn_the_control_off():
    curvature = np.geomspace(0.05, 2, 12)
    length = None
    trace, _ = descend(*quadratic(curvature), np.ones(12), lr=0.3, max_norm=0.5, noise=0.02, **NO_SECANTS)
    length = trace.column("step_norm").copy()
    columns = {name: trace.column(name) for name in ("lr", "loss", "coefficient")}
    lengths = [None if row == 7 else value for row, value in enumerate(length)]
    holed = make_trace(trace.column("grad_norm"), trace.column("smoothness"), step_norm=lengths, **columns)
    advice = advise(holed)
    assert "Clipping pays" not in advice.clipping
    assert advice.lr * 2 < 2


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_plain_descent_with_small_gradients_is_not_normalized(beta):
    """Of norms far below 1, ηg and ηg/(g + 1) are nearly the same length."""
    rng = np.random.default_rng(0)
    g = 0.005 * np.exp(0.3 * rng.standard_normal(60))
    size = 0.5 / (g + 1.0) if beta else 0.5
    advice = advise(make_trace(g, 1 + 0 * g, lr=0.5, step_norm=size * g, loss=np.linspace(3, 2, 60)))
    assert any("the length of a step" in reason for reason in advice.reasons) == bool(beta)
