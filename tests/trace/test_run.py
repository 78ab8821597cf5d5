"""A run's folder, read: status, rows by split, and what a damaged or older folder says."""

import json

import pytest

from curvestep.files import dump_row
from curvestep.trace.run import DIVERGED, RUNNING, Run, find_runs, last_step, read_json


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text('{"name": "mine", "scale": "small", "about": {"label": "lr 3"}}')
    (folder / "status.json").write_text('{"status": "diverged", "step": 2}')
    rows = [{"step": step, "split": "train", "loss": 1 / step} for step in (1, 2)]
    rows.append({"step": 2, "split": "valid", "loss": 0.7, "accuracy": 50})
    (folder / "metrics.jsonl").write_bytes(b"".join(dump_row(row) for row in rows))
    return folder


def test_a_run_has_its_status_its_rows_and_its_task(folder):
    run = Run.load(folder)
    assert (run.status["status"], run.has_ended, run.task) == (DIVERGED, True, "mine, small")
    assert run.about["label"] == "lr 3"
    steps, losses = run.column("loss")
    assert (steps.tolist(), losses.tolist()) == ([1, 2], [1.0, 0.5])
    assert run.column("accuracy", "valid")[1].tolist() == [50.0]
    assert len(run.rows("test")) == 0
    assert run.lost_rows == ""
    assert [other.folder for other in find_runs(folder.parent)] == [folder]


def test_rows_that_the_status_counts_and_metrics_lack_are_named(folder):
    (folder / "status.json").write_text('{"status": "finished", "step": 9}')
    assert "ends at step 2" in Run.load(folder).lost_rows
    (folder / "metrics.jsonl").unlink()
    assert last_step(folder) == 0
    assert Run.load(folder).metrics == []


def test_a_folder_without_status_still_runs(folder):
    (folder / "status.json").unlink()
    assert Run.load(folder).status["status"] == RUNNING
    assert find_runs(folder.parent) == []


@pytest.mark.parametrize(("content", "match"), [
    (None, "There is no .*config.json; a run folder has one"),
    ("{", "is not JSON"),
    ("[1]", "must hold an object, it holds list"),
    ('{"a": 1, "crc32": "00000000"}', "does not match its checksum"),
])  # fmt: skip
def test_a_damaged_config_is_refused_in_one_line(folder, content, match):
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content)
    with pytest.raises(ValueError, match=match) as error:
        Run.load(folder)
    assert "\n" not in str(error.value)


def test_a_status_that_nobody_writes_is_refused(folder):
    (folder / "status.json").write_text(json.dumps({"status": "sleeping"}))
    with pytest.raises(ValueError, match="no valid status"):
        Run.load(folder)
    assert read_json(folder / "status.json") == {"status": "sleeping"}
