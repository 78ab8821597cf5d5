"""A gradient scaled by a function of its norm, inside the step: what all optimizers of the package share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from importlib import import_module
from typing import Any, TypedDict, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import Optimizer, ParamsT
from torch.torch_version import TorchVersion

from curvestep._checks import check_choice
from curvestep._kernel import View
from curvestep.distributed import as_sharded
from curvestep.optim._update import Bundle, Rule, average_, collect, product, sort, update
from curvestep.optim.counters import (
    COUNTERS,
    ClipStats,
    check_skip_above,
    clip_stats_of,
    count_step,
    is_above,
    joint_norm,
    new_counters,
    read_counters,
    stacked,
)
from curvestep.optim.double_clipping import DoubleClipping
from curvestep.vectors import cpu_norm, global_norm, is_readable

# Settings that hold for the whole optimizer: a group cannot have its own.
_SHARED = ("clip", "norm_scope", "nonfinite", "skip_above", "differentiable", "capturable")
# Tested with this version; torch.compile of 2.6 cannot take a step whole, so that it runs beside the graph.
_TAKES_STEPS = TorchVersion(torch.__version__) >= TorchVersion("2.13")
# Hooks that run at every step of every optimizer; None where torch keeps them elsewhere, see `_is_observed`.
_hooks_for_all: Any = tuple(
    getattr(import_module("torch.optim.optimizer"), name, None)
    for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
)


class ScaledOptions(TypedDict, total=False):
    """The options that every optimizer of the package takes, as :class:`ClippedSGD` describes them."""

    norm_scope: str
    nonfinite: str
    skip_above: float | str | None
    maximize: bool
    foreach: bool | None
    fused: bool | None
    differentiable: bool
    capturable: bool


_DEFAULTS: ScaledOptions = {
    "norm_scope": "global", "nonfinite": "raise", "skip_above": None, "maximize": False, "foreach": None,
    "fused": None, "differentiable": False, "capturable": False,
}  # fmt: skip


class ScaledOptimizer(Optimizer, ABC):
    """An optimizer that scales the gradient by a function of its norm before it uses it.

    A subclass names the group entry at which the rule bends (``threshold``), gives the factor on the
    gradient (:meth:`coefficient`) and says what is done with the scaled gradient (:meth:`rule`). Norms and
    their scopes, gradients that are not finite, counters, sharded tensors and checkpoints are the same for
    all.

    Args:
        params: Parameters, named parameters or parameter groups, as for every torch optimizer.
        values: ``lr`` and what else a group may have of its own.
        defaults: The options that there are beyond those of every optimizer, with their defaults.
        options: Options by name.

    Attributes:
        threshold: Name of the group entry with the gradient norm beyond which a step counts as clipped.
    """

    threshold: str

    def __init__(
        self, params: ParamsT, values: dict[str, Any], defaults: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        known: dict[str, Any] = {**defaults, **_DEFAULTS}
        if unknown := options.keys() - known.keys():
            raise TypeError(
                f"{type(self).__name__} has no option `{min(unknown)}`. It has {', '.join(known)}."
            )
        settings = known | dict(options)
        check_choice("norm_scope", settings["norm_scope"], ("global", "group", "tensor"))
        check_choice("nonfinite", settings["nonfinite"], ("raise", "skip", "propagate"))
        check_skip_above(settings["skip_above"])
        for option in ("fused", "foreach", "capturable"):
            if settings[option] and settings["differentiable"]:
                raise RuntimeError(f"`{option}` does not support `differentiable`")
        if settings["fused"] and settings["foreach"]:
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
        if settings["capturable"] and settings["nonfinite"] == "raise":
            raise ValueError(
                "`capturable=True` cannot raise for a gradient that is not finite: a graph reads nothing. "
                'Use nonfinite="skip" or "propagate".'
            )
        self.check_group(values | settings)  # before the parameters are looked at, as torch does
        super().__init__(params, values | settings)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """As torch's fused optimizers: a ``GradScaler`` leaves it to such a step to unscale, and to skip."""
        return bool(self.defaults["fused"])

    @abstractmethod
    def rule(self, group: dict[str, Any]) -> Rule:
        """What a step does with the scaled gradients of a group."""

    @abstractmethod
    def coefficient(self, norm: Any, group: dict[str, Any]) -> Any:
        """Factor on a gradient of this norm: step size over ``lr``, of the same kind as ``norm``.

        Asked once for each clipping decision of a step, and with norm 0 when a group is added: raise where
        the values of the group make no sense.

        Args:
            norm: A float, or on an accelerator a device scalar; reading it would synchronize.
            group: The parameter group.
        """

    def coefficient_at_zero(self, group: dict[str, Any]) -> float:
        """The coefficient at zero gradient, to which :meth:`clip_stats` relates those of the steps."""
        return 1.0

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise where the values of a group make no sense."""
        lr = group["lr"]
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        on_device = isinstance(lr, Tensor) and lr.device.type != "cpu"  # reading it would synchronize
        if not on_device and not 0.0 <= checked_number("lr", lr) < math.inf:
            raise ValueError(f"Invalid learning rate: {lr}")
        if not 0.0 <= checked_number("weight_decay", group["weight_decay"]) < math.inf:
            raise ValueError(f"Invalid weight_decay value: {group['weight_decay']}")
        self.coefficient(0.0, group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with values of its own where it names them."""
        if isinstance(param_group, dict):
            for name in _SHARED:
                if name in param_group and param_group[name] != self.defaults.get(name):
                    raise ValueError(
                        f"`{name}` holds for all groups: set it for the optimizer, not for one group."
                    )
            self.check_group(self.defaults | param_group)
        super().add_param_group(param_group)
        self._look_for_marks()

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step with the gradients that are in ``.grad``; they stay as they are.

        Args:
            closure: Evaluates the model again and returns the loss.
        """
        if torch.compiler.is_compiling():
            return self._unobserved_step(closure) if self._is_traceable() else _eager_step(self, closure)
        if type(self).step is ScaledOptimizer.step and _is_observed(self):
            return _observed_step(self, closure)
        return self._unobserved_step(closure)

    # torch wraps every `step` for profilers and hooks, which costs a small model a tenth of its step. This
    # attribute keeps it from doing so: its wrapper is used only where somebody looks.
    step.hooked = True  # pyright: ignore[reportFunctionMemberAccess]

    def clip_stats(self) -> ClipStats:
        """Last gradient norm and coefficient, and how often clipping fired.

        With several clipping decisions in a step (``norm_scope`` "group" or "tensor", or groups with their
        own threshold) a step counts as clipped to the share of decisions that fired. Part of the state
        dict, so a resumed run goes on counting. On an accelerator this call waits for the device, once.
        """
        return clip_stats_of(self._counters, self._double_clipping)

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint: plain numbers and tensors, loads with ``weights_only=True``."""
        state = super().state_dict()
        state["param_groups"][0][COUNTERS] = read_counters(self._counters, self._double_clipping)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A state dict of an older version, or of torch's optimizer, lacks some entries.
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        self._look_for_marks()

    def _look_for_marks(self) -> None:
        """Keep our kernel from parameters whose numbers lie in memory with the wrong sign."""
        self._by_kernel = not any(p.is_neg() for group in self.param_groups for p in group["params"])

    def __repr__(self) -> str:
        counters = self.param_groups[0].pop(COUNTERS, None)
        try:
            return super().__repr__()
        finally:
            if counters is not None:
                self.param_groups[0][COUNTERS] = counters

    def _unobserved_step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            per_tensor = self.defaults["norm_scope"] == "tensor"
            bundles = collect(
                self.param_groups, self.state, self.rule, per_tensor=per_tensor, by_kernel=self._by_kernel
            )
            if bundles:
                self._step(bundles)
        return loss

    def _is_traceable(self) -> bool:
        """Whether torch.compile can take the step whole: no hook looks at it, no number has to be read."""
        if not self.defaults["capturable"]:  # first: what is looked at must not change, or it compiles again
            return False
        if not _TAKES_STEPS or _has_hooks(self):
            return False
        return bool(self.state) or not any(group.get("dampening") for group in self.param_groups)

    def _step(self, bundles: list[Bundle]) -> None:
        if self.defaults["capturable"]:
            _check_one_place(bundles)
        norms, groups = self._norms(bundles), [bundle.group for bundle in bundles]
        # A GradScaler leaves the gradients scaled, and says by how much and whether one overflowed.
        given = (getattr(self, name, None) for name in ("grad_scale", "found_inf"))
        # Each is read where nothing has to be waited for.
        scaled_by, overflow = (n.item() if n is not None and is_readable(n) else n for n in given)
        unscale = 1.0 if scaled_by is None else 1 / scaled_by
        norms = norms if scaled_by is None else [product(n, unscale) for n in norms]
        norm = joint_norm(norms, self.defaults["norm_scope"])
        # torch.distributed.checkpoint makes an optimizer create its state by a step that changes nothing.
        counts = norm != 0 if not self.state and all(map(has_zero_lr, self.param_groups)) else True
        skip = counts is not False and self._skip(norms, norm, overflow)
        # The first gradient that a buffer sees is not damped, so it has to be known whether it was seen.
        if any(b.group.get("dampening") and any(None in listed for listed in b.buffers) for b in bundles):
            skip = bool(skip)
        if skip is True:
            count_step(self._counters, norm, [1.0], [False], skip)
            return
        if not self.defaults["capturable"]:  # a graph would fill what is kept again and again
            self._double_clipping.look(norm, [bundle.grads for bundle in bundles])
        parts = [sort(bundle, self.state) for bundle in bundles]
        seen = norms  # what the rule looks at: the gradient, or the direction averaged by momentum
        if self.defaults.get("clip") == "momentum":
            parts = [[average_(part, unscale, skip=skip) for part in of_bundle] for of_bundle in parts]
            seen = self._norms([_joined(of_bundle) for of_bundle in parts])
            unscale = 1.0
        coefficients = [self.coefficient(n, group) for n, group in zip(seen, groups, strict=True)]
        for of_bundle, coefficient in zip(parts, coefficients, strict=True):
            for part in of_bundle:
                update(part, product(coefficient, unscale), skip=skip)
        relative = [c / self.coefficient_at_zero(g) for c, g in zip(coefficients, groups, strict=True)]
        fired = [n > g[self.threshold] for n, g in zip(seen, groups, strict=True)]
        count_step(self._counters, norm, relative, fired, skip, counts)

    def _norms(self, bundles: list[Bundle]) -> list[Any]:
        """One norm for each bundle; they are all the same if the scope is global."""
        if self.defaults["norm_scope"] == "global" and len(bundles) > 1:
            one_kind = {b.view.doubles if b.view else None for b in bundles} in ({0}, {1})
            return [self._norm([g for b in bundles for g in b.grads], one_kind)] * len(bundles)
        return [self._norm(b.grads, b.view is not None, b.view) for b in bundles]

    def _norm(self, tensors: list[Tensor], one_kind: bool, view: View | None = None) -> Any:
        """A float, or a tensor where reading the number would synchronize or lose its gradient.

        ``one_kind`` says that all are plain CPU tensors of one dtype, ``view`` where they lie.
        """
        if self.defaults["differentiable"]:
            return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t) for t in tensors]))
        if one_kind:
            return cpu_norm(tensors, view)
        norm = global_norm(tensors)
        if not norm.is_cpu:
            _check_capture(self)
        if norm.device.type == "meta" and (self.defaults["fused"] or self.defaults["nonfinite"] == "raise"):
            needs = "`fused=True`" if self.defaults["fused"] else '`nonfinite="raise"`'
            raise RuntimeError(
                f"{needs} requires all the params to be floating point Tensors with values, and some are on "
                "the `meta` device. Give them memory first, by `model.to_empty(device=...)`."
            )
        return norm.item() if is_readable(norm) else norm

    def _skip(self, norms: list[Any], norm: Any, overflow: Any) -> Tensor | bool:
        """True: skip. A device scalar: skip if it is 1. False: go on. Raises where that is wanted.

        ``overflow`` is what a GradScaler found, 1 or 0, None if there is none: it skips whatever the policy.
        """
        policy, bound = self.defaults["nonfinite"], self.defaults["skip_above"]
        flags: list[Any] = [overflow is not None and overflow > 0]
        if bound is not None:
            above = is_above(norm.item() if self.defaults["differentiable"] else norm, bound, self._counters)
            flags.append(above)
        large = len(flags)
        if policy != "propagate":
            flags += [not math.isfinite(n) if type(n) is float else ~n.detach().isfinite() for n in norms]
        together = stacked(flags)
        if together is not None:
            if policy != "raise" and not self.defaults["differentiable"]:
                return (together.sum() > 0).to(torch.float32)
            flags = together.tolist()  # the one wait of such a step
        if policy == "raise" and any(flags[large:]) and not flags[0]:
            raise FloatingPointError(nonfinite_gradient(self.param_groups))
        return any(flags)

    @cached_property
    def _double_clipping(self) -> DoubleClipping:
        return DoubleClipping(self)

    @property
    def _counters(self) -> dict[str, Any]:
        return self.param_groups[0].setdefault(COUNTERS, new_counters())


_observed_step = Optimizer.profile_hook_step(ScaledOptimizer._unobserved_step)
# Two passes over memory, which torch.compile would not make fewer: it leaves a step that has to read numbers
# out of its graphs.
_eager_step: Callable[..., Any] = _disable_dynamo(_observed_step)
# What torch says where it is asked for one graph and cannot make it.
_eager_step.__dict__.update(
    _torchdynamo_disable=True,
    _torchdynamo_disable_msg='a step reads numbers, unless it has capturable=True, nonfinite="skip" or '
    '"propagate", and no hooks; the first one with `dampening` does even then',
)


# Raises where a graph is recorded of a step that does not promise to be capturable.
_check_capture: Callable[[Optimizer], None] = getattr(
    Optimizer, "_accelerator_graph_capture_health_check", Optimizer._cuda_graph_capture_health_check
)


def _is_observed(optimizer: Optimizer) -> bool:
    """Whether a profiler or a hook looks at the steps of ``optimizer``; yes, if torch does not tell."""
    try:
        return torch.autograd._profiler_enabled() or _has_hooks(optimizer)  # pyright: ignore[reportPrivateImportUsage]
    except (AttributeError, TypeError):
        return True


def _has_hooks(optimizer: Optimizer) -> bool:
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or any([len(hooks) for hooks in _hooks_for_all])
    )


def _check_one_place(bundles: list[Bundle]) -> None:
    """Raise if a graph would have to keep a number that it cannot read, or to read one."""
    tensors = [t for bundle in bundles for t in (*bundle.params, bundle.rule.lr) if isinstance(t, Tensor)]
    if len({t.is_cpu for t in tensors}) > 1:
        raise RuntimeError(
            "`capturable=True` needs all parameters on an accelerator or all on cpu, and a Tensor `lr` where "
            "they are. Move them, or give `lr` as a float, which a graph keeps as it is."
        )


def has_zero_lr(group: dict[str, Any]) -> bool:
    """Whether the learning rate is known to be zero; on a device it is not read."""
    lr = group["lr"]
    return bool(lr == 0) if not isinstance(lr, Tensor) or is_readable(lr) else False


def _joined(parts: list[Bundle]) -> Bundle:
    """The parts as one bundle again, of whole gradients: those that are sharded across their ranks."""
    if len(parts) == 1 and parts[0].params is parts[0].wholes:
        return parts[0]
    grads = [as_sharded(g, p) for part in parts for g, p in zip(part.grads, part.wholes, strict=True)]
    return Bundle(parts[0].group, parts[0].rule, grads=grads)


def nonfinite_gradient(groups: list[dict[str, Any]]) -> str:
    """Which parameter has the first gradient that is not finite, in words for an error."""
    way_out = (
        'Nothing was changed. Use nonfinite="skip" to leave such steps out, or "propagate" to take them.'
    )
    for number, group in enumerate(groups):
        for i, p in enumerate(group["params"]):
            # Times zero, a finite number is zero and any other is NaN; the norm itself may overflow.
            if p.grad is not None and math.isnan(global_norm([p.grad * 0])):
                names = group.get("param_names")
                name = f"`{names[i]}`" if names else f"parameter {i} of group {number}"
                return f"The gradient of {name}, shape {tuple(p.shape)}, is not finite. {way_out}"
    return f"All gradients are finite, but their norm overflows. {way_out}"


def checked_number(name: str, value: Any) -> float:
    """``value`` as it is, if it is a number."""
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"`{name}` must be a number, got {value!r}.")
    return value
