"""Columns of rows: numbers, lists, words and logs; and where steps were clipped."""

import math

import numpy as np
import pytest

from curvestep.trace.columns import clip_norms
from curvestep.trace.history import typical
from curvestep.trace.schema import FAILED, OK
from curvestep.trace.trace import Trace
from tests.trace.test_trace import filled


@pytest.fixture
def path(tmp_path):
    return tmp_path / "t.jsonl"


def test_columns_are_views_and_cannot_be_written():
    trace = filled(steps=range(1000))
    a, b = trace.column("loss"), trace.column("loss")
    assert np.shares_memory(a, b)
    assert a.dtype == np.float64
    with pytest.raises(ValueError, match="read-only"):
        a[0] = 1.0
    before = a.copy()
    for step in range(1000, 3000):
        trace.append({"step": step, "loss": -1.0})
    np.testing.assert_array_equal(a, before)
    assert trace.column("loss")[999:1001].tolist() == [1 / 1000, -1.0]
    assert np.isnan(trace.column("grad_norm")[1000:]).all()


def test_layers_are_columns_of_their_own(path):
    with Trace(path) as trace:
        trace.append({"step": 0, "layers": {"encoder.0": {"smoothness": 2.0}, "a/b": {"smoothness": 3.0}}})
    loaded = Trace.load(path)
    assert loaded.column("layers/encoder.0/smoothness").tolist() == [2.0]
    assert loaded.column("layers/a/b/smoothness").tolist() == [3.0]
    assert loaded[0]["layers"]["a/b"] == {"smoothness": 3.0}


def test_lists_are_two_dimensional_columns(path):
    with Trace(path, header={"fractions": [0.5, 1.0]}) as trace:
        trace.append({"step": 0, "secants": [2.0, 1], "grad_norms": [math.inf, math.nan]})
        trace.append({"step": 1})
        trace.append({"step": 2, "secants": [3.0]})
    for each in (trace, Trace.load(path)):
        assert each.fractions == (0.5, 1.0)
        np.testing.assert_array_equal(each.column("secants"), [[2, 1], [np.nan, np.nan], [3, np.nan]])
        np.testing.assert_array_equal(each.column("grad_norms")[0], [np.inf, np.nan])
        assert [row["secants"] for row in each] == [[2.0, 1], None, [3.0]]
        assert each.names == ["step", "secants", "grad_norms"]


def test_a_trace_without_lists_or_fractions_has_columns_of_nan():
    trace = filled()
    assert trace.fractions == ()
    assert trace.column("secants").shape == (3, 0)
    known = Trace(header={"fractions": [0.5, 1.0]})
    known.append({"step": 0})
    assert np.isnan(known.column("secants")).tolist() == [[True, True]]
    unknown = Trace(header={"fractions": "half"})
    unknown.append({"step": 0, "secants": [1.0, 2.0, 3.0]})
    unknown.append({"step": 1, "secants": "none"})
    assert unknown.fractions == ()
    np.testing.assert_array_equal(unknown.column("secants"), [[1, 2, 3], [np.nan] * 3])


def test_rows_without_fractions_have_those_of_the_header():
    trace = Trace(header={"fractions": [0.5, 1.0]})
    trace.append({"step": 0})
    trace.append({"step": 1, "fractions": [0.25]})
    np.testing.assert_array_equal(trace.column("fractions"), [[0.5, 1.0], [0.25, np.nan]])


def test_a_log_that_is_none_does_not_stop_reading():
    trace = Trace()
    for step, log in enumerate(["none", [3], [{"layer": "a"}], 7.0, None, [{"step": 9}]]):
        trace.append({"step": step, "spikes": log})
    assert trace.column("spikes").tolist() == [None] * 5 + [[{"step": 9}]]
    assert trace.spikes == [{"step": 9}]


def test_ok_marks_the_rows_measured_without_trouble():
    trace = Trace()
    for step, status in enumerate([OK, "nonfinite", None, FAILED + "no tensor", "zero-step"]):
        trace.append({"step": step, "status": status})
    assert trace.ok.tolist() == [True, False, True, False, False]
    assert trace.column("status")[3] == "failed: no tensor"


def test_word_in_a_number_column_does_not_turn_it_into_words():
    trace = filled()
    trace.append({"step": 3, "loss": "lost"})
    assert trace.column("loss").dtype == np.float64
    assert np.isnan(trace.column("loss")[3])
    assert trace[3]["loss"] == "lost"


def test_a_column_that_is_no_longer_measured_is_still_read(tmp_path):
    path = tmp_path / "old.jsonl"
    with Trace(path) as trace:
        trace.append({"step": 0, "optimizer_spectral": 3.0, "optimizer_converged": True})
        trace.append({"step": 1})
    old = Trace.load(path)
    assert old[0]["optimizer_spectral"] == 3.0
    np.testing.assert_array_equal(old.column("optimizer_spectral"), [3.0, np.nan])
    np.testing.assert_array_equal(old.column("optimizer_converged"), [1.0, np.nan])


def test_a_row_says_whether_it_was_clipped_and_older_rows_are_inferred():
    trace = Trace()
    trace.append({"step": 0, "grad_norm": 4.0, "coefficient": 0.5, "clipped": True})
    trace.append({"step": 1, "grad_norm": 4.0, "coefficient": 0.5, "clipped": False})
    trace.append({"step": 2, "grad_norm": 4.0, "coefficient": 0.5})
    trace.append({"step": 3, "grad_norm": 4.0, "step_norm": 1.0, "lr": 0.5})
    trace.append({"step": 4, "grad_norm": 4.0})
    np.testing.assert_array_equal(trace.clip_norm, [2.0, np.inf, 2.0, 2.0, np.nan])


@pytest.mark.parametrize(("values", "column"), [
    ([1, None, 2.5], [1.0, math.nan, 2.5]),
    ([1, "a", 2, "b"], [None, "a", None, "b"]),
    (["a", [1], True], ["a", [1], None]),
])  # fmt: skip
def test_a_key_of_ones_own_has_numbers_or_words(values, column):
    trace = Trace()
    for step, value in enumerate(values):
        trace.append({"step": step, "mine": value})
    np.testing.assert_array_equal(trace.column("mine"), np.fromiter(column, trace.column("mine").dtype))


def test_columns_and_clip_norms_follow_the_rows():
    trace = Trace()
    for step in range(3):
        trace.append({"step": step, "grad_norm": 4.0, "coefficient": 0.5})
        assert trace.clip_norm.tolist() == [2.0] * (step + 1)
        assert trace.column("step").tolist() == list(range(step + 1))
    trace.cut(1)
    assert trace.clip_norm.tolist() == [2.0]


# Clipped steps


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
