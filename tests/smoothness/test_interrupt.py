"""Ctrl-C at any line of a measurement leaves parameters, buffers and gradients as training had them."""

import random
import signal
import sys
import threading
import weakref

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
    handler = signal.getsignal(signal.SIGINT)
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
        assert not Replay.running.replays
        assert torch.is_grad_enabled()
        assert not torch.overrides._get_current_function_mode_stack()
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
    before, seen = model.weight.detach().clone(), []

    def moved():
        with Replay(model, lambda: model.weight.sum()) as outer:
            outer.move([torch.ones(1, 2)], 1.0)
            with Replay(model, lambda: model.weight.sum()) as inner:
                inner.move([torch.ones(1, 2)], 5.0)
                try:
                    signal.raise_signal(signal.SIGINT)
                except KeyboardInterrupt:  # who saves on Ctrl-C saves this
                    seen.append(model.weight.detach().clone())
                    raise

    with pytest.raises(KeyboardInterrupt):
        moved()
    assert torch.equal(seen[0], before)
    assert torch.equal(model.weight, before)


def test_a_block_that_a_signal_undid_is_not_undone_by_the_next():
    undos = []
    block = snapshot.undone(lambda: undos.append(1))  # one whose `with` statement the signal leaves at once
    block.__enter__()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert undos == [1]


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


class Stop(Exception):
    pass


def stop(*_):
    raise Stop


@pytest.fixture
def handlers():
    """Two handlers that raise: what they are, as a function."""
    before = signal.signal(signal.SIGUSR1, stop)
    yield lambda: [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1)]
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("times", [1, 2, 5])
def test_interrupts_while_handlers_are_handed_back_leave_none_of_ours(monkeypatch, handlers, times):
    before, real, left = handlers(), signal.signal, [None] * times

    def interrupted(number, handler):
        if left and signal.getsignal(signal.SIGINT) is before[0] and handler is stop:
            left.pop()
            signal.raise_signal(signal.SIGINT)
        return real(number, handler)

    model = nn.Linear(1, 1)

    def measure():
        with Replay(model, lambda: model.weight.sum()) as replay:
            replay.gradient()

    monkeypatch.setattr(signal, "signal", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure()
    monkeypatch.undo()
    assert not left
    assert handlers() == before
    measure()


def test_an_interrupt_while_handlers_are_taken_over_leaves_none_of_ours(monkeypatch, handlers):
    before, real, seen = handlers(), signal.signal, []

    def interrupted(number, handler):
        if number == signal.SIGUSR1 and signal.getsignal(signal.SIGINT) is not before[0] and not seen:
            seen.append(number)
            signal.raise_signal(number)
        return real(number, handler)

    monkeypatch.setattr(signal, "signal", interrupted)
    model = nn.Linear(1, 1)
    with pytest.raises(Stop), Replay(model, lambda: model.weight.sum()):
        pytest.fail("the block began")
    assert seen
    assert handlers() == before


def test_a_handler_that_wraps_ours_inside_a_block_is_called_once_in_the_next(handlers):
    calls, model = [], nn.Linear(1, 1)
    signal.signal(signal.SIGUSR1, lambda *_: calls.append("first"))

    def wrap():
        inner = signal.getsignal(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, lambda *arguments: (calls.append("outer"), inner(*arguments)))

    for act in (wrap, lambda: signal.raise_signal(signal.SIGUSR1)):
        with Replay(model, lambda: model.weight.sum()):
            act()
    assert calls == ["outer", "first"]


def test_blocks_in_other_threads_leave_handlers_alone(handlers):
    before, model, seen = handlers(), nn.Linear(1, 1), []

    def measure():
        with Replay(model, lambda: model.weight.sum()):
            seen.append(handlers())

    def measure_in_a_thread():
        thread = threading.Thread(target=measure)
        thread.start()
        thread.join()

    with Replay(model, lambda: model.weight.sum()):
        ours = handlers()
        measure_in_a_thread()
        assert ours == handlers() != before
    measure_in_a_thread()
    assert seen == [ours, before]
    assert handlers() == before


@pytest.fixture
def dropping(monkeypatch):
    """A function that gets a Ctrl-C whose exception Python drops, once; and how many were dropped."""
    dropped = []
    monkeypatch.setattr(sys, "unraisablehook", dropped.append)

    def drop():
        thing = nn.Identity()
        watched = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
        if not dropped:
            del thing
            assert watched() is None

    drop.dropped = dropped
    return drop


@pytest.mark.parametrize("passes", [1, 2])
def test_a_dropped_interrupt_is_raised_at_the_next_pass_or_at_the_end(dropping, passes):
    model = nn.Linear(2, 1, bias=False)
    before = model.weight.detach().clone()
    handler, done = signal.getsignal(signal.SIGINT), []

    def loss_fn():
        loss = model.weight.square().sum()
        if len(done) == 0:
            dropping()
        done.append(1)
        return loss

    def measure():
        with Replay(model, loss_fn) as replay:
            replay.move([torch.ones(1, 2)], 1.0)
            for _ in range(passes):
                replay.loss()
            replay.move([torch.ones(1, 2)], 2.0)

    with pytest.raises(KeyboardInterrupt):
        measure()
    assert len(dropping.dropped) == len(done) == 1
    assert torch.equal(model.weight, before)
    assert signal.getsignal(signal.SIGINT) is handler
    measure()  # and that is all


def test_a_dropped_interrupt_is_the_reason_that_a_measured_step_and_a_calibration_give(dropping):
    model, x = mlp(4, 6, 1, batchnorm=True), torch.randn(8, 4)
    optimizer = cs.ClippedSGD(model.parameters(), lr=0.1, max_norm=1.0)
    probe = cs.SmoothnessProbe(model, every=1, fractions=(0.25, 0.5, 1.0)).watch(optimizer)
    passes = []

    def loss_fn(x=x):
        passes.append(1)
        if len(passes) == 4:
            dropping()
        return model(x).square().mean()

    probe.record(loss_fn).backward()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert len(passes) == 4
    passes.clear()
    dropping.dropped.clear()
    start = held(model)
    with pytest.raises(KeyboardInterrupt):
        cs.calibrate(model, loss_fn, [x] * 24, optimizer=optimizer, progress=False)
    assert len(passes) == 4
    assert all(map(torch.equal, held(model), start))


@pytest.mark.parametrize("place", range(9))
def test_a_dropped_interrupt_in_the_middle_of_a_move_leaves_the_parameters(dropping, place):
    model = nn.Linear(3, 1)
    before = [p.detach().clone() for p in model.parameters()]
    moves = []

    class Drop(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if any(name in str(func) for name in ("lerp", "copy_")):
                moves.append(func)
                if len(moves) == place:
                    dropping()
            return func(*args, **(kwargs or {}))

    def move():
        with Replay(model, lambda: model.weight.square().sum()) as replay, Drop():
            for _ in replay.along([torch.ones(1, 3), torch.ones(1)], (0.25, 0.5)):
                pass

    if place:
        with pytest.raises(KeyboardInterrupt):
            move()
    else:
        move()
        assert len(moves) == 8
    assert all(map(torch.equal, model.parameters(), before))
