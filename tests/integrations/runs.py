"""Small models and what two runs are compared by: every tensor and random state that training leaves."""

import hashlib
import os
import random
import re
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from curvestep import Trace

ROOT = Path(__file__).parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@contextmanager
def warned(match):
    """Somebody warns with these words, once; what a framework itself says does not matter."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield seen
    words = [str(w.message) for w in seen]
    assert len([text for text in words if re.search(match, text)]) == 1, words


def started(*words):
    """Python with these words, on its way."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    return subprocess.Popen(
        [sys.executable, *map(str, words)], env={**os.environ, "PYTHONPATH": paths}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def printed_by(*words):
    """What Python with these words prints, however long that takes."""
    process = started(*words)
    output, _ = process.communicate()
    assert process.returncode == 0, output[-3000:]
    return output


def check_rows_of_ranks(path, *, steps, batch_size):
    """The file of a run on several processes has the rows of the whole batch, clipped at 0.5."""
    rows = list(Trace.load(path))
    assert [row["step"] for row in rows] == list(steps)
    for row in rows:
        assert row["status"] == "ok"
        assert row["batch_size"] == batch_size
        assert row["coefficient"] == pytest.approx(min(1.0, 0.5 / row["grad_norm"]), rel=1e-4)


def digest(value):
    """A hash of nested tensors and numbers, by their bits."""
    found = hashlib.sha256()

    def feed(part):
        if isinstance(part, torch.Tensor):
            bits = part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            found.update(str(part.dtype).encode() + bits)
        elif isinstance(part, dict):
            for key in part:
                found.update(str(key).encode())
                feed(part[key])
        elif isinstance(part, (list, tuple)):
            for item in part:
                feed(item)
        else:
            found.update(repr(part).encode())

    feed(value)
    return found.hexdigest()[:16]


def state_of(model, optimizer):
    """Parameters and buffers, the optimizer, and the global random states."""
    return {
        "model": digest(model.state_dict()),
        "optimizer": digest(optimizer.state_dict()),
        "random": digest([torch.get_rng_state(), random.getstate(), np.random.get_state()]),
    }


def network():
    """BatchNorm changes buffers, dropout draws: both have to come back after every replay."""
    return nn.Sequential(
        nn.Linear(20, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Tanh(), nn.Linear(32, 5)
    ).float()


def classes(count=96):
    """A data set of one float32 vector and one class each."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, 20, generator=generator, dtype=torch.float32)
    y = torch.randint(5, (count,), generator=generator)
    return torch.utils.data.TensorDataset(x, y)


class Drawing(torch.utils.data.Dataset):
    """Draws global random numbers for every sample, as augmentation does."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        x, y = self.data[i]
        return x + 0.01 * torch.randn(x.shape, dtype=x.dtype), y
