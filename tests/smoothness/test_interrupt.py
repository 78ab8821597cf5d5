"""Ctrl-C at any line of a measurement leaves parameters, buffers and gradients as training had them."""

import random
import signal
import sys
import threading

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import curvestep as cs
from curvestep.smoothness import determinism, replay, snapshot
from curvestep.smoothness.replay import Replay
from tests.models import mlp


def prepared():
    """A model with buffers, and an optimizer whose next step is measured."""
    torch.manual_seed(0)
    random.seed(0)
    model = mlp(4, 6, 1, batchnorm=True)
    optimizer = cs.ClippedSGD(model.parameters(), lr=0.1, max_norm=1.0)
    probe = cs.SmoothnessProbe(model, every=1, fractions=(0.25, 0.5, 1.0)).watch(optimizer)
    x = torch.randn(8, 4)
    probe.record(lambda: model(x).square().mean()).backward()
    return model, optimizer


def copied(model):
    gradients = [p.grad if p.grad is not None else torch.empty(0) for p in model.parameters()]
    values = [*model.parameters(), *model.buffers(), *gradients]
    return [t.detach().clone() for t in values] + [torch.get_rng_state()]


FILES = {determinism.__file__, replay.__file__, snapshot.__file__}


def interrupted_at(count, act):
    """Run ``act`` with Ctrl-C before the ``count``-th line of the modules; the lines passed, by function."""
    lines = []

    def trace(frame, event, _):
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            lines.append(frame.f_code.co_name)
            if len(lines) == count:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("stride", [29, pytest.param(2, marks=pytest.mark.slow)])
def test_an_interrupt_before_any_line_of_a_row_leaves_what_training_had(stride):
    interrupted_at(-1, prepared()[1].step)  # what is done once in a process has lines of its own
    model, optimizer = prepared()
    start = copied(model)
    lines = interrupted_at(-1, optimizer.step)
    end = copied(model)
    handler = signal.getsignal(signal.SIGINT)
    assert len(lines) > 500
    wrong = []
    # All where a block ends: until Ctrl-C is held back nothing has been put back.
    places = {count for count, name in enumerate(lines, 1) if name in ("__exit__", "close")}
    for count in sorted(places | set(range(1, len(lines), stride))):
        model, optimizer = prepared()
        with pytest.raises(KeyboardInterrupt):
            interrupted_at(count, optimizer.step)
        # Before the step or after it, never between.
        if not any(all(map(torch.equal, copied(model), state)) for state in (start, end)):
            wrong.append((count, lines[count - 1]))
        assert signal.getsignal(signal.SIGINT) is handler
        assert not Replay.running.replays
        assert torch.is_grad_enabled()
        assert not torch.overrides._get_current_function_mode_stack()
    assert wrong == []


class InterruptAtCopies(TorchDispatchMode):
    """Sends Ctrl-C at these calls of torch's copies and interpolations in place, counted from 1."""

    def __init__(self, *places):
        super().__init__()
        self.places = places
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(name in str(func) for name in ("lerp", "copy_")):
            self.count += 1
            if self.count in self.places:
                signal.raise_signal(signal.SIGINT)
        return func(*args, **(kwargs or {}))


def test_interrupts_while_the_model_is_put_back_wait_until_it_is():
    model = nn.Linear(3, 1)
    before = [p.detach().clone() for p in model.parameters()]
    handler = signal.getsignal(signal.SIGINT)

    def measure(*places):
        with InterruptAtCopies(*places), Replay(model, lambda: model.weight.square().sum()) as moved:
            moved.move([torch.ones(1, 3), torch.ones(1)], 1.0)

    for places in ((3,), (4,), (3, 4)):  # after the two copies of the move
        with pytest.raises(KeyboardInterrupt):
            measure(*places)
        assert all(map(torch.equal, model.parameters(), before))
        assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize("place", range(9))
def test_an_interrupt_in_the_middle_of_a_move_leaves_the_parameters(place):
    model = nn.Linear(3, 1)
    before = [p.detach().clone() for p in model.parameters()]
    copies = InterruptAtCopies(place)

    def move():
        with Replay(model, lambda: model.weight.square().sum()) as measured, copies:
            for _ in measured.along([torch.ones(1, 3), torch.ones(1)], (0.25, 0.5)):
                pass

    if place:
        with pytest.raises(KeyboardInterrupt):
            move()
    else:
        move()
        assert copies.count == 8
    assert all(map(torch.equal, model.parameters(), before))


def test_a_handler_that_does_not_raise_lets_the_measurement_go_on():
    seen = []
    old = signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    try:
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 3.0)

        def loss_fn():
            signal.raise_signal(signal.SIGINT)
            return 2.0 * model.weight.square().sum()

        with InterruptAtCopies(2), Replay(model, loss_fn) as measured:  # the copy that goes back
            there = measured.gradient_at([torch.ones(1, 1)], 0.5)
        assert there.gradients[0].item() == 14.0
        assert model.weight.item() == 3.0
        assert len(seen) == 2
    finally:
        signal.signal(signal.SIGINT, old)


def test_replays_inside_each_other_are_put_back_after_an_interrupt():
    model = nn.Linear(2, 1, bias=False)
    before = model.weight.detach().clone()

    def interrupted():
        with Replay(model, lambda: model.weight.sum()) as outer:
            outer.move([torch.ones(1, 2)], 1.0)
            with Replay(model, lambda: model.weight.sum()) as inner:
                inner.move([torch.ones(1, 2)], 5.0)
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert torch.equal(model.weight, before)


def test_hooks_left_by_an_interrupt_take_no_gradient_of_training(monkeypatch):
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


def test_a_measurement_never_changes_a_handler_while_the_loss_is_computed():
    seen, model = [], nn.Linear(1, 1)

    def loss_fn():
        seen.append([signal.getsignal(number) for number in signal.valid_signals()])
        return model.weight.sum()

    before = [signal.getsignal(number) for number in signal.valid_signals()]
    with Replay(model, loss_fn) as replay:
        replay.gradient()
    assert seen == [before]


def test_a_thread_measures_as_the_main_thread_does():
    model, losses = nn.Linear(1, 1), []

    def measure():
        with Replay(model, lambda: model.weight.square().sum()) as replay:
            losses.append(replay.gradient_at([torch.ones(1, 1), None], 0.5).loss.item())

    thread = threading.Thread(target=measure)
    thread.start()
    thread.join()
    measure()
    assert losses[0] == losses[1] > 0
