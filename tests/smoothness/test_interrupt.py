"""Ctrl-C at any line of a measurement leaves parameters, buffers and gradients as training had them."""

import random
import signal
import sys

import pytest
import torch
from torch import nn

import curvestep as cs
from curvestep.smoothness import determinism, replay, snapshot
from curvestep.smoothness.replay import Replay
from tests.models import mlp


def prepared():
    """A model with buffers, a measured step of it that is about to be taken, and what it holds after."""
    torch.manual_seed(0)
    random.seed(0)
    model = mlp(4, 6, 1, batchnorm=True)
    optimizer = cs.ClippedSGD(model.parameters(), lr=0.1, max_norm=1.0)
    probe = cs.SmoothnessProbe(model, every=1, fractions=(0.25, 0.5, 1.0)).watch(optimizer)
    x = torch.randn(8, 4)
    probe.record(lambda: model(x).square().mean()).backward()
    return model, optimizer


def held(model):
    values = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    return [t.detach().clone() for t in values] + [torch.get_rng_state()]


FILES = {determinism.__file__, replay.__file__, snapshot.__file__}


def interrupted_at(count, act):
    """Run ``act`` with a signal before the ``count``-th line of the modules; how many there were."""
    lines = 0

    def trace(frame, event, _):
        nonlocal lines
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            lines += 1
            if lines == count:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("stride", [17, pytest.param(1, marks=pytest.mark.slow)])
def test_an_interrupt_before_any_line_of_a_measured_step_leaves_what_training_had(stride):
    interrupted_at(-1, prepared()[1].step)  # what is done once in a process has lines of its own
    model, optimizer = prepared()
    start = held(model)
    total = interrupted_at(-1, optimizer.step)
    end = held(model)
    handler, backward = signal.getsignal(signal.SIGINT), torch.Tensor.backward
    assert total > 500
    wrong = []
    for count in range(1, total, stride):
        model, optimizer = prepared()
        with pytest.raises(KeyboardInterrupt):
            interrupted_at(count, optimizer.step)
        # Before the step or after it, never between.
        if not any(all(map(torch.equal, held(model), state)) for state in (start, end)):
            wrong.append(count)
        assert signal.getsignal(signal.SIGINT) is handler
        assert not Replay.running
        assert torch.is_grad_enabled()
        assert torch.Tensor.backward is backward
    assert wrong == []


def test_a_second_interrupt_while_the_first_is_put_back_changes_nothing():
    model = nn.Linear(3, 1)
    before = [p.detach().clone() for p in model.parameters()]
    handler = signal.getsignal(signal.SIGINT)
    open_ = Replay(model, lambda: model.weight.square().sum())
    copies = iter(range(1000))

    class Twice(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "copy_" in str(func) and next(copies) in (0, 1):
                signal.raise_signal(signal.SIGINT)
            return func(*args, **(kwargs or {}))

    def interrupted_twice():
        with open_ as moved:
            moved.move([torch.ones(1, 3), torch.ones(1)], 1.0)
            with Twice():
                moved.return_home()

    with pytest.raises(KeyboardInterrupt):
        interrupted_twice()
    assert all(map(torch.equal, model.parameters(), before))
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_signal_whose_handler_does_not_raise_lets_the_measurement_go_on():
    seen = []
    old = signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
    try:
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 3.0)

        def loss_fn():
            signal.raise_signal(signal.SIGUSR1)
            return 2.0 * model.weight.square().sum()

        with Replay(model, loss_fn) as measured:
            there = measured.gradient_at([torch.ones(1, 1)], 0.5)
        assert there.gradients[0].item() == 14.0
        assert model.weight.item() == 3.0
        assert len(seen) == 1
        assert signal.getsignal(signal.SIGUSR1) is not None
    finally:
        signal.signal(signal.SIGUSR1, old)


def test_replays_inside_each_other_are_put_back_from_the_inside_out():
    model = nn.Linear(2, 1, bias=False)
    before = model.weight.detach().clone()

    def moved():
        with Replay(model, lambda: model.weight.sum()) as outer:
            outer.move([torch.ones(1, 2)], 1.0)
            with Replay(model, lambda: model.weight.sum()) as inner:
                inner.move([torch.ones(1, 2)], 5.0)
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        moved()
    assert torch.equal(model.weight, before)


def test_hooks_that_an_interrupt_leaves_behind_take_no_gradient_of_training(monkeypatch):
    model, x = nn.Linear(2, 1), torch.ones(3, 2)

    def interrupt(handle):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.utils.hooks.RemovableHandle, "remove", interrupt)
    with pytest.raises(KeyboardInterrupt), Replay(model, lambda: model(x).square().mean()) as replay:
        replay.change([None, None])
    monkeypatch.undo()
    model(x).sum().backward()
    assert model.weight.grad.tolist() == [[3.0, 3.0]]
    assert model.bias.grad.tolist() == [3.0]
