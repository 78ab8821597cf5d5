import math

import numpy as np
import pytest

from curvestep.optimizer_family import Family
from curvestep.trace.history import (
    best_setting,
    clipped_share,
    ends_finite,
    final_loss,
    optimizer_family,
    task_facts,
)
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


@pytest.mark.parametrize(
    "last", [{"loss": math.nan}, {"loss": 1.0, "status": NONFINITE}], ids=["loss", "status"]
)
def test_a_run_that_ends_not_finite_is_known(last):
    trace = make_trace(np.arange(1.0, 41.0), np.ones(40), loss=1.0)
    assert ends_finite(trace)
    trace.append({"step": 99, "grad_norm": 1.0, **last})
    assert not ends_finite(trace)
    assert not ends_finite(Trace())


def test_no_setting_without_a_finite_score_is_best():
    with pytest.raises(ValueError, match="no best one"):
        best_setting({1: [math.inf], 2: [1.0, math.nan]})


def test_a_row_counts_for_the_steps_since_the_one_before():
    steps, norms = np.array([0.0, 1.0, 2.0, 12.0, 22.0]), np.array([1.0, 1.0, 1.0, math.inf, math.nan])
    assert clipped_share(steps, norms) == pytest.approx(3 / 13)
    assert math.isnan(clipped_share(steps[-1:], norms[-1:]))


def test_facts_of_a_task_are_those_of_the_header_or_of_the_middle_row():
    trace = Trace(header={"model": "LSTM"})
    for step, size in enumerate((7, None, 32, 32, 32)):
        trace.append({"step": step, "batch_size": size, "optimizer": "ClippedSGD"})
    assert task_facts(trace) == {"model": "LSTM", "optimizer": "SGD", "batch_size": "32"}


@pytest.mark.parametrize(("header", "row", "family"), [
    ({"optimizer_family": "adam"}, {}, Family.ADAM),
    ({"optimizer": "Lion"}, {"optimizer": "SGD"}, Family.SIGN),
    ({}, {"optimizer": "AdamW"}, Family.ADAM),
    ({}, {}, Family.UNKNOWN),
])  # fmt: skip
def test_the_family_of_an_older_trace_follows_from_its_names(header, row, family):
    trace = Trace(header=header)
    trace.append({"step": 0})
    trace.append({"step": 1, **row})
    assert optimizer_family(trace) is family
