"""The learning rate at which a step first raises the loss, against quadratics and bad input."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from curvestep.smoothness.estimators import critical_lr


def half_square(curvature):
    return lambda x: 0.5 * curvature * x.square().sum()


@settings(deadline=None, max_examples=50)
@given(curvature=st.floats(1e-3, 1e3), factor=st.floats(0.1, 10), passes=st.integers(6, 12))
def test_gradient_step_on_a_quadratic_is_critical_at_two_over_curvature(curvature, factor, passes):
    x, lr = torch.ones(3, dtype=torch.float64), factor / curvature
    low, high = critical_lr(half_square(curvature), x, x - lr * curvature * x, lr=lr, num_passes=passes)
    assert low <= 2 / curvature * (1 + 1e-9)
    assert high >= 2 / curvature * (1 - 1e-9)
    if passes >= 8:
        assert high / low < 2.1


def test_each_pass_is_counted():
    calls = []

    def loss(x):
        calls.append(x)
        return x.square().sum()

    critical_lr(loss, torch.ones(1), torch.zeros(1), num_passes=5)
    assert len(calls) == 5


def test_lists_of_tensors_and_losses_that_overflow():
    start, end = [torch.ones(2), torch.ones(1)], [torch.zeros(2), torch.zeros(1)]
    low, high = critical_lr(lambda xs: sum(x.square().sum() for x in xs), start, end)
    assert low <= 2 <= high
    low, high = critical_lr(lambda x: torch.where(x < 0, torch.nan, x).sum(), torch.ones(1), torch.zeros(1))
    assert low == pytest.approx(1)
    assert high <= 2


def test_steps_that_always_raise_or_never_do_have_an_open_end():
    assert critical_lr(torch.sum, torch.zeros(1), torch.ones(1)) == (0.0, 2**-4)
    assert critical_lr(torch.sum, torch.zeros(1), -torch.ones(1)) == (2**4, math.inf)


def test_a_step_that_did_not_move_and_too_few_passes_are_refused():
    with pytest.raises(ValueError, match="Skip steps"):
        critical_lr(torch.sum, torch.ones(1), torch.ones(1))
    with pytest.raises(ValueError, match="num_passes"):
        critical_lr(torch.sum, torch.ones(1), torch.zeros(1), num_passes=2)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.05),
        lambda p: torch.optim.RMSprop(p, lr=0.05),
    ],
)
@pytest.mark.parametrize("other", [False, True])
def test_own_step_of_any_optimizer_on_its_batch_or_another(optimizer, other):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2, 32, n, generator=generator, dtype=torch.float64) for n in (5, 1))
    model = torch.nn.Linear(5, 1, dtype=torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    stepper, losses = optimizer(model.parameters()), []

    def loss(weights, batch=int(other)):
        losses.append(batch)
        return (x[batch] @ weights[0].T + weights[1] - y[batch]).square().mean()

    start = [p.detach().clone() for p in model.parameters()]
    loss(list(model.parameters()), 0).backward()
    stepper.step()
    end = [p.detach().clone() for p in model.parameters()]
    losses.clear()
    low, high = critical_lr(loss, start, end, num_passes=6)
    assert losses == [int(other)] * 6  # forward passes, and no gradient
    assert all(p.grad_fn is None for p in (*start, *end))
    grid = torch.linspace(0, 200, 40_001)[1:].tolist()
    rises = (
        c for c in grid if loss([a + c * (b - a) for a, b in zip(start, end, strict=True)]) > loss(start)
    )
    first = next(rises, math.inf)
    assert low <= first <= high + 0.005
