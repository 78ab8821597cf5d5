"""From parameter groups to lists of tensors that one call can update."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from curvestep._kernel import DTYPES, View, fills_memory, native
from curvestep._torch import fused_sgd
from curvestep.distributed import is_sharded
from curvestep.optim._update import Bundle, Rule
from curvestep.vectors import homogeneous_cpu

_dtype, _grad = attrgetter("dtype"), attrgetter("grad")
_BUFFER = "momentum_buffer"  # the name that torch.optim.SGD uses, so that state dicts can be exchanged


@dataclass
class Unit:
    """The parameters that share one clipping decision."""

    group: dict[str, Any]
    params: list[Tensor]
    grads: list[Tensor]
    plain: bool = False  # whether all gradients are dense, real CPU tensors of one dtype
    buffers: list[Tensor] = field(default_factory=list)  # momentum, together with the view
    view: View | None = None  # where gradients, parameters and buffers lie, if our kernel takes them all
    bundles: list[Bundle] = field(default_factory=list)

    def make_bundles(self, state: MutableMapping[Tensor, Any]) -> None:
        """Sort the tensors into bundles, with momentum buffers where the group has momentum."""
        group = self.group
        rule = Rule(
            lr=group["lr"], momentum=group["momentum"], dampening=group["dampening"],
            weight_decay=group["weight_decay"], nesterov=group["nesterov"], maximize=group["maximize"],
        )  # fmt: skip
        params, grads, kernel = self.params, self.grads, _kernel_of(group)
        if self.view is not None:
            self.bundles = [Bundle("native", rule, params, grads, self.buffers, params, self.view)]
            return
        if self.plain and kernel == "fused":
            buffers = _existing_buffers(params, state) if rule.momentum else []
            if _all_as_the_kernel_likes(params, grads, buffers):
                self.bundles = [Bundle(kernel, rule, params, grads, buffers, params)]
                return
        bundles: dict[tuple, Bundle] = {}
        for whole, g in zip(params, grads, strict=True):
            buffer, fresh = _buffer(state[whole], whole) if rule.momentum else (None, False)
            p, g, buffer = _local_and_real(whole, g, buffer)
            path = _path(p, g, buffer, kernel=kernel, by_loop=_uses_loop(group))
            # torch does not damp the first gradient that a buffer sees.
            undamped = fresh and rule.dampening != 0
            key = (path, p.dtype, p.device, undamped)
            if key not in bundles:
                bundles[key] = Bundle(path, rule.undamped() if undamped else rule)
            bundles[key].add(p, g, buffer, whole)
        self.bundles = list(bundles.values())


def collect(
    groups: list[dict[str, Any]], state: MutableMapping[Tensor, Any], *, per_tensor: bool
) -> list[Unit]:
    """The parameters that have a gradient, by clipping decision: a group each, or a tensor each."""
    units: list[Unit] = []
    for group in groups:
        params = list(group["params"])
        grads = list(map(_grad, params))
        if type(None) in set(map(type, grads)):
            params = [p for p, g in zip(params, grads, strict=True) if g is not None]
            grads = [g for g in grads if g is not None]
        if per_tensor:
            units += [_unit(group, [p], [g], state) for p, g in zip(params, grads, strict=True)]
        elif params:
            units.append(_unit(group, params, grads, state))
    return units


def _unit(
    group: dict[str, Any], params: list[Tensor], grads: list[Tensor], state: MutableMapping[Tensor, Any]
) -> Unit:
    kernel = native() if _kernel_of(group) == "native" else None
    if kernel is not None:
        buffers = _existing_buffers(params, state) if group["momentum"] else []
        # Only plain tensors, and every buffer there already.
        types = {*map(type, grads), *map(type, params), *map(type, buffers)}
        if types <= {Tensor, Parameter}:
            view = kernel.view(*filter(None, (grads, params, buffers)))
            if view is not None:
                return Unit(group, params, grads, True, buffers, view)
    return Unit(group, params, grads, homogeneous_cpu(grads))


def _existing_buffers(params: list[Tensor], state: MutableMapping[Tensor, Any]) -> list[Any]:
    """The momentum of each parameter, None where there is none yet."""
    if len(state) == len(params) and all(map(is_, state, params)):  # the same tensors in the same order,
        return [of_tensor.get(_BUFFER) for of_tensor in state.values()]  # and no hash to compute
    return [state[p].get(_BUFFER) for p in params]


def _buffer(state: dict[str, Any], p: Tensor) -> tuple[Tensor, bool]:
    buffer = state.get(_BUFFER)
    if buffer is not None:
        return buffer, False
    state[_BUFFER] = torch.zeros_like(p, memory_format=torch.preserve_format)
    return state[_BUFFER], True


def _local_and_real(p: Tensor, g: Any, buffer: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """The parts of sharded tensors that lie here, and complex numbers as pairs of real ones."""
    if is_sharded(p):
        if g.placements != p.placements:
            g = g.redistribute(p.device_mesh, p.placements)
        p, g = p.to_local(), g.to_local()
        buffer = None if buffer is None else buffer.to_local()
    if p.is_complex():
        p, g = torch.view_as_real(p), torch.view_as_real(g)
        buffer = None if buffer is None else torch.view_as_real(buffer)
    return p, g, buffer


def _path(p: Tensor, g: Tensor, buffer: Tensor | None, *, kernel: str | None, by_loop: bool) -> str:
    """The path that is right for one parameter, its gradient and buffer."""
    if by_loop or g.layout != torch.strided:
        return "loop"
    if kernel is None or not _kernel_is_right(p, g, buffer):
        return "foreach"
    if p.device.type == "cpu":
        return kernel
    return "fused" if fused_sgd() is not None else "foreach"


def _uses_loop(group: dict[str, Any]) -> bool:
    return group["differentiable"] or (group["foreach"] is False and not group["fused"])


def _kernel_of(group: dict[str, Any]) -> str | None:
    """The kernel that a group wants on CPU: "native" is ours, "fused" is torch's."""
    if group["fused"] is False or group["foreach"] or _uses_loop(group):
        return None
    if native() is not None and not group["fused"]:
        return "native"
    return "fused" if fused_sgd() is not None else None


def _all_as_the_kernel_likes(params: list[Tensor], grads: list[Tensor], buffers: list[Any]) -> bool:
    """:func:`_kernel_is_right` for many tensors in the common case: a quick yes, or ask one by one."""
    dtype, contiguous = grads[0].dtype, Tensor.is_contiguous
    return (
        dtype in DTYPES
        and all(map(contiguous, grads))
        and all(map(contiguous, params))
        and set(map(_dtype, params)) == {dtype}
        and not any(map(Tensor.is_neg, grads))
        and set(map(type, buffers)) <= {Tensor}  # not None, and nothing that torch must take apart first
        and set(map(_dtype, buffers)) <= {dtype}
        and all(map(contiguous, buffers))
    )


def _kernel_is_right(p: Tensor, g: Tensor, buffer: Tensor | None) -> bool:
    """A kernel walks memory: unequal strides give wrong values; on CPU there is none for half precision."""
    if g.dtype is not p.dtype or g.is_neg() or (p.dtype not in DTYPES and p.device.type == "cpu"):
        return False
    if p.is_contiguous() and g.is_contiguous() and (buffer is None or buffer.is_contiguous()):
        return True
    stride = p.stride()
    return g.stride() == stride and (buffer is None or buffer.stride() == stride) and fills_memory(p)
