"""Problems and points for the tests of all of them."""

import numpy as np

from curvestep.theory.problems.deep_linear import DeepLinear
from curvestep.theory.problems.polynomials import Polynomial, Quadratic, Quartic
from curvestep.theory.problems.walls import ExponentialWall, PrintedWall, SlowValley
from tests.theory.draws import Rotated, rotated_walls

SCALAR = [
    Quartic(),
    Polynomial([1.0, -2.0, 0.5, 0.0, 0.3, 0.0, 0.1]),
    ExponentialWall(L0=0.7, L1=3.0),
    PrintedWall(L1=4.0),
    SlowValley(0.2),
    SlowValley(0.2, slope=1.3, width=0.4),
]
VECTOR = [
    Quadratic([100.0, 1.0, 0.0]),
    Rotated(Quadratic([3.0, 2.0, 0.5, 0.1]), 1),
    rotated_walls(L0=1.0, L1=2.0),
    DeepLinear([2, 3, 2, 2], seed=4),
]
PROBLEMS = SCALAR + VECTOR
SMOOTH = [p for p in PROBLEMS if not isinstance(p, DeepLinear)]


def points(problem, num=200, size=1.5, seed=0):
    return size * np.random.default_rng(seed).normal(size=(num, *problem.event_shape))
