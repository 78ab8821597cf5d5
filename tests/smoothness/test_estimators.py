"""Estimators of smoothness and of the critical lr, from formulas and from networks."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from curvestep.smoothness.estimators import (
    critical_lr,
    local_smoothness,
    segment_smoothness,
    spectral_smoothness,
)
from curvestep.smoothness.replay import Replay


def symmetric(size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(size, size, generator=generator)
    return A + A.T


@given(seed=st.integers(0, 10_000), scale=st.floats(1e-3, 1e3), size=st.integers(1, 12))
def test_segment_and_local_smoothness_of_quadratics_are_exact(seed, scale, size):
    torch.manual_seed(seed)
    H, x, d = scale * symmetric(size, seed), torch.randn(size), torch.randn(size)
    exact = (H @ d).norm() / d.norm()
    segment = segment_smoothness(lambda x: H @ x, x, x + d, fractions=(0.25, 0.5, 0.75, 1.0))
    # A central difference is exact up to rounding, which is relative to the size of the gradient.
    floor = 1e-9 * (H @ x).norm() / x.norm()
    torch.testing.assert_close(segment, exact, rtol=1e-8, atol=0.0)
    torch.testing.assert_close(local_smoothness(lambda x: H @ x, x, d), exact, rtol=1e-8, atol=floor.item())


def test_segment_smoothness_takes_the_largest_over_the_fractions():
    def gradient(x):  # f' = sin: the secants from 0 fall as the step grows
        return torch.sin(x)

    estimate = segment_smoothness(gradient, torch.zeros(1), torch.ones(1), fractions=(0.25, 0.5, 1.0))
    torch.testing.assert_close(estimate, torch.tensor(np.sin(0.25) / 0.25))


def test_segment_that_did_not_move_is_refused():
    x = torch.ones(3)
    with pytest.raises(ValueError, match="Skip steps"):
        segment_smoothness(lambda x: x, x, x.clone())
    with pytest.raises(ValueError, match="Skip steps"):
        local_smoothness(lambda x: x, x, torch.zeros(3))


@pytest.mark.parametrize("fractions", [(), (0.0,), (0.5, 1.1), (float("nan"),)])
def test_fractions_must_lie_on_the_segment(fractions):
    with pytest.raises(ValueError, match=r"\(0, 1\]"):
        segment_smoothness(lambda x: x, torch.zeros(1), torch.ones(1), fractions=fractions)


def test_nan_gradient_gives_nan():
    assert segment_smoothness(lambda x: x * float("nan"), torch.zeros(2), torch.ones(2)).isnan()


def test_local_smoothness_away_from_quadratics_is_the_second_derivative():
    x = torch.tensor([0.7])
    estimate = local_smoothness(lambda x: 4 * x**3, x, torch.ones(1))
    torch.testing.assert_close(estimate, torch.tensor(12 * 0.7**2), rtol=1e-9, atol=0.0)


def test_local_smoothness_in_single_precision_is_good_to_a_thousandth():
    x = torch.randn(50, dtype=torch.float32)
    d = torch.randn(50, dtype=torch.float32)
    exact = (torch.cosh(x.double()) * d).norm() / d.double().norm()
    estimate = local_smoothness(lambda x: torch.sinh(x), x, d)
    torch.testing.assert_close(estimate, exact, rtol=1e-3, atol=0.0)


def dense_eigenvalues(model, closure):
    names = list(dict(model.named_parameters()))
    shapes = [p.shape for p in model.parameters()]
    sizes = [p.numel() for p in model.parameters()]

    def loss(flat):
        pieces = [piece.view(shape) for piece, shape in zip(flat.split(sizes), shapes, strict=True)]
        return closure(lambda *a: torch.func.functional_call(model, dict(zip(names, pieces, strict=True)), a))

    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss, flat))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.head = nn.Linear(4, 12), nn.Linear(4, 2)

    def forward(self, x):
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        return self.head(F.scaled_dot_product_attention(q, k, v).mean((1, 2)))


class Saddle(nn.Module):
    """w2·tanh(w1·x) near zero: the eigenvalue of largest size is negative."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4, bias=False), nn.Linear(4, 1, bias=False)
        with torch.no_grad():
            for p in self.parameters():
                p *= 0.01

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def batch(*shape):
    def loss(model):
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(6, *shape, generator=generator)
        return F.cross_entropy(model(x), torch.randint(2, (6,), generator=generator))

    return loss


def uphill(model):
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(3))
    out = model(x).squeeze(-1)
    return -(out * x.sum(1)).mean() - 2.0 * out.square().mean()


NETS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), batch(3)),
    "conv": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 2), nn.Softplus(), nn.Flatten(), nn.Linear(9, 2)),
        batch(2, 4),
    ),
    "lstm": (Recurrent, batch(4, 2)),
    "attention": (Attention, batch(3, 4)),
    "saddle": (Saddle, uphill),
}


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", NETS)
def test_spectral_smoothness_equals_the_norm_of_the_dense_hessian(name, exact):
    torch.manual_seed(4)
    make, closure = NETS[name]
    model = make()
    with sdpa_kernel(SDPBackend.MATH):
        eigenvalues = dense_eigenvalues(model, closure)
    with Replay(model, lambda: closure(model)) as replay:
        gradient = replay if exact else replay.__call__  # a plain function: by differences
        result = spectral_smoothness(gradient, replay.point)
    assert result.converged
    assert result.value == pytest.approx(eigenvalues.abs().max().item(), rel=1e-5)
    assert abs(result.eigenvalue) == result.value
    if name == "saddle":
        assert result.eigenvalue < 0


def test_spectral_smoothness_out_of_products_says_so_and_stays_below():
    H = torch.diag(torch.linspace(0.9, 1.0, 400))
    result = spectral_smoothness(lambda x: H @ x, torch.ones(400), max_products=5)
    assert not result.converged
    assert result.num_products == 5
    assert 0.9 <= result.value <= 1.0
    assert result.residual > 0


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_spectral_smoothness_of_tiny_problems(size):
    H = symmetric(size)
    result = spectral_smoothness(lambda x: H @ x, torch.ones(size))
    assert result.converged
    assert result.value == pytest.approx(torch.linalg.matrix_norm(H, 2).item(), rel=1e-6)


def test_spectral_smoothness_of_zero_hessian_is_zero():
    result = spectral_smoothness(lambda x: torch.ones(5), torch.ones(5))
    assert result.value == 0.0


def test_spectral_smoothness_of_nan_is_marked():
    result = spectral_smoothness(lambda x: x * float("nan"), torch.ones(5))
    assert not result.converged
    assert np.isnan(result.value)


def test_fused_attention_falls_back_to_differences():
    model = Attention()
    closure = NETS["attention"][1]
    d = [torch.randn_like(p) for p in model.parameters()]
    with Replay(model, lambda: closure(model)) as replay:
        point = replay.point
        with pytest.raises(RuntimeError, match="derivative"):
            replay.hessian_product(d, origin=point)
        fallen = local_smoothness(replay, point, d)
        with sdpa_kernel(SDPBackend.MATH):
            exact = local_smoothness(replay, point, d)
    torch.testing.assert_close(fallen, exact, rtol=1e-7, atol=0.0)


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
