r"""The largest safe step along a line, by bracket and bisection.

A step :math:`h` is safe if the gradient changes little over it and the loss falls enough. The calibration
looks for the longest before training. The search knows
nothing of models: it asks for :math:`\kappa(h)` and :math:`f(h)` at steps of a fixed lattice,

.. math::
    h_k = u \cdot 2^{k/4}, \qquad k \in \mathbb{Z},

so its answer depends on where the safe steps end, and not on where the search began.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

PER_OCTAVE = 4  # lattice points in a factor of two: neighbours are a factor of 1.19 apart
LARGEST = 30 * PER_OCTAVE  # a billion units: parameters may start as small as one likes
SMALLEST = -18 * PER_OCTAVE  # four millionths of a unit
LONG_STRIDE = 2 * PER_OCTAVE  # the bracket grows by factors of four
START = -5 * PER_OCTAVE  # first step tried: a thirty-second of the length of the parameters
LEAST_FALL = 0.1  # of the loss over a safe step, in units of step times slope


@dataclass(frozen=True, kw_only=True)
class Point:
    r"""Effect of one step.

    Args:
        step: :math:`h`.
        kappa: Change of the gradient over the step, relative to the gradient: :math:`h\,\hat L(h)`.
        loss: :math:`f` after the step.
        safe: Whether the step is safe.
    """

    step: float
    kappa: float
    loss: float
    safe: bool


@dataclass(frozen=True)
class Bracket:
    """Where safe steps end: the lattice index of the last safe one, and both points around the end."""

    index: int
    low: Point
    high: Point


class NoBracket(Exception):
    """Every step of the lattice is safe, or none is; ``safe`` says which, ``point`` is the last one."""

    def __init__(self, point: Point) -> None:
        super().__init__(point)
        self.point = point


def find_bracket(measure: Callable[[int], Point], *, start: int, stride: int) -> Bracket:
    """The neighbours on the lattice between which steps stop being safe.

    From ``start`` the search walks up while steps are safe, or down until one is, with strides that double
    up to a factor of four; then it halves the bracket. No point is measured twice.

    Args:
        measure: The point with a given lattice index.
        start: Lattice index to begin at.
        stride: First stride, in lattice points.

    Returns:
        The bracket. The answer is the same for every ``start`` if the safe steps are those below one end.

    Raises:
        NoBracket: the walk reached the end of the lattice.

    Example:
        >>> point = lambda k: Point(step=2.0 ** (k / 4), kappa=2.0 ** (k / 4), loss=0.0, safe=k <= 13)
        >>> [find_bracket(point, start=k, stride=8).index for k in (-40, 13, 14, 30)]
        [13, 13, 13, 13]
    """
    points: dict[int, Point] = {}

    def at(index: int) -> Point:
        points[index] = measure(index)
        return points[index]

    here, direction = start, 1 if at(start).safe else -1
    while True:
        there = min(max(here + direction * stride, SMALLEST), LARGEST)
        if there == here:
            raise NoBracket(points[here])
        if at(there).safe != points[here].safe:
            break
        here, stride = there, min(2 * stride, LONG_STRIDE)
    low, high = min(here, there), max(here, there)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if at(middle).safe else (low, middle)
    return Bracket(low, points[low], points[high])


def highest_loss(loss: float, promise: float, *, eps: float) -> float:
    """The largest loss after a safe step: below the first by a tenth of what the slope promises.

    A loss that cannot be told from the limit, at the relative precision ``eps``, keeps it.

    Example:
        >>> highest_loss(2.0, 1.0, eps=0.0)
        1.9
    """
    return loss + 4 * eps * abs(loss) - LEAST_FALL * promise


def crossing(bracket: Bracket, *, max_kappa: float, loss: Callable[[float], float]) -> float:
    r"""The step within the bracket at which :math:`\kappa` or the loss reaches its limit, by interpolation.

    :math:`\log\kappa` is taken to be linear in :math:`\log h`, exact for a quadratic, and the loss and its
    limit linear in :math:`h`. Where the upper point is not finite, the answer is the lower one.

    Args:
        bracket: Its lower point is safe, its upper one is not.
        max_kappa: Largest safe :math:`\kappa`.
        loss: Largest safe loss, by the step.

    Example:
        >>> low = Point(step=1.0, kappa=0.8, loss=0.0, safe=True)
        >>> high = Point(step=1.5, kappa=1.2, loss=-1.0, safe=False)
        >>> round(crossing(Bracket(0, low, high), max_kappa=1.0, loss=lambda step: 0.0), 12)
        1.25
    """
    low, high = bracket.low, bracket.high
    shares = []
    if high.kappa > max_kappa and low.kappa > 0:
        shares.append(math.log(max_kappa / low.kappa) / math.log(high.kappa / low.kappa))
    room, excess = loss(low.step) - low.loss, high.loss - loss(high.step)
    if excess > 0:
        part = room / (room + excess)
        shares.append(math.log1p(part * (high.step / low.step - 1.0)) / math.log(high.step / low.step))
    finite = math.isfinite(high.kappa) and math.isfinite(high.loss)
    share = min(max(min(shares), 0.0), 1.0) if finite and shares else 0.0
    return low.step * (high.step / low.step) ** share


def longest_step(
    measure: Callable[[float], Point],
    *,
    unit: float,
    max_kappa: float,
    loss: Callable[[float], float],
    guess: float | None = None,
) -> float:
    r"""The longest safe step on the lattice of ``unit``.

    Args:
        measure: What a step does, by its length.
        unit: :math:`u` of the lattice.
        max_kappa: Largest safe :math:`\kappa`.
        loss: Largest safe loss, by the step.
        guess: A step near the answer, to begin at.

    Raises:
        NoBracket: every step is safe, or none is.

    Example:
        >>> at = lambda step: Point(step=step, kappa=step / 3, loss=0.0, safe=step <= 3)
        >>> round(longest_step(at, unit=1.0, max_kappa=1.0, loss=lambda step: 1.0), 12)
        3.0
    """
    start, stride = START, LONG_STRIDE
    if guess is not None:
        start, stride = round(PER_OCTAVE * math.log2(guess / unit)), PER_OCTAVE // 2
    bracket = find_bracket(
        lambda index: measure(unit * 2.0 ** (index / PER_OCTAVE)), start=start, stride=stride
    )
    return crossing(bracket, max_kappa=max_kappa, loss=loss)


def working_fraction(fractions: Sequence[float], kappa: Sequence[float], efficiency: float) -> float:
    r"""How many times a step that was taken still works, from :math:`\kappa` at ascending fractions of it.

    The same notion as :func:`crossing`'s, from what a probe has measured already: :math:`\kappa \le 1`, and
    the loss falls by a tenth of what its slope promises. Between the fractions it grows as a power
    of the step. Beyond the last it goes on in proportion; before the first as between the first two, or in
    proportion where it hardly grew. A loss that fell by less over the step fell early.

    Args:
        fractions: Where on the step :math:`\kappa` was measured.
        kappa: Change of the gradient up to there, relative to the gradient.
        efficiency: Fall of the loss over the whole step, over what the slope promises; NaN if unknown.

    Example:
        >>> working_fraction([0.5, 1.0], [0.1, 0.2], 0.9), working_fraction([0.5, 1.0], [0.1, 0.2], 0.05)
        (5.0, 0.5)
        >>> working_fraction([0.5, 1.0], [2.0, 3.0], 0.5), working_fraction([0.5, 1.0], [4.0, 16.0], 0.5)
        (0.25, 0.25)
        >>> round(working_fraction([0.5, 1.0], [0.5, 2.0], math.nan), 12)
        0.707106781187
    """
    points = [Point(step=h, kappa=k, loss=0.0, safe=k <= 1) for h, k in zip(fractions, kappa, strict=True)]
    beyond = next((i for i, point in enumerate(points) if not point.safe), len(points))
    if beyond == len(points):
        found = fractions[-1] / max(kappa[-1], 1e-300)
    elif beyond == 0:
        growth = 1.0
        if len(points) > 1:
            growth = max(growth, math.log(kappa[1] / kappa[0]) / math.log(fractions[1] / fractions[0]))
        found = fractions[0] * kappa[0] ** (-1 / growth)
    else:
        bracket = Bracket(0, points[beyond - 1], points[beyond])
        found = crossing(bracket, max_kappa=1.0, loss=lambda step: 0.0)
    if 0 < efficiency < LEAST_FALL:
        return min(found, efficiency / LEAST_FALL)
    return found
