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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from curvestep._kernel import native
from curvestep.distributed import is_sharded
from curvestep.vectors import PIECE, SMALL, dot

# By name: what steps like them, ours and other people's. A subclass counts as its base.
ADAM = ("Adam", "AdamW", "ClippedAdamW", "FusedAdam")
SGD = ("SGD", "ClippedSGD", "NormalizedSGD", "ScaledSGD")
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
        mean: Any = self.square.detach().mean(dtype=torch.float32)
        mean = mean.full_tensor() if is_sharded(mean) else mean
        return max(TINY, FLOOR * self.correction * math.sqrt(mean.item())) * self.ratio

    def values(self, square: Tensor, floor: float) -> Tensor:
        """P where v is ``square``."""
        wide = square.float() if square.dtype in (torch.float16, torch.bfloat16) else square
        root = wide.sqrt().mul_(self.correction * self.ratio)
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

    Called with the index of each parameter and its new and old gradient while a backward pass goes on. Large
    parameters are taken at once, by the kernel or in pieces that stay in the cache; small ones later, all
    together.

    Args:
        geometry: The metric.
        parameters: Where the gradient is new.
        start: Other points; the step is from there to the parameters.
    """

    def __init__(self, geometry: Geometry, parameters: Sequence[Tensor], start: Sequence[Tensor]) -> None:
        self._scales, self._parameters, self._start = geometry.scales, parameters, start
        self._changes: list[float] = []
        self._steps: list[float] = []
        self._small: list[tuple[Scale, Tensor, Tensor, Tensor]] = []

    def __call__(self, i: int, new: Tensor | None, old: Tensor | None) -> None:
        """Take one parameter's part."""
        scale, p, start = self._scales[i], self._parameters[i].detach(), self._start[i]
        if scale is None:
            return
        n, o = (torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g for g in (new, old))
        if p.numel() <= SMALL and p.is_cpu and scale.square is not None:
            # The difference now: the new gradient may be overwritten after this call.
            self._small.append((scale, p, start, n - o))
        elif not self._add_by_kernel([scale], [p], [start], [n], [o]):
            self._add(scale, p, start, n, o)

    def _add_by_kernel(
        self, scales: Sequence[Scale], p: list[Tensor], start: list[Tensor], *gradients: list[Tensor]
    ) -> bool:
        """Whether the kernel could take these: parameters, where they were, and gradients or their change."""
        squares = [s.square.detach() for s in scales if s.square is not None]
        kernel = native()
        view = None if kernel is None else kernel.view(p, start, squares, *gradients)
        if kernel is None or view is None:
            return False
        step, change = kernel.squares_in_metric(
            view,
            [s.correction * s.ratio for s in scales],
            [s.eps * s.ratio for s in scales],
            [TINY * s.ratio for s in scales],
            FLOOR,
        )
        self._steps.append(step)
        self._changes.append(change)
        return True

    def _add(self, scale: Scale, p: Tensor, start: Tensor, *gradients: Tensor) -> None:
        """What the kernel does, for all that it cannot take."""
        floor = scale.floor
        pieces = [p, start, *gradients, *([] if scale.square is None else [scale.square.detach()])]
        whole = not p.is_cpu or is_sharded(p)
        for x, y, new, *rest in (
            [pieces] if whole else zip(*(t.reshape(-1).split(PIECE // 4) for t in pieces), strict=True)
        ):
            P = scale.ratio if scale.square is None else scale.values(rest.pop(), floor)
            step, change = (x - y).abs(), (new - rest[0] if rest else new).abs()
            self._steps.append(dot([step], [step * P]))
            self._changes.append(dot([change], [change / P]))

    @property
    def norms(self) -> tuple[float, float]:
        """‖P^(-1/2) change of the gradient‖ and ‖P^(1/2) step‖; to be read once."""
        if self._small:
            scales, *lists = map(list, zip(*self._small, strict=True))
            if not self._add_by_kernel(scales, *lists):
                for small in self._small:
                    self._add(*small)
        return math.sqrt(math.fsum(self._changes)), math.sqrt(math.fsum(self._steps))


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
    names = {base.__name__ for base in type(optimizer).__mro__}
    adam = bool(names & {*ADAM}) and not names & {"NAdam", "RAdam"}
    if not adam and not names & {*SGD}:
        return Geometry(name, missing=f"how {name} steps is not known")
    edges = {_edge(group, adam=adam) for group in optimizer.param_groups}
    momentum, limit = edges.pop() if len(edges) == 1 else (None, None)
    top = max(rates, default=0.0)
    if not top > 0:
        return Geometry(name, momentum, limit, missing="lr is zero")
    scales: dict[int, Scale] = {}
    known = {id(p) for p in parameters}
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        for p in group["params"]:
            if rate == 0 or id(p) not in known:
                continue
            if not adam:
                scales[id(p)] = Scale(top / rate)
                continue
            state: Mapping[str, Any] = optimizer.state.get(p, {})
            if not state:  # it has never had a gradient
                continue
            square = state.get("max_exp_avg_sq", state.get("exp_avg_sq"))
            if square is None or square.shape != p.shape or square.is_complex():
                return Geometry(name, momentum, limit, missing=f"{name} has no `exp_avg_sq` of a parameter")
            correction = 1.0
            if group.get("bias_correction", True):
                steps = float(state.get("step", group.get("step", math.inf)))
                correction = 1 / math.sqrt(1 - float(group["betas"][1]) ** steps)
            scales[id(p)] = Scale(top / rate, square, correction, float(group["eps"]))
    missing = "" if scales else "the optimizer's state is empty"
    return Geometry(name, momentum, limit, [scales.get(id(p)) for p in parameters], missing)


def _edge(group: Mapping[str, Any], *, adam: bool) -> tuple[float, float]:
    """Momentum, and the largest stable lr·λ on a quadratic."""
    if adam:
        beta = float(group["betas"][0])
        return beta, 2 * (1 + beta) / (1 - beta)
    beta = float(group.get("momentum", 0.0))
    if group.get("nesterov"):
        return beta, 2 * (1 + beta) / (1 + 2 * beta)
    dampening = float(group.get("dampening", 0.0)) if beta else 0.0
    return beta, 2 * (1 + beta) / (1 - dampening) if dampening < 1 else math.inf
