"""Runs as archives: put back they go on as if nothing had happened; final weights alone."""

import pytest
import torch

from curvestep_reproduction.archives import (
    load_weights,
    pack_runs,
    pack_unfinished,
    put_back,
    runs_below,
    save_weights,
)
from curvestep_reproduction.models import ResNet20
from curvestep_reproduction.tasks import make_task
from curvestep_reproduction.training.devices import run_context
from curvestep_reproduction.training.loop import train
from curvestep_reproduction.training.run_folder import CHECKPOINT, TrainedRun
from reproduction.tests.small import assert_same_rows, interrupt_at, small_images, small_language

COMMIT = "0123456"


@pytest.mark.slow
def test_an_unfinished_run_put_back_ends_as_one_never_stopped(tmp_path):
    recipe = small_language(tmp_path / "data", dropout=0.3)
    train(recipe, tmp_path / "whole", progress=False)
    interrupt_at(8, recipe, tmp_path / "out" / "place" / "run")
    assert pack_unfinished(tmp_path / "out", tmp_path / "unfinished", commit=COMMIT) == ["run"]
    assert put_back(tmp_path / "unfinished", tmp_path / "elsewhere") == ["run"]
    train(recipe, tmp_path / "elsewhere" / "run", resume=True, progress=False)
    assert_same_rows(tmp_path / "elsewhere" / "run", tmp_path / "whole")
    with pytest.raises(ValueError, match="is there already"):
        put_back(tmp_path / "unfinished", tmp_path / "elsewhere")
    assert pack_unfinished(tmp_path / "elsewhere", tmp_path / "none", commit=COMMIT) == []


@pytest.mark.slow
def test_a_damaged_unfinished_archive_is_one_line_and_leaves_no_run(tmp_path):
    interrupt_at(8, small_language(tmp_path / "data"), tmp_path / "out" / "run")
    pack_unfinished(tmp_path / "out", tmp_path / "unfinished", commit=COMMIT)
    archive = tmp_path / "unfinished" / "run.tar.xz"
    archive.write_bytes(archive.read_bytes()[:-200])
    with pytest.raises(ValueError, match=r"run\.tar\.xz is damaged"):
        put_back(tmp_path / "unfinished", tmp_path / "elsewhere")
    assert not list((tmp_path / "elsewhere").glob("*/config.json"))


@pytest.mark.slow
def test_final_weights_give_the_accuracy_of_the_run(tmp_path):
    recipe = small_images()
    result = train(recipe, tmp_path / "out" / "run", progress=False)
    save_weights(tmp_path / "out" / "run", tmp_path / "run.npz")
    with run_context(recipe):
        model = ResNet20().eval()
        model.load_state_dict(load_weights(tmp_path / "run.npz"))
        found = make_task(recipe).evaluate(model, "test", torch.device("cpu"))
    assert found["accuracy"] == result.metrics["test"]["accuracy"]
    (name,) = pack_runs(runs_below(tmp_path / "out"), tmp_path / "kept", commit=COMMIT)
    assert TrainedRun.load(tmp_path / "out" / name).has_ended
    assert (tmp_path / "out" / name / CHECKPOINT).exists()
