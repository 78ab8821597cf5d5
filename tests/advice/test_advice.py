"""What advise takes and prints."""

import json
import math

import pytest

from curvestep import SmoothnessProbe, advise, fit_smoothness
from curvestep.advice.advice import Advice
from curvestep.advice.advice_words import reasons_for, verdict_on, warnings_about
from curvestep.advice.decision import decide
from curvestep.files import dump_json
from curvestep.notes import Note
from curvestep.optimizer_family import Family
from tests.advice.runs import falling, network, outcome, trace_of
from tests.advice.test_decision import EXAMPLES


def test_the_first_line_has_the_old_and_the_new_value():
    assert (
        str(advise(trace_of(falling(), kappa=0.01, smoothness=0.1, loss_after=None))).splitlines()[0]
        == "RAISE lr 0.1 -> 1"
    )
    assert advise(trace_of(falling())).verdict.startswith("NO SIGN against lr 0.1.")
    peaks = trace_of([])
    for k, loss in enumerate(falling(last=1.2)):
        peaks.append({**trace_of([loss])[0], "step": k, "lr": 0.2 if k < 15 else 0.1, "kappa": 40.0})
    assert advise(peaks).verdict == "LOWER peak lr 0.2 -> 0.005"


@pytest.mark.parametrize("kind", EXAMPLES)
def test_an_answer_has_eight_lines_at_most_and_short_sentences(kind):
    run = outcome(**{"clipped": 0.95, "max_norm": 0.5, "floor": 3.0, **EXAMPLES[kind][0]})
    decision = decide(run)
    advice = Advice(
        action=decision.action,
        kind=kind,
        verdict=verdict_on(decision, run),
        reasons=reasons_for(decision, run),
        warnings=warnings_about(run),
    )
    assert len(str(advice).splitlines()) <= 8
    assert advice.verdict.split(" ")[0].strip(":").isupper()
    for text in (advice.verdict, *map(str, advice.reasons), *map(str, advice.warnings)):
        for sentence in text.split(". "):
            assert len(sentence.split()) <= 20


def test_a_floor_of_clipping_is_warned_of():
    kinds = [note.kind for note in warnings_about(outcome(clipped=1.0, max_norm=0.5, floor=1.5))]
    assert kinds == ["clipping-floor"]
    assert warnings_about(outcome(clipped=1.0, max_norm=0.5, floor=0.1)) == ()
    assert warnings_about(outcome(family=Family.ADAM, clipped=1.0, max_norm=0.5, floor=1.5)) == ()


@pytest.mark.parametrize(("trace", "kind"), [
    (trace_of([]), "no-rows"),
    (trace_of([1.0]), "few-rows"),
    (trace_of([None] * 20), "no-loss"),
    (trace_of([None] * 2, status="nonfinite"), "not-finite"),
])  # fmt: skip
def test_traces_that_say_little_get_one_clear_line(trace, kind):
    advice = advise(trace)
    assert advice.kind == kind
    assert "\n" not in advice.verdict
    assert advice.action == "diverged" or str(advice) == advice.verdict


def test_rows_of_an_older_version_are_enough():
    trace = trace_of(falling())
    trace.header = {"format": "curvestep-trace", "schema": 1}
    assert advise(trace).action == "no sign"


def test_paths_folders_probes_and_fits_are_taken(tmp_path):
    trace = trace_of(falling(), path=tmp_path / "trace.jsonl")
    said = advise(trace)
    assert advise(tmp_path) == advise(str(tmp_path / "trace.jsonl")) == said
    assert advise(SmoothnessProbe(network())).kind == "no-rows"
    fit = fit_smoothness(trace)
    assert advise(fit) == said


def test_lists_and_folders_of_runs_are_taken(tmp_path):
    low = trace_of(falling(last=0.9), path=tmp_path / "low" / "trace.jsonl")
    high = trace_of(falling(), path=tmp_path / "high.jsonl", lr=0.3)
    together = advise(low, high)
    assert together.action == "take"
    assert advise([low, high]) == advise([low, [high]]) == together
    assert advise(tmp_path) == advise(high, low)
    with pytest.raises(ValueError, match="at least one"):
        advise([])


def test_a_schedule_that_never_moves_is_named():
    idle = trace_of(falling(), header={"peak_lr": 2.5})
    assert [note.kind for note in advise(idle).warnings] == ["idle-schedule"]
    for header in ({}, {"peak_lr": 0.1}, {"peak_lr": 0.15}):
        assert advise(trace_of(falling(), header=header)).warnings == ()
    moving = trace_of([], header={"peak_lr": 2.5})
    for step, row in enumerate(trace_of(falling())):
        moving.append({**row, "lr": 0.1 + 0.01 * step})
    assert advise(moving).warnings == ()


@pytest.mark.parametrize(("losses", "row", "highest"), [
    ([1.62, None], {"status": "nonfinite"}, "a value that is not finite"),
    ([*falling(12), math.inf], {}, "a value that is not finite"),
    ([*falling(12), 1.0], {"loss_after": 1e9}, "1e+09"),
    (falling(12), {}, "2"),
])  # fmt: skip
def test_the_highest_loss_counts_the_one_that_diverged(losses, row, highest):
    trace = trace_of(losses[:-1])
    last = dict(trace_of(losses[-1:])[0])
    trace.append({**last, "step": 5 * len(losses), **row})
    (loss,) = (note.text for note in advise(trace).reasons if note.kind == "loss")
    assert loss.endswith(f"the highest is {highest}")


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="`runs` must be at least one"):
        advise()
    with pytest.raises(TypeError, match="`trace` must be a Trace"):
        advise(3)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="there is no trace at"):
        advise("nowhere.jsonl")


def test_an_advice_is_json_and_html():
    advice = advise(trace_of(falling(), kappa=0.01, smoothness=0.1, loss_after=None))
    found = json.loads(dump_json(advice))
    assert (found["action"], found["lr"]) == ("raise", pytest.approx(1.0))
    assert advice.verdict.replace(">", "&gt;") in advice._repr_html_()


@pytest.mark.parametrize("where", ["header", "rows"])
def test_a_short_step_of_adam_is_no_sign_of_clipping(where):
    place = {where: {"optimizer": "AdamW", "optimizer_family": "adam"}}
    trace = trace_of(falling(), header=place.get("header"), grad_norm=5.0, **place.get("rows", {}))
    if where == "rows":
        trace.header = {}
    advice = advise(trace)
    assert (advice.max_norm, advice.verdict.partition(".")[0]) == (math.inf, "NO SIGN against lr 0")
    assert "clipping" not in [note.kind for note in advice.reasons]


@pytest.mark.parametrize("efficiency", [math.nan, -4.5])
def test_a_gain_that_is_none_or_not_known_is_not_printed(efficiency):
    run = outcome(efficiency=efficiency)
    (steps,) = (note.text for note in reasons_for(decide(run), run) if note.kind == "steps")
    assert steps.startswith("a step changes the gradient by 0.5")


@pytest.mark.parametrize(("facts", "kinds"), [
    ({"clipped": 0.0}, {"loss", "steps", "stability", "clipping", "next"}),
    ({"clipped": math.nan}, {"loss", "steps", "stability", "next"}),
    ({"last_loss": 8.0}, {"loss", "steps", "clipping"}),  # after calibrate nothing is compared
    ({"in_eval_mode": True}, set()),
])  # fmt: skip
def test_reasons_are_those_that_the_run_gives(facts, kinds):
    run = outcome(**facts)
    assert {note.kind for note in reasons_for(decide(run), run)} == kinds


def test_an_answer_has_its_threshold_warnings_and_kind_of_lr():
    noisy = advise(trace_of(falling(), header={"peak_lr": 0.12}, clipped=True, coefficient=0.5, noise=2.0))
    assert (noisy.max_norm, noisy.lr_is_peak) == (0.5, True)
    assert [note.kind for note in noisy.warnings] == ["clipping-floor"]
    assert advise(trace_of([*falling(15), None])).max_norm is None


def test_the_cause_of_a_failure_is_one_line_with_its_way_out():
    run = outcome(num_rows=3, failure="very\nlong words " * 40 + "Use float32.")
    assert verdict_on(decide(run), run).endswith("words Use float32.")
    assert "\n" not in verdict_on(decide(run), run)


def test_the_peak_that_was_set_is_named():
    seeds = [trace_of(falling(), header={"peak_lr": 0.12}, lr=0.1) for _ in range(2)]
    assert advise(seeds[0]).verdict.startswith("NO SIGN against peak lr 0.12.")
    assert advise(*seeds).verdict.startswith("NO SIGN against peak lr 0.12.")


def test_details_have_everything():
    notes = tuple(Note(f"n{k}", f"text {k}") for k in range(12))
    advice = Advice(action="take", kind="best-setting", verdict="TAKE it", reasons=notes)
    assert all(note.text in advice.details() for note in notes)
    assert str(advice).splitlines()[-1].startswith("More:")
    assert len(str(advice).splitlines()) == 8


HOSTILE = {
    "huge": 10**400,
    "negative": -1.0,
    "words": "x\x00\x1b[31m",
    "list": [None, "x"],
    "infinite": math.inf,
}
NAMES = ("loss", "grad_norm", "smoothness", "step_norm", "secants", "kappa", "lr", "coefficient", "status")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_values_that_nobody_measured_are_answered_or_refused_in_one_line(value, name):
    trace = trace_of([], header={"fractions": [0.5, 1.0]})
    for row in trace_of(falling(16)):
        trace.append({**row, name: value})
    assert "\n" not in advise(trace).verdict


@pytest.mark.parametrize("name", ["optimizer_family", "momentum", "fractions", "offset"])
def test_headers_that_nobody_wrote_are_answered(name):
    assert advise(trace_of(falling(16), header={name: "x"})).action == "no sign"


@pytest.mark.parametrize(("every", "words"), [(1, "of step 16."), (5, "of steps 72 to 76.")])
def test_a_bad_batch_lies_between_two_rows(every, words):
    trace = trace_of([*falling(15), None], every=every)
    advice = advise(trace)
    assert advice.action == "data"
    assert words in advice.verdict
