"""A step where numbers stay on a device: every one is a tensor, and none is read unless it has to be.

What the host decides by an ``if`` is decided here by a device scalar that is 1 or 0.
"""
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch names its functions for lists of tensors with an underscore, and gives vector_norm and tolist no type.

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from operator import gt
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from curvestep.clip_rules import Quantity, in_order
from curvestep.optim._update import Bundle, Number, Part, along, is_new, tell_autograd, update
from curvestep.optim.counters import FEWEST_NORMS, RECENT_STEPS, HostCounters, Limit
from curvestep.optim.policy import (
    Decision,
    Group,
    Policy,
    Step,
    counted_pieces,
    may_be_pretended,
    measure_pieces,
    nonfinite_gradient,
    unscale_pieces,
)
from curvestep.tensors.vectors import global_norm, joint, on_one_device, widest_dtype

if TYPE_CHECKING:
    from curvestep.optim.record import StepRecord
    from curvestep.optim.scaled import ScaledOptimizer

# Raises where a graph is recorded of a step that does not promise to be capturable.
_check_capture: Callable[[Optimizer], None] = getattr(
    Optimizer, "_accelerator_graph_capture_health_check", Optimizer._cuda_graph_capture_health_check
)


class DeviceCounters:
    """Counters of steps whose numbers are device scalars, changed in place."""

    def __init__(self, start: HostCounters, device: torch.device) -> None:
        self._start = start  # with what is not counted on a device
        totals = [start.grad_norm, start.coefficient, float(start.steps), start.clipped, float(start.skipped)]
        rows = [totals, _ring(start.recent), _ring(start.norms)]
        table = [row + [math.nan] * (RECENT_STEPS + 1 - len(row)) for row in rows]
        dtype = widest_dtype(device)
        # From the host, which need not be waited for.
        self._table = torch.tensor(table, dtype=dtype, device="cpu").to(device, non_blocking=True)

    def count(
        self, norm: Tensor, coefficients: list[Tensor], fired: list[Tensor], skip: Tensor, counts: Tensor
    ) -> None:
        """Count a step, with a coefficient for each clipping decision and whether it fired.

        ``skip`` is 1 if the step was left out, ``counts`` 0 if it is not to be counted at all.
        """
        coefficient = torch.stack([c.detach().to(self._table) for c in coefficients]).min()
        share = torch.stack([f.to(self._table) for f in fired]).mean()
        numbers = [norm.detach(), counts * (1 - skip), counts * skip]
        norm, taken, skipped = (number.to(self._table) for number in numbers)
        totals, rings = self._table[0], self._table[1:]
        _push_(rings, torch.stack([share, norm]), torch.stack([taken, counts * norm.isfinite()]))
        totals[0].copy_(torch.where(taken + skipped > 0, norm, totals[0]))
        totals[1].copy_(torch.where(taken > 0, coefficient, totals[1]))
        totals[2:5].add_(torch.stack([taken, taken * share, skipped]))

    def exceeds(self, limit: Limit, norm: Tensor) -> Tensor:
        """Whether the norm is above the limit; never while those before are few."""
        if limit.unit == "norm":
            return norm > limit.number
        norms, count = self._table[2, :-1], self._table[2, -1]
        num_kept = count.clamp(1, RECENT_STEPS)
        bound = _deviations_above if limit.unit == "sigma" else _multiple_of_median
        return (count >= FEWEST_NORMS) & (norm.to(norms) > bound(norms, num_kept, limit.number))

    def read(self) -> HostCounters:
        """The counters as plain numbers: one wait for the device."""
        totals, recent, norms = self._table.tolist()
        norm, coefficient, steps, clipped, skipped, *_ = totals
        return replace(
            self._start, grad_norm=norm, coefficient=coefficient, steps=int(steps), clipped=clipped,
            skipped=int(skipped), recent=in_order(*recent), norms=in_order(*norms),
        )  # fmt: skip


def _multiple_of_median(norms: Tensor, count: Tensor, multiple: float) -> Tensor:
    middle = torch.stack([(count - 1) // 2, count // 2]).long()
    return multiple * norms.sort().values.index_select(0, middle).mean()  # NaN, no value yet, comes last


def _deviations_above(norms: Tensor, count: Tensor, sigmas: float) -> Tensor:
    mean = norms.nansum() / count
    return mean + sigmas * ((norms - mean).square().nansum() / count).sqrt()


def _ring(values: list[float]) -> list[float]:
    """The last values in a row that does not grow; its last entry is the number of values so far."""
    return [*values, *[math.nan] * (RECENT_STEPS - len(values)), float(len(values))]


def _push_(rings: Tensor, values: Tensor, keep: Tensor) -> None:
    """Add a value to each ring in place of its oldest, if its ``keep`` is not zero."""
    counts = rings[:, -1:]
    at = (counts % RECENT_STEPS).long()
    kept = torch.where(keep.unsqueeze(1) > 0, values.unsqueeze(1), rings.gather(1, at))
    rings.scatter_(1, at, kept)
    counts.add_(keep.unsqueeze(1))


def device_norms(decisions: Sequence[Decision], norm_scope: str) -> list[Tensor]:
    """One norm for each decision, where its gradients are; the same for all if the scope is global."""
    if measure_pieces(decisions):  # whose scope is global
        norms = [torch.as_tensor(d.pieces.norm) if d.pieces else global_norm(d.grads) for d in decisions]
        return [joint(norms)] * len(norms)
    if norm_scope == "global":
        return [global_norm([grad for decision in decisions for grad in decision.grads])] * len(decisions)
    return [global_norm(decision.grads) for decision in decisions]


@dataclass
class DeviceStep(Step):
    """A step of which every number is a tensor: whether to leave it out, and how it is counted.

    Attributes:
        unscale: One over the scale of a GradScaler, None without one.
        skip: 1 if the step is left out, else 0.
        is_guarded: Whether ``skip`` may be 1.
    """

    norms: list[Tensor]  # of each decision; the scale of a GradScaler is taken out

    def __post_init__(self) -> None:
        scale: Tensor | None = getattr(self.optimizer, "grad_scale", None)
        self.unscale: Tensor | None = None
        if scale is not None:
            self.unscale = 1 / scale
            unscale_pieces(self.decisions, self.unscale)
        self.norms = list(map(self.unscaled, self.norms))
        self.norm = joint(self.norms[:1] if self.policy.norm_scope == "global" else self.norms).detach()
        self._counters = self.record.on_device(self.norm.device)
        self._counts = torch.ones_like(self.norm)
        if may_be_pretended(self.optimizer):
            self._counts = self.norm != 0
        self._reasons = self._reasons_to_skip()
        self.skip = torch.stack(list(self._reasons.values())).any().to(torch.float32)
        self.is_guarded = len(self._reasons) > 1

    def _reasons_to_skip(self) -> dict[str, Tensor]:
        """Reasons to leave out the step, as far as they are looked for, each true or false."""
        reasons = {"none": self.norm < 0}
        overflow: Tensor | None = getattr(self.optimizer, "found_inf", None)
        if self.policy.nonfinite != "propagate":
            reasons["nonfinite"] = ~torch.stack(on_one_device(self.norms)).isfinite().all()
        if self.policy.limit.number < math.inf:
            reasons["above"] = self._counters.exceeds(self.policy.limit, self.norm)
        if overflow is not None:
            reasons["overflow"] = overflow.view(()) > 0
        return {reason: flag.to(self.norm.device) for reason, flag in reasons.items()}

    def unscaled(self, number: Tensor) -> Tensor:
        """The number times one over the scale of a GradScaler, if there is one."""
        return number if self.unscale is None else number * self.unscale.to(number.device)

    def is_left_out(self) -> bool:
        """Whether the step is left out, read from the device, and then counted so; may raise."""
        names, flags = self._reasons.keys(), torch.stack(list(self._reasons.values()))
        found = dict(zip(names, flags.tolist(), strict=True))  # the one wait of such a step
        is_ours = found.get("nonfinite") and not found.get("overflow")
        if is_ours and self.policy.nonfinite == "raise":
            raise FloatingPointError(nonfinite_gradient(self.optimizer.param_groups))
        self.is_guarded = False
        if any(found.values()):
            self._counters.count(
                self.norm, [torch.ones_like(self.norm)], [self.norm < 0], self.skip, self._counts
            )
        return any(found.values())

    def bounded(self) -> list[Group]:
        """The group of each decision, with a number in place of its rule."""
        keep = (self._counts > 0) & (self.skip == 0)
        groups = self.optimizer.param_groups
        return self.record.rules.bounded(self.decisions, self.norms, self.norm, groups, keep)

    def averaged_(self, parts: list[Part], group: Group) -> list[Part]:
        """Take the gradients into the momentum buffers, unless left out, and go along the average."""
        averaged: list[Part] = []
        for part in parts:
            scale = 1.0 if self.unscale is None else self.unscale.to(part.params[0].device)
            with self._unless_skipped(list(chain(*part.buffers))):
                averaged.append(along(part, *part.rule.averaged_(part, scale), group))
        return averaged

    def average(self, decisions: Sequence[Decision]) -> None:
        """Clip by the norms of averages, in which the scale is no more."""
        self.norms = device_norms(decisions, self.policy.norm_scope)
        self.unscale = None

    def update(self, part: Part, coefficient: Tensor) -> None:
        """Update a part with the gradient times ``coefficient``; where ``skip`` is 1, nothing changes."""
        device, scale = part.params[0].device, self.unscaled(coefficient)
        part = replace(part, rule=replace(part.rule, lr=_lr_on(device, part.rule.lr)))
        if part.path == "kernel" or (device.type == "cpu" and not scale.is_cpu):  # which waits for the device
            if not self.is_guarded or self.skip.item() == 0:
                update(part, scale.item())
            return
        scale, skip = scale.to(device), self.skip.to(device)
        if part.path == "fused":  # only torch's kernel can leave the decision on the device by itself
            part.rule.by_fused(part, scale, skip)
            tell_autograd(part.params)
        else:
            by_functions = part.rule.by_foreach if part.path == "foreach" else part.rule.by_loop
            with self._unless_skipped([*part.params, *chain(*part.buffers)]):
                by_functions(part, scale)
        if self.is_guarded and part.steps:
            torch._foreach_sub_(part.steps, [skip] * len(part.steps))

    @contextmanager
    def _unless_skipped(self, tensors: list[Tensor]) -> Generator[None]:
        """A block after which the tensors are as before if the step is left out; nothing is read."""
        before = list(map(torch.clone, tensors)) if self.is_guarded else []
        yield
        for t, old in zip(tensors, before, strict=False):  # nothing was kept where no step is left out
            t.copy_(torch.where(self.skip.to(t.device) > 0, old, t))

    def look_for_spike(self, coefficients: list[Tensor]) -> None:
        """Look for none: the norm would have to be read."""

    def count(self, coefficients: list[Tensor], bounds: list[Quantity]) -> None:
        """Count the step, with the factor on each decision and its threshold."""
        fired = list(map(gt, self.norms, bounds))
        coefficients, fired = counted_pieces(self.decisions, coefficients, fired, torch.as_tensor)
        self._counters.count(self.norm, coefficients, fired, self.skip, self._counts)


def step_on_device(
    optimizer: ScaledOptimizer, bundles: list[Bundle], policy: Policy, record: StepRecord
) -> None:
    """Take a step, unless the host has to know whether to leave it out and that is so."""
    norms = device_norms(bundles, policy.norm_scope)
    _check_devices(optimizer, norms)
    step = DeviceStep(optimizer, policy, record, bundles, norms)
    if step.is_guarded and _has_to_know(optimizer, bundles) and step.is_left_out():
        return
    optimizer._take(bundles, step)


def _check_devices(optimizer: Optimizer, norms: list[Tensor]) -> None:
    """Raise if a graph is recorded that must not be, or a number is needed that does not exist."""
    kinds = {norm.device.type for norm in norms}
    if kinds != {"cpu"}:
        _check_capture(optimizer)
    options = optimizer.defaults
    if "meta" in kinds and (options["fused"] or options["nonfinite"] == "raise"):
        needs = "`fused=True`" if options["fused"] else '`nonfinite="raise"`'
        raise RuntimeError(
            f"{needs} requires all the params to be floating point Tensors with values, and some are on "
            "the `meta` device. Give them memory first, by `model.to_empty(device=...)`."
        )


def _has_to_know(optimizer: Optimizer, bundles: list[Bundle]) -> bool:
    """Whether the host has to know if the step is left out, and so to wait."""
    if optimizer.defaults["nonfinite"] == "raise":
        return True
    # The first gradient that a buffer sees is not damped, so it has to be known whether it was seen.
    damped = [bundle for bundle in bundles if bundle.group.get("dampening")]
    return any(is_new(p, optimizer.state, bundle.rule) for bundle in damped for p in bundle.params)


def _lr_on(device: torch.device, lr: Number) -> Number:
    """The learning rate where the parameters are; those on CPU have to wait for it."""
    if not isinstance(lr, Tensor) or lr.is_cpu:
        return lr
    return lr.item() if device.type == "cpu" else lr.to(device)
