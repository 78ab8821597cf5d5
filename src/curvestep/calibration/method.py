"""The optimizer that training will use, and copies of it for trials."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from curvestep._checks import check_nonnegative
from curvestep.lr_schedules import group_peak, peak_lr
from curvestep.optim.adamw import ClippedAdamW
from curvestep.optim.clipped import ClippedSGD
from curvestep.optim.normalized import NormalizedSGD
from curvestep.optimizer_family import Family, family_of
from curvestep.smoothness.replay import trainable_parameters

OURS = (ClippedSGD, ClippedAdamW, NormalizedSGD)


@dataclass(frozen=True)
class Method:
    """An optimizer, which is never stepped, and what it says of itself.

    Args:
        optimizer: The optimizer.
        family: How it turns gradients into steps.
        momentum: Of SGD, normalised or not; zero for the others.
        max_norm: The threshold (or offset) that the caller gave its groups; infinite if none.
    """

    optimizer: Optimizer
    family: Family
    momentum: float
    max_norm: float

    @property
    def name(self) -> str:
        """The optimizer's class."""
        return type(self.optimizer).__name__

    @property
    def clips_itself(self) -> bool:
        """Whether its own step clips, or normalises; so does a copy's."""
        return isinstance(self.optimizer, OURS)

    def share(self, parameter: Tensor) -> float:
        """The parameter's learning rate, relative to the largest; zero if it is not trained."""
        for group in self.optimizer.param_groups:
            if any(p is parameter for p in group["params"]):
                return group_peak(group) / peak_lr(self.optimizer)
        return 0.0

    def copy(self, max_norm: float) -> tuple[Optimizer, list[float]]:
        """Another of these settings and state, with ``max_norm`` where it has none; groups' shares of lr."""
        groups = self.optimizer.param_groups
        made = copy.deepcopy(self.optimizer, {id(p): p for group in groups for p in group["params"]})
        for group in made.param_groups:
            # A frozen parameter may have a gradient left over; stepped on, it would not be put back.
            group["params"] = [p for p in group["params"] if p.requires_grad]
            if self.clips_itself and math.isinf(self.max_norm):
                group[threshold_name(made)] = max_norm
        return made, [group_peak(group) / peak_lr(self.optimizer) for group in groups]


def threshold_name(optimizer: Optimizer) -> str:
    """Name, in the optimizer's groups, of the gradient norm at which steps stop growing."""
    return "offset" if isinstance(optimizer, NormalizedSGD) else "max_norm"


def method_of(
    optimizer: str | type | Optimizer,
    model: nn.Module,
    *,
    momentum: float | None = None,
    weight_decay: float | None = None,
) -> Method:
    """The method of an instance, or of a class or a name with these settings."""
    given = {"momentum": momentum, "weight_decay": weight_decay}
    settings = {name: check_nonnegative(name, value) for name, value in given.items() if value is not None}
    if isinstance(optimizer, Optimizer):
        for argument in settings:
            raise ValueError(f"`{argument}` is read from the optimizer itself: leave it out.")
        _check_instance(optimizer, model)
        thresholds = [
            float(group.get(threshold_name(optimizer), math.inf)) for group in optimizer.param_groups
        ]
        return _method(optimizer, min(thresholds))
    kind = _class_of(optimizer)
    if settings.get("momentum", 0.0) >= 1:
        raise ValueError(f"`momentum` must be in [0, 1), got {momentum!r}.")
    if not family_of(kind).is_descent and settings.pop("momentum", 0.0) > 0:
        raise ValueError(f"`momentum` is SGD's, and {kind.__name__} is another: leave it at 0.")
    make = cast("Callable[..., Optimizer]", kind)
    return _method(make(trainable_parameters(model), **settings, **_required(kind)), math.inf)


def _method(optimizer: Optimizer, max_norm: float) -> Method:
    family = family_of(optimizer)
    return Method(optimizer, family, _momentum(optimizer) if family.is_descent else 0.0, max_norm)


def _class_of(optimizer: object) -> type[Optimizer]:
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        return optimizer
    known = {kind.__name__.lower(): kind for kind in (*Optimizer.__subclasses__(), *OURS)}
    known["adamw"] = torch.optim.AdamW
    if isinstance(optimizer, str) and optimizer.lower() in known:
        return known[optimizer.lower()]
    if isinstance(optimizer, (list, tuple)):
        raise ValueError(
            f"`optimizer` must be one optimizer, got {len(optimizer)}: calibrate each by itself."
        )
    said = repr(optimizer) if isinstance(optimizer, (str, type)) else f"a {type(optimizer).__name__}"
    raise ValueError(f"`optimizer` must be an optimizer, its class, or a name such as 'AdamW', got {said}.")


def _required(kind: type[Optimizer]) -> dict[str, float]:
    """Settings that a class asks for and that do not matter here; a learning rate to try around does."""
    parameters = inspect.signature(kind).parameters.values()
    asks = {p.name for p in parameters if p.default is inspect.Parameter.empty}
    family = family_of(kind)
    if "lr" in asks and not (family.is_descent or family is Family.ADAM):
        raise ValueError(f"`optimizer`: give the {kind.__name__} that will train, to try around its lr.")
    unimportant = {"lr": 1.0, "max_norm": math.inf, "offset": 1.0}
    return {name: value for name, value in unimportant.items() if name in asks}


def _check_instance(optimizer: Optimizer, model: nn.Module) -> None:
    groups = optimizer.param_groups
    if any(group.get("maximize") for group in groups):
        raise ValueError("`optimizer` maximises: give a loss to minimise, and an optimizer without it.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("`optimizer` is LBFGS, which searches for its step itself: there is no lr to find.")
    known = {id(p) for p in model.parameters()}
    strangers = sum(id(p) not in known for group in groups for p in group["params"])
    if strangers:
        raise ValueError(
            f"`optimizer` trains {strangers} parameters that are not in `model`. Make it from the parameters "
            "of this model, after that is moved or wrapped."
        )
    _momentum(optimizer)
    peak_lr(optimizer)


def _momentum(optimizer: Optimizer) -> float:
    momenta = {float(group.get("momentum", 0.0)) for group in optimizer.param_groups}
    if len(momenta) > 1:
        raise ValueError(
            f"`optimizer` has groups of unequal momentum, {sorted(momenta)}. Calibrate with one momentum."
        )
    return momenta.pop()
