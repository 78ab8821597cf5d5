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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

import torch
from torch import Tensor
from torch.optim import Optimizer

from curvestep.optimizer_family import Family, family_of
from curvestep.tensors.distributed import is_sharded, whole
from curvestep.tensors.vectors import PIECE, dot
from curvestep.trace.schema import Row

# P is at least this share of its root mean square over the tensor: a coordinate that gets its first gradient,
# or one after a long time without, would count for more than all others.
FLOOR = 1e-3


@dataclass(frozen=True)
class Scale:
    r"""P of one parameter: :math:`r`, or :math:`r\,(c\sqrt{v} + \varepsilon)` of Adam."""

    ratio: float  # r, of the largest lr to its own
    squares: tuple[Tensor, ...] = ()  # v of Adam; none where steps go along the gradient
    correction: float = 1.0  # c
    eps: float = 0.0

    @cached_property
    def floor(self) -> float:
        """The least value of P of Adam; reads all of v."""
        mean = whole(self.squares[0].mean(dtype=torch.float32)).item()
        least = torch.finfo(torch.float32).tiny  # where a whole tensor has never had a gradient
        return max(least, FLOOR * self.correction * math.sqrt(mean)) * self.ratio

    def values(self, *squares: Tensor) -> float | Tensor:
        """P of a piece of the parameter, with that piece of v."""
        if not squares:
            return self.ratio
        wide = torch.promote_types(squares[0].dtype, torch.float32)
        root = squares[0].to(wide).sqrt().mul_(self.correction * self.ratio)
        return root.add_(self.eps * self.ratio).clamp_(min=self.floor)


@dataclass(frozen=True)
class Geometry:
    """How an optimizer steps, and in which metric."""

    momentum: float | None = None  # :math:`\beta`; of Adam :math:`\beta_1`
    # The edge of stability for lr times the smoothness in this metric; 2 for plain descent.
    limit: float | None = None
    # P of each parameter; None for one that the optimizer does not move. Empty if not known.
    scales: Sequence[Scale | None] = field(default=(), repr=False)
    missing: str = ""  # why there is no metric; empty if there is one

    @property
    def is_euclidean(self) -> bool:
        """Whether P is the identity for all parameters, as far as it is known."""
        return all(scale == Scale(1.0) for scale in self.scales)

    @property
    def part(self) -> Row:
        """The row's momentum, stable limit, or why there is no metric."""
        missing = self.missing or None
        return {"momentum": self.momentum, "optimizer_limit": self.limit, "optimizer_missing": missing}


class ChangeInMetric:
    """Squares of a change of the gradient and of the step in the optimizer's metric.

    A visitor of a backward pass at ``parameters``, for the step from ``start`` to there. Each parameter is
    taken in pieces that stay in the cache.
    """

    def __init__(self, geometry: Geometry, parameters: Sequence[Tensor], start: Sequence[Tensor]) -> None:
        self._scales = geometry.scales
        self._parameters = parameters
        self._start = start
        self._changes: dict[int, list[float]] = {}
        self._steps: dict[int, list[float]] = {}

    def __call__(self, i: int, new: Tensor | None, old: Tensor | None) -> None:
        """Take one parameter's part."""
        scale = self._scales[i]
        if scale is None:
            return
        p = self._parameters[i].detach()
        tensors = [p, self._start[i], _dense(new, p), _dense(old, p), *scale.squares]
        steps: list[float] = []
        changes: list[float] = []
        for x, y, here, before, *squares in _pieces(tensors):
            P = scale.values(*squares)
            step = (x - y).abs()
            change = (here - before).abs()
            steps.append(dot([step], [step * P]))
            changes.append(dot([change], [change / P]))
        self._steps[i] = steps
        self._changes[i] = changes

    def smoothness(self, fraction: float) -> float | None:
        """‖P^(-1/2) change of the gradient‖ / ‖P^(1/2) way there‖; None if nothing moved.

        Inside the step ``start`` holds its end, see ``Replay.along``: what was seen is the rest of the step.
        """
        change = _root_of_sum(self._changes)
        length = _root_of_sum(self._steps)
        if length == 0:
            return None
        if fraction < 1.0:
            length = length / (1 - fraction)
        return change / (fraction * length)


def _root_of_sum(squares: Mapping[int, list[float]]) -> float:
    return math.sqrt(math.fsum(square for pieces in squares.values() for square in pieces))


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
    r"""The metric of the optimizer that has just stepped, its groups at these rates.

    Groups of unequal lr make part of it: with :math:`\eta` the largest of them, a group of rate
    :math:`\eta_i` has :math:`(\eta/\eta_i) P`, and a group of rate zero does not move.
    """
    if len(optimizers) != 1:
        return Geometry(missing=f"{len(optimizers)} optimizers stepped")
    optimizer = optimizers[0]
    name = type(optimizer).__name__
    family = _family_of_class(type(optimizer))
    adam = family is Family.ADAM
    if not adam and family is not Family.SGD:
        return Geometry(missing=f"how {name} steps is not known")
    edges = {_edge(group, adam=adam) for group in optimizer.param_groups}
    momentum = None
    limit = None
    if len(edges) == 1:
        momentum, limit = edges.pop()
    top = max(rates, default=0.0)
    scales: dict[int, Scale | None] = {}
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        moved = group["params"] if rate else ()
        for p in moved:
            if not adam:
                scales[id(p)] = Scale(top / rate)
            elif optimizer.state.get(p):  # else it has never had a gradient
                scales[id(p)] = _adam_scale(p, group, optimizer.state[p], top / rate)
    if None in scales.values():
        return Geometry(momentum, limit, missing=f"{name} has no `exp_avg_sq` of a parameter")
    known = [scales.get(id(p)) for p in parameters]
    if not any(known):
        return Geometry(momentum, limit, missing="its lr is zero, or its state empty")
    return Geometry(momentum, limit, known)


@cache
def _family_of_class(kind: type[Optimizer]) -> Family:
    """Its family; a class does not tell whether there is momentum, which the groups do."""
    return family_of(kind)


def _adam_scale(p: Tensor, group: Row, state: Row, ratio: float) -> Scale | None:
    """P of a parameter that Adam moves; None if there is no v of its shape."""
    square = state.get("max_exp_avg_sq", state.get("exp_avg_sq"))
    if square is None or square.shape != p.shape or square.is_complex():
        return None
    correction = 1.0
    if group.get("bias_correction", True):
        steps = float(state.get("step", group.get("step", math.inf)))
        correction = 1 / math.sqrt(1 - float(group["betas"][1]) ** steps)
    return Scale(ratio, (square.detach(),), correction, float(group["eps"]))


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
