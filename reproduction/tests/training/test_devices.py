"""Two processes that share each batch train as one does."""

import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.processes import run_on_processes
from torch import nn
from torch.multiprocessing.spawn import ProcessRaisedException

from curvestep.cli import main
from curvestep_reproduction.models import GlobalBatchNorm2d
from curvestep_reproduction.training.devices import make_fabric, raised_by_process
from curvestep_reproduction.training.loop import train
from curvestep_reproduction.training.run_folder import TrainedRun
from reproduction.tests.small import small_images, small_language

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def _trace(folder):
    rows = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()[1:]]
    names = "step loss grad_norm step_norm smoothness kappa batch_size lr coefficient".split()
    return np.array([[row[name] for name in names] for row in rows])


def _recipe(folder, kind):
    fields = {"precision": "64-true", "momentum": 0.5}
    if kind == "language":
        return small_language(folder, steps=20, probe_every=5, **fields)
    return small_images(lr=0.01, batch_size=8, pooling=4, steps=12, probe_every=4, **fields)


def _assert_same(two, one):
    """Two run folders agree in losses, norms, measurements, held-out losses and parameters."""
    runs = [TrainedRun.load(folder) for folder in (one, two)]
    for column in ("loss", "grad_norm"):
        steps, values = zip(*(run.column(column) for run in runs), strict=True)
        assert list(steps[0]) == list(steps[1]) == list(range(1, runs[0].recipe.steps + 1))
        np.testing.assert_allclose(values[1], values[0], rtol=0, atol=1e-5)
    assert len(_trace(one)) == runs[0].recipe.steps // runs[0].recipe.probe_every
    np.testing.assert_allclose(_trace(two), _trace(one), rtol=1e-5, atol=1e-5)
    for split in ("valid", "test"):
        rows = [[row["loss"] for row in run.rows(split)] for run in runs]
        np.testing.assert_allclose(rows[1], rows[0], atol=1e-5)
    saved = [torch.load(folder / "checkpoint.pt", weights_only=True) for folder in (one, two)]
    torch.testing.assert_close(*(content["model"] for content in saved), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(*(content["optimizer"]["state"] for content in saved), rtol=1e-7, atol=1e-7)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """By kind of model: the recipe, and the folder of a run on one device."""

    @cache
    def run(kind):
        folder = tmp_path_factory.mktemp(kind)
        recipe = _recipe(folder, kind)
        train(recipe, folder / "one", progress=False)
        return recipe, folder / "one"

    return run


# A language model is interrupted and resumed below.
def test_two_devices_train_as_one_at_the_same_global_batch(tmp_path, alone):
    recipe, one = alone("images")
    result = train(recipe, tmp_path / "two", progress=False, devices=2)
    assert result.status == "finished"
    _assert_same(tmp_path / "two", one)


def _interrupted(recipe, folder, *, rows, **arguments):
    """Train on processes of its own until ``rows`` rows are there, then tell them to end.

    The signal may come after the last step: then once more from the start.
    """
    for _ in range(20):
        result = _signalled(recipe, folder, rows=rows, **arguments)
        if result.status == "interrupted":
            break
        shutil.rmtree(folder)
    return result


def _signalled(recipe, folder, *, rows, **arguments):
    ended = threading.Event()
    others = set(multiprocessing.active_children())  # left by somebody else, if there are any

    def watch():
        path = folder / "metrics.jsonl"
        while not ended.wait(0.002):
            if path.exists() and path.read_bytes().count(b"\n") >= rows:
                for child in set(multiprocessing.active_children()) - others:
                    os.kill(child.pid, signal.SIGTERM)
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        return train(recipe, folder, progress=False, **arguments)
    finally:
        ended.set()
        watcher.join()


def test_a_run_of_two_devices_is_resumed_on_two_and_on_one(tmp_path, alone):
    recipe, one = alone("language")
    two = {"devices": 2}
    stopped = _interrupted(recipe, tmp_path / "two", rows=5, **two)
    assert stopped.status == "interrupted"
    assert 5 <= stopped.step < recipe.steps
    shutil.copytree(tmp_path / "two", tmp_path / "alone")
    assert train(recipe, tmp_path / "two", progress=False, resume=True, **two).status == "finished"
    _assert_same(tmp_path / "two", one)
    with pytest.warns(UserWarning, match="header differs in: world_size"):
        resumed = train(recipe, tmp_path / "alone", progress=False, resume=True)
    assert resumed.status == "finished"
    _assert_same(tmp_path / "alone", one)


def _listening(fabric):
    """Addresses on which this process listens, in the kernel's hexadecimal."""
    own = {str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
    ]
    return [row[1].partition(":")[0] for row in rows if f"socket:[{row[9]}]" in own and row[3] == "0A"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processes_listen_on_the_loopback_interface_only(tmp_path):
    fabric = make_fabric(small_language(tmp_path), devices=2)
    found = fabric.launch(_listening)
    assert found
    assert set(found) <= {"0100007F", "0" * 24 + "01000000"}


def _batch_norm(rank, data, weights):
    layer = GlobalBatchNorm2d(3)
    x = data.chunk(2)[rank].clone().requires_grad_()
    y = layer(x)
    (y * weights.chunk(2)[rank]).sum().backward()
    return y.detach(), x.grad, layer.running_mean, layer.running_var


def test_batch_norm_over_processes_is_batch_norm_of_the_whole_batch():
    data, weights = 2 + 3 * torch.randn(6, 3, 4, 4), torch.randn(6, 3, 4, 4)
    layer, x = nn.BatchNorm2d(3), data.clone().requires_grad_()
    y = layer(x)
    (y * weights).sum().backward()
    parts = run_on_processes(_batch_norm, data, weights)
    torch.testing.assert_close(torch.cat([part[0] for part in parts]), y.detach())
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), x.grad)
    torch.testing.assert_close(parts[0][2:], (layer.running_mean, layer.running_var))


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        ("ValueError: There is no text.", ValueError("There is no text.")),
        ("curvestep_reproduction.data.download.DataError: no corpus", ValueError("no corpus")),
        ("FileNotFoundError: [Errno 2] No such file: 'a: b'", OSError("[Errno 2] No such file: 'a: b'")),
        ("KeyError: 'model'", RuntimeError("KeyError: 'model'")),
        ("some.where.OddError: 3", RuntimeError("some.where.OddError: 3")),
    ],
)
def test_what_a_process_raised_is_told_from_its_traceback(raised, expected):
    before = "-- Process 1 terminated with the following error:\nTraceback (most recent call last):\n  File\n"
    found = raised_by_process(ProcessRaisedException(f"{before}{raised}\n", 1, 1))
    assert (type(found), str(found)) == (type(expected), str(expected))


def test_what_fails_on_a_process_is_one_line(tmp_path, capfd):
    words = ["ptb-lstm", "--corpus", str(tmp_path / "none"), "--folder", str(tmp_path / "run"), "--steps=2"]
    assert main(["train", *words, "--devices=2", "--quiet", "--threads=1"]) == 1
    said = capfd.readouterr().err
    assert said.startswith(f"curvestep: The corpus {tmp_path / 'none'} does not exist")
    assert said.count("\n") == 1
    assert TrainedRun.load(tmp_path / "run").status["status"] == "failed"
