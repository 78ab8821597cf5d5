"""Replay gives the gradient at another point, and leaves nothing changed."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from curvestep.smoothness.measurement import SlopeAlong
from curvestep.smoothness.replay import Replay, trainable_parameters
from curvestep.smoothness.snapshot import PassState
from curvestep.tensors.distributed import copies
from curvestep.tensors.vectors import difference, dot, global_norm
from tests.models import Mixed, classifier, convnet, mlp


def everything(model):
    """Every number that training reads, as bytes."""
    state = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    state += [p.grad.to_dense().clone() for p in model.parameters() if p.grad is not None]
    modes = [m.training for m in model.modules()]
    return state, modes, torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()


def assert_same(one, two):
    assert all(torch.equal(a, b) for a, b in zip(one[0], two[0], strict=True))
    assert one[1] == two[1]
    assert torch.equal(one[2], two[2])
    assert one[3:] == two[3:]


class Stateful(nn.Module):
    """Keeps its recurrent state and a counter as attributes."""

    def __init__(self):
        super().__init__()
        self.cell = nn.RNN(3, 5, batch_first=True)
        self.hidden = torch.zeros(1, 4, 5)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        out, hidden = self.cell(x, self.hidden)
        self.hidden = hidden.detach()
        return out


def perceptron():
    return classifier(dropout=0.5)


def batchnorm():
    model = convnet()
    x, y = torch.randn(5, 2, 6, 6), torch.randint(3, (5,))
    return model, lambda: F.cross_entropy(model(x), y)


def tied():
    model = Mixed()
    x, y = torch.randint(11, (7,)), torch.randint(11, (7,))
    return model, lambda: F.cross_entropy(model(x), y)


def stateful():
    model = Stateful()
    x = torch.randn(4, 6, 3)
    return model, lambda: model(x).square().mean()


def noisy():
    model = nn.Linear(3, 2)
    x = torch.randn(4, 3)

    def loss():
        return model(x + torch.randn(4, 3) * random.random() + np.random.rand()).square().mean()

    return model, loss


def accumulated():
    model = mlp(dropout=0.5)
    parts = [(torch.randn(5, 6), torch.randint(3, (5,))) for _ in range(3)]

    def loss():
        total = 0.0
        for x, y in parts:
            part = F.cross_entropy(model(x), y) / len(parts)
            part.backward()
            total += part.item()
        return total

    return model, loss


def autocast():
    model = mlp().float()
    x, y = torch.randn(5, 6, dtype=torch.float32), torch.randint(3, (5,))

    def loss():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(model(x), y)

    return model, loss


def spectral():
    model = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    x = torch.randn(5, 4)
    return model, lambda: model(x).square().mean()


CASES = [perceptron, batchnorm, tied, stateful, noisy, accumulated, autocast, spectral]


def backward(closure):
    loss = closure()
    if isinstance(loss, torch.Tensor):
        loss.backward()


@pytest.mark.parametrize("case", CASES)
def test_gradient_equals_that_of_training_bit_for_bit(case):
    model, closure = case()
    before = PassState(model)
    backward(closure)
    with Replay(model, closure, state=before) as replay:
        again = replay.gradient().gradients
    for p, g in zip(trainable_parameters(model), again, strict=True):
        assert (p.grad is None) == (g is None)
        if g is not None:
            assert torch.equal(p.grad.to_dense(), g.to_dense())


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_left_changed(case):
    model, closure = case()
    backward(closure)
    before = everything(model)
    attributes = {k: v for k, v in vars(model).items() if not k.startswith("_")}
    with Replay(model, closure) as replay:
        start = copies(replay.parameters)
        direction = [torch.randn_like(p) for p in replay.parameters]
        replay.gradient_at(direction, 0.3)
        replay.gradient_at(direction, -1.7)
        replay.return_home()
        for s in start:
            s.add_(0.1)
        for _ in replay.along(start, (0.2, 0.6, 1.0)):
            replay.gradient()
            replay.change(direction)
    assert_same(before, everything(model))
    assert all(vars(model)[name] is value for name, value in attributes.items())


def test_a_replay_opened_again_comes_back_to_where_it_began_the_second_time():
    model = nn.Linear(2, 1, bias=False)
    replay = Replay(model, lambda: model.weight.sum())
    for value in (1.0, 2.0):
        nn.init.constant_(model.weight, value)
        with replay:
            replay.move([torch.ones(1, 2)], 5.0)
        assert model.weight.tolist() == [[value, value]]


@pytest.mark.parametrize("case", CASES)
def test_change_taken_part_by_part_is_that_of_whole_gradients(case):
    model, closure = case()
    with Replay(model, closure) as replay:
        old = replay.gradient().gradients
        start, direction = replay.point, [torch.randn_like(p) for p in replay.parameters]
        replay.move(direction, 0.1)
        along = SlopeAlong(replay.parameters, start)
        there, change = replay.gradient(), replay.change(old, [along])
    assert there.loss == change.loss
    slow = difference(there.gradients, old)
    assert change.grad_norm == pytest.approx(global_norm(there.gradients).item(), rel=1e-12)
    assert along.total == pytest.approx(0.1 * dot(slow, direction), rel=1e-9)
    assert any(part is not None and global_norm([part]) > 0 for part in slow)
    for one, other in zip(change.parts, slow, strict=True):
        torch.testing.assert_close(global_norm([one]), global_norm([other]), rtol=1e-12, atol=0)


def test_change_of_a_large_parameter_is_kept_as_its_norm_only():
    model = nn.Linear(1000, 300)
    with Replay(model, lambda: model(torch.ones(1000)).square().sum()) as replay:
        old = [torch.zeros_like(p) for p in replay.parameters]
        start = [p.detach() - 1e-3 for p in replay.parameters]
        along = SlopeAlong(replay.parameters, start)
        there, change = replay.gradient().gradients, replay.change(old, [along])
    assert [part.numel() for part in change.parts] == [1, 300]
    assert change.grad_norm == pytest.approx(global_norm(there).item(), rel=1e-12)
    assert along.total == pytest.approx(1e-3 * sum(g.sum().item() for g in there), rel=1e-9)
    for part, gradient in zip(change.parts, there, strict=True):
        torch.testing.assert_close(global_norm([part]), global_norm([gradient]), rtol=1e-14, atol=0)


def test_change_is_right_where_a_parameter_is_reached_more_than_once():
    layer = nn.Linear(3, 3)  # in two reentrant checkpoints, each with a backward pass of its own
    x = torch.randn(4, 3, requires_grad=True)

    def closure():
        y = x
        for _ in range(2):
            y = checkpoint(lambda z: torch.tanh(layer(z)), y, use_reentrant=True)
        return y.square().mean()

    with Replay(layer, closure) as replay:
        old = [torch.ones_like(p) for p in replay.parameters]
        along = SlopeAlong(replay.parameters, [p.detach() - 1.0 for p in replay.parameters])
        change, whole = replay.change(old, [along]), replay.gradient().gradients
    assert along.total == pytest.approx(sum((g - 1.0).sum().item() for g in whole), rel=1e-12)  # counted once
    assert change.grad_norm == pytest.approx(global_norm(whole).item(), rel=1e-14)
    whole = difference(whole, old)
    torch.testing.assert_close(global_norm(change.parts), global_norm(whole), rtol=1e-14, atol=0)


def test_change_of_a_loss_without_gradient_is_refused():
    model = nn.Linear(2, 2)
    with Replay(model, lambda: torch.ones(()).requires_grad_()) as replay:
        with pytest.raises(ValueError, match="gives no gradient of `model`"):
            replay.change([None, None])


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_left_changed_when_the_closure_raises(case):
    model, closure = case()
    backward(closure)
    before = everything(model)

    def raising():
        backward(closure)
        model.eval()
        raise KeyError("no such batch")

    with pytest.raises(KeyError, match="no such batch"), Replay(model, raising) as replay:
        replay.gradient_at([torch.randn_like(p) for p in replay.parameters], 0.5)
    assert_same(before, everything(model))


def test_gradient_objects_come_back_themselves():
    model, closure = perceptron()
    backward(closure)
    objects = [p.grad for p in model.parameters()]
    with Replay(model, closure) as replay:
        replay.gradient()
    assert all(p.grad is g for p, g in zip(model.parameters(), objects, strict=True))


def test_gradient_at_agrees_with_a_copied_model_moved_by_hand():
    model, closure = perceptron()
    model.eval()
    direction = [torch.randn_like(p) for p in model.parameters()]
    with Replay(model, closure) as replay:
        gradients = replay.gradient_at(direction, 0.25).gradients
    with torch.no_grad():
        for p, d in zip(model.parameters(), direction, strict=True):
            p += 0.25 * d
    backward(closure)
    for p, g in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(p.grad, g)


def test_points_along_the_segment_are_the_ones_asked_for():
    model = nn.Linear(2, 3)
    visited = []

    def closure():
        visited.append([p.detach().clone() for p in model.parameters()])
        return model.weight.square().sum() + model.bias.sum()

    start = copies(model.parameters())
    with torch.no_grad():
        for p in model.parameters():
            p += torch.randn_like(p)
    end = copies(model.parameters())
    with Replay(model, closure) as replay:
        fractions = []
        for fraction in replay.along(copies(start), (0.25, 1.0, 0.75, 0.5)):
            replay.gradient()
            fractions.append(fraction)
    assert fractions == [1.0, 0.25, 0.5, 0.75]
    for fraction, point in zip(fractions, visited, strict=True):
        for a, b, p in zip(start, end, point, strict=True):
            torch.testing.assert_close(p, a + fraction * (b - a), rtol=1e-15, atol=1e-15)


def test_hessian_product_of_a_linear_loss_is_zero():
    model = nn.Linear(4, 1)
    with Replay(model, lambda: model.weight.sum()) as replay:
        weight, bias = replay.hessian_product([torch.ones(1, 4), None], origin=replay.point)
    assert torch.equal(weight, torch.zeros(1, 4))
    assert bias is None


def test_closure_must_be_callable():
    with pytest.raises(TypeError, match="a function that returns the loss"):
        Replay(nn.Linear(1, 1), torch.zeros(()))
