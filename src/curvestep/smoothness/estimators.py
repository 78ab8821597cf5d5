r"""Local smoothness from gradients: along a segment (the paper's) and along a direction.

Each estimator takes a gradient as a function of a point: a tensor, or one tensor for each parameter. A
:class:`~curvestep.smoothness.replay.Replay` is such a function, so the same line measures a formula and a
network::

    with cs.Replay(model, loss_fn) as replay:
        cs.local_smoothness(replay, replay.point, direction)

Over all directions: :mod:`curvestep.smoothness.spectral`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from curvestep._checks import check_choice, check_positive
from curvestep.vectors import difference, global_norm, precision

Point = Tensor | Sequence[Tensor]
Gradient = Callable[[Any], Any]
Groups = Mapping[str, Iterable[int]]
METHODS = ("auto", "autograd", "differences")


@overload
def segment_smoothness(
    gradient: Gradient, start: Point, end: Point, *, fractions: Iterable[float] = ..., groups: None = None
) -> Tensor: ...
@overload
def segment_smoothness(
    gradient: Gradient, start: Point, end: Point, *, fractions: Iterable[float] = ..., groups: Groups
) -> dict[str, Tensor]: ...
def segment_smoothness(
    gradient: Gradient,
    start: Point,
    end: Point,
    *,
    fractions: Iterable[float] = (0.5, 1.0),
    groups: Groups | None = None,
) -> Tensor | dict[str, Tensor]:
    r"""The paper's estimate of smoothness along the segment of a step.

    .. math::
        \hat L = \max_{\gamma \in \{\delta, 2\delta, \dots, 1\}}
            \frac{\lVert \nabla f(x + \gamma d) - \nabla f(x) \rVert}{\lVert \gamma d \rVert},
            \qquad d = x' - x

    It is a lower bound on the largest Hessian norm along the segment and sees one direction only.

    Args:
        gradient: :math:`\nabla f`, of the same :math:`f` at every call.
        start: :math:`x`.
        end: :math:`x'`.
        fractions: Every :math:`\gamma`, in (0, 1].
        groups: Names with the indices of the tensors they cover. If given, the estimate of each group,
            :math:`\lVert \Delta g_i \rVert / \lVert \gamma d_i \rVert`, NaN for one that did not move.

    Returns:
        A scalar tensor, or one for each group.

    Example:
        >>> segment_smoothness(lambda x: 4.0 * x, torch.zeros(3), torch.ones(3)).item()
        4.0
    """
    fractions = check_fractions(fractions)
    x, end_listed = listed(start), listed(end)
    d = [b.detach() - a.detach() for a, b in zip(x, end_listed, strict=True)]
    parts = {"": range(len(d))} if groups is None else {name: tuple(i) for name, i in groups.items()}
    lengths = {name: global_norm(d[i] for i in part) for name, part in parts.items()}
    if not any(length > 0 for length in lengths.values()):
        raise ValueError(
            "`start` and `end` coincide, so the segment has no smoothness. "
            "Skip steps that did not move the parameters."
        )
    here = listed(gradient(start))
    best: dict[str, Tensor] = {}
    for fraction in fractions:
        inner = [a.detach() + fraction * b for a, b in zip(x, d, strict=True)] if fraction < 1 else end_listed
        there = listed(gradient(shaped_like(start, inner)))
        change = difference(there, here)
        for name, part in parts.items():
            secant = _ratio(global_norm(change[i] for i in part), fraction * lengths[name])
            best[name] = torch.maximum(best.get(name, secant), secant)
    return best[""] if groups is None else best


def local_smoothness(
    gradient: Gradient,
    point: Point,
    direction: Point,
    *,
    method: str = "auto",
    eps: float | None = None,
    length: float | None = None,
    groups: Groups | None = None,
) -> Any:
    r"""Smoothness at a point along one direction: the limit of the segment estimate for ever shorter steps.

    .. math::
        \frac{\lVert \nabla^2 f(x)\, d \rVert}{\lVert d \rVert}

    Args:
        gradient: :math:`\nabla f`, of the same :math:`f` at every call.
        point: :math:`x`.
        direction: :math:`d`, not zero.
        method: How to compute :math:`\nabla^2 f(x)\,d`, see :func:`hessian_product`.
        eps: Relative precision of the gradients; default: that of their dtype.
        length: Length of the difference step, see :func:`hessian_product`.
        groups: As in :func:`segment_smoothness`.

    Returns:
        A scalar tensor, or one for each group.

    Example:
        >>> H = torch.diag(torch.tensor([3.0, 4.0]))
        >>> local_smoothness(lambda x: H @ x, torch.ones(2), torch.tensor([1.0, 1.0])).item()
        3.5355...
    """
    d = listed(direction)
    size = global_norm(d)
    if not size > 0:
        raise ValueError("`direction` must not be zero. Skip steps that did not move the parameters.")
    product = listed(hessian_product(gradient, point, direction, method=method, eps=eps, length=length))
    if groups is None:
        return global_norm(product) / size
    parts = {name: tuple(indices) for name, indices in groups.items()}
    return {
        name: _ratio(global_norm(product[i] for i in part), global_norm(d[i] for i in part))
        for name, part in parts.items()
    }


def hessian_product(
    gradient: Gradient,
    point: Point,
    direction: Point,
    *,
    method: str = "auto",
    eps: float | None = None,
    length: float | None = None,
) -> Any:
    r""":math:`\nabla^2 f(x)\, d`, exactly or by a central difference.

    .. math::
        \nabla^2 f(x)\, d \approx \frac{\nabla f(x + t d) - \nabla f(x - t d)}{2t},
            \qquad \lVert t d \rVert = \sqrt[3]{\varepsilon}\, \lVert x \rVert

    With :math:`t \propto \sqrt[3]{\varepsilon}` the error of rounding, :math:`O(\varepsilon / t)`, and that
    of the difference, :math:`O(t^2)`, are alike.

    Args:
        gradient: :math:`\nabla f`. For ``"autograd"`` a Replay, or a function that can be differentiated.
        point: :math:`x`.
        direction: :math:`d`, shaped like ``point``.
        method: ``"autograd"`` differentiates twice, ``"differences"`` takes two gradients; ``"auto"`` asks
            autograd where a Replay offers it and takes differences where that fails.
        eps: :math:`\varepsilon`; default: that of the dtype.
        length: :math:`\lVert t d \rVert`. Give the scale on which :math:`f` is smooth, such as the length of
            a training step, where a few large parameters make :math:`\lVert x \rVert` say little of it.
    """
    check_choice("method", method, METHODS)
    twice: Any = getattr(gradient, "hessian_product", None)
    if method == "autograd" and twice is None:
        return _differentiated(gradient, point, direction)
    if method != "differences" and twice is not None:
        try:
            return twice(listed(direction), origin=listed(point))
        except (RuntimeError, NotImplementedError):
            if method == "autograd":
                raise
    x, d = listed(point), listed(direction)
    length = central_length(x, eps=eps) if length is None else check_positive("length", length)
    t = length / global_norm(d).item()
    ahead = _moved_gradient(gradient, point, x, d, t)
    change = difference(ahead, _moved_gradient(gradient, point, x, d, -t))
    scaled = [None if c is None else c / (2 * t) for c in change]
    return scaled[0] if isinstance(point, Tensor) else scaled


def central_length(point: Sequence[Tensor], *, eps: float | None = None) -> float:
    r"""The length of a difference step in general, :math:`\sqrt[3]{\varepsilon}\,\lVert x\rVert`."""
    eps = precision(point) if eps is None else eps
    return check_positive("eps", eps) ** (1 / 3) * (global_norm(point).item() or 1.0)


def check_fractions(fractions: Iterable[float]) -> tuple[float, ...]:
    """The fractions in ascending order, if they lie in (0, 1]."""
    if not isinstance(fractions, Iterable):
        raise TypeError(f"`fractions` must be several numbers, such as (0.5, 1.0), got {fractions!r}.")
    ordered = tuple(sorted(float(fraction) for fraction in fractions))
    if not ordered or not 0.0 < ordered[0] <= ordered[-1] <= 1.0:
        raise ValueError(f"`fractions` must be numbers in (0, 1], at least one, got {ordered}.")
    return ordered


def _ratio(size: Tensor, length: Tensor) -> Tensor:
    """NaN without a length, not infinity: a part that did not move may still see its gradient change."""
    return size / length if length > 0 else torch.full_like(size, math.nan)


def _moved_gradient(gradient: Any, point: Point, x: Sequence[Tensor], d: Sequence[Tensor], t: float) -> Any:
    if hasattr(gradient, "gradient_at"):  # a Replay moves in place, without another copy of the point
        return gradient.gradient_at(d, t, origin=x).gradients
    moved = [a.detach() + t * b for a, b in zip(x, d, strict=True)]
    return listed(gradient(shaped_like(point, moved)))


def _differentiated(gradient: Gradient, point: Point, direction: Point) -> Any:
    """The Hessian is symmetric, so that a product from the left is one from the right."""
    x = [a.detach().requires_grad_() for a in listed(point)]
    g = listed(gradient(shaped_like(point, x)))
    product = torch.autograd.grad(g, x, listed(direction), allow_unused=True)
    return product[0] if isinstance(point, Tensor) else list(product)


def listed(value: Any) -> list[Any]:
    """One tensor as a list of one, anything else as a list."""
    return [value] if isinstance(value, Tensor) else list(value)


def shaped_like(point: Point, tensors: Sequence[Tensor]) -> Any:
    """The tensors in the form of ``point``: one tensor, or a list."""
    return tensors[0] if isinstance(point, Tensor) else list(tensors)
