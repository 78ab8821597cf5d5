r"""Lines above a cloud of points (gradient norm, smoothness): the frontier and the quantile line.

Definition 1 of the paper, :math:`\lVert\nabla^2 f(x)\rVert \le L_0 + L_1\lVert\nabla f(x)\rVert`, is an upper
bound, so a line through the middle of the cloud is not an estimate of it. The frontier holds every point
below the line; the quantile line leaves a share :math:`1 - q` of them above, and so survives outliers.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array, eye_array, hstack


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
    g, ell = grad_norm[order], smoothness[order]
    # A point below and to the right of another is never the maximum for any L1 >= 0.
    rises = np.append(True, ell[1:] > np.maximum.accumulate(ell)[:-1])
    hull: list[tuple[float, float]] = []
    for point in zip(g[rises].tolist(), ell[rises].tolist(), strict=True):
        while len(hull) > 1 and _is_below(hull[-1], hull[-2], point):
            hull.pop()
        hull.append(point)
    return np.array(hull).reshape(-1, 2)


def frontier(points: np.ndarray, L1: float | np.ndarray) -> np.ndarray:
    """Smallest L0 with every point below ``L0 + L1 g``, for each ``L1``.

    Example:
        >>> frontier(np.array([[1.0, 1.0], [2.0, 4.0]]), np.array([0.0, 1.0, 5.0]))
        array([4., 2., 0.])
    """
    above = points[:, 1] - np.multiply.outer(L1, points[:, 0])
    return np.maximum(above.max(axis=-1), 0.0)


def quantile_line(grad_norm: np.ndarray, smoothness: np.ndarray, *, quantile: float) -> tuple[float, float]:
    r"""``(L0, L1)`` of the quantile line with both at least zero, exactly.

    .. math::
        \min_{L_0, L_1 \ge 0} \sum_i \rho_q(\ell_i - L_0 - L_1 g_i),
        \qquad \rho_q(r) = \max\{q r, (q - 1) r\}

    A linear programme. For many points only those near the line enter it as unknowns; those far above and far
    below act through their sums, which is exact once no point turns out to lie on the wrong side (Portnoy and
    Koenker, 1997); if one does, the band is widened and the programme solved again.

    Example:
        >>> g = np.array([1.0, 2.0, 3.0, 4.0])
        >>> print("{:.6f} {:.6f}".format(*quantile_line(g, 0.5 + 2.0 * g, quantile=0.9)))
        0.500000 2.000000
    """
    # In units of the data, so that the solver's tolerances mean the same for every problem.
    unit_g, unit_l = _unit(grad_norm), _unit(smoothness)
    g, ell = grad_norm / unit_g, smoothness / unit_l
    first = resampled_lines(g[None], ell[None], quantile=quantile)[0]
    residual = ell - first[0] - first[1] * g
    nearest = np.argsort(np.abs(residual), kind="stable")
    size = min(len(g), 200 + 4 * int(len(g) ** 0.5))
    while True:
        near = np.zeros(len(g), dtype=bool)
        near[nearest[:size]] = True
        above, below = ~near & (residual > 0), ~near & (residual <= 0)
        L0, L1 = _solve(g, ell, near, above, below, quantile)
        if near.all() and np.isnan(L0):  # numbers too far apart for the solver; bisection divides by none
            L0, L1 = first
        final = ell - L0 - L1 * g
        if (final[above] >= 0).all() and (final[below] <= 0).all():
            return float(L0 * unit_l), float(L1 * unit_l / unit_g)
        size = min(len(g), 4 * size)


def resampled_lines(grad_norm: np.ndarray, smoothness: np.ndarray, *, quantile: float) -> np.ndarray:
    r"""Quantile lines ``(L0, L1)`` of many samples at once, to about ten digits.

    For a fixed slope the best intercept is a quantile of :math:`\ell - L_1 g`, or zero; what is left is
    convex in :math:`L_1` alone, and its derivative has the sign of :math:`\sum_i \psi_q(r_i) g_i`,
    :math:`\psi_q(r) = q - 1[r < 0]`. So bisection finds the slope, for all samples in step.

    Args:
        grad_norm: Samples as rows, shape (samples, points).
        smoothness: Likewise.
        quantile: Share of points below the line, in (0, 1).

    Returns:
        Shape (samples, 2).
    """
    num = grad_norm.shape[1]
    rank = min(num - 1, max(0, int(np.ceil(quantile * num)) - 1))
    low = np.zeros(len(grad_norm))
    # No line with both coefficients >= 0 needs to be steeper than the steepest ray to a point.
    high = np.max(smoothness / np.maximum(grad_norm, 1e-300), axis=1)
    intercept = np.empty_like(low)
    steep = np.ones(len(low), dtype=bool)
    for _ in range(48):
        slope = 0.5 * (low + high)
        residual = smoothness - slope[:, None] * grad_norm
        intercept = np.maximum(np.partition(residual, rank, axis=1)[:, rank], 0.0)
        size = smoothness + slope[:, None] * grad_norm
        steep = _prefers_steeper(residual - intercept[:, None], size, grad_norm, quantile)
        low, high = np.where(steep, slope, low), np.where(steep, high, slope)
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


def _solve(
    g: np.ndarray, ell: np.ndarray, near: np.ndarray, above: np.ndarray, below: np.ndarray, quantile: float
) -> tuple[float, float]:
    """The programme in L0, L1 and the two parts of each near residual; far points enter the cost only."""
    q, num = quantile, int(near.sum())
    cost_L0 = (1 - q) * below.sum() - q * above.sum()
    cost_L1 = (1 - q) * g[below].sum() - q * g[above].sum()
    cost = np.concatenate([[cost_L0, cost_L1], np.full(num, q), np.full(num, 1 - q)])
    line = csr_array(np.stack([np.ones(num), g[near]], axis=1))
    matrix = hstack([line, eye_array(num), -eye_array(num)], format="csr")
    solution = linprog(cost, A_eq=matrix, b_eq=ell[near], bounds=(0, None), method="highs")
    if not solution.success:  # far points can make the programme of a too narrow band unbounded
        return np.nan, np.nan
    return solution.x[0], solution.x[1]


def _unit(values: np.ndarray) -> float:
    unit = float(np.median(values))
    return unit if unit > 0 else float(values.max()) or 1.0


def _is_below(middle: tuple[float, float], left: tuple[float, float], right: tuple[float, float]) -> bool:
    cross = (middle[0] - left[0]) * (right[1] - left[1]) - (middle[1] - left[1]) * (right[0] - left[0])
    return cross >= 0
