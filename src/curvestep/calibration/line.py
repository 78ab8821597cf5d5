r"""One batch's loss along the line that an optimizer's first step takes, and how far batches agree.

.. math::
    h \mapsto f(x - h\,d), \qquad d = \nabla f(x) \text{ for SGD}, \quad d = \operatorname{sign} \nabla f(x)
    \text{ for Adam}

with the gradients paired: the same batch, the same randomness, and everything put back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from curvestep.bracket import PER_OCTAVE, Point, highest_loss
from curvestep.calibration.method import Method
from curvestep.distributed import over_ranks
from curvestep.smoothness.determinism import NonDeterministicError, check_repeatable
from curvestep.smoothness.replay import Replay
from curvestep.vectors import difference, dot, global_norm

HALF = (torch.float16, torch.bfloat16)
MAX_REPEAT_ERROR = 0.05  # of a gradient's norm: far below the changes that count


class Line:
    r"""A batch's loss and gradient along :math:`x - h\,d`; use it as a context.

    The relative change of the gradient is taken in the norm dual to that of the step: the Euclidean one along
    the gradient, the sum of absolute values along its signs, whose largest entry is the length of the step.
    With ``slope`` it is, along signs, that of the slope alone:

    .. math::
        \kappa(h) = \frac{\lVert \nabla f(x - h d) - \nabla f(x) \rVert_*}{\lVert \nabla f(x) \rVert_*}
        \;(= h\,\hat L(h) \text{ along the gradient}), \qquad
        \kappa(h) = 1 - \frac{\langle \nabla f(x - h d), d \rangle}{\langle \nabla f(x), d \rangle} .

    Groups whose learning rates are shares :math:`r` of the largest take :math:`d = r g`; the norms are then
    those of :math:`\sqrt r\,\nabla f`, or of :math:`r\,\nabla f` along signs.

    A step is safe if that is at most :math:`\kappa_{\max}` and if the loss falls by a tenth of what its slope
    promises (on a quadratic a step with :math:`\kappa(h) \le 1` makes it fall by a half at least),

    .. math::
        f(x - h d) \le f(x) - \tfrac{1}{10}\, h\,\langle \nabla f(x), d \rangle .

    Without the second condition a step that fits the whole batch would be safe at any length: where the loss
    ends at zero, so does the gradient, and :math:`\kappa(h)` is 1 from there on.

    Args:
        model: Its parameters are moved, and put back at the end.
        closure: Returns the loss.
        max_kappa: Largest safe :math:`\kappa`.
        method: The optimizer: which way it steps, and the penalty that belongs to its loss.
        slope: Along signs, measure the change of the slope.
    """

    def __init__(
        self,
        model: nn.Module,
        closure: Callable[[], Any],
        *,
        max_kappa: float,
        method: Method,
        slope: bool = False,
    ) -> None:
        self.model, self.max_kappa, self.method = model, max_kappa, method
        self._by_slope = slope and method.along_signs
        self.points: list[Point] = []
        self.num_gradients = 0
        self._replay = Replay(model, closure)

    def __enter__(self) -> Line:
        self._replay.__enter__()
        try:
            self._begin()
        except BaseException:
            self._replay.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._replay.__exit__(*exception)
        del self._gradients, self.raw_gradients, self.direction

    def _begin(self) -> None:
        parameters = self._replay.parameters
        self.half = any(p.dtype in HALF for p in parameters)
        single = any(p.dtype != torch.float64 for p in parameters)
        self._longest = torch.finfo(torch.float32 if single else torch.float64).max
        self.loss, self._gradients = self._gradient(None)
        self.shares = [self.method.share(p) for p in parameters]
        self.grad_norm = global_norm(self._gradients).item()
        if not any(share and g is not None for share, g in zip(self.shares, self._gradients, strict=True)):
            raise ValueError(
                "`optimizer` trains no parameter that the loss depends on, or with an lr of zero."
            )
        d = self.direction = self._weighted(self._gradients)
        self._slope = dot(self._gradients, d)
        # Along d, the length of x measures steps; a start at the origin has the loss to measure them by.
        moved = [p for p, part in zip(parameters, d, strict=True) if part is not None]
        length, width = global_norm(moved).item(), global_norm(d).item()
        self.unit = math.nan
        if width > 0 and length > 0:
            self.unit = length / width
        elif self._slope > 0:
            self.unit = abs(self.loss) / self._slope or 1.0 / width

    @property
    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """The parameters that are moved, by name; ``raw_gradients`` has their order."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        return [(names[id(p)], p) for p in self._replay.parameters]

    def highest_loss(self, step: float) -> float:
        """The largest loss with which a step of this length is safe."""
        return highest_loss(self.loss, step * self._slope, eps=self._resolution)

    def at(self, index: int) -> Point:
        """The point with this lattice index, measured by one gradient."""
        step = self.unit * 2.0 ** (index / PER_OCTAVE)
        if step > self._longest:
            raise ValueError(
                f"A step of {step:.2g} is more than the parameters' precision holds, for the gradient's norm "
                f"is only {self.raw_norm:.2g}. Multiply the loss by a constant, or calibrate in float64."
            )
        loss, gradients = self._gradient(-step)
        kappa = self._change(gradients)
        safe = kappa <= self.max_kappa and loss <= self.highest_loss(step) and math.isfinite(loss)
        self.points.append(Point(step=step, kappa=kappa, loss=loss, safe=safe))
        return self.points[-1]

    def losses_of(self, closures: Sequence[Callable[[], Any]], step: float) -> np.ndarray:
        """Losses of other batches after a step along this line; forward passes only."""
        self._replay.move(self.direction, -step)
        return losses_of(closures, self._replay, self.method)

    def check_repeatable(self) -> None:
        """Refuse a loss whose gradient at the start differs from itself; call it before any step."""
        self.num_gradients += 1
        try:
            check_repeatable(self._replay, self.raw_gradients, tolerance=MAX_REPEAT_ERROR)
        except NonDeterministicError as error:
            said = str(error).replace("The closure", "`loss_of_batch`").replace("the closure", "it")
            raise ValueError(said) from None

    def rounding_error(self, step: float) -> float:
        """How far from where it should end rounding puts the step, relative to its length."""
        errors = []
        self._replay.return_home()
        with torch.no_grad():
            for p, d in zip(self._replay.parameters, self.direction, strict=True):
                if d is not None:
                    wide, moved = p.detach().double(), p.detach().add(d, alpha=-step).double()
                    errors.append(global_norm([moved.sub_(wide).add_(d.double(), alpha=step)]).item())
        return math.hypot(*errors) / (step * global_norm(self.direction).item())

    def _gradient(self, fraction: float | None) -> tuple[float, list[Tensor | None]]:
        """Loss and gradient, with the penalty; ``fraction`` None is the first time."""
        replay = self._replay
        there = replay.gradient() if fraction is None else replay.gradient_at(self.direction, fraction)
        self.num_gradients += 1
        self._resolution = torch.finfo(there.loss.dtype).eps if there.loss.is_floating_point() else 0.0
        loss = over_ranks(there.loss.item(), self.model, mean=True)
        gradients: list[Tensor | None] = [
            g.to_dense() if g is not None and g.is_sparse else g for g in there.gradients
        ]
        if fraction is None:  # the optimizer clips before it adds the penalty
            self.raw_gradients, self.raw_norm = gradients, global_norm(gradients).item()
        penalties = [self.method.penalty(p) for p in replay.parameters]
        if any(penalties):
            with torch.no_grad():
                gradients = [
                    (torch.zeros_like(p) if g is None else g).add(p, alpha=decay) if decay else g
                    for p, g, decay in zip(replay.parameters, gradients, penalties, strict=True)
                ]
            loss += penalty_of(replay, self.method)
        return loss, gradients

    def _weighted(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """The way that a step goes by a gradient."""
        signs = self.method.along_signs
        return [
            None
            if g is None or not r
            else (g.sign() if signs else g)
            if r == 1
            else r * (g.sign() if signs else g)
            for g, r in zip(gradients, self.shares, strict=True)
        ]

    def _change(self, gradients: list[Tensor | None]) -> float:
        if self._by_slope:
            return 1.0 - dot(gradients, self.direction) / self._slope
        changes = difference(gradients, self._gradients, overwrite=True)
        if self.method.along_signs or set(self.shares) != {1.0}:
            squared = dot(changes, self._weighted(changes)) / self._slope
            return squared if self.method.along_signs else math.sqrt(squared)
        return global_norm(changes).item() / self.grad_norm


def penalty_of(replay: Replay, method: Method) -> float:
    """What weight decay adds to the loss where the parameters are."""
    weights = [(p, method.penalty(p)) for p in replay.parameters]
    return sum(0.5 * decay * global_norm([p]).item() ** 2 for p, decay in weights if decay)


def losses_of(closures: Sequence[Callable[[], Any]], replay: Replay, method: Method) -> np.ndarray:
    """Losses of several batches where the parameters are, with the penalty; forward passes only."""
    own, losses = replay.closure, []
    for replay.closure in closures:
        losses.append(over_ranks(replay.loss().item(), replay.model, mean=True))
    replay.closure = own
    return np.array(losses) + penalty_of(replay, method)


class Agreement:
    r"""Mean cosine of the angles between the gradients of batches.

    .. math::
        \rho = \frac{1}{n(n-1)} \sum_{i \ne j} \langle u_i, u_j\rangle
        = \frac{\lVert \sum_i u_i \rVert^2 - n}{n(n-1)}, \qquad u_i = g_i/\lVert g_i\rVert

    One where all batches pull the same way, about zero where each shows its own noise. Only the sum of the
    directions is kept.

    Example:
        >>> agreement = Agreement()
        >>> for angle in (0.0, math.pi / 3):
        ...     agreement.add([torch.tensor([math.cos(angle), math.sin(angle)])])
        >>> round(agreement.cosine, 6)
        0.5
    """

    def __init__(self) -> None:
        self._sum: list[Tensor | None] = []
        self._count = 0

    def add(self, gradients: list[Tensor | None]) -> None:
        """Count one more batch's gradient in; None is a parameter without one."""
        norm = global_norm(gradients).item()
        before = self._sum or [None] * len(gradients)
        with torch.no_grad():
            units = [None if g is None else (g.float() if g.dtype in HALF else g) / norm for g in gradients]
            self._sum = [
                u if s is None else s if u is None else s.add_(u) for s, u in zip(before, units, strict=True)
            ]
        self._count += 1

    @property
    def cosine(self) -> float:
        """The mean cosine; NaN for fewer than two batches."""
        if self._count < 2:
            return math.nan
        length = global_norm(self._sum).item()
        return (length**2 - self._count) / (self._count * (self._count - 1))
