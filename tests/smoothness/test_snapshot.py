"""State that a model keeps in attributes is as it would be without a probe."""

import collections

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from curvestep.smoothness.probe import SmoothnessProbe
from curvestep.smoothness.snapshot import PassState, RandomState


def test_without_an_accelerator_nobody_asks_which_it_is(monkeypatch):
    def refuse(*_):
        raise RuntimeError("Cannot access accelerator device when none is available.")  # torch 2.6

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", refuse)
    state = RandomState.capture()
    drawn = torch.rand(3)
    state.restore()
    assert torch.equal(torch.rand(3), drawn)


class Counting(nn.Module):
    """A layer whose output depends on what earlier calls left behind, in one of many ways."""

    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind = nn.Linear(6, 3), kind
        self._count, self._pair, self.log, self.table = 0, (0, 1.0), [], {"count": 0}
        self.mean, self._ring, self._names = torch.zeros(()), collections.deque(maxlen=3), set()

    def forward(self, x):
        return self.layer(x) * (1 + 0.1 * getattr(self, self.kind)(x))

    def private_number(self, x):
        self._count += 1
        return self._count // 3

    def private_pair(self, x):
        self._pair = (self._pair[0] + 1, 2.0)
        return self._pair[0]

    def appended_list(self, x):
        self.log.append(1.0)
        return len(self.log) // 3

    def changed_dict(self, x):
        self.table["count"] += 1
        return self.table["count"] // 2

    def tensor_in_place(self, x):
        return self.mean.mul_(0.9).add_(0.1 * x.detach().mean()).item()

    def ring(self, x):
        self._ring.append(float(len(self._ring)))
        return sum(self._ring)

    def names(self, x):
        self._names.add(len(self._names))
        return len(self._names)

    def made_on_first_use(self, x):
        self._late = getattr(self, "_late", 0) + 1
        return self._late


KINDS = [name for name in vars(Counting) if name[0] != "_" and name != "forward"]


def losses(kind, *, probed):
    torch.manual_seed(0)
    model = Counting(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SmoothnessProbe(model, every=3)
    seen = []
    for _ in range(8):
        x, y = torch.randn(4, 6), torch.randint(3, (4,))

        def loss_fn(x=x, y=y):
            return F.cross_entropy(model(x), y)

        loss = loss_fn()
        seen.append(loss.item())
        loss.backward()
        if probed:
            with probe(loss_fn):
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
    assert not probed or (len(probe.trace) == 3 and probe.trace.ok.all())
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_state_in_attributes_is_kept_for_replays_and_put_back_after(kind):
    assert losses(kind, probed=True) == losses(kind, probed=False)


def test_tensor_that_was_not_changed_is_not_written_to():
    model = nn.Module()
    model.table = torch.ones(3)
    w = torch.ones(3, requires_grad=True)
    product = (w * model.table).sum()  # keeps the table for its backward pass
    PassState(model).restore()
    product.backward()
    torch.testing.assert_close(w.grad, torch.ones(3))


def test_large_tensor_is_not_copied():
    model = nn.Module()
    model.small, model.large = torch.zeros(10), torch.zeros((1 << 18) + 1)
    assert [t is model.small for t, _, _ in PassState(model)._tensors] == [True]
