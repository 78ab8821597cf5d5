"""State outside the model: an explanation, refused or not, leaves the run as it was."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import curvestep as cs

CALLS = 0


class Counter:
    """A number without a ``__dict__``."""

    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0


class Counting(nn.Module):
    """A layer and a number that each call changes."""

    def __init__(self, next_number):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.next_number = next_number

    def forward(self, x):
        return (self.layer(x) + 0.1 * self.next_number()).square().mean()


def in_slots():
    counter = Counter()

    def count():
        counter.calls += 1
        return counter.calls

    return count


def in_a_global():
    def count():
        global CALLS
        CALLS += 1
        return CALLS

    return count


def in_a_closure():
    calls = 0

    def count():
        nonlocal calls
        calls += 1
        return calls

    return count


def in_a_namespace():
    counter = SimpleNamespace(calls=0, log=[])

    def count():
        counter.calls += 1
        counter.log.append(counter.calls)
        return len(counter.log)

    return count


def in_another_module():
    norm = nn.BatchNorm1d(2)
    return lambda: norm(torch.randn(3, 2)).sum().item() + norm.running_mean.sum().item()


def in_an_iterator():
    numbers = iter(range(10**6))
    return lambda: next(numbers)


def in_a_generator():
    numbers = (k for k in range(10**6))
    return lambda: next(numbers)


def trained(make, *, ask):
    """Parameters after a run that is explained on its way, and whether that was refused."""
    global CALLS
    CALLS = 0
    torch.manual_seed(0)
    model = Counting(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    spikes = cs.Autopsy(model, model, keep=6).watch(optimizer)
    refused = False
    for step in range(14):
        if ask and step == 10:
            try:
                spikes.explain()
            except RuntimeError:
                refused = True
        optimizer.zero_grad()
        spikes.record(torch.randn(8, 4)).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()], refused


@pytest.mark.parametrize("make", [
    in_slots, in_a_global, in_a_closure, in_a_namespace, in_another_module, in_an_iterator, in_a_generator
])  # fmt: skip
def test_run_goes_on_as_if_nobody_had_asked(make):
    plain, _ = trained(make, ask=False)
    asked, refused = trained(make, ask=True)
    assert refused
    assert all(torch.equal(a, b) for a, b in zip(plain, asked, strict=True))


def test_what_a_loss_writes_down_is_written_once():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []

    def loss_of_batch(batch):
        loss = model(batch).square().mean()
        losses.append(loss.item())
        return loss

    spikes = cs.Autopsy(model, loss_of_batch, keep=6).watch(optimizer)
    for _ in range(10):
        optimizer.zero_grad()
        spikes.record(torch.randn(8, 4)).backward()
        optimizer.step()
    spikes.explain()
    assert len(losses) == 10


def test_iterators_of_an_object_that_is_iterated_over_are_its_own():
    """A progress bar holds the loader's iterator, and a loss may only write to it."""

    class Bar:
        def __init__(self, batches):
            self.batches = iter(batches)
            self.text = ""

        def __iter__(self):
            yield from self.batches

    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    bar = Bar(torch.randn(10, 8, 4))

    def loss_of_batch(batch):
        loss = model(batch).square().mean()
        bar.text = f"{loss.item():.3f}"
        return loss

    spikes = cs.Autopsy(model, loss_of_batch, keep=6).watch(optimizer)
    for batch in bar:
        optimizer.zero_grad()
        spikes.record(batch).backward()
        optimizer.step()
    assert spikes.explain().step < 10


def test_iterator_that_other_methods_of_an_object_read_does_not_matter():
    class Trainer:
        def __init__(self):
            torch.manual_seed(0)
            self.model = nn.Linear(4, 1)
            self.batches = iter(torch.randn(10, 8, 4))
            self.num_losses = 0
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
            self.spikes = cs.Autopsy(self.model, self.loss, keep=6).watch(self.optimizer)

        def loss(self, batch):
            self.num_losses += 1
            return self.model(batch).square().mean()

        def train(self):
            for batch in self.batches:
                self.optimizer.zero_grad()
                self.spikes.record(batch).backward()
                self.optimizer.step()

    trainer = Trainer()
    trainer.train()
    trainer.spikes.explain()
    assert trainer.num_losses == 10
