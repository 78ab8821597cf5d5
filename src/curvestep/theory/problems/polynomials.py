"""Polynomials of one variable with their exact frontier, and quadratics in any dimension."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.polynomial import Polynomial as Series

from curvestep.checks import check_nonnegative
from curvestep.theory.problems.base import Array, Problem, ScalarProblem


class Polynomial(ScalarProblem):
    r"""A polynomial :math:`f(x) = \sum_i a_i x^i`, with its frontier exact from roots.

    Lemma 2 says that for degree :math:`d \ge 3` some pair :math:`(L_0, L_1)` exists. More is true: *every*
    :math:`L_1 > 0` has its :math:`L_0(L_1) = \max_x (|f''| - L_1|f'|)_+`, attained where :math:`f' = 0` or
    :math:`f''' = \pm L_1 f''`. Odd degree is unbounded below, so no theorem about a minimum applies;
    ``minimum`` is then ``-inf``.

    Args:
        coefficients: :math:`a_0, a_1, \dots, a_d`, the last not zero.

    Example:
        >>> cubic = Polynomial([0, 0, 0, 1])
        >>> cubic.frontier(2.0), cubic.minimum  # 6|x| - 6x² is largest at x = 1/2
        (1.5, -inf)
    """

    def __init__(self, coefficients: Sequence[float]) -> None:
        a = np.array(coefficients, dtype=np.float64)
        if a.ndim != 1 or a.size == 0 or not np.isfinite(a).all():
            raise ValueError(f"`coefficients` must be finite numbers a_0, …, a_d, got {coefficients!r}.")
        if a.size > 1 and a[-1] == 0:
            raise ValueError(
                f"`coefficients` must end in a leading coefficient that is not zero, got {coefficients!r}. "
                "Drop the trailing zeros."
            )
        self.degree = a.size - 1
        self._f = Series(a)
        self._df = self._f.deriv(1)
        self._d2f = self._f.deriv(2)
        self._d3f = self._f.deriv(3)
        self.minimum = -math.inf
        if self.degree == 0 or (a[-1] > 0 and self.degree % 2 == 0):
            self.minimum = float(self._f(self._candidates(self._df)).min())
        self.name = f"polynomial of degree {self.degree}"

    def value(self, x: Array) -> Array:
        """Values by Horner's rule."""
        return self._f(x)

    def gradient(self, x: Array) -> Array:
        """Derivatives f'."""
        return self._df(x)

    def curvature(self, x: Array) -> Array:
        """Second derivatives f''."""
        return self._d2f(x)

    def frontier(self, L1: float) -> float:
        """Exact, from the roots of f' and of f''' ± L1 f''."""
        check_nonnegative("L1", L1)
        if L1 == 0 and self.degree > 2:
            return math.inf
        equations = (self._df, self._d3f - L1 * self._d2f, self._d3f + L1 * self._d2f)
        x = np.concatenate([self._candidates(equation) for equation in equations])
        return max(0.0, float((np.abs(self._d2f(x)) - L1 * np.abs(self._df(x))).max()))

    def _candidates(self, q: Series) -> Array:
        """Where q vanishes, and zero.

        An extra point can only be less than the maximum. So real parts of complex roots are kept: a multiple
        root that rounding has pushed off the real line is not lost.
        """
        points = np.append(q.trim().roots().real, 0.0)
        return points[np.isfinite(points)]


class Quartic(Polynomial):
    r"""The function :math:`x^4` of the paper's synthetic experiment; its frontier is :math:`L_0 = 16/L_1^2`.

    Note:
        The paper uses :math:`f'' \le 10 f' + 0.1` (row 28). With :math:`L_1 = 10` the least :math:`L_0` is
        0.16: the printed pair fails for :math:`0.117 < |x| < 0.264`, by up to 0.06 at :math:`|x| = 0.2`.

    Example:
        >>> Quartic().frontier(10.0)
        0.16
    """

    def __init__(self) -> None:
        super().__init__([0, 0, 0, 0, 1])
        self.name = "quartic"

    def value(self, x: Array) -> Array:
        """Fourth powers."""
        square = x * x
        return square * square

    def gradient(self, x: Array) -> Array:
        """Derivatives 4x³."""
        return 4.0 * (x * x * x)

    def frontier(self, L1: float) -> float:
        """16/L1²."""
        check_nonnegative("L1", L1)
        return 16.0 / L1**2 if L1 > 0 else math.inf


class Quadratic(Problem):
    r"""A quadratic :math:`f(x) = \tfrac12 \sum_i \lambda_i x_i^2` with chosen curvatures.

    Its Hessian is the same everywhere and the gradient vanishes at 0, so :math:`L_0(L_1) = \lambda_{\max}`
    for every :math:`L_1`: clipping has nothing to win here.

    Args:
        curvatures: The eigenvalues :math:`\lambda_i`, zero or more, one for each dimension.

    Example:
        >>> f = Quadratic([100.0, 1.0])
        >>> f.gradient(np.array([1.0, 1.0])), f.frontier(3.0)
        (array([100.,   1.]), 100.0)
    """

    minimum = 0.0

    def __init__(self, curvatures: Sequence[float]) -> None:
        for i, curvature in enumerate(curvatures):
            check_nonnegative(f"curvatures[{i}]", curvature)
        self.curvatures = np.array(curvatures, dtype=np.float64)
        if self.curvatures.size == 0:
            raise ValueError("`curvatures` must have one entry for each dimension, got none.")
        self.event_shape = self.curvatures.shape
        self.name = f"quadratic in {self.curvatures.size} dimensions"

    def value(self, x: Array) -> Array:
        """Half the quadratic form."""
        return 0.5 * ((x * x) @ self.curvatures)

    def gradient(self, x: Array) -> Array:
        """Hessian times x."""
        return x * self.curvatures

    def hessian_norm(self, x: Array) -> Array:
        """The largest curvature, everywhere."""
        return np.full(x.shape[:-1], self.curvatures.max())

    def frontier(self, L1: float) -> float:
        """The largest curvature, for every L1."""
        check_nonnegative("L1", L1)
        return float(self.curvatures.max())
