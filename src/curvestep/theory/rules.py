r"""Step rules for descent on many points at once: every hyperparameter one number, or one for each point.

The formulas are those of :mod:`curvestep.steps`. Calling a rule evaluates them one by one, as the reference;
:meth:`StepRule.stepper` is the same in place on whole arrays, for loops of millions of iterations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from curvestep.steps import clipped_step, fixed_step, normalized_step, smooth_clipped_step
from curvestep.theory.problems.base import Array

Parameter = float | Array
Stepper = Callable[[Array], Array]


class StepRule(ABC):
    """A step size h(g) from the gradient norm g, for many points with hyperparameters of their own."""

    @abstractmethod
    def _one(self, grad_norm: float, **parameters: float) -> float:
        """The formula, for one gradient norm."""

    @abstractmethod
    def stepper(self, shape: tuple[int, ...]) -> Stepper:
        """A function that overwrites an array of gradient norms of this shape with step sizes."""

    def __post_init__(self) -> None:
        may_vanish, may_be_infinite = ("shift", "L0", "L1"), ("max_norm", "cap")
        for name, value in self.parameters.items():
            numbers = np.asarray(value, dtype=np.float64)
            valid = (numbers >= 0) if name in may_vanish else (numbers > 0)
            valid &= np.isfinite(numbers) | (name in may_be_infinite)
            if not valid.all():
                kind = "zero or more" if name in may_vanish else "positive"
                raise ValueError(f"`{name}` must be {kind} and finite, got {value!r}.")

    @property
    def parameters(self) -> dict[str, Parameter]:
        """The hyperparameters by name."""
        return asdict(self)  # pyright: ignore[reportArgumentType]  # every rule is a dataclass

    def __call__(self, grad_norm: Array | float) -> Array:
        """Step sizes, each from the formula by itself: exact, slow, the reference for :meth:`stepper`."""
        names, values = list(self.parameters), list(self.parameters.values())
        one = np.vectorize(
            lambda g, *p: self._one(float(g), **dict(zip(names, map(float, p), strict=True))), otypes=[float]
        )
        return one(grad_norm, *values)


@dataclass(frozen=True)
class FixedStep(StepRule):
    """Plain gradient descent, h = lr; see :func:`curvestep.steps.fixed_step`."""

    lr: Parameter

    def _one(self, grad_norm: float, **parameters: float) -> float:
        return fixed_step(grad_norm, **parameters)

    def stepper(self, shape: tuple[int, ...]) -> Stepper:
        """The same step size, whatever the gradient."""
        lr = _spread(self.lr, shape)
        return lambda norm: lr


@dataclass(frozen=True)
class ClippedStep(StepRule):
    r"""Clipped descent, :math:`h = \min\{\eta, \gamma\eta/g\}`; see :func:`curvestep.steps.clipped_step`.

    Example:
        >>> rule = ClippedStep(lr=np.array([0.1, 1.0]), max_norm=1.0)
        >>> rule(np.array([4.0, 4.0])), rule.stepper((2,))(np.array([4.0, 4.0]))
        (array([0.025, 0.25 ]), array([0.025, 0.25 ]))
    """

    lr: Parameter
    max_norm: Parameter

    def _one(self, grad_norm: float, **parameters: float) -> float:
        return clipped_step(grad_norm, **parameters)

    def stepper(self, shape: tuple[int, ...]) -> Stepper:
        """min{cap / g, lr} in place: an infinite threshold and a zero gradient both give lr."""
        lr, cap = _spread(self.lr, shape), _spread(np.asarray(self.lr) * self.max_norm, shape)
        divide, minimum = np.divide, np.minimum

        def step(norm: Array) -> Array:
            divide(cap, norm, norm)
            return minimum(norm, lr, out=norm)

        return step


@dataclass(frozen=True)
class NormalizedStep(StepRule):
    r"""Normalized descent, :math:`h = \eta/(g + \beta)`; see :func:`curvestep.steps.normalized_step`."""

    lr: Parameter
    offset: Parameter

    def _one(self, grad_norm: float, **parameters: float) -> float:
        return normalized_step(grad_norm, **parameters)

    def stepper(self, shape: tuple[int, ...]) -> Stepper:
        """Two operations in place."""
        lr, offset = _spread(self.lr, shape), _spread(self.offset, shape)

        def step(norm: Array) -> Array:
            np.add(norm, offset, out=norm)
            return np.divide(lr, norm, out=norm)

        return step


@dataclass(frozen=True)
class SmoothClippedStep(StepRule):
    r""":math:`h = 1/(L_0 + \tfrac32L_1g)`; see :func:`curvestep.steps.smooth_clipped_step`."""

    L0: Parameter
    L1: Parameter

    def _one(self, grad_norm: float, **parameters: float) -> float:
        return smooth_clipped_step(grad_norm, **parameters)

    def stepper(self, shape: tuple[int, ...]) -> Stepper:
        """Three operations in place."""
        L0, slope = _spread(self.L0, shape), _spread(1.5 * np.asarray(self.L1), shape)

        def step(norm: Array) -> Array:
            np.multiply(norm, slope, out=norm)
            np.add(norm, L0, out=norm)
            return np.reciprocal(norm, out=norm)

        return step


@dataclass(frozen=True)
class LogarithmicStep(StepRule):
    r"""The step that maximizes the guaranteed decrease, with no threshold to choose.

    .. math::
        h(g) = \frac{1}{L_1g}\ln\left(1 + \frac{L_1g}{L_0 + L_1g}\right)

    Example:
        >>> LogarithmicStep(L0=1.0, L1=1.0)(np.array([0.0, 1.0]))
        array([1.        , 0.40546511])
    """

    L0: Parameter
    L1: Parameter

    def _one(self, grad_norm: float, **parameters: float) -> float:
        return float(self._formula(np.float64(grad_norm), parameters["L0"], parameters["L1"]))

    def stepper(self, shape: tuple[int, ...]) -> Stepper:
        """The formula, not in place."""
        L0, L1 = _spread(self.L0, shape), _spread(self.L1, shape)
        return lambda norm: self._formula(norm, L0, L1)

    @staticmethod
    def _formula(g: Array | np.float64, L0: Parameter, L1: Parameter) -> Array:
        a = L1 * g
        share = a / (L0 + a)
        # ln(1+s)/a = (ln(1+s)/s)/(L0+a), and ln(1+s)/s → 1 at s = 0.
        return np.where(share > 0, np.log1p(share) / np.where(share > 0, share, 1.0), 1.0) / (L0 + a)


@dataclass(frozen=True)
class ShiftedClippedStep(StepRule):
    r"""The rule of Theorem 7, :math:`h = \min\{\eta,\ c/(g + \tau)\}`: clipping with room for the noise.

    Example:
        >>> ShiftedClippedStep(lr=0.5, cap=1.0, shift=1.0)(np.array([0.0, 1.0, 9.0]))
        array([0.5, 0.5, 0.1])
    """

    lr: Parameter
    cap: Parameter
    shift: Parameter

    def _one(self, grad_norm: float, **parameters: float) -> float:
        reach = grad_norm + parameters["shift"]
        return min(parameters["lr"], parameters["cap"] / reach) if reach > 0 else parameters["lr"]

    def stepper(self, shape: tuple[int, ...]) -> Stepper:
        """Three operations in place."""
        lr, cap, shift = (_spread(p, shape) for p in (self.lr, self.cap, self.shift))

        def step(norm: Array) -> Array:
            np.add(norm, shift, out=norm)
            np.divide(cap, norm, out=norm)
            return np.minimum(norm, lr, out=norm)

        return step


def _spread(parameter: Parameter, shape: tuple[int, ...]) -> Array:
    """One number for each point: arithmetic between equal shapes is numpy's fastest."""
    return np.array(np.broadcast_to(np.asarray(parameter, dtype=np.float64), shape))
