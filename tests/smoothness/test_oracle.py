"""The gradient over a fixed set of batches is that of their weighted mean."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from curvestep.smoothness.observer import batch_length
from curvestep.smoothness.oracle import GradientOracle
from curvestep.smoothness.replay import Replay


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


def test_batches_of_unequal_size_count_by_their_size():
    model = nn.Linear(3, 2)
    x, y = torch.randn(10, 3), torch.randint(2, (10,))
    F.cross_entropy(model(x), y).backward()
    whole = gradients(model)
    parts = [(x[:7], y[:7]), (x[7:9], y[7:9]), (x[9:], y[9:])]
    oracle = GradientOracle(lambda batch: F.cross_entropy(model(batch[0]), batch[1]), parts)
    with Replay(model, oracle) as replay:
        result = replay.gradient()
    for g, expected in zip(result.gradients, whole, strict=True):
        torch.testing.assert_close(g, expected)
    torch.testing.assert_close(result.loss, F.cross_entropy(model(x), y).detach())


def test_recurrent_state_is_carried_from_batch_to_batch():
    model = nn.LSTM(3, 4)
    stream = torch.randn(12, 2, 3)

    def loss_of_batch(x, state):
        out, state = model(x, state)
        return out.square().mean(), state

    oracle = GradientOracle(loss_of_batch, list(stream.split(4)), carry_state=True)
    carried = oracle()
    out, _ = model(stream)  # in one go: the same outputs, hence the same loss
    torch.testing.assert_close(carried, out.square().mean().detach())
    first = gradients(model)
    model.zero_grad()
    state = None
    for x in stream.split(4):
        out, state = model(x, state)
        state = tuple(s.detach() for s in state)
        (out.square().mean() / 3).backward()
    for g, expected in zip(first, gradients(model), strict=True):
        torch.testing.assert_close(g, expected)


class State(NamedTuple):
    hidden: torch.Tensor
    steps: int


def test_carried_state_may_be_a_named_tuple():
    model, seen = nn.Linear(2, 2), []

    def loss_of_batch(x, state):
        hidden = model(x) if state is None else model(x) + state.hidden
        seen.append(state)
        return hidden.square().mean(), State(hidden, len(seen))

    GradientOracle(loss_of_batch, [torch.ones(1, 2)] * 2, carry_state=True)()
    assert type(seen[1]) is State
    assert seen[1].steps == 1
    assert not seen[1].hidden.requires_grad


def test_loader_is_read_once():
    model = nn.Linear(1, 1)
    oracle = GradientOracle(lambda x: model(x).sum(), (torch.full((1, 1), float(i)) for i in range(3)))
    assert len(oracle) == 3
    torch.testing.assert_close(oracle(), oracle())


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(5, 2), 5),
        ((torch.zeros(4), torch.zeros(4)), 4),
        ({"x": torch.zeros(3, 1)}, 3),
        (["text", torch.zeros(2)], 2),
        (torch.zeros(()), 1),
        ("text", 1),
        (7, 1),
    ],
)
def test_size_of_a_batch_is_the_length_of_its_first_tensor(batch, size):
    assert batch_length(batch) == size


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((None, [1]), "`loss_of_batch` must be a function"),
        ((lambda b: b, []), "at least one batch"),
    ],
)
def test_bad_oracles_are_refused(arguments, words):
    with pytest.raises((TypeError, ValueError), match=words):
        GradientOracle(*arguments)


def test_wrong_sizes_and_losses_are_refused():
    with pytest.raises(ValueError, match="2 numbers, one a batch, got 1"):
        GradientOracle(lambda b: b, [torch.ones(1), torch.ones(1)], sizes=[1])
    with pytest.raises(ValueError, match="`sizes` must be positive"):
        GradientOracle(lambda b: b, [torch.ones(1)], sizes=[0])
    with pytest.raises(TypeError, match=r"scalar tensor, got one of shape \(2,\)"):
        GradientOracle(lambda b: b, [torch.ones(2)])()
