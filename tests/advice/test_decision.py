"""The table of conditions: each holds for its example, and the answer is another one without it."""

import math

import pytest

from curvestep.advice import decision
from curvestep.advice.advice_words import verdict_on
from curvestep.advice.decision import (
    LARGE_FACTOR,
    LR_FACTOR,
    MIN_PROGRESS,
    STABLE_SHARE,
    TABLE,
    UNKNOWN_START,
    decide,
    times_longer,
)
from tests.advice.runs import outcome

LOST = {"nonfinite_at": 16, "kappa": 5.0}
SHORT = {"kappa": 0.001, "efficiency": 0.999, "start_factor": 500.0}
# For each condition: facts, action, factor on lr (None for no number).
EXAMPLES = {
    "no-rows": ({"num_rows": 0, "num_losses": 0}, "cannot tell", None),
    "no-loss": ({"num_losses": 0}, "cannot tell", None),
    "bad-batch": ({"nonfinite_at": 16}, "data", None),
    "not-finite": ({**LOST, "start_factor": 2.0}, "diverged", 1 / 3),
    "rose-far": ({"last_loss": 8.0, "start_factor": 0.04}, "diverged", 0.02),
    "no-step": ({"num_rows": 0, "num_losses": 30}, "cannot tell", None),
    "failed-rows": ({"num_rows": 3, "num_losses": 30, "failure": "the loss is random"}, "cannot tell", None),
    "few-rows": ({"num_rows": 9, "num_losses": 9}, "cannot tell", None),
    "no-lr": ({"lr": math.nan}, "cannot tell", None),
    "eval-mode": ({"in_eval_mode": True}, "cannot tell", None),
    "rose-and-stuck": ({"highest_loss": 9.0, "last_loss": 1.5}, "stuck", 1 / 3),
    "long-and-stuck": ({"last_loss": 2.2, "start_factor": 0.4}, "stuck", 0.2),
    "inefficient": ({"efficiency": 0.05, "last_loss": 1.5}, "lower", 1 / 3),
    "long-first-steps": ({"start_factor": 0.01, "efficiency": 0.4}, "lower", 0.02),
    "no-progress": ({"last_loss": 2.25, "stood_still": True}, "stuck", None),
    "short-steps": ({**SHORT}, "raise", LARGE_FACTOR),
    "short-clipped-steps": (
        {**SHORT, "stable_lr": 0.15, "clipped": 1.0, "max_norm": 0.1},
        "raise",
        1.0,
    ),
    "no-sign": ({}, "no sign", 1.0),
}  # fmt: skip


def lr_after(run):
    return decide(run).next_lr(run)


def test_every_condition_has_an_example():
    assert list(EXAMPLES) == [line.kind for line in TABLE]


@pytest.mark.parametrize("kind", EXAMPLES)
def test_a_condition_leads_to_its_action(kind):
    facts, action, factor = EXAMPLES[kind]
    run = outcome(**facts)
    assert (decide(run).kind, decide(run).action) == (kind, action)
    assert lr_after(run) == (None if factor is None else pytest.approx(factor * 0.1))
    widened = LARGE_FACTOR if kind == "short-clipped-steps" else 1.0
    assert decide(run).next_max_norm(run) == widened * run.max_norm


@pytest.mark.parametrize("kind", list(EXAMPLES)[:-1])
def test_without_its_condition_the_answer_is_another_one(kind, monkeypatch):
    run = outcome(**EXAMPLES[kind][0])
    said = verdict_on(decide(run), run)
    monkeypatch.setattr(decision, "TABLE", [line for line in TABLE if line.kind != kind])
    assert verdict_on(decide(run), run) != said


def test_what_is_not_known_holds_for_nothing():
    unknown = dict.fromkeys(("kappa", "efficiency", "start_factor", "last_loss", "first_loss"), math.nan)
    assert decide(outcome(**unknown)).kind == "no-sign"
    assert lr_after(outcome(start_factor=math.nan, **LOST)) == pytest.approx(0.1 * UNKNOWN_START)
    assert lr_after(outcome(start_factor=math.nan, kappa=0.01, efficiency=0.9)) == pytest.approx(0.1 * 3)
    wasteful = EXAMPLES["inefficient"][0]
    assert lr_after(outcome(start_factor=math.nan, **wasteful)) == pytest.approx(0.1 / LR_FACTOR)


@pytest.mark.parametrize(("kappa", "waste", "start", "factor"), [
    (0.1, 0.03, 5.0, 5.0),
    (0.2, 0.01, 9.0, 5.0),
    (0.001, 1e-4, 900.0, LARGE_FACTOR),
])  # fmt: skip
def test_short_steps_grow_to_the_smallest_of_three_gauges(kappa, waste, start, factor):
    run = outcome(kappa=kappa, efficiency=1 - waste, start_factor=start)
    assert lr_after(run) == pytest.approx(0.1 * factor, rel=1e-6)


def test_gauges_of_a_good_step_are_about_one():
    assert times_longer(outcome(kappa=1.0, efficiency=0.7, start_factor=1.0)) == pytest.approx(1.0)
    assert times_longer(outcome(kappa=0.0, efficiency=1.2, start_factor=30.0)) == pytest.approx(30.0)


@pytest.mark.parametrize(("facts", "factor"), [
    ({}, LARGE_FACTOR),
    ({"stable_lr": 0.5}, 5 * STABLE_SHARE),
    ({"stable_lr": 0.25}, 1.0),  # too little room: no sign
    ({"stable_lr": math.nan}, LR_FACTOR),
    ({"from_start": False}, 1.0),
    ({"from_start": False, "has_spectral": True}, LR_FACTOR),
    ({"from_start": False, "has_spectral": True, "stable_lr": 0.5}, 5 * STABLE_SHARE),
])  # fmt: skip
def test_lr_is_raised_no_further_than_the_rows_allow(facts, factor):
    assert lr_after(outcome(**SHORT, **facts)) == pytest.approx(0.1 * factor)


@pytest.mark.parametrize("kind", ["not-finite", "rose-far", "rose-and-stuck", "inefficient"])
def test_a_lower_lr_is_stable_too(kind):
    assert lr_after(outcome(**EXAMPLES[kind][0], stable_lr=1e-4)) == pytest.approx(1e-4)


def test_tiny_steps_with_momentum_and_batch_norm_are_raised():
    # The gradient changes by 0.18 of its norm, and steps achieve 99 % of what they promise.
    run = outcome(kappa=0.18, efficiency=0.99, start_factor=6.0)
    assert lr_after(run) == pytest.approx(0.1 / 0.18)


@pytest.mark.parametrize("facts", [
    {"last_loss": 8.0},
    {"highest_loss": 9.0, "last_loss": 1.5},
    SHORT,
    {"last_loss": 2.25, "stood_still": True},
])  # fmt: skip
def test_a_loss_that_is_no_progress_decides_nothing(facts):
    assert decide(outcome(**facts)).kind != "no-sign"
    assert decide(outcome(**facts), progress=False).kind == "no-sign"
    assert decide(outcome(starts_below_zero=True, **facts)).kind == "no-sign"


@pytest.mark.parametrize("kind", ["bad-batch", "not-finite", "inefficient", "eval-mode"])
def test_what_is_unstable_is_said_without_progress_too(kind):
    assert decide(outcome(**EXAMPLES[kind][0]), progress=False).kind == kind


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_progress_is_measured_for_negative_losses_too(sign):
    first = 2.0 * sign
    facts = {"first_loss": first, "highest_loss": first, "stood_still": True}
    stuck = outcome(last_loss=first - 0.9 * (1 - MIN_PROGRESS) * 2.0, **facts)
    fell = outcome(last_loss=first - 1.1 * (1 - MIN_PROGRESS) * 2.0, **facts)
    assert (decide(stuck).kind, decide(fell).kind) == ("no-progress", "no-sign")


def test_a_loss_that_rose_before_it_was_not_finite_is_no_bad_batch():
    assert decide(outcome(nonfinite_at=16, last_loss=2.5)).kind == "not-finite"


def test_a_fall_that_noise_does_not_explain_is_no_standstill():
    # A fine-tuned model starts near its end.
    assert decide(outcome(first_loss=3.0, last_loss=2.8, stood_still=False)).action == "no sign"


def test_a_run_that_was_ended_because_of_its_last_step_diverged():
    assert decide(outcome(num_rows=4, num_losses=4, last_loss=2.4, end_loss=9.0)).kind == "rose-far"


def test_a_warm_up_may_take_the_peak_beyond_what_the_start_allowed():
    assert decide(outcome(efficiency=0.4, start_factor=0.2)).action == "lower"
    assert decide(outcome(efficiency=0.4, start_factor=0.2, scheduled=True)).action == "no sign"
    assert decide(outcome(efficiency=0.4, start_factor=0.05, scheduled=True)).action == "lower"


def test_the_first_loss_of_rows_that_begin_later_is_no_measure_of_divergence():
    assert decide(outcome(last_loss=8.0, from_start=False)).action == "no sign"
    assert decide(outcome(last_loss=80.0, from_start=False)).action == "diverged"


@pytest.mark.parametrize("start", [1e-5, 0.3])
def test_a_lost_run_is_lowered_to_half_of_what_the_start_allowed(start):
    assert lr_after(outcome(**LOST, start_factor=start)) == pytest.approx(0.1 * start / 2)


@pytest.mark.parametrize(("facts", "kind"), [
    ({"num_rows": 0, "num_losses": 3}, "few-rows"),  # too early to say that nothing moves
    ({"failure": "the loss is random"}, "no-sign"),  # enough rows are left
    ({"highest_loss": 9.0}, "no-sign"),  # it came back all the way
    ({"highest_loss": 9.0, "last_loss": 1.1}, "no-sign"),
    ({"highest_loss": 5.75, "last_loss": 1.5}, "no-sign"),  # it rose to less than three times the first
    ({"start_factor": 0.7, "efficiency": 0.4}, "no-sign"),  # rather long steps, but the loss fell
    ({"start_factor": 0.2, "efficiency": 0.6}, "no-sign"),  # it recovered
    ({"start_factor": 0.05, "efficiency": 0.6}, "long-first-steps"),
    ({"start_factor": 0.2, "efficiency": 0.6, "last_loss": 1.5}, "long-first-steps"),
    ({"start_factor": 9.0, "kappa": 0.4}, "no-sign"),
    ({"efficiency": 0.15, "last_loss": 1.5}, "no-sign"),
    ({"efficiency": 0.05}, "no-sign"),  # the loss fell to a quarter all the same
    ({"last_loss": 2.25, "stood_still": True, "start_factor": 1.1}, "no-progress"),
    ({"last_loss": 1.0, "stood_still": True}, "no-sign"),
])  # fmt: skip
def test_next_to_a_condition_it_does_not_hold(facts, kind):
    assert decide(outcome(**facts)).kind == kind
