import math

import numpy as np
import pytest

from curvestep.fit.samples import (
    History,
    best_setting,
    clipped_share,
    evenly_spaced,
    final_loss,
    typical,
    usable_samples,
)
from curvestep.steps import clip_norms
from curvestep.trace.schema import NONFINITE
from curvestep.trace.trace import Trace
from tests.fit.traces import make_trace


@pytest.mark.parametrize(
    ("steps", "last"),
    [
        (range(1, 401), range(381, 401)),  # a twentieth
        (range(10_000), range(9950, 10_000)),  # fifty at most
        (range(0, 400, 5), range(380, 400, 5)),  # steps, not rows, are counted
        ([7], [7]),
    ],
)
def test_the_final_loss_is_the_mean_over_the_last_steps_in_any_order(steps, last):
    order = np.random.default_rng(0).permutation(steps)
    assert final_loss(steps, steps) == final_loss(order, order) == np.mean(last)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_run_that_ends_without_a_finite_loss_has_no_final_loss(bad):
    assert math.isnan(final_loss(range(40), [1.0] * 39 + [bad]))
    assert final_loss(range(40), [bad] + [1.0] * 39) == 1.0


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


def test_rows_appended_after_the_fit_do_not_change_its_samples():
    trace = make_trace(np.arange(1.0, 41.0), np.ones(40), loss=1.0)
    samples = usable_samples(trace)
    trace.append({"step": 99, "grad_norm": 1.0, "smoothness": 1.0, "loss": math.nan})
    assert len(samples.history.loss) == 40
    assert samples.history.ends_finite


@pytest.mark.parametrize(
    "last", [{"loss": math.nan}, {"loss": 1.0, "status": NONFINITE}], ids=["loss", "status"]
)
def test_a_run_that_ends_not_finite_is_known(last):
    trace = make_trace(np.arange(1.0, 41.0), np.ones(40), loss=1.0)
    assert History.of(trace).ends_finite
    trace.append({"step": 99, "grad_norm": 1.0, **last})
    assert not History.of(trace).ends_finite
    assert not History.of(Trace()).ends_finite


@pytest.mark.parametrize("num", [0, 1, 7, 8, 9, 100])
def test_evenly_spaced_rows_are_at_most_so_many(num):
    rows = np.arange(num)[evenly_spaced(num, most=8)]
    assert len(rows) <= 8
    assert len(rows) >= min(num, 4)
    assert len(set(np.diff(rows))) <= 1


def test_no_setting_without_a_finite_score_is_best():
    with pytest.raises(ValueError, match="no best one"):
        best_setting({1: [math.inf], 2: [1.0, math.nan]})


def test_a_row_counts_for_the_steps_since_the_one_before():
    steps, norms = np.array([0.0, 1.0, 2.0, 12.0, 22.0]), np.array([1.0, 1.0, 1.0, math.inf, math.nan])
    assert clipped_share(steps, norms) == pytest.approx(3 / 13)
    assert math.isnan(clipped_share(steps[-1:], norms[-1:]))
