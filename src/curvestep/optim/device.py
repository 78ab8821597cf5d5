"""A step on a device whose numbers are tensors that are not read, unless the host has to know one.

Without a wait: a fixed threshold, a step left out because a GradScaler found an overflow or the norm is not
finite, and the counters.
"""
# pyright: reportPrivateUsage=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch names its check of a recorded graph with an underscore, and gives tolist no type.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from curvestep.optim.rule_thresholds import measure_units
from curvestep.optim.update import ClipGroup, FloatOrTensor, UpdateGroup
from curvestep.tensors.vectors import global_norm, joint, on_one_device, read, widest_dtype

# Raises where a graph is recorded of a step that does not promise to be capturable.
_check_capture: Callable[[Optimizer], None] = getattr(
    Optimizer, "_accelerator_graph_capture_health_check", Optimizer._cuda_graph_capture_health_check
)


class DeviceCounters:
    """Counters of steps whose numbers are device scalars: a table that changes in place.

    The first row has the totals, the others are rings of the last shares and norms, ``length`` of them.
    """

    def __init__(self, start: Mapping[str, Any], device: torch.device, length: int) -> None:
        totals = [start[name] for name in ("grad_norm", "coefficient", "steps", "clipped", "skipped")]
        totals += [math.nan] * (length + 1 - len(totals))
        table = torch.tensor(
            [totals, _ring(start["recent"], length), _ring(start["norms"], length)],
            dtype=widest_dtype(device),
            device="cpu",
        )
        self._table = table.to(device, non_blocking=True)  # from the host, which need not be waited for

    def count(
        self,
        norm: Tensor,
        coefficients: list[FloatOrTensor],
        reached: list[FloatOrTensor],
        skip: Tensor | None,
    ) -> None:
        """Count a step, by the factor on each clip group and whether its threshold was reached."""
        totals = self._table[0]
        rings = self._table[1:]
        norm = norm.to(totals)
        coefficient = torch.stack([torch.as_tensor(c).to(totals) for c in coefficients]).min()
        share = torch.stack([torch.as_tensor(r).to(totals) for r in reached]).mean()
        skipped = torch.zeros_like(norm) if skip is None else skip.to(totals)
        taken = 1 - skipped
        _push_(rings, torch.stack([share, norm]), torch.stack([taken, norm.isfinite().to(totals)]))
        totals[0].copy_(norm)
        totals[1].copy_(torch.where(taken > 0, coefficient, totals[1]))
        totals[2:5].add_(torch.stack([taken, torch.where(taken > 0, share, 0.0), skipped]))

    def read(self) -> dict[str, Any]:
        """The counters as plain numbers: one wait for the device."""
        totals, recent, norms = self._table.tolist()
        norm, coefficient, steps, clipped, skipped, *_ = totals
        return {
            "grad_norm": norm, "coefficient": coefficient, "steps": int(steps), "clipped": clipped,
            "skipped": int(skipped), "recent": _in_order(recent), "norms": _in_order(norms),
        }  # fmt: skip


def _ring(values: list[float], length: int) -> list[float]:
    """The last values in a row that does not grow; its last entry is the number of values so far."""
    return [*values, *[math.nan] * (length - len(values)), float(len(values))]


def _push_(rings: Tensor, values: Tensor, keep: Tensor) -> None:
    """Add a value to each ring in place of its oldest, if its ``keep`` is not zero."""
    counts = rings[:, -1:]
    at = (counts % (rings.shape[1] - 1)).long()
    kept = torch.where(keep.unsqueeze(1) > 0, values.unsqueeze(1), rings.gather(1, at))
    rings.scatter_(1, at, kept)
    counts.add_(keep.unsqueeze(1))


def _in_order(ring: list[float]) -> list[float]:
    """The values of a ring, oldest first."""
    values = ring[:-1]
    oldest = int(ring[-1]) % len(values)
    return [value for value in values[oldest:] + values[:oldest] if not math.isnan(value)]


def has_to_read(groups: Sequence[ClipGroup], *, is_guarded: bool) -> bool:
    """Whether the host has to know a number: for a rule, a tensor of its own, or the first damped gradient.

    ``is_guarded`` says that the step may be left out.
    """
    for group in groups:
        if group.clip_rule is not None or any(is_on_host(p) for p in group.params):
            return True
        # The first gradient that a buffer sees is not damped, so it has to be known whether it was seen.
        if is_guarded and isinstance(group, UpdateGroup) and group.settings.get("dampening"):
            if group.makes_buffers:
                return True
    return False


def is_on_host(p: Tensor) -> bool:
    """Whether a parameter is updated on the host, which has to know the factor."""
    return p.is_cpu


def check(optimizer: Optimizer, groups: Sequence[ClipGroup], *, has_to_read: bool) -> None:
    """Raise if a graph is recorded that must not be, or a number is needed that does not exist."""
    kinds = {grad.device.type for group in groups for grad in group.grads}
    if kinds != {"cpu"}:
        _check_capture(optimizer)
    is_fused = optimizer.defaults.get("fused")
    if "meta" in kinds and (is_fused or has_to_read):
        needs = "`fused=True`" if is_fused else 'A step that reads its norm, as with `nonfinite="raise"`,'
        raise RuntimeError(
            f"{needs} requires all the params to be floating point Tensors with values, and some are on "
            "the `meta` device. Give them memory first, by `model.to_empty(device=...)`."
        )


def norms_of(groups: Sequence[ClipGroup], norm_scope: str) -> list[Tensor]:
    """One norm for each group, on one device; the same for all if the scope is global."""
    if norm_scope == "global":
        together = [grad for group in groups for grad in group.grads]
        return [global_norm(together)] * len(groups)
    return on_one_device([global_norm(group.grads) for group in groups])


def measure(
    groups: Sequence[ClipGroup], norm_scope: str, scale: Tensor | None
) -> tuple[list[FloatOrTensor], Tensor, FloatOrTensor]:
    """Norm of each group, norm of all, and one over the scale of a GradScaler, which is taken out of both."""
    norms = norms_of(groups, norm_scope)
    unscale: FloatOrTensor = 1.0
    if scale is not None:
        unscale = 1 / scale.to(norms[0].device)
        norms = [norm * unscale for norm in norms]
    norm = norms[0] if norm_scope == "global" else joint(norms)
    return [*norms], norm, unscale


def skip_flag(norms: Sequence[FloatOrTensor], nonfinite: str, overflow: Tensor | None) -> Tensor | None:
    """1.0 if a step on a device is left out, else 0.0; None if it surely is taken."""
    flags: list[Tensor] = []
    if nonfinite != "propagate":
        flags.append(~torch.stack([torch.as_tensor(norm) for norm in norms]).isfinite().all())
    if overflow is not None:
        flags.append(overflow.view(()) > 0)
    if not flags:
        return None
    return torch.stack(on_one_device(flags)).any().to(torch.float32)


def read_norms(
    groups: Sequence[ClipGroup], norm_scope: str, scale: Tensor | None, overflow: Tensor | None
) -> tuple[list[float], float, bool]:
    """Norm of each group, one over the scale of a GradScaler, and whether it found an overflow: one wait."""
    extra = [number for number in (scale, overflow) if number is not None]
    if any(group.clips_units for group in groups):
        norms, numbers = measure_units(groups, extra)
    else:
        norms_there = norms_of(groups, norm_scope)
        values = [float(value[0]) for value in read([*extra, *norms_there])]
        numbers = values[: len(extra)]
        norms = values[len(extra) :]
    unscale = 1.0 if scale is None else 1 / numbers.pop(0)
    return norms, unscale, overflow is not None and numbers.pop(0) > 0
