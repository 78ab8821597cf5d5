"""The table of conditions: each holds for its example, and the answer is another one without it."""

import math

import pytest

from curvestep.advice import decision
from curvestep.advice.advice_words import verdict_on
from curvestep.advice.decision import (
    GOOD_START,
    LARGE_FACTOR,
    LR_FACTOR,
    MIN_PROGRESS,
    SHORT_KAPPA,
    TABLE,
    decide,
)
from curvestep.optimizer_family import Family
from tests.advice.runs import outcome

LOST = {"nonfinite_at": 16, "kappa": 5.0}
# For each condition: facts, action, factor on lr (None for no number).
EXAMPLES = {
    "no-rows": ({"num_rows": 0, "num_losses": 0}, "cannot tell", None),
    "no-loss": ({"num_losses": 0}, "cannot tell", None),
    "bad-batch": ({"nonfinite_at": 16}, "data", None),
    "not-finite": ({**LOST, "start_factor": 2.0}, "diverged", 1 / LARGE_FACTOR),
    "rose-far": ({"last_loss": 8.0, "start_factor": 0.04}, "diverged", 0.04 / LARGE_FACTOR),
    "no-step": ({"num_rows": 0, "num_losses": 30}, "cannot tell", None),
    "failed-rows": ({"num_rows": 3, "num_losses": 30, "failure": "the loss is random"}, "cannot tell", None),
    "few-rows": ({"num_rows": 9, "num_losses": 9}, "cannot tell", None),
    "no-lr": ({"lr": math.nan}, "cannot tell", None),
    "eval-mode": ({"in_eval_mode": True}, "cannot tell", None),
    "rose-and-stuck": ({"highest_loss": 9.0, "last_loss": 1.5}, "stuck", 1 / LARGE_FACTOR),
    "long-and-stuck": ({"last_loss": 2.2, "start_factor": 0.4}, "stuck", 0.4 / LARGE_FACTOR),
    "inefficient": ({"efficiency": 0.05, "last_loss": 1.5}, "lower", 1 / LR_FACTOR),
    "long-first-steps": ({"start_factor": 0.01, "efficiency": 0.4}, "lower", 0.1),
    "short-steps": ({"kappa": 0.01, "start_factor": 40.0}, "raise", 40.0 / GOOD_START),
    "short-first-steps": ({"kappa": 0.2, "start_factor": 6.0}, "raise", LR_FACTOR),
    "no-progress": ({"last_loss": 2.25, "stood_still": True}, "stuck", None),
    "no-sign": ({}, "keep", 1.0),
}


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


@pytest.mark.parametrize("kind", [kind for kind in EXAMPLES if kind != "no-sign"])
def test_without_its_condition_the_answer_is_another_one(kind, monkeypatch):
    run = outcome(**EXAMPLES[kind][0])
    said = verdict_on(decide(run), run)
    monkeypatch.setattr(decision, "TABLE", [line for line in TABLE if line.kind != kind])
    assert verdict_on(decide(run), run) != said


def test_what_is_not_known_holds_for_nothing():
    unknown = dict.fromkeys(("kappa", "efficiency", "start_factor", "last_loss", "first_loss"), math.nan)
    assert decide(outcome(**unknown)).kind == "no-sign"
    assert lr_after(outcome(start_factor=math.nan, **LOST)) == pytest.approx(0.1 / LARGE_FACTOR**3)
    assert lr_after(outcome(start_factor=math.nan, kappa=0.01)) == pytest.approx(0.1 * LR_FACTOR)
    wasteful = EXAMPLES["inefficient"][0]
    assert lr_after(outcome(start_factor=math.nan, **wasteful)) == pytest.approx(0.1 / LR_FACTOR)


@pytest.mark.parametrize(("kappa", "start", "factor"), [
    (0.09, 5.0, LR_FACTOR), (0.05, 100.0, 6.0), (1e-4, 1e4, LARGE_FACTOR**2), (0.01, 30.0, 15.0),
])  # fmt: skip
def test_short_steps_grow_to_what_the_start_and_kappa_allow(kappa, start, factor):
    assert lr_after(outcome(kappa=kappa, start_factor=start)) == pytest.approx(0.1 * factor)


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
    assert decide(outcome(first_loss=3.0, last_loss=2.8, stood_still=False)).action == "keep"


def test_short_steps_that_hardly_moved_are_raised_and_not_stuck():
    assert decide(outcome(last_loss=2.25, stood_still=True, kappa=SHORT_KAPPA / 2)).action == "raise"


def test_a_run_that_was_ended_because_of_its_last_step_diverged():
    assert decide(outcome(num_rows=4, num_losses=4, last_loss=2.4, end_loss=9.0)).kind == "rose-far"


def test_a_warm_up_may_take_the_peak_beyond_what_the_start_allowed():
    assert decide(outcome(efficiency=0.4, start_factor=0.2)).action == "lower"
    assert decide(outcome(efficiency=0.4, start_factor=0.2, scheduled=True)).action == "keep"
    assert decide(outcome(efficiency=0.4, start_factor=0.05, scheduled=True)).action == "lower"


@pytest.mark.parametrize("start", [1e-5, 0.3])
def test_a_lost_run_is_lowered_to_a_tenth_of_what_the_start_allowed(start):
    assert lr_after(outcome(**LOST, start_factor=start)) == pytest.approx(0.1 * start / LARGE_FACTOR)


def test_of_adam_at_a_constant_rate_the_start_says_nothing():
    facts = EXAMPLES["short-first-steps"][0]
    assert decide(outcome(family=Family.ADAM, **facts)).action == "keep"
    assert decide(outcome(family=Family.ADAM, scheduled=True, **facts)).action == "raise"


@pytest.mark.parametrize(("facts", "kind"), [
    ({"num_rows": 0, "num_losses": 3}, "few-rows"),  # too early to say that nothing moves
    ({"failure": "the loss is random"}, "no-sign"),  # enough rows are left
    ({"highest_loss": 9.0}, "no-sign"),  # it came back all the way
    ({"highest_loss": 9.0, "last_loss": 1.1}, "no-sign"),
    ({"highest_loss": 5.75, "last_loss": 1.5}, "no-sign"),  # it rose to less than three times the first
    ({"start_factor": 0.7, "efficiency": 0.4}, "no-sign"),  # rather long steps, but the loss fell
    ({"start_factor": 0.01, "efficiency": 0.6}, "no-sign"),  # it recovered
    ({"start_factor": 0.01, "efficiency": 0.6, "last_loss": 1.5}, "long-first-steps"),
    ({"start_factor": 3.5, "kappa": 0.2}, "no-sign"),
    ({"start_factor": 9.0, "kappa": 0.4}, "no-sign"),
    ({"efficiency": 0.15, "last_loss": 1.5}, "no-sign"),
    ({"efficiency": 0.05}, "no-sign"),  # the loss fell to a quarter all the same
    ({"kappa": 0.05, "agreement": 0.1, "family": Family.MOMENTUM}, "no-sign"),
    ({"kappa": 0.05, "agreement": 0.1}, "short-steps"),
    ({"kappa": 0.2, "start_factor": 6.0, "agreement": 0.5, "family": Family.MOMENTUM}, "no-sign"),
    ({"kappa": 0.11}, "no-sign"),
    ({"last_loss": 2.25, "stood_still": True, "start_factor": 1.1}, "no-progress"),
    ({"last_loss": 1.0, "stood_still": True}, "no-sign"),
])  # fmt: skip
def test_next_to_a_condition_it_does_not_hold(facts, kind):
    assert decide(outcome(**facts)).kind == kind


def test_with_momentum_noise_limits_how_far_short_steps_grow():
    run = outcome(kappa=0.01, agreement=0.2, family=Family.MOMENTUM, start_factor=100.0)
    assert lr_after(run) == pytest.approx(0.1 * 0.3 / 0.05)


def test_steps_that_do_not_change_the_gradient_at_all_are_short():
    assert lr_after(outcome(kappa=0.0, start_factor=1e9)) == pytest.approx(0.1 * LARGE_FACTOR**2)
    assert lr_after(outcome(kappa=0.0, start_factor=math.nan)) == pytest.approx(0.1 * LR_FACTOR)
