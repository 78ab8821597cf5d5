"""State that a model keeps in attributes is as it would be without a probe."""

import collections
import contextlib
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from curvestep import calibrate
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


@pytest.mark.parametrize("twister", [True, False])
def test_numpys_state_is_exact_between_the_two_numbers_of_one_draw(twister, monkeypatch):
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.MT19937(3) if twister else np.random.PCG64(3))
    if not twister:  # whose memory is another
        monkeypatch.delattr("ctypes.string_at")
    try:
        for draw in (np.random.rand, np.random.randn, np.random.randn, np.random.randn, float):
            draw()
            state = RandomState.capture()
            drawn = np.random.randn(3)
            state.restore()
            again = RandomState.capture()
            assert np.array_equal(np.random.randn(3), drawn)
            again.restore()
            assert np.array_equal(np.random.randn(3), drawn)
            state.restore()
    finally:
        np.random.set_bit_generator(before)


class Counting(nn.Module):
    """A layer whose output depends on what earlier calls left behind, in one of many ways."""

    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind = nn.Linear(6, 3), kind
        self._count, self._pair, self.log, self.table = 0, (0, 1.0), [], {"count": 0}
        self.mean, self._ring, self._names = torch.zeros(()), collections.deque(maxlen=3), set()
        self.rows, self.nested = ([torch.zeros(())],), {"inner": {"count": 0}}
        self.draws = {
            "torch": torch.Generator().manual_seed(0), "python": random.Random(0),
            "numpy": np.random.default_rng(0), "old numpy": np.random.RandomState(0),
        }  # fmt: skip
        self._source, self._system = random.Random(1), random.SystemRandom()

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

    def tensor_in_a_list(self, x):
        return self.rows[0][0].mul_(0.9).add_(0.1 * x.detach().mean()).item()

    def dict_in_a_dict(self, x):
        self.nested["inner"]["count"] += 1
        return self.nested["inner"]["count"] // 2

    def generators_in_a_dict(self, x):
        drawn = torch.rand((), generator=self.draws["torch"]).item() + self.draws["python"].random()
        return drawn + self.draws["numpy"].random() + self.draws["old numpy"].random_sample()

    def private_generator(self, x):
        return self._source.random()

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
        with probe(loss_fn) if probed else contextlib.nullcontext():
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


def test_large_tensors_and_what_is_in_long_lists_are_not_copied():
    model = nn.Module()
    model.small, model.large = torch.zeros(10), torch.zeros((1 << 18) + 1)
    model.memory = collections.deque(torch.zeros(1) for _ in range(1001))
    state = PassState(model)
    for tensor in (model.small, model.large, model.memory[0]):
        tensor.add_(1.0)
    assert state.changed_for_good() is model.large
    state.restore()
    assert [t[0].item() for t in (model.small, model.large, model.memory[0])] == [0.0, 1.0, 1.0]


class Frozen(nn.Module):
    """A layer of ours: of torch's own no private attribute is kept."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2), requires_grad=False)


def test_parameters_are_no_state_of_a_pass():
    model = Frozen()
    state = PassState(model)
    model.weight.add_(1.0)
    state.restore()
    assert model.weight.tolist() == [1.0, 1.0]


def test_what_ddp_keeps_about_its_ranks_is_no_state_of_a_pass():
    wrapper = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper.require_backward_grad_sync = False  # inside of no_sync()
    state = PassState(wrapper)
    wrapper.require_backward_grad_sync = True
    state.restore()
    assert wrapper.require_backward_grad_sync


class Averaging(nn.Linear):
    """Keeps the mean of its inputs in a tensor that is no buffer, and hardly uses it."""

    def __init__(self):
        super().__init__(6, 3)
        self.table = torch.zeros(1 << 16, 6)

    def forward(self, x):
        self.table.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return super().forward(x) * (1 + 1e-9 * self.table[0, 0])


@pytest.mark.parametrize("act", ["probe", "calibrate"])
def test_a_large_tensor_that_changes_in_place_is_refused_though_the_gradient_hardly_changes(act):
    torch.manual_seed(0)
    model, optimizer = Averaging(), torch.optim.SGD
    batches = [(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(24)]

    def loss_of_batch(batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    def measured():
        probe = SmoothnessProbe(model, every=1)
        loss_of_batch(batches[0]).backward()
        with probe(lambda: loss_of_batch(batches[0])):
            optimizer(model.parameters(), lr=0.1).step()

    def calibrated():
        calibrate(model, loss_of_batch, batches, optimizer=optimizer)

    with pytest.raises((RuntimeError, ValueError), match=r"shape \(65536, 6\) in place.*register_buffer"):
        {"probe": measured, "calibrate": calibrated}[act]()
