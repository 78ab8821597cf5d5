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
from curvestep.fit.correlation import correlations_of
from curvestep.fit.fit import fit_smoothness
from curvestep.fit.frontier import quantile_lines
from curvestep.fit.intervals import block_length, moving_blocks, slope_interval
from curvestep.notes import Note
from curvestep.theory.problems.walls import ExponentialWall
from curvestep.trace.schema import NONFINITE
from curvestep.trace.trace import Trace
from tests.fit.traces import autoregression, inside_steps, make_trace, quadratic_run, simulated


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


def stationary_spearman():
    z = np.random.default_rng(0).standard_normal((2, 2_000_000))
    g = np.exp(0.5 * z[0])
    return stats.spearmanr(g, (1 + 2 * g) * np.exp(0.4 * z[1])).statistic


@pytest.mark.slow
@pytest.mark.parametrize("phi", [0.5, 0.8])
def test_ninety_percent_intervals_cover_the_truth_in_85_to_95_of_100(phi):
    # Truth: the 0.95 line of (L0 + L1 g)·e^{0.4 z} has slope L1·e^{0.4·1.645}; the rank correlation is that
    # of the stationary law, by two million independent draws.
    rank, slope = stationary_spearman(), 2 * math.exp(0.4 * stats.norm.ppf(0.95))
    covered = {"spearman": 0, "L1": 0}
    for seed in range(200):
        g, ell = simulated(np.random.default_rng([seed, 300]), num=300, phi=phi)
        few = correlations_of(g, ell, level=0.9, resamples=200, rng=np.random.default_rng(seed))
        covered["spearman"] += few.spearman_interval[0] <= rank <= few.spearman_interval[1]
        _, L1 = quantile_lines(g[None], ell[None], quantile=0.95)[0]
        low, high = slope_interval(g, ell, quantile=0.95, level=0.9, slope=L1)
        covered["L1"] += low <= slope <= high
    print(f"phi={phi}: covered {covered} of 200")
    assert 170 <= covered["spearman"] <= 190
    assert 170 <= covered["L1"] <= 190


def test_blocks_are_as_long_as_ranks_ask_for_where_outliers_hide_how_steps_resemble():
    rng = np.random.default_rng(0)
    x, y = (autoregression(rng, 400, 0.95) for _ in range(2))
    x += np.where(rng.random(400) < 0.05, 60 * rng.standard_normal(400), 0.0)
    assert correlations_of(np.exp(x), np.exp(y), level=0.9, resamples=20, rng=rng).block_length > 15


def test_block_length_grows_with_autocorrelation():
    rng = np.random.default_rng(0)
    lengths = [
        np.median([block_length(autoregression(rng, 500, phi)) for _ in range(9)]) for phi in (0, 0.5, 0.9)
    ]
    assert lengths[0] <= 4 < lengths[1] < lengths[2]
    assert block_length(np.ones(50)) == 1


def test_moving_blocks_are_runs_of_consecutive_rows():
    rows = moving_blocks(50, length=7, resamples=30, rng=np.random.default_rng(0))
    steps = np.diff(rows, axis=1)
    inside = (np.arange(49) + 1) % 7 != 0
    assert (steps[:, inside] == 1).all()
    assert rows.min() >= 0
    assert rows.max() <= 49


def quadratic_trace(*, seed=0, lr=0.05, max_norm=0.5, **kwargs):
    g, ell, length = quadratic_run(np.random.default_rng(seed), lr=lr, max_norm=max_norm, **kwargs)
    return make_trace(g, ell, step_norm=length, lr=lr)


def test_control_shows_the_correlation_that_a_spread_spectrum_makes():
    # A constant Hessian, yet rank correlation near 1 with clipping: the control must allow for it.
    fit = fit_smoothness(quadratic_trace(curvature=np.geomspace(0.1, 5, 20), noise=0.02, steps=250))
    assert fit.spearman > 0.9
    assert fit.control is not None
    assert fit.control.spearman > 0.6
    assert fit.control.spearman_interval[1] > 0.97


@pytest.mark.slow
@pytest.mark.parametrize("max_norm", [0.2, 0.5, np.inf])
@pytest.mark.parametrize("noise", [0.02, 0.3])
def test_runs_on_constant_hessians_with_varied_norms_stay_within_their_control(max_norm, noise):
    for num, low, high in ((20, 0.1, 5.0), (20, 0.01, 20.0), (100, 0.5, 5.0)):
        trace = quadratic_trace(
            curvature=np.geomspace(low, high, num), noise=noise, max_norm=max_norm, steps=200, seed=num
        )
        fit = fit_smoothness(trace)
        assert fit.control is not None
        assert fit.spearman_interval[0] < fit.control.spearman_interval[1] + 0.02


def test_control_stays_low_where_smoothness_follows_the_gradient_without_a_trend():
    # Norm and smoothness rise and fall together with no trend: no constant Hessian does that.
    rng = np.random.default_rng(1)
    g, ell = simulated(rng, phi=0.8, L0=0.2, noise=0.1)
    fit = fit_smoothness(make_trace(g, ell, step_norm=0.02, lr=1.0))
    assert fit.control is not None
    assert fit.control.spearman_interval[1] < fit.spearman_interval[0]


def test_intervals_of_correlations_are_fishers():
    g, ell = simulated(np.random.default_rng(0), num=60, noise=0.2)
    fit = fit_smoothness(make_trace(g, ell), control=False)
    for centre, (low, high) in ((fit.spearman, fit.spearman_interval), (fit.pearson, fit.pearson_interval)):
        assert -1 < low < centre < high < 1
        assert centre - low > 1.2 * (high - centre)


def test_same_trace_gives_the_same_fit():
    g, ell = simulated(np.random.default_rng(0), num=80)
    trace = make_trace(g, ell, step_norm=0.1, lr=0.1)
    assert fit_smoothness(trace) == fit_smoothness(trace)


def said(fit):
    return {warning.kind: warning.text for warning in fit.warnings}


def warned(trace, kind):
    return kind in said(fit_smoothness(trace, control=False))


def test_saturated_kappa_is_named_with_the_slope_that_the_step_length_sets():
    rng = np.random.default_rng(0)
    g = np.exp(0.4 * autoregression(rng, 200, 0.5))
    kappa = 1.6 + 0.05 * rng.standard_normal(200)
    saturated = make_trace(g, kappa * g / 0.05, step_norm=0.05, lr=1.0, kappa=kappa)
    assert "that gives 32" in said(fit_smoothness(saturated, control=False))["kappa-saturated"]
    free = make_trace(g, 2 + g * rng.uniform(0, 3, 200), step_norm=0.05, lr=1.0)
    assert not warned(free, "kappa-saturated")


def test_edge_of_stability_is_named_only_where_steps_are_not_clipped():
    rng = np.random.default_rng(0)
    g = np.exp(0.4 * autoregression(rng, 200, 0.5))
    ell = 2 / 0.1 * rng.uniform(0.8, 1.05, 200)
    assert warned(make_trace(g, ell, step_norm=0.1 * g, lr=0.1), "edge-of-stability")
    assert not warned(make_trace(g, ell / 10, step_norm=0.1 * g, lr=0.1), "edge-of-stability")
    assert not warned(make_trace(g, ell, step_norm=0.1 * g, lr=1.0, coefficient=0.1), "edge-of-stability")
    along = make_trace(g, np.clip(20 * g, 14, 26), step_norm=0.1 * g, lr=0.1)
    assert not warned(along, "edge-of-stability")  # smoothness follows the gradient


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


def test_without_secants_the_fit_says_what_is_missing_and_the_control_decides():
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
def test_a_constant_hessian_explains_what_is_not_clearly_beyond_the_control(rank, exponent, upper, expected):
    g, ell = simulated(np.random.default_rng(0), num=40)
    fit = fit_smoothness(make_trace(g, ell, step_norm=0.1, lr=0.1))
    control = dataclasses.replace(fit.control, spearman_interval=(-0.9, upper), exponent_interval=(-0.9, 0.4))
    fit = dataclasses.replace(fit, spearman_interval=rank, exponent_interval=exponent, control=control)
    assert fit.explained is expected
    assert dataclasses.replace(fit, control=None).explained


def test_a_few_rows_without_step_length_leave_the_control_to_the_others():
    g, ell = simulated(np.random.default_rng(0), num=60)
    lengths = [None if row in (3, 20) else 0.1 for row in range(60)]
    assert fit_smoothness(make_trace(g, ell, step_norm=lengths, lr=0.1)).control is not None
    lengths = [0.1 if row < 9 else None for row in range(60)]
    assert fit_smoothness(make_trace(g, ell, step_norm=lengths, lr=0.1)).control is None


def test_noise_scale_is_the_quotient_of_means():
    g, ell = simulated(np.random.default_rng(0), num=40)
    columns = {"grad_variance": [8.0, 72.0] * 20, "grad_signal": [-1.0, 11.0] * 20}
    fit = fit_smoothness(make_trace(g, ell, **columns), control=False)
    assert fit.noise_scale == pytest.approx(40 / 5)
    assert "noise scale" in fit.details()
    assert fit_smoothness(make_trace(g, ell), control=False).noise_scale is None
    columns["grad_signal"] = [-1.0, 0.5] * 20
    assert fit_smoothness(make_trace(g, ell, **columns), control=False).noise_scale == math.inf


def test_narrow_range_few_points_and_noise_floor_are_named():
    rng = np.random.default_rng(0)
    g, ell = simulated(rng, num=200)
    narrow = make_trace(np.full(60, 2.0) + 0.01 * rng.uniform(size=60), ell[:60])
    assert warned(narrow, "narrow-range")
    assert warned(make_trace(g[:20], ell[:20]), "few-points")
    assert fit_smoothness(make_trace(g, ell, **inside_steps(g, ell)), control=False).warnings == ()


HALF = {"eps": 2.0**-7, "header": {"dtype": "float32"}}  # bfloat16 under autocast: rows know better


@pytest.mark.parametrize(("kappa", "columns", "named"), [
    (1e-6, {}, True), (1e-6, {"header": {"dtype": "float64"}}, False), (0.01, HALF, True), (0.1, HALF, False),
    (1e-6, {"eps": 2.0**-23, "header": {"dtype": "float64"}}, True), (1e-3, {"self_test": 2e-4}, True),
    (1e-3, {"self_test": 2e-5}, False), (1e-3, {"self_test": None, "eps": None}, False),
])  # fmt: skip
def test_noise_floor_is_that_of_the_rows_own_precision_and_self_test(kappa, columns, named):
    g, ell = simulated(np.random.default_rng(0), num=60)
    assert warned(make_trace(g, ell, kappa=kappa, step_norm=0.1, **columns), "noise-floor") == named


def test_bad_rows_are_skipped_and_counted():
    g, ell = simulated(np.random.default_rng(0), num=60)
    clean = fit_smoothness(make_trace(g, ell), control=False)
    trace = make_trace(g, ell)
    trace.append({"step": 100, "grad_norm": math.nan, "smoothness": 1.0})
    trace.append({"step": 101, "grad_norm": 1.0, "smoothness": 1e9, "status": NONFINITE})
    trace.append({"step": 102, "grad_norm": 1.0, "smoothness": math.inf})
    trace.append({"step": 103, "loss": 1.0})
    dirty = fit_smoothness(trace, control=False)
    assert dirty.num_skipped == 4
    assert dataclasses.replace(dirty, num_skipped=0) == clean


@pytest.mark.parametrize("far", [1e-40, 1e15, 1e30])
def test_one_row_far_beyond_the_others_is_fitted_and_named(far):
    g, ell = simulated(np.random.default_rng(0), num=60)
    g[-1], ell[-1] = (far, 2 * far) if far > 1 else (far, 1.0)
    fit = fit_smoothness(make_trace(g, ell, step_norm=0.1 * g, lr=0.1))
    assert math.isfinite(fit.L0)
    assert fit.L1_interval[0] <= fit.L1 <= fit.L1_interval[1]
    assert ("far-row" in said(fit)) == (far > 1)


@pytest.mark.parametrize("size", [5e-324, 1e-200, 1e200])
def test_numbers_whose_squares_are_not_finite_are_skipped(size):
    g, ell = simulated(np.random.default_rng(0), num=60)
    with pytest.raises(ValueError, match="got 0 of 60"):
        fit_smoothness(make_trace(size * g, size * ell, step_norm=0.1, lr=0.1))


def test_trace_that_cannot_be_fitted_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"has no rows: no step was measured.*probe.watch"):
        fit_smoothness(Trace())
    with pytest.raises(ValueError, match="got 1 of 1"):
        fit_smoothness(make_trace([1.0], [1.0]))
    trace = make_trace(np.full(30, np.nan), np.ones(30))
    trace.append({"step": 99, "status": NONFINITE})
    with pytest.raises(ValueError, match="1 marked as not ok, 30 without a positive finite `grad_norm`"):
        fit_smoothness(trace)
    g, ell = simulated(np.random.default_rng(0), num=30)
    for bad in ({"quantile": 1.0}, {"level": 0.0}, {"estimator": "sharpness"}):
        with pytest.raises(ValueError, match=f"`{next(iter(bad))}` must be"):
            fit_smoothness(make_trace(g, ell), **bad)


def test_constant_columns_give_a_marked_result():
    g, ell = simulated(np.random.default_rng(0), num=60)
    flat = fit_smoothness(make_trace(g, np.full(60, 3.0), step_norm=0.1, lr=0.1))
    assert (flat.L0, flat.L1) == (pytest.approx(3.0), pytest.approx(0.0, abs=1e-9))
    assert math.isnan(flat.spearman)
    assert math.isnan(flat.spearman_interval[0])
    still = fit_smoothness(make_trace(np.full(60, 2.0), ell, step_norm=0.1, lr=0.1))
    assert "narrow-range" in said(still)
    assert still.L1_interval[0] == 0
    assert still.L1_interval[1] > 0.5 * float(np.max(ell)) / 2
    for fit in (flat, still):
        assert "nan" in fit.details()
    assert fit_smoothness(make_trace(g, np.zeros(60), step_norm=0.1, lr=0.1)).L1 == 0
    partly = fit_smoothness(make_trace(g, np.where(np.arange(60) < 5, 0.0, ell), step_norm=0.1, lr=0.1))
    assert partly.control is not None


@pytest.mark.parametrize("kind", ["spectral", "local"])
def test_estimates_that_had_not_converged_are_left_out_and_counted(kind):
    g, ell = simulated(np.random.default_rng(0), num=60)
    late = np.arange(60) % 3 == 0
    columns = {f"{kind}_smoothness": np.where(late, 0.01, ell), f"{kind}_converged": ~late}
    trace = make_trace(g, ell, **columns)
    fit = fit_smoothness(trace, estimator=f"{kind}_smoothness", control=False)
    assert (fit.num_points, fit.num_skipped) == (40, 20)
    assert said(fit)["unconverged"].startswith("20 of 60")
    troubled = Trace()
    for row in trace:
        troubled.append({**row, "status": "ok" if row["step"] >= 6 else "failed"})
    fit = fit_smoothness(troubled, estimator=f"{kind}_smoothness", control=False)
    assert said(fit)["unconverged"].startswith("18 of 54")
    assert not warned(trace, "unconverged")
    trace = make_trace(g, ell, **columns | {f"{kind}_converged": 0})
    with pytest.raises(ValueError, match="60 whose estimate had not converged"):
        fit_smoothness(trace, estimator=f"{kind}_smoothness")


def test_words_and_html_name_every_number_and_escape_them():
    g, ell = simulated(np.random.default_rng(0), num=40)
    fit = fit_smoothness(make_trace(g, ell, step_norm=0.1, lr=0.1))
    text = fit.details()
    assert all(word in text for word in ("trajectory", "L0", "L1", "rank corr.", "control", "! Few"))
    assert f"{fit.L1:.4g}" in text
    hostile = dataclasses.replace(fit, warnings=(Note("hostile", "<script>alert(1)</script> & more"),))
    page = ElementTree.fromstring(f"<div>{hostile._repr_html_()}</div>")
    assert page.find(".//script") is None
    assert "<script>" in page.find(".//li").text


@pytest.mark.slow
def test_long_runs_are_fitted_in_seconds():
    g, ell = simulated(np.random.default_rng(0), num=300)
    long = fit_smoothness(make_trace(np.tile(g, 20), np.tile(ell, 20)), control=False)
    assert long.num_points == 6000
    assert long.L1 == pytest.approx(fit_smoothness(make_trace(g, ell), control=False).L1, rel=1e-6)


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


def test_steps_that_no_quadratic_carries_leave_the_control_without_numbers_and_warn_of_nothing():
    # Every other step is far beyond 2/λ: gradients overflow before λ times them does, and their ratio is 0.
    g, ell = simulated(np.random.default_rng(1), num=60, L0=1e-3, L1=2e-3)
    step_size = np.resize([100.0, 0.3], 60) / np.median(ell)
    fit = fit_smoothness(make_trace(g, ell, every=13, step_norm=step_size * g))
    assert math.isnan(fit.control.spearman)


def test_short_form_gives_the_answer_first_in_at_most_eight_lines():
    g, ell = simulated(np.random.default_rng(0), num=60)
    fit = fit_smoothness(make_trace(g, ell, **inside_steps(g, ell), step_norm=0.1, lr=0.1), law="best")
    lines = str(fit).splitlines()
    assert len(lines) <= 8
    assert lines[0].startswith("Does sharpness grow with the gradient norm?  GROWS")
    assert "fit.details()" in lines[-1]
    bare = str(fit_smoothness(make_trace(g, ell), control=False))
    assert "CANNOT TELL  (not tested inside steps: no secants)" in bare
    assert "inside-steps" in {note.kind for note in fit_smoothness(make_trace(g, ell)).warnings}
    assert len(bare.splitlines()) <= 8
