"""Processes that torchrun started share one run folder."""

import os
import subprocess
import sys

import numpy as np
import pytest

from curvestep.lab.run.folder import Run
from curvestep.lab.run.loop import train
from tests.lab.small import small_language

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def torchrun(recipe, folder, *words):
    """``curvestep train`` on two processes, with what `small_language` changes in its recipe."""
    names = ("corpus", "embedding", "hidden", "batch_size", "bptt", "steps", "eval_size", "lr", "max_norm")
    names += ("probe_every", "precision")
    options = [f"--{name.replace('_', '-')}={getattr(recipe, name)}" for name in names]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "curvestep", "train", recipe.name, *options, f"--folder={folder}", *words]
    command += ["--accelerator=cpu", "--threads=1", "--quiet"]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def test_two_processes_of_torchrun_train_as_one_and_resume_what_has_ended(tmp_path):
    recipe = small_language(tmp_path, steps=6, probe_every=3, precision="64-true")
    train(recipe, tmp_path / "one", progress=False)
    for words in ((), ("--resume",)):
        ended = torchrun(recipe, tmp_path / "two", "--devices=2", *words)
        assert ended.returncode == 0, ended.stderr
        assert "finished after 6 steps" in ended.stdout
        one, two = (Run.load(tmp_path / name) for name in ("one", "two"))
        assert two.recipe == recipe
        for split in ("train", "valid", "test"):
            assert two.column("loss", split)[0].tolist() == one.column("loss", split)[0].tolist()
            np.testing.assert_allclose(two.column("loss", split)[1], one.column("loss", split)[1], rtol=1e-10)


def test_a_folder_of_another_recipe_is_one_line_and_hangs_no_process(tmp_path):
    train(small_language(tmp_path), tmp_path / "run", progress=False)
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    ended = torchrun(small_language(tmp_path, lr=3.0), tmp_path / "run", "--devices=2", "--resume")
    assert ended.returncode != 0
    (said,) = [line for line in ended.stderr.splitlines() if line.startswith("curvestep: ")]
    assert "a run of another recipe (lr 1.0 → 3.0)" in said
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


@pytest.mark.parametrize("devices", [1, 3])
def test_another_number_of_devices_than_torchrun_started_is_refused(tmp_path, monkeypatch, devices):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "here")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=f"must be the 2 processes that torchrun started, got {devices}"):
        train(small_language(tmp_path), tmp_path / "run", progress=False, devices=devices)
    assert not (tmp_path / "run").exists()
