"""Runs that are ranked by a metric of one's own, and losses that measure no progress."""

import pytest

from curvestep import SmoothnessProbe, Trace, advise
from tests.advice.runs import falling, network, trace_of


def run_with(lr, accuracies, *, path=None, last=0.5):
    trace = trace_of([], path=path, header={"optimizer": "SGD", "optimizer_family": "sgd"})
    for row, accuracy in zip(trace_of(falling(len(accuracies), last=last), lr=lr), accuracies, strict=True):
        trace.append({**row, "accuracy": accuracy})
    return trace


RISING = [k / 40 for k in range(20)]


def test_a_metric_of_the_rows_ranks_in_place_of_the_loss():
    low, high = run_with(0.1, RISING, last=0.4), run_with(0.3, [2 * a for a in RISING], last=0.6)
    assert advise(low, high).lr == 0.1
    by_metric = advise(low, high, metric="accuracy")
    assert (by_metric.action, by_metric.lr) == ("take", 0.3)
    assert "by the highest accuracy" in by_metric.verdict
    assert advise(low, high, metric="accuracy", mode="min").lr == 0.1


def test_values_and_logs_of_the_trainer_rank_too(tmp_path):
    low, high = run_with(0.1, RISING), run_with(0.3, RISING)
    assert advise(low, high, metric={"reward": [5.0, 3.0]}).lr == 0.1
    paths = []
    for k, loss in enumerate((0.9, 0.2)):
        paths.append(tmp_path / f"{k}.csv")
        paths[-1].write_text(f"step,val_loss,train_loss\n1,1.0,1.0\n2,{loss},1.0\n")
    advice = advise(low, high, metric={"val_loss": paths})
    assert advice.lr == 0.3
    assert "val_loss 0.2" in advice.reasons[0].text


def test_a_log_beside_the_trace_has_the_metric(tmp_path):
    for name, lr, loss in (("a", 0.1, 0.9), ("b", 0.3, 0.2)):
        run_with(lr, RISING, path=tmp_path / name / "trace.jsonl")
        (tmp_path / name / "metrics.csv").write_text(f"step,val_loss,train_loss\n2,{loss},1.0\n")
    assert advise(tmp_path / "a", tmp_path / "b", metric="val_loss").lr == 0.3


def test_a_run_without_a_value_is_named_and_decides_nothing():
    runs = [run_with(lr, RISING) for lr in (0.1, 0.3)]
    advice = advise(*runs, run_with(0.9, [None] * 20), metric="accuracy")
    assert [note.kind for note in advice.warnings] == ["no-loss"]


@pytest.mark.parametrize(("metric", "mode", "words"), [
    ("wisdom", None, "mode='min'"),
    ("accuracy", "most", "`mode`"),
    ({"a_loss": [1.0], "b_loss": [2.0]}, None, "one metric"),
    ({"val_loss": [1.0]}, None, "a value for each run"),
    ("val_loss", None, "No run has a value"),
])  # fmt: skip
def test_metrics_that_cannot_rank_are_refused(metric, mode, words):
    with pytest.raises(ValueError, match=words):
        advise(run_with(0.1, RISING), run_with(0.3, RISING), metric=metric, mode=mode)


def test_a_metric_of_one_run_is_shown():
    advice = advise(run_with(0.1, RISING), metric="accuracy")
    assert advice.reasons[0].kind == "metric"
    assert "accuracy ends at 0.475" in advice.reasons[0].text


def test_a_policy_that_learns_is_not_stuck_where_shuffled_labels_are():
    flat = [1.6 + 0.001 * (-1) ** k for k in range(30)]
    row = {"kappa": 0.6, "smoothness": 6.0}
    assert advise(trace_of(flat, **row)).kind == "no-progress"
    policy = advise(trace_of(flat, **row), progress=False)
    assert policy.action == "no sign"
    assert "not taken for a measure of progress" in policy.verdict
    assert advise(trace_of([0.1 * (-1) ** k for k in range(30)], **row)).action == "no sign"


def test_without_progress_spikes_and_clipping_are_shown():
    trace = trace_of([], header={"clipping": "norm", "max_norm": 1.0})
    for k, row in enumerate(trace_of(falling())):
        log = [{"step": 60, "grad_norm": 27.7}, {"step": 62, "grad_norm": 3.0}] if k == 20 else []
        trace.append({**row, "clipped": k % 2, "coefficient": 0.5, "spikes": log})
    advice = advise(trace, progress=False)
    assert {"spikes", "clipping"} <= {note.kind for note in advice.reasons}
    assert any("2 gradient norms stand out, the largest at step 60" in note.text for note in advice.reasons)


def test_a_probe_and_an_empty_trace_take_the_options_too():
    assert advise(SmoothnessProbe(network()), progress=False).kind == "no-rows"
    assert advise(Trace(), metric={"val_loss": [1.0]}).kind == "no-rows"


def test_the_command_ranks_by_a_metric(tmp_path, capsys):
    from curvestep.cli import main

    for name, lr, scale in (("low", 0.1, 1.0), ("high", 0.3, 2.0)):
        run_with(lr, [scale * a for a in RISING], path=tmp_path / f"{name}.jsonl")
    assert main(["advise", str(tmp_path), "--metric", "accuracy"]) == 0
    assert "TAKE lr 0.3" in capsys.readouterr().out
    assert main(["advise", str(tmp_path), "--metric", "accuracy", "--mode", "min"]) == 0
    assert "TAKE lr 0.1" in capsys.readouterr().out
    assert main(["advise", str(tmp_path / "low.jsonl"), "--no-progress"]) == 0
    assert "unstable" in capsys.readouterr().out
