"""Random problems, starts and guarantees: what certify is tried on."""

import math

import numpy as np

from curvestep.theory.problems.base import BoundedNoise, Noise, Problem
from curvestep.theory.problems.polynomials import Polynomial, Quadratic
from curvestep.theory.problems.walls import ExponentialWall, SlowValley
from curvestep.theory.theorems.clipped_gd import normalized_gd, theorem3
from curvestep.theory.theorems.clipped_sgd import theorem7, theorem8
from curvestep.theory.theorems.fixed_gd import gradient_bound, theorem6


class Rotated(Problem):
    """A function of several variables in a rotated frame."""

    def __init__(self, inner, seed):
        self.inner, self.event_shape, self.minimum, self.name = inner, inner.event_shape, 0.0, inner.name
        self.rotation = np.linalg.qr(np.random.default_rng(seed).normal(size=2 * inner.event_shape))[0]

    def value(self, x):
        return self.inner.value(x @ self.rotation.T)

    def gradient(self, x):
        return self.inner.gradient(x @ self.rotation.T) @ self.rotation

    def hessian_norm(self, x):
        return self.inner.hessian_norm(x @ self.rotation.T)

    def frontier(self, L1):
        return self.inner.frontier(L1)


class Walls(Problem):
    """A wall in every coordinate: the frontier of one wall, in any dimension."""

    def __init__(self, wall, dim):
        self.wall, self.event_shape, self.name = wall, (dim,), f"walls in {dim} dimensions"

    def value(self, x):
        return self.wall.value(x).sum(axis=-1)

    def gradient(self, x):
        return self.wall.gradient(x)

    def hessian_norm(self, x):
        return self.wall.curvature(x).max(axis=-1)

    def frontier(self, L1):
        return self.wall.frontier(L1)


class RareNoise(BoundedNoise):
    """τ along the first axis with probability 1/10, else τ/9 backwards: clipping is biased on it."""

    is_symmetric = False

    def draw(self, rng, batch, problem):
        event = problem.event_shape
        along = np.where(rng.random(batch) < 0.1, self.tau, -self.tau / 9)
        return problem.scale(along, np.eye(math.prod(event))[0].reshape(event))


def rotated_walls(*, L0, L1, dim=3, seed=0):
    return Rotated(Walls(ExponentialWall(L0=L0, L1=L1), dim), seed)


def log_uniform(rng, low, high):
    return float(10 ** rng.uniform(math.log10(low), math.log10(high)))


def draw_problem(rng):
    """A problem, an L1 for which it has a frontier, and a start."""
    L1 = log_uniform(rng, 0.1, 10)
    kind = rng.integers(0, 6)
    if kind == 0:
        height, width = log_uniform(rng, 0.1, 10), log_uniform(rng, 0.3, 3)
        return Polynomial([0, 0, 0, 0, height / width**4]), L1, rng.normal() * width * 2
    if kind == 1:
        degree = 2 * int(rng.integers(2, 4))
        problem = Polynomial([*rng.normal(size=degree), log_uniform(rng, 0.2, 2)])
        return problem, L1, rng.normal() * 2
    if kind == 2:
        dim = int(rng.integers(1, 5))
        curvatures = [log_uniform(rng, 0.05, 5) for _ in range(dim)]
        problem = Rotated(Quadratic(curvatures), int(rng.integers(1000)))
        return problem, L1, rng.normal(size=dim) * log_uniform(rng, 0.3, 10)
    if kind == 3:
        problem = ExponentialWall(L0=log_uniform(rng, 0.1, 10), L1=L1)
        return problem, L1, rng.normal() * 3 / L1
    if kind == 4:
        dim = int(rng.integers(2, 5))
        problem = rotated_walls(L0=log_uniform(rng, 0.1, 10), L1=L1, dim=dim, seed=int(rng.integers(1000)))
        return problem, L1, rng.normal(size=dim) * 2 / L1
    problem = SlowValley(
        log_uniform(rng, 0.05, 2), slope=rng.uniform(1.05, 3), width=log_uniform(rng, 0.3, 3)
    )
    return problem, L1, rng.normal() * 5


def draw_class(rng):
    """A problem and start with numbers that are true of them: L0, L1, gap."""
    problem, L1, x0 = draw_problem(rng)
    slack = 1.0 if rng.random() < 0.5 else log_uniform(rng, 1, 3)  # on the frontier, or inside
    L0 = problem.frontier(L1) * slack
    return problem, x0, dict(L0=L0, L1=L1, gap=float(problem.gap(np.asarray(x0))))


def draw_deterministic(rng):
    """A problem, a start, and a corrected or sharp guarantee of few enough iterations to run them all."""
    while True:
        problem, x0, numbers = draw_class(rng)
        numbers["eps"] = float(problem.grad_norm(np.asarray(x0))) * log_uniform(rng, 1e-2, 0.9)
        guarantee = draw_theorem(rng, numbers)
        if guarantee.bound < 20_000:
            return problem, x0, guarantee


def draw_theorem(rng, numbers):
    kind = rng.integers(0, 8)
    if kind == 0:
        return theorem3(**numbers)
    if kind == 1:
        return theorem3(**numbers, radius=log_uniform(rng, 0.1, 10))
    if kind <= 4:
        return theorem3(**numbers, version="sharp", form=("clipped", "smooth", "logarithmic")[kind - 2])
    if kind == 5:
        return normalized_gd(**numbers, version=("corrected", "sharp")[int(rng.integers(2))])
    return theorem6(**numbers, version=("corrected", "sharp")[kind - 6])


def draw_stochastic(rng):
    """The same with noise; the accuracy is what a few thousand iterations are promised to reach."""
    while True:
        problem, x0, numbers = draw_class(rng)
        steepest = gradient_bound(numbers["gap"], L0=numbers["L0"], L1=numbers["L1"])
        tau = log_uniform(rng, 0.01, 1) * steepest
        theorem, extra = theorem7, {}
        if isinstance(problem, SlowValley):  # the gradient is bounded everywhere, as Theorem 8 needs
            theorem, extra = theorem8, {"M": problem.slope * problem.eps}
        version = ("corrected", "sharp")[int(rng.integers(2))]
        start = float(problem.grad_norm(np.asarray(x0)))
        eps = start * log_uniform(rng, 0.05, 0.9)
        if numbers["gap"] <= 0 or eps <= 0:
            continue
        guarantee = theorem(**numbers, **extra, eps=eps, tau=tau, version=version)
        if guarantee.bound < 1e5:
            return problem, x0, guarantee


class SymmetricNoise(Noise):
    """Symmetric noise of a given root mean square: normal, of heavy tails, or rare and large."""

    is_symmetric = True

    def __init__(self, law, sigma):
        self.law = law
        self._sigma = sigma

    @property
    def sigma(self):
        return self._sigma

    def draw(self, rng, batch, problem):
        event = problem.event_shape
        shape = (*batch, *event)
        per_axis = self._sigma / math.sqrt(math.prod(event))
        if self.law == "normal":
            return per_axis * rng.normal(size=shape)
        if self.law == "student":  # three degrees of freedom have variance 3
            return per_axis * rng.standard_t(3, size=shape) / math.sqrt(3)
        spikes = rng.choice([-1.0, 0.0, 1.0], p=[0.01, 0.98, 0.01], size=batch) / math.sqrt(0.02)
        direction = rng.normal(size=event)
        return problem.scale(self._sigma * spikes, direction / np.linalg.norm(direction))


def draw_walls(rng, dim=3):
    """Walls in a rotated frame, with their L0 and L1, and a start."""
    L0 = log_uniform(rng, 0.3, 3)
    L1 = log_uniform(rng, 0.3, 3)
    problem = rotated_walls(L0=L0, L1=L1, dim=dim, seed=int(rng.integers(1000)))
    return problem, {"L0": L0, "L1": L1}, rng.normal(size=dim) / L1
