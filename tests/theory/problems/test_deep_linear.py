"""The deep linear network: Kronecker formulas against autograd, and why no (L0, L1) holds (row 7)."""

import math

import numpy as np
import pytest
import torch

from curvestep.theory.inequalities import sample_frontier
from curvestep.theory.problems.deep_linear import DeepLinear

WIDTHS = [3, 4, 2, 5, 6]  # four layers, all widths different


@pytest.fixture
def network():
    return DeepLinear(WIDTHS, num_examples=7, seed=1)


@pytest.fixture
def point(network):
    return np.random.default_rng(2).normal(size=network.event_shape)


def autograd_loss(network):
    X, Y = torch.tensor(network.inputs), torch.tensor(network.targets)

    def loss(x):
        out, start = X, 0
        for columns, rows in zip(network.widths[:-1], network.widths[1:], strict=True):
            out = x[start : start + rows * columns].reshape(rows, columns) @ out
            start += rows * columns
        return ((out - Y) ** 2).sum()

    return loss


def kronecker_parts(network, x):
    W = network.weights(x)
    n = len(W)

    def product(start, end, first):  # W_end ⋯ W_start on `first`
        for k in range(start, end + 1):
            first = W[k] @ first
        return first

    A = [product(i + 1, n - 1, np.eye(W[i].shape[0])) for i in range(n)]
    B = [product(0, i - 1, network.inputs) for i in range(n)]
    R = product(0, n - 1, network.inputs) - network.targets
    C = {(j, i): product(i + 1, j - 1, np.eye(W[i].shape[0])) for i in range(n) for j in range(i + 1, n)}
    return W, A, B, R, C


def commutation(rows, columns):
    """K with vec_c(W) = K vec_r(W)."""
    index = np.arange(rows * columns).reshape(rows, columns)
    return np.eye(rows * columns)[index.T.reshape(-1)]


def kronecker_block(W, A, B, R, C, i, j):
    block = np.kron(A[i], B[i].T).T @ np.kron(A[j], B[j].T)
    if j > i:
        block = block + np.kron(C[j, i].T, B[i] @ R.T @ A[j]) @ commutation(*W[j].shape)
    return 2 * block


def test_gradient_is_that_of_autograd_and_of_the_kronecker_formula(network, point):
    x = torch.tensor(point, requires_grad=True)
    autograd_loss(network)(x).backward()
    exact = x.grad.numpy()
    np.testing.assert_allclose(network.gradient(point), exact, rtol=1e-10, atol=1e-10)
    _, A, B, R, _ = kronecker_parts(network, point)
    corrected = np.concatenate([2 * np.kron(a, b.T).T @ R.reshape(-1) for a, b in zip(A, B, strict=True)])
    np.testing.assert_allclose(corrected, exact, rtol=1e-10, atol=1e-10)


def test_hessian_is_that_of_autograd_to_1e_10(network, point):
    exact = torch.autograd.functional.hessian(autograd_loss(network), torch.tensor(point)).numpy()
    np.testing.assert_allclose(network.hessian(point), exact, rtol=1e-10, atol=1e-10)
    assert network.hessian_norm(point) == pytest.approx(np.linalg.norm(exact, 2), rel=1e-12)


def test_every_hessian_block_is_the_corrected_kronecker_formula(network, point):
    parts = kronecker_parts(network, point)
    H = network.hessian(point)
    for i in range(network.depth):
        for j in range(i, network.depth):
            block = H[network._parts[i], network._parts[j]]
            np.testing.assert_allclose(block, kronecker_block(*parts, i, j), rtol=1e-10, atol=1e-10)


def test_two_scalar_layers_have_no_gradient_and_an_unbounded_hessian():
    f = DeepLinear([1, 1, 1], num_examples=1)  # (y − w2 w1 x)²
    x, y = f.inputs.item(), f.targets.item()
    c = np.array([1.0, 10.0, 1000.0])
    orbit = np.stack([c, y / x / c], axis=-1)
    np.testing.assert_allclose(f.value(orbit), 0, atol=1e-20)
    np.testing.assert_allclose(f.grad_norm(orbit), 0, atol=1e-12)
    np.testing.assert_allclose(f.hessian_norm(orbit), 2 * x**2 * (c**2 + (y / x / c) ** 2))


def test_no_pair_holds_on_the_orbit_of_a_minimizer(network):
    minimizer = network.minimizer()
    orbit = np.stack([network.rescaled(minimizer, c) for c in (1.0, 10.0, 100.0, 1000.0)])
    np.testing.assert_allclose(network.value(orbit), network.minimum, rtol=1e-9)
    g, ell = network.grad_norm(orbit), network.hessian_norm(orbit)
    assert (g < 1e-6).all()
    assert sample_frontier(g, ell, 1000.0) > 1e5
    assert network.frontier(1000.0) == math.inf


def test_minimum_is_below_what_descent_finds(network):
    assert network.grad_norm(network.minimizer()) == pytest.approx(0, abs=1e-9)
    x = np.random.default_rng(0).normal(size=(500, *network.event_shape)) * 0.7
    assert network.value(x).min() > network.minimum


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DeepLinear([3, 2]), "`widths` must have an input, a hidden and an output"),
        (lambda: DeepLinear([3, 0]), r"`widths\[1\]`"),
    ],
)
def test_bad_input_is_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()
