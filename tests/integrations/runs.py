"""Small models and what two runs are compared by: every tensor and random state that training leaves."""

import hashlib
import random

import numpy as np
import torch
from torch import nn


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
