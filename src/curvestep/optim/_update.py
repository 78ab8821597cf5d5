"""One update of many parameters, with the factor on the gradient folded in.

Which tensors go together and which path they take is decided here, once for each step and every
:class:`Rule`; the rules are in ``sgd.py`` and ``adamw.py``. None of the paths writes to a gradient.
"""
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
# torch names its functions for lists of tensors with an underscore.

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from curvestep._kernel import DTYPES, PLAIN, Units, View, is_non_overlapping_and_dense, same_layout
from curvestep.distributed import as_sharded, is_sharded, placed
from curvestep.optim.pieces import scaled
from curvestep.optim.policy import Decision, Group, decisions_of
from curvestep.vectors import check_memory, is_readable, view_of

# Our kernel, torch's fused kernel, torch's functions for lists of tensors, or one tensor after the other.
Path: TypeAlias = Literal["kernel", "fused", "foreach", "loop"]
Scale = TypeVar("Scale", float, Tensor, float | Tensor)
Number: TypeAlias = float | Tensor  # a float on the host, a tensor of one element on a device
Found: TypeAlias = list[Any]  # tensors of the state, None where there is none yet
State: TypeAlias = MutableMapping[Tensor, Any]  # the state of torch's optimizers

# Elements a tensor, on average, from which plain descent is a matter of memory bandwidth alone.
_LARGE = 1 << 19

_dtype, _device, _layout = attrgetter("dtype"), attrgetter("device"), attrgetter("layout")
_shape = attrgetter("shape")


class Rule(Protocol):
    """The update by the scaled gradient, on each path.

    Attributes:
        lr: Learning rate, a float or a one-element tensor.
        weight_decay: Weight decay.
        buffer_names: The entries of a parameter's state that have its shape, in the order of ``buffers``.
        counts_steps: Whether the state also has the number of its steps, ``step``.
        sparse_error: Why a sparse gradient is refused, empty if it is not.
        has_fused: Whether torch has a fused kernel for this rule.
        measures_tensors: Whether it needs all of a tensor, not only what lies here of a sharded one.
    """

    @property
    def lr(self) -> Number: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def buffer_names(self) -> tuple[str, ...]: ...
    @property
    def counts_steps(self) -> bool: ...
    @property
    def sparse_error(self) -> str: ...
    @property
    def has_fused(self) -> bool: ...
    @property
    def measures_tensors(self) -> bool: ...
    def with_lr(self, lr: Number) -> Rule:
        """The same rule with another learning rate."""
        ...

    def first(self) -> Rule:
        """The rule for a parameter whose buffers are new."""
        ...

    def averaged_(self, part: Part, scale: Number) -> tuple[Rule, list[Tensor]]:
        """Take the gradients into their average; the average, and the rule that goes along it."""
        ...

    def by_kernel(self, part: Part, scale: float) -> None:
        """Update by our own kernel."""
        ...

    def by_fused(self, part: Part, scale: float) -> None:
        """Update by torch's fused kernel, or by ``by_foreach`` where it would lose precision."""
        ...

    def by_fused_on_device(self, part: Part, scale: Tensor, skip: Tensor | None) -> None:
        """Update by torch's fused kernel, which leaves parameters and buffers alone where ``skip`` is 1."""
        ...

    def by_foreach(self, part: Part, scale: Number) -> None:
        """Update by torch's functions for lists of tensors."""
        ...

    def by_loop(self, part: Part, scale: Number) -> None:
        """Update one parameter at a time: the formula."""
        ...


@dataclass(slots=True)
class Bundle(Decision):
    """Parameters that are clipped together, with what their update needs.

    ``view`` is where gradients, parameters and buffers lie, if our kernel can walk through them all.
    """

    rule: Rule = field(kw_only=True)
    buffers: list[Found] = field(kw_only=True)  # a list for each name; None where one is missing
    steps: Found = field(kw_only=True)  # the step of each parameter, if the rule counts them
    steps_view: View | None = None
    units: Units | None = None  # factors on pieces of the gradient, if our kernel is to multiply them


@dataclass(slots=True)
class Part:
    """Tensors that one call updates: real, local, of one dtype and device, each with all its buffers.

    Complex tensors are pairs of real numbers here, sharded ones this rank's part.
    """

    rule: Rule
    params: list[Tensor]
    grads: list[Tensor]
    buffers: list[list[Tensor]]
    steps: list[Tensor]
    wholes: list[Tensor]  # the parameters that `params` are the local parts of
    alike: bool  # whether each gradient and buffer has dtype, device and strides of its parameter
    view: View | None = None
    steps_view: View | None = None
    units: Units | None = None
    path: Path = "loop"

    def scaled_units(self, scale: float) -> Units | None:
        """The factors on pieces times that on all."""
        if self.units is None or scale == 1:
            return self.units
        return Units(self.units.starts, self.units.scales * scale)


def collect(
    groups: list[Group],
    state: State,
    rule_of: Callable[[Group], Rule],
    *,
    norm_scope: str,
    by_kernel: bool,
) -> list[Bundle]:
    """The parameters that have a gradient, by clipping decision.

    ``by_kernel`` says that our kernel may update them if it can walk through them.
    """
    bundles: list[Bundle] = []
    for group in groups:
        rule = rule_of(group)
        if isinstance(rule.lr, Tensor) and not group["differentiable"]:
            rule = rule.with_lr(rule.lr.item() if is_readable(rule.lr) else rule.lr.view(()))
        for decision in decisions_of(group, norm_scope):
            bundles.append(_bundle(decision, rule, state, by_kernel))
    return bundles


def _bundle(decision: Decision, rule: Rule, state: State, by_kernel: bool) -> Bundle:
    """A decision with rule and buffers, and where all lie if our kernel can walk through them."""
    params, grads = decision.params, decision.grads
    buffers, steps = _existing(params, state, rule)
    bundle = Bundle(
        decision.group, params, grads, index=decision.index, rule=rule, buffers=buffers, steps=steps
    )
    if by_kernel:
        bundle.view, bundle.steps_view = _views(steps, grads, params, *buffers)
    if bundle.view is None and not torch.compiler.is_compiling():
        check_memory("a parameter", params)
        check_memory("a gradient", grads)
        check_memory("a buffer", list(chain(*buffers)))
    if bundle.view is None and rule.sparse_error and any(g.layout != torch.strided for g in grads):
        raise RuntimeError(rule.sparse_error)
    return bundle


def parts_of(bundle: Bundle, state: State) -> list[Part]:
    """The bundle in parts that one call can update, each parameter with the buffers that its rule names."""
    if bundle.view is None and not _kernel_accepts_all(bundle):
        return _sorted(bundle, state)
    part = Part(
        bundle.rule, bundle.params, bundle.grads, bundle.buffers, bundle.steps, bundle.params, True,
        bundle.view, bundle.steps_view, bundle.units,
    )  # fmt: skip
    part.path = choose_path(part, bundle.group)
    return [part]


def apply_pieces(bundles: list[Bundle]) -> None:
    """Give the factors on pieces to our kernel, or multiply a copy of the gradients by them."""
    for bundle in bundles:
        pieces = bundle.pieces
        if pieces is None:
            continue
        if bundle.view is not None and pieces.units is not None:
            bundle.units = pieces.units
        else:
            bundle.grads, bundle.view = scaled(bundle.grads, pieces), None


def _sorted(bundle: Bundle, state: State) -> list[Part]:
    """The parts of a bundle whose tensors differ, or whose buffers are missing."""
    parts: dict[tuple[Any, ...], Part] = {}
    started = _start_buffers(bundle, state)
    names = bundle.rule.buffer_names
    for whole, grad in zip(bundle.params, bundle.grads, strict=True):
        rule = bundle.rule.first() if id(whole) in started else bundle.rule
        buffers = [_checked_buffer(name, state[whole][name], whole) for name in names]
        p, g, *buffers = _local_and_real(whole, grad, *buffers)
        alike = _kernel_accepts(p, g, *buffers)
        key = (p.dtype, p.device, g.layout, alike, rule is not bundle.rule)
        if key not in parts:
            parts[key] = Part(rule, [], [], [[] for _ in names], [], [], alike)
        part = parts[key]
        part.params.append(p)
        part.grads.append(g)
        part.wholes.append(whole)
        for listed, buffer in zip(part.buffers, buffers, strict=True):
            listed.append(buffer)
        if rule.counts_steps:
            state[whole]["step"] = _step_of(state[whole].get("step"), p)
            part.steps.append(state[whole]["step"])
    for part in parts.values():
        is_cut = part.rule.measures_tensors and any(map(is_sharded, part.wholes))
        if part.alike and not is_cut:
            part.view, part.steps_view = _views(part.steps, part.grads, part.params, *part.buffers)
        part.path = choose_path(part, bundle.group)
    return list(parts.values())


def _start_buffers(bundle: Bundle, state: State) -> set[int]:
    """Create the buffers that are missing; the ids of the parameters that had not all of them."""
    started: set[int] = set()
    for name in bundle.rule.buffer_names:
        for p in bundle.params:
            if state[p].get(name) is None:
                state[p][name] = torch.zeros_like(p, memory_format=torch.preserve_format)
                started.add(id(p))
    return started


def _checked_buffer(name: str, buffer: Tensor, p: Tensor) -> Tensor:
    if buffer.shape != p.shape:
        raise ValueError(
            f"`{name}`, {tuple(buffer.shape)}, does not have the shape of its parameter, "
            f"{tuple(p.shape)}. Load the state of the same model."
        )
    return buffer


def along(part: Part, rule: Rule, directions: list[Tensor], group: Group) -> Part:
    """The part with other directions instead of its gradients, and without buffers."""
    view = _views([], directions, part.params)[0] if part.alike else None
    turned = replace(part, rule=rule, grads=directions, buffers=[], view=view)
    turned.path = choose_path(turned, group)
    return turned


def joined(parts: list[Part]) -> Decision:
    """Rejoin the parts; local shards become DTensors again, so that the norm spans all ranks."""
    pairs = [(g, p) for part in parts for g, p in zip(part.grads, part.wholes, strict=True)]
    return Decision({}, [p for _, p in pairs], [as_sharded(g, p) for g, p in pairs])


def choose_path(part: Part, group: Group) -> Path:
    """The fastest path that is right."""
    if part.units is not None:
        return "kernel"
    by_loop = group["differentiable"] or (group["foreach"] is False and not group["fused"])
    if by_loop or part.grads[0].layout != torch.strided:
        return "loop"
    if torch.compiler.is_compiling():  # which fuses them itself, and resolves negative bits
        return "foreach"
    # torch does not write to lists of tensors with the negative bit.
    if part.view is None and True in map(Tensor.is_neg, chain(part.params, *part.buffers)):
        return "loop"
    if group["foreach"] or group["fused"] is False or not part.alike:
        return "foreach"
    walks = part.view is not None and not group["fused"]
    if _is_plain_and_large(part):
        # torch's plain `add` streams p - h*g faster than a kernel does, unless ours has two threads.
        return "kernel" if walks and torch.get_num_threads() > 1 else "foreach"
    if walks:
        return "kernel"
    supported = part.params[0].device.type in _get_fused_kernels_supported_devices()
    return "fused" if supported and part.rule.has_fused else "foreach"


def _is_plain_and_large(part: Part) -> bool:
    """Whether the update is p - h*g on large tensors in the host's memory."""
    if part.buffers or part.rule.weight_decay or not part.params[0].is_cpu:
        return False
    return sum(map(Tensor.numel, part.params)) > _LARGE * len(part.params)


def update(part: Part, scale: float) -> None:
    """Update a part with the gradient times ``scale``, by its path."""
    if part.path == "kernel":
        part.rule.by_kernel(part, scale)
        # torch must know that the values changed, or it would not notice a stale graph.
        torch.autograd.graph.increment_version(part.params)
    elif part.path == "fused":
        part.rule.by_fused(part, scale)
    elif part.path == "foreach":
        part.rule.by_foreach(part, scale)
    else:
        part.rule.by_loop(part, scale)


def _views(steps: Found, *lists: Found) -> tuple[View | None, View | None]:
    """Where the tensors and their steps lie, if our kernel can walk through all of them."""
    view = view_of(*lists)
    if view is None or not steps:
        return view, None
    steps_view = view.kernel.view(steps, may_be_negated=False)
    if steps_view is None or set(steps_view.sizes) != {1}:  # it reads one number of each
        return None, None
    return view, steps_view


def _existing(params: list[Tensor], state: State, rule: Rule) -> tuple[list[Found], Found]:
    """Buffers and steps of the parameters, None where there is none yet."""
    if not rule.buffer_names:
        return [], []
    if len(state) == len(params) and all(map(is_, state, params)):  # the same tensors in the same order,
        found = list(state.values())  # and no hash to compute
    else:
        found = [state.get(p, {}) for p in params]
    buffers = [_column(found, name) for name in rule.buffer_names]
    steps = _column(found, "step") if rule.counts_steps else []
    return buffers, steps


def _column(states: Found, name: str) -> Found:
    try:
        return list(map(itemgetter(name), states))
    except KeyError:
        return [of_tensor.get(name) for of_tensor in states]


def _is_step_for(device: torch.device, step: object) -> bool:
    """Whether the number of steps is kept so that torch's kernel can read it where the parameter is."""
    if type(step) is not Tensor or step.device != device or step.numel() != 1:
        return False
    return step.is_cpu or step.dtype is torch.float32


def _step_of(step: Tensor | float | None, p: Tensor) -> Tensor:
    """The number of steps as torch keeps it, where the parameter is; nothing is read."""
    if isinstance(step, Tensor) and _is_step_for(p.device, step):
        return step
    if isinstance(step, Tensor) and step.numel() != 1:
        raise ValueError(f"`step` must be one number, got shape {tuple(step.shape)}. Load a whole state.")
    double = p.is_cpu and torch.get_default_dtype() == torch.float64
    dtype = torch.float64 if double else torch.float32
    if step is None:
        return torch.zeros((), dtype=dtype, device=p.device)
    if not isinstance(step, Tensor):
        step = torch.tensor(step, dtype=dtype, device="cpu")
    return step.to(p.device, dtype, non_blocking=True)


def _local_and_real(p: Tensor, g: Tensor, *buffers: Tensor) -> list[Tensor]:
    """The parts of sharded tensors that lie here, complex numbers as pairs, a single number as a vector."""
    tensors = [p, g, *buffers]
    if is_sharded(p):
        sharded: list[Any] = [p, placed(g, p.placements), *buffers]
        tensors = [t.to_local() for t in sharded]
    if p.is_complex():
        # A gradient may be a conjugate that is still to be computed; of a parameter torch says what to do.
        tensors[1] = tensors[1].resolve_conj()
        tensors = [torch.view_as_real(t) for t in tensors]
    if tensors[0].dim() == 0 and g.layout == torch.strided:
        # torch gives a product of two tensors without dimensions the wider dtype, here that of the scale.
        tensors = [t.view(1) for t in tensors]
    return tensors


def _kernel_accepts_all(bundle: Bundle) -> bool:
    """:func:`_kernel_accepts` for many tensors in the common case: a quick yes, or ask one by one."""
    lists = [bundle.params, bundle.grads, *bundle.buffers]
    every = list(chain(*lists))
    if torch.compiler.is_compiling() or not set(map(type, every)) <= set(PLAIN):
        return False  # a buffer that is missing, or something that torch must take apart first
    kinds = set(zip(map(_dtype, every), map(_device, every), map(_layout, every), strict=True))
    if len(kinds) > 1:
        return False
    ((dtype, device, layout),) = kinds
    has_kernel = dtype in DTYPES if device.type == "cpu" else dtype.is_floating_point
    if layout != torch.strided or not has_kernel:
        return False
    shapes = list(map(_shape, bundle.params))
    return (
        all(list(map(_shape, tensors)) == shapes for tensors in lists)
        and all(map(Tensor.is_contiguous, every))
        and all(map(Tensor.dim, bundle.params))
        and not any(map(Tensor.is_neg, chain(bundle.params, bundle.grads)))
        and not any(map(Tensor._is_zerotensor, bundle.grads))
        and all(_is_step_for(device, step) for step in bundle.steps)
    )


def _kernel_accepts(p: Tensor, g: Tensor, *buffers: Tensor) -> bool:
    """A kernel walks memory: unequal strides give wrong values; on CPU there is none for half precision.

    Nor must a negative bit say that numbers in memory have the other sign, or that they are zeros without
    memory.
    """
    if torch.compiler.is_compiling() or (p.is_cpu and p.dtype not in DTYPES):
        return False
    if p.is_neg() or g.is_neg() or g._is_zerotensor():
        return False
    return is_non_overlapping_and_dense(p) and all(same_layout(t, p) for t in (g, *buffers))
