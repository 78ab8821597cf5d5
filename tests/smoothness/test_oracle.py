"""The gradient over a fixed set of batches is that of their weighted mean."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import nn

from curvestep.calibration.loaders import representative_batches
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
    torch.testing.assert_close(result.gradients, whole)
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
    torch.testing.assert_close(first, gradients(model))


def test_the_oracle_knows_the_precision_of_its_own_passes():
    model, x = nn.Linear(3, 2).float(), torch.randn(4, 3, dtype=torch.float32)
    plain = GradientOracle(lambda batch: model(batch).square().mean(), [x])
    plain()
    assert plain.eps == torch.finfo(torch.float32).eps

    def loss_in_half(batch):
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch).float().square().mean()

    half = GradientOracle(loss_in_half, [x])
    half()
    assert half.eps == torch.finfo(torch.bfloat16).eps


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
    ("loss_of_batch", "batches", "options", "words"),
    [
        (None, [1], {}, "`loss_of_batch` must be a function"),
        (abs, [], {}, "at least one batch"),
        (abs, [torch.ones(1), torch.ones(1)], {"sizes": [1]}, "2 numbers, one a batch, got 1"),
        (abs, [torch.ones(1)], {"sizes": [0]}, "`sizes` must be positive"),
        (
            abs,
            [torch.ones(2)],
            {},
            r"`loss_of_batch` must return a scalar loss, got a tensor of shape \(2,\)",
        ),
    ],
)
def test_bad_oracles_are_refused(loss_of_batch, batches, options, words):
    with pytest.raises((TypeError, ValueError), match=words):
        GradientOracle(loss_of_batch, batches, **options)()


def test_representative_batches_have_the_labels_of_all():
    words = [[0, 0, 0], [1, 1, 1], [0, 0, 1], [2, 0, 1]]  # in all of them 6, 5 and 1 of 12
    batches = [(torch.zeros(3), torch.tensor(y)) for y in words]
    # Squares, in 144ths: 62, 86, 6 and 14 alone; beside the third 26, 14 and 2 for the others.
    assert representative_batches(batches, 3) == [2, 3, 1]


@given(seed=st.integers(0, 10_000), num_batches=st.integers(1, 30), num_labels=st.integers(1, 40))
def test_each_representative_batch_is_the_best_beside_those_before_it(seed, num_batches, num_labels):
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randint(-1, num_labels, (50 + i * i,), generator=generator) for i in range(num_batches)]
    found = representative_batches(batches, 1 + seed % num_batches, labels=lambda y: y)
    words = torch.stack([torch.bincount(y[y >= 0], minlength=num_labels) for y in batches]).double()
    for m, place in enumerate(found):  # all shares of all batches, by the definition
        joint = words[found[:m]].sum(0) + words
        distance = (joint / joint.sum(1, keepdim=True) - words.sum(0) / words.sum()).square().sum(1)
        distance[found[:m]] = torch.inf
        assert distance[place] <= distance.min() + 1e-12


def test_labels_of_no_use_are_refused():
    batches = [torch.tensor([0, 1]), torch.tensor([-100, -100])]
    with pytest.raises(ValueError, match="not negative"):
        representative_batches(batches, 1, labels=lambda y: y)
    with pytest.raises(ValueError, match=r"`count`.* 1.* got 2"):
        representative_batches(batches[:1], 2, labels=lambda y: y)
    with pytest.raises(ValueError, match=r"`count`.* least 1"):
        representative_batches(batches[:1], 0, labels=lambda y: y)
    with pytest.raises(TypeError, match="`labels` must be whole numbers, got"):
        representative_batches([torch.tensor([0.5])], 1, labels=lambda y: y)
