"""Facts of a run, against runs solved by hand."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from curvestep import ClippedSGD, SmoothnessProbe
from curvestep.advice.advice import advise
from curvestep.advice.outcome import outcome_of
from curvestep.optimizer_family import Family
from tests.advice.runs import falling, trace_of


def descended(lr, *, L=4.0, steps=12, schedule=None, **options):
    """Facts of descent on L x²/2: κ is lr·L, and a step achieves 1 − lr·L/2 of its promise."""
    model = nn.ParameterList([nn.Parameter(torch.ones(3, dtype=torch.float64))])
    options = {"max_norm": math.inf, **options}
    optimizer = ClippedSGD(model.parameters(), lr=lr, **options)
    probe = SmoothnessProbe(model, every=1)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * (schedule[step] if schedule else 1.0)

        def loss_fn():
            return 0.5 * L * model[0].square().sum()

        loss = loss_fn()
        loss.backward()
        with probe(loss_fn, loss=loss):
            optimizer.step()
        optimizer.zero_grad()
    return outcome_of(probe.trace)


@pytest.mark.parametrize(("peak", "named"), [(0.12, 0.12), (0.3, 0.1), (0.05, 0.1), (None, 0.1)])
def test_the_peak_that_was_set_is_named_where_measured_steps_come_near_it(peak, named):
    trace = trace_of(falling(), header={"peak_lr": peak})
    assert outcome_of(trace).lr == named
    assert advise(trace).lr == named


@pytest.mark.parametrize("lr", [0.01, 0.1, 0.2])
def test_kappa_efficiency_and_start_of_a_quadratic(lr):
    run = descended(lr)
    assert run.kappa == pytest.approx(4 * lr)
    assert run.efficiency == pytest.approx(1 - 2 * lr)
    assert run.start_factor == pytest.approx(1 / (4 * lr))
    assert run.agreement == pytest.approx(1.0)
    assert (run.family, run.lr, run.scheduled) == (Family.SGD, lr, False)
    assert (run.num_rows, run.nonfinite_at, run.in_eval_mode, run.clipped) == (12, None, False, 0.0)


def test_the_start_is_held_against_the_peak_of_a_schedule():
    run = descended(0.1, schedule=[0.1, 0.2, 0.5, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.1, 0.05])
    assert (run.lr, run.scheduled) == (0.1, True)
    assert run.start_factor == pytest.approx(2.5)
    # Of the six rows with the larger lr the last five: 1.0, 1.0, 1.0, 0.8, 0.6.
    assert run.kappa == pytest.approx(0.4)


def test_the_effect_of_steps_is_that_of_the_later_half_near_the_peak():
    shares = [0.1] * 10 + [1.0] * 8 + [0.6] * 12
    run = descended(0.1, steps=30, schedule=shares)
    # The twenty rows from step 10 to 29 have the larger lr; the later half of them is at 0.6.
    assert run.kappa == pytest.approx(0.6 * 0.4)


def test_few_rows_late_in_a_run_are_its_last_loss():
    # The probe's own choice: ten rows soon, then one far away.
    trace = trace_of(falling(10, last=1.5))
    trace.append({**trace_of([0.4])[0], "step": 105})
    run = outcome_of(trace)
    assert run.last_loss == 0.4
    assert run.rise == pytest.approx(-0.8)


@pytest.mark.parametrize(("row", "factor"), [
    ({"kappa": 9.0, "fractions": [0.5, 1.0], "secants": [90.0, 90.0]}, 0.5 / 4.5),  # in proportion
    ({"kappa": 16.0, "fractions": [0.5, 1.0], "secants": [80.0, 160.0]}, 0.25),  # as the square
    ({"kappa": 0.9, "loss_after": 1.9}, None),  # works: it goes on in proportion
    ({"kappa": 0.9, "loss_after": 1.999}, 0.1),  # a hundredth of what the slope promised
])  # fmt: skip
def test_the_start_allows_steps_that_lower_the_loss_and_keep_the_gradient(row, factor):
    trace = trace_of([])
    trace.append({**trace_of([2.0])[0], **row})
    for k, loss in enumerate(falling(20)):
        trace.append({**trace_of([loss])[0], "step": 5 * k + 5, "kappa": 0.9, "loss_after": loss - 0.09})
    expected = 1 / 0.9 if factor is None else factor
    assert outcome_of(trace).start_factor == pytest.approx(expected)


def test_the_start_is_held_against_steps_that_momentum_has_built_up():
    # A first step of κ = 4 ends the start there; it is a tenth of what momentum makes of it.
    assert descended(1.0, momentum=0.9).start_factor == pytest.approx(0.1 / 4)


def test_clipping_has_a_share_and_a_threshold():
    run = descended(0.01, max_norm=5.0)
    norms = 4 * math.sqrt(3) * 0.96 ** np.arange(12)
    assert run.max_norm == pytest.approx(5.0)
    assert 0 < run.clipped < 1 or norms.min() > 5.0


def test_the_floor_of_clipping_needs_noise():
    quiet = outcome_of(trace_of(falling(), clipped=True, coefficient=0.5))
    noisy = outcome_of(trace_of(falling(), clipped=True, coefficient=0.5, noise=2.0))
    assert math.isnan(quiet.floor)
    assert noisy.floor == pytest.approx(1.5)  # σ − max_norm at a threshold of 0.5


def test_the_loss_curve():
    run = outcome_of(trace_of([2.0, 5.0, *[1.0, 1.2] * 9, None, 1.1]))
    assert (run.first_loss, run.highest_loss, run.num_losses) == (2.0, math.inf, 21)
    assert run.last_loss == pytest.approx(np.mean([1.2, 1.0, 1.2, 1.1, 1.0]))
    assert (run.peak_rise, run.end_rise) == (1.5, pytest.approx((1.1 - 0.07 - 2.0) / 2))
    assert run.rise == pytest.approx((run.last_loss - 2.0) / 2)
    assert (run.nonfinite_at, run.finite_until) == (101, 96)  # the rows of steps 100 and 95, counted from one


@pytest.mark.parametrize(("losses", "stood_still"), [
    (falling(), False),
    ([2.0, 2.1] * 15, True),  # each step takes 0.07 off its own batch
    (falling()[::-1], True),
])  # fmt: skip
def test_a_fall_is_told_from_noise(losses, stood_still):
    assert outcome_of(trace_of(losses)).stood_still == stood_still


def test_short_steps_promise_no_fall_that_could_be_seen():
    with_noise = [2.0 + 0.5 * (k % 2) for k in range(30)]
    trace = trace_of([])
    for k, loss in enumerate(with_noise):
        trace.append(
            {"step": k, "loss": loss, "loss_after": loss - 1e-4, "grad_norm": 1.0, "step_norm": 1e-4}
        )
    assert not outcome_of(trace).stood_still


def test_the_last_loss_of_a_long_run_is_that_of_its_last_tenth():
    assert facts(trace_of([*[2.0] * 90, *[1.0] * 5, *[0.5] * 5])).last_loss == pytest.approx(0.75)


@pytest.mark.parametrize(("last", "scheduled"), [(0.095, False), (0.085, True)])
def test_an_lr_that_hardly_changes_is_no_schedule(last, scheduled):
    trace = trace_of([])
    for k, row in enumerate(trace_of(falling())):
        trace.append({**row, "lr": 0.1 if k < 20 else last})
    assert facts(trace).scheduled == scheduled


def test_rows_without_lr_count_as_those_at_its_peak():
    trace = trace_of([])
    for k, row in enumerate(trace_of(falling())):
        trace.append({**row, "lr": 0.1 if k < 15 else None, "kappa": 0.3 if k < 15 else 0.9})
    assert facts(trace).kappa == 0.9


def test_rows_without_any_loss_are_not_lost():
    run = outcome_of(trace_of([None] * 12))
    assert (run.num_losses, run.nonfinite_at, run.num_rows) == (0, None, 12)


def test_a_run_that_begins_later_has_no_start():
    trace = trace_of(falling(), every=5)
    trace.cut(100)
    later = trace_of([])
    for row in list(trace)[3:]:
        later.append(row)
    assert math.isnan(outcome_of(later).start_factor)


@pytest.mark.parametrize("key", ["optimizer", "optimizer_family"])
def test_older_headers_leave_the_optimizer_to_the_rows(key):
    trace = trace_of(falling(), optimizer="ClippedAdamW")
    for name in ("optimizer", "optimizer_family"):
        trace.header.pop(name)
    assert outcome_of(trace).family is Family.ADAM


def facts(trace):
    return outcome_of(trace)


def test_a_gradient_that_is_not_finite_loses_the_run_but_no_failed_row():
    row = trace_of([1.0])[0]
    failed, broken = trace_of(falling(12)), trace_of(falling(12))
    failed.append({**row, "step": 60, "loss": None, "status": "failed: out of memory"})
    broken.append({**row, "step": 60, "status": "nonfinite"})
    assert (facts(failed).nonfinite_at, facts(failed).failure) == (None, "out of memory")
    assert facts(broken).nonfinite_at == 61


def test_without_trainings_own_loss_gradients_at_both_ends_give_the_fall():
    # Slope 1 and curvature 5 over a step of 0.1: 0.1 - 5 · 0.01 / 2 of a promised 0.1.
    trace = trace_of([])
    for k, loss in enumerate(falling(12)):
        trace.append({**trace_of([loss])[0], "step": k, "loss_after": loss, "curvature": 5.0})
    assert facts(trace).efficiency == pytest.approx(0.75)


def test_the_promise_of_a_step_is_that_along_the_gradient():
    run = facts(trace_of(falling(), cosine=0.5))
    assert (run.agreement, run.efficiency) == (0.5, pytest.approx(0.07 / 0.05))


def test_an_older_trace_of_normalized_descent_keeps_its_offset():
    header = {"optimizer": "NormalizedSGD", "optimizer_family": "normalized", "offset": 0.25}
    run = facts(trace_of(falling(), header=header, coefficient=0.5, clipped=True))
    assert (run.family, run.threshold, run.max_norm, run.clipped) == (Family.SGD, "offset", 0.25, 1.0)


def test_older_rows_have_their_fractions_in_the_header_and_no_kappa():
    header = {"fractions": [0.5, 1.0]}
    run = facts(trace_of(falling(), header=header, secants=[40.0, 40.0], kappa=None))
    assert run.start_factor == pytest.approx(0.5 / 2)
    assert run.kappa == pytest.approx(0.5)  # smoothness 5 over a step of 0.1 with a gradient of 1


def test_eval_mode_is_read_from_the_header():
    assert facts(trace_of(falling(), header={"training_mode": False})).in_eval_mode
    assert not facts(trace_of(falling(), header={"training_mode": True})).in_eval_mode
