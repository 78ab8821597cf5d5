"""The deep linear network: its gradient and Hessian in closed form, and why no (L0, L1) holds for it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from curvestep.checks import check_count, check_nonnegative, check_positive
from curvestep.theory.problems.base import Array, Problem


class DeepLinear(Problem):
    r"""Squared loss of a deep linear network, :math:`L = \lVert W_\ell\cdots W_1 X - Y\rVert_F^2`.

    A point is all weights in one vector, layer by layer, each row-major (as torch's ``reshape(-1)``). With
    :math:`A_i = W_\ell\cdots W_{i+1}`, :math:`B_i = W_{i-1}\cdots W_1X`,
    :math:`C_{ji} = W_{j-1}\cdots W_{i+1}` and :math:`R = W_\ell\cdots W_1X - Y`,

    .. math::
        \nabla_{W_i} L &= 2\,(A_i \otimes B_i^\top)^\top \operatorname{vec} R
            = 2\,\operatorname{vec}(A_i^\top R B_i^\top) \\
        \nabla^2_{W_iW_j} L &= 2\,(A_i\otimes B_i^\top)^\top(A_j\otimes B_j^\top)
            + 2\,\big[C_{ji}^\top \otimes (B_iR^\top A_j)\big]K_j \qquad (j > i)

    where the second term is absent for :math:`j = i` and :math:`K_j` turns row-major into column-major order.

    The network is **not** (L0, L1)-smooth, whatever the constants: scale one layer up and the next down, and
    the loss and a vanished gradient stay as they are while the Hessian grows without limit, inside every
    sublevel set (:meth:`rescaled`). Claims about (L0, L1) hold along a trajectory, never for a network.

    Args:
        widths: Input width, at least one hidden width, output width.
        num_examples: Columns of the data :math:`X` and :math:`Y`, which are drawn.
        seed: Seed of the drawn data.

    Note:
        The paper prints both formulas without the factor 2 (it belongs to a loss with ½), and the second term
        of the Hessian with its transposes lost, so that the shapes do not fit, and without :math:`K_j`
        (row 7).

    Example:
        >>> f = DeepLinear([3, 2, 3])
        >>> points = [f.rescaled(f.minimizer(), c) for c in (1.0, 10.0, 100.0)]
        >>> [round(float(f.hessian_norm(x))) for x in points], bool(f.grad_norm(points[-1]) < 1e-9)
        ([35, 1914, 191416], True)
    """

    def __init__(self, widths: Sequence[int], *, num_examples: int = 8, seed: int = 0) -> None:
        self.widths = tuple(check_count(f"widths[{i}]", width) for i, width in enumerate(widths))
        self.depth = len(self.widths) - 1
        if self.depth < 2:
            raise ValueError(f"`widths` must have an input, a hidden and an output width, got {widths!r}.")
        rng = np.random.default_rng(seed)
        n = check_count("num_examples", num_examples)
        self.inputs = rng.normal(size=(self.widths[0], n))
        self.targets = rng.normal(size=(self.widths[-1], n))
        self._shapes = list(zip(self.widths[1:], self.widths[:-1], strict=True))
        ends = np.cumsum([0, *[math.prod(shape) for shape in self._shapes]]).tolist()
        self._parts = [slice(start, end) for start, end in itertools.pairwise(ends)]  # one for each layer
        self.event_shape = (ends[-1],)
        self.name = "deep linear network " + "-".join(str(width) for width in self.widths)
        # The loss of the best product of that rank: reduced-rank regression.
        self.minimum = float(self.value(self.minimizer()))

    def weights(self, x: Array) -> list[Array]:
        """The matrices :math:`W_1, …, W_ℓ` in a point, or in each of many."""
        layers = zip(self._parts, self._shapes, strict=True)
        return [x[..., part].reshape(*x.shape[:-1], *shape) for part, shape in layers]

    def flatten(self, weights: Sequence[Array]) -> Array:
        """The point made of these matrices."""
        return np.concatenate([w.reshape(*w.shape[:-2], -1) for w in weights], axis=-1)

    def value(self, x: Array) -> Array:
        """Squared errors, summed."""
        residual = self._factors(x)[2]
        return np.einsum("...pq,...pq->...", residual, residual)

    def gradient(self, x: Array) -> Array:
        """Two times AᵀRBᵀ for each layer."""
        above, below, residual, _ = self._factors(x)
        return self.flatten(
            [2 * _T(a) @ residual @ _T(b) for a, b in zip(above, below, strict=True)]  # A_iᵀ R B_iᵀ
        )

    def hessian(self, x: Array) -> Array:
        """Whole Hessians, one square matrix for each point."""
        above, below, residual, weights = self._factors(x)
        H = np.zeros((*x.shape[:-1], self.event_shape[0], self.event_shape[0]))
        for i in range(self.depth):
            between = np.eye(self.widths[i + 1])  # C_{ji} = W_{j-1}⋯W_{i+1}, empty for j = i + 1
            for j in range(i, self.depth):
                first = np.einsum(
                    "...pa,...bq,...pc,...dq->...abcd", above[i], below[i], above[j], below[j], optimize=True
                )
                if j > i:
                    inner = below[i] @ _T(residual) @ above[j]
                    first = first + np.einsum("...da,...bc->...abcd", between, inner)
                    between = weights[j] @ between
                block = 2 * first.reshape(*x.shape[:-1], math.prod(self._shapes[i]), -1)
                H[..., self._parts[i], self._parts[j]] = block
                H[..., self._parts[j], self._parts[i]] = _T(block)
        return H

    def hessian_norm(self, x: Array) -> Array:
        """Largest absolute eigenvalues of the Hessian."""
        return np.abs(np.linalg.eigvalsh(self.hessian(x))).max(axis=-1)

    def minimizer(self) -> Array:
        """One global minimizer, from the singular value decomposition of the least-squares fit."""
        pseudo_inverse = np.linalg.pinv(self.inputs)
        u, s, vt = np.linalg.svd(self.targets @ pseudo_inverse @ self.inputs, full_matrices=False)
        rank = min(*self.widths, len(s))
        weights = [np.eye(*shape) for shape in self._shapes]
        weights[0] = np.zeros(self._shapes[0])
        weights[0][:rank] = s[:rank, None] * vt[:rank] @ pseudo_inverse
        weights[-1] = np.zeros(self._shapes[-1])
        weights[-1][:, :rank] = u[:, :rank]
        return self.flatten(weights)

    def rescaled(self, x: Array, c: float) -> Array:
        """The point with its first layer times ``c`` and its second divided by ``c``: the same network."""
        check_positive("c", c)
        weights = self.weights(x)
        return self.flatten([c * weights[0], weights[1] / c, *weights[2:]])

    def frontier(self, L1: float) -> float:
        """No L0 is enough."""
        check_nonnegative("L1", L1)
        return math.inf

    def _factors(self, x: Array) -> tuple[list[Array], list[Array], Array, list[Array]]:
        """A_i and B_i for each layer, the residual R, and the weights."""
        weights = self.weights(x)
        below = [np.broadcast_to(self.inputs, (*x.shape[:-1], *self.inputs.shape))]
        for w in weights:
            below.append(w @ below[-1])
        above = [np.broadcast_to(np.eye(self.widths[-1]), (*x.shape[:-1], self.widths[-1], self.widths[-1]))]
        for w in weights[:0:-1]:
            above.insert(0, above[0] @ w)
        return above, below[:-1], below[-1] - self.targets, weights


def _T(matrix: Array) -> Array:
    return np.swapaxes(matrix, -1, -2)
