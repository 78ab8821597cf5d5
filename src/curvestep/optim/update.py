"""One update of many parameters, with the factor on the gradient folded in.

Which tensors go together and which path they take is decided here, once for each step and every
:class:`Rule`; the rules are in ``sgd.py`` and ``adamw.py``. None of the paths writes to a gradient.
"""
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportUnknownVariableType=false
# torch names its functions for lists of tensors with an underscore.

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import partial
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import _get_scalar_dtype
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from curvestep.tensors.distributed import as_sharded, is_sharded, placed
from curvestep.tensors.kernel import (
    DTYPES,
    PLAIN,
    Units,
    View,
    is_non_overlapping_and_dense,
    same_layout,
    view_of,
)
from curvestep.tensors.vectors import check_memory, is_readable

if TYPE_CHECKING:
    from curvestep.clip_rules import ClipRule
    from curvestep.optim.rule_thresholds import PerUnit

# Our kernel, torch's fused kernel, torch's functions for lists of tensors, or one tensor after the other.
Path: TypeAlias = Literal["kernel", "fused", "foreach", "loop"]
Settings: TypeAlias = dict[str, Any]  # of a parameter group of torch
State: TypeAlias = MutableMapping[Tensor, Any]  # the state of torch's optimizers
FloatOrTensor: TypeAlias = float | Tensor  # a float on the host, a tensor of one element on a device
Scale = TypeVar("Scale", float, Tensor, float | Tensor)
Group = TypeVar("Group", bound="ClipGroup")

# Elements a tensor, on average, from which plain descent is a matter of memory bandwidth alone.
LARGE = 1 << 19


@dataclass(slots=True)
class ClipGroup:
    """Parameters whose gradients are clipped together, by one norm.

    ``number`` is that of the parameter group, ``index`` that of the parameter in it if it is clipped alone.
    """

    settings: Settings
    params: list[Tensor]
    grads: list[Tensor]
    number: int = 0
    index: int = 0
    clip_rule: ClipRule | None = None  # None if the threshold is a number
    view: View | None = None  # where the gradients lie, if our kernel can walk through them
    per_unit: PerUnit | None = None  # norms and factors, if each tensor or unit is clipped by itself
    clips_tensors: bool = False  # whether that is each tensor, by a threshold that is a number

    @property
    def clips_units(self) -> bool:
        """Whether its rule gives each tensor, or each unit of it, a threshold of its own."""
        return self.clip_rule is not None and self.clip_rule.each != "norm"

    def clip_all(self) -> Settings:
        """Fix the factor of each tensor; the settings, by which there is nothing more to clip."""
        assert self.per_unit is not None
        self.per_unit.clip(self.settings["max_norm"])
        return self.settings | {"max_norm": math.inf}


def clip_groups(settings: Settings, number: int, norm_scope: str, make: Callable[..., Group]) -> list[Group]:
    """The parameters of a group that have a gradient, together or each for itself."""
    params: list[Tensor] = settings["params"]
    grads: list[Any] = [p.grad for p in params]
    indices: Sequence[int] = range(len(params))
    # By type and by map: of thousands of tensors a loop takes a tenth of the step.
    if type(None) in set(map(type, grads)):
        indices = [i for i in indices if grads[i] is not None]
        params = [params[i] for i in indices]
        grads = [grads[i] for i in indices]
    rule = clip_rule_of(settings)
    if norm_scope == "tensor":
        each = zip(params, grads, indices, strict=True)
        return [make(settings, [p], [g], number, i, rule) for p, g, i in each]
    return [make(settings, params, grads, number, 0, rule)] if params else []


def clip_rule_of(settings: Settings) -> ClipRule | None:
    """The rule by which a group is clipped, None if it is clipped at a number."""
    max_norm = settings.get("max_norm")
    if max_norm is None or isinstance(max_norm, (float, int)):
        return None
    from curvestep.clip_rules import ClipRule  # only who gives one needs them

    return max_norm if isinstance(max_norm, ClipRule) else None


@dataclass(slots=True)
class Rule(ABC):
    """The constants of an update, all but the factor on the gradient, and the update on each path."""

    lr: FloatOrTensor
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

    def for_new_buffers(self) -> Rule:
        """The rule for a parameter whose buffers are new."""
        return self

    def update_momentum_(self, part: Part, scale: FloatOrTensor) -> tuple[Rule, list[Tensor]]:
        """Take the gradients into the momentum; the rule for a step along it, and the momentum."""
        return self, part.grads

    @abstractmethod
    def by_kernel(self, part: Part, scale: float) -> None:
        """Update by our own kernel."""

    @abstractmethod
    def by_fused(self, part: Part, scale: FloatOrTensor, skip: Tensor | None = None) -> None:
        """Update by torch's fused kernel, which leaves parameters and buffers alone where ``skip`` is 1."""

    @abstractmethod
    def by_foreach(self, part: Part, scale: FloatOrTensor) -> None:
        """Update by torch's functions for lists of tensors."""

    @abstractmethod
    def by_loop(self, part: Part, scale: FloatOrTensor) -> None:
        """Update one parameter at a time: the formula."""

    def signed(self, scale: Scale) -> Scale:
        """The factor on the gradient of what is descended."""
        return -scale if self.maximize else scale


@dataclass(slots=True)
class UpdateGroup(ClipGroup):
    """Parameters that are clipped together, with what their update needs.

    ``view`` is where gradients, parameters and buffers lie, if our kernel can walk through them all.
    """

    rule: Rule = field(kw_only=True)
    buffers: list[list[Any]] = field(default_factory=list)  # a list for each name, of tensors or None
    steps: list[Tensor] = field(default_factory=list)  # of each parameter, if the rule counts them
    has_state: bool = True  # whether every parameter has its buffers
    steps_view: View | None = None

    @property
    def makes_buffers(self) -> bool:
        """Whether a buffer of some parameter is still to be made."""
        return not self.has_state or any(buffer is None for buffers in self.buffers for buffer in buffers)


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
    global_params: list[Tensor]  # that `params` are the local parts of
    same_layout: bool = (
        True  # whether each gradient and buffer has dtype, device and strides of its parameter
    )
    view: View | None = None
    steps_view: View | None = None
    units: Units | None = None  # factors on pieces of the gradient, beside that on all
    path: Path = "loop"


def collect(
    param_groups: list[Settings], state: State, rule_of: Callable[[Settings], Rule], norm_scope: str
) -> list[UpdateGroup]:
    """The parameters that have a gradient, by what is clipped together."""
    collected: list[UpdateGroup] = []
    for number, settings in enumerate(param_groups):
        rule = rule_of(settings)
        if isinstance(rule.lr, Tensor):
            rule.lr = rule.lr.item() if is_readable(rule.lr) else rule.lr.view(())
        for group in clip_groups(settings, number, norm_scope, partial(UpdateGroup, rule=rule)):
            _find_state(group, state)
            if group.has_state:
                lists = (group.grads, group.params, *group.buffers)
                group.view, group.steps_view = _views(group.steps, *lists)
            if group.view is None:
                _check_tensors(group)
            collected.append(group)
    return collected


def _find_state(group: UpdateGroup, state: State) -> None:
    """Look up buffers and steps, which are not there before the first step."""
    names = group.rule.buffer_names
    params = group.params
    if not names:
        return
    # The same tensors in the same order have no hash to compute. By map, as in `clip_groups`.
    if len(state) == len(params) and all(map(is_, state, params)):
        states = list(state.values())
    else:
        states = [state.get(p, {}) for p in params]
    try:
        group.buffers = [[of_param[name] for of_param in states] for name in names]
        if group.rule.counts_steps:
            group.steps = [of_param["step"] for of_param in states]
    except KeyError:
        group.has_state = False


def _check_tensors(group: UpdateGroup) -> None:
    """Raise if torch could not read the tensors, or the rule does not take them."""
    check_memory("a parameter", group.params)
    check_memory("a gradient", group.grads)
    check_memory("a buffer", list(chain(*group.buffers)))
    if group.rule.sparse_error and any(g.layout != torch.strided for g in group.grads):
        raise RuntimeError(group.rule.sparse_error)


def parts_of(group: UpdateGroup, state: State) -> list[Part]:
    """The group in parts that one call can update, each parameter with the buffers that its rule names."""
    units = None
    if group.per_unit is not None:
        units = group.per_unit.units
        if units is None:  # for another path than our kernel the gradients become a scaled copy
            group.grads = group.per_unit.scaled(group.grads)
            group.view = None
    if group.view is None and not _are_plain(group):
        return _sorted(group, state)
    rule = group.rule
    if isinstance(rule.lr, Tensor):
        rule = _rule_beside(group.params[0], rule)
    part = Part(rule, group.params, group.grads, group.buffers, group.steps, group.params)
    part.view = group.view
    part.steps_view = group.steps_view
    part.units = units
    part.path = choose_path(part, group.settings)
    return [part]


def _sorted(group: UpdateGroup, state: State) -> list[Part]:
    """The parts of a group whose tensors differ, or whose buffers are missing."""
    parts: dict[tuple[object, ...], Part] = {}
    names = group.rule.buffer_names
    for global_param, grad in zip(group.params, group.grads, strict=True):
        rule = group.rule
        if is_new(global_param, state, rule):
            rule = rule.for_new_buffers()
        buffers = [_buffer(name, state[global_param], global_param) for name in names]
        p, g, *buffers = _local_and_real(global_param, grad, *buffers)
        is_accepted = _kernel_accepts(p, g, *buffers)
        key = (p.dtype, p.device, g.layout, is_accepted, rule is not group.rule)
        if isinstance(rule.lr, Tensor):
            rule = _rule_beside(p, rule)
        part = parts.setdefault(key, Part(rule, [], [], [[] for _ in names], [], [], is_accepted))
        part.params.append(p)
        part.grads.append(g)
        part.global_params.append(global_param)
        for listed, buffer in zip(part.buffers, buffers, strict=True):
            listed.append(buffer)
        if rule.counts_steps:
            state[global_param]["step"] = _step_of(state[global_param].get("step"), p)
            part.steps.append(state[global_param]["step"])
    for part in parts.values():
        is_cut = part.rule.measures_tensors and any(is_sharded(p) for p in part.global_params)
        if part.same_layout and not is_cut:
            part.view, part.steps_view = _views(part.steps, part.grads, part.params, *part.buffers)
        part.path = choose_path(part, group.settings)
    return list(parts.values())


def _rule_beside(p: Tensor, rule: Rule) -> Rule:
    """The rule with its learning rate where the parameter is."""
    lr = _beside(p, rule.lr)
    return rule if lr is rule.lr else replace(rule, lr=lr)


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


def with_momentum(part: Part, scale: FloatOrTensor, skip: Tensor | None, settings: Settings) -> Part:
    """Take ``scale`` times the gradients into the momentum; the part with it instead, and without buffers."""
    with unless(skip, [*chain(*part.buffers)]):
        rule, directions = part.rule.update_momentum_(part, _beside(part.params[0], scale))
    turned = replace(part, rule=rule, grads=directions, buffers=[], view=None)
    if part.same_layout:
        turned.view = view_of(directions, part.params)
    turned.path = choose_path(turned, settings)
    return turned


def rejoin(group: UpdateGroup, parts: list[Part]) -> ClipGroup:
    """Rejoin the parts of a group; local shards become DTensors again, so that the norm spans all ranks."""
    params: list[Tensor] = []
    grads: list[Tensor] = []
    for part in parts:
        params += part.global_params
        for grad, global_param in zip(part.grads, part.global_params, strict=True):
            grads.append(as_sharded(grad, global_param))
    return ClipGroup(group.settings, params, grads, group.number, group.index, group.clip_rule)


def choose_path(part: Part, settings: Settings) -> Path:
    """The fastest path that is right."""
    if part.units is not None:
        return "kernel"
    foreach = settings["foreach"]
    fused = settings["fused"]
    # torch's functions for lists of tensors are not wanted, or not right.
    if part.grads[0].layout != torch.strided or (foreach is False and not fused):
        return "loop"
    if foreach or fused is False or not part.same_layout:
        return "foreach"
    # torch's plain `add` streams p - h*g faster than a kernel does, unless ours has two threads.
    streams = _is_plain_and_large(part)
    if part.view is not None and not fused and (not streams or torch.get_num_threads() > 1):
        return "kernel"
    # torch's fused kernels take one lr for all tensors.
    is_supported = part.params[0].device.type in _get_fused_kernels_supported_devices()
    if is_supported and not streams and not part.rule.measures_tensors:
        return "fused"
    return "foreach"


def _is_plain_and_large(part: Part) -> bool:
    """Whether the update is p - h*g on large tensors in the host's memory."""
    if part.buffers or part.rule.weight_decay or not part.params[0].is_cpu:
        return False
    sizes = [p.numel() for p in part.params] if part.view is None else part.view.sizes[:]
    return sum(sizes) > LARGE * len(part.params)


def update(part: Part, scale: FloatOrTensor, skip: Tensor | None = None) -> None:
    """Update a part with the gradient times ``scale``, by its path; where ``skip`` is 1, nothing changes."""
    if isinstance(scale, Tensor):
        scale = _beside(part.params[0], scale)
    if skip is not None:
        _update_unless(skip.to(part.params[0].device), part, scale)
    elif part.path == "kernel":
        part.rule.by_kernel(part, float(scale))
    elif part.path == "fused":
        part.rule.by_fused(part, scale)
    elif part.path == "foreach":
        part.rule.by_foreach(part, scale)
    else:
        part.rule.by_loop(part, scale)
    if part.path in ("kernel", "fused"):
        bump_versions(part.params)


def _update_unless(skip: Tensor, part: Part, scale: FloatOrTensor) -> None:
    """Update a part on a device; where ``skip`` is 1, nothing changes, and nothing is read."""
    if part.path == "fused":  # only torch's kernel can leave the decision on the device by itself
        part.rule.by_fused(part, scale, skip)
    else:
        by_functions = part.rule.by_foreach if part.path == "foreach" else part.rule.by_loop
        with unless(skip, [*part.params, *chain(*part.buffers)]):
            by_functions(part, scale)
    if part.steps:
        torch._foreach_sub_(part.steps, [skip] * len(part.steps))


@contextmanager
def unless(skip: Tensor | None, tensors: list[Tensor]) -> Generator[None]:
    """A block after which the tensors are as before where ``skip`` is 1; nothing is read."""
    if skip is None:
        yield
        return
    before = [t.clone() for t in tensors]
    yield
    for t, old in zip(tensors, before, strict=True):
        t.copy_(torch.where(skip.to(t.device) > 0, old, t))


def _beside(p: Tensor, number: FloatOrTensor) -> FloatOrTensor:
    """The number where the parameter is; on the host it is waited for."""
    if not isinstance(number, Tensor) or number.device == p.device:
        return number
    return number.item() if p.is_cpu else number.to(p.device)


def bump_versions(params: list[Tensor]) -> None:
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
        tensors = [torch.view_as_real(t) for t in tensors]
    if tensors[0].dim() == 0 and g.layout == torch.strided:
        # torch gives a product of two tensors without dimensions the wider dtype, here that of the scale.
        tensors = [t.view(1) for t in tensors]
    return tensors


def _are_plain(group: UpdateGroup) -> bool:
    """:func:`_kernel_accepts` for many tensors in the common case: a quick yes, or ask one by one."""
    lists = [group.params, group.grads, *group.buffers]
    every = list(chain(*lists))
    if not group.has_state or not {type(t) for t in every} <= set(PLAIN):
        return False  # a buffer that is missing, or something that torch must take apart first
    kinds = {(t.dtype, t.device, t.layout) for t in every}
    shapes = [p.shape for p in group.params]
    if len(kinds) > 1 or any([t.shape for t in tensors] != shapes for tensors in lists):
        return False
    ((dtype, device, layout),) = kinds
    has_kernel = dtype in DTYPES if device.type == "cpu" else dtype.is_floating_point
    return (
        has_kernel
        and layout == torch.strided
        and all([t.is_contiguous() for t in every])
        and all([p.dim() > 0 for p in group.params])
        and not any([g.is_neg() or g._is_zerotensor() for g in group.grads])
        and all([_is_step_for(device, step) for step in group.steps])
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
