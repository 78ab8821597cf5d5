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
    assert critical_lr(torch.sum, torch.zeros(1), torch.ones(1))[0] == 0
    assert math.isinf(critical_lr(torch.sum, torch.zeros(1), -torch.ones(1))[1])


def test_a_step_that_did_not_move_and_too_few_passes_are_refused():
    with pytest.raises(ValueError, match="Skip steps"):
        critical_lr(torch.sum, torch.ones(1), torch.ones(1))
    with pytest.raises(ValueError, match="num_passes"):
        critical_lr(torch.sum, torch.ones(1), torch.zeros(1), num_passes=2)
