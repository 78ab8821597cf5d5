r"""Test functions: value, gradient, Hessian norm, minimum, (L0, L1) frontier; and noise on their gradients.

A function of one real variable takes points of any shape, each entry a point. A function on
:math:`\mathbb R^d` takes points of shape ``(..., d)``. ``event_shape`` is ``()`` or ``(d,)`` and says which.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from curvestep.checks import check_positive

Array = NDArray[Any]


class Problem(ABC):
    """A function with everything about it known exactly.

    Attributes:
        name: A short name for labels.
        event_shape: ``()`` for a function of one real variable, ``(d,)`` on d-dimensional space.
        minimum: The infimum of f; ``-inf`` if f is unbounded below.
    """

    name: str
    event_shape: tuple[int, ...] = ()
    minimum: float

    @abstractmethod
    def value(self, x: Array) -> Array:
        """Values f(x), one for each point."""

    @abstractmethod
    def gradient(self, x: Array) -> Array:
        """Gradients, shaped like ``x``."""

    @abstractmethod
    def hessian_norm(self, x: Array) -> Array:
        """Spectral norms of the Hessian, one for each point."""

    @abstractmethod
    def frontier(self, L1: float) -> float:
        r"""The smallest :math:`L_0` that goes with this :math:`L_1`; ``inf`` if none does.

        .. math::
            L_0(L_1) = \sup_x \big(\lVert\nabla^2 f(x)\rVert - L_1\lVert\nabla f(x)\rVert\big)_+
        """

    def frontier_near(self, starts: Array, L1: float, *, radius: float) -> float:
        """The smallest L0 on the paper's set S: all within ``radius`` of {f ≤ f(x0)}.

        Here that of the whole space, which is enough. ``FormulaProblem`` looks at S itself.
        """
        return self.frontier(L1)

    def grad_norm(self, x: Array) -> Array:
        """Gradient norms, one for each point."""
        return self.norm(self.gradient(x))

    def gap(self, x: Array) -> Array:
        """How far each point is above the minimum, f(x) − f*."""
        return self.value(x) - self.minimum

    def norm(self, v: Array) -> Array:
        """Euclidean norms of vectors of this problem, one for each point."""
        if not self.event_shape:
            return np.abs(v)
        # Scaled first: the square of 1e300 is inf.
        largest = np.abs(v).max(axis=-1, keepdims=True)
        unit = np.where((largest > 0) & np.isfinite(largest), largest, 1.0)
        v = v / unit
        return unit[..., 0] * np.sqrt(np.einsum("...d,...d->...", v, v))

    def scale(self, h: Array, v: Array) -> Array:
        """One factor for each point, times its vector."""
        return h.reshape(h.shape + (1,) * len(self.event_shape)) * v

    def check_start(self, x0: ArrayLike) -> Array:
        """``x0`` as an array, if every point in it can be started from."""
        x = np.array(x0, dtype=np.float64)
        if x.shape[x.ndim - len(self.event_shape) :] != self.event_shape:
            raise ValueError(
                f"`x0` must have {self.event_shape[0]} coordinates in its last axis for {self.name}, "
                f"got shape {x.shape}."
            )
        if not np.isfinite(x).all():
            raise ValueError(f"`x0` must be finite, got {float(x[~np.isfinite(x)][0])!r}.")
        if not (np.isfinite(self.value(x)) & np.isfinite(self.grad_norm(x))).all():
            raise ValueError(
                f"`x0` is outside the domain of {self.name} in float64: f or its gradient overflows there. "
                "Start closer to the minimum."
            )
        return x

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"


class ScalarProblem(Problem):
    """A function of one real variable; its curvature f'' gives the Hessian norm."""

    @abstractmethod
    def curvature(self, x: Array) -> Array:
        """Second derivatives f''(x)."""

    def hessian_norm(self, x: Array) -> Array:
        """Absolute second derivatives."""
        return np.abs(self.curvature(x))


class Noise(ABC):
    """A law of noise on gradients, of mean zero.

    Attributes:
        tau: No noise is longer; ``inf`` if there is no limit.
        is_symmetric: Whether noise and minus noise have the same law.
    """

    tau: float = math.inf
    is_symmetric: bool = False

    @property
    @abstractmethod
    def sigma(self) -> float:
        """Root mean square of the noise's length."""

    @abstractmethod
    def draw(self, rng: np.random.Generator, batch: tuple[int, ...], problem: Problem) -> Array:
        """Noise for so many gradients of a problem."""


@dataclass(frozen=True)
class BoundedNoise(Noise):
    r"""Noise of mean zero with :math:`\lVert\hat\nabla f - \nabla f\rVert \le \tau`, as Theorems 7 and 8 ask.

    Args:
        tau: The radius :math:`\tau > 0`; the law is uniform on the sphere, the most noise that it allows.

    Example:
        >>> from curvestep.theory.problems.polynomials import Quadratic
        >>> problem = Quadratic([1.0, 2.0, 3.0])
        >>> noise = BoundedNoise(0.5).draw(np.random.default_rng(0), (1000,), problem)
        >>> bool(np.allclose(problem.norm(noise), 0.5))
        True
    """

    tau: float
    is_symmetric = True

    def __post_init__(self) -> None:
        check_positive("tau", self.tau)

    @property
    def sigma(self) -> float:
        """The radius: every noise is as long."""
        return self.tau

    def draw(self, rng: np.random.Generator, batch: tuple[int, ...], problem: Problem) -> Array:
        """Noise for so many gradients of a problem."""
        if not problem.event_shape:
            return self.tau * rng.choice([-1.0, 1.0], size=batch)
        v = rng.normal(size=batch + problem.event_shape)
        return self.tau * (v / np.linalg.norm(v, axis=-1, keepdims=True))
