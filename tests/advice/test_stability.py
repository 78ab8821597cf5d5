"""Advice on functions whose largest stable step is known: it must not lead beyond it."""

import math

import numpy as np
import pytest
from benchmarks.advise_quadratics import COLUMNS, constant_hessian_run

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


@pytest.mark.parametrize("columns", [{}, NO_SECANTS])
@pytest.mark.parametrize(("product", "share"), [(5.0, 0.1), (20.0, 0.02)])
def test_an_lr_that_only_clipping_makes_stable_is_not_kept(product, share, columns):
    """Every step is clipped: that the run went well says nothing of lr, only of lr·max_norm."""
    gradient, loss = quadratic(BOWL)
    start, lr = np.ones(20), product / BOWL.max()
    max_norm = share * np.linalg.norm(gradient(start))
    trace, end = descend(gradient, loss, start, lr=lr, max_norm=max_norm, noise=0.02, **columns)
    advice = advise(trace)
    assert advice.action == "lower"
    assert advice.lr * BOWL.max() < 2
    assert advice.step_cap == pytest.approx(lr * max_norm)
    assert advice.verdict == f"Lower lr to {advice.lr:.3g}, raise max_norm to {advice.max_norm:.3g}."
    assert "Every step was clipped, so only lr·max_norm counted: lr " in advice.reasons[0]
    assert "stays stable where clipping ends (lr times the smoothness was " in advice.reasons[0]
    advised = {"lr": advice.lr, "max_norm": advice.max_norm}
    assert descend(gradient, loss, start, **advised, noise=0.02)[1] < end / 2


def test_a_lower_lr_with_a_higher_threshold_makes_the_same_steps():
    """Gradients stay above both thresholds, by a slope of 25 and noise of 40 in 200 directions."""
    gradient, loss = quadratic(np.array([1e-3, *[1.0] * 199]))
    far = {"x": np.array([25e3, *[0.0] * 199]), "noise": 40.0, "steps": 60}
    trace, end = descend(gradient, loss, lr=24.0, max_norm=1.0, **far)
    advice = advise(trace)
    assert advice.action == "lower"
    assert advice.lr < 2
    assert advice.step_cap == pytest.approx(24.0)
    assert "makes the same steps, and stays stable where clipping ends" in advice.reasons[0]
    _, advised = descend(gradient, loss, lr=advice.lr, max_norm=advice.max_norm, **far)
    assert advised == pytest.approx(end, rel=1e-12)


def test_longer_steps_after_clipped_ones_are_no_larger_than_three_times_those_that_were_run():
    """The gradient lies in flat directions: it shows nothing of λ = 1, which lr is five times beyond."""
    curvature = np.array([1.0, *[0.03] * 9])
    gradient, loss = quadratic(curvature)
    trace, _ = descend(gradient, loss, np.array([0.0, *[100.0] * 9]), lr=5.0, max_norm=0.1, steps=60)
    advice = advise(trace)
    assert advice.action == "raise"
    assert advice.lr == pytest.approx(3 * 5.0 * 0.1 / trace.column("grad_norm").min())
    assert advice.lr < 2
    assert advice.step_cap == pytest.approx(3 * 5.0 * 0.1)
    assert advice.verdict == f"Raise max_norm to {advice.max_norm:.3g}, lower lr to {advice.lr:.3g}."
    assert "makes steps up to 1.5 long, and stays stable where clipping ends" in advice.reasons[0]
    assert "the largest step size that was run is 0." in advice.reasons[0]


def test_what_one_long_step_works_off_bounds_lr_still():
    """After the first row only curvature 0.01 shows; the first row alone shows λ = 1."""
    gradient, loss = quadratic(np.array([1.0, 0.01]))
    trace, _ = descend(gradient, loss, np.array([1.0, 5.0]), lr=0.9999, steps=60)
    assert trace.column("smoothness")[1:].max() < 0.02
    assert advise(trace).lr == pytest.approx(1.0, rel=1e-3)


def test_a_constant_spectral_value_bounds_lr_whatever_the_steps_show():
    """Inside the steps of a wall smoothness grows, but the spectral values do not follow."""
    gradient, loss, start = WALLS["exp"]
    norm = np.linalg.norm(gradient(start))
    setting = {"lr": 0.07, "max_norm": 0.05 * norm, "steps": 120, "noise": 0.01 * norm}
    spectral = {"spectral_smoothness": 100.0, "spectral_converged": 1.0}
    assert advise(descend(gradient, loss, start, **setting)[0]).action == "keep"
    advice = advise(descend(gradient, loss, start, **setting, **spectral)[0])
    assert advice.fit.supports_slope
    assert advice.lr == pytest.approx(1.5 / 100)
    assert advice.step_cap == pytest.approx(setting["lr"] * setting["max_norm"])
    assert "of the steps were clipped: lr 0.015 with max_norm" in advice.reasons[0]


def test_an_lr_that_is_stable_where_clipping_ends_stays():
    """At the start of the wall lr·λ is 3, where clipping ends 0.05: spectral values of both were recorded."""
    gradient, loss, start = WALLS["cosh"]
    norm, path = np.linalg.norm(gradient(start)), []

    def noted(x):
        path.append(x)
        return gradient(x)

    setting = {"lr": 3 / np.cosh(5.0), "max_norm": 0.05 * norm, "steps": 120, "noise": 0.01 * norm}
    descend(noted, loss, start, **setting)
    spectral = [
        float(np.cosh(x).max()) for x in path[::3]
    ]  # a step and two secants ask for one gradient each
    columns = {"spectral_smoothness": spectral, "spectral_converged": 1.0}
    trace, _ = descend(gradient, loss, start, **setting, **columns)
    assert setting["lr"] * max(spectral) == pytest.approx(3.0)
    assert advise(trace).lr >= setting["lr"]


def test_after_a_lost_run_lr_stays_below_the_spectral_value_of_its_start():
    """The first gradient lies in flat directions, so its step says nothing of λ = 1."""
    gradient, loss = quadratic(np.array([1.0, *[0.02] * 9]))
    x, setting = np.array([1e-6, *[10.0] * 9]), {"lr": 4.0, "steps": 30}
    rescue = advise(descend(gradient, loss, x, **setting)[0])
    assert rescue.action == "rescue"
    assert advise(descend(gradient, loss, x, **setting, spectral_smoothness=1.0)[0]).lr == min(rescue.lr, 1.5)
    assert advise(descend(gradient, loss, x, **setting, spectral_smoothness=9.0)[0]).lr == pytest.approx(
        1.5 / 9
    )


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_plain_descent_with_small_gradients_is_not_normalized(beta):
    """Of norms far below 1, ηg and ηg/(g + 1) are nearly the same length."""
    rng = np.random.default_rng(0)
    g = 0.005 * np.exp(0.3 * rng.standard_normal(60))
    size = 0.5 / (g + 1.0) if beta else 0.5
    advice = advise(make_trace(g, 1 + 0 * g, lr=0.5, step_norm=size * g, loss=np.linspace(3, 2, 60)))
    assert any("the length of a step" in reason for reason in advice.reasons) == bool(beta)


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "most"), list(zip(COLUMNS, (3, 3, 0, 0), strict=True)))
def test_lr_of_the_advice_is_stable_on_random_constant_hessians(columns, most):
    """The 60 runs of benchmarks/advise_quadratics.py; the limits are those of the docs."""
    runs = [constant_hessian_run(seed) for seed in range(60)]
    beyond = [
        seed for seed, run in enumerate(runs) if advise(run.trace(**COLUMNS[columns])).lr * run.largest > 2
    ]
    assert len(beyond) <= most, beyond
