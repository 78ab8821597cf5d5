r"""What learning rates are tried around, and the threshold of the trials.

Adam's learning rate has no unit. SGD's has one: its scale is the largest working step along a batch's
gradient at the start.

.. math::
    h \mapsto f(x - h\,g), \qquad g = \nabla f(x), \qquad
    \kappa(h) = \lVert \nabla f(x - h g) - g \rVert / \lVert g \rVert

A step works if :math:`\kappa \le 1` and the loss falls by a tenth of what its slope promises. Groups whose
learning rates are shares :math:`r` of the largest step along :math:`r g`; norms are those of
:math:`\sqrt r\,g`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor

from curvestep.bracket import NoBracket, Point, highest_loss, longest_step
from curvestep.calibration.method import Method
from curvestep.calibration.passes import Gradients, Passes, check_start
from curvestep.loaders import Batch
from curvestep.lr_schedules import peak_lr
from curvestep.optimizer_family import Family
from curvestep.smoothness.estimators import each
from curvestep.vectors import difference, dot, global_norm, precision

CLIP_AT = (0.6, 1.75)  # thresholds by the first gradient norm: of batches with nothing, with all in common
ADAM_SCALE, ADAM_MAX_NORM = 0.004, 1.0  # of Adam, where it has no threshold of its own


def scale_and_threshold(
    passes: Passes, batches: Sequence[Batch], method: Method, given: float
) -> tuple[float, float]:
    """The lr to try around, and the threshold: ``given``, or one of our own where that is infinite."""
    scale, threshold = ADAM_SCALE, ADAM_MAX_NORM
    if method.family.is_descent:
        step, threshold = step_and_threshold(passes, batches, method.shares_of(passes.parameters))
        scale = step * (1.0 - method.momentum)
    elif method.family is not Family.ADAM:
        scale, threshold = peak_lr(method.optimizer), math.inf
    if math.isfinite(given):
        threshold = given
    if method.family is Family.NORMALIZED:  # a length: the same step at gradients far below the offset
        scale *= threshold
    return scale, threshold


def step_and_threshold(
    passes: Passes, batches: Sequence[Batch], shares: Sequence[float]
) -> tuple[float, float]:
    r"""The median step, and the threshold :math:`c_0^{1-\rho^2} c_1^{\rho^2} \lVert g \rVert`.

    :math:`\rho` is the mean cosine between the batches' gradients. Where they agree, the norm at the start is
    that of a signal, which fades; where they do not, it is that of noise, which the signal will exceed.
    """
    steps: list[float] = []
    norms: list[float] = []
    guess = None
    total: Gradients = [None] * len(shares)  # of the directions
    for batch in batches:
        line = Line(passes, batch, shares)
        guess = line.largest_step(guess)  # the next search begins there
        steps.append(guess)
        norms.append(line.norm)
        total = [_plus(sum, g, line.norm) for sum, g in zip(total, line.gradients, strict=True)]
        passes.restart()
    count = len(norms)
    agreement = (global_norm(total).item() ** 2 - count) / max(1, count * (count - 1))
    weight = min(max(agreement, 0.0), 1.0) ** 2
    return median(steps), CLIP_AT[0] ** (1.0 - weight) * CLIP_AT[1] ** weight * median(norms)


def _plus(total: Tensor | None, gradient: Tensor | None, norm: float) -> Tensor | None:
    """A sum of directions with one more, in float32 at least."""
    if gradient is None:
        return total
    unit = gradient.to(torch.promote_types(gradient.dtype, torch.float32)) / norm
    return unit if total is None else total.add_(unit)


class Line:
    """A batch's loss and gradient along its own gradient."""

    def __init__(self, passes: Passes, batch: Batch, shares: Sequence[float]) -> None:
        self.passes, self.batch, self.shares = passes, batch, shares
        self.loss, self.gradients = self._gradient()
        self.norm = global_norm(self.gradients).item()
        check_start(self.loss, self.norm)
        self.direction = self._weighted(self.gradients)
        self.slope = dot(self.gradients, self.direction)
        moved = [p for p, d in zip(passes.parameters, self.direction, strict=True) if d is not None]
        length, width = global_norm(moved).item(), global_norm(self.direction).item()
        self.unit = length / width
        if length == 0:  # a start at the origin has the loss to measure steps by
            self.unit = abs(self.loss) / self.slope or 1.0 / width

    def largest_step(self, guess: float | None) -> float:
        """The largest working step; the search begins at ``guess``."""
        try:
            return longest_step(self.at, unit=self.unit, max_kappa=1.0, loss=self.highest_loss, guess=guess)
        except NoBracket as end:
            last = end.point
        if last.safe:
            raise ValueError(
                f"No step up to {last.step:.3g} is too long: the loss falls without end along its gradient. "
                "Is it bounded below, and is it the one to train on?"
            )
        raise ValueError(
            f"No step works, down to {last.step:.3g}, which takes the loss from {self.loss:.6g} to "
            f"{last.loss:.6g}. The loss may jump, or rounding may drown its differences: calibrate in "
            "float64."
        )

    def highest_loss(self, step: float) -> float:
        """The largest loss after a working step of this length."""
        return highest_loss(self.loss, step * self.slope, eps=precision(self.passes.parameters))

    def at(self, step: float) -> Point:
        """Effect of a step, measured by one gradient."""
        if step > min(torch.finfo(p.dtype).max for p in self.passes.parameters):
            raise ValueError(
                f"A gradient norm of {self.norm:.2g} needs steps beyond the parameters' precision. Multiply "
                "the loss by a constant, or calibrate in float64."
            )
        self.passes.move(self.direction, -step)
        loss, gradients = self._gradient()
        changes = difference(gradients, self.gradients, overwrite=True)
        kappa = math.sqrt(dot(changes, self._weighted(changes)) / self.slope)
        works = kappa <= 1.0 and loss <= self.highest_loss(step) and math.isfinite(loss)
        return Point(step=step, kappa=kappa, loss=loss, safe=works)

    def _gradient(self) -> tuple[float, Gradients]:
        loss, gradients = self.passes.gradient_of(self.batch)
        return loss, each(Tensor.to_dense, gradients)

    def _weighted(self, gradients: Gradients) -> Gradients:
        """The way that a step goes by a gradient: itself, not a copy, where all groups are alike."""
        if set(self.shares) == {1.0}:
            return gradients
        pairs = zip(gradients, self.shares, strict=True)
        return [share * g if g is not None and share > 0 else None for g, share in pairs]
