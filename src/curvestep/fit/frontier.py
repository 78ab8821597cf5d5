r"""Lines above a cloud of points (gradient norm, smoothness): the frontier and the quantile line.

Definition 1 of the paper, :math:`\lVert\nabla^2 f(x)\rVert \le L_0 + L_1\lVert\nabla f(x)\rVert`, is an upper
bound, so a line through the middle of the cloud is not an estimate of it. The frontier holds every point
below the line; the quantile line leaves a share :math:`1 - q` of them above, and so survives outliers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def frontier_points(grad_norm: np.ndarray, smoothness: np.ndarray) -> np.ndarray:
    r"""The points that decide the frontier :math:`L_0(L_1) = \max_i(\ell_i - L_1 g_i)_+`, as rows (g, ℓ).

    They are the corners of the upper left convex hull: whatever :math:`L_1 \ge 0` is, the maximum is attained
    at one of them. Usually a handful out of any number of points.

    Example:
        >>> frontier_points(np.array([1.0, 2.0, 3.0, 2.0]), np.array([1.0, 4.0, 5.0, 2.0]))
        array([[1., 1.],
               [2., 4.],
               [3., 5.]])
    """
    order = np.lexsort((-smoothness, grad_norm))
    g = grad_norm[order]
    ell = smoothness[order]
    # A point below and to the right of another is never the maximum for any L1 >= 0.
    rises = np.append(True, ell[1:] > np.maximum.accumulate(ell)[:-1])
    hull: list[tuple[float, float]] = []
    for point in zip(g[rises].tolist(), ell[rises].tolist(), strict=True):
        while len(hull) > 1:
            x, y = hull[-1]
            left, low = hull[-2]
            if (x - left) * (point[1] - low) < (y - low) * (point[0] - left):
                break  # the last corner lies above the line from the one before it to the new point
            hull.pop()
        hull.append(point)
    return np.array(hull).reshape(-1, 2)


def least_L0(points: np.ndarray, L1: ArrayLike) -> np.ndarray:
    r"""The least :math:`L_0` with every point below the line: :math:`\max_k(\ell_k - L_1 g_k)_+`.

    Example:
        >>> least_L0(np.array([[0.0, 1.0], [1.0, 4.0], [10.0, 20.0]]), [0.0, 2.0, 3.0])
        array([20.,  2.,  1.])
    """
    g, ell = points.T
    slopes = np.asarray(L1, dtype=float)
    return np.maximum((ell - slopes[..., None] * g).max(axis=-1), 0.0)


def envelope(points: np.ndarray, grad_norm: np.ndarray) -> np.ndarray:
    r"""The least smoothness bound that a valid pair (L0, L1) gives at each gradient norm.

    .. math::
        \min_{L_1 \ge 0}\ \{L_0(L_1) + L_1 g\}, \qquad L_0(L_1) = \max_k (\ell_k - L_1 g_k)_+

    It lies above every measured point and touches the outermost ones. ``points`` are those of
    :func:`frontier_points`.

    Example:
        >>> envelope(np.array([[1.0, 1.0], [2.0, 4.0]]), np.array([0.5, 1.5, 2.0, 9.0]))
        array([1., 3., 4., 4.])
    """
    # A linear programme in L1 has its optimum at a kink: flat, along an edge of the hull, or with L0 = 0.
    g, ell = points.T
    edges = np.diff(ell) / np.diff(g)
    slopes = np.concatenate([[0.0], edges[edges > 0], [(ell / g).max()]])
    intercepts = least_L0(points, slopes)
    return (intercepts[:, None] + slopes[:, None] * grad_norm).min(axis=0)


def quantile_line(grad_norm: np.ndarray, smoothness: np.ndarray, *, quantile: float) -> tuple[float, float]:
    r"""``(L0, L1)`` of the quantile line with both at least zero, to about ten digits.

    .. math::
        \min_{L_0, L_1 \ge 0} \sum_i \rho_q(\ell_i - L_0 - L_1 g_i),
        \qquad \rho_q(r) = \max\{q r, (q - 1) r\}

    Example:
        >>> g = np.array([1.0, 2.0, 3.0, 4.0])
        >>> print("{:.6f} {:.6f}".format(*quantile_line(g, 0.5 + 2.0 * g, quantile=0.9)))
        0.500000 2.000000
    """
    L0, L1 = quantile_lines(grad_norm[None], smoothness[None], quantile=quantile)[0]
    return float(L0), float(L1)


def quantile_lines(grad_norm: np.ndarray, smoothness: np.ndarray, *, quantile: float) -> np.ndarray:
    r"""Quantile lines ``(L0, L1)`` of many samples at once, to about ten digits.

    For a fixed slope the best intercept is a quantile of :math:`\ell - L_1 g`, or zero; what is left is
    convex in :math:`L_1` alone, and its derivative has the sign of :math:`\sum_i \psi_q(r_i) g_i`,
    :math:`\psi_q(r) = q - 1[r < 0]`. So bisection finds the slope, for all samples in step.
    Samples are rows, shape (samples, points); what comes back has shape (samples, 2).
    """
    num = grad_norm.shape[1]
    rank = min(num - 1, max(0, int(np.ceil(quantile * num)) - 1))
    low = np.zeros(len(grad_norm))
    # No line with both coefficients >= 0 needs to be steeper than the steepest ray to a point.
    high = np.max(smoothness / np.maximum(grad_norm, 1e-300), axis=1)
    for _ in range(48):
        slope = 0.5 * (low + high)
        residual = smoothness - slope[:, None] * grad_norm
        intercept = np.maximum(np.partition(residual, rank, axis=1)[:, rank], 0.0)
        size = smoothness + slope[:, None] * grad_norm
        steep = _prefers_steeper(residual - intercept[:, None], size, grad_norm, quantile)
        low = np.where(steep, slope, low)
        high = np.where(steep, high, slope)
    slope = np.where(low > 0, 0.5 * (low + high), 0.0)
    residual = smoothness - slope[:, None] * grad_norm
    intercept = np.maximum(np.partition(residual, rank, axis=1)[:, rank], 0.0)
    return np.stack([intercept, slope], axis=1)


def _prefers_steeper(
    residual: np.ndarray, size: np.ndarray, grad_norm: np.ndarray, quantile: float
) -> np.ndarray:
    """Whether the check loss falls when the slope grows; points on the line take the share that balances.

    ``size`` is that of the numbers whose difference is ``residual``: what rounding is relative to.
    """
    on = np.abs(residual) <= 1e-13 * size
    psi = np.where(residual > 0, quantile, quantile - 1.0)
    psi = np.where(on, 0.0, psi)
    # The intercept's own condition, sum psi = 0, fixes the part that the points on the line must carry.
    carried = np.where(on.any(axis=1), -psi.sum(axis=1), 0.0)
    g_on = np.where(on, grad_norm, 0.0).sum(axis=1) / np.maximum(on.sum(axis=1), 1)
    bounded = np.clip(carried, (quantile - 1.0) * on.sum(axis=1), quantile * on.sum(axis=1))
    return (psi * grad_norm).sum(axis=1) + bounded * g_on > 0
