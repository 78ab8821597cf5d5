import dataclasses
import math
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import curvestep as cs
from curvestep.fit import fit as fit_module, laws
from curvestep.fit.fit import fit_smoothness
from curvestep.notes import Note
from curvestep.theory.problems.walls import ExponentialWall
from tests.fit.traces import inside_steps, make_trace, simulated


def clipped_descent(problem, *, start, lr, max_norm, steps):
    """Gradient norms, secants over the step, exact curvature and step lengths along clipped descent."""
    x, rows = start, []
    for _ in range(steps):
        g = float(problem.gradient(np.array(x)))
        step = -min(lr, lr * max_norm / abs(g)) * g
        secant = abs(float(problem.gradient(np.array(x + step))) - g) / abs(step)
        rows.append((abs(g), secant, float(problem.hessian_norm(np.array(x))), abs(step)))
        x += step
    return np.array(rows).T


@pytest.mark.parametrize(("L0", "L1"), [(1.0, 5.0), (0.3, 20.0), (50.0, 0.5)])
def test_fit_finds_L0_and_L1_of_the_exponential_wall_along_a_descent(L0, L1):
    # Theory's simplest good recipe, steps a tenth as long so that the secant is the local curvature.
    g, secant, local, length = clipped_descent(
        ExponentialWall(L0=L0, L1=L1), start=3 / L1, lr=0.05 / L0, max_norm=L0 / L1, steps=150
    )
    keep = g > 1e-6 * g.max()
    trace = make_trace(g[keep], secant[keep], local_smoothness=local[keep], step_norm=length[keep])
    fit = fit_smoothness(trace, control=False)
    assert fit.L0 == pytest.approx(L0, rel=0.05)
    assert fit.L1 == pytest.approx(L1, rel=0.05)
    exact = fit_smoothness(trace, estimator="local_smoothness", control=False)
    assert exact.L0 == pytest.approx(L0, rel=1e-6)
    assert exact.L1 == pytest.approx(L1, rel=1e-6)
    assert exact.frontier(L1) == pytest.approx(L0, rel=1e-9)


def test_frontier_of_x4_is_16_over_L1_squared():
    # f = x⁴ from 3.01 with short clipped steps: |f'| = 4|x|³, and the secant over the step.
    x, rows = 3.01, []
    for _ in range(3000):
        g = 4 * x**3
        step = -min(0.05, 0.002 / abs(g)) * g
        rows.append((abs(g), abs(4 * (x + step) ** 3 - g) / abs(step)))
        x += step
    g, ell = np.array(rows).T
    fit = fit_smoothness(make_trace(g, ell), control=False)
    for L1 in (1.5, 3.0, 6.0, 10.0):
        assert fit.frontier(L1) == pytest.approx(16 / L1**2, rel=0.05)
    assert fit.exponent == pytest.approx(2 / 3, rel=0.05)


def test_intervals_hold_the_truth_and_shrink_with_data():
    widths = []
    for num in (200, 1600):
        g, ell = simulated(np.random.default_rng(3), num=num)
        fit = fit_smoothness(make_trace(g, ell), control=False, level=0.999)
        factor = math.exp(0.4 * stats.norm.ppf(0.95))
        assert fit.L1_interval[0] <= 2 * factor <= fit.L1_interval[1]
        assert fit.L0_interval[0] <= 1 * factor <= fit.L0_interval[1]
        for name in ("L0", "L1", "spearman", "pearson", "exponent"):
            low, high = getattr(fit, f"{name}_interval")
            assert low <= getattr(fit, name) <= high
        widths.append(fit.L1_interval[1] - fit.L1_interval[0])
    assert widths[1] < widths[0] / 1.5


def test_same_trace_gives_the_same_fit():
    g, ell = simulated(np.random.default_rng(0), num=80)
    trace = make_trace(g, ell, step_norm=0.1, lr=0.1)
    assert fit_smoothness(trace) == fit_smoothness(trace)


def test_growth_inside_steps_is_found_printed_and_counts_as_evidence():
    g, ell = simulated(np.random.default_rng(0), num=100)
    fit = fit_smoothness(make_trace(g, ell, **inside_steps(g, ell)), control=False)
    assert fit.within.elasticity == pytest.approx(0.8, abs=0.01)
    assert fit.within.grows
    assert fit.grows
    assert "within steps" in fit.details()
    assert f"{fit.within.elasticity:.2f}" in str(fit)
    flat = fit_smoothness(make_trace(g, ell, **inside_steps(g, ell, elasticity=0.0)))
    assert not flat.grows  # whatever the control says
    assert not flat.within.missing


def test_of_very_many_rows_evenly_spaced_ones_are_tested(monkeypatch):
    g, ell = simulated(np.random.default_rng(0), num=200)
    trace = make_trace(g, ell, **inside_steps(g, ell), loss=1.0)
    monkeypatch.setattr(fit_module, "MOST_TESTED_ROWS", 100)
    monkeypatch.setattr(laws, "MOST_TESTED_ROWS", 100)
    fit = fit_smoothness(trace, control=False, law="best")
    assert (fit.num_points, fit.within.num_rows) == (200, 100)
    every_other = make_trace(g[::2], ell[::2], **inside_steps(g, ell, every=2))
    assert fit.within == fit_smoothness(every_other, control=False).within


def test_without_secants_the_control_decides():
    g, ell = simulated(np.random.default_rng(1), phi=0.8, L0=0.2, noise=0.1)
    fit = fit_smoothness(make_trace(g, ell, step_norm=0.02, lr=1.0))
    assert fit.within.missing.kind == "no-secants"
    assert fit.grows == (not fit.explained) is True
    assert "within steps" not in fit.details()


@pytest.mark.parametrize(
    ("rank", "exponent", "upper", "expected"),
    [
        ((0.6, 0.8), (0.5, 0.9), 0.4, False),
        ((0.3, 0.8), (0.5, 0.9), 0.4, True),  # within the control's ranks
        ((0.6, 0.8), (0.2, 0.9), 0.4, True),  # within the control's exponents
        ((0.999, 1.0), (0.5, 0.9), 0.998, True),  # a saturated control cannot be exceeded
        ((-0.2, 0.1), (0.5, 0.9), -0.5, True),  # a negative correlation is no growth
        ((math.nan, math.nan), (0.5, 0.9), 0.4, True),
        ((0.6, 0.8), (0.5, 0.9), math.nan, True),
    ],
)
def test_a_constant_hessian_explains_what_its_control_reaches(rank, exponent, upper, expected):
    g, ell = simulated(np.random.default_rng(0), num=40)
    fit = fit_smoothness(make_trace(g, ell, step_norm=0.1, lr=0.1))
    control = dataclasses.replace(fit.control, spearman_interval=(-0.9, upper), exponent_interval=(-0.9, 0.4))
    fit = dataclasses.replace(fit, spearman_interval=rank, exponent_interval=exponent, control=control)
    assert fit.explained is expected
    assert dataclasses.replace(fit, control=None).explained


def test_constant_columns_give_a_marked_result():
    g, ell = simulated(np.random.default_rng(0), num=60)
    flat = fit_smoothness(make_trace(g, np.full(60, 3.0), step_norm=0.1, lr=0.1))
    assert (flat.L0, flat.L1) == (pytest.approx(3.0), pytest.approx(0.0, abs=1e-9))
    assert math.isnan(flat.spearman)
    assert math.isnan(flat.spearman_interval[0])
    still = fit_smoothness(make_trace(np.full(60, 2.0), ell, step_norm=0.1, lr=0.1))
    assert "narrow-range" in {warning.kind for warning in still.warnings}
    assert still.L1_interval[0] == 0
    assert still.L1_interval[1] > 0.5 * float(np.max(ell)) / 2
    for fit in (flat, still):
        assert "nan" in fit.details()
    assert fit_smoothness(make_trace(g, np.zeros(60), step_norm=0.1, lr=0.1)).L1 == 0
    partly = fit_smoothness(make_trace(g, np.where(np.arange(60) < 5, 0.0, ell), step_norm=0.1, lr=0.1))
    assert partly.control is not None


def test_details_and_html_show_numbers_and_escape_words():
    g, ell = simulated(np.random.default_rng(0), num=40)
    fit = fit_smoothness(make_trace(g, ell, step_norm=0.1, lr=0.1))
    assert all(f"{value:.4g}" in fit.details() for value in (fit.L0, fit.L1, fit.frontier(fit.L1)))
    hostile = dataclasses.replace(fit, warnings=(Note("hostile", "<script>alert(1)</script> & more"),))
    page = ElementTree.fromstring(f"<div>{hostile._repr_html_()}</div>")
    assert page.find(".//script") is None
    assert "<script>" in page.find(".//li").text


@pytest.mark.parametrize("classify", [True, False])
def test_a_probed_run_decides_inside_its_steps(classify):
    """Logistic regression has a Hessian that falls with the gradient; linear regression a constant one."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1, bias=False)
    inputs = torch.randn(256, 8)
    clean = inputs @ torch.linspace(-2, 2, 8)[:, None]
    targets = (clean > 0).float() if classify else clean
    optimizer = torch.optim.SGD(model.parameters(), lr=20.0 if classify else 0.3)
    probe = cs.SmoothnessProbe(model, every=1, fractions=(0.05, 0.15, 0.5, 1.0))
    for _ in range(60):
        chosen = torch.randint(0, 256, (32,))

        def loss_fn(chosen=chosen):
            out = model(inputs[chosen])
            if classify:
                return nn.functional.binary_cross_entropy_with_logits(out, targets[chosen])
            return ((out - targets[chosen]) ** 2).mean() / 2

        optimizer.zero_grad()
        loss = loss_fn()
        loss.backward()
        with probe(loss_fn, loss=loss):
            optimizer.step()
    fit = fit_smoothness(probe.trace)
    assert fit.within.num_rows > 20 or not classify
    assert fit.grows is classify


def test_the_short_form_has_the_answer_first_and_eight_lines():
    g, ell = simulated(np.random.default_rng(0), num=60)
    fit = fit_smoothness(make_trace(g, ell, **inside_steps(g, ell), step_norm=0.1, lr=0.1), law="best")
    bare = fit_smoothness(make_trace(g, ell), control=False)
    for each, answer in ((fit, "GROWS"), (bare, "CANNOT TELL")):
        lines = str(each).splitlines()
        assert answer in lines[0]
        assert len(lines) <= 8
