"""Gradients clipped in pieces, by a rule that gives each tensor or each unit of it a threshold of its own.

Where our kernel walks the gradients, it measures and clips the pieces while it does. Elsewhere the scaled
gradients are a copy while the step lasts.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch gives vector_norm and tolist no type.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from curvestep.clip_rules import ClipRule, Quantity
from curvestep.tensors.distributed import whole
from curvestep.tensors.kernel import Units, View, one_unit_each
from curvestep.tensors.vectors import global_norm, on_one_device, safe_norms, view_of, widest_dtype

if TYPE_CHECKING:
    from curvestep.optim.policy import Decision


class HostPieces:
    """Pieces that our kernel measures: their numbers are arrays. ``starts`` are those of :class:`Units`."""

    units: Units | None = None  # that our kernel clips while it updates

    def __init__(self, rule: ClipRule, view: View, starts: Quantity) -> None:
        self.rule = rule
        self._view, self._units = view, Units(starts, rule.of_weights)
        self.norm = math.sqrt(view.kernel.norms_of_units(view, starts, self._units.norms))
        self.norms: list[Quantity] = [self._units.norms]

    @property
    def weights(self) -> list[Quantity]:
        """The norms of the parameters, for a rule that clips units by them."""
        weights = np.empty_like(self._units.norms)
        self._view.kernel.norms_of_units(self._view, self._units.starts, weights, which=1)
        return [weights]

    def unscale(self, factor: float) -> None:
        """Take the scale of a GradScaler out of the norms."""
        self._units.norms *= factor

    def clip(self, bounds: Sequence[Quantity]) -> None:
        """Fix the factors, by a threshold for each norm."""
        (bound,), norms = bounds, self._units.norms
        self._units.factors[:] = 1.0
        np.divide(bound, norms, out=self._units.factors, where=norms > bound)

    def clip_some(self, bounds_of: Callable[[Quantity], Quantity], at: list[int], count: int) -> None:
        """The same where some of ``count`` tensors have no gradient: ``at`` are those that have one."""
        norms = np.zeros(count)
        norms[at] = self._units.norms
        self.clip([bounds_of(norms)[at]])

    def counted(self) -> tuple[float, float]:
        """The smallest factor, and the share of pieces that are clipped."""
        factors = self._units.factors
        return float(factors.min()), np.count_nonzero(factors < 1) / len(factors)

    def clipped_norm(self) -> float:
        """The norm of all pieces after clipping."""
        return float(np.linalg.norm(self._units.factors * self._units.norms))

    def factor_of_each(self, grads: list[Tensor]) -> list[Tensor]:
        """Factor of each gradient: one number, or one for each of its units."""
        factors = np.split(self._units.factors, list(self._units.starts)[1:-1])
        return [_along_rows(torch.from_numpy(f), g) for f, g in zip(factors, grads, strict=True)]


class KernelPieces(HostPieces):
    """Pieces that our kernel clips while it updates them: the factors are known after the update.

    The weights of a unit are still in the cache when it is updated, so that clipping by them costs no pass
    over memory.
    """

    def __init__(self, rule: ClipRule, view: View, starts: Quantity) -> None:
        super().__init__(rule, view, starts)
        self.units = self._units

    @property
    def weights(self) -> list[Quantity]:
        """Norms that the update takes, if the kernel knows the rule."""
        return super().weights if self.rule.of_weights is None else [0.0]

    def clip(self, bounds: Sequence[Quantity]) -> None:
        """Leave the factors to the update."""
        self._units.bounds[:] = bounds[0]

    def counted(self) -> tuple[float, float]:
        """The smallest factor, and the share of pieces that are clipped."""
        return self._units.clipped


class TensorPieces:
    """Pieces whose numbers are tensors: on a device, of shards, or without our kernel.

    ``norms`` is one vector with the norm of each tensor, or has for each tensor those of its units;
    ``weights`` are those of the parameters, zero for a rule that does not ask for them.
    """

    units = None

    def __init__(self, rule: ClipRule, norms: list[Tensor], weights: list[Quantity]) -> None:
        self.rule = rule
        self.norms: list[Quantity] = norms
        self.weights = weights
        self.norm = torch.linalg.vector_norm(_joined(norms))
        self._factors: list[Tensor] = []

    def unscale(self, factor: Tensor | float) -> None:
        """Take the scale of a GradScaler out of the norms."""
        self.norms = [norms * factor for norms in self.norms]

    def clip(self, bounds: Sequence[Quantity]) -> None:
        """Fix the factors, by a threshold for each norm."""
        self._factors = list(map(_factor, self.norms, bounds))

    def clip_some(self, bounds_of: Callable[[Quantity], Quantity], at: list[int], count: int) -> None:
        """The same where some of ``count`` tensors have no gradient: ``at`` are those that have one."""
        norms = self.norms[0]
        there = torch.tensor(at, device="cpu").to(norms.device, non_blocking=True)
        bounds = bounds_of(norms.new_zeros(count).index_copy(0, there, norms))
        self.clip([bounds.index_select(0, there)])

    def counted(self) -> tuple[Tensor, Tensor]:
        """The smallest factor, and the share of pieces that are clipped."""
        factors = _joined(self._factors)
        share = (factors < 1).to(factors.dtype).sum() / max(len(factors), 1)
        return torch.cat([factors, factors.new_ones(1)]).min(), share  # of no pieces it is one

    def clipped_norm(self) -> Tensor:
        """The norm of all pieces after clipping."""
        clipped = [f * norms for f, norms in zip(self._factors, self.norms, strict=True)]
        return torch.linalg.vector_norm(_joined(clipped))

    def factor_of_each(self, grads: list[Tensor]) -> list[Tensor]:
        """Factor of each gradient: one number, or one for each of its units."""
        each = self._factors if self.rule.each == "unit" else self._factors[0].unbind()
        return [factors.to(g.device) for factors, g in zip(each, grads, strict=True)]


Pieces: TypeAlias = HostPieces | TensorPieces


def pieces_of(decision: Decision, rule: ClipRule) -> Pieces:
    """The norms of the pieces that ``rule`` clips."""
    view = decision.view or view_of(decision.grads, decision.params)
    starts = None if view is None else _starts(view, rule)
    if view is not None and starts is not None:
        kind = HostPieces if decision.view is None else KernelPieces
        pieces = kind(rule, view, starts)
        # A piece whose squares vanish is too small to be clipped: only large ones need another way.
        if pieces.norm < safe_norms(torch.float32)[1]:
            return pieces
    if rule.each == "tensor":
        norms = torch.stack(on_one_device([global_norm([g]) for g in decision.grads]))
        return TensorPieces(rule, [norms], [0.0])
    if any(g.layout != torch.strided for g in decision.grads):
        raise ValueError(
            f"`{rule.name}` clips rows by the norm of their weights and takes no sparse gradients. Make the "
            "layer with sparse=False, or use another rule."
        )
    return TensorPieces(rule, list(map(_unit_norms, decision.grads)), list(map(_unit_norms, decision.params)))


def scaled(grads: list[Tensor], pieces: Pieces) -> list[Tensor]:
    """A copy of the gradients with their factors in it, of the same dtypes."""
    factors = pieces.factor_of_each(grads)
    return [(g * f).to(g.dtype) for g, f in zip(grads, factors, strict=True)]


def _starts(view: View, rule: ClipRule) -> Quantity:
    """The number of each tensor's first piece, and at last of all; None if units lie between each other."""
    if rule.each == "tensor":
        return one_unit_each(view.length)
    return view.starts if view.starts[view.length] >= 0 else None


def _unit_norms(t: Tensor) -> Tensor:
    """Norm of each row of a matrix, of each filter of a convolution, or of a whole vector."""
    t = t.detach()
    if t.dim() <= 1:
        return global_norm([t])
    dtype = t.dtype if t.is_complex() else widest_dtype(t.device)
    return torch.linalg.vector_norm(t, dim=tuple(range(1, t.dim())), keepdim=True, dtype=dtype)


def _factor(norms: Tensor, bound: Quantity) -> Tensor:
    """One where the norm is within its threshold, which may be infinite, and where it is zero."""
    return (bound / norms).clamp(max=1.0).nan_to_num(1.0)


def _along_rows(factors: Tensor, g: Tensor) -> Tensor:
    return factors.view(-1, *[1] * (g.dim() - 1)) if len(factors) > 1 else factors.view(())


def _joined(vectors: list[Tensor]) -> Tensor:
    return torch.cat(on_one_device([whole(v).reshape(-1) for v in vectors]))
