"""SGD whose gradient is scaled by a function of its norm: what all optimizers of the package share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from curvestep._checks import check_choice
from curvestep._kernel import View
from curvestep._torch import fused_sgd, is_observed
from curvestep.distributed import as_sharded
from curvestep.optim._bundles import Unit, collect
from curvestep.optim._statistics import (
    ClipStats,
    count_skip,
    count_step,
    new_counters,
    read_counters,
    summarise,
)
from curvestep.optim._update import average_, update
from curvestep.vectors import cpu_norm, global_norm, homogeneous_cpu

_COUNTERS = "clip_stats"
# Settings that hold for the whole optimizer: a group cannot have its own.
_SHARED = ("clip", "norm_scope", "nonfinite", "differentiable")


class ScaledSGD(Optimizer, ABC):
    """SGD with the step size of a rule in :mod:`curvestep.steps`.

    A subclass names the group entry at which the rule bends (``threshold``), checks it, and gives the
    factor on the gradient: ``clipped.py`` shows all that takes.
    """

    threshold: str

    def __init__(
        self,
        params: ParamsT,
        rule: dict[str, Any],
        *,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        clip: str = "gradient",
        norm_scope: str = "global",
        nonfinite: str = "raise",
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        differentiable: bool = False,
    ) -> None:
        check_choice("clip", clip, ("gradient", "momentum"))
        check_choice("norm_scope", norm_scope, ("global", "group", "tensor"))
        check_choice("nonfinite", nonfinite, ("raise", "skip", "propagate"))
        if fused and differentiable:
            raise RuntimeError("`fused` does not support `differentiable`")
        if fused and foreach:
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
        if foreach and differentiable:
            raise RuntimeError("`foreach` does not support `differentiable`")
        if fused and fused_sgd() is None:
            raise RuntimeError("`fused=True` needs torch._fused_sgd_, which this torch does not have.")
        options = {
            "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov,
            "clip": clip, "norm_scope": norm_scope, "nonfinite": nonfinite, "maximize": maximize,
            "foreach": foreach, "fused": fused, "differentiable": differentiable,
        }  # fmt: skip
        super().__init__(params, rule | options)

    @abstractmethod
    def _coefficient(self, norm: Any, group: dict[str, Any]) -> Any:
        """Factor on a gradient of this norm: step size over ``lr``, of the same kind as ``norm``."""

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise where the values of a group make no sense; a subclass adds its own."""
        _check_lr(group["lr"])
        for name in ("momentum", "weight_decay"):
            if not 0.0 <= _number(name, group[name]) < math.inf:
                raise ValueError(f"Invalid {name} value: {group[name]}")
        if not math.isfinite(_number("dampening", group["dampening"])):
            raise ValueError(f"Invalid dampening value: {group['dampening']}")
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with values of its own where it names them."""
        if isinstance(param_group, dict):
            for name in _SHARED:
                if param_group.get(name, self.defaults[name]) != self.defaults[name]:
                    raise ValueError(
                        f"`{name}` holds for all groups: set it for the optimizer, not for one group."
                    )
            self._check_group(self.defaults | param_group)
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step with the gradients that are in ``.grad``; they stay as they are.

        Args:
            closure: Evaluates the model again and returns the loss.
        """
        if type(self).step is ScaledSGD.step and is_observed(self):
            return _observed_step(self, closure)
        return self._unobserved_step(closure)

    # torch wraps every `step` for profilers and hooks, which costs a small model a tenth of its step. This
    # attribute keeps it from doing so: its wrapper is used only where somebody looks.
    step.hooked = True  # pyright: ignore[reportFunctionMemberAccess]

    def _unobserved_step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        units = collect(self.param_groups, self.state, per_tensor=self.defaults["norm_scope"] == "tensor")
        if self.defaults["clip"] == "gradient" and all(unit.view is not None for unit in units):
            self._step(units)  # by our kernel alone, of which autograd knows nothing
        else:
            with torch.set_grad_enabled(self.defaults["differentiable"]):
                self._step(units)
        return loss

    def clip_stats(self) -> ClipStats:
        """Last gradient norm and coefficient, and how often clipping fired.

        With several clipping decisions in a step (``norm_scope`` "group" or "tensor", or groups with their
        own threshold) a step counts as clipped to the share of decisions that fired. Part of the state
        dict, so a resumed run goes on counting. On an accelerator this call waits for the device.
        """
        return summarise(self._counters)

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint: plain numbers and tensors, loads with ``weights_only=True``."""
        state = super().state_dict()
        state["param_groups"][0][_COUNTERS] = read_counters(self._counters)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A state dict of an older version, or of torch.optim.SGD, lacks some entries.
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def __repr__(self) -> str:
        counters = self.param_groups[0].pop(_COUNTERS, None)
        try:
            return super().__repr__()
        finally:
            if counters is not None:
                self.param_groups[0][_COUNTERS] = counters

    @property
    def _counters(self) -> dict[str, Any]:
        first = self.param_groups[0]
        if _COUNTERS not in first:
            first[_COUNTERS] = new_counters()
        return first[_COUNTERS]

    def _step(self, units: list[Unit]) -> None:
        if not units:
            return
        norms = self._norms(units)
        skip = self._skip_signal(norms)
        if skip is True:
            count_skip(self._counters, _combined(norms, self.defaults["norm_scope"]))
            return
        for unit in units:
            unit.make_bundles(self.state)
        # What the rule looks at: the gradient, or the direction averaged by momentum.
        seen = self._average(units) if self.defaults["clip"] == "momentum" else norms
        coefficients = [self._coefficient(norm, unit.group) for unit, norm in zip(units, seen, strict=True)]
        for unit, coefficient in zip(units, coefficients, strict=True):
            for bundle in unit.bundles:
                update(bundle, coefficient, skip=skip)
        self._count(units, norms, seen, coefficients, skip)

    def _norms(self, units: list[Unit]) -> list[Any]:
        """One norm for each unit; they are all the same if the scope is global."""
        if self.defaults["norm_scope"] == "global" and len(units) > 1:
            grads = [g for unit in units for g in unit.grads]
            return [self._norm(grads, homogeneous_cpu(grads))] * len(units)
        return [self._norm(unit.grads, unit.plain, unit.view) for unit in units]

    def _norm(self, tensors: list[Tensor], plain: bool, view: View | None = None) -> Any:
        """A float, or a tensor where reading the number would mean waiting or losing its gradient."""
        if self.defaults["differentiable"]:
            return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t) for t in tensors]))
        if plain:
            return cpu_norm(tensors, view)
        norm = global_norm(tensors)
        return norm.item() if norm.device.type == "cpu" else norm

    def _skip_signal(self, norms: list[Any]) -> Tensor | bool:
        """True: skip. A tensor on a device: skip if it is 1. False: go on. Raises where that is wanted."""
        policy = self.defaults["nonfinite"]
        if policy == "propagate":
            return False
        stays_on_device = policy == "skip" and self.defaults["clip"] == "gradient" and fused_sgd() is not None
        if stays_on_device and isinstance(norms[0], Tensor) and not self.defaults["differentiable"]:
            return (~torch.stack([norm.isfinite() for norm in norms]).all()).to(torch.float32)
        if all(math.isfinite(_plain(norm)) for norm in norms):
            return False
        if policy == "raise":
            raise FloatingPointError(self._blame())
        return True

    def _blame(self) -> str:
        """Which parameter has the first gradient that is not finite."""
        for number, group in enumerate(self.param_groups):
            for i, p in enumerate(group["params"]):
                if p.grad is not None and not math.isfinite(global_norm([p.grad])):
                    names = group.get("param_names")
                    name = f"`{names[i]}`" if names else f"parameter {i} of group {number}"
                    return (
                        f"The gradient of {name}, shape {tuple(p.shape)}, is not finite. Nothing was "
                        'changed. Use nonfinite="skip" to leave such steps out, or "propagate" to take them.'
                    )
        raise AssertionError("a norm was not finite, but every gradient is")

    def _average(self, units: list[Unit]) -> list[Any]:
        """Take the gradients into the momentum; the units then hold the averaged direction. Its norms."""
        for unit in units:
            unit.bundles = [average_(bundle) for bundle in unit.bundles]
            unit.grads = [
                as_sharded(g, whole)
                for bundle in unit.bundles
                for g, whole in zip(bundle.grads, bundle.wholes, strict=True)
            ]
            unit.plain, unit.view = homogeneous_cpu(unit.grads), None
        return self._norms(units)

    def _count(
        self,
        units: list[Unit],
        norms: list[Any],
        seen: list[Any],
        coefficients: list[Any],
        skip: Tensor | bool,
    ) -> None:
        taken = 1 - skip if isinstance(skip, Tensor) else 1
        relative, clipped = [], 0
        for unit, norm, coefficient in zip(units, seen, coefficients, strict=True):
            relative.append(coefficient / self._coefficient(0.0, unit.group))
            clipped = clipped + (norm > unit.group[self.threshold])
        share = clipped / len(units) * taken
        total = _combined(norms, self.defaults["norm_scope"])
        count_step(self._counters, _plain(total), _plain(_least(relative)), _plain(share), taken)


_observed_step = Optimizer.profile_hook_step(ScaledSGD._unobserved_step)


def _combined(norms: list[Any], scope: str) -> Any:
    """Norm of the whole gradient from the norms of its units."""
    if scope == "global" or len(norms) == 1:
        return norms[0]
    if isinstance(norms[0], Tensor):
        return torch.linalg.vector_norm(torch.stack(norms))
    return math.hypot(*norms)


def _least(values: list[Any]) -> Any:
    if len(values) == 1:
        return values[0]
    return torch.stack(values).min() if isinstance(values[0], Tensor) else min(values)


def _plain(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


def _number(name: str, value: Any) -> float:
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"`{name}` must be a number, got {value!r}.")
    return value


def _check_lr(lr: Any) -> None:
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    if isinstance(lr, Tensor) and lr.device.type != "cpu":
        return  # reading it would wait for the device
    if not 0.0 <= _number("lr", lr) < math.inf:
        raise ValueError(f"Invalid learning rate: {lr}")
