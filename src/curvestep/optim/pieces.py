"""Gradients clipped in pieces, by a rule that gives each tensor or each unit of it a threshold of its own.

Where our kernel walks the gradients, it measures and scales the pieces while it does. Elsewhere the scaled
gradients are a copy while the step lasts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from curvestep._kernel import Units, View
from curvestep.clip_rules import ClipRule, choose
from curvestep.distributed import whole
from curvestep.vectors import LARGEST_SAFE_NORM, global_norm, on_one_device, view_of, widest_dtype

if TYPE_CHECKING:
    from curvestep.optim.policy import Decision


@dataclass(slots=True)
class Pieces:
    """The norms of a gradient's pieces, and what the rule makes of them.

    Attributes:
        rule: The rule that clips them.
        norms: Vectors of norms: one for all pieces, or without a kernel one for the units of each tensor.
        weights: The norms of the parameters likewise, zero for a rule that does not ask for them.
        starts: The number of each tensor's first piece, where one vector has all.
        factors: What the pieces are multiplied by, once that is known.
        fired: Whether a piece is above its threshold.
    """

    rule: ClipRule
    norms: list[Tensor]
    weights: list[Any]
    starts: Tensor | None
    factors: list[Tensor] = field(default_factory=list[Tensor])
    fired: list[Tensor] = field(default_factory=list[Tensor])

    def norm(self) -> Tensor:
        """The norm of all pieces together."""
        return torch.linalg.vector_norm(_joined(self.norms))

    def unscale(self, factor: Any) -> None:
        """Take the scale of a GradScaler out of the norms."""
        self.norms = [norm * factor for norm in self.norms]

    def clip(self, bounds: Sequence[Any]) -> None:
        """Fix the factors, by a threshold for each norm."""
        self.fired = [norm > bound for norm, bound in zip(self.norms, bounds, strict=True)]
        self.factors = [
            choose(fired, bound / norm, 1.0)
            for fired, bound, norm in zip(self.fired, bounds, self.norms, strict=True)
        ]

    def counted(self, like: Any) -> tuple[Any, Any]:
        """The smallest factor and the share of pieces that are clipped: floats where ``like`` is one."""
        factors = _joined(self.factors)
        smallest = torch.cat([factors, factors.new_ones(1)]).min()  # of nothing at all it is one
        share = _joined([fired.to(factors.dtype) for fired in self.fired]).sum() / max(len(factors), 1)
        return (smallest, share) if isinstance(like, Tensor) else (smallest.item(), share.item())

    def units(self) -> Units | None:
        """The factors for our kernel, if it numbers the pieces as we do."""
        return None if self.starts is None else Units(self.starts, self.factors[0])

    def factor_of_each(self, grads: list[Tensor]) -> list[Tensor]:
        """What each gradient is multiplied by: one number, or one for each of its units."""
        if self.starts is None:
            each = self.factors
        else:
            cuts = self.starts[1:-1].tolist()
            each = map(_along_rows, self.factors[0].tensor_split(cuts), grads)
        return [factors.to(g.device) for factors, g in zip(each, grads, strict=True)]

    def scaled(self, grads: list[Tensor]) -> list[Tensor]:
        """A copy of the gradients with their factors in it, of the same dtypes."""
        factors = self.factor_of_each(grads)
        return [(g * f).to(g.dtype) for g, f in zip(grads, factors, strict=True)]


def pieces_of(decision: Decision, rule: ClipRule) -> Pieces:
    """The norms of the pieces that ``rule`` clips."""
    view = decision.view or view_of(decision.grads, decision.params)
    if view is not None:
        pieces = _by_kernel(decision, rule, view)
        if pieces is not None:
            return pieces
    if rule.each == "tensor":
        norms = torch.stack(on_one_device([global_norm([g]) for g in decision.grads]))
        return Pieces(rule, [norms], [0.0], _starts((1,) * len(decision.grads)))
    if any(g.layout != torch.strided for g in decision.grads):
        raise ValueError(
            f"`{rule.name}` clips rows by the norm of their weights and takes no sparse gradients. Make the "
            "layer with sparse=False, or use another rule."
        )
    norms, weights = [list(map(_unit_norms, tensors)) for tensors in (decision.grads, decision.params)]
    return Pieces(rule, norms, weights, None)


def _by_kernel(decision: Decision, rule: ClipRule, view: View) -> Pieces | None:
    """The norms by our kernel, unless units have gaps or a square has overflowed."""
    weights: list[Any] = [0.0]
    if rule.each == "tensor":
        starts = _starts((1,) * len(decision.grads))
    elif all(map(Tensor.is_contiguous, decision.grads)):
        starts = _starts(tuple(map(_num_units, decision.grads)))
        weights = [view.kernel.squares_of_units(view, starts, which=1).sqrt_()]
    else:
        return None
    norms = view.kernel.squares_of_units(view, starts).sqrt_()
    # A piece so small that its squares vanish is not clipped, so only large ones need another way.
    return Pieces(rule, [norms], weights, starts) if norms.max() < LARGEST_SAFE_NORM else None


@cache
def _starts(counts: tuple[int, ...]) -> Tensor:
    """The number of each tensor's first piece, and at last the number of all."""
    return torch.tensor([0, *counts], device="cpu").cumsum(0)


def _num_units(t: Tensor) -> int:
    return max(t.shape[0], 1) if t.dim() > 1 else 1


def _unit_norms(t: Tensor) -> Tensor:
    """Norm of each row of a matrix, of each filter of a convolution, or of a whole vector."""
    t = t.detach()
    if t.dim() <= 1:
        return global_norm([t])
    dtype = t.dtype if t.is_complex() else widest_dtype(t.device)
    return torch.linalg.vector_norm(t, dim=tuple(range(1, t.dim())), keepdim=True, dtype=dtype)


def _along_rows(factors: Tensor, g: Tensor) -> Tensor:
    return factors.view(-1, *[1] * (g.dim() - 1)) if len(factors) > 1 else factors.view(())


def _joined(vectors: list[Tensor]) -> Tensor:
    return torch.cat(on_one_device([whole(v).reshape(-1) for v in vectors]))
