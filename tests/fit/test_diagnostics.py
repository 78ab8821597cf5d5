"""Each warning on a run that has the trouble, and silence on runs that do not."""

import ast
import math
import re
from pathlib import Path

import numpy as np
import pytest

from curvestep.fit import diagnostics
from curvestep.fit.fit import fit_smoothness
from curvestep.fit.samples import usable_samples
from tests.fit.traces import autoregression, inside_steps, make_trace, simulated


def plain(rng):
    return simulated(rng, phi=0.7)


def grows_with_g(rng):
    g = np.exp(0.5 * autoregression(rng, 300, 0.7))
    return g, (1 + 2 * g) * np.exp(0.3 * g * autoregression(rng, 300, 0.7))


def heavy_tails(rng):
    g = 0.3 * (1 - rng.uniform(size=300)) ** (-1 / 1.5)
    return g, (1 + 2 * g) * np.exp(0.2 * rng.standard_t(3, 300))


def bad_batches(rng):
    g, ell = plain(rng)
    scale = np.where(rng.uniform(size=300) < 0.03, 30.0, 1.0)
    return g * scale, ell * scale


def falls_together(rng):
    """L1 = 0 at every time; L0 and the gradient norm fall in the course of training."""
    fall = np.exp(-1.5 * np.linspace(0, 1, 300))
    noise = [np.exp(0.3 * autoregression(rng, 300, 0.7)) for _ in range(2)]
    return fall * noise[0], 3 * fall * noise[1]


def sharpens(rng):
    """L1 = 2 at every time; L0 rises while the gradient norm falls."""
    time = np.linspace(0, 1, 300)
    g = np.exp(0.3 * autoregression(rng, 300, 0.7) - 1.5 * time)
    return g, (np.exp(2 * time) + 2 * g) * np.exp(0.2 * autoregression(rng, 300, 0.7))


def wanders(rng):
    """A gradient norm that is nearly a random walk."""
    g = np.exp(0.5 * autoregression(rng, 700, 0.98)[400:])
    return g, (1 + 2 * g) * np.exp(0.4 * autoregression(rng, 300, 0.7))


def share_of(check, scenario, *, runs=20, **columns):
    found = []
    for seed in range(runs):
        g, ell = scenario(np.random.default_rng([seed, 9]))
        found.append(check(usable_samples(make_trace(g, ell, **columns))) is not None)
    return np.mean(found)


@pytest.mark.parametrize("scenario", [falls_together, sharpens])
def test_time_is_named_where_it_is_the_common_cause(scenario):
    assert share_of(diagnostics.time_as_cause, scenario) >= 0.9


@pytest.mark.parametrize("scenario", [plain, grows_with_g, heavy_tails, bad_batches, wanders])
def test_time_is_not_named_where_it_changes_nothing(scenario):
    assert share_of(diagnostics.time_as_cause, scenario) <= 0.1


def test_an_uneven_spread_is_named_and_only_there():
    assert share_of(diagnostics.uneven_spread, grows_with_g) >= 0.9
    for scenario in (plain, heavy_tails, bad_batches, falls_together, sharpens, wanders):
        assert share_of(diagnostics.uneven_spread, scenario) <= 0.1


def test_a_norm_that_wanders_is_worth_few_rows():
    def few(samples):
        return diagnostics.few_points(samples, 30.0)

    assert share_of(few, wanders) >= 0.9
    for scenario in (plain, grows_with_g, heavy_tails, bad_batches):
        assert share_of(few, scenario) <= 0.1


def test_bad_batches_are_named():
    assert share_of(diagnostics.far_row, bad_batches) >= 0.9
    assert share_of(diagnostics.far_row, heavy_tails) <= 0.4  # a few such rows set the slope there as well
    for scenario in (plain, grows_with_g, falls_together, sharpens):
        assert share_of(diagnostics.far_row, scenario) == 0


@pytest.mark.parametrize(("kappa", "spread", "lr", "named"), [
    (1.6, 0.02, 1.0, True), (0.9, 0.02, 1.0, False), (1.6, 0.4, 1.0, False), (1.6, 0.02, 0.05, False),
])  # fmt: skip
def test_kappa_saturates_where_clipped_steps_all_turn_the_gradient_over(kappa, spread, lr, named):
    g, _ = plain(np.random.default_rng(0))
    kappa = kappa * np.exp(spread * np.random.default_rng(1).standard_normal(300))
    trace = make_trace(g, kappa / 0.05, step_norm=0.05 * g, lr=lr, kappa=kappa)  # clipped above 0.05
    assert (diagnostics.saturation(usable_samples(trace), 1.0) is not None) == named


def test_an_edge_is_not_told_by_a_few_unclipped_steps():
    g, _ = plain(np.random.default_rng(0))
    few = np.where(np.arange(300) % 3 == 0, 1.0, 0.5)
    ell = 20 * np.random.default_rng(1).uniform(0.8, 1.05, 300)
    clipped = make_trace(g, ell, step_norm=0.1 * few * g, lr=0.1, coefficient=few)
    assert diagnostics.edge_of_stability(usable_samples(clipped)) is None
    free = make_trace(g, ell, step_norm=0.1 * g, lr=0.1, coefficient=1.0)
    assert diagnostics.edge_of_stability(usable_samples(free)) is not None


@pytest.mark.parametrize(
    ("apart", "long", "named"), [(0.2, 0.0, True), (0.05, 0.0, False), (0.2, 0.6, False)]
)
def test_kinks_are_those_of_a_tenth_of_the_steps_where_most_are_short(apart, long, named):
    g, ell = plain(np.random.default_rng(0))
    place = np.linspace(0, 1, 300)
    secants = np.column_stack([np.where(place < apart, 2.0, 1.0) * ell, ell]).tolist()
    kappa = np.where(place > 1 - long, 1.0, 0.01)
    trace = make_trace(g, ell, kappa=kappa, secants=secants, header={"fractions": [0.5, 1.0]})
    assert (diagnostics.kinks(usable_samples(trace)) is not None) == named


def test_noise_in_the_gradient_norm_is_named_where_it_was_measured():
    g, ell = plain(np.random.default_rng(0))
    assert diagnostics.noisy_norms(usable_samples(make_trace(g, ell, noise=0.5 * g))) is not None
    assert diagnostics.noisy_norms(usable_samples(make_trace(g, ell, noise=0.1 * g))) is None
    assert diagnostics.noisy_norms(usable_samples(make_trace(g, ell))) is None


@pytest.mark.parametrize("check", ["time_as_cause", "kinks", "noisy_norms", "uneven_spread"])
def test_constant_and_missing_columns_raise_no_warning(check):
    named = getattr(diagnostics, check)
    g, ell = plain(np.random.default_rng(0))
    same = np.full(300, 2.0)
    for one, other in ((same, ell), (g, same), (g, np.zeros(300)), (g[:12], ell[:12])):
        assert named(usable_samples(make_trace(one, other))) is None
        columns = inside_steps(one, other, kappa=0.01)
        columns["secants"] = [[math.nan, math.nan]] * len(one)
        assert named(usable_samples(make_trace(one, other, **columns))) is None


def test_the_page_on_trust_has_a_line_for_every_warning():
    source = ast.parse(Path(diagnostics.__file__).read_text(encoding="utf-8"))
    notes = [
        node for node in ast.walk(source) if isinstance(node, ast.Call) and ast.unparse(node.func) == "Note"
    ]
    kinds = {note.args[0].value for note in notes}
    page = (Path(__file__).parents[2] / "docs" / "trust.md").read_text(encoding="utf-8")
    table = page.partition("| the fit warns of |")[2].partition("\n\n")[0]
    named = re.findall(r"^\| ([a-z ]+) \|", table, re.MULTILINE)
    assert sorted(named) == sorted(kind.replace("-", " ") for kind in kinds)


# In a whole fit


def is_named(trace, kind):
    return kind in {warning.kind for warning in fit_smoothness(trace, control=False).warnings}


def test_edge_of_stability_is_named_only_where_steps_are_not_clipped():
    rng = np.random.default_rng(0)
    g = np.exp(0.4 * autoregression(rng, 200, 0.5))
    ell = 2 / 0.1 * rng.uniform(0.8, 1.05, 200)
    assert is_named(make_trace(g, ell, step_norm=0.1 * g, lr=0.1), "edge-of-stability")
    assert not is_named(make_trace(g, ell / 10, step_norm=0.1 * g, lr=0.1), "edge-of-stability")
    assert not is_named(make_trace(g, ell, step_norm=0.1 * g, lr=1.0, coefficient=0.1), "edge-of-stability")
    along = make_trace(g, np.clip(20 * g, 14, 26), step_norm=0.1 * g, lr=0.1)
    assert not is_named(along, "edge-of-stability")  # smoothness follows the gradient


def test_narrow_range_few_points_and_noise_floor_are_named():
    rng = np.random.default_rng(0)
    g, ell = simulated(rng, num=200)
    narrow = make_trace(np.full(60, 2.0) + 0.01 * rng.uniform(size=60), ell[:60])
    assert is_named(narrow, "narrow-range")
    assert is_named(make_trace(g[:20], ell[:20]), "few-points")
    assert fit_smoothness(make_trace(g, ell, **inside_steps(g, ell)), control=False).warnings == ()


HALF = {"eps": 2.0**-7, "header": {"dtype": "float32"}}  # bfloat16 under autocast: rows know better


@pytest.mark.parametrize(("kappa", "columns", "named"), [
    (1e-6, {}, True), (1e-6, {"header": {"dtype": "float64"}}, False), (0.01, HALF, True), (0.1, HALF, False),
    (1e-6, {"eps": 2.0**-23, "header": {"dtype": "float64"}}, True), (1e-3, {"self_test": 2e-4}, True),
    (1e-3, {"self_test": 2e-5}, False), (1e-3, {"self_test": None, "eps": None}, False),
])  # fmt: skip
def test_noise_floor_is_that_of_the_rows_own_precision_and_self_test(kappa, columns, named):
    g, ell = simulated(np.random.default_rng(0), num=60)
    assert is_named(make_trace(g, ell, kappa=kappa, step_norm=0.1, **columns), "noise-floor") == named


@pytest.mark.parametrize("far", [1e-40, 1e15, 1e30])
def test_one_row_far_beyond_the_others_is_fitted_and_named(far):
    g, ell = simulated(np.random.default_rng(0), num=60)
    g[-1], ell[-1] = (far, 2 * far) if far > 1 else (far, 1.0)
    fit = fit_smoothness(make_trace(g, ell, step_norm=0.1 * g, lr=0.1))
    assert math.isfinite(fit.L0)
    assert fit.L1_interval[0] <= fit.L1 <= fit.L1_interval[1]
    assert ("far-row" in {warning.kind for warning in fit.warnings}) == (far > 1)
