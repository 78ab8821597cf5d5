"""One update of many parameters, with the factor on the gradient folded in.

Which tensors go together and which path they take is decided here, once for each step and every
:class:`Rule`; the rules are in ``sgd.py`` and ``adamw.py``. None of the paths writes to a gradient.
"""
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUnknownVariableType=false
# torch names its functions for lists of tensors with an underscore.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, MutableMapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import partial
from itertools import chain, repeat
from operator import attrgetter, getitem, is_
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import _get_scalar_dtype
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from curvestep.optim.pieces import scaled
from curvestep.optim.policy import Decision, Group, decisions_of
from curvestep.tensors.distributed import as_sharded, is_sharded, placed
from curvestep.tensors.kernel import DTYPES, PLAIN, Units, View, is_non_overlapping_and_dense, same_layout
from curvestep.tensors.vectors import check_memory, is_readable, view_of

# Our kernel, torch's fused kernel, torch's functions for lists of tensors, or one tensor after the other.
Path: TypeAlias = Literal["kernel", "fused", "foreach", "loop"]
Scale = TypeVar("Scale", float, Tensor, float | Tensor)
Number: TypeAlias = float | Tensor  # a float on the host, a tensor of one element on a device
State: TypeAlias = MutableMapping[Tensor, Any]  # the state of torch's optimizers

# Elements a tensor, on average, from which plain descent is a matter of memory bandwidth alone.
_LARGE = 1 << 19

_kind, _shape = attrgetter("dtype", "device", "layout"), attrgetter("shape")


@dataclass(slots=True)
class Rule(ABC):
    """The constants of an update, all but the factor on the gradient, and the update on each path."""

    lr: Number
    weight_decay: float = 0.0
    maximize: bool = False

    counts_steps: ClassVar[bool] = False  # whether the state of a parameter has the number of its `step`s
    sparse_error: ClassVar[str] = ""  # why a sparse gradient is refused

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The constants that need not be given."""
        return {f.name: f.default for f in fields(cls) if f.default is not MISSING}

    @property
    @abstractmethod
    def buffer_names(self) -> tuple[str, ...]:
        """The entries of a parameter's state that have its shape, in the order of ``buffers``."""

    @property
    def measures_tensors(self) -> bool:
        """Whether it needs all of a tensor, not only what lies here of a sharded one."""
        return False

    def first(self) -> Rule:
        """The rule for a parameter whose buffers are new."""
        return self

    def averaged_(self, part: Part, scale: Number) -> tuple[Rule, list[Tensor]]:
        """Take the gradients into their average; the rule that goes along it, and the average."""
        return self, part.grads

    @abstractmethod
    def by_kernel(self, part: Part, scale: float) -> None:
        """Update by our own kernel."""

    @abstractmethod
    def by_fused(self, part: Part, scale: Number, skip: Tensor | None = None) -> None:
        """Update by torch's fused kernel, which leaves parameters and buffers alone where ``skip`` is 1."""

    @abstractmethod
    def by_foreach(self, part: Part, scale: Number) -> None:
        """Update by torch's functions for lists of tensors."""

    @abstractmethod
    def by_loop(self, part: Part, scale: Number) -> None:
        """Update one parameter at a time: the formula."""

    def signed(self, scale: Scale) -> Scale:
        """The factor on the gradient of what is descended."""
        return -scale if self.maximize else scale


@dataclass(slots=True)
class Bundle(Decision):
    """Parameters that are clipped together, with what their update needs.

    ``view`` is where gradients, parameters and buffers lie, if our kernel can walk through them all.
    """

    rule: Rule = field(kw_only=True)
    buffers: list[list[Tensor]] = field(default_factory=list)  # a list for each name
    steps: list[Tensor] = field(default_factory=list)  # of each parameter, if the rule counts them
    has_state: bool = True  # whether every parameter has its buffers
    steps_view: View | None = None


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
    alike: bool = True  # whether each gradient and buffer has dtype, device and strides of its parameter
    view: View | None = None
    steps_view: View | None = None
    units: Units | None = None  # factors on pieces of the gradient, beside that on all
    path: Path = "loop"


def collect(
    groups: list[Group], state: State, rule_of: Callable[[Group], Rule], norm_scope: str
) -> list[Bundle]:
    """The parameters that have a gradient, by clipping decision."""
    bundles: list[Bundle] = []
    for group in groups:
        rule = rule_of(group)
        if isinstance(rule.lr, Tensor):
            rule.lr = rule.lr.item() if is_readable(rule.lr) else rule.lr.view(())
        for bundle in decisions_of(group, norm_scope, partial(Bundle, rule=rule)):
            _find_state(bundle, state)
            if bundle.has_state:
                lists = (bundle.grads, bundle.params, *bundle.buffers)
                bundle.view, bundle.steps_view = _views(bundle.steps, *lists)
            if bundle.view is None:
                _check_tensors(bundle)
            bundles.append(bundle)
    return bundles


def _find_state(bundle: Bundle, state: State) -> None:
    """Look up buffers and steps, which are not there before the first step."""
    names, params = bundle.rule.buffer_names, bundle.params
    if not names:
        return
    if len(state) == len(params) and all(map(is_, state, params)):  # the same tensors in the same order,
        states = list(state.values())  # and no hash to compute
    else:
        states = [state.get(p, {}) for p in params]
    try:
        bundle.buffers = [list(map(getitem, states, repeat(name))) for name in names]
        if bundle.rule.counts_steps:
            bundle.steps = list(map(getitem, states, repeat("step")))
    except KeyError:
        bundle.has_state = False


def _check_tensors(bundle: Bundle) -> None:
    """Raise if torch could not read the tensors, or the rule does not take them."""
    check_memory("a parameter", bundle.params)
    check_memory("a gradient", bundle.grads)
    check_memory("a buffer", list(chain(*bundle.buffers)))
    if bundle.rule.sparse_error and any(g.layout != torch.strided for g in bundle.grads):
        raise RuntimeError(bundle.rule.sparse_error)


def parts_of(bundle: Bundle, state: State) -> list[Part]:
    """The bundle in parts that one call can update, each parameter with the buffers that its rule names."""
    units = None
    if bundle.pieces is not None:
        units = bundle.pieces.units
        if units is None:  # for another path than our kernel the gradients become a scaled copy
            bundle.grads, bundle.view = scaled(bundle.grads, bundle.pieces), None
    if bundle.view is None and not _are_plain(bundle):
        return _sorted(bundle, state)
    part = Part(bundle.rule, bundle.params, bundle.grads, bundle.buffers, bundle.steps, bundle.params)
    part.view, part.steps_view, part.units = bundle.view, bundle.steps_view, units
    part.path = choose_path(part, bundle.group)
    return [part]


def _sorted(bundle: Bundle, state: State) -> list[Part]:
    """The parts of a bundle whose tensors differ, or whose buffers are missing."""
    parts: dict[tuple[object, ...], Part] = {}
    names = bundle.rule.buffer_names
    for whole, grad in zip(bundle.params, bundle.grads, strict=True):
        rule = bundle.rule
        if is_new(whole, state, rule):
            rule = rule.first()
        buffers = [_buffer(name, state[whole], whole) for name in names]
        p, g, *buffers = _local_and_real(whole, grad, *buffers)
        alike = _kernel_accepts(p, g, *buffers)
        key = (p.dtype, p.device, g.layout, alike, rule is not bundle.rule)
        part = parts.setdefault(key, Part(rule, [], [], [[] for _ in names], [], [], alike))
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


def is_new(p: Tensor, state: State, rule: Rule) -> bool:
    """Whether a buffer of the parameter is still to be made."""
    return any(state.get(p, {}).get(name) is None for name in rule.buffer_names)


def _buffer(name: str, state: dict[str, Any], p: Tensor) -> Tensor:
    """The buffer of a parameter, zero at first."""
    if state.get(name) is None:
        state[name] = torch.zeros_like(p, memory_format=torch.preserve_format)
    buffer = state[name]
    if buffer.shape != p.shape:
        raise ValueError(
            f"`{name}`, {tuple(buffer.shape)}, does not have the shape of its parameter, "
            f"{tuple(p.shape)}. Load the state of the same model."
        )
    return buffer


def along(part: Part, rule: Rule, directions: list[Tensor], group: Group) -> Part:
    """The part with other directions instead of its gradients, and without buffers."""
    turned = replace(part, rule=rule, grads=directions, buffers=[], view=None)
    if part.alike:
        turned.view = view_of(directions, part.params)
    turned.path = choose_path(turned, group)
    return turned


def joined(parts: list[Part]) -> Decision:
    """Rejoin the parts; local shards become DTensors again, so that the norm spans all ranks."""
    wholes = [whole for part in parts for whole in part.wholes]
    grads = chain.from_iterable(part.grads for part in parts)
    return Decision({}, wholes, list(map(as_sharded, grads, wholes)))


def choose_path(part: Part, group: Group) -> Path:
    """The fastest path that is right."""
    if part.units is not None:
        return "kernel"
    if _is_one_by_one(part, group):
        return "loop"
    if group["foreach"] or group["fused"] is False or not part.alike:
        return "foreach"
    # torch's plain `add` streams p - h*g faster than a kernel does, unless ours has two threads.
    streams = _is_plain_and_large(part)
    if part.view is not None and not group["fused"] and (not streams or torch.get_num_threads() > 1):
        return "kernel"
    # torch's fused kernels take one lr for all tensors.
    is_supported = part.params[0].device.type in _get_fused_kernels_supported_devices()
    if is_supported and not streams and not part.rule.measures_tensors:
        return "fused"
    return "foreach"


def _is_one_by_one(part: Part, group: Group) -> bool:
    """Whether torch's functions for lists of tensors are not wanted, or not right."""
    if part.grads[0].layout != torch.strided:
        return True
    return group["foreach"] is False and not group["fused"]


def _is_plain_and_large(part: Part) -> bool:
    """Whether the update is p - h*g on large tensors in the host's memory."""
    if part.buffers or part.rule.weight_decay or not part.params[0].is_cpu:
        return False
    sizes = map(Tensor.numel, part.params) if part.view is None else part.view.sizes[:]
    return sum(sizes) > _LARGE * len(part.params)


def update(part: Part, scale: float) -> None:
    """Update a part with the gradient times ``scale``, by its path."""
    rule = part.rule
    if part.path == "kernel":
        rule.by_kernel(part, scale)
    else:
        by = {"fused": rule.by_fused, "foreach": rule.by_foreach, "loop": rule.by_loop}
        by[part.path](part, scale)
    if part.path in ("kernel", "fused"):
        tell_autograd(part.params)


def tell_autograd(params: list[Tensor]) -> None:
    """Say that values changed, as neither our kernel nor torch's fused ones do: a stale graph is noticed."""
    torch.autograd.graph.increment_version(params)


def _views(steps: list[Tensor], *lists: list[Tensor]) -> tuple[View | None, View | None]:
    """Where the tensors and their steps lie, if our kernel can walk through all of them."""
    view = view_of(*lists)
    if view is None or not steps:
        return view, None
    steps_view = view.kernel.view(steps, may_be_negated=False)
    if steps_view is None or set(steps_view.sizes) != {1}:  # it reads one number of each
        return None, None
    return view, steps_view


def _is_step_for(device: torch.device, step: object) -> bool:
    """Whether the number of steps is kept so that torch's kernel can read it where the parameter is."""
    if type(step) is not Tensor or step.device != device or step.numel() != 1:
        return False
    return step.is_cpu or step.dtype is torch.float32


def _step_of(step: Tensor | float | None, p: Tensor) -> Tensor:
    """The number of steps as torch keeps it, where the parameter is; nothing is read."""
    dtype = _get_scalar_dtype(is_fused=not p.is_cpu)
    if step is None:
        return torch.zeros((), dtype=dtype, device=p.device)
    if not isinstance(step, Tensor):
        step = torch.tensor(float(step), device="cpu")
    if step.numel() != 1:
        raise ValueError(f"`step` must be one number, got shape {tuple(step.shape)}. Load a whole state.")
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
        tensors = list(map(torch.view_as_real, tensors))
    if tensors[0].dim() == 0 and g.layout == torch.strided:
        # torch gives a product of two tensors without dimensions the wider dtype, here that of the scale.
        tensors = [t.view(1) for t in tensors]
    return tensors


def _are_plain(bundle: Bundle) -> bool:
    """:func:`_kernel_accepts` for many tensors in the common case: a quick yes, or ask one by one."""
    lists = [bundle.params, bundle.grads, *bundle.buffers]
    every = list(chain(*lists))
    if not bundle.has_state or not set(map(type, every)) <= set(PLAIN):
        return False  # a buffer that is missing, or something that torch must take apart first
    kinds, shapes = set(map(_kind, every)), list(map(_shape, bundle.params))
    if len(kinds) > 1 or any(list(map(_shape, tensors)) != shapes for tensors in lists):
        return False
    ((dtype, device, layout),) = kinds
    has_kernel = dtype in DTYPES if device.type == "cpu" else dtype.is_floating_point
    return (
        has_kernel
        and layout == torch.strided
        and all(map(Tensor.is_contiguous, every))
        and all(map(Tensor.dim, bundle.params))
        and not any(map(Tensor.is_neg, bundle.grads))
        and not any(map(Tensor._is_zerotensor, bundle.grads))
        and all(_is_step_for(device, step) for step in bundle.steps)
    )


def _kernel_accepts(p: Tensor, g: Tensor, *buffers: Tensor) -> bool:
    """A kernel walks memory: unequal strides give wrong values; on CPU there is none for half precision.

    Nor must a mark say that a gradient's numbers in memory have the other sign, or are zeros without memory.
    """
    return (
        not (g.is_neg() or g._is_zerotensor())
        and (p.dtype in DTYPES or not p.is_cpu)
        and is_non_overlapping_and_dense(p)
        and all(same_layout(t, p) for t in (g, *buffers))
    )
