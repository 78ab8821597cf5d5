"""A disk that fills up while a run trains: one clear line, nothing lost, resumed once there is room."""

import re

import pytest
from tests.processes import run_command

from curvestep_reproduction.training.loop import train
from curvestep_reproduction.training.run_folder import TrainedRun
from curvestep_reproduction.training.session import load_checkpoint
from reproduction.tests.small import assert_same_rows, small_language

pytestmark = pytest.mark.slow

LIMIT = 30_000  # bytes: above the checkpoint, below the rows of the whole run


def words(recipe, folder):
    fields = {
        "corpus": recipe.corpus, "embedding": 8, "hidden": 10, "batch-size": 4, "bptt": 6, "eval-size": 0,
        "steps": recipe.steps, "lr": 1.0, "max-norm": 0.25, "probe-every": recipe.probe_every,
    }  # fmt: skip
    options = [word for name, value in fields.items() for word in (f"--{name}", str(value))]
    always = ["--resume", "--quiet", "--threads", "1", "--checkpoint-seconds", "0", "--folder", str(folder)]
    return ["train", "ptb-lstm", *options, *always]


@pytest.mark.parametrize(
    ("devices", "probe_every", "fills"),
    [(1, 0, "metrics.jsonl"), (1, 1, "trace.jsonl"), (2, 0, "metrics.jsonl")],
    ids=["rows", "measurements", "two processes"],
)
def test_a_full_disk_is_one_line_and_the_run_resumes_with_room(tmp_path, devices, probe_every, fills):
    recipe = small_language(tmp_path, steps=240, probe_every=probe_every)
    command = [*words(recipe, tmp_path / "run"), "--devices", str(devices)]
    full = run_command(*command, largest_file=LIMIT)
    assert full.returncode == 1
    # The probe warns before; the command itself has one line to say.
    assert full.stderr.count("curvestep: ") == 1, full.stderr
    assert "Traceback" not in full.stderr
    assert re.search(
        r"^curvestep: No space left in .*run\. The run so far is kept: free space, then `--resume`",
        full.stderr,
        re.MULTILINE,
    )
    left = TrainedRun.load(tmp_path / "run")
    assert left.status["status"] == "failed"
    assert LIMIT - 1000 < (tmp_path / "run" / fills).stat().st_size <= LIMIT
    assert len(left.rows()) >= load_checkpoint(tmp_path / "run" / "checkpoint.pt")["step"] > 0
    assert not list((tmp_path / "run").glob(".*.part"))  # no part of a file is left behind

    assert run_command(*command).returncode == 0
    train(recipe, tmp_path / "never-full", progress=False, threads=1, devices=devices)
    assert_same_rows(tmp_path / "run", tmp_path / "never-full")


def test_a_checkpoint_for_which_there_is_no_room_leaves_the_one_before(tmp_path):
    recipe = small_language(tmp_path, steps=30, probe_every=0)
    command = words(recipe, tmp_path / "run")
    full = run_command(*command, largest_file=9_000)  # below the checkpoint
    assert full.returncode == 1
    assert full.stderr.count("\n") == 1, full.stderr
    assert "No space left in" in full.stderr
    assert not (tmp_path / "run" / "checkpoint.pt").exists()
    assert run_command(*command).returncode == 0


def test_a_reproduction_on_a_full_disk_is_one_line_and_ends_with_room(tmp_path):
    command = ("reproduce", "fig7", "--quiet", "--folder", str(tmp_path / "out"))
    full = run_command(*command, largest_file=LIMIT)  # below a picture
    assert full.returncode == 1
    assert full.stderr.count("\n") == 1, full.stderr
    assert "No space left in" in full.stderr
    assert "run the same command again" in full.stderr
    after = run_command(*command)
    assert after.returncode == 0, after.stderr
    assert (tmp_path / "out" / "figures" / "fig7.svg").exists()
