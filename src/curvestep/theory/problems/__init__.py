"""Functions whose value, gradient, Hessian norm and (L0, L1) frontier are known exactly."""

from curvestep.theory.problems.base import (
    Array as Array,
    Problem as Problem,
    Rescaled as Rescaled,
    ScalarProblem as ScalarProblem,
)
from curvestep.theory.problems.deep_linear import DeepLinear as DeepLinear
from curvestep.theory.problems.noise import (
    BoundedNoise as BoundedNoise,
    HeavyTailedNoise as HeavyTailedNoise,
    Noise as Noise,
    StochasticGradient as StochasticGradient,
)
from curvestep.theory.problems.polynomials import (
    Polynomial as Polynomial,
    Quadratic as Quadratic,
    Quartic as Quartic,
)
from curvestep.theory.problems.walls import (
    ExponentialWall as ExponentialWall,
    PrintedWall as PrintedWall,
    RotatedWalls as RotatedWalls,
    SlowValley as SlowValley,
    phi as phi,
)
