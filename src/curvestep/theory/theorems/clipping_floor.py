r"""The floor below which clipped SGD does not come, whatever its step size.

Koloskova, Hendrikx and Stich (2023) show that the bias of clipping at c leaves a gradient of order
:math:`\min\{\sigma, \sigma^2/c\}`, and that no step size removes it. The constants here are our own. On
:math:`f(x) = x^2/2` with noise B with probability p, else −b, of mean 0 and variance
:math:`\sigma^2 = bB`, the expected clipped gradient vanishes where

.. math::
    (1 - p)(x - b) + p c = 0 \quad\Longleftrightarrow\quad x = \frac{\sigma^2 (B - c)}{B^2},

as long as :math:`|x - b| \le c \le x + B`. The best choice is B = 2c, or B = σ where c < σ/2:

.. math::
    \lVert\nabla f\rVert = \frac{\sigma^2}{4c} \ \Bigl(c \ge \frac\sigma2\Bigr), \qquad
    \sigma - c \ \Bigl(c \le \frac\sigma2\Bigr)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from curvestep._checks import check_nonnegative, check_positive


@dataclass(frozen=True, kw_only=True)
class SkewedNoise:
    """Noise of two values with mean 0."""

    values: tuple[float, float]  # the two values, the rare one last
    probabilities: tuple[float, float]  # theirs

    def sample(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Independent draws."""
        return rng.choice(self.values, size=shape, p=self.probabilities)

    def clipped_mean(self, gradient: float, max_norm: float) -> float:
        """Expected clipped gradient where the true one is ``gradient``."""
        seen = np.clip(gradient + np.array(self.values), -max_norm, max_norm)
        return float(seen @ np.array(self.probabilities))


def clipping_floor(sigma: float, max_norm: float) -> float:
    r"""Gradient norm at which clipped SGD stays in the worst case known, however small its steps.

    Args:
        sigma: Root mean square :math:`\sigma \ge 0` of the gradient noise.
        max_norm: Threshold :math:`c > 0`.

    Example:
        >>> clipping_floor(1.0, 0.25), clipping_floor(1.0, 0.5), clipping_floor(1.0, 5.0)
        (0.75, 0.5, 0.05)
    """
    check_nonnegative("sigma", sigma)
    check_positive("max_norm", max_norm)
    return sigma - max_norm if max_norm < sigma / 2 else sigma**2 / (4 * max_norm)


def floor_noise(sigma: float, max_norm: float) -> SkewedNoise:
    """The noise with which x²/2 attains :func:`clipping_floor`.

    Example:
        >>> noise = floor_noise(1.0, 1.0)
        >>> noise.values, noise.probabilities, noise.clipped_mean(0.25, 1.0)
        ((-0.5, 2.0), (0.8, 0.2), 0.0)
    """
    check_positive("sigma", sigma)
    large = max(2 * check_positive("max_norm", max_norm), sigma)
    small = sigma**2 / large
    rare = small / (small + large)
    return SkewedNoise(values=(-small, large), probabilities=(1 - rare, rare))
