"""Logs of trainers: what is read of them, what is said, and what is refused."""

import json
import math

import numpy as np
import pytest

from curvestep import advise
from curvestep.advice.training_log import read_log
from curvestep.cli.commands import COMMANDS
from tests.advice.runs import falling, trace_of

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
