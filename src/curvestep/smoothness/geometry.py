r"""The metric that an optimizer steps in, read from its state: smoothness as Adam and momentum meet it.

Adam moves by :math:`x' = x - \eta P^{-1} m` with a diagonal :math:`P = \sqrt{\hat v} + \varepsilon`. In the
coordinates :math:`P^{1/2} x` this is gradient descent with momentum, so its stability depends on
:math:`\eta\,\lambda_{\max}(P^{-1} H)`, not on :math:`\eta\,\lambda_{\max}(H)` (Cohen et al., 2022). Along a
step the smoothness in this metric is

.. math::
    L_P = \frac{\lVert P^{-1/2} (\nabla f(x') - \nabla f(x)) \rVert}{\lVert P^{1/2} (x' - x) \rVert}

and :math:`\eta L_P` is a pure number. A quadratic diverges where :math:`\eta\lambda` exceeds
:math:`2(1 + \beta)/(1 - \beta)` with an averaged momentum such as Adam's, and :math:`2(1 + \beta)` with a
summed one such as that of SGD.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from curvestep.distributed import is_sharded, whole
from curvestep.optimizer_family import Family, family_of
from curvestep.smoothness.trace import Row
from curvestep.vectors import PIECE, dot

# P is at least this share of its root mean square over the tensor: a coordinate that gets its first gradient,
# or one after a long time without, would count for more than all others.
FLOOR = 1e-3
TINY = 1e-30  # at least, where a whole tensor has never had a gradient


@dataclass(frozen=True)
class Scale:
    r"""P of one parameter: :math:`r\,(c\sqrt{v} + \varepsilon)`, or r alone where there is no v.

    Attributes:
        ratio: r.
        square: v.
        correction: c.
        eps: :math:`\varepsilon`.
    """

    ratio: float
    square: Tensor | None = None
    correction: float = 1.0
    eps: float = 0.0

    @property
    def floor(self) -> float:
        """The least value of P; reads all of v."""
        if self.square is None:
            return 0.0
        mean = whole(self.square.detach().mean(dtype=torch.float32))
        return max(TINY, FLOOR * self.correction * math.sqrt(mean.item())) * self.ratio

    def values(self, square: Tensor, floor: float) -> Tensor:
        """P where v is ``square``."""
        wide = torch.promote_types(square.dtype, torch.float32)
        root = square.to(wide).sqrt().mul_(self.correction * self.ratio)
        return root.add_(self.eps * self.ratio).clamp_(min=floor)


@dataclass(frozen=True)
class Geometry:
    r"""How an optimizer steps, and in which metric.

    Attributes:
        optimizer: Name of its class.
        momentum: :math:`\beta`; of Adam :math:`\beta_1`.
        limit: The edge of stability for lr times the smoothness in this metric; 2 for plain descent.
        scales: P of each parameter; None for one that the optimizer does not move.
        missing: Why there is no metric; empty if there is one.
    """

    optimizer: str
    momentum: float | None = None
    limit: float | None = None
    scales: Sequence[Scale | None] = field(default=(), repr=False)
    missing: str = ""

    @property
    def is_euclidean(self) -> bool:
        """Whether P is the identity for all parameters."""
        return all(s is not None and s.square is None and s.ratio == 1.0 for s in self.scales)

    def visitor(self, parameters: Sequence[Tensor], start: Sequence[Tensor]) -> ChangeInMetric | None:
        """A measure of the gradient's change from ``start``; None in the plain metric, which needs none."""
        return None if self.is_euclidean else ChangeInMetric(self, parameters, start)

    def inverse_roots(self, like: Sequence[Tensor]) -> list[Tensor]:
        """P^(-1/2), one tensor for each parameter; zeros for one that is not moved."""
        roots = []
        for p, scale in zip(like, self.scales, strict=True):
            if scale is None:
                roots.append(torch.zeros_like(p))
            elif scale.square is None:
                roots.append(torch.full_like(p, scale.ratio**-0.5))
            else:
                roots.append(scale.values(scale.square.detach(), scale.floor).rsqrt().to(p.dtype))
        return roots


class ChangeInMetric:
    """Squares of a change of the gradient and of the step in the optimizer's metric.

    Called with the index of each parameter and its new and old gradient while a backward pass goes on. Each
    is taken in pieces that stay in the cache.

    Args:
        geometry: The metric.
        parameters: Where the gradient is new.
        start: Other points; the step is from there to the parameters.
    """

    def __init__(self, geometry: Geometry, parameters: Sequence[Tensor], start: Sequence[Tensor]) -> None:
        self._scales, self._parameters, self._start = geometry.scales, parameters, start
        self._changes: list[float] = []
        self._steps: list[float] = []

    def __call__(self, i: int, new: Tensor | None, old: Tensor | None) -> None:
        """Take one parameter's part."""
        scale, p = self._scales[i], self._parameters[i].detach()
        if scale is None:
            return
        floor = scale.floor
        tensors = [p, self._start[i], _dense(new, p), _dense(old, p)]
        if scale.square is not None:
            tensors.append(scale.square.detach())
        for x, y, here, before, *square in _pieces(tensors):
            P = scale.values(square[0], floor) if square else scale.ratio
            step, change = (x - y).abs(), (here - before).abs()
            self._steps.append(dot([step], [step * P]))
            self._changes.append(dot([change], [change / P]))

    def smoothness(self, fraction: float) -> float | None:
        """‖P^(-1/2) change of the gradient‖ / ‖P^(1/2) way there‖; None if nothing moved.

        Args:
            fraction: How far on its step the parameters are. Inside it ``start`` holds its end, see
                ``Replay.along``: what was seen is the rest of the step.
        """
        change, length = math.sqrt(math.fsum(self._changes)), math.sqrt(math.fsum(self._steps))
        if length == 0:
            return None
        if fraction < 1.0:
            length = length / (1 - fraction)
        return change / (fraction * length)


def _dense(gradient: Tensor | None, p: Tensor) -> Tensor:
    if gradient is None:
        return torch.zeros_like(p)
    return gradient.to_dense()


def _pieces(tensors: list[Tensor]) -> Iterable[Sequence[Tensor]]:
    """Tensors of one shape in pieces, side by side; on a device and of shards in one."""
    if not tensors[0].is_cpu or is_sharded(tensors[0]):
        return [tensors]
    return zip(*(t.reshape(-1).split(PIECE // 4) for t in tensors), strict=True)


def geometry_of(
    optimizers: Sequence[Optimizer], rates: Sequence[float], parameters: Sequence[Tensor]
) -> Geometry:
    r"""The metric of the optimizer that has just stepped.

    Groups of unequal lr make part of it: with :math:`\eta` the largest of them, a group of rate
    :math:`\eta_i` has :math:`(\eta/\eta_i) P`, and a group of rate zero does not move.

    Args:
        optimizers: Those that stepped.
        rates: lr of each group of the first, at the step.
        parameters: The model's.
    """
    if len(optimizers) != 1:
        return Geometry("", missing=f"{len(optimizers)} optimizers stepped")
    optimizer, name = optimizers[0], type(optimizers[0]).__name__
    family = family_of(optimizer)
    adam = family is Family.ADAM
    if not adam and not family.is_descent:
        return Geometry(name, missing=f"how {name} steps is not known")
    edges = {_edge(group, adam=adam) for group in optimizer.param_groups}
    momentum, limit = edges.pop() if len(edges) == 1 else (None, None)
    top = max(rates, default=0.0)
    if not top > 0:
        return Geometry(name, momentum, limit, missing="lr is zero")
    scales: dict[int, Scale | None] = {}
    known = {id(p) for p in parameters}
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        moved = [p for p in group["params"] if rate != 0 and id(p) in known]
        for p in moved:
            if not adam:
                scales[id(p)] = Scale(top / rate)
            elif optimizer.state.get(p):  # else it has never had a gradient
                scales[id(p)] = _adam_scale(p, group, optimizer.state[p], top / rate)
    if None in scales.values():
        return Geometry(name, momentum, limit, missing=f"{name} has no `exp_avg_sq` of a parameter")
    missing = "" if scales else "the optimizer's state is empty"
    return Geometry(name, momentum, limit, [scales.get(id(p)) for p in parameters], missing)


def _adam_scale(p: Tensor, group: Row, state: Row, ratio: float) -> Scale | None:
    """P of a parameter that Adam moves; None if there is no v of its shape."""
    square = state.get("max_exp_avg_sq", state.get("exp_avg_sq"))
    if square is None or square.shape != p.shape or square.is_complex():
        return None
    correction = 1.0
    if group.get("bias_correction", True):
        steps = float(state.get("step", group.get("step", math.inf)))
        correction = 1 / math.sqrt(1 - float(group["betas"][1]) ** steps)
    return Scale(ratio, square, correction, float(group["eps"]))


def _edge(group: Row, *, adam: bool) -> tuple[float, float]:
    """Momentum, and the largest stable lr·λ on a quadratic."""
    if adam:
        beta = float(group["betas"][0])
        return beta, 2 * (1 + beta) / (1 - beta)
    beta = float(group.get("momentum", 0.0))
    if group.get("nesterov"):
        return beta, 2 * (1 + beta) / (1 + 2 * beta)
    if beta == 0:  # then torch ignores dampening
        return beta, 2.0
    dampening = float(group.get("dampening", 0.0))
    if dampening >= 1:
        return beta, math.inf
    return beta, 2 * (1 + beta) / (1 - dampening)
