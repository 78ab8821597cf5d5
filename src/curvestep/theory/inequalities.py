r"""Is a sample of points (L0, L1)-smooth? The minimal frontier and the worst violator.

Also the inequalities between two points of an (L0, L1)-smooth function, all tight on ``ExponentialWall``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from curvestep.checks import check_nonnegative, check_positive
from curvestep.theory.problems.base import Array, Problem
from curvestep.theory.problems.walls import phi


@dataclass(frozen=True, kw_only=True)
class SmoothnessCheck:
    """A claimed pair (L0, L1) held against a sample of points."""

    holds: bool  # whether every point keeps the claim, up to rounding
    index: int  # the point that comes closest to breaking it, or breaks it most
    excess: float  # Hessian norm less L0 + L1·gradient norm at that point; positive if the claim is broken


def sample_frontier(grad_norms: ArrayLike, hessian_norms: ArrayLike, L1: ArrayLike) -> Array:
    r"""The least :math:`L_0` that goes with each :math:`L_1`, for these points.

    .. math::
        L_0(L_1) = \max_i\, (\ell_i - L_1 g_i)_+

    (L0, L1) is never one pair but this decreasing convex curve; a point on it is a choice.

    Args:
        grad_norms: Gradient norms :math:`g_i`.
        hessian_norms: Hessian norms :math:`\ell_i`, or other estimates of smoothness.
        L1: One or many :math:`L_1 \ge 0`.

    Example:
        >>> sample_frontier([0.0, 1.0, 10.0], [1.0, 4.0, 20.0], [0.0, 2.0, 3.0])
        array([20.,  2.,  1.])
    """
    g, ell = _pairs(grad_norms, hessian_norms)
    slopes = np.asarray(L1, dtype=np.float64)
    if not (np.isfinite(slopes) & (slopes >= 0)).all():
        raise ValueError(f"`L1` must be zero or more, and finite, got {L1!r}.")
    return np.maximum((ell - slopes[..., None] * g).max(axis=-1), 0.0)


def check_smoothness(
    grad_norms: ArrayLike, hessian_norms: ArrayLike, *, L0: float, L1: float
) -> SmoothnessCheck:
    r"""Whether these points keep :math:`\ell_i \le L_0 + L_1 g_i`, and the worst of them.

    Args:
        grad_norms: Gradient norms :math:`g_i`.
        hessian_norms: Hessian norms :math:`\ell_i`.
        L0: The claimed :math:`L_0 \ge 0`.
        L1: The claimed :math:`L_1 \ge 0`.

    Example:
        The paper's pair for x⁴ (row 28), and the worst point |x| = 0.2:

        >>> from curvestep.theory.problems.polynomials import Quartic
        >>> f, x = Quartic(), np.linspace(-30, 30, 60001)
        >>> check = check_smoothness(f.grad_norm(x), f.hessian_norm(x), L0=0.1, L1=10.0)
        >>> check.holds, round(check.excess, 6), abs(x[check.index]).round(3)
        (False, 0.06, np.float64(0.2))
    """
    check_nonnegative("L0", L0)
    check_nonnegative("L1", L1)
    g, ell = _pairs(grad_norms, hessian_norms)
    excess = ell - (L0 + L1 * g)
    worst = int(np.argmax(excess))
    return SmoothnessCheck(
        holds=bool((excess <= 1e-9 * (L0 + L1 * g)).all()),
        index=worst,
        excess=float(excess[worst]),
    )


def gradient_change_bound(distance: ArrayLike, *, grad_norm: ArrayLike, L0: float, L1: float) -> Array:
    r"""Most that the gradient can change over a distance r: :math:`(L_0 + L_1g)(e^{L_1r} - 1)/L_1`.

    Example:
        >>> gradient_change_bound([0.0, 1.0], grad_norm=1.0, L0=1.0, L1=1.0)
        array([0.        , 3.43656366])
    """
    check_nonnegative("L0", L0)
    check_positive("L1", L1)
    g = np.asarray(grad_norm, dtype=np.float64)
    r = np.asarray(distance, dtype=np.float64)
    return (L0 + L1 * g) * np.expm1(L1 * r) / L1


def value_change_bound(distance: ArrayLike, *, grad_norm: ArrayLike, L0: float, L1: float) -> Array:
    r"""Most that f can leave its tangent over a distance r: :math:`(L_0 + L_1g)\,\varphi(L_1r)/L_1^2`.

    Here :math:`\varphi(a) = e^a - a - 1`. It takes the place of :math:`\tfrac L2r^2`, and grows exponentially
    in r (not in r², as the paper says).

    Example:
        >>> value_change_bound([0.0, 1.0], grad_norm=1.0, L0=1.0, L1=1.0)
        array([0.        , 1.43656366])
    """
    check_nonnegative("L0", L0)
    check_positive("L1", L1)
    g = np.asarray(grad_norm, dtype=np.float64)
    r = np.asarray(distance, dtype=np.float64)
    return (L0 + L1 * g) * phi(L1 * r) / L1**2


def limsup_smoothness(
    problem: Problem, x: Array, *, radius: float, num_samples: int = 256, seed: int = 0
) -> float:
    r"""Largest :math:`\lVert\nabla f(x + \delta) - \nabla f(x)\rVert/\lVert\delta\rVert` seen for small δ.

    The paper's first-order condition asks for the limsup; a sample can only bound it from below.

    Args:
        problem: The function.
        x: One point.
        radius: Length of every δ.
        num_samples: How many directions.
        seed: Seed of the directions.

    Example:
        >>> from curvestep.theory.problems.polynomials import Quadratic
        >>> round(limsup_smoothness(Quadratic([100.0, 1.0]), np.zeros(2), radius=1e-3), 1)
        100.0
    """
    check_positive("radius", radius)
    delta = np.random.default_rng(seed).normal(size=(num_samples, *problem.event_shape))
    delta = problem.scale(radius / problem.norm(delta), delta)
    change = problem.gradient(x + delta) - problem.gradient(np.broadcast_to(x, delta.shape))
    return float((problem.norm(change) / radius).max())


def _pairs(grad_norms: ArrayLike, hessian_norms: ArrayLike) -> tuple[Array, Array]:
    g = np.ravel(np.asarray(grad_norms, float))
    ell = np.ravel(np.asarray(hessian_norms, float))
    if g.size == 0 or g.shape != ell.shape:
        raise ValueError(
            "`grad_norms` and `hessian_norms` must be of equal length, at least one, "
            f"got {g.size} and {ell.size}."
        )
    if not (np.isfinite(g + ell) & (g >= 0) & (ell >= 0)).all():
        raise ValueError(
            "`grad_norms` and `hessian_norms` must be finite and zero or more. Leave others out."
        )
    return g, ell
