"""Small training loops, with and without a probe, that return every bit of what they did."""

import contextlib
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import curvestep as cs


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Linear(36, 3)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.conv(x))).flatten(1))


class Language(nn.Module):
    """An LSTM with dropout and tied weights."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(13, 6)
        self.lstm = nn.LSTM(6, 6, num_layers=2, dropout=0.3)
        self.decoder = nn.Linear(6, 13)
        self.decoder.weight = self.embedding.weight

    def forward(self, x, hidden):
        out, hidden = self.lstm(self.embedding(x), hidden)
        return self.decoder(out), hidden


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.decoder = nn.Linear(8, 13)

    def forward(self, x):
        return self.decoder(self.layer(self.embedding(x)))


def mlp():
    return nn.Sequential(nn.Linear(6, 10), nn.Dropout(0.5), nn.Tanh(), nn.Linear(10, 3))


MODELS = {"mlp": mlp, "batchnorm": ConvNet, "lstm": Language, "transformer": Transformer}


def batches(name, steps, size=6):
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        if name in ("lstm", "transformer"):
            tokens = torch.randint(13, (8, size), generator=generator)
            tokens = tokens if name == "lstm" else tokens.T
            yield tokens, tokens.roll(1, 0)
        else:
            shape = (size, 6) if name == "mlp" else (size, 2, 5, 5)
            yield torch.randn(shape, generator=generator), torch.randint(3, (size,), generator=generator)


def clipped_sgd(parameters):
    return cs.ClippedSGD(parameters, lr=0.5, max_norm=0.3, momentum=0.5), None


def sgd_and_clip(parameters):
    return torch.optim.SGD(parameters, lr=0.5), 0.3


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01), None


OPTIMIZERS = {"clipped": clipped_sgd, "sgd": sgd_and_clip, "adamw": adamw}


def train(name, make_optimizer, *, steps=50, make_probe=None, wrap=None, share=None, seed=0):
    """Train ``steps`` steps; returns losses, every tensor of the end state, random states, and the probe."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model = MODELS[name]()
    model = model if wrap is None else wrap(model)
    optimizer, max_norm = make_optimizer(model.parameters())
    probe = None if make_probe is None else make_probe(model)
    hidden, losses = None, []
    for x, y in batches(name, steps):
        if share is not None:
            x, y = x[share], y[share]
        carried = None

        def loss_fn(x=x, y=y, hidden=hidden):
            nonlocal carried
            if name == "lstm":
                logits, carried = model(x, hidden)
            else:
                logits = model(x)
            return F.cross_entropy(logits.flatten(0, -2), y.flatten())

        loss = loss_fn()
        if carried is not None:
            hidden = tuple(h.detach() for h in carried)
        loss.backward()
        with contextlib.nullcontext() if probe is None else probe(loss_fn):
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
        losses.append(loss.item())
        optimizer.zero_grad()
        random.random(), np.random.rand()
    state = [*model.state_dict().values(), *tensors_of(optimizer.state_dict()["state"])]
    rng = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    return losses, [t.detach().clone() for t in state], rng, probe


def tensors_of(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = [value[key] for key in value if key != "clip_stats"]
    return [t for part in value for t in tensors_of(part)] if isinstance(value, (list, tuple)) else []


def assert_same_run(one, two):
    assert one[0] == two[0]
    for a, b in zip(one[1], two[1], strict=True):
        assert torch.equal(a, b)
    assert torch.equal(one[2][0], two[2][0])
    assert one[2][1:] == two[2][1:]
