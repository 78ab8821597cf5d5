"""Backtracking: the line search that needs no constant of the function, and pays no exponential (row 34)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from curvestep.checks import check_inside, check_positive
from curvestep.theory.problems.base import Array
from curvestep.theory.rules import Iterate
from curvestep.theory.theorems.guarantee import Guarantee, check_numbers, in_class, smooth_within

ROUNDING = 4 * np.finfo(np.float64).eps  # of f, relative, that the test of a step forgives


@dataclass(frozen=True)
class ArmijoStep:
    r"""The first h of :math:`h_0, bh_0, b^2h_0, \dots` with :math:`f(x - h\nabla f) \le f(x) - \tfrac12hg^2`.

    Args:
        first: The first trial :math:`h_0 > 0`.
        factor: What a trial is shortened by, :math:`0 < b < 1`.

    Example:
        >>> from curvestep.theory.complexity import descend
        >>> from curvestep.theory.problems.polynomials import Quadratic
        >>> descend(Quadratic([4.0]), ArmijoStep(first=1.0), [1.0], 1).points[:, 0]  # h = 1/4
        array([1., 0.])
    """

    first: float = 1.0
    factor: float = 0.5

    def __post_init__(self) -> None:
        check_positive("first", self.first)
        check_inside("factor", self.factor, 0, 1)

    def __call__(self, point: Iterate) -> Array:
        """Step sizes at these points."""
        problem = point.problem
        value = problem.value(point.x)
        size = np.full(point.norm.shape, self.first)
        while True:
            trial = problem.value(point.x - problem.scale(size, point.g))
            allowed = value - size * point.norm**2 / 2 + ROUNDING * np.abs(value)
            too_long = ~(trial <= allowed) & np.isfinite(value) & (point.norm > 0)
            if not too_long.any():
                return size
            size = np.where(too_long, size * self.factor, size)


def armijo(
    *, L0: float, L1: float, gap: float, eps: float, first: float = 1.0, factor: float = 0.5
) -> Guarantee:
    r"""Descent by backtracking reaches gradient norm ε, without L0 and L1 in its recipe.

    Every :math:`h \le 1/(L_0 + L_1g)` passes the test, since it lowers f by
    :math:`hg^2(1 - h(L_0 + L_1g)/2)` or more. So the step is at least
    :math:`\min\{h_0, b/(L_0 + L_1g)\}`, and

    .. math::
        T \le \frac{2\Delta}{\varepsilon^2}\max\Big\{\frac1{h_0}, \frac{L_0 + L_1\varepsilon}{b}\Big\} .

    It needs exact values of f. Up to the factor 1/b and a small first trial this is the bound of Theorem 3 in
    its smooth form.

    Args:
        L0: :math:`L_0 > 0`, for the bound alone.
        L1: :math:`L_1 \ge 0`, likewise.
        gap: :math:`\Delta = f(x_0) - f^*`.
        eps: Gradient norm :math:`\varepsilon > 0` to reach.
        first: The first trial :math:`h_0` of every step.
        factor: What a trial is shortened by.

    Example:
        >>> round(armijo(L0=1.0, L1=2.0, gap=1.0, eps=0.1).bound)
        480
    """
    numbers = check_numbers(L0=L0, L1=L1, gap=gap, eps=eps)
    rule = ArmijoStep(first=first, factor=factor)
    return Guarantee(
        theorem="Armijo",
        version="sharp",
        bound=2 * gap / eps**2 * max(1 / first, (L0 + L1 * eps) / factor),
        rule=rule,
        assumptions=smooth_within(0.0),
        decrease=lambda g: 0.5 * np.minimum(first, factor / (L0 + L1 * g)) * g**2,
        checks=in_class(L0=L0, L1=L1, gap=gap, radius=0.0),
        **numbers,
    )
