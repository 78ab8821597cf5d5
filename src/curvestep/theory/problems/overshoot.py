"""The function on which one step that is too long costs exponentially many others."""

from __future__ import annotations

import numpy as np

from curvestep.checks import check_positive
from curvestep.theory.problems.base import Array, ScalarProblem
from curvestep.theory.problems.walls import ExponentialWall


class OvershootWell(ScalarProblem):
    r"""A well beside the start, a hill behind it, and a long slope down to another well (row 34).

    The slope is :math:`f' = -2\varepsilon` up to the start at 0. On the next stretch of length ``jump`` f'
    rises at the rate :math:`L_0 + L_1|f'|` to U and falls back to :math:`-2\varepsilon`. There it stays until
    the hill's height is lost, and then rises to 0. A first step of length ``jump`` leaps over the well onto
    the top of the slope, whatever the gradient is. The start lies :math:`\psi(2\varepsilon)` above the
    minimum, and the hill is :math:`2\psi(U) - 2\psi(2\varepsilon)` high, which grows like
    :math:`e^{L_1\cdot\text{jump}/2}`.

    f'' jumps where the rate changes its sign: the function is in the class by the paper's first-order
    condition.

    Args:
        L0: Curvature where f' = 0, :math:`L_0 > 0`.
        L1: Growth rate, :math:`L_1 > 0`.
        eps: The gradient norm :math:`\varepsilon > 0` that descent is to reach.
        jump: Length of well and hill.

    Example:
        >>> well = OvershootWell(L0=1.0, L1=1.0, eps=0.1, jump=4.0)
        >>> round(float(well.gap(np.array(0.0))), 4), round(well.hill, 2)
        (0.0177, 6.64)
        >>> well.gradient(np.array([-1.0, 0.0, 4.0, 9.0]))
        array([-0.2, -0.2, -0.2, -0.2])
    """

    minimum = 0.0

    def __init__(self, *, L0: float, L1: float, eps: float, jump: float) -> None:
        self._wall = ExponentialWall(L0=L0, L1=L1)
        self.slope = 2 * check_positive("eps", eps)
        self.jump = check_positive("jump", jump)
        self._foot = self._wall.start(M=self.slope)  # how far f' takes from −2ε to 0
        if not jump > 4 * self._foot:
            raise ValueError(
                f"`jump` must be more than {4 * self._foot:g}, or there is no hill, got {jump!r}."
            )
        rise = np.array(jump / 2 - self._foot)
        self.steepest = float(self._wall.grad_norm(rise))
        self._middle = float(self._wall.value(rise))
        self._start = float(self._wall.value(np.array(self._foot)))
        self.hill = 2 * (self._middle - self._start)
        self.end = jump + self.hill / self.slope  # of the slope
        self.name = "overshoot well"

    def value(self, x: Array) -> Array:
        """Values on the five pieces."""
        return np.select(
            self._pieces(x),
            [
                self._start - self.slope * x,
                self._wall.value(x - self._foot),
                2 * self._middle - self._wall.value(self.jump - x - self._foot),
                self._start + self.hill - self.slope * (x - self.jump),
            ],
            self._wall.value(np.maximum(self.end + self._foot - x, 0.0)),
        )

    def gradient(self, x: Array) -> Array:
        """Derivatives."""
        slope = np.full(np.shape(x), -self.slope)
        return np.select(
            self._pieces(x),
            [
                slope,
                self._wall.gradient(x - self._foot),
                self._wall.gradient(self.jump - x - self._foot),
                slope,
            ],
            -self._wall.grad_norm(np.maximum(self.end + self._foot - x, 0.0)),
        )

    def curvature(self, x: Array) -> Array:
        """Second derivatives, zero on the slopes and beyond the last well."""
        law = self._wall.L0 + self._wall.L1 * self.grad_norm(x)
        flat = np.zeros(np.shape(x))
        last = np.where(x <= self.end + self._foot, law, flat)
        return np.select(self._pieces(x), [flat, law, -law, flat], last)

    def frontier(self, L1: float) -> float:
        """L0 from its own L1 upwards; below it what the steepest point needs."""
        return self._wall.L0 + max(0.0, self._wall.L1 - L1) * self.steepest

    def _pieces(self, x: Array) -> list[Array]:
        """Where x lies before the well, in its first and second half, and on the slope."""
        return [x < 0, x <= self.jump / 2, x < self.jump, x < self.end]
