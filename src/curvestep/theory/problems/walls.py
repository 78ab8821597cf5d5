"""The functions of the lower bound: exponential walls, as printed and corrected, and the slow valley."""

from __future__ import annotations

import math

import numpy as np

from curvestep.checks import check_nonnegative, check_positive
from curvestep.theory.problems.base import Array, ScalarProblem

# 2/(k+2)!, so that φ(a) = a²/2 · Σ_k c_k aᵏ: at a = 1/2 the first term left out is below 1e-18.
_PHI_SERIES = np.array([2.0 / math.factorial(k + 2) for k in range(14)])


def phi(a: Array | float) -> Array:
    r"""The function :math:`\varphi(a) = e^a - a - 1`, accurate near zero and ``inf`` beyond overflow.

    Example:
        >>> phi(np.array([1e-9, 1.0]))  # by the formula, the first would be 0 or noise
        array([5.00000000e-19, 7.18281828e-01])
    """
    a = np.asarray(a, dtype=np.float64)
    small = np.clip(a, -0.5, 0.5)
    with np.errstate(over="ignore"):
        return np.where(
            np.abs(a) < 0.5,
            0.5 * small * small * np.polynomial.polynomial.polyval(small, _PHI_SERIES),
            np.expm1(a) - a,
        )


class ExponentialWall(ScalarProblem):
    r"""The function whose Hessian is :math:`L_0 + L_1\lVert\nabla f\rVert` *everywhere*.

    .. math::
        f(x) = \frac{L_0}{L_1^2}\left(e^{L_1|x|} - L_1|x| - 1\right), \qquad
        f'(x) = \frac{L_0}{L_1}\left(e^{L_1|x|} - 1\right)\operatorname{sgn} x

    It is twice continuously differentiable, and every two-point inequality about (L0, L1)-smooth functions
    is an equality on it: the canonical test function. With gradient norm :math:`M` at
    :math:`x_0 = \ln(1 + L_1M/L_0)/L_1`, fixed-step descent diverges exactly for steps above :math:`2x_0/M`.

    Beyond overflow value and curvature are ``inf`` and the gradient is ±``inf``, without a warning.

    Args:
        L0: Curvature at the minimum, :math:`L_0 > 0`.
        L1: Growth rate, :math:`L_1 > 0`.

    Note:
        This corrects the paper's function (row 14), which is :class:`PrintedWall`.

    Example:
        >>> wall = ExponentialWall(L0=1.0, L1=5.0)
        >>> x = np.array([-2.0, 0.0, 0.3])
        >>> bool(np.allclose(wall.hessian_norm(x), 1.0 + 5.0 * wall.grad_norm(x)))
        True
        >>> round(wall.start(M=50.0), 4), round(wall.largest_step(M=50.0), 6)
        (1.1051, 0.044204)
    """

    minimum = 0.0

    def __init__(self, *, L0: float, L1: float) -> None:
        self.L0 = float(check_positive("L0", L0))
        self.L1 = float(check_positive("L1", L1))
        self.name = "exponential wall"

    def value(self, x: Array) -> Array:
        """Values, accurate near 0."""
        return (self.L0 / self.L1**2) * phi(self.L1 * np.abs(x))

    def gradient(self, x: Array) -> Array:
        """Derivatives, ±inf beyond overflow."""
        return np.copysign(self._slope(x), x)

    def curvature(self, x: Array) -> Array:
        """Second derivatives, L0 + L1|f'|."""
        return self.L0 + self.L1 * self._slope(x)

    def _slope(self, x: Array) -> Array:
        with np.errstate(over="ignore"):
            return (self.L0 / self.L1) * np.expm1(self.L1 * np.abs(x))

    def frontier(self, L1: float) -> float:
        """L0 from the wall's own L1 upwards; below it no L0 is enough."""
        return self.L0 if check_nonnegative("L1", L1) >= self.L1 else math.inf

    def start(self, *, M: float) -> float:
        """The point with gradient norm ``M``."""
        return math.log1p(self.L1 * check_positive("M", M) / self.L0) / self.L1

    def largest_step(self, *, M: float) -> float:
        """The step size above which fixed-step descent from ``start(M=M)`` diverges."""
        return 2.0 * self.start(M=M) / M


class PrintedWall(ExponentialWall):
    r"""The paper's fast function of Theorem 4, as printed.

    .. math::
        f(x) = \begin{cases} \tfrac{L_1}{2}x^2 + \tfrac1{2L_1} & |x| \le 1/L_1 \\
                             \tfrac{1}{L_1 e}\,e^{L_1|x|}      & |x| > 1/L_1 \end{cases}

    The joints are twice continuously differentiable. The paper places it in the class with :math:`L_0 = 1`;
    but :math:`f''(0) = L_1` where :math:`f'(0) = 0`, so it needs :math:`L_0 \ge L_1` (row 14).

    Example:
        >>> PrintedWall(L1=5.0).frontier(5.0)  # claimed: 1
        5.0
    """

    def __init__(self, *, L1: float) -> None:
        super().__init__(L0=check_positive("L1", L1), L1=L1)
        self.minimum = 0.5 / self.L1  # at 0
        self.name = "exponential wall as printed"

    def value(self, x: Array) -> Array:
        """Values on the three pieces."""
        a = self.L1 * np.abs(x)
        with np.errstate(over="ignore"):
            return np.where(a <= 1, 0.5 * (a * a + 1), np.exp(a - 1)) / self.L1

    def curvature(self, x: Array) -> Array:
        """Second derivatives."""
        a = self.L1 * np.abs(x)
        with np.errstate(over="ignore"):
            return self.L1 * np.where(a <= 1, 1.0, np.exp(a - 1))

    def _slope(self, x: Array) -> Array:
        a = self.L1 * np.abs(x)
        with np.errstate(over="ignore"):
            return np.where(a <= 1, a, np.exp(a - 1))

    def start(self, *, M: float) -> float:
        """The point with gradient norm ``M``, (ln M + 1)/L1 for M ≥ 1."""
        check_positive("M", M)
        return (math.log(M) + 1) / self.L1 if M >= 1 else M / self.L1


class SlowValley(ScalarProblem):
    r"""The paper's slow function of Theorem 4: a long slope of twice the wanted gradient norm.

    .. math::
        f(x) = \begin{cases} \tfrac{\varepsilon}{4}(6x^2 - x^4)          & |x| \le 1 \\
                             2\varepsilon(|x| - 1) + \tfrac54\varepsilon & |x| > 1 \end{cases}

    Twice continuously differentiable, with :math:`|f'| \le 2\varepsilon` and :math:`f'' \le 3\varepsilon`:
    the paper does not say that it needs :math:`3\varepsilon \le L_0` and :math:`2\varepsilon \le M` (row 15).
    ``slope`` and ``width`` stretch it to :math:`\tfrac12 sw\,f(x/w)`, with slope :math:`s\varepsilon`
    and greatest curvature :math:`\tfrac32 s\varepsilon/w`.

    Args:
        eps: The gradient norm :math:`\varepsilon > 0` that descent is to reach.
        slope: The slope outside in units of ``eps``, :math:`s > 1`; the paper's is 2.
        width: Where the slope begins, :math:`w > 0`; the paper's is 1.

    Example:
        >>> valley = SlowValley(eps=0.5)
        >>> valley.frontier(1.0)  # more than the claimed 1
        1.5
        >>> valley.gradient(np.array([-7.0, 0.0, 7.0]))
        array([-1.,  0.,  1.])
    """

    minimum = 0.0

    def __init__(self, eps: float, *, slope: float = 2.0, width: float = 1.0) -> None:
        self.eps = float(check_positive("eps", eps))
        self.width = float(check_positive("width", width))
        if not (math.isfinite(slope) and slope > 1):
            raise ValueError(f"`slope` must be more than 1, or descent has nothing to do, got {slope!r}.")
        self.slope = float(slope)
        self._height = 0.5 * self.slope * self.width * self.eps
        numbers = (self.width, -1.0, 1.0, 3.0, self._height / self.width)
        self._constants = tuple(np.array(number) for number in numbers)
        self.name = "slow valley"

    def value(self, x: Array) -> Array:
        """Values on the three pieces."""
        u = np.abs(x) / self.width
        v = np.minimum(u, 1.0) ** 2
        return self._height * (0.25 * v * (6.0 - v) + 2.0 * np.maximum(u - 1.0, 0.0))

    def gradient(self, x: Array) -> Array:
        """Derivatives, ±slope·eps outside."""
        # Arrays for the constants, and no np.clip: on few points numpy's overhead is all the cost.
        width, left, right, three, factor = self._constants
        u = np.minimum(np.maximum(x / width, left), right)
        return factor * (u * (three - u * u))

    def curvature(self, x: Array) -> Array:
        """Second derivatives, zero outside."""
        u = np.clip(x / self.width, -1.0, 1.0)
        return (3.0 * self._height / self.width**2) * (1.0 - u * u)

    def frontier(self, L1: float) -> float:
        """The curvature at 0, for every L1: there the gradient vanishes."""
        check_nonnegative("L1", L1)
        return 3.0 * self._height / self.width**2

    def start(self, *, gap: float) -> float:
        """The point on the slope with f(x) − f* = ``gap``."""
        edge = 1.25 * self._height
        if not (math.isfinite(gap) and gap >= edge):
            raise ValueError(f"`gap` must be at least {edge:g}, where the slope begins, got {gap!r}.")
        return self.width + (gap - edge) / (self.slope * self.eps)
