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

from curvestep.vectors import global_norm

# By name: what steps like them, ours and other people's. A subclass counts as its base.
ADAM = ("Adam", "AdamW", "ClippedAdamW", "FusedAdam")
SGD = ("SGD", "ClippedSGD", "NormalizedSGD", "ScaledSGD")
# P is at least this share of its root mean square over the tensor: a coordinate that gets a gradient after a
# long time without one would count for more than all others. Those that never had one are left out.
FLOOR = 1e-3


@dataclass(frozen=True)
class Scale:
    r"""P of one parameter: :math:`r\,(\sqrt{v}\,c + \varepsilon)`, or r alone where there is no v."""

    ratio: float
    square: Tensor | None = None
    correction: float = 1.0
    eps: float = 0.0

    def roots(self) -> tuple[Any, Any]:
        r""":math:`P^{1/2}` and :math:`P^{-1/2}`, both zero for coordinates that never had a gradient."""
        if self.square is None:
            return math.sqrt(self.ratio), 1 / math.sqrt(self.ratio)
        square = self.square.detach()
        square = square.float() if square.dtype in (torch.float16, torch.bfloat16) else square
        root = square.sqrt() * self.correction
        floor = FLOOR * global_norm([root]).item() / math.sqrt(max(root.numel(), 1))
        P = (root + self.eps).clamp(min=floor) * self.ratio
        return P.sqrt() * (square > 0), torch.where(square > 0, P.rsqrt(), 0.0)


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

    def weigh_change(self, i: int, new: Tensor | None, old: Tensor | None) -> Tensor | None:
        """The i-th part of P^(-1/2)(new - old): its joint norm is that of the change of the gradient."""
        scale = self.scales[i]
        if scale is None or (new is None and old is None):
            return None
        change = new if old is None else -old if new is None else new - old
        assert change is not None
        return (change.to_dense() if change.is_sparse else change) * scale.roots()[1]

    def step_norm(self, parameters: Sequence[Tensor], start: Sequence[Tensor]) -> float:
        """Norm of P^(1/2)(x' - x)."""
        norms = [
            global_norm([(p.detach() - s) * scale.roots()[0]]).item()
            for p, s, scale in zip(parameters, start, self.scales, strict=True)
            if scale is not None
        ]
        return math.hypot(*norms)

    def inverse_roots(self, like: Sequence[Tensor]) -> list[Tensor]:
        """P^(-1/2), one tensor for each parameter; zeros for one that is not moved."""
        return [
            torch.zeros_like(p) if scale is None else torch.ones_like(p) * scale.roots()[1]
            for p, scale in zip(like, self.scales, strict=True)
        ]


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
