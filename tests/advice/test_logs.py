"""Logs of trainers: what is read of them, what is said, and what is refused."""

import json
import math

import numpy as np
import pytest

from curvestep import SmoothnessProbe, Trace, advise
from curvestep.advice.training_log import read_log
from curvestep.cli.commands import COMMANDS
from tests.advice.runs import falling, network, trace_of

LOSSES = falling(40)


def state(path, rows):
    """A trainer_state.json as Hugging Face writes it."""
    history = [{"epoch": row["step"] / 100, **row} for row in rows]
    end = {"epoch": 1.0, "step": rows[-1]["step"], "train_loss": 1.0, "train_runtime": 2.0}
    path.write_text(json.dumps({"global_step": rows[-1]["step"], "log_history": [*history, end]}, indent=2))
    return path


def rows_of(losses, **values):
    return [
        {
            "step": 10 * (k + 1),
            "loss": loss,
            "grad_norm": 0.5 + 0.01 * (k % 7),
            "learning_rate": 0.01,
            **values,
        }
        for k, loss in enumerate(losses)
    ]


def kinds(advice):
    return [note.kind for note in advice.reasons]


def test_a_clean_log_gets_no_fact_and_no_verdict_on_lr(tmp_path):
    advice = advise(state(tmp_path / "trainer_state.json", rows_of(LOSSES)))
    assert (advice.action, advice.lr, advice.reasons, advice.warnings) == ("facts", None, (), ())
    assert "probe" in advice.verdict
    assert advise(tmp_path) == advice


def test_a_spike_a_nan_and_a_jump_are_named_at_their_steps(tmp_path):
    rows = rows_of(LOSSES)
    rows[20]["loss"] *= 4
    rows[30]["grad_norm"] = math.nan
    for row in rows[33:]:
        row["learning_rate"] = 0.001
    advice = advise(state(tmp_path / "trainer_state.json", rows))
    assert kinds(advice) == ["not-finite", "loss-spike", "lr-jump"]
    assert "at step 310" in advice.reasons[0].text
    assert "at step 210" in advice.reasons[1].text
    assert "back at step 220" in advice.reasons[1].text
    assert "by step 340" in advice.reasons[2].text


def test_clipped_steps_are_counted_by_the_threshold(tmp_path):
    path = state(tmp_path / "trainer_state.json", rows_of(LOSSES))
    share = np.mean([0.01 * (k % 7) + 0.5 > 0.53 for k in range(40)])
    (note,) = advise(path, max_norm=0.53).reasons
    assert note.kind == "clipping"
    assert note.text.startswith(f"{share:.0%}")


def test_norms_that_pile_up_were_clipped_before(tmp_path):
    rows = rows_of(LOSSES)
    for row in rows:
        row["grad_norm"] = min(row["grad_norm"], 0.52)
    assert kinds(advise(state(tmp_path / "trainer_state.json", rows))) == ["piled-norms"]


TABLES = {
    "metrics.csv": "step,epoch,train_loss_step,val_loss,lr-AdamW,grad_2.0_norm_total\n"
    + "\n".join(f"{k},0,{3 - k / 40},,0.01,{0.5 + k % 3 / 10}" for k in range(30))
    + "\n29,0,,0.77,,\n",
    "export.csv": '"Step","swift-1 - train/loss","swift-1 - train/loss__MIN","swift-1 - eval/loss"\n'
    + "\n".join(f'"{k}","{3 - k / 40}","0","0.77"' for k in range(30))
    + "\n",
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_read_by_the_names_that_trainers_use(name, tmp_path):
    path = tmp_path / name
    path.write_text(TABLES[name])
    log = read_log(path)
    assert len(log.step) == 30
    assert log.loss.tolist() == [3 - k / 40 for k in range(30)]
    assert log.last_of("val_loss" if name == "metrics.csv" else "loss") == 0.77
    if name == "metrics.csv":
        assert (log.lr[0], log.grad_norm[2]) == (0.01, 0.7)
    assert advise(path).action == "facts"


def test_event_files_are_read(tmp_path):
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    for k, loss in enumerate(LOSSES):
        writer.add_scalar("train/loss", 9.0 if k == 20 else loss, k)
        writer.add_scalar("eval/loss", 1.5, k)
    writer.close()
    advice = advise(tmp_path)
    assert kinds(advice) == ["loss-spike"]
    assert "step 20," in advice.reasons[0].text


BAD = {
    "foreign.json": '{"a": 1}',
    "torn.json": '{"log_history": [{"step": 1, "loss": 2.0}, {"ste',
    "list.json": "[1, 2]",
    "deep.json": "[" * 100_000,
    "empty.csv": "",
    "names.csv": "a,b\n1,2\n",
    "binary.csv": b"\xff\xfe\x00\x01step",
    "no_steps.csv": "loss\n1.0\n2.0\n",
    "events.out.tfevents.1": b"this is no event file",
    "words.csv": "step,loss\n1,nobody\n",
}


@pytest.mark.parametrize("name", BAD)
def test_foreign_and_damaged_logs_are_refused_in_one_line(name, tmp_path):
    if "tfevents" in name:
        pytest.importorskip("tensorboard")
    content = BAD[name]
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=name) as caught:
        advise(path)
    assert "\n" not in str(caught.value)


def test_a_missing_log_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no log at"):
        advise(tmp_path / "trainer_state.json")


def test_logs_are_asked_about_one_at_a_time(tmp_path):
    path = state(tmp_path / "trainer_state.json", rows_of(LOSSES))
    with pytest.raises(ValueError, match="one log at a time"):
        advise(path, trace_of(LOSSES))
    with pytest.raises(ValueError, match="a trace knows its own"):
        advise(trace_of(LOSSES), max_norm=1.0)


def test_a_folder_with_a_trace_is_a_run_though_a_log_lies_beside(tmp_path):
    trace_of(LOSSES, path=tmp_path / "trace.jsonl")
    state(tmp_path / "trainer_state.json", rows_of(LOSSES))
    assert advise(tmp_path).action == "no sign"


def test_the_command_reads_a_log(tmp_path, capsys):
    from curvestep.cli import main

    path = state(tmp_path / "trainer_state.json", rows_of(LOSSES))
    assert main(["advise", str(path), "--max-norm", "0.53"]) == 0
    assert "of the logged gradient norms" in capsys.readouterr().out
    assert "advise" in COMMANDS


def test_a_long_log_takes_little_memory(tmp_path):
    import tracemalloc

    path = tmp_path / "metrics.csv"
    with path.open("w") as file:
        file.write("step,loss,grad_norm,lr\n")
        file.writelines(
            f"{k},{2 + (k * 7919 % 101) / 1000:.3f},0.{500 + k % 97},0.01\n" for k in range(5_000)
        )
    tracemalloc.start()
    advice = advise(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert advice.reasons == ()
    assert peak < 1e7


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
    assert {"spikes", "clipping"} <= set(kinds(advice))
    assert any("2 gradient norms stand out, the largest at step 60" in note.text for note in advice.reasons)


def test_a_probe_and_an_empty_trace_take_the_options_too():
    assert advise(SmoothnessProbe(network()), progress=False).kind == "no-rows"
    assert advise(Trace(), metric={"val_loss": [1.0]}).kind == "no-rows"
