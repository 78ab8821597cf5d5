r"""Lemmas 2, 9 and 11 to 13, as numbers and as inequalities to check."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from curvestep.checks import check_nonnegative, check_positive
from curvestep.theory.problems.base import Array
from curvestep.theory.problems.polynomials import Polynomial
from curvestep.theory.theorems.guarantee import Assumption, check_version, require


def lemma2(coefficients: Sequence[float], L1: float, *, version: str = "sharp") -> float:
    r"""Lemma 2: the least :math:`L_0` of a polynomial :math:`\sum_i a_ix^i` for a given :math:`L_1 > 0`.

    ``"printed"`` says that some pair exists for degree 3 and up: the degree is checked, the number is the
    sharp one. ``"sharp"``: *every* L1 > 0 has its L0 in one variable (row 6).

    Example:
        >>> round(lemma2([0, 0, 0, 0, 1], 10.0), 12)
        0.16
    """
    check_version(version, ("printed", "sharp"))
    polynomial = Polynomial(coefficients)
    if version == "printed":
        require(Assumption("degree ≥ 3", polynomial.degree >= 3))
    return polynomial.frontier(check_positive("L1", L1))


def lemma9(grad_norm: float, *, distance: float, L0: float, L1: float, version: str = "sharp") -> float:
    r"""Lemma 9: how large the gradient can be within a distance r, by Grönwall's inequality.

    ``"printed"``: :math:`4(L_0/L_1 + g)` for :math:`r \le \min\{1/L_1, 1\}`. ``"corrected"``: e in place of
    4, for :math:`r \le 1/L_1`. ``"sharp"``: :math:`(g + L_0/L_1)e^{L_1r} - L_0/L_1` for every r, with
    equality on ``ExponentialWall`` (row 13).

    Example:
        >>> [round(lemma9(1.0, distance=0.5, L0=1.0, L1=2.0, version=v), 3)
        ...  for v in ("printed", "corrected", "sharp")]
        [6.0, 4.077, 3.577]
    """
    check_nonnegative("grad_norm", grad_norm)
    check_nonnegative("distance", distance)
    check_nonnegative("L0", L0)
    check_positive("L1", L1)
    check_version(version)
    reach = {"printed": min(1 / L1, 1.0), "corrected": 1 / L1, "sharp": math.inf}[version]
    require(Assumption(f"distance ≤ {reach:g}", distance <= reach * (1 + 1e-12)))
    total = L0 / L1 + grad_norm
    return {
        "printed": 4.0 * total,
        "corrected": math.e * total,
        "sharp": math.exp(L1 * distance) * total - L0 / L1,
    }[version]


@dataclass(frozen=True, kw_only=True)
class Inequality:
    """The two sides of an inequality, for many cases at once."""

    left: Array  # left sides
    right: Array  # right sides; the left must not exceed them

    @property
    def holds(self) -> Array:
        """Where the left side does not exceed the right, up to rounding."""
        return self.left <= self.right + 1e-12 * np.maximum(np.abs(self.left), np.abs(self.right))


@dataclass(frozen=True, kw_only=True)
class NoisyStep:
    r"""One step of Theorem 7 from a gradient under discrete noise laws, for many laws at once.

    Args:
        gradient: True gradients, shape ``(..., d)``.
        noise: The m values that the noise takes, shape ``(..., m, d)``, each at most τ long.
        probabilities: Their probabilities, shape ``(..., m)``; the mean of the noise must be zero.
        L0: :math:`L_0 > 0`.
        L1: :math:`L_1 > 0`.
        tau: :math:`\tau > 0`.
        lr: :math:`\eta \le \min\{1/(20L_0), 1/(128L_1\tau)\}`. This and the other constants are one number
            each, or one for each law.
    """

    gradient: Array
    noise: Array
    probabilities: Array
    L0: Array
    L1: Array
    tau: Array
    lr: Array

    def __post_init__(self) -> None:
        least: dict[str, float] = {"L0": 0.0, "L1": 0.0, "tau": 0.0, "lr": 0.0}
        for name, given in vars(self).items():
            value = np.asarray(given, dtype=np.float64)
            if not (np.isfinite(value) & (value > least.get(name, -math.inf))).all():
                raise ValueError(f"`{name}` must be finite, and the constants positive, got {value!r}.")
            object.__setattr__(self, name, value)
        lengths = np.linalg.norm(self.noise, axis=-1)
        mean = (self.probabilities[..., None] * self.noise).sum(axis=-2)
        slack = 1 + 1e-9
        require(
            Assumption("noise ≤ tau", bool((lengths <= self.tau[..., None] * slack).all())),
            Assumption("unbiased noise", bool((np.abs(mean) <= 1e-9 * self.tau[..., None]).all())),
            Assumption("lr ≤ 1/(20·L0)", bool((self.lr <= slack / (20 * self.L0)).all())),
            Assumption("lr ≤ 1/(128·L1·tau)", bool((self.lr <= slack / (128 * self.L1 * self.tau)).all())),
        )

    @property
    def grad_norm(self) -> Array:
        """Norms of the true gradients."""
        return np.linalg.norm(self.gradient, axis=-1)

    @property
    def steps(self) -> Array:
        """Step sizes for each value of the noise, shape ``(..., m)``, by the corrected rule."""
        noisy = np.linalg.norm(self.gradient[..., None, :] + self.noise, axis=-1)
        longest = 1 / (16 * self.L1[..., None] * (noisy + self.tau[..., None]))
        return np.minimum(self.lr[..., None], longest)

    @property
    def curvature(self) -> Array:
        """5 L0 + 4 L1 g, the factor in the descent inequality."""
        return 5 * self.L0 + 4 * self.L1 * self.grad_norm

    def mean(self, values: Array) -> Array:
        """Expectations over the noise, of values of shape ``(..., m)``."""
        return (self.probabilities * values).sum(axis=-1)

    @property
    def inner(self) -> Array:
        """⟨∇f, noise⟩ for each value of the noise."""
        return (self.gradient[..., None, :] * self.noise).sum(axis=-1)


def lemma11(step: NoisyStep) -> Inequality:
    r"""Lemma 11 (T1): what clipping's bias can cost.

    .. math::
        E[-h\langle\nabla f, g - \nabla f\rangle] \le \tfrac14E[h]\lVert\nabla f\rVert^2

    True for the corrected rule of Theorem 7 (row 20).

    Example:
        >>> step = NoisyStep(gradient=np.array([1.0]), noise=np.array([[-0.1], [0.1]]),
        ...                  probabilities=np.array([0.5, 0.5]), L0=1.0, L1=1.0, tau=0.1, lr=0.05)
        >>> lemma11(step)
        Inequality(left=np.float64(0.0), right=np.float64(0.0125))
    """
    h = step.steps
    # η takes no part, as the noise has mean zero; left in, its rounding outweighs a small gradient's square.
    shorter = step.lr[..., None] - h
    return Inequality(left=step.mean(shorter * step.inner), right=step.mean(h) * step.grad_norm**2 / 4)


def lemma12(step: NoisyStep, *, version: str = "printed") -> Inequality:
    r"""Lemma 12 (T2): what the step's dependence on the noise can cost.

    .. math::
        E[(5L_0 + 4L_1\lVert\nabla f\rVert)h^2\langle\nabla f, g - \nabla f\rangle]
        \le 9\eta^2\tau L_0^2/L_1 + \tfrac18E[h]\lVert\nabla f\rVert^2

    as printed. ``"sharp"`` drops the first term: if clipping cannot fire, h = η is not random and the left
    side is 0; if it can, :math:`\lVert\nabla f\rVert \ge 0.9375L_0/L_1`, and the second term is enough (row
    19).

    Example:
        >>> step = NoisyStep(gradient=np.array([0.1]), noise=np.array([[-0.1], [0.1]]),
        ...                  probabilities=np.array([0.5, 0.5]), L0=1.0, L1=0.01, tau=0.1, lr=0.05)
        >>> [float(lemma12(step, version=v).right.round(7)) for v in ("printed", "sharp")]
        [0.2250625, 6.25e-05]
    """
    check_version(version, ("printed", "sharp"))
    h = step.steps
    right = step.mean(h) * step.grad_norm**2 / 8
    if version == "printed":
        right = right + 9 * step.lr**2 * step.tau * step.L0**2 / step.L1
    beyond = h**2 - step.lr[..., None] ** 2  # without η², as in Lemma 11
    return Inequality(left=step.curvature * step.mean(beyond * step.inner), right=right)


def lemma13(step: NoisyStep, *, version: str = "printed") -> Inequality:
    r"""Lemma 13 (T3): what the noise's variance can cost.

    .. math::
        \tfrac12(5L_0 + 4L_1\lVert\nabla f\rVert)E[h^2\lVert g - \nabla f\rVert^2]
        \le (5L_0 + 2L_1\tau)\eta^2\tau^2 + \tfrac18E[h]\lVert\nabla f\rVert^2

    as printed; ``"sharp"`` has 4.5 in place of 5 (row 20).

    Example:
        >>> step = NoisyStep(gradient=np.array([0.0]), noise=np.array([[-0.1], [0.1]]),
        ...                  probabilities=np.array([0.5, 0.5]), L0=1.0, L1=0.01, tau=0.1, lr=0.05)
        >>> [float((lemma13(step, version=v).left / lemma13(step, version=v).right).round(3))
        ...  for v in ("printed", "sharp")]
        [0.5, 0.555]
    """
    check_version(version, ("printed", "sharp"))
    h = step.steps
    squares = (step.noise**2).sum(axis=-1)
    factor = {"printed": 5.0, "sharp": 4.5}[version]
    noise = (factor * step.L0 + 2 * step.L1 * step.tau) * step.lr**2 * step.tau**2
    right = noise + step.mean(h) * step.grad_norm**2 / 8
    return Inequality(left=step.curvature / 2 * step.mean(h**2 * squares), right=right)
