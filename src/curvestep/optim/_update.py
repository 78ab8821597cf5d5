r"""One update of many parameters, with the factor on the gradient folded in.

All paths compute, for every parameter :math:`p` with gradient :math:`g` and buffer :math:`b`,

.. math::
    d = \pm c\,g + w\,p, \qquad b \leftarrow \mu b + (1-\delta)\,d, \qquad
    p \leftarrow p - \eta\,(b \text{ or } d + \mu b),

and none of them writes to :math:`g`. :func:`update_loop` is the formula; the others are faster.
"""
# pyright: reportPrivateImportUsage=false
# torch names its functions for lists of tensors with an underscore.

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from curvestep._kernel import DTYPES, View, is_non_overlapping_and_dense, native, same_layout
from curvestep.distributed import is_sharded

# Below this factor w/c no longer fits into the precision of the fused kernel.
_SMALLEST_FOLDED = 1e-6
# Elements a tensor, on average, from which plain descent is a matter of memory bandwidth alone.
_LARGE = 1 << 19
_BUFFER = "momentum_buffer"  # the name that torch.optim.SGD uses, so that state dicts can be exchanged

_grad, _shape = attrgetter("grad"), attrgetter("shape")
_dtype, _device, _layout = attrgetter("dtype"), attrgetter("device"), attrgetter("layout")


class Rule(NamedTuple):
    """The constants of an update, all but the factor on the gradient."""

    lr: Any  # float or one-element tensor
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False


@dataclass
class Bundle:
    """Parameters under one clipping decision, with their gradients; once sorted, what one call updates.

    After :func:`sort` everything is real and local (complex tensors are pairs of real numbers, sharded ones
    this rank's part) and of one dtype and device, and every parameter has a buffer if there is momentum.
    """

    group: dict[str, Any]
    rule: Rule
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    buffers: list[Any] = field(default_factory=list)  # empty without momentum, None where one is missing
    wholes: list[Tensor] = field(default_factory=list)  # the parameters that `params` are the local parts of
    view: View | None = None  # where gradients, parameters and buffers lie, if our kernel can walk them all
    alike: bool = False  # whether each gradient and buffer has dtype, device and strides of its parameter


def collect(groups: list[dict[str, Any]], state: Mapping[Tensor, Any], *, per_tensor: bool) -> list[Bundle]:
    """The parameters that have a gradient, by clipping decision: a group each, or a tensor each."""
    bundles: list[Bundle] = []
    for group in groups:
        params = list(group["params"])
        grads = list(map(_grad, params))
        if type(None) in set(map(type, grads)):
            params = [p for p, g in zip(params, grads, strict=True) if g is not None]
            grads = [g for g in grads if g is not None]
        rule = Rule(
            lr=group["lr"], momentum=group["momentum"], dampening=group["dampening"],
            weight_decay=group["weight_decay"], nesterov=group["nesterov"], maximize=group["maximize"],
        )  # fmt: skip
        pieces = [(params, grads)] if params else []
        if per_tensor:
            pieces = [([p], [g]) for p, g in zip(params, grads, strict=True)]
        for some, theirs in pieces:
            buffers = _existing_buffers(some, state) if rule.momentum else []
            view = _view(theirs, some, buffers)
            bundles.append(Bundle(group, rule, some, theirs, buffers, some, view, view is not None))
    return bundles


def sort(bundle: Bundle, state: MutableMapping[Tensor, Any]) -> list[Bundle]:
    """The bundle in parts that one call can update, each parameter with a buffer if there is momentum."""
    if bundle.alike or _kernel_accepts_all(bundle):
        bundle.alike = True
        return [bundle]
    parts: dict[tuple, Bundle] = {}
    for whole, g in zip(bundle.params, bundle.grads, strict=True):
        buffer, undamped = None, False
        if bundle.rule.momentum:
            buffer = state[whole].get(_BUFFER)
            if buffer is None:
                buffer = torch.zeros_like(whole, memory_format=torch.preserve_format)
                state[whole][_BUFFER] = buffer
                undamped = bundle.rule.dampening != 0  # as torch: not the first gradient that a buffer sees
            elif buffer.shape != whole.shape:
                raise ValueError(
                    f"A momentum buffer, {tuple(buffer.shape)}, does not have the shape of its parameter, "
                    f"{tuple(whole.shape)}. Load the state of the same model."
                )
        p, g, buffer = _local_and_real(whole, g, buffer)
        alike = _kernel_accepts(p, g, buffer)
        key = (p.dtype, p.device, g.layout, alike, undamped)
        if key not in parts:
            rule = bundle.rule._replace(dampening=0.0) if undamped else bundle.rule
            parts[key] = Bundle(bundle.group, rule, alike=alike)
        part = parts[key]
        part.params.append(p)
        part.grads.append(g)
        part.wholes.append(whole)
        if buffer is not None:
            part.buffers.append(buffer)
    for part in parts.values():
        part.view = _view(part.grads, part.params, part.buffers) if part.alike else None
    return list(parts.values())


def average_(bundle: Bundle, *, skip: Tensor | bool = False) -> Bundle:
    """Take the gradients into the momentum buffers; the result updates along the averaged direction.

    Where ``skip`` is 1, the buffers stay as they are.
    """
    rule = bundle.rule
    if not bundle.buffers:
        return bundle
    skip = _moved(skip, bundle.params[0].device)
    if not isinstance(skip, Tensor) and skip:
        return bundle
    before = [b.clone() for b in bundle.buffers] if isinstance(skip, Tensor) else []
    for g, buffer in zip(bundle.grads, bundle.buffers, strict=True):
        buffer.mul_(rule.momentum).add_(g, alpha=1 - rule.dampening)
    if isinstance(skip, Tensor):
        _restore_(bundle.buffers, before, skip)
    directions = bundle.buffers
    if rule.nesterov:
        directions = [torch.add(rule.momentum * b, g) for g, b in zip(bundle.grads, directions, strict=True)]
    view = _view(directions, bundle.params, []) if bundle.alike else None
    rule = rule._replace(momentum=0.0, dampening=0.0, nesterov=False)
    return replace(bundle, rule=rule, grads=directions, buffers=[], view=view)


def update(bundle: Bundle, scale: Any, *, skip: Tensor | bool = False) -> None:
    """Update a sorted ``bundle`` with the gradient times ``scale``.

    ``scale`` is a float, or on an accelerator a device scalar; reading it would synchronize. ``skip`` may
    then be one too: where it is 1, nothing changes.
    """
    device = bundle.params[0].device
    scale, skip = _moved(scale, device), _moved(skip, device)
    if not isinstance(skip, Tensor) and skip:
        return
    path = choose_path(bundle, scale)
    # Only torch's kernel can leave the decision on the device by itself.
    undoes = isinstance(skip, Tensor) and path != "fused"
    before = [t.clone() for t in (*bundle.params, *bundle.buffers)] if undoes else []
    if path == "kernel":
        _update_by_kernel(bundle, float(scale))
    elif path == "fused":
        _update_fused(bundle, scale, skip if isinstance(skip, Tensor) else None)
    elif path == "foreach":
        _update_foreach(bundle, scale)
    else:
        for i, (p, g) in enumerate(zip(bundle.params, bundle.grads, strict=True)):
            update_loop(p, g, bundle.buffers[i] if bundle.buffers else None, bundle.rule, scale)
    if undoes:
        _restore_((*bundle.params, *bundle.buffers), before, skip)


def choose_path(bundle: Bundle, scale: Any) -> str:
    """The fastest path that is right: our "kernel", torch's "fused" one, "foreach" functions, or a "loop"."""
    group, rule, first = bundle.group, bundle.rule, bundle.params[0]
    by_loop = group["differentiable"] or (group["foreach"] is False and not group["fused"])
    if by_loop or bundle.grads[0].layout != torch.strided:
        return "loop"
    if group["foreach"] or group["fused"] is False or not bundle.alike:
        return "foreach"
    # p - h*g on large tensors, which torch's plain `add` streams faster than a kernel does.
    streams = (
        first.is_cpu
        and not (bundle.buffers or rule.weight_decay)
        and sum(map(Tensor.numel, bundle.params)) > _LARGE * len(bundle.params)
    )
    if bundle.view is not None and not group["fused"]:
        return "foreach" if streams and torch.get_num_threads() == 1 else "kernel"
    if fused_sgd() is None or first.device.type not in _get_fused_kernels_supported_devices():
        return "foreach"
    if isinstance(scale, Tensor):
        return "fused"
    # A number is folded into the constants of torch's kernel, where they have the precision for it.
    decay = rule.weight_decay
    folds = not decay or (scale > _SMALLEST_FOLDED and decay / scale < 1e6 and not rule.nesterov)
    return "fused" if folds and not streams else "foreach"


def update_loop(p: Tensor, g: Tensor, buffer: Tensor | None, rule: Rule, scale: Any) -> None:
    """The formula for one parameter; the gradient may be sparse."""
    d = g * (-scale if rule.maximize else scale)
    if rule.weight_decay:
        # In this order: dense + sparse works, sparse + dense does not.
        d = torch.add(rule.weight_decay * p, d)
    if buffer is not None:
        buffer.mul_(rule.momentum).add_(d, alpha=1 - rule.dampening)
        d = torch.add(rule.momentum * buffer, d) if rule.nesterov else buffer
    if isinstance(rule.lr, Tensor):
        p.add_(d * -rule.lr.to(p.device))
    else:
        p.add_(d, alpha=-rule.lr)


def _update_by_kernel(bundle: Bundle, scale: float) -> None:
    """Our own kernel: every tensor once through memory, 16 bytes a parameter, 24 with momentum."""
    kernel, rule = native(), bundle.rule
    assert kernel is not None  # there is a view only where there is a kernel
    assert bundle.view is not None
    kernel.update(
        bundle.view, scale=-scale if rule.maximize else scale, weight_decay=rule.weight_decay,
        momentum=rule.momentum, dampening=rule.dampening, lr=float(rule.lr), nesterov=rule.nesterov,
    )  # fmt: skip
    # torch must know that the values changed, or it would not notice a stale graph.
    torch.autograd.graph.increment_version(bundle.params)


def _update_fused(bundle: Bundle, scale: Any, skip: Tensor | None) -> None:
    """Fold c into the constants of torch's kernel: 16 bytes a parameter, 24 with momentum.

    c(g + (w/c) p) is what the kernel should use as its gradient; without momentum the outer c goes into
    lr, with momentum into 1 - dampening. Only lr can be a device scalar; the others then need a scaled copy.
    """
    params, grads, buffers, rule = bundle.params, bundle.grads, bundle.buffers, bundle.rule
    lr, decay = rule.lr, rule.weight_decay
    if isinstance(scale, Tensor):
        if buffers or decay:
            grads = torch._foreach_mul(grads, scale)
        else:
            lr = lr * scale
        if isinstance(lr, Tensor):
            lr = lr.to(params[0].device, torch.float32)
        _fused_call(
            params, grads, buffers, lr=lr, weight_decay=decay, momentum=rule.momentum,
            dampening=rule.dampening, nesterov=rule.nesterov, maximize=rule.maximize, found_inf=skip,
        )  # fmt: skip
        return
    lr, decay = float(lr), decay / scale if decay else 0.0
    if not buffers:
        _fused_call(
            params, grads, [], lr=lr * scale, weight_decay=decay, maximize=rule.maximize, found_inf=skip
        )
        return
    # Nesterov: p - lr*(c*g + mu*b) is a momentum update with lr*mu and then a plain one with lr*c.
    _fused_call(
        params, grads, buffers, lr=lr * rule.momentum if rule.nesterov else lr, weight_decay=decay,
        momentum=rule.momentum, dampening=1 - scale * (1 - rule.dampening), maximize=rule.maximize,
        found_inf=skip,
    )  # fmt: skip
    if rule.nesterov:
        _fused_call(params, grads, [], lr=lr * scale, maximize=rule.maximize, found_inf=skip)


def _fused_call(
    params: Sequence[Tensor], grads: Sequence[Tensor], buffers: Sequence[Tensor], **constants: Any
) -> None:
    kernel = fused_sgd()
    assert kernel is not None  # this path is chosen only where there is one
    defaults = {"weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "found_inf": None}
    # Buffers start at zero, so no step is a first step to the kernel. Last tensor first: what the norm read
    # last is still in the cache.
    kernel(
        params[::-1], grads[::-1], buffers[::-1], is_first_step=False, grad_scale=None, **defaults | constants
    )


def _update_foreach(bundle: Bundle, scale: Any) -> None:
    """A handful of calls over all parameters at once."""
    # Last tensor first: what the norm read last is still in the cache.
    params, grads, buffers = bundle.params[::-1], bundle.grads[::-1], bundle.buffers[::-1]
    rule, factor = bundle.rule, -scale if bundle.rule.maximize else scale
    if isinstance(scale, Tensor) or rule.weight_decay or rule.nesterov:
        grads = torch._foreach_mul(grads, factor)
        factor = 1.0
    if rule.weight_decay:
        torch._foreach_add_(grads, params, alpha=rule.weight_decay)
    if buffers:
        torch._foreach_mul_(buffers, rule.momentum)
        torch._foreach_add_(buffers, grads, alpha=factor * (1 - rule.dampening))
        if rule.nesterov:
            torch._foreach_add_(grads, buffers, alpha=rule.momentum)
        else:
            grads, factor = buffers, 1.0
    if isinstance(rule.lr, Tensor) and rule.lr.device.type != "cpu":
        torch._foreach_add_(params, torch._foreach_mul(grads, -factor * rule.lr))
    else:
        torch._foreach_add_(params, grads, alpha=-float(rule.lr) * factor)


def _moved(number: Any, device: torch.device) -> Any:
    """A device scalar where the parameters are. Those on CPU have to wait for it, and get a float."""
    if not isinstance(number, Tensor) or number.device == device:
        return number
    return number.item() if device.type == "cpu" else number.to(device)


def _restore_(tensors: Iterable[Tensor], before: Iterable[Tensor], skip: Any) -> None:
    """Put back what stood in ``tensors`` if the device scalar ``skip`` is 1; nothing is read."""
    for t, old in zip(tensors, before, strict=True):
        t.copy_(torch.where(skip > 0, old, t))


def _view(grads: list[Tensor], params: list[Tensor], buffers: list[Any]) -> View | None:
    kernel = native()
    return None if kernel is None else kernel.view(*filter(None, (grads, params, buffers)))


def _existing_buffers(params: list[Tensor], state: Mapping[Tensor, Any]) -> list[Any]:
    """The momentum of each parameter, None where there is none yet."""
    if len(state) == len(params) and all(map(is_, state, params)):  # the same tensors in the same order,
        return [of_tensor.get(_BUFFER) for of_tensor in state.values()]  # and no hash to compute
    return [state.get(p, {}).get(_BUFFER) for p in params]


def _local_and_real(p: Tensor, g: Any, buffer: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """The parts of sharded tensors that lie here, complex numbers as pairs, a single number as a vector."""
    if is_sharded(p):
        if g.placements != p.placements:
            g = g.redistribute(p.device_mesh, p.placements)
        p, g = p.to_local(), g.to_local()
        buffer = None if buffer is None else buffer.to_local()
    if p.is_complex():
        p, g = torch.view_as_real(p), torch.view_as_real(g)
        buffer = None if buffer is None else torch.view_as_real(buffer)
    if p.dim() == 0 and g.layout == torch.strided:
        # torch gives a product of two tensors without dimensions the wider dtype, here that of the scale.
        p, g = p.view(1), g.view(1)
        buffer = None if buffer is None else buffer.view(1)
    return p, g, buffer


def _kernel_accepts_all(bundle: Bundle) -> bool:
    """:func:`_kernel_accepts` for many tensors in the common case: a quick yes, or ask one by one."""
    lists = [bundle.params, bundle.grads, *filter(None, [bundle.buffers])]
    if not all(set(map(type, tensors)) <= {Tensor, Parameter} for tensors in lists):
        return False  # a buffer that is missing, or something that torch must take apart first
    every = [t for tensors in lists for t in tensors]
    dtypes, devices = set(map(_dtype, every)), set(map(_device, every))
    if len(dtypes) > 1 or len(devices) > 1 or set(map(_layout, every)) != {torch.strided}:
        return False
    dtype, shapes = dtypes.pop(), list(map(_shape, bundle.params))
    return (
        all(list(map(_shape, tensors)) == shapes for tensors in lists)
        and (dtype in DTYPES if devices.pop().type == "cpu" else dtype.is_floating_point)
        and all(map(Tensor.is_contiguous, every))
        and all(map(Tensor.dim, bundle.params))
        and not any(map(Tensor.is_neg, bundle.grads))
        and not any(map(Tensor._is_zerotensor, bundle.grads))
    )


def _kernel_accepts(p: Tensor, g: Tensor, buffer: Tensor | None) -> bool:
    """A kernel walks memory: unequal strides give wrong values; on CPU there is none for half precision.

    Nor must a mark say that the numbers in memory are to be negated, or that they are zeros without memory.
    """
    return (
        (p.dtype in DTYPES or not p.is_cpu)
        and not (g.is_neg() or g._is_zerotensor())
        and is_non_overlapping_and_dense(p)
        and same_layout(g, p)
        and (buffer is None or same_layout(buffer, p))
    )


@cache
def fused_sgd() -> Callable[..., None] | None:
    """``torch._fused_sgd_`` if it is there and follows the formula that is folded into it.

    torch promises nothing about a function with an underscore, so it is tried on a small case first.
    """
    kernel = getattr(torch, "_fused_sgd_", None)
    return kernel if kernel is not None and _follows_formula(kernel) else None


def _follows_formula(kernel: Callable[..., None]) -> bool:
    """Try b <- mu*b + (1 - d)(g + w*p), p <- p - lr*b on five numbers."""
    p, g = torch.arange(5, dtype=torch.float64), torch.full((5,), 2.0, dtype=torch.float64)
    b = torch.ones(5, dtype=torch.float64)
    expected_b = 0.5 * b + 0.25 * (g + 3.0 * p)
    expected_p = p - 0.1 * expected_b
    try:
        kernel(
            [p], [g], [b], lr=0.1, weight_decay=3.0, momentum=0.5, dampening=0.75,
            nesterov=False, maximize=False, is_first_step=False,
        )  # fmt: skip
    except (RuntimeError, TypeError):
        return False
    return torch.allclose(b, expected_b) and torch.allclose(p, expected_p)
