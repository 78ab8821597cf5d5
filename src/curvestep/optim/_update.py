"""One update of many parameters, with the factor on the gradient folded in.

Which tensors go together and which path they take is decided here for every :class:`Rule`; the rules are in
``sgd.py`` and ``adamw.py``. None of the paths writes to a gradient.
"""
# pyright: reportPrivateImportUsage=false
# torch names its functions for lists of tensors with an underscore.

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from curvestep._kernel import (
    DTYPES,
    View,
    is_non_overlapping_and_dense,
    native,
    same_layout,
)
from curvestep.distributed import is_sharded
from curvestep.vectors import check_memory, is_readable

# Elements a tensor, on average, from which plain descent is a matter of memory bandwidth alone.
_LARGE = 1 << 19

_shape, _dtype, _device, _layout = map(attrgetter, ("shape", "dtype", "device", "layout"))


class Rule(Protocol):
    """What an update does with the scaled gradient, by each of the paths of :func:`choose_path`.

    Attributes:
        lr: Learning rate, a float or a one-element tensor.
        weight_decay: Weight decay.
        buffer_names: The entries of a parameter's state that have its shape, in the order of ``buffers``.
        counts_steps: Whether the state also has the number of its steps, ``step``.
        sparse_error: Why a sparse gradient is refused, empty if it is not.
    """

    @property
    def lr(self) -> Any: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def buffer_names(self) -> tuple[str, ...]: ...
    @property
    def counts_steps(self) -> bool: ...
    @property
    def sparse_error(self) -> str: ...
    def first(self) -> Rule:
        """The rule for a parameter whose buffers are new."""
        ...

    def has_fused(self, scale: Any) -> bool:
        """Whether torch has a fused kernel for this rule that is right with the factor ``scale``."""
        ...

    def by_kernel(self, bundle: Bundle, scale: float) -> None:
        """Update by our own kernel."""
        ...

    def by_fused(self, bundle: Bundle, scale: Any, skip: Tensor | None) -> None:
        """Update by torch's fused kernel, which leaves all as it is where ``skip`` is 1."""
        ...

    def by_foreach(self, bundle: Bundle, scale: Any) -> None:
        """Update by torch's functions for lists of tensors."""
        ...

    def by_loop(self, bundle: Bundle, scale: Any) -> None:
        """Update one parameter at a time: the formula."""
        ...


@dataclass
class Bundle:
    """Parameters under one clipping decision, with their gradients; once sorted, what one call updates.

    After :func:`sort` everything is real and local (complex tensors are pairs of real numbers, sharded ones
    this rank's part) and of one dtype and device, and every parameter has the buffers that its rule names.
    """

    group: dict[str, Any]
    rule: Any  # a Rule
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    buffers: list[list[Any]] = field(default_factory=list)  # a list for each name; None where one is missing
    steps: list[Any] = field(default_factory=list)  # the step of each parameter, if the rule counts them
    wholes: list[Tensor] = field(default_factory=list)  # the parameters that `params` are the local parts of
    view: View | None = None  # where gradients, parameters and buffers lie, if our kernel can walk them all
    steps_view: View | None = None  # where the steps lie, if it can
    alike: bool = False  # whether each gradient and buffer has dtype, device and strides of its parameter


def collect(
    groups: list[dict[str, Any]],
    state: Mapping[Tensor, Any],
    rule_of: Callable[[dict[str, Any]], Rule],
    *,
    per_tensor: bool,
    by_kernel: bool = True,
) -> list[Bundle]:
    """The parameters that have a gradient, by clipping decision: a group each, or a tensor each.

    ``by_kernel`` says that our kernel may update them if it can walk them.
    """
    bundles: list[Bundle] = []
    for group in groups:
        params = list(group["params"])
        grads = [p.grad for p in params]
        rule = rule_of(group)
        # The common case in one look: a view says that there is a gradient for every parameter.
        whole = None if per_tensor or not params else _bundle(group, rule, params, grads, state, by_kernel)
        if whole is not None and (whole.view is not None or type(None) not in set(map(type, grads))):
            made = [whole]
        else:
            pairs = [(p, g) for p, g in zip(params, grads, strict=True) if g is not None]
            pieces = [[pair] for pair in pairs] if per_tensor else [pairs] if pairs else []
            made = [
                _bundle(group, rule, [p for p, _ in piece], [g for _, g in piece], state, by_kernel)
                for piece in pieces
            ]
        for bundle in made:
            if bundle.view is None and not torch.compiler.is_compiling():
                check_memory("a parameter", bundle.params)
                check_memory("a gradient", bundle.grads)
                check_memory("a buffer", list(chain(*bundle.buffers)))
            if bundle.view is None and rule.sparse_error:
                if any(g.layout != torch.strided for g in bundle.grads):
                    raise RuntimeError(rule.sparse_error)
        bundles += made
    return bundles


def _bundle(
    group: dict[str, Any],
    rule: Rule,
    params: list[Tensor],
    grads: list[Any],
    state: Mapping[Tensor, Any],
    by_kernel: bool,
) -> Bundle:
    """Parameters and gradients with their buffers, and where all lie if our kernel can walk them."""
    buffers, steps = _existing(params, state, rule)
    view = _view(grads, params, *buffers) if by_kernel else None
    steps_view = _view(steps, may_be_negated=False) if steps and view is not None else None
    alike = view is not None and (steps_view is not None or not steps)
    return Bundle(group, rule, params, grads, buffers, steps, params, view, steps_view, alike)


def sort(bundle: Bundle, state: MutableMapping[Tensor, Any]) -> list[Bundle]:
    """The bundle in parts that one call can update, each parameter with the buffers that its rule names."""
    if bundle.alike or _kernel_accepts_all(bundle):
        bundle.alike = True
        return [bundle]
    parts: dict[tuple, Bundle] = {}
    names = bundle.rule.buffer_names
    new = [(name, p) for name in names for p in bundle.params if state[p].get(name) is None]
    for name, p in new:
        state[p][name] = torch.zeros_like(p, memory_format=torch.preserve_format)
    started = {id(p) for _, p in new}
    for whole, g in zip(bundle.params, bundle.grads, strict=True):
        rule = bundle.rule.first() if id(whole) in started else bundle.rule
        of_tensor = state[whole] if names else {}
        for name in names:
            if of_tensor[name].shape != whole.shape:
                raise ValueError(
                    f"`{name}`, {tuple(of_tensor[name].shape)}, does not have the shape of its parameter, "
                    f"{tuple(whole.shape)}. Load the state of the same model."
                )
        p, g, *buffers = _local_and_real(whole, g, *(of_tensor[name] for name in names))
        if rule.counts_steps:
            of_tensor["step"] = _step_of(of_tensor.get("step"), p)
        alike = _kernel_accepts(p, g, *buffers)
        key = (p.dtype, p.device, g.layout, alike, rule is not bundle.rule)
        if key not in parts:
            parts[key] = Bundle(bundle.group, rule, buffers=[[] for _ in names], alike=alike)
        part = parts[key]
        part.params.append(p)
        part.grads.append(g)
        part.wholes.append(whole)
        for listed, buffer in zip(part.buffers, buffers, strict=True):
            listed.append(buffer)
        if rule.counts_steps:
            part.steps.append(of_tensor["step"])
    for part in parts.values():
        part.view = _view(part.grads, part.params, *part.buffers) if part.alike else None
        part.steps_view = _view(part.steps, may_be_negated=False) if part.view and part.steps else None
    return list(parts.values())


def average_(bundle: Bundle, scale: Any = 1.0, *, skip: Tensor | bool = False) -> Bundle:
    """Take ``scale`` times the gradients into the momentum buffers; the result updates along the average.

    Where ``skip`` is 1, the buffers stay as they are.
    """
    rule = bundle.rule
    if not bundle.buffers:
        return bundle
    device = bundle.params[0].device
    scale, skip = _moved(scale, device), _moved(skip, device)
    if not isinstance(skip, Tensor) and skip:
        return bundle
    if isinstance(scale, Tensor) or scale != 1:
        bundle = replace(bundle, grads=[g * scale for g in bundle.grads])
    (directions,) = bundle.buffers
    before = [b.clone() for b in directions] if isinstance(skip, Tensor) else []
    for g, buffer in zip(bundle.grads, directions, strict=True):
        buffer.mul_(rule.momentum).add_(g, alpha=1 - rule.dampening)
    if isinstance(skip, Tensor):
        _restore_(directions, before, skip)
    if rule.nesterov:
        directions = [torch.add(rule.momentum * b, g) for g, b in zip(bundle.grads, directions, strict=True)]
    view = _view(directions, bundle.params) if bundle.alike else None
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
    if isinstance(bundle.rule.lr, Tensor) and not bundle.group["differentiable"]:
        lr = bundle.rule.lr.view(())
        bundle = replace(
            bundle, rule=bundle.rule._replace(lr=lr.item() if is_readable(lr) else _moved(lr, device))
        )
    path = choose_path(bundle, scale)
    # Only torch's kernel can leave the decision on the device by itself.
    undoes = isinstance(skip, Tensor) and path != "fused"
    changed = [*bundle.params, *chain(*bundle.buffers)] if undoes else []
    before = [t.clone() for t in changed]
    if path == "kernel":
        bundle.rule.by_kernel(bundle, float(scale))
        # torch must know that the values changed, or it would not notice a stale graph.
        torch.autograd.graph.increment_version(bundle.params)
    elif path == "fused":
        bundle.rule.by_fused(bundle, scale, skip if isinstance(skip, Tensor) else None)
    else:
        (bundle.rule.by_foreach if path == "foreach" else bundle.rule.by_loop)(bundle, scale)
        if bundle.steps:  # as a list: torch.compile loses what is added to a float64 scalar by itself
            taken = [1 - skip] * len(bundle.steps) if isinstance(skip, Tensor) else 1
            torch._foreach_add_(bundle.steps, taken)
    if undoes:
        _restore_(changed, before, skip)


def choose_path(bundle: Bundle, scale: Any) -> str:
    """The fastest path that is right: our "kernel", torch's "fused" one, "foreach" functions, or a "loop"."""
    group, rule, first = bundle.group, bundle.rule, bundle.params[0]
    by_loop = group["differentiable"] or (group["foreach"] is False and not group["fused"])
    if by_loop or bundle.grads[0].layout != torch.strided:
        return "loop"
    if torch.compiler.is_compiling():  # which fuses them itself, and sees to marks on tensors
        return "foreach"
    # torch does not write to lists of tensors that are marked as to be negated.
    if bundle.view is None and True in map(Tensor.is_neg, chain(bundle.params, *bundle.buffers)):
        return "loop"
    if group["foreach"] or group["fused"] is False or not bundle.alike:
        return "foreach"
    # p - h*g on large tensors, which torch's plain `add` streams faster than a kernel does.
    streams = (
        first.is_cpu
        and not (bundle.buffers or rule.weight_decay)
        and sum(map(Tensor.numel, bundle.params)) > _LARGE * len(bundle.params)
    )
    walks = bundle.view is not None and (bundle.steps_view is not None or not bundle.steps)
    if walks and not group["fused"]:
        return "foreach" if streams and torch.get_num_threads() == 1 else "kernel"
    if streams and not isinstance(scale, Tensor):
        return "foreach"
    supported = first.device.type in _get_fused_kernels_supported_devices()
    return "fused" if supported and rule.has_fused(scale) else "foreach"


def product(a: Any, b: Any) -> Any:
    """Of two numbers, each a float or a device scalar; on the device of the first if they are on two."""
    return a * (b.to(a.device) if isinstance(a, Tensor) and isinstance(b, Tensor) else b)


def _moved(number: Any, device: torch.device) -> Any:
    """A float, or a device scalar where the parameters are; those on CPU have to wait for it.

    What is on CPU is read: to move it to a device would wait.
    """
    if not isinstance(number, Tensor) or number.device == device:
        return number
    return number.item() if device.type == "cpu" or number.is_cpu else number.to(device)


def _restore_(tensors: Iterable[Tensor], before: Iterable[Tensor], skip: Any) -> None:
    """Put back what stood in ``tensors`` if the device scalar ``skip`` is 1; nothing is read."""
    for t, old in zip(tensors, before, strict=True):
        t.copy_(torch.where(skip > 0, old, t))


def _view(tensors: list[Tensor], *others: list[Any], may_be_negated: bool = True) -> View | None:
    """Where the tensors lie, if our kernel can walk them; none of its calls can be part of a graph."""
    if torch.compiler.is_compiling():
        return None
    kernel = native()
    return None if kernel is None else kernel.view(tensors, *others, may_be_negated=may_be_negated)


def _existing(
    params: list[Tensor], state: Mapping[Tensor, Any], rule: Rule
) -> tuple[list[list[Any]], list[Any]]:
    """Buffers and steps of the parameters, None where there is none yet."""
    if not rule.buffer_names:
        return [], []
    if len(state) == len(params) and all(map(is_, state, params)):  # the same tensors in the same order,
        found = list(state.values())  # and no hash to compute
    else:
        found = [state.get(p, {}) for p in params]
    names = (*rule.buffer_names, "step") if rule.counts_steps else rule.buffer_names
    try:
        columns = [list(map(itemgetter(name), found)) for name in names]
    except KeyError:
        columns = [[of_tensor.get(name) for of_tensor in found] for name in names]
    return (columns[:-1], columns[-1]) if rule.counts_steps else (columns, [])


def _is_step_for(device: torch.device, step: Any) -> bool:
    """Whether the number of steps is kept so that torch's kernel can read it where the parameter is."""
    return type(step) is Tensor and step.device == device and (step.is_cpu or step.dtype is torch.float32)


def _step_of(step: Any, p: Tensor) -> Tensor:
    """The number of steps as torch keeps it, where the parameter is; nothing is read."""
    if _is_step_for(p.device, step):
        return step
    double = p.is_cpu and torch.get_default_dtype() == torch.float64
    dtype = torch.float64 if double else torch.float32
    if step is None:
        return torch.zeros((), dtype=dtype, device=p.device)
    return torch.as_tensor(step, dtype=dtype).to(p.device, non_blocking=True)


def _local_and_real(p: Tensor, g: Any, *buffers: Any) -> list[Tensor]:
    """The parts of sharded tensors that lie here, complex numbers as pairs, a single number as a vector."""
    if is_sharded(p) and g.placements != p.placements:
        g = g.redistribute(p.device_mesh, p.placements)
    tensors = [p, g, *buffers]
    if is_sharded(p):
        tensors = [t.to_local() for t in tensors]
    if p.is_complex():
        # A gradient may be a conjugate that is still to be computed; of a parameter torch says what to do.
        tensors = [torch.view_as_real(t.resolve_conj() if t is g else t) for t in tensors]
    if tensors[0].dim() == 0 and g.layout == torch.strided:
        # torch gives a product of two tensors without dimensions the wider dtype, here that of the scale.
        tensors = [t.view(1) for t in tensors]
    return tensors


def _kernel_accepts_all(bundle: Bundle) -> bool:
    """:func:`_kernel_accepts` for many tensors in the common case: a quick yes, or ask one by one."""
    lists = [bundle.params, bundle.grads, *bundle.buffers]
    if torch.compiler.is_compiling() or not all(
        set(map(type, tensors)) <= {Tensor, Parameter} for tensors in lists
    ):
        return False  # a buffer that is missing, or something that torch must take apart first
    every = [t for tensors in lists for t in tensors]
    dtypes, devices = set(map(_dtype, every)), set(map(_device, every))
    if len(dtypes) > 1 or len(devices) > 1 or set(map(_layout, every)) != {torch.strided}:
        return False
    dtype, device, shapes = dtypes.pop(), devices.pop(), list(map(_shape, bundle.params))
    if not all(_is_step_for(device, step) for step in bundle.steps):
        return False
    return (
        all(list(map(_shape, tensors)) == shapes for tensors in lists)
        and (dtype in DTYPES if device.type == "cpu" else dtype.is_floating_point)
        and all(map(Tensor.is_contiguous, every))
        and all(map(Tensor.dim, bundle.params))
        and not any(map(Tensor.is_neg, chain(bundle.params, bundle.grads)))
        and not any(map(Tensor._is_zerotensor, bundle.grads))
    )


def _kernel_accepts(p: Tensor, g: Tensor, *buffers: Tensor) -> bool:
    """A kernel walks memory: unequal strides give wrong values; on CPU there is none for half precision.

    Nor must a mark say that the numbers in memory are to be negated, or that they are zeros without memory.
    """
    return (
        not torch.compiler.is_compiling()
        and (p.dtype in DTYPES or not p.is_cpu)
        and not (p.is_neg() or g.is_neg() or g._is_zerotensor())
        and is_non_overlapping_and_dense(p)
        and same_layout(g, p)
        and all(same_layout(buffer, p) for buffer in buffers)
    )
