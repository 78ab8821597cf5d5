r"""The largest working step along a gradient, by bracket and bisection.

.. math::
    h \mapsto f(x - h\,g), \qquad g = \nabla f(x), \qquad
    \kappa(h) = \lVert \nabla f(x - h g) - g \rVert / \lVert g \rVert

A step :math:`h` works if :math:`\kappa \le 1` and the loss falls by a tenth of what its slope promises. The
search asks for both at steps of a fixed lattice, :math:`h_k = u \cdot 2^{k/4}`, so its answer depends on
where the working steps end, and not on where it began.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvestep.steps import LEAST_FALL
from curvestep.tensors.vectors import difference, dot, global_norm, precision

PER_OCTAVE = 4  # lattice points in a factor of two: neighbours are a factor of 1.19 apart
LARGEST = 30 * PER_OCTAVE  # a billion units: parameters may start as small as one likes
SMALLEST = -18 * PER_OCTAVE  # four millionths of a unit
LONG_STRIDE = 2 * PER_OCTAVE  # the bracket grows by factors of four
START = -5 * PER_OCTAVE  # first step tried: a thirty-second of the length of the parameters

Gradients = list["Tensor | None"]


@dataclass(frozen=True)
class Point:
    """Effect of one step."""

    step: float
    kappa: float  # change of the gradient over the step, relative to the gradient
    loss: float  # after the step
    limit: float  # the largest loss after a step that works

    @property
    def works(self) -> bool:
        """Whether a run may take such steps."""
        return self.kappa <= 1.0 and self.loss <= self.limit and math.isfinite(self.loss)


def step_along_gradient(
    gradient_at: Callable[[Gradients, float], tuple[float, Gradients]],
    parameters: Sequence[Tensor],
    shares: Sequence[float],
    guess: float | None = None,
) -> tuple[float, Gradients]:
    r"""The largest working step of the parameters along their gradient, and that gradient.

    Parameters whose learning rates are shares :math:`r` of the largest step along :math:`r g`; norms are
    those of :math:`\sqrt r\,g`. ``gradient_at`` gives loss and gradient at :math:`x + \gamma d`.
    """

    def weighted(gradients: Gradients) -> Gradients:  # itself, not a copy, where all are alike
        if set(shares) == {1.0}:
            return gradients
        pairs = zip(gradients, shares, strict=True)
        return [share * g if g is not None and share > 0 else None for g, share in pairs]

    def at(step: float) -> Point:
        if step > min(torch.finfo(p.dtype).max for p in parameters):
            raise ValueError(
                f"A gradient norm of {global_norm(here).item():.2g} needs steps beyond the parameters' "
                "precision. Multiply the loss by a constant, or calibrate in float64."
            )
        there, gradients = gradient_at(direction, -step)
        changes = difference(gradients, here, overwrite=True)
        kappa = math.sqrt(dot(changes, weighted(changes)) / slope)
        # A tenth of what the slope promises below the first loss, where rounding can tell the two apart.
        limit = loss + 4 * eps * abs(loss) - LEAST_FALL * (step * slope)
        return Point(step, kappa, there, limit)

    eps = precision(parameters)
    loss, here = gradient_at([None] * len(shares), 0.0)
    direction = weighted(here)
    slope, width = dot(here, direction), global_norm(direction).item()
    moved = [p for p, d in zip(parameters, direction, strict=True) if d is not None]
    unit = global_norm(moved).item() / width
    if unit == 0:  # a start at the origin has the loss to measure steps by
        unit = abs(loss) / slope or 1.0 / width
    return largest_step(at, unit=unit, guess=guess), here


def largest_step(measure: Callable[[float], Point], *, unit: float, guess: float | None = None) -> float:
    """The largest working step on the lattice of ``unit``; the search begins near the ``guess``, if any.

    Raises:
        ValueError: every step works, or none does.

    Example:
        >>> at = lambda step: Point(step, kappa=step / 3, loss=0.0, limit=1.0)
        >>> round(largest_step(at, unit=1.0), 12)
        3.0
    """
    start, stride = START, LONG_STRIDE
    if guess is not None:
        start, stride = round(PER_OCTAVE * math.log2(guess / unit)), PER_OCTAVE // 2
    return crossing(*find_bracket(lambda k: measure(unit * 2.0 ** (k / PER_OCTAVE)), start, stride))


def find_bracket(measure: Callable[[int], Point], start: int, stride: int) -> tuple[Point, Point]:
    """The neighbours on the lattice between which steps stop working; no point is measured twice.

    From ``start`` the search walks up while steps work, or down until one does, with strides that double up
    to a factor of four; then it halves the bracket. If the steps that work are those below one end, the
    answer is the same for every ``start``.
    """
    index, here = start, measure(start)
    direction = 1 if here.works else -1
    while True:
        beyond = min(max(index + direction * stride, SMALLEST), LARGEST)
        if beyond == index:
            raise ValueError(_no_end(here))
        there = measure(beyond)
        if there.works != here.works:
            break
        index, here, stride = beyond, there, min(2 * stride, LONG_STRIDE)
    (low, last), (high, first) = sorted([(index, here), (beyond, there)])
    while high - low > 1:
        middle = (low + high) // 2
        point = measure(middle)
        if point.works:
            low, last = middle, point
        else:
            high, first = middle, point
    return last, first


def _no_end(point: Point) -> str:
    if point.works:
        return (
            f"No step up to {point.step:.3g} is too long: the loss falls without end along its gradient. "
            "Is it bounded below, and is it the one to train on?"
        )
    return (
        f"No step works, down to {point.step:.3g}, which takes the loss to {point.loss:.6g}, not below "
        f"{point.limit:.6g}. The loss may jump, or rounding may drown its differences: calibrate in float64."
    )


def crossing(low: Point, high: Point) -> float:
    r"""The step at which :math:`\kappa` or the loss reaches its limit; ``low`` works, ``high`` does not.

    :math:`\log\kappa` is taken to be linear in :math:`\log h`, exact for a quadratic, and the loss and its
    limit linear in :math:`h`. Where the upper point is not finite, the answer is the lower one.

    Example:
        >>> low, high = Point(1.0, kappa=0.8, loss=0.0, limit=0.0), Point(1.5, 1.2, loss=-1.0, limit=0.0)
        >>> round(crossing(low, high), 12)
        1.25
    """
    shares = []
    if high.kappa > 1.0 and low.kappa > 0:
        shares.append(math.log(1.0 / low.kappa) / math.log(high.kappa / low.kappa))
    room, excess = low.limit - low.loss, high.loss - high.limit
    if excess > 0:
        part = room / (room + excess)
        shares.append(math.log1p(part * (high.step / low.step - 1.0)) / math.log(high.step / low.step))
    finite = math.isfinite(high.kappa) and math.isfinite(high.loss)
    share = min(max(min(shares), 0.0), 1.0) if finite and shares else 0.0
    return low.step * (high.step / low.step) ** share
