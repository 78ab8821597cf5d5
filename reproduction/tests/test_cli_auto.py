"""``--lr auto --max-norm auto`` from the first gradient to the resumed run, as a user types it."""

import json

import pytest

pytest.importorskip("lightning_fabric")

from tests.processes import run_command

from curvestep.calibration.result import read_calibration
from curvestep_reproduction.training.run_folder import TrainedRun
from reproduction.tests.small import write_text


def curvestep(*args, code=0):
    """One command in a process of its own, without a terminal: what it printed, and its complaint."""
    done = run_command(*args)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


@pytest.fixture
def fields(tmp_path):
    sizes = "--embedding 8 --hidden 10 --batch-size 4 --bptt 6 --eval-size 0 --probe-every 1 --steps"
    return ["ptb-lstm", "--corpus", str(write_text(tmp_path / "text.txt")), *sizes.split()]


@pytest.mark.slow
def test_run_trains_with_what_calibrate_prints_and_resumes_with_it(fields, tmp_path):
    said = json.loads(curvestep("calibrate", *fields, "25", "--json")[0])
    words, _ = curvestep("calibrate", *fields, "25")
    folder = tmp_path / "run"
    line = ["train", *fields, "25", "--lr", "auto", "--max-norm", "auto", "--folder", str(folder)]
    out, err = curvestep(*line)
    recipe = TrainedRun.load(folder).recipe
    assert (recipe.lr, recipe.max_norm) == (said["lr"], float(said["max_norm"]))
    assert out.splitlines()[:4] == words.splitlines()[:4]  # the answer, then how the run ended
    assert "finished after 25 steps" in out
    assert err == ""
    cal = read_calibration(folder)
    assert cal is not None
    assert cal.num_gradients == said["num_gradients"] <= 700

    _, refused = curvestep(*line, code=1)
    assert "already holds a run" in refused
    (folder / "calibration.json").write_text(json.dumps({**said, "lr": 99.0}))  # is not asked again
    (folder / "status.json").unlink()  # as if it had been killed
    again, _ = curvestep(*line, "--resume")
    assert "finished after 25 steps" in again
    assert TrainedRun.load(folder).recipe == recipe
