"""Noise on gradients, bounded by τ as Theorems 7 and 8 ask."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from curvestep._checks import check_choice, check_positive
from curvestep.theory.problems.base import Array, per_point


class Noise(ABC):
    """A law with mean zero from which gradient noise is drawn."""

    @property
    @abstractmethod
    def tau(self) -> float:
        """The radius that holds the noise almost surely; ``inf`` if none does."""

    @abstractmethod
    def draw(self, rng: np.random.Generator, batch: tuple[int, ...], event: tuple[int, ...]) -> Array:
        """Noise of shape ``batch + event``; ``event`` is the problem's ``event_shape``."""


@dataclass(frozen=True)
class BoundedNoise(Noise):
    r"""Noise in the ball of radius τ, so that :math:`\lVert\hat\nabla f - \nabla f\rVert \le \tau` always.

    Args:
        radius: The radius :math:`\tau > 0`.
        law: ``"sphere"``: uniform on the sphere, the most noise that the radius allows. ``"ball"``: uniform
            in the ball. ``"skewed"``: τ along the first axis with probability 1/10, else τ/9 backwards;
            clipping is biased on it.

    Example:
        >>> noise = BoundedNoise(0.5).draw(np.random.default_rng(0), (1000,), (3,))
        >>> bool(np.allclose(np.linalg.norm(noise, axis=-1), 0.5))
        True
    """

    radius: float
    law: str = "sphere"

    def __post_init__(self) -> None:
        check_positive("radius", self.radius)
        check_choice("law", self.law, ("sphere", "ball", "skewed"))

    @property
    def tau(self) -> float:
        """The radius."""
        return self.radius

    def draw(self, rng: np.random.Generator, batch: tuple[int, ...], event: tuple[int, ...]) -> Array:
        """Draws within the radius."""
        if self.law == "skewed":
            along = np.where(rng.random(batch) < 0.1, self.radius, -self.radius / 9)
            return per_point(along, event) * np.eye(math.prod(event))[0].reshape(event)
        directions = _directions(rng, batch, event)
        if self.law == "sphere":
            return self.radius * directions
        lengths = self.radius * rng.random(batch) ** (1 / max(1, math.prod(event)))
        return per_point(lengths, event) * directions


def _directions(rng: np.random.Generator, batch: tuple[int, ...], event: tuple[int, ...]) -> Array:
    if not event:
        return rng.choice([-1.0, 1.0], size=batch)
    v = rng.normal(size=batch + event)
    return v / np.linalg.norm(v, axis=-1, keepdims=True)
