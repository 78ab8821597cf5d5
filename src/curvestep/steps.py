r"""The step-size rules of the paper: gradient norm in, step size out.

Every rule is a pure function of the gradient norm :math:`g = \lVert \nabla f(x) \rVert`, given as a float,
a numpy array or a tensor, and returns step sizes of the same kind and shape. Zero norm, infinite norm and
``max_norm=inf`` give the limit of the formula, never NaN; a norm that is NaN stays NaN. With arrays the
parameters may be arrays too, one number for each point. Torch is not imported here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict, TypeVar

import numpy as np

from curvestep.checks import check_nonnegative, check_positive, check_threshold as check_threshold

if TYPE_CHECKING:
    from torch import Tensor

    Norm = TypeVar("Norm", float, np.ndarray, Tensor, float | Tensor)
else:
    Norm = TypeVar("Norm")

Rule = TypeVar("Rule", bound=Callable[..., Any])
Parameter = float | np.ndarray
# A step works if the loss falls by this share at least of what its slope promises.
LEAST_FALL = 0.1
# No norm of a gradient is larger: beside an array it stands for infinity, of which the ratio would be NaN.
_LARGEST = np.finfo(np.float64).max


class ClippedParameters(TypedDict):
    """Arguments of :func:`clipped_step` and ``ClippedSGD``."""

    lr: float
    max_norm: float


class NormalizedParameters(TypedDict):
    """Arguments of :func:`normalized_step` and ``NormalizedSGD``."""

    lr: float
    offset: float


def step_rule(formula: Rule) -> Rule:
    """The formula behind a check of its arguments; ``formula.__wrapped__`` is the formula alone.

    Returns:
        A function with the same signature, which raises ValueError for numbers out of range.
    """

    @wraps(formula)
    def checked(grad_norm: Any, **parameters: Any) -> Any:
        for name, value in parameters.items():
            if type(value) is not float or not 0.0 < value < math.inf:  # asked in every step of an optimizer
                parameters[name] = _checked_parameter(name, value)
        if isinstance(grad_norm, np.ndarray):
            least = np.fmin.reduce(grad_norm, axis=None, initial=0.0)
            if least < 0:
                _refuse_norm(least)
            with np.errstate(divide="ignore", over="ignore"):  # infinite steps, huge norms
                return formula(grad_norm, **parameters)
        if not hasattr(grad_norm, "clamp"):  # a tensor is not read: it may live on a device
            if grad_norm < 0:  # not through a function: asked in every step of an optimizer
                _refuse_norm(grad_norm)
        return formula(grad_norm, **parameters)

    return checked  # pyright: ignore[reportReturnType]  # of the formula's own signature


@step_rule
def fixed_step(grad_norm: Norm, *, lr: Parameter) -> Norm:
    r"""Step size of plain gradient descent: :math:`h(g) = \eta`, whatever the gradient.

    Args:
        grad_norm: Gradient norms :math:`g \ge 0`; only their shape matters.
        lr: Step size :math:`\eta > 0`.

    Returns:
        ``lr``, shaped like ``grad_norm``.

    Raises:
        ValueError: ``lr`` is not positive and finite.

    Example:
        >>> fixed_step(np.array([0.0, 1.0, np.inf]), lr=0.1)
        array([0.1, 0.1, 0.1])
    """
    return _constant(grad_norm, lr)


@step_rule
def clipped_step(grad_norm: Norm, *, lr: Parameter, max_norm: Parameter) -> Norm:
    r"""Step size of gradient descent with norm clipping.

    .. math::
        h(g) = \min\{\eta,\ \gamma\eta / g\}, \qquad g = \lVert \nabla f(x) \rVert

    While :math:`g \le \gamma` this is plain gradient descent. Beyond that the step length
    :math:`g\,h(g)` no longer grows: it stays at :math:`\gamma\eta`, the :func:`step_cap`.

    Args:
        grad_norm: Gradient norms :math:`g \ge 0`, any shape.
        lr: Largest step size :math:`\eta > 0`.
        max_norm: Norm :math:`\gamma > 0` at which clipping starts; ``inf`` never clips.

    Returns:
        Step sizes in :math:`[0, \eta]`, shaped like ``grad_norm``.

    Example:
        >>> clipped_step(np.array([0.0, 1.0, 4.0]), lr=0.1, max_norm=1.0)
        array([0.1 , 0.1 , 0.025])
        >>> clipped_step(4.0, lr=0.1, max_norm=float("inf"))
        0.1
    """
    if isinstance(max_norm, np.ndarray):
        return lr * (max_norm / np.maximum(grad_norm, max_norm))  # pyright: ignore[reportReturnType]  # an array only beside arrays
    if hasattr(max_norm, "clamp"):  # a tensor that is not read may be infinite
        return lr * (max_norm / grad_norm).clamp(max=1.0)  # pyright: ignore[reportAttributeAccessIssue, reportReturnType]
    if max_norm == math.inf:
        return _constant(grad_norm, lr)
    # No epsilon: the larger of g and γ is never zero, and γ/γ is exactly 1.
    norm: Any = grad_norm
    if isinstance(norm, np.ndarray):
        larger = np.maximum(norm, max_norm)
    elif hasattr(norm, "clamp"):
        larger = norm.clamp(min=max_norm)
    else:
        larger = max(norm, max_norm)  # in this order, so that NaN stays NaN
    return lr * (max_norm / larger)  # pyright: ignore[reportReturnType]  # an array only beside arrays


@step_rule
def normalized_step(grad_norm: Norm, *, lr: Parameter, offset: Parameter) -> Norm:
    r"""Step size of normalized gradient descent.

    .. math::
        h(g) = \frac{\eta}{g + \beta}, \qquad g = \lVert \nabla f(x) \rVert

    The step length :math:`g\,h(g)` grows from 0 to :math:`\eta` and stays below it: ``lr`` is a length here,
    not a step size. With the parameters of :func:`normalized_from_clipped` this is clipping with a smooth
    corner: :math:`\tfrac12 h_c \le h_n \le h_c`, with equality on the left exactly at :math:`g = \beta`.

    Args:
        grad_norm: Gradient norms :math:`g \ge 0`, any shape.
        lr: Largest step length :math:`\eta > 0`.
        offset: :math:`\beta > 0`. For pure normalization take it far below every gradient norm.

    Returns:
        Step sizes in :math:`[0, \eta/\beta]`, shaped like ``grad_norm``.

    Note:
        The paper prints :math:`\tfrac12 h_c \le h_n \le 2h_c`; the factor 2 on the right is not needed.

    Example:
        >>> normalized_step(np.array([0.0, 1.0, 3.0]), lr=0.1, offset=1.0)
        array([0.1  , 0.05 , 0.025])
    """
    return lr / (grad_norm + offset)  # pyright: ignore[reportReturnType]  # an array only beside arrays


@step_rule
def smooth_clipped_step(grad_norm: Norm, *, L0: Parameter, L1: Parameter) -> Norm:
    r"""Step size that an (L0, L1)-smooth function allows, with no threshold to choose.

    .. math::
        h(g) = \frac{1}{L_0 + L_1 g}

    On every function with :math:`\lVert\nabla^2 f\rVert \le L_0 + L_1\lVert\nabla f\rVert` this step lowers
    :math:`f` by at least :math:`\tfrac12g^2/(L_0 + L_1 g)`; no other step is sure of more (row 31 of
    ``docs/theorems.md``).

    Args:
        grad_norm: Gradient norms :math:`g \ge 0`, any shape.
        L0: Smoothness at zero gradient, :math:`L_0 \ge 0`.
        L1: Growth of smoothness with the gradient norm, :math:`L_1 \ge 0`; not both zero.

    Returns:
        Step sizes shaped like ``grad_norm``; ``inf`` where ``L0`` and the gradient are both zero.

    Raises:
        ValueError: ``L0`` or ``L1`` is negative or not finite, or both are zero.

    Example:
        >>> smooth_clipped_step(np.array([0.0, 1.0, 4.0]), L0=2.0, L1=2.0)
        array([0.5 , 0.25, 0.1 ])
    """
    if isinstance(L0, np.ndarray) or isinstance(L1, np.ndarray):
        g = np.minimum(grad_norm, _LARGEST)  # finite, so that it does not count where L1 is zero
        return 1.0 / (L0 + L1 * g)  # pyright: ignore[reportReturnType]  # an array only beside arrays
    if L1 == 0:
        if L0 == 0:
            raise ValueError("`L0` and `L1` must not both be zero: no curvature bounds no step.")
        return _constant(grad_norm, 1.0 / L0)
    bound = L0 + L1 * grad_norm
    return math.inf if isinstance(bound, float) and bound == 0 else 1.0 / bound  # pyright: ignore[reportReturnType]  # a float for floats


def step_cap(*, lr: float, max_norm: float) -> float:
    r"""Longest step that clipped descent can take, :math:`\gamma\eta` = ``lr * max_norm``.

    Some papers after this one write :math:`\gamma` for this product; here :math:`\gamma` is the norm.

    Returns:
        The length :math:`\gamma\eta`.

    Raises:
        ValueError: ``lr`` or ``max_norm`` is not positive.

    Example:
        >>> step_cap(lr=30.0, max_norm=0.25)
        7.5
    """
    return check_positive("lr", lr) * check_threshold("max_norm", max_norm)


def normalized_from_clipped(*, lr: float, max_norm: float) -> NormalizedParameters:
    r"""``lr`` and ``offset`` of the normalized descent that follows this clipped descent.

    :math:`\eta_n = \gamma\eta_c`, :math:`\beta = \gamma`: then :math:`\tfrac12 h_c \le h_n \le h_c`.

    Returns:
        ``lr`` and ``offset`` of the normalized step.

    Raises:
        ValueError: ``lr`` or ``max_norm`` is not positive.

    Example:
        >>> normalized_from_clipped(lr=30.0, max_norm=0.25)
        {'lr': 7.5, 'offset': 0.25}
    """
    check_positive("max_norm", max_norm)
    return {"lr": step_cap(lr=lr, max_norm=max_norm), "offset": max_norm}


def clipped_from_normalized(*, lr: float, offset: float) -> ClippedParameters:
    r"""``lr`` and ``max_norm`` of the clipped descent that follows this normalized descent.

    :math:`\eta_c = \eta_n/\beta`, :math:`\gamma = \beta`, the inverse of :func:`normalized_from_clipped`.

    Returns:
        ``lr`` and ``max_norm`` of the clipped step.

    Raises:
        ValueError: ``lr`` or ``offset`` is not positive.

    Example:
        >>> clipped_from_normalized(lr=7.5, offset=0.25)
        {'lr': 30.0, 'max_norm': 0.25}
    """
    return {"lr": check_positive("lr", lr) / check_positive("offset", offset), "max_norm": offset}


def normalized_from_smoothness(*, L0: float, L1: float) -> NormalizedParameters:
    r"""``lr`` and ``offset`` with which normalized descent is :func:`smooth_clipped_step`, exactly.

    With :math:`\eta = 1/L_1` and :math:`\beta = L_0/L_1`.

    Returns:
        ``lr`` and ``offset`` of the normalized step.

    Raises:
        ValueError: a constant is negative or not finite, or both are zero.

    Example:
        >>> normalized_from_smoothness(L0=3.0, L1=2.0)
        {'lr': 0.5, 'offset': 1.5}
    """
    check_positive("L0", L0)
    check_positive("L1", L1)
    return {"lr": 1.0 / L1, "offset": L0 / L1}


# What a parameter of this name may be; any other must be positive and finite.
_CHECKS = {
    "max_norm": check_threshold,
    "cap": check_threshold,
    "L0": check_nonnegative,
    "L1": check_nonnegative,
    "shift": check_nonnegative,
}


def _checked_parameter(name: str, value: Any) -> Any:
    """A parameter that is allowed; infinity in an array as the largest number, a tensor unread."""
    check = _CHECKS.get(name, check_positive)
    if isinstance(value, np.ndarray):  # what its least and largest number pass, all pass
        check(name, value.min())
        check(name, value.max())
        return np.minimum(value, _LARGEST)
    return value if hasattr(value, "clamp") else check(name, value)


def _refuse_norm(grad_norm: float) -> NoReturn:
    raise ValueError(f"`grad_norm` must be zero or more, got {grad_norm!r}.")


def _constant(like: Any, value: Parameter) -> Any:
    if hasattr(like, "new_full"):
        return like.new_full(like.shape, value)
    if isinstance(like, np.ndarray) or isinstance(value, np.ndarray):
        return np.full(np.broadcast_shapes(np.shape(like), np.shape(value)), value)
    return value
