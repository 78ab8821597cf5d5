"""Calibration leaves everything as it found it, in every end."""

import random
import signal
from collections import UserList

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from curvestep import ClippedAdamW, ClippedSGD, calibrate, clip
from tests.calibration.models import kinds, network
from tests.models import CarriedLanguage, convnet, mlp, transformer

MODELS = {  # with the shape of their inputs, and the number of words where these are words
    "dropout": (lambda: mlp(6, 12, 3, dropout=0.4), (16, 6), None),
    "batchnorm": (convnet, (16, 2, 6, 6), None),
    "lstm": (lambda: nn.Sequential(CarriedLanguage(), nn.Flatten(0, 1)), (4, 9), 11),
    "attention": (lambda: nn.Sequential(transformer(layers=2, dropout=0.2), nn.Flatten(0, 1)), (4, 9), 11),
}


def state_of(model, optimizer):
    """Everything that must come back, as values."""
    return {
        "tensors": [t.detach().clone() for t in (*model.parameters(), *model.buffers())],
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "modes": [m.training for m in model.modules()],
        "optimizer": optimizer.state_dict(),
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False)["state"]["key"].tolist(),
    }


def same(one, two):
    if isinstance(one, torch.Tensor):
        return isinstance(two, torch.Tensor) and torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(same, one, two))
    return one == two


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("optimizer", [
    lambda p: torch.optim.AdamW(p, lr=0.1),
    lambda p: ClippedSGD(p, lr=0.1, max_norm=1.0, momentum=0.9),
])  # fmt: skip
@pytest.mark.parametrize("stepped", [False, True])
def test_model_and_optimizer_are_bit_identical_afterwards(kind, optimizer, stepped):
    make, shape, words = MODELS[kind]
    model = make()
    labels = (shape[0] * shape[1],) if words else shape[:1]
    batches = [
        (torch.randint(words, shape) if words else torch.randn(shape), torch.randint(words or 3, labels))
        for _ in range(9)
    ]

    def loss(batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    opt = optimizer(model.parameters())
    if stepped:
        loss(batches[0]).backward()
        opt.step()
    attributes = {name: value for name, value in vars(model).items() if not name.startswith("_")}
    gradients = [p.grad for p in model.parameters()]
    before = state_of(model, opt)
    cal = calibrate(model, loss, batches, optimizer=opt, budget=48)
    assert cal.lr > 0
    assert same(before, state_of(model, opt))
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(vars(model)[name] is value for name, value in attributes.items())
    assert ("stepped" in kinds(cal)) == stepped


@pytest.mark.parametrize("end", [KeyboardInterrupt, RuntimeError, "signal"])
@pytest.mark.parametrize("after", [1, 2, 3, 10, 18, 30, 34, 40, 50, 51, 60, 70, 80])
def test_interrupt_at_any_arm_leaves_everything_as_it_was(end, after):
    torch.manual_seed(0)
    model = mlp(6, 12, 3, batchnorm=True, dropout=0.3)
    opt = ClippedAdamW(model.parameters(), lr=1.0, max_norm=1.0)
    x = torch.randn(480, 6)
    data = TensorDataset(x, x[:, :3].argmax(1))
    loader = DataLoader(data, 16, shuffle=True, generator=torch.Generator().manual_seed(3))
    before, drawn = state_of(model, opt), loader.generator.get_state()
    calls = 0

    def loss(batch):
        nonlocal calls
        calls += torch.is_grad_enabled()
        if calls == after:
            if end == "signal":
                signal.raise_signal(signal.SIGINT)
            raise end("stop")
        return F.cross_entropy(model(batch[0]), batch[1])

    with pytest.raises((KeyboardInterrupt, RuntimeError)):
        calibrate(model, loss, loader, optimizer=opt, schedule="warmup-decay")
    assert same(before, state_of(model, opt))
    assert torch.equal(loader.generator.get_state(), drawn)


def loaders():
    data = TensorDataset(torch.randn(96, 6), torch.randint(3, (96,)))
    seeded = lambda: torch.Generator().manual_seed(7)  # noqa: E731
    yield DataLoader(data, 8, shuffle=True)
    yield DataLoader(data, 8, shuffle=True, generator=seeded())
    yield DataLoader(data, 8, sampler=RandomSampler(data, generator=seeded()))
    sampler = RandomSampler(data, generator=seeded())
    yield DataLoader(data, batch_sampler=BatchSampler(sampler, 8, drop_last=False))


@pytest.mark.parametrize("kind", range(4))
def test_training_sees_the_batches_that_it_would_have_seen(kind):
    firsts = []
    for calibrated in (False, True):
        torch.manual_seed(5)
        model, loss, _ = network()
        torch.manual_seed(6)
        loader = list(loaders())[kind]
        if calibrated:
            calibrate(model, loss, loader, optimizer="AdamW", budget=48)
        firsts.append([batch[0] for batch in loader])
    assert same(*firsts)


def test_training_goes_as_if_it_had_not_been_calibrated():
    finals = []
    for first in (False, True):
        model, loss, batches = network()
        opt = torch.optim.AdamW(model.parameters(), lr=0.5)
        clip(opt, max_norm=0.1)
        if first:
            calibrate(model, loss, batches, optimizer=opt, schedule="warmup-decay")
        for batch in batches:
            opt.zero_grad()
            loss(batch).backward()
            opt.step()
        finals.append(([p.detach().clone() for p in model.parameters()], dict(opt.clip_stats())))
    assert same(*finals)


def test_memory_is_one_copy_of_the_model_and_one_state_at_a_time():
    copies = 0
    model, loss, batches = network()

    class Counted(torch.optim.AdamW):
        alive = 0

        def __setstate__(self, state):
            super().__setstate__(state)
            Counted.alive += 1

        def __del__(self):
            Counted.alive -= 1

    opt = Counted(model.parameters(), lr=1.0)
    Counted.alive = 0
    copies = UserList()  # what a loss adds to a list is taken back

    def watched(batch):
        copies.append(Counted.alive)
        return loss(batch)

    calibrate(model, watched, batches, optimizer=opt, schedule="warmup-decay")
    assert max(copies) == 1
