"""Thresholds that rules give: one for a norm, or one for each tensor or each unit of it.

Where a rule clips units, our kernel measures and clips them while it walks the gradients. Elsewhere scaled
gradients are a copy while the step lasts. The numbers are arrays on the host; those of a device are read.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch gives vector_norm and tolist no type.

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from curvestep.clip_rules import ClipRule, FloatOrArray, Observation, RuleMemory, Saved
from curvestep.optim.update import LARGE, ClipGroup, Rule, Settings, State, UpdateGroup, collect
from curvestep.tensors.distributed import replicated, whole
from curvestep.tensors.kernel import Array, Units, View, one_unit_each, safe_norms, view_of
from curvestep.tensors.vectors import global_norm, read, widest_dtype


class PerUnit:
    """Norms and factors of the units of a group, those of one tensor after those of the other.

    Attributes:
        norms: Norm of each unit of the gradient.
        weights: Norm of each unit of the parameters, zero for a rule that does not ask for them.
        factors: Factor on each unit of the gradient.
        norm: Norm of them all.
        shapes: For each tensor the shape in which its factors are multiplied.
        units: What our kernel clips while it updates, if it does.
    """

    units: Units | None = None

    def __init__(
        self, norms: Array, weights: FloatOrArray, norm: float, shapes: list[tuple[int, ...]]
    ) -> None:
        self.norms = norms
        self.weights = weights
        self.norm = norm
        self.shapes = shapes
        self.factors = np.ones_like(norms)

    def clip(self, thresholds: FloatOrArray) -> None:
        """Fix the factors, by a threshold for each norm."""
        self.factors[:] = 1.0
        np.divide(thresholds, self.norms, out=self.factors, where=self.norms > thresholds)

    def clip_summary(self) -> tuple[float, float]:
        """The smallest factor, and the share of units that are clipped."""
        if not len(self.factors):
            return 1.0, 0.0
        return float(self.factors.min()), float((self.factors < 1).mean())

    def clipped_norm(self) -> float:
        """The norm of all units after clipping."""
        with np.errstate(invalid="ignore"):  # zero times an infinite norm
            return float(np.linalg.norm(self.factors * self.norms))

    def factor_of_each(self, grads: list[Tensor]) -> list[Tensor]:
        """Factor of each gradient: one number, or one for each of its units."""
        all_factors = torch.from_numpy(self.factors)
        by_device: dict[torch.device, Tensor] = {}
        factors: list[Tensor] = []
        start = 0
        for grad, shape in zip(grads, self.shapes, strict=True):
            place = grad.device
            if place not in by_device:  # the host need not wait for the copy
                by_device[place] = all_factors.to(place, widest_dtype(place), non_blocking=True)
            end = start + math.prod(shape)
            factors.append(replicated(by_device[place][start:end].view(shape), grad))
            start = end
        return factors

    def scaled(self, grads: list[Tensor]) -> list[Tensor]:
        """A copy of the gradients with their factors in it, of the same dtypes."""
        pairs = zip(grads, self.factor_of_each(grads), strict=True)
        return [(grad * factor).to(grad.dtype) for grad, factor in pairs]


class PerUnitInKernel(PerUnit):
    """Units that our kernel clips while it updates them: the factors are known after the update.

    The weights of a unit are still in the cache when it is updated, so that clipping by them costs no pass
    over memory.
    """

    def __init__(self, units: Units, weights: FloatOrArray, norm: float) -> None:
        super().__init__(units.norms, weights, norm, [])
        self.units = units
        self.factors = units.factors
        self._units = units

    def clip(self, thresholds: FloatOrArray) -> None:
        """Leave the factors to the update."""
        self._units.bounds[:] = thresholds

    def clip_summary(self) -> tuple[float, float]:
        """The smallest factor, and the share of units that were clipped."""
        return self._units.clipped


def collect_tensors(
    param_groups: list[Settings], state: State, rule_of: Callable[[Settings], Rule]
) -> list[UpdateGroup]:
    """The parameters that have a gradient, each to be clipped by itself at a number.

    Those of a group stay together where our kernel takes all of them in one call, with the same bits.
    """
    joined = collect(param_groups, state, rule_of, "group")
    if not all([_are_clipped_by_kernel(group) for group in joined]):
        return collect(param_groups, state, rule_of, "tensor")
    for group in joined:
        group.clips_tensors = True
    return joined


def _are_clipped_by_kernel(group: UpdateGroup) -> bool:
    """Whether each parameter alone would go to our kernel, with a threshold that is a number."""
    settings = group.settings
    if group.view is None or group.clip_rule is not None or isinstance(group.rule.lr, Tensor):
        return False
    if settings["foreach"] is not None or settings["fused"]:
        return False
    return bool(group.buffers or group.rule.weight_decay) or max(group.view.sizes) <= LARGE


def measure_tensors(group: ClipGroup) -> float:
    """The norm of a group of which our kernel clips each tensor by itself; it keeps those of the tensors."""
    view = group.view
    assert view is not None  # only such tensors are joined
    units = Units(one_unit_each(view.length))
    np.sqrt(view.kernel.squares_of_tensors(view), out=units.norms)
    low, high = safe_norms(group.grads[0].dtype)
    for i in np.flatnonzero(~((low < units.norms) & (units.norms < high))):
        units.norms[i] = global_norm([group.grads[i]]).item()
    norm = math.hypot(*units.norms.tolist())
    group.per_unit = PerUnitInKernel(units, 0.0, norm)
    return norm


def measure_units(
    groups: Sequence[ClipGroup], extra: Sequence[Tensor] = ()
) -> tuple[list[float], list[float]]:
    """Norms of the units, where a rule clips them, kept in the groups; one wait for a device.

    Returns:
        The norm of all gradients, once for each group, and the numbers in ``extra``, read with them.
    """
    unread = list(extra)
    for group in groups:
        if group.clip_rule is None or not group.clips_units:
            unread.append(global_norm(group.grads))
            continue
        group.per_unit = _by_kernel(group, group.clip_rule)
        if group.per_unit is None:
            unread += _unit_norms(group, group.clip_rule)
    numbers = iter(read(unread))
    read_extra = [float(next(numbers)[0]) for _ in extra]
    norms: list[float] = []
    for group in groups:
        if group.clip_rule is None or not group.clips_units:
            norms.append(float(next(numbers)[0]))
            continue
        if group.per_unit is None:
            group.per_unit = _by_torch(group, group.clip_rule, numbers)
        norms.append(group.per_unit.norm)
    return [math.hypot(*norms)] * len(norms), read_extra


def _by_kernel(group: ClipGroup, rule: ClipRule) -> PerUnit | None:
    """The units as our kernel measures them; None where it cannot."""
    view = group.view or view_of(group.grads, group.params)
    if view is None:
        return None
    if rule.each == "tensor":
        starts = one_unit_each(view.length)
    elif view.starts[view.length] >= 0:
        starts = view.starts
    else:  # units lie between each other
        return None
    units = Units(starts, rule.of_weights)
    norm = math.sqrt(view.kernel.norms_of_units(view, starts, units.norms))
    # A unit whose squares vanish is too small to be clipped: only large ones need another way.
    if not norm < safe_norms(torch.float32)[1]:
        return None
    weights: FloatOrArray = 0.0
    is_clipped_there = group.view is not None
    if rule.each == "unit" and not (is_clipped_there and rule.of_weights):
        weights = _weights(view, units)
    if is_clipped_there:
        return PerUnitInKernel(units, weights, norm)
    counts = [after - before for before, after in zip(list(starts), list(starts)[1:], strict=False)]
    shapes: list[tuple[int, ...]] = []
    for grad, count in zip(group.grads, counts, strict=True):
        shapes.append((count, *[1] * (grad.dim() - 1)) if count > 1 else ())
    return PerUnit(units.norms, weights, norm, shapes)


def _weights(view: View, units: Units) -> Array:
    weights = np.empty_like(units.norms)
    view.kernel.norms_of_units(view, units.starts, weights, which=1)
    return weights


def _by_torch(group: ClipGroup, rule: ClipRule, numbers: Iterator[Array]) -> PerUnit:
    """The units whose norms were read; those of :func:`_unit_norms`, in its order."""
    norms = [next(numbers) for _ in group.grads]
    weights: FloatOrArray = 0.0
    shapes: list[tuple[int, ...]] = [() for _ in group.grads]
    if rule.each == "unit":
        weights = np.concatenate([next(numbers) for _ in group.params])
        shapes = [_units_shape(grad) for grad in group.grads]
    joined = np.concatenate(norms)
    norm = torch.linalg.vector_norm(torch.from_numpy(joined)).item()
    return PerUnit(joined, weights, norm, shapes)


def _unit_norms(group: ClipGroup, rule: ClipRule) -> list[Tensor]:
    """The norms of each gradient's units, and for a rule that clips units those of each parameter's."""
    if rule.each == "tensor":
        return [global_norm([grad]) for grad in group.grads]
    if any(grad.layout != torch.strided for grad in group.grads):
        raise ValueError(
            f"`{rule.name}` clips rows by the norm of their weights and takes no sparse gradients. Make the "
            "layer with sparse=False, or use another rule."
        )
    return [_norms_of_rows(t) for t in [*group.grads, *group.params]]


def _norms_of_rows(t: Tensor) -> Tensor:
    """Norm of each row of a matrix, of each filter of a convolution, or of a whole vector."""
    t = t.detach()
    if not _units_shape(t):
        return global_norm([t])
    dtype = t.dtype if t.is_complex() else widest_dtype(t.device)
    return whole(torch.linalg.vector_norm(t, dim=tuple(range(1, t.dim())), keepdim=True, dtype=dtype))


def _units_shape(t: Tensor) -> tuple[int, ...]:
    """The shape of the factors on a tensor: of a vector, or of no numbers, it is one unit."""
    if t.dim() <= 1 or t.numel() == 0:
        return ()
    return (len(t), *[1] * (t.dim() - 1))


class RuleMemories:
    """Memories of an optimizer's rules, by the number of a group and of what is clipped in it."""

    def __init__(self, saved: dict[str, Saved]) -> None:
        self._saved = saved
        self._memories: dict[str, RuleMemory] = {}

    def resolve_thresholds(
        self, groups: Sequence[ClipGroup], norms: Sequence[float], total: float
    ) -> list[Settings]:
        """The settings of each group, with a number in place of its rule; the norms are remembered."""
        with np.errstate(all="ignore"):  # a norm may be infinite where such steps are taken
            return self._resolve(groups, norms, total)

    def _resolve(self, groups: Sequence[ClipGroup], norms: Sequence[float], total: float) -> list[Settings]:
        resolved: list[Settings] = []
        for group, norm in zip(groups, norms, strict=True):
            rule = group.clip_rule
            if rule is None:
                resolved.append(group.settings)
                continue
            key = f"{group.number}.{group.index}"
            if group.per_unit is None:
                threshold = self._memory(key, rule).threshold(norm, total)
            else:
                self._clip_units(key, group, rule, group.per_unit, total)
                threshold = math.inf  # what is left to clip then is nothing
            resolved.append(group.settings | {"max_norm": threshold})
        return resolved

    def _clip_units(self, key: str, group: ClipGroup, rule: ClipRule, units: PerUnit, total: float) -> None:
        """Fix the factors of the units."""
        if not rule.start:
            thresholds, _ = rule.bound(Observation(units.norms, total, units.weights), ())
            units.clip(thresholds)
            return
        memory = self._memory(key, rule)
        everybody = group.settings["params"]
        if len(group.params) == len(everybody):
            units.clip(memory.thresholds(units.norms, total))
            return
        at = [i for i, p in enumerate(everybody) if p.grad is not None]
        norms = np.zeros(len(everybody))  # of those without a gradient, which is not remembered
        norms[at] = units.norms
        units.clip(memory.thresholds(norms, total)[at])

    def _memory(self, key: str, rule: ClipRule) -> RuleMemory:
        memory = self._memories.get(key)
        if memory is None or memory.rule is not rule:
            memory = RuleMemory(rule, self._saved_of(key, rule))
            self._memories[key] = memory
        return memory

    def _saved_of(self, key: str, rule: ClipRule) -> Saved:
        """Memory of the rule so far; a new rule starts afresh."""
        saved = self.read().get(key)
        if saved is None or saved["rule"] != rule.as_plain():
            return {"rule": rule.as_plain(), "state": list(rule.start), "norms": []}
        return saved

    def read(self) -> dict[str, Saved]:
        """All that is remembered, for a checkpoint."""
        return self._saved | {key: memory.read() for key, memory in self._memories.items()}
