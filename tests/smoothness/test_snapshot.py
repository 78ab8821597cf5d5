"""State that a model keeps in attributes is as it would be without a probe."""

import collections
import contextlib
import copy
import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from curvestep import Autopsy, calibrate
from curvestep.smoothness.probe import SmoothnessProbe
from curvestep.smoothness.snapshot import PassState, RandomState
from tests.models import mlp


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


class Following(nn.Module):
    """A frozen copy of an encoder follows it inside of the forward pass, as in MoCo or BYOL."""

    def __init__(self, how, width=6):
        super().__init__()
        self.encoder = mlp(6, width, 3)
        self.teacher = copy.deepcopy(self.encoder).requires_grad_(False)
        self.how = how

    def forward(self, x):
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.encoder.parameters(), strict=True):
                if self.how == "in place":
                    slow.lerp_(fast, 0.1)
                elif self.how == "data in place":  # which leaves the version as it was
                    slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
                else:
                    slow.data = 0.9 * slow.data + 0.1 * fast.data
        return (self.encoder(x) - self.teacher(x + 1)).square().mean()


WAYS = ["in place", "data in place", "other data"]


def followed(how, kind, make_optimizer):
    """Weights of the teacher's run after some steps, of which some are measured."""
    torch.manual_seed(0)
    model = Following(how)
    optimizer = make_optimizer(model.encoder.parameters())
    probe = SmoothnessProbe(model, every=2, layers=kind == "layers")
    if kind in ("watch", "layers"):
        probe.watch(optimizer)
    for _ in range(8):
        x = torch.randn(8, 6)

        def loss_fn(x=x):
            return model(x)

        optimizer.zero_grad()
        (loss_fn() if kind in ("none", "with") else probe.record(loss_fn)).backward()
        with probe(loss_fn) if kind == "with" else contextlib.nullcontext():
            optimizer.step()
    assert kind == "none" or (len(probe.trace) == 4 and probe.trace.ok.all())
    return model.state_dict().values()


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(
    "make_optimizer", [partial(torch.optim.SGD, lr=0.5), partial(torch.optim.AdamW, lr=0.01)]
)
def test_a_teacher_that_the_forward_pass_moves_is_as_without_a_probe(how, make_optimizer):
    plain = followed(how, "none", make_optimizer)
    for kind in ("with", "watch", "layers"):
        assert all(map(torch.equal, followed(how, kind, make_optimizer), plain))


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("act", ["calibrate", "autopsy"])
def test_a_teacher_is_put_back_after_a_calibration_and_an_autopsy(how, act):
    torch.manual_seed(0)
    model = Following(how)
    optimizer = torch.optim.SGD(model.encoder.parameters(), lr=0.1)
    recorder = Autopsy(model, model).watch(optimizer)
    for _ in range(8):
        optimizer.zero_grad()
        recorder.record(torch.randn(8, 6)).backward()
        optimizer.step()
    before = copy.deepcopy(model.state_dict())
    if act == "autopsy":
        recorder.explain()
    else:
        batches = [torch.randn(8, 6) for _ in range(24)]
        calibrate(model, model, batches, optimizer=optimizer, schedule="warmup-decay", progress=False)
    assert all(map(torch.equal, model.state_dict().values(), before.values()))


def test_frozen_parameters_that_do_not_change_are_copied_once_and_a_large_backbone_never():
    model = Following("in place")
    model.backbone = nn.Linear(600, 600).requires_grad_(False)
    before = [p.detach().clone() for p in model.parameters()]
    states = [PassState(model) for _ in range(3)]
    copied = {id(f): f.value.numel() for state in states for f in state.frozen}
    assert sum(copied.values()) == sum(p.numel() for p in model.teacher.parameters()) + 600
    with torch.no_grad():
        for p in model.teacher.parameters():
            p.add_(1.0)
    states[0].restore()
    assert all(map(torch.equal, model.parameters(), before))
    model.backbone.weight.add_(1.0)
    assert states[0].changed_for_good() is model.backbone.weight


def test_a_parameter_that_is_trained_by_now_is_not_put_back():
    model = mlp()
    model[0].requires_grad_(False)
    state = PassState(model)
    with torch.no_grad():
        model[0].weight.requires_grad_().add_(1.0)
    moved = model[0].weight.detach().clone()
    state.restore()
    assert torch.equal(model[0].weight, moved)


def test_what_ddp_keeps_about_its_ranks_is_no_state_of_a_pass():
    wrapper = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper.require_backward_grad_sync = False  # inside of no_sync()
    state = PassState(wrapper)
    wrapper.require_backward_grad_sync = True
    state.restore()
    assert wrapper.require_backward_grad_sync


class Averaging(nn.Linear):
    """Keeps the mean of its inputs in a large tensor, and hardly uses it."""

    def __init__(self, kind):
        super().__init__(6, 3)
        self.table = torch.zeros(1 << 16, 6)
        self.in_data = kind == "data"
        if kind != "attribute":
            self.table = nn.Parameter(self.table, requires_grad=False)

    def forward(self, x):
        table = self.table.data if self.in_data else self.table
        with torch.no_grad():
            table.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return super().forward(x) * (1 + 1e-9 * self.table[0, 0].detach().clone())


@pytest.mark.parametrize("act", ["probe", "calibrate"])
@pytest.mark.parametrize("kind", ["attribute", "frozen", "data"])
def test_a_large_tensor_that_changes_in_place_is_refused(act, kind):
    torch.manual_seed(0)
    model, optimizer = Averaging(kind), torch.optim.SGD
    batches = [(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(24)]
    tables = []

    def loss_of_batch(batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    def measured():
        probe = SmoothnessProbe(model, every=1)
        loss_of_batch(batches[0]).backward()
        tables.append(model.table.detach().clone())
        with probe(lambda: loss_of_batch(batches[0])):
            optimizer([model.weight], lr=0.1).step()

    def calibrated():
        calibrate(model, loss_of_batch, batches, optimizer=optimizer)

    with pytest.raises((RuntimeError, ValueError), match=r"shape \(65536, 6\) in place.*register_buffer"):
        {"probe": measured, "calibrate": calibrated}[act]()
    if act == "probe" and kind != "data":  # refused before a replay
        assert torch.equal(model.table, tables[0])
