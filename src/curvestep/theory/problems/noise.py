"""Noise on gradients, bounded by τ as Theorems 7 and 8 ask."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from curvestep._checks import check_choice, check_positive
from curvestep.theory.problems.base import Array, per_point


@dataclass(frozen=True)
class BoundedNoise:
    r"""Noise of mean zero with :math:`\lVert\hat\nabla f - \nabla f\rVert \le \tau` always.

    Args:
        tau: The radius :math:`\tau > 0`.
        law: ``"sphere"``: uniform on the sphere, the most noise that the radius allows. ``"skewed"``: τ along
            the first axis with probability 1/10, else τ/9 backwards; clipping is biased on it.

    Example:
        >>> noise = BoundedNoise(0.5).draw(np.random.default_rng(0), (1000,), (3,))
        >>> bool(np.allclose(np.linalg.norm(noise, axis=-1), 0.5))
        True
    """

    tau: float
    law: str = "sphere"

    def __post_init__(self) -> None:
        check_positive("tau", self.tau)
        check_choice("law", self.law, ("sphere", "skewed"))

    def draw(self, rng: np.random.Generator, batch: tuple[int, ...], event: tuple[int, ...]) -> Array:
        """Noise of shape ``batch + event``; ``event`` is the problem's ``event_shape``."""
        if self.law == "skewed":
            along = np.where(rng.random(batch) < 0.1, self.tau, -self.tau / 9)
            return per_point(along, event) * np.eye(math.prod(event))[0].reshape(event)
        if not event:
            return self.tau * rng.choice([-1.0, 1.0], size=batch)
        v = rng.normal(size=batch + event)
        return self.tau * (v / np.linalg.norm(v, axis=-1, keepdims=True))
