"""Laws of smoothness with everything in closed form, and random functions that keep them."""

from dataclasses import dataclass

import numpy as np

from curvestep.theory.problems.base import Problem, ScalarProblem
from tests.theory.draws import log_uniform


@dataclass
class Affine:
    """ℓ = a + b·u."""

    a: float
    b: float

    def __call__(self, u):
        return self.a + self.b * u

    def height(self, u):
        """∫₀ᵘ v/ℓ(v) dv."""
        return u / self.b - self.a / self.b**2 * np.log1p(self.b * u / self.a)

    def slope(self, length):
        """The steepest gradient at this distance from a stationary point."""
        return self.a / self.b * np.expm1(self.b * length)

    def length(self, u):
        """∫₀ᵘ dv/ℓ(v), the inverse of the slope."""
        return np.log1p(self.b * u / self.a) / self.b


@dataclass
class Square:
    """ℓ = a·(1 + (u/c)²), of which −ln cos is the extremal function."""

    a: float
    c: float

    def __call__(self, u):
        return self.a * (1 + (u / self.c) ** 2)

    def height(self, u):
        return self.c**2 / (2 * self.a) * np.log1p((u / self.c) ** 2)

    def slope(self, length):
        return self.c * np.tan(self.a * length / self.c)

    def length(self, u):
        return self.c / self.a * np.arctan(u / self.c)


@dataclass
class Power:
    """ℓ = a·(c + u)ᵖ, p in (0, 2) and not 1."""

    a: float
    c: float
    p: float

    def __call__(self, u):
        return self.a * (self.c + u) ** self.p

    def height(self, u):
        at_zero = self.c ** (2 - self.p) / (2 - self.p) - self.c ** (2 - self.p) / (1 - self.p)
        w = self.c + u
        closed = w ** (2 - self.p) / (2 - self.p) - self.c * w ** (1 - self.p) / (1 - self.p) - at_zero
        # Where the difference loses its digits, by quadrature.
        near = np.minimum(u, self.c / 4)[..., None] if np.ndim(u) else np.minimum(u, self.c / 4)
        nodes, weights = np.polynomial.legendre.leggauss(20)
        share = (nodes + 1) / 2
        summed = (weights / 2 * near**2 * share / (self.c + near * share) ** self.p).sum(axis=-1)
        return np.where(u < self.c / 4, summed, closed) / self.a

    def slope(self, length):
        return (self.c ** (1 - self.p) + (1 - self.p) * self.a * length) ** (1 / (1 - self.p)) - self.c

    def length(self, u):
        return ((self.c + u) ** (1 - self.p) - self.c ** (1 - self.p)) / ((1 - self.p) * self.a)


class Piecewise:
    """ℓ through given values, linear between them and beyond the last."""

    def __init__(self, norms, values):
        self.norms = np.asarray(norms, float)
        self.values = np.asarray(values, float)
        self.slopes = np.append(np.diff(self.values) / np.diff(self.norms), 0.0)
        self.slopes[-1] = self.slopes[-2]
        ends = self.norms[1:]
        self.lengths = np.append(0.0, np.cumsum([self._length(i, end) for i, end in enumerate(ends)]))
        self.heights = np.append(0.0, np.cumsum([self._height(i, end) for i, end in enumerate(ends)]))

    def _length(self, i, u):
        return np.log1p(self.slopes[i] * (u - self.norms[i]) / self.values[i]) / self.slopes[i]

    def _height(self, i, u):
        # v = (ℓ − value)/slope + norm on the piece.
        at_zero = self.norms[i] - self.values[i] / self.slopes[i]
        return (u - self.norms[i]) / self.slopes[i] + at_zero * self._length(i, u)

    def __call__(self, u):
        i = np.searchsorted(self.norms, u, side="right") - 1
        return self.values[i] + self.slopes[i] * (u - self.norms[i])

    def height(self, u):
        i = np.searchsorted(self.norms, u, side="right") - 1
        return self.heights[i] + self._height(i, u)

    def length(self, u):
        i = np.searchsorted(self.norms, u, side="right") - 1
        return self.lengths[i] + self._length(i, u)

    def slope(self, length):
        i = np.searchsorted(self.lengths, length, side="right") - 1
        grown = np.expm1(self.slopes[i] * (length - self.lengths[i]))
        return self.norms[i] + self.values[i] * grown / self.slopes[i]


def draw_law(rng):
    kind = rng.integers(0, 4)
    scales = [log_uniform(rng, 0.3, 3) for _ in range(2)]
    if kind == 0:
        return Affine(*scales)
    if kind == 1:
        return Square(*scales)
    if kind == 2:
        return Power(*scales, rng.choice([0.5, 1.2, 1.5, 1.8]))
    norms = np.append(0.0, np.cumsum(rng.uniform(0.1, 2, size=5)))
    return Piecewise(norms, np.cumsum(rng.exponential(size=6) + 0.05))


class LawProblem(ScalarProblem):
    """f' = slope(S(x)) with a random piecewise linear S, no steeper than 1: |f''| ≤ ℓ(|f'|)."""

    def __init__(self, law, rng, *, reach):
        self.law = law
        self.name = "random function of a law"
        slopes = rng.choice([1.0, 1.0, -1.0, 0.0, rng.uniform(-1, 1)], size=9)
        self.knots = np.append(0.0, np.cumsum(rng.uniform(0.05, 0.4, size=9) * reach))
        self.lengths = np.append(-rng.uniform(0.1, 0.9) * reach, 0.0)
        levels = [-rng.uniform(0.1, 0.9) * reach]
        for slope, width in zip(slopes, np.diff(self.knots), strict=True):
            # Turned round where the slope would grow beyond what starts may have.
            turned = slope if abs(levels[-1] + slope * width) < 0.95 * reach else -slope
            levels.append(levels[-1] + turned * width)
        self.levels = np.array(levels)
        inner = np.diff(self.levels) / np.diff(self.knots)
        self.slopes = np.concatenate([[1.0], inner, [1.0]])  # outside it grows
        gains = [self._gain(i, self.knots[i]) for i in range(1, len(self.knots))]
        self.values = np.append(0.0, np.cumsum(gains))
        # Where f' vanishes: S crosses 0 inside a piece, or beyond the last knot.
        safe = np.where(self.slopes[1:] == 0, 1.0, self.slopes[1:])
        crossings = self.knots - self.levels / safe
        ends = np.append(self.knots[1:], np.inf)
        inside = (crossings >= self.knots) & (crossings <= ends)
        self.stationary = np.concatenate([self.knots, crossings[inside]])
        self.minimum = float(self.value(self.stationary).min())

    def _gain(self, piece, x):
        """The integral of f' over a piece, from its left knot (of the first piece its right) to x."""
        base = np.maximum(np.asarray(piece) - 1, 0)
        level = self.levels[base]
        slope = self.slopes[piece]
        end = level + slope * (x - self.knots[base])
        height = lambda s: self.law.height(self.law.slope(np.abs(s)))  # noqa: E731
        flat = np.sign(level) * self.law.slope(np.abs(level)) * (x - self.knots[base])
        safe = np.where(slope == 0, 1.0, slope)
        return np.where(slope == 0, flat, (height(end) - height(level)) / safe)

    def _piece(self, x):
        return np.searchsorted(self.knots, x, side="right")

    def _level(self, x):
        piece = self._piece(x)
        base = np.maximum(piece - 1, 0)
        return self.levels[base] + self.slopes[piece] * (x - self.knots[base])

    def value(self, x):
        x = np.asarray(x, float)
        piece = self._piece(x)
        return self.values[np.maximum(piece - 1, 0)] + self._gain(piece, x)

    def gradient(self, x):
        level = self._level(np.asarray(x, float))
        return np.sign(level) * self.law.slope(np.abs(level))

    def curvature(self, x):
        x = np.asarray(x, float)
        return self.slopes[self._piece(x)] * self.law(np.abs(self.gradient(x)))

    def frontier(self, L1):
        raise NotImplementedError


class Separable(Problem):
    """A sum of functions of one coordinate each; where all keep a law that does not decrease, it does."""

    def __init__(self, parts):
        self.parts = parts
        self.event_shape = (len(parts),)
        self.minimum = sum(part.minimum for part in parts)
        self.name = "separable function"

    def _each(self, name, x):
        return np.stack([getattr(part, name)(x[..., i]) for i, part in enumerate(self.parts)], axis=-1)

    def value(self, x):
        return self._each("value", x).sum(axis=-1)

    def gradient(self, x):
        return self._each("gradient", x)

    def hessian_norm(self, x):
        return self._each("hessian_norm", x).max(axis=-1)

    def frontier(self, L1):
        return max(part.frontier(L1) for part in self.parts)
