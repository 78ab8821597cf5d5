"""A function of one variable from its formulas."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from curvestep.theory.problems.base import Array, ScalarProblem

Formula = Callable[[Array], Array]
NUM_POINTS = 200_001  # of the grid on which the set S is looked at


class FormulaProblem(ScalarProblem):
    """A function of one variable, given by formulas for f, f' and f''.

    Args:
        value: f of an array of points.
        gradient: f'.
        curvature: f''.
        minimum: The infimum of f.
        name: A short name for labels.
        frontier: :math:`L_0(L_1)`, for theorems that need smoothness everywhere.
        domain: An interval on which the formulas hold, and outside of which f exceeds every f(x0); for
            theorems that need smoothness near {f ≤ f(x0)} only.

    Example:
        >>> import numpy as np
        >>> f = FormulaProblem(np.cosh, np.sinh, np.cosh, minimum=1.0, name="cosh")
        >>> float(f.gap(np.array(0.0)))
        0.0

        No pair holds everywhere for exp(x²), but there is one within distance 1 of {f ≤ f(1)}:

        >>> f = FormulaProblem(
        ...     lambda x: np.exp(x * x),
        ...     lambda x: 2 * x * np.exp(x * x),
        ...     lambda x: (2 + 4 * x * x) * np.exp(x * x),
        ...     minimum=1.0,
        ...     domain=(-5.0, 5.0),
        ... )
        >>> round(f.frontier_near(np.array(1.0), 5.0, radius=1.0), 2)
        2.0
    """

    def __init__(
        self,
        value: Formula,
        gradient: Formula,
        curvature: Formula,
        *,
        minimum: float,
        name: str = "formula",
        frontier: Callable[[float], float] | None = None,
        domain: tuple[float, float] | None = None,
    ) -> None:
        self._value = value
        self._gradient = gradient
        self._curvature = curvature
        self._frontier = frontier
        self._domain = domain
        self.minimum = minimum
        self.name = name

    def value(self, x: Array) -> Array:
        """Values f(x)."""
        return self._value(x)

    def gradient(self, x: Array) -> Array:
        """Derivatives f'(x)."""
        return self._gradient(x)

    def curvature(self, x: Array) -> Array:
        """Second derivatives f''(x)."""
        return self._curvature(x)

    def frontier(self, L1: float) -> float:
        """The given frontier."""
        if self._frontier is None:
            raise ValueError(f"The frontier of {self.name} is not known. Give `frontier` with its formulas.")
        return self._frontier(L1)

    def frontier_near(self, starts: Array, L1: float, *, radius: float) -> float:
        """On a grid of the domain; ``inf`` if S is larger than the domain."""
        if self._domain is None:
            return self.frontier(L1)
        low, high = self._domain
        x = np.linspace(low, high, NUM_POINTS)[1:-1]
        sublevel = x[self.value(x) <= self.value(starts).max()]
        if sublevel[0] - radius < low or sublevel[-1] + radius > high:
            return math.inf
        after = np.searchsorted(sublevel, x).clip(1, len(sublevel) - 1)
        distance = np.minimum(np.abs(x - sublevel[after - 1]), np.abs(sublevel[after] - x))
        near = x[distance <= radius]
        return max(0.0, float((self.hessian_norm(near) - L1 * self.grad_norm(near)).max()))
