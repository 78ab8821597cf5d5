"""A function of one variable from its formulas."""

from __future__ import annotations

from collections.abc import Callable

from curvestep.theory.problems.base import Array, ScalarProblem

Formula = Callable[[Array], Array]


class FormulaProblem(ScalarProblem):
    """A function of one variable, given by formulas for f, f' and f''.

    Args:
        value: f of an array of points.
        gradient: f'.
        curvature: f''.
        minimum: The infimum of f.
        name: A short name for labels.
        frontier: :math:`L_0(L_1)`, for theorems about (L0, L1)-smooth functions.

    Example:
        >>> import numpy as np
        >>> f = FormulaProblem(np.cosh, np.sinh, np.cosh, minimum=1.0, name="cosh")
        >>> float(f.gap(np.array(0.0)))
        0.0
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
    ) -> None:
        self._value = value
        self._gradient = gradient
        self._curvature = curvature
        self._frontier = frontier
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
