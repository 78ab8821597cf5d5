r"""Steps of descent on many points at once, :math:`x^+ = x - hg`.

A step is any function from an :class:`Iterate` to step sizes h. A :class:`StepRule` is a step that sees the
gradient norm alone: a name, a formula and its parameters, each one number, or one for each point. The
formulas are those of :mod:`curvestep.steps`, and two that only the theory uses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from curvestep.steps import (
    Parameter,
    clipped_step,
    fixed_step,
    normalized_step,
    smooth_clipped_step,
    step_rule,
)
from curvestep.theory.problems.base import Array, Problem


class Iterate(NamedTuple):
    """Where steps begin, for one run or for many: what a step may look at."""

    x: Array  # the points
    g: Array  # the gradients that the steps see, with their noise
    norm: Array  # the norms of these
    problem: Problem  # the function


Step = Callable[[Iterate], Array]


@step_rule
def logarithmic_step(grad_norm: Any, *, L0: Parameter, L1: Parameter) -> Any:
    r"""The step that maximizes what Taylor's theorem promises, with no threshold to choose.

    .. math::
        h(g) = \frac{1}{L_1g}\ln\left(1 + \frac{L_1g}{L_0 + L_1g}\right)

    Example:
        >>> logarithmic_step(np.array([0.0, 1.0]), L0=1.0, L1=1.0)
        array([1.        , 0.40546511])
    """
    a = L1 * grad_norm
    share = a / (L0 + a)
    # ln(1+s)/a = (ln(1+s)/s)/(L0+a), and ln(1+s)/s → 1 at s = 0.
    return np.where(share > 0, np.log1p(share) / np.where(share > 0, share, 1.0), 1.0) / (L0 + a)


@step_rule
def shifted_clipped_step(grad_norm: Any, *, lr: Parameter, cap: Parameter, shift: Parameter) -> Any:
    r"""The rule of Theorem 7, :math:`\min\{\eta,\ c/(g + \tau)\}`: clipping with room for the noise.

    Example:
        >>> shifted_clipped_step(np.array([0.0, 1.0, 9.0]), lr=0.5, cap=1.0, shift=1.0)
        array([0.5, 0.5, 0.1])
    """
    return np.minimum(lr, cap / (grad_norm + shift))


class StepRule:
    """A step size h(g) from the gradient norm g, for many points with hyperparameters of their own."""

    function: ClassVar[Callable[..., Any]]

    def __post_init__(self) -> None:
        type(self).function(np.zeros(1), **self.parameters)  # which checks them

    @property
    def parameters(self) -> dict[str, Parameter]:
        """The hyperparameters by name."""
        return asdict(self)  # pyright: ignore[reportArgumentType]  # every rule is a dataclass

    def __call__(self, point: Iterate) -> Array:
        """Step sizes at these points."""
        return self.at_norm(point.norm)

    def at_norm(self, grad_norm: Array | float) -> Array:
        """Step sizes at these gradient norms."""
        h = type(self).function(np.atleast_1d(np.asarray(grad_norm, dtype=np.float64)), **self.parameters)
        return h.reshape(np.shape(grad_norm))[()]

    def stepper(self, shape: tuple[int, ...]) -> Step:
        """The same step for gradient norms of one shape, unchecked, for loops of millions of iterations."""
        formula: Any = type(self).function.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]
        # Arithmetic between equal shapes is numpy's fastest; the largest float stands for infinity.
        largest = np.finfo(np.float64).max
        spread = {
            name: np.array(np.broadcast_to(np.minimum(value, largest), shape), dtype=np.float64)
            for name, value in self.parameters.items()
        }
        return lambda point: formula(point.norm, **spread)


@dataclass(frozen=True)
class FixedStep(StepRule):
    """Plain gradient descent, h = lr; see :func:`curvestep.steps.fixed_step`."""

    function = staticmethod(fixed_step)
    lr: Parameter


@dataclass(frozen=True)
class ClippedStep(StepRule):
    r"""Clipped descent, :math:`h = \min\{\eta, \gamma\eta/g\}`; see :func:`curvestep.steps.clipped_step`.

    Example:
        >>> rule = ClippedStep(lr=np.array([0.1, 1.0]), max_norm=1.0)
        >>> rule.at_norm(np.array([4.0, 4.0]))
        array([0.025, 0.25 ])
    """

    function = staticmethod(clipped_step)
    lr: Parameter
    max_norm: Parameter


@dataclass(frozen=True)
class NormalizedStep(StepRule):
    r"""Normalized descent, :math:`h = \eta/(g + \beta)`; see :func:`curvestep.steps.normalized_step`."""

    function = staticmethod(normalized_step)
    lr: Parameter
    offset: Parameter


@dataclass(frozen=True)
class SmoothClippedStep(StepRule):
    r""":math:`h = 1/(L_0 + L_1g)`; see :func:`curvestep.steps.smooth_clipped_step`."""

    function = staticmethod(smooth_clipped_step)
    L0: Parameter
    L1: Parameter


@dataclass(frozen=True)
class LogarithmicStep(StepRule):
    r"""The step that maximizes what Taylor promises; see :func:`logarithmic_step`."""

    function = staticmethod(logarithmic_step)
    L0: Parameter
    L1: Parameter


@dataclass(frozen=True)
class ShiftedClippedStep(StepRule):
    r"""The rule of Theorem 7, :math:`h = \min\{\eta, c/(g + \tau)\}`; see :func:`shifted_clipped_step`."""

    function = staticmethod(shifted_clipped_step)
    lr: Parameter
    cap: Parameter
    shift: Parameter
