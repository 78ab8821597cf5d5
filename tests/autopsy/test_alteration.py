"""Changes of a step: precision on this thread alone, and moments of gradients of every kind."""

import threading

import pytest
import torch
from torch import nn

import curvestep as cs
from tests.autopsy.runs import Overflowing, sgd


def test_autocast_of_another_thread_stays_on_while_a_step_is_explained():
    torch.set_default_dtype(torch.float32)
    dtypes = set()

    def other_thread():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            dtypes.add((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)

    class Beside(Overflowing):
        def loss(self, batch):
            thread = threading.Thread(target=other_thread)
            thread.start()
            thread.join()
            return super().loss(batch)

    run = Beside(sgd, bfloat16=True).steps()
    run.overflow()
    assert run.explain_last().cause == "precision"
    assert dtypes == {torch.bfloat16}


class Spectrum(nn.Module):
    """A complex matrix, or its real and imaginary parts."""

    def __init__(self, *, plain):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(4, 4, 2))
        if not plain:
            self.matrix = nn.Parameter(torch.view_as_complex(self.matrix.detach()))

    def forward(self, x):
        matrix = self.matrix if self.matrix.is_complex() else torch.view_as_complex(self.matrix)
        return x.to(matrix.dtype) @ matrix

    def batch(self):
        return torch.randn(8, 4)


class Words(nn.Module):
    """An embedding whose gradient has the rows of a batch alone, or all."""

    def __init__(self, *, plain):
        super().__init__()
        self.rows = nn.Embedding(10, 4, sparse=not plain)

    def forward(self, words):
        return self.rows(words) - 1.0

    def batch(self):
        return torch.randint(10, (8,))


def explained(model, make):
    """The explanation of a step a thousand times as long as usual."""
    optimizer = make(model.parameters())
    spikes = cs.Autopsy(model, lambda batch: model(batch).abs().square().mean(), keep=6).watch(optimizer)
    for step in range(15):
        if step == 14:
            optimizer.param_groups[0]["lr"] *= 1000
        optimizer.zero_grad()
        spikes.record(model.batch()).backward()
        optimizer.step()
    return spikes.explain(14)


@pytest.mark.parametrize(
    ("kind", "make", "moments"),
    [
        (Words, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), {"momentum"}),
        (Words, lambda p: cs.ClippedSGD(p, lr=0.1, max_norm=1.0, momentum=0.9), {"momentum"}),
        (Spectrum, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), {"momentum"}),
        (Spectrum, lambda p: torch.optim.AdamW(p, lr=0.01), {"momentum", "second moment"}),
        (Spectrum, lambda p: cs.ClippedAdamW(p, lr=0.01, max_norm=1.0), {"momentum", "second moment"}),
    ],
)
def test_sparse_and_complex_gradients_are_explained_as_plain_ones(kind, make, moments):
    explanations = []
    for plain in (False, True):
        torch.manual_seed(0)
        explanations.append(explained(kind(plain=plain), make))
    given, twin = explanations
    assert moments <= given.shares.keys()
    assert given.is_spike
    assert (given.cause, given.rise, given.shares) == (
        twin.cause,
        pytest.approx(twin.rise),
        pytest.approx(dict(twin.shares)),
    )
