import math
import re
import shutil
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace

import psutil
import pytest

from curvestep.trace.run import find_runs, last_step, write_json
from curvestep_reproduction.recipes import to_dict, with_fields
from curvestep_reproduction.training.loop import train
from curvestep_reproduction.training.run_folder import (
    RunResult,
    TrainedRun,
    has_ended,
    open_run,
    result_in,
    write_status,
)
from curvestep_reproduction.training.sweep import ranking, sweep
from reproduction.tests.small import small_language

GRID = {"lr": [0.5, 2.0], "max_norm": [0.25, math.inf], "seed": [0, 1]}


def eight(folder, **fields):
    return small_language(folder, **({"steps": 60, "probe_every": 20, "eval_size": 400} | fields))


def finished(folder):
    return [path.parent for path in folder.glob("*/status.json") if has_ended(path.parent)]


def fingerprint(folder):
    return {path.parent.name: path.read_bytes() for path in folder.glob("*/metrics.jsonl")}


@pytest.fixture(scope="module")
def on_joblib(tmp_path_factory):
    folder = tmp_path_factory.mktemp("joblib")
    return sweep(eight(folder / "data"), GRID, folder / "sweep", progress=False)


@pytest.mark.slow
def test_every_point_of_the_grid_is_a_run_equal_to_training_it_alone(on_joblib, tmp_path):
    assert len(on_joblib) == 8
    assert ranking(on_joblib).count("finished") == 8
    trial = on_joblib[5]
    run = TrainedRun.load(trial.folder)
    point = [values[bit] for values, bit in zip(GRID.values(), (1, 0, 1), strict=True)]  # the sixth of eight
    assert [getattr(run.recipe, name) for name in GRID] == point
    words = rf"^{trial.folder.name} +finished, training loss {trial.train_loss:.4f}, perplexity [\d.]+$"
    assert re.search(words, ranking(on_joblib), re.MULTILINE)
    train(run.recipe, tmp_path / "alone", progress=False)
    alone, swept = (folder / "metrics.jsonl" for folder in (tmp_path / "alone", trial.folder))
    assert alone.read_bytes() == swept.read_bytes()


@pytest.mark.slow
def test_trials_of_another_recipe_are_not_taken_for_this_sweeps(tmp_path):
    recipe = small_language(tmp_path / "data", steps=2, probe_every=0)
    sweep(recipe, {"lr": [1.0]}, tmp_path / "sweep", progress=False, workers=1)
    before = fingerprint(tmp_path / "sweep")
    with pytest.raises(ValueError, match=r"lr=1 holds a run of another recipe \(steps 2 → 4\)"):
        sweep(replace(recipe, steps=4), {"lr": [1.0]}, tmp_path / "sweep", progress=False, workers=1)
    assert fingerprint(tmp_path / "sweep") == before


@pytest.mark.slow
def test_a_second_sweep_skips_what_has_ended(on_joblib):
    folder = on_joblib[0].folder.parent
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/*")}
    recipe = TrainedRun.load(on_joblib[0].folder).recipe
    again = sweep(recipe, GRID, folder, progress=False)
    assert again == on_joblib
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*/*")} == before


@contextmanager
def killing_a_worker_after(folder, count, is_worker):
    """Kill one of our own workers, in the middle of a trial, once ``count`` trials have ended.

    Between two trials there may be none for a while, so it looks until it has found one or the block ends.
    """
    killed, ended = [], threading.Event()

    def watch():
        while not killed and not ended.wait(0.01):
            if len(finished(folder)) < count:
                continue
            for child in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    if is_worker(child):
                        child.kill()
                        killed.append(child.pid)
                        return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield killed
    finally:
        ended.set()
        thread.join()


def is_loky(process):
    return "loky" in " ".join(process.cmdline()) and "resource_tracker" not in " ".join(process.cmdline())


def sweep_with_a_kill(folder, is_worker, *arguments, **options):
    """A sweep of which a worker was killed. On a busy machine it may end before: then once more."""
    for _ in range(20):
        with killing_a_worker_after(folder, 2, is_worker) as killed:
            result = sweep(*arguments, folder, progress=False, checkpoint_seconds=0.05, **options)
        if killed:
            return result
        shutil.rmtree(folder)
    raise AssertionError("no worker was found to kill")


@pytest.mark.slow
def test_a_killed_joblib_worker_loses_nothing(on_joblib, tmp_path):
    recipe = TrainedRun.load(on_joblib[0].folder).recipe
    result = sweep_with_a_kill(tmp_path, is_loky, recipe, GRID)
    assert {t.status for t in result} == {"finished"}
    assert fingerprint(tmp_path) == fingerprint(on_joblib[0].folder.parent)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # Ray leaves sockets and pipes to the interpreter
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ray_gives_what_joblib_gives_and_a_killed_worker_loses_nothing(on_joblib, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_worker_niceness", "0")  # by itself Ray's workers give way to all other tests
    recipe = TrainedRun.load(on_joblib[0].folder).recipe
    is_worker = lambda p: "ray::_call" in " ".join(p.cmdline())  # noqa: E731
    result = sweep_with_a_kill(tmp_path, is_worker, recipe, GRID, engine="ray")
    assert {t.status for t in result} == {"finished"}
    assert [t.train_loss for t in result] == [t.train_loss for t in on_joblib]
    assert fingerprint(tmp_path) == fingerprint(on_joblib[0].folder.parent)


SCRIPT = """
import sys
from pathlib import Path
from curvestep.trace.run import read_json
from curvestep_reproduction.recipes import from_dict
from curvestep_reproduction.training.sweep import sweep
if __name__ == "__main__":
    folder = Path(sys.argv[1])
    grid = {"lr": [0.5, 2.0], "max_norm": [0.25, float("inf")], "seed": [0, 1]}
    sweep(from_dict(read_json(folder / "recipe.json")), grid, folder / "sweep", checkpoint_seconds=0.05)
"""


@pytest.mark.slow
def test_workers_end_with_the_sweep_that_started_them(on_joblib, tmp_path):
    recipe = TrainedRun.load(on_joblib[0].folder).recipe
    write_json(tmp_path / "recipe.json", to_dict(with_fields(recipe, steps=100_000)))
    (tmp_path / "script.py").write_text(SCRIPT)
    process = subprocess.Popen([sys.executable, tmp_path / "script.py", tmp_path], start_new_session=True)
    while len(list((tmp_path / "sweep").glob("*/metrics.jsonl"))) < 2 and process.poll() is None:
        time.sleep(0.05)
    workers = [child for child in psutil.Process(process.pid).children(recursive=True) if is_loky(child)]
    process.kill()  # the sweep alone; its workers must notice
    process.wait()
    assert len(workers) == 2
    _, alive = psutil.wait_procs(workers, timeout=300)
    assert not alive
    statuses = [
        TrainedRun.load(path.parent).status["status"] for path in (tmp_path / "sweep").glob("*/status.json")
    ]
    assert statuses == ["interrupted"] * 2  # each with a checkpoint to go on from


@pytest.mark.slow
def test_failed_and_diverged_trials_are_recorded_and_the_rest_carried_on(tmp_path, capsys):
    recipe = eight(tmp_path / "data", max_norm=math.inf, steps=20)
    grid = {"lr": [1.0, 500.0], "corpus": [recipe.corpus, str(tmp_path / "missing.txt")]}
    result = sweep(recipe, grid, tmp_path / "sweep", workers=1)
    assert [t.status for t in result] == ["finished", "failed", "diverged", "failed"]
    assert "missing.txt" in result[1].message
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("[1/4] lr=1,")
    assert len(find_runs(tmp_path / "sweep")) == 4

    (tmp_path / "missing.txt").write_text((tmp_path / "data" / "text.txt").read_text())
    again = sweep(recipe, grid, tmp_path / "sweep", workers=1, progress=False)  # what failed is tried again
    assert [t.status for t in again] == ["finished", "finished", "diverged", "diverged"]


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        ({}, "`grid` must name at least one field"),
        ({"lr": []}, "`grid` needs a list of values for 'lr'"),
        ({"lr": "123"}, "`grid` needs a list of values for 'lr'"),
        ({"learn": [1.0]}, "no field `learn`"),
        ({"lr": [1.0, -1.0]}, "`lr` must be positive"),
        ({"lr": [1.0, "1"]}, "`grid` has the point lr=1 twice"),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused_before_anything_runs(tmp_path, grid, words):
    with pytest.raises(ValueError, match=words):
        sweep(eight(tmp_path / "data"), grid, tmp_path / "sweep")
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"engine": "threads"}, "`engine` must be one of 'joblib', 'ray'"),
        ({"workers": 0}, "`workers` must be"),
        ({"address": "auto"}, "`address` is for the engine 'ray'"),
    ],
)
def test_impossible_engines_are_named(tmp_path, arguments, words):
    with pytest.raises(ValueError, match=words):
        sweep(eight(tmp_path / "data"), {"lr": [1.0]}, tmp_path / "sweep", **arguments)


def test_a_sweep_prints_the_lowest_loss_first_and_lost_trials_last(tmp_path):
    ends = {"lr=30": math.nan, "lr=1": 0.5, "lr=3": -0.25}
    trials = tuple(
        RunResult(folder=tmp_path / name, status="finished", train_loss=loss) for name, loss in ends.items()
    )
    assert ranking(trials).splitlines() == [
        "lr=3   finished, training loss -0.2500",
        "lr=1   finished, training loss 0.5000",
        "lr=30  finished",
    ]


def test_a_trial_whose_process_was_killed_is_failed_not_running(tmp_path):
    recipe = small_language(tmp_path)
    open_run(tmp_path / "run", recipe, resume=False)
    write_status(tmp_path / "run", status="running", step=3, message="")
    assert result_in(tmp_path / "run").status == "running"
    lost = result_in(tmp_path / "run", "its process died 3 times")
    assert (lost.status, lost.message) == ("failed", "its process died 3 times")


def test_ctrl_c_that_a_trial_took_for_itself_ends_the_sweep(tmp_path, monkeypatch):
    started = []

    def train(recipe, folder, **_):
        started.append(folder.name)
        return RunResult(folder=folder, status="interrupted")

    monkeypatch.setattr("curvestep_reproduction.training.sweep.train", train)
    with pytest.raises(KeyboardInterrupt):
        sweep(small_language(tmp_path / "data"), {"lr": [1.0, 2.0]}, tmp_path / "sweep", workers=1)
    assert started == ["lr=1"]


def test_the_last_step_is_read_from_whole_rows_only(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert last_step(tmp_path) == 0
    path.write_text('{"step": 7, "split": "train"}\n{"step": 8, "sp')
    assert last_step(tmp_path) == 7
    path.write_text('{"step": 7, "split": "train"}\n{"step": garbage}\n')
    assert last_step(tmp_path) == 7
