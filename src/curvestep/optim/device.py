"""A step where numbers stay on a device: every one is a tensor, and none is read unless it has to be.

So are the numbers of a step that torch.compile traces and of one through which gradients flow. What the host
decides by an ``if`` is decided here by a device scalar that is 1 or 0.
"""
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# torch names its functions for lists of tensors with an underscore.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import gt, truediv
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from curvestep.optim._update import Bundle, Number, Part, along, apply_pieces, joined, parts_of, update
from curvestep.optim.counters import FEWEST_NORMS, RECENT_STEPS, HostCounters, Limit
from curvestep.optim.policy import (
    Decision,
    Group,
    Policy,
    counted_pieces,
    may_be_pretended,
    measure_pieces,
    nonfinite_gradient,
    unscale_pieces,
)
from curvestep.vectors import global_norm, on_one_device, widest_dtype

if TYPE_CHECKING:
    from curvestep.optim.record import StepRecord
    from curvestep.optim.scaled import ScaledOptimizer

# Raises where a graph is recorded of a step that does not promise to be capturable.
_check_capture: Callable[[Optimizer], None] = getattr(
    Optimizer, "_accelerator_graph_capture_health_check", Optimizer._cuda_graph_capture_health_check
)


class DeviceCounters:
    """Counters of steps whose numbers are device scalars, changed in place.

    Args:
        start: What was counted so far.
        device: Where the numbers are.
    """

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
            skipped=int(skipped), recent=_in_order(recent), norms=_in_order(norms),
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


def _in_order(ring: list[float]) -> list[float]:
    """The values of a ring, oldest first."""
    *values, count = ring
    oldest = int(count) % RECENT_STEPS
    return [value for value in values[oldest:] + values[:oldest] if not math.isnan(value)]


def device_norms(
    decisions: Sequence[Decision], norm_scope: str, norm_of: Callable[[list[Tensor]], Tensor] = global_norm
) -> list[Tensor]:
    """One norm for each decision, where its gradients are; the same for all if the scope is global."""
    if measure_pieces(decisions):
        norms = [torch.as_tensor(d.pieces.norm) if d.pieces else norm_of(d.grads) for d in decisions]
        return [joint_norm_on_device(norms, "tensor")] * len(norms) if norm_scope == "global" else norms
    if norm_scope == "global":
        return [norm_of([grad for decision in decisions for grad in decision.grads])] * len(decisions)
    return [norm_of(decision.grads) for decision in decisions]


def joint_norm_on_device(norms: list[Tensor], norm_scope: str) -> Tensor:
    """Norm of the whole gradient, from the norms of what is clipped alone."""
    if norm_scope == "global" or len(norms) == 1:
        return norms[0].detach()
    return torch.linalg.vector_norm(torch.stack(on_one_device(norms)))


def read_norms(norms: list[Tensor]) -> list[float]:
    """The norms as floats: one wait for the device."""
    return torch.stack(on_one_device(norms)).tolist()


def counts_on_device(optimizer: Optimizer, norm: Tensor) -> Tensor:
    """1 if a step with this norm counts, 0 if it only creates the state."""
    return norm != 0 if may_be_pretended(optimizer) else torch.ones_like(norm)


def step_on_device(
    optimizer: ScaledOptimizer,
    bundles: list[Bundle],
    policy: Policy,
    record: StepRecord,
) -> None:
    """Take the step that ``ScaledOptimizer`` takes on the host, in the same order."""
    options, scope = optimizer.defaults, policy.norm_scope
    norm_of = _differentiable_norm if options["differentiable"] else global_norm
    norms = device_norms(bundles, scope, norm_of)
    _check_devices(optimizer, norms)
    unscale, overflow = _numbers_of_scaler(optimizer)
    norms = [_product(norm, unscale) for norm in norms]
    if unscale is not None:
        unscale_pieces(bundles, unscale)
    norm = joint_norm_on_device(norms, scope)
    counters = record.on_device(norm.device)
    counts = counts_on_device(optimizer, norm)
    flags = _skip_flags(policy, norms, norm, overflow, counters)
    skip = torch.stack(flags).any().to(torch.float32) if flags else None
    if skip is not None and _has_to_know(optimizer, bundles):
        if _known_to_skip(policy, flags, overflow, optimizer):
            counters.count(norm, [torch.ones_like(norm)], [norm < 0], torch.ones_like(norm), counts)
            return
        skip = None
    keep = counts > 0 if skip is None else (counts > 0) & (skip == 0)
    bounded = partial(record.rules.bounded, bundles, total=norm, keep=keep, groups=optimizer.param_groups)
    if options.get("clip") == "momentum":
        parts = [_averaged_(unscale, skip, parts_of(b, optimizer.state), b.group) for b in bundles]
        norms, unscale = device_norms(list(map(joined, parts)), scope, norm_of), None
        groups = bounded(norms)
    else:
        groups = bounded(norms)
        apply_pieces(bundles)
        parts = [parts_of(bundle, optimizer.state) for bundle in bundles]
    coefficients = list(map(optimizer.coefficient, norms, groups))
    for of_bundle, coefficient in zip(parts, coefficients, strict=True):
        for part in of_bundle:
            update_on_device(part, _product(coefficient, unscale), skip)
    relative = list(map(truediv, coefficients, map(optimizer.coefficient_at_zero, groups)))
    fired = list(map(gt, norms, optimizer.thresholds(groups)))
    relative, fired = counted_pieces(bundles, relative, fired, torch.as_tensor)
    counters.count(norm, relative, fired, torch.zeros_like(norm) if skip is None else skip, counts)


def _differentiable_norm(tensors: list[Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t) for t in tensors]))


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


def _numbers_of_scaler(optimizer: Optimizer) -> tuple[Tensor | None, Tensor | None]:
    """A GradScaler's part in the step: 1 over its scale, and whether a gradient overflowed."""
    scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    overflow: Tensor | None = getattr(optimizer, "found_inf", None)
    return None if scale is None else 1 / scale, overflow


def _product(number: Tensor, factor: Tensor | None) -> Tensor:
    return number if factor is None else number * factor.to(number.device)


def _skip_flags(
    policy: Policy, norms: list[Tensor], norm: Tensor, overflow: Tensor | None, counters: DeviceCounters
) -> list[Tensor]:
    """Reasons to leave out the step, as far as they are looked for: gradients that are not finite first."""
    flags: list[Tensor] = []
    if policy.nonfinite != "propagate":
        flags.append(~torch.stack(on_one_device(norms)).isfinite().all())
    if policy.limit.number < math.inf:
        flags.append(counters.exceeds(policy.limit, norm))
    if overflow is not None:
        flags.append(overflow.view(()) > 0)
    return [flag.to(norm.device) for flag in flags]


def _has_to_know(optimizer: Optimizer, bundles: list[Bundle]) -> bool:
    """Whether the host has to know if the step is left out, and so to wait."""
    if optimizer.defaults["nonfinite"] == "raise" or optimizer.defaults["differentiable"]:
        return True
    # The first gradient that a buffer sees is not damped, so it has to be known whether it was seen.
    return any(b.group.get("dampening") and None in chain(*b.buffers) for b in bundles)


def _known_to_skip(
    policy: Policy, flags: list[Tensor], overflow: Tensor | None, optimizer: Optimizer
) -> bool:
    """Whether the step is left out, read from the device; raises where that is wanted."""
    found: list[bool] = torch.stack(flags).tolist()  # the one wait of such a step
    overflowed = overflow is not None and found[-1]
    if policy.nonfinite == "raise" and found[0] and not overflowed:
        raise FloatingPointError(nonfinite_gradient(optimizer.param_groups))
    return any(found)


def update_on_device(part: Part, scale: Tensor, skip: Tensor | None) -> None:
    """Update a part with the gradient times ``scale``; where ``skip`` is 1, nothing changes."""
    device = part.params[0].device
    part = replace(part, rule=part.rule.with_lr(_lr_on(device, part.rule.lr)))
    if part.path == "kernel" or (device.type == "cpu" and not scale.is_cpu):  # which waits for the device
        if skip is None or skip.item() == 0:
            update(part, scale.item())
        return
    scale, skip = scale.to(device), None if skip is None else skip.to(device)
    if part.path == "fused":  # only torch's kernel can leave the decision on the device by itself
        part.rule.by_fused_on_device(part, scale, skip)
    elif skip is None:
        _by_functions(part, scale)
    else:
        changed = [*part.params, *chain(*part.buffers)]
        before = [t.clone() for t in changed]
        _by_functions(part, scale)
        _restore_(changed, before, skip)
    if skip is not None and part.steps:
        # As a list: torch.compile loses what is taken from a float64 scalar by itself.
        torch._foreach_sub_(part.steps, [skip] * len(part.steps))


def _by_functions(part: Part, scale: Tensor) -> None:
    if part.path == "foreach":
        part.rule.by_foreach(part, scale)
    else:
        part.rule.by_loop(part, scale)


def _lr_on(device: torch.device, lr: Number) -> Number:
    """The learning rate where the parameters are; those on CPU have to wait for it."""
    if not isinstance(lr, Tensor) or lr.is_cpu:
        return lr
    return lr.item() if device.type == "cpu" else lr.to(device)


def _averaged_(unscale: Tensor | None, skip: Tensor | None, parts: list[Part], group: Group) -> list[Part]:
    """Take the gradients into the momentum buffers, unless ``skip`` is 1, and go along the average."""
    averaged: list[Part] = []
    for part in parts:
        buffers = list(chain(*part.buffers))
        before = list(map(torch.clone, buffers))
        scale = 1.0 if unscale is None else unscale.to(part.params[0].device)
        averaged.append(along(part, *part.rule.averaged_(part, scale), group))
        if skip is not None:
            _restore_(buffers, before, skip)
    return averaged


def _restore_(tensors: list[Tensor], before: list[Tensor], skip: Tensor) -> None:
    """Put back what stood in ``tensors`` if the device scalar ``skip`` is 1; nothing is read."""
    for t, old in zip(tensors, before, strict=True):
        t.copy_(torch.where(skip.to(t.device) > 0, old, t))
