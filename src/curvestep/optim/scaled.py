"""A gradient scaled by a function of its norm, inside the step: what all optimizers of the package share."""
# pyright: reportPrivateUsage=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Hooks and the profiler of torch have an underscore.

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import (
    Optimizer,
    ParamsT,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

from curvestep.optim.clip_step import ClipStep, Policy, StepRecord
from curvestep.optim.update import (
    FloatOrTensor,
    Rule,
    Settings,
    UpdateGroup,
    clip_rule_of,
    collect,
    parts_of,
    rejoin,
    update,
)
from curvestep.steps import clipped_step
from curvestep.tensors.distributed import in_zero_redundancy_optimizer

if TYPE_CHECKING:
    from curvestep.optim.stats import ClipEdge, ClipStats, Spike

Norm = TypeVar("Norm", float, Tensor, float | Tensor)

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
        self, params: ParamsT, values: Settings, defaults: Mapping[str, object], options: Mapping[str, object]
    ) -> None:
        known: Settings = {**defaults, **_DEFAULTS}
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
        self._record = StepRecord()
        if settings["fused"] and settings["foreach"]:
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")  # as torch says it
        if settings["capturable"] and settings["nonfinite"] == "raise":
            raise ValueError(
                "`capturable=True` cannot raise for a gradient that is not finite: a graph reads nothing. "
                'Use nonfinite="skip" or "propagate".'
            )
        if settings["capturable"] and settings["skip_above"] is not None:
            raise ValueError("`capturable=True` cannot follow `skip_above`: a graph reads nothing.")
        self.check_group(values | settings)  # before the parameters are looked at, as torch does
        super().__init__(params, values | settings)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """As torch's fused optimizers: a ``GradScaler`` leaves it to such a step to unscale, and to skip."""
        return bool(self.defaults["fused"])

    @abstractmethod
    def rule(self, group: Settings) -> Rule:
        """Update a group by its scaled gradients."""

    @abstractmethod
    def coefficient(self, norm: Norm, group: Settings) -> Norm:
        """Factor on a gradient of this norm: step size over ``lr``, of the same kind as ``norm``.

        Asked once for each norm of a step, and with norm 0 when a group is added: raise where the values of
        the group make no sense.

        Args:
            norm: A float, or on an accelerator a device scalar; reading it would synchronize.
            group: The parameter group.
        """

    def coefficient_at_zero(self, group: Settings) -> float:
        """The coefficient at zero gradient, to which :meth:`clip_stats` relates those of the steps."""
        return 1.0

    def clip_edge(self) -> ClipEdge:
        """Where the rule bends: the gradient norm, and the coefficient there.

        A step whose coefficient is below that of the edge counts as clipped.
        """
        from curvestep.optim.stats import ClipEdge

        norms: list[float] = []
        coefficients: list[float] = []
        for settings in self.param_groups:
            if clip_rule_of(settings) is not None:  # which clips at another norm in each step
                return ClipEdge(math.nan, 1.0)
            norm = float(settings[self.threshold])
            norms.append(norm)
            coefficients.append(self.coefficient(norm, settings) / self.coefficient_at_zero(settings))
        has_one = len(set(norms)) == 1
        return ClipEdge(norms[0] if has_one else math.nan, max(coefficients))

    def check_group(self, group: Settings) -> None:
        """Raise where the values of a group make no sense."""
        lr = group["lr"]
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        if not isinstance(lr, Tensor) or lr.is_cpu:  # reading it would synchronize
            check_between("lr", lr, "learning rate")
        check_between("weight_decay", group["weight_decay"], "weight_decay value")
        rule = clip_rule_of(group)
        if rule is None or self.threshold != "max_norm":
            self.coefficient(0.0, group)
            return
        self._policy.check_rule(rule)
        if rule.each != "norm" and group.get("clip") == "momentum":
            raise ValueError(f'`max_norm={rule}` clips gradients, not averages. Use clip="gradient".')
        if group["capturable"]:
            raise ValueError(f"`capturable=True` cannot follow `max_norm={rule}`: a graph reads nothing.")

    def add_param_group(self, param_group: Settings) -> None:
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
        if any(p.is_neg() for p in self.param_groups[-1]["params"]):
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
        return self._take_step(closure)

    # torch wraps every `step` for profilers and hooks, which costs a small model a tenth of its step. This
    # attribute keeps it from doing so: its wrapper is used only where somebody looks.
    step.hooked = True  # pyright: ignore[reportFunctionMemberAccess]

    def spikes(self) -> list[Spike]:
        """The last 100 steps with an unusually large gradient norm, and the layer that caused it.

        A spike is more than six standard deviations above the mean of the last 100 norms. On an accelerator
        only steps are looked at whose norm is read.
        """
        return list(self._record.read().spikes)

    def last_clip(self) -> tuple[float, float]:
        """Norm of the last gradient before clipping, and the factor on it; waits for a device once."""
        counters = self._record.read()
        return counters.grad_norm, counters.coefficient

    def clip_stats(self, *, layers: bool = False) -> ClipStats:
        """Last gradient norm and coefficient, and how often clipping fired.

        With several norms in a step (``norm_scope`` "group" or "tensor", or groups with their own threshold)
        a step counts as clipped to the share of norms that were above theirs. Part of the state dict, so a
        resumed run goes on counting. On an accelerator this call waits for the device, once.

        Args:
            layers: Add ``layers``, the norm of each gradient in ``.grad``: ask before ``zero_grad()``.
        """
        from curvestep.optim.stats import clip_stats

        return clip_stats(self._record, type(self).__name__, self.param_groups, layers=layers)

    def stop_double_clip_check(self) -> None:
        """Keep :meth:`clip_stats` from warning that gradients arrive already clipped."""
        self._record.checks_double_clip = False

    def state_dict(self) -> Settings:
        """The state for a checkpoint: plain numbers and tensors, loads with ``weights_only=True``."""
        state = super().state_dict()
        self._record.save(state["param_groups"])
        return state

    def __getstate__(self) -> Settings:
        state = super().__getstate__()
        state["param_groups"] = [dict(group) for group in self.param_groups]
        self._record.save(state["param_groups"])
        return state

    def __setstate__(self, state: Settings) -> None:
        super().__setstate__(state)
        # A state dict of an older version, or of torch's optimizer, lacks some entries and has others; torch
        # adds one to the defaults.
        self.defaults.pop("differentiable", None)
        for group in self.param_groups:
            group.pop("differentiable", None)
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        self._policy = _policy_of(self.defaults)
        self._record = StepRecord()
        self._record.load(self.param_groups, self.defaults.get(self.threshold))

    def _collect_tensors(self) -> list[UpdateGroup]:
        """Each parameter for itself; many of them together where they are clipped in one call."""
        is_clip = type(self).coefficient is clip_coefficient and self.defaults.get("clip") != "momentum"
        if is_clip and self._policy.nonfinite != "propagate":
            from curvestep.optim.rule_thresholds import collect_tensors

            return collect_tensors(self.param_groups, self.state, self.rule)
        return collect(self.param_groups, self.state, self.rule, "tensor")

    def _take_step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step: collect, norm, leave out?, coefficient, update, count."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            if self._policy.norm_scope == "tensor":
                groups = self._collect_tensors()
            else:
                groups = collect(self.param_groups, self.state, self.rule, self._policy.norm_scope)
            if self.defaults["capturable"]:
                _check_same_device(groups)
            if not groups:
                return loss
            must_raise = self._policy.nonfinite == "raise"
            step = ClipStep(self, self._policy, self._record, groups, loss, has_to_read=must_raise)
            if step.is_left_out():
                return loss
            if self.defaults.get("clip") == "momentum":
                parts = [step.update_momentum_(parts_of(g, self.state), g.settings) for g in groups]
                step.remeasure([rejoin(g, of_group) for g, of_group in zip(groups, parts, strict=True)])
                settings = step.resolve_thresholds()
            else:
                settings = step.resolve_thresholds()
                parts = [parts_of(g, self.state) for g in groups]
            coefficients = [self.coefficient(*pair) for pair in zip(step.norms, settings, strict=True)]
            for of_group, coefficient in zip(parts, coefficients, strict=True):
                for part in of_group:
                    update(part, coefficient * step.unscale, step.skip)
            relative: list[FloatOrTensor] = []
            for coefficient, values in zip(coefficients, settings, strict=True):
                relative.append(coefficient / self.coefficient_at_zero(values))
            if step.is_spike:
                step.keep_spike(relative)
            step.count(relative, [values[self.threshold] for values in settings])
        return loss


def clip_coefficient(self: ScaledOptimizer, norm: Norm, group: Settings) -> Norm:
    r""":math:`\min\{1, \gamma/g\}`, the ``coefficient`` of the classes that clip."""
    return clipped_step(norm, lr=1.0, max_norm=group["max_norm"])


def _policy_of(settings: Settings) -> Policy:
    return Policy(settings["norm_scope"], settings["nonfinite"], settings["skip_above"])


_observed_step = Optimizer.profile_hook_step(ScaledOptimizer._take_step)
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


def _check_same_device(groups: Sequence[UpdateGroup]) -> None:
    """Raise if a graph would have to keep a number that it cannot read, or to read one."""
    places = {p.is_cpu for group in groups for p in group.params}
    lrs = [group.settings["lr"] for group in groups]
    places |= {lr.is_cpu for lr in lrs if isinstance(lr, Tensor)}
    if len(places) > 1:
        raise RuntimeError(
            "`capturable=True` needs all parameters on an accelerator or all on cpu, and a Tensor `lr` where "
            "they are. Move them, or give `lr` as a float, which a graph keeps as it is."
        )


def check_between(name: str, value: Any, words: str, low: float = 0.0, high: float = math.inf) -> None:
    """Raise as torch does if ``value`` is no number, not finite or out of range."""
    if not hasattr(value, "__float__"):
        raise TypeError(f"`{name}` must be a number, got {value!r}.")
    if not low <= value < high:
        raise ValueError(f"Invalid {words}: {value}")
