"""Runs and traces below the paths that a user names."""

from pathlib import Path

import pytest

from curvestep.trace.sources import find_sources, place_of, short_names, task_of, traces_by_task
from curvestep.trace.trace import Trace


def write_trace(path, **header):
    with Trace(path, header=header) as trace:
        trace.append({"step": 0, "loss": 1.0})
    return path


def write_run(folder, *, traced=True):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"name": "mine"}')
    (folder / "status.json").write_text('{"status": "finished", "step": 0}')
    if traced:
        write_trace(folder / "trace.jsonl")
    return folder


def test_runs_and_traces_are_found_in_the_order_of_their_numbers(tmp_path):
    for name in ("run10", "run2"):
        write_run(tmp_path / name)
    write_trace(tmp_path / "alone.jsonl")
    (tmp_path / "other.jsonl").write_text('{"step": 1}\n')
    places = [place_of(source) for source in find_sources([tmp_path])]
    assert [place.name for place in places] == ["run2", "run10", "alone.jsonl"]


def test_traces_are_grouped_by_what_they_are_of(tmp_path):
    write_run(tmp_path / "one")
    write_run(tmp_path / "silent", traced=False)
    write_trace(tmp_path / "a.jsonl", model="GPT", num_parameters=1000)
    write_trace(tmp_path / "b.jsonl", model="GPT", num_parameters=1000, measured_on="8 fixed batches")
    counts = {task: len(traces) for task, traces in traces_by_task([tmp_path]).items()}
    assert counts == {
        "mine": 1,
        "GPT, 1,000 parameters": 1,
        "GPT, 1,000 parameters, measured on 8 fixed batches": 1,
    }
    assert task_of(Trace()) == ""


def test_places_that_hold_nothing_are_named(tmp_path):
    with pytest.raises(ValueError, match="at least one"):
        find_sources([])
    with pytest.raises(ValueError, match=r"There is no .*nowhere"):
        find_sources([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="neither a run folder nor a trace"):
        find_sources([tmp_path])
    write_run(tmp_path / "silent", traced=False)
    with pytest.raises(ValueError, match="nothing was measured"):
        traces_by_task([tmp_path])


def test_names_are_made_visible_and_shortened():
    assert short_names([Path("runs/a/x"), Path("runs/b/x")]) == ["a/x", "b/x"]
    assert short_names([Path("runs/a\x1b")]) == ["a\\u001b"]
