"""The optimizer that training will use, and copies of it for trials."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn
from torch.optim import Optimizer

from curvestep.calibration.lr_schedules import peak_lr
from curvestep.checks import check_nonnegative
from curvestep.clip_rules import ClipRule
from curvestep.optim.adamw import ClippedAdamW
from curvestep.optim.clipped import ClippedSGD
from curvestep.optim.normalized import NormalizedSGD
from curvestep.optim.scaled import ScaledOptimizer
from curvestep.optimizer_family import Family, family_of, momenta, parameters_of, threshold_of
from curvestep.smoothness.replay import trainable_parameters

OURS = (ClippedSGD, ClippedAdamW, NormalizedSGD)  # that can be given by name


@dataclass(frozen=True)
class Method:
    """The optimizers that train together, mostly one; they are never stepped."""

    optimizers: tuple[Optimizer, ...]
    name: str  # of their classes
    family: Family  # of the one with the largest learning rate
    momentum: float
    threshold: str  # what it calls ``max_norm``
    max_norm: float  # the threshold that the caller gave its groups; infinite if none
    clips_itself: bool  # or normalises; so does a copy

    @property
    def is_rms_matched(self) -> bool:
        """Whether Muon's updates have the length of AdamW's, and so its learning rates."""
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        return any(group.get("adjust_lr_fn") == "match_rms_adamw" for group in groups)

    def copies(self, max_norm: float) -> list[Optimizer]:
        """Others of these settings and state, with ``max_norm`` if they clip, and at nothing smaller."""
        made = []
        for optimizer in self.optimizers:
            same = copy.deepcopy(optimizer, {id(p): p for p in parameters_of(optimizer)})
            sets_threshold = self.clips_itself and max_norm < self.max_norm
            for group in same.param_groups:
                # A frozen parameter may have a gradient left over; stepped on, it would not be put back.
                group["params"] = [p for p in group["params"] if p.requires_grad]
                if sets_threshold and self.threshold in group:
                    group[self.threshold] = max_norm
            made.append(same)
        return made

    def lr_of(self, step_size: float, max_norm: float) -> float:
        """The lr with which gradients far below ``max_norm`` take steps of this size."""
        first = self.optimizers[0]
        if not isinstance(first, ScaledOptimizer):
            return step_size
        coefficient = first.coefficient_at_zero(first.param_groups[0] | {self.threshold: max_norm})
        return step_size / coefficient


def method_of(
    optimizer: str | type | Optimizer | Sequence[Optimizer],
    model: nn.Module,
    *,
    momentum: float | None = None,
    weight_decay: float | None = None,
) -> Method:
    """The method of an instance, of several, or of a class or a name with these settings."""
    given = {"momentum": momentum, "weight_decay": weight_decay}
    settings = {name: check_nonnegative(name, value) for name, value in given.items() if value is not None}
    if isinstance(optimizer, str) or not isinstance(optimizer, Sequence):
        return _method_of_one(optimizer, model, settings)
    if not optimizer or not all(isinstance(one, Optimizer) for one in optimizer):
        raise ValueError("`optimizer` must be one optimizer, or a list of optimizers that train together.")
    if settings:
        raise ValueError(f"`{min(settings)}` is read from the optimizers themselves: leave it out.")
    methods = [_method_of_one(one, model, {}) for one in optimizer]
    parameters = [id(p) for one in optimizer for p in parameters_of(one)]
    if len(set(parameters)) < len(parameters):
        raise ValueError("`optimizer` has parameters that several of them train.")
    if len(methods) > 1 and any(method.threshold != "max_norm" for method in methods):
        raise ValueError("`optimizer` has NormalizedSGD among several: its lr has another meaning.")
    leading = max(methods, key=lambda method: peak_lr(method.optimizers))
    return replace(
        leading,
        optimizers=tuple(optimizer),
        name=" + ".join(method.name for method in methods),
        max_norm=min(method.max_norm for method in methods),
        clips_itself=any(method.clips_itself for method in methods),
    )


def _method_of_one(optimizer: str | type | Optimizer, model: nn.Module, settings: dict[str, float]) -> Method:
    thresholds = []
    if not isinstance(optimizer, Optimizer):
        optimizer = _made(optimizer, model, settings)
    elif settings:
        raise ValueError(f"`{min(settings)}` is read from the optimizer itself: leave it out.")
    else:
        name = threshold_of(optimizer)
        thresholds = [group[name] for group in optimizer.param_groups if name in group]
    family, momentums = family_of(optimizer), momenta(optimizer)
    rules = [rule.name for rule in thresholds if isinstance(rule, ClipRule)]
    strangers = set(parameters_of(optimizer)).difference(model.parameters())
    for is_wrong, why in (
        (isinstance(optimizer, torch.optim.LBFGS),
         "`optimizer` is LBFGS, which searches for its step itself: there is no lr to find."),
        (any(group.get("maximize") for group in optimizer.param_groups),
         "`optimizer` maximises: give a loss to minimise, and an optimizer without it."),
        (len(strangers) > 0,
         f"`optimizer` trains {len(strangers)} parameters that are not in `model`. Make it from the "
         "parameters of this model, after that is moved or wrapped."),
        (len(rules) > 0, f"`optimizer` clips by the rule {', '.join(rules)}, and trials clip at a number. "
         "Calibrate with max_norm=math.inf, then set the rule."),
        (len(momentums) > 1, "`optimizer` has groups of unequal momentum, "
         f"{' and '.join(f'{momentum:g}' for momentum in momentums)}. Calibrate with one."),
        (family.is_descent and momentums[0] >= 1, f"`momentum` must be in [0, 1), got {momentums[0]!r}."),
    ):  # fmt: skip
        if is_wrong:
            raise ValueError(why)
    max_norm = min(map(float, thresholds), default=math.inf)
    return Method(
        optimizers=(optimizer,),
        name=type(optimizer).__name__,
        family=family,
        momentum=momentums[0],
        threshold=threshold_of(optimizer),
        max_norm=max_norm,
        clips_itself=isinstance(optimizer, ScaledOptimizer),
    )


def _made(optimizer: object, model: nn.Module, settings: dict[str, float]) -> Optimizer:
    """An optimizer of this class or name; a learning rate that it asks for does not matter to ours."""
    kind = optimizer
    if isinstance(optimizer, str):
        known = {kind.__name__.lower(): kind for kind in (*Optimizer.__subclasses__(), *OURS)}
        kind = {**known, "adamw": torch.optim.AdamW}.get(optimizer.lower())
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        said = repr(optimizer) if isinstance(optimizer, (str, type)) else f"a {type(optimizer).__name__}"
        raise ValueError(
            f"`optimizer` must be one optimizer, its class, or a name such as 'AdamW', got {said}."
        )
    if not family_of(kind).is_descent and settings.pop("momentum", 0.0) > 0:
        raise ValueError(f"`momentum` is SGD's, and {kind.__name__} is another: leave it at 0.")
    make = cast("Callable[..., Optimizer]", kind)
    if issubclass(kind, ScaledOptimizer):  # which needs both, and neither matters
        settings |= {"lr": 1.0, kind.threshold: math.inf if kind.threshold == "max_norm" else 1.0}
    try:
        return make(trainable_parameters(model), **settings)
    except TypeError as error:
        raise ValueError(f"`optimizer`: give the {kind.__name__} that will train ({error}).") from None
