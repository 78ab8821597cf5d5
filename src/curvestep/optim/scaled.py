"""A gradient scaled by a function of its norm, inside the step: what all optimizers of the package share."""
# pyright: reportPrivateUsage=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Hooks and the profiler of torch have an underscore.

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from operator import truediv
from typing import Any, TypedDict, TypeVar, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import (
    Optimizer,
    ParamsT,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

from curvestep.clip_rules import ClipRule, Quantity
from curvestep.optim._update import Bundle, Rule, collect, joined, parts_of
from curvestep.optim.counters import ClipEdge, ClipStats, Spike
from curvestep.optim.device import DeviceStep, step_on_device
from curvestep.optim.policy import Group, Policy, as_float, check_scope, is_on_host, rule_of
from curvestep.optim.record import HostStep, StepRecord
from curvestep.tensors.distributed import in_zero_redundancy_optimizer

Norm = TypeVar("Norm", float, Tensor)

# Settings that hold for the whole optimizer: a group cannot have its own.
_SHARED = ("clip", "norm_scope", "nonfinite", "skip_above", "capturable")


class ScaledOptions(TypedDict, total=False):
    """The options that every optimizer of the package takes, as :class:`ClippedSGD` describes them."""

    norm_scope: str
    nonfinite: str
    skip_above: float | str | None
    maximize: bool
    foreach: bool | None
    fused: bool | None
    capturable: bool


_DEFAULTS: ScaledOptions = {
    "norm_scope": "global", "nonfinite": "raise", "skip_above": None, "foreach": None, "fused": None,
    "capturable": False,
}  # fmt: skip


class ScaledOptimizer(Optimizer, ABC):
    """An optimizer that scales the gradient by a function of its norm before it uses it.

    A subclass names the group entry at which the rule bends (``threshold``), gives the factor on the
    gradient (:meth:`coefficient`) and says what is done with the scaled gradient (:meth:`rule`). Norms and
    their scopes, gradients that are not finite, counters, sharded tensors and checkpoints are the same for
    all. ``values`` are ``lr`` and what else a group may have of its own, ``defaults`` the options beyond
    those of every optimizer.
    """

    threshold: str  # name of the group entry with the gradient norm beyond which a step counts as clipped

    def __init__(
        self, params: ParamsT, values: Group, defaults: Mapping[str, object], options: Mapping[str, object]
    ) -> None:
        known: Group = {**defaults, **_DEFAULTS}
        if unknown := options.keys() - known.keys():
            raise TypeError(
                f"{type(self).__name__} has no option `{min(unknown)}`. It has {', '.join(known)}."
            )
        settings = known | dict(options)
        if in_zero_redundancy_optimizer():
            raise RuntimeError(
                f"ZeroRedundancyOptimizer gives each rank a part of the gradients, and {type(self).__name__} "
                "would clip by the norm of that part. Use fully_shard (FSDP2), whose shards it adds up."
            )
        self._policy = _policy_of(settings)
        self._record = StepRecord(type(self).__name__)
        if settings["fused"] and settings["foreach"]:
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")  # as torch says it
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
    def rule(self, group: Group) -> Rule:
        """Update a group by its scaled gradients."""

    @abstractmethod
    def coefficient(self, norm: Norm, group: Group) -> Norm:
        """Factor on a gradient of this norm: step size over ``lr``, of the same kind as ``norm``.

        Asked once for each clipping decision of a step, and with norm 0 when a group is added: raise where
        the values of the group make no sense.

        Args:
            norm: A float, or on an accelerator a device scalar; reading it would synchronize.
            group: The parameter group.
        """

    def coefficient_at_zero(self, group: Group) -> float:
        """The coefficient at zero gradient, to which :meth:`clip_stats` relates those of the steps."""
        return 1.0

    def clip_edge(self) -> ClipEdge:
        """Where the rule bends: the gradient norm, and the coefficient there.

        A step whose coefficient is below that of the edge counts as clipped.
        """
        norms: list[float] = []
        coefficients: list[float] = []
        for group in self.param_groups:
            if rule_of(group) is not None:  # which clips at another norm in each step
                return ClipEdge(math.nan, 1.0)
            norm = float(group[self.threshold])
            norms.append(norm)
            coefficients.append(self.coefficient(norm, group) / self.coefficient_at_zero(group))
        has_one = len(set(norms)) == 1
        return ClipEdge(norms[0] if has_one else math.nan, max(coefficients))

    def check_group(self, group: Group) -> None:
        """Raise where the values of a group make no sense."""
        lr = group["lr"]
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        if not isinstance(lr, Tensor) or lr.is_cpu:  # reading it would synchronize
            check_between("lr", lr, "learning rate")
        check_between("weight_decay", group["weight_decay"], "weight_decay value")
        rule = rule_of(group)
        if rule is None or self.threshold != "max_norm":
            self.coefficient(0.0, group)
        else:
            _check_rule(rule, group)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of parameters, with values of its own where it names them."""
        if isinstance(param_group, dict):  # pyright: ignore[reportUnnecessaryIsInstance]  # else torch refuses it
            group = self.defaults | param_group
            for name in _SHARED:
                if group.get(name) != self.defaults.get(name):
                    raise ValueError(
                        f"`{name}` holds for all groups: set it for the optimizer, not for one group."
                    )
            self.check_group(group)
        super().add_param_group(param_group)
        if any(map(Tensor.is_neg, self.param_groups[-1]["params"])):
            self.param_groups.pop()
            raise ValueError("A parameter is the negated view of another tensor. Give it `resolve_neg()`.")

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
            return _eager_step(self, closure)
        if _is_observed(self):
            return _observed_step(self, closure)
        return self._unobserved_step(closure)

    # torch wraps every `step` for profilers and hooks, which costs a small model a tenth of its step. This
    # attribute keeps it from doing so: its wrapper is used only where somebody looks.
    step.hooked = True  # pyright: ignore[reportFunctionMemberAccess]

    def spikes(self) -> list[Spike]:
        """The last 100 steps whose gradient norm stood out from those before, with the layer that caused it.

        A spike is more than six standard deviations above the mean of the last 100 norms. Steps on the host
        are looked at, those on an accelerator are not.
        """
        return self._record.spikes()

    def clip_stats(self, *, layers: bool = False) -> ClipStats:
        """Last gradient norm and coefficient, and how often clipping fired.

        With several clipping decisions in a step (``norm_scope`` "group" or "tensor", or groups with their
        own threshold) a step counts as clipped to the share of decisions that fired. Part of the state
        dict, so a resumed run goes on counting. On an accelerator this call waits for the device, once.

        Args:
            layers: Add ``layers``, the norm of each gradient in ``.grad``: ask before ``zero_grad()``.
        """
        return self._record.clip_stats(self.param_groups, layers=layers)

    def stop_double_clip_check(self) -> None:
        """Keep :meth:`clip_stats` from warning that gradients arrive already clipped."""
        self._record.stop_double_clip_check()

    def state_dict(self) -> Group:
        """The state for a checkpoint: plain numbers and tensors, loads with ``weights_only=True``."""
        state = super().state_dict()
        self._record.save(state["param_groups"])
        return state

    def __getstate__(self) -> Group:
        state = super().__getstate__()
        state["param_groups"] = list(map(dict, self.param_groups))
        self._record.save(state["param_groups"])
        return state

    def __setstate__(self, state: Group) -> None:
        super().__setstate__(state)
        # A state dict of an older version, or of torch's optimizer, lacks some entries and has others; torch
        # adds one to the defaults.
        self.defaults.pop("differentiable", None)
        for group in self.param_groups:
            group.pop("differentiable", None)
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        self._policy = _policy_of(self.defaults)
        self._record = StepRecord(type(self).__name__)
        self._record.load(self.param_groups, self.defaults.get(self.threshold))

    def _unobserved_step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            bundles = collect(self.param_groups, self.state, self.rule, self._policy.norm_scope)
            if self.defaults["capturable"]:
                _check_same_device(bundles)
            if not bundles:
                return loss
            if reads_numbers(bundles):
                norms = self._policy.norms(bundles)
                step = HostStep(self, self._policy, self._record, bundles, norms, as_float(loss))
                if not step.is_left_out():
                    self._take(bundles, step)
            else:
                step_on_device(self, bundles, self._policy, self._record)
        return loss

    def _take(self, bundles: list[Bundle], step: HostStep | DeviceStep) -> None:
        """Clip, update and count: in this order on the host and on a device."""
        if self.defaults.get("clip") == "momentum":
            parts = [step.averaged_(parts_of(bundle, self.state), bundle.group) for bundle in bundles]
            step.average(list(map(joined, parts)))
            groups = step.bounded()
        else:
            groups = step.bounded()
            parts = [parts_of(bundle, self.state) for bundle in bundles]
        norms: list[Quantity] = [*step.norms]
        coefficients: list[Quantity] = list(map(self.coefficient, norms, groups))
        for of_bundle, coefficient in zip(parts, coefficients, strict=True):
            for part in of_bundle:
                step.update(part, coefficient)
        relative = list(map(truediv, coefficients, map(self.coefficient_at_zero, groups)))
        step.look_for_spike(relative)
        step.count(relative, [group[self.threshold] for group in groups])


def reads_numbers(bundles: list[Bundle]) -> bool:
    """Whether every number of a step is read on the host: none has to be waited for."""
    return all(is_on_host(bundle) and not isinstance(bundle.rule.lr, Tensor) for bundle in bundles)


def _check_rule(rule: ClipRule, group: Group) -> None:
    """Raise where a rule cannot be followed."""
    if rule.each != "norm" and group.get("clip") == "momentum":
        raise ValueError(f'`max_norm={rule}` clips gradients, not averages. Use clip="gradient".')
    check_scope(rule, group["norm_scope"])


def _policy_of(settings: Group) -> Policy:
    return Policy(settings["norm_scope"], settings["nonfinite"], settings["skip_above"])


_observed_step = Optimizer.profile_hook_step(ScaledOptimizer._unobserved_step)
# Two passes over memory, which torch.compile would not make fewer: it leaves a step out of its graphs.
_eager_step: Callable[..., Any] = _disable_dynamo(_observed_step)
# What torch says where it is asked for one graph and cannot make it.
_eager_step.__dict__.update(
    _torchdynamo_disable=True,
    _torchdynamo_disable_msg="a step is no graph: leave out `fullgraph=True`",
)


def _is_observed(optimizer: Optimizer) -> bool:
    """Whether a profiler or a hook looks at the steps of ``optimizer``.

    A subclass with a ``step`` of its own is looked at there: torch wraps it.
    """
    if type(optimizer).step is not ScaledOptimizer.step:
        return False
    return bool(
        torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )


def _check_same_device(bundles: list[Bundle]) -> None:
    """Raise if a graph would have to keep a number that it cannot read, or to read one."""
    tensors = [t for b in bundles for t in (*b.params, b.group["lr"]) if isinstance(t, Tensor)]
    if len({t.is_cpu for t in tensors}) > 1:
        raise RuntimeError(
            "`capturable=True` needs all parameters on an accelerator or all on cpu, and a Tensor `lr` where "
            "they are. Move them, or give `lr` as a float, which a graph keeps as it is."
        )


def check_between(name: str, value: Quantity, words: str, low: float = 0.0, high: float = math.inf) -> None:
    """Raise as torch does if ``value`` is no number, not finite or out of range."""
    if not hasattr(value, "__float__"):
        raise TypeError(f"`{name}` must be a number, got {value!r}.")
    if not low <= value < high:
        raise ValueError(f"Invalid {words}: {value}")
