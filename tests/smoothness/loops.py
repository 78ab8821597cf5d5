"""Small training loops, with and without a probe, that return every bit of what they did."""

import contextlib
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import curvestep as cs
from tests.models import Language, convnet, mlp, transformer


def measured_sgd(model, *, lr=0.1, every=1, **options):
    """SGD, and a probe that measures every step."""
    return torch.optim.SGD(model.parameters(), lr=lr), cs.SmoothnessProbe(model, every=every, **options)


def watched_sgd(model, **options):
    """The same, with the probe watching."""
    optimizer, probe = measured_sgd(model, **options)
    return optimizer, probe.watch(optimizer)


def block_steps(probe, optimizer, loss_fn, count=1, *, before=lambda: None, inside=lambda: None):
    """Steps in blocks of the probe, with something ``before`` the loss and ``inside`` the block."""
    for _ in range(count):
        optimizer.zero_grad()
        before()
        loss_fn().backward()
        with probe(loss_fn):
            inside()
            optimizer.step()


def recorded_steps(probe, optimizer, loss_fn, count=1):
    """Steps that a watching probe measures."""
    for _ in range(count):
        optimizer.zero_grad()
        probe.record(loss_fn).backward()
        optimizer.step()


MODELS = {
    "mlp": lambda: mlp(6, 10, 3, dropout=0.5),
    "batchnorm": convnet,
    "lstm": Language,
    "transformer": lambda: transformer(13),
}


def batches(name, steps, size=6):
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        if name in ("lstm", "transformer"):
            tokens = torch.randint(13, (8, size), generator=generator)
            tokens = tokens if name == "lstm" else tokens.T
            yield tokens, tokens.roll(1, 0)
        else:
            shape = (size, 6) if name == "mlp" else (size, 2, 6, 6)
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
    assert all(torch.equal(a, b) for a, b in zip(one[1], two[1], strict=True))
    assert torch.equal(one[2][0], two[2][0])
    assert one[2][1:] == two[2][1:]
