import math

import numpy as np
import pytest

from curvestep.fit.fit import fit_smoothness
from curvestep.fit.samples import evenly_spaced, usable_samples
from curvestep.trace.columns import clip_norms
from curvestep.trace.history import typical
from curvestep.trace.trace import Trace
from tests.fit.traces import make_trace


def test_a_recorded_coefficient_says_what_was_clipped_and_at_which_norm():
    g = np.array([0.5, 1.0, 4.0])
    norms = clip_norms({"coefficient": np.minimum(1.0, 1.0 / g), "grad_norm": g})
    np.testing.assert_array_equal(norms, [math.inf, math.inf, 1.0])
    assert typical(norms, missing=math.inf) == 1.0
    assert typical(norms[:2], missing=math.inf) == math.inf


def test_without_a_coefficient_the_step_length_says_what_was_clipped():
    g = np.array([0.5, 1.0, 4.0, 2.0, 2.0])
    length = 0.1 * np.array([0.5, 1.0, 1.0, math.nan, 2.0])
    norms = clip_norms({"grad_norm": g, "step_norm": length, "lr": [0.1, 0.1, 0.1, 0.1, math.nan]})
    np.testing.assert_allclose(norms, [math.inf, math.inf, 1.0, math.nan, math.nan])


def test_a_coefficient_outweighs_the_step_length():
    """Momentum makes steps longer or shorter than lr·‖g‖: that is no clipping."""
    assert clip_norms({"coefficient": 1.0, "grad_norm": 4.0, "step_norm": 0.1, "lr": 0.1}) == math.inf


@pytest.mark.parametrize(
    ("optimizer", "norm"), [("SGD", 1.0), ("", 1.0), ("AdamW", math.nan), ("RAdam", math.nan)]
)
def test_the_length_of_adams_steps_says_nothing_of_clipping(optimizer, norm):
    row = {"step": 0, "grad_norm": 4.0, "step_norm": 0.1, "lr": 0.1}
    by_header, by_row = Trace(header={"optimizer": optimizer}), Trace()
    by_header.append(row)
    by_row.append({**row, "optimizer": optimizer})
    for trace in (by_header, by_row):
        np.testing.assert_array_equal(trace.clip_norm, [norm])


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


def test_a_layer_that_was_not_measured_is_refused_with_the_names_of_the_others():
    with pytest.raises(ValueError, match=r"Measured: a/b, c"):
        usable_samples(layered(), layer="d")
    with pytest.raises(ValueError, match="got 0 of 60"):
        usable_samples(layered(), layer="c")
    with pytest.raises(ValueError, match="No row has layers"):
        usable_samples(make_trace(np.ones(20), np.ones(20)), layer="a")
