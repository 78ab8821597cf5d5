"""Rows that a fit uses: which are left out, why too few are refused, and those of one layer."""

import dataclasses
import math
import re

import numpy as np
import pytest

from curvestep.fit.fit import fit_smoothness
from curvestep.fit.samples import evenly_spaced, usable_samples
from curvestep.trace.schema import NONFINITE
from curvestep.trace.trace import Trace
from tests.fit.traces import make_trace, simulated


def test_samples_cut_to_some_rows_keep_all_their_columns_in_step():
    trace = make_trace(np.arange(1.0, 41.0), np.ones(40), lr=0.1, step_norm=0.1)
    samples = usable_samples(trace)
    part = samples.rows(slice(10, 20))
    assert len(part) == 10
    np.testing.assert_array_equal(part.grad_norm, np.arange(11.0, 21.0))
    np.testing.assert_array_equal(part.clipped, samples.clipped[10:20])


def test_rows_appended_later_do_not_change_samples():
    trace = make_trace(np.arange(1.0, 41.0), np.ones(40), loss=1.0)
    samples = usable_samples(trace)
    trace.append({"step": 99, "grad_norm": 1.0, "smoothness": 1.0, "loss": math.nan})
    assert len(samples.loss) == 40
    assert np.isfinite(samples.loss).all()
    assert len(usable_samples(trace)) == 41


@pytest.mark.parametrize("num", [0, 1, 7, 8, 9, 100])
def test_evenly_spaced_rows_are_at_most_so_many(num):
    rows = np.arange(num)[evenly_spaced(num, most=8)]
    assert len(rows) <= 8
    assert len(rows) >= min(num, 4)
    assert len(set(np.diff(rows))) <= 1


def layered(num=60):
    """Rows of a model whose layer ``a/b`` has L0 1 and L1 2, other than the model itself."""
    trace = Trace(header={"fractions": [0.5, 1.0]})
    for step, g in enumerate(np.random.default_rng(0).lognormal(size=num)):
        own = {"grad_norm": g, "step_norm": 0.1 * g, "smoothness": 1 + 2 * g}
        whole = {
            "grad_norm": 5.0 + step,
            "smoothness": 3.0,
            "kappa": 0.5,
            "noise": 1.0,
            "secants": [3.0, 3.0],
        }
        trace.append({"step": step, **whole, "lr": 0.1, "layers": {"a/b": own, "c": {"grad_norm": g}}})
    return trace


def test_samples_of_a_layer_have_its_own_norms_and_nothing_of_the_model():
    samples = usable_samples(layered(), layer="a/b")
    np.testing.assert_allclose(samples.smoothness, 1 + 2 * samples.grad_norm)
    np.testing.assert_allclose(samples.kappa, samples.smoothness * 0.1)
    assert np.isnan(samples.noise).all()
    assert np.isnan(samples.secants).all()
    assert samples.lr[0] == 0.1


def test_a_layer_is_fitted_in_its_own_norm():
    fit = fit_smoothness(layered(), layer="a/b")
    assert (fit.L0, fit.L1) == (pytest.approx(1.0), pytest.approx(2.0))
    assert (fit.layer, fit.within.missing.kind) == ("a/b", "one-layer")
    assert "of layer a/b" in fit.details()


def test_an_unmeasured_layer_is_refused_with_the_names_of_the_others():
    with pytest.raises(ValueError, match=r"Measured: a/b, c"):
        usable_samples(layered(), layer="d")
    with pytest.raises(ValueError, match="got 0 of 60"):
        usable_samples(layered(), layer="c")
    with pytest.raises(ValueError, match="No row has layers"):
        usable_samples(make_trace(np.ones(20), np.ones(20)), layer="a")


def test_noise_scale_is_the_quotient_of_means():
    g, ell = simulated(np.random.default_rng(0), num=40)
    columns = {"grad_variance": [8.0, 72.0] * 20, "grad_signal": [-1.0, 11.0] * 20}
    fit = fit_smoothness(make_trace(g, ell, **columns), control=False)
    assert fit.noise_scale == pytest.approx(40 / 5)
    assert "noise scale" in fit.details()
    assert fit_smoothness(make_trace(g, ell), control=False).noise_scale is None
    columns["grad_signal"] = [-1.0, 0.5] * 20
    assert fit_smoothness(make_trace(g, ell, **columns), control=False).noise_scale == math.inf


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


@pytest.mark.parametrize("size", [5e-324, 1e-200, 1e200])
def test_numbers_whose_squares_are_not_finite_are_skipped(size):
    g, ell = simulated(np.random.default_rng(0), num=60)
    with pytest.raises(ValueError, match="got 0 of 60"):
        fit_smoothness(make_trace(size * g, size * ell, step_norm=0.1, lr=0.1))


def test_trace_that_cannot_be_fitted_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"probe.watch"):
        fit_smoothness(Trace())
    with pytest.raises(ValueError, match="got 1 of 1"):
        fit_smoothness(make_trace([1.0], [1.0]))
    trace = make_trace(np.full(30, np.nan), np.ones(30))
    trace.append({"step": 99, "status": NONFINITE})
    with pytest.raises(ValueError, match=r"1 marked.* 30 without"):
        fit_smoothness(trace)
    g, ell = simulated(np.random.default_rng(0), num=30)
    for bad in ({"quantile": 1.0}, {"level": 0.0}, {"estimator": "sharpness"}):
        with pytest.raises(ValueError, match=f"`{next(iter(bad))}` must be"):
            fit_smoothness(make_trace(g, ell), **bad)


def counted(fit):
    """The numbers in the warning of estimates that had not converged; empty if there is none."""
    texts = [warning.text for warning in fit.warnings if warning.kind == "unconverged"]
    return [int(number) for text in texts for number in re.findall(r"\d+", text)]


@pytest.mark.parametrize("kind", ["spectral", "local"])
def test_estimates_that_had_not_converged_are_left_out_and_counted(kind):
    g, ell = simulated(np.random.default_rng(0), num=60)
    late = np.arange(60) % 3 == 0
    columns = {f"{kind}_smoothness": np.where(late, 0.01, ell), f"{kind}_converged": ~late}
    trace = make_trace(g, ell, **columns)
    fit = fit_smoothness(trace, estimator=f"{kind}_smoothness", control=False)
    assert (fit.num_points, fit.num_skipped) == (40, 20)
    assert counted(fit) == [20, 60]
    troubled = Trace()
    for row in trace:
        troubled.append({**row, "status": "ok" if row["step"] >= 6 else "failed"})
    fit = fit_smoothness(troubled, estimator=f"{kind}_smoothness", control=False)
    assert counted(fit) == [18, 54]
    assert counted(fit_smoothness(trace, control=False)) == []
    trace = make_trace(g, ell, **columns | {f"{kind}_converged": 0})
    with pytest.raises(ValueError, match="60 whose estimate had not converged"):
        fit_smoothness(trace, estimator=f"{kind}_smoothness")
