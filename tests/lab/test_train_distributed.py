"""Two processes that share each batch train as one does."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from clipwise.lab.parallel import GlobalBatchNorm2d, global_batch_norm
from clipwise.lab.runs import Run
from clipwise.lab.train import train
from tests.lab.small import small_images, small_language
from tests.processes import run_on_processes

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def _trace(folder):
    rows = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()[1:]]
    names = (
        "step",
        "loss",
        "grad_norm",
        "step_norm",
        "smoothness",
        "kappa",
        "batch_size",
        "lr",
        "coefficient",
    )
    return np.array([[row[name] for name in names] for row in rows])


@pytest.mark.parametrize("kind", ["language", "images"])
def test_two_devices_train_as_one_at_the_same_global_batch(tmp_path, kind):
    fields = {"steps": 20, "precision": "64-true", "probe_every": 5}
    recipe = (
        small_language(tmp_path, **fields)
        if kind == "language"
        else small_images(lr=0.01, batch_size=16, **fields)
    )
    train(recipe, tmp_path / "one", progress=False)
    result = train(recipe, tmp_path / "two", progress=False, devices=2, accelerator="cpu")
    assert result.status == "finished"
    one, two = (Run.load(tmp_path / name) for name in ("one", "two"))
    for column in ("loss", "grad_norm"):
        np.testing.assert_allclose(two.column(column)[1], one.column(column)[1], rtol=0, atol=1e-5)
    assert len(_trace(tmp_path / "one")) == 4
    np.testing.assert_allclose(_trace(tmp_path / "two"), _trace(tmp_path / "one"), rtol=1e-5, atol=1e-5)
    for split in ("valid", "test"):
        rows = [[row["loss"] for row in run.rows(split)] for run in (one, two)]
        np.testing.assert_allclose(rows[1], rows[0], atol=1e-5)


def _batch_norm(rank, data, weights):
    layer = global_batch_norm(nn.Sequential(nn.BatchNorm2d(3)), torch.device("cpu"))
    assert isinstance(layer[0], GlobalBatchNorm2d)
    x = data.chunk(2)[rank].clone().requires_grad_()
    y = layer(x)
    (y * weights.chunk(2)[rank]).sum().backward()
    return y.detach(), x.grad, layer[0].running_mean, layer[0].running_var


def test_batch_norm_over_processes_is_batch_norm_of_the_whole_batch():
    data, weights = 2 + 3 * torch.randn(6, 3, 4, 4), torch.randn(6, 3, 4, 4)
    layer, x = nn.BatchNorm2d(3), data.clone().requires_grad_()
    y = layer(x)
    (y * weights).sum().backward()
    parts = run_on_processes(_batch_norm, data, weights)
    torch.testing.assert_close(torch.cat([part[0] for part in parts]), y.detach())
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), x.grad)
    torch.testing.assert_close(parts[0][2:], (layer.running_mean, layer.running_var))
