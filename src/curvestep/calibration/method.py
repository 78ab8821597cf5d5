"""The optimizer that training will use, and copies of it for trials."""

from __future__ import annotations

import copy
import inspect
import math
from dataclasses import dataclass
from typing import Any

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
    """An optimizer, which is never stepped.

    Args:
        optimizer: The optimizer.
        was_made: Whether the caller made it: its learning rate and threshold are then meant.
    """

    optimizer: Optimizer
    was_made: bool

    @property
    def name(self) -> str:
        """The optimizer's class."""
        return type(self.optimizer).__name__

    @property
    def family(self) -> Family:
        """How it turns gradients into steps."""
        return family_of(self.optimizer)

    @property
    def momentum(self) -> float:
        """Of SGD, normalised or not; zero for the others."""
        return _momentum(self.optimizer) if self.family.is_descent else 0.0

    @property
    def clips_itself(self) -> bool:
        """Whether its own step clips, or normalises; so does a copy's."""
        return isinstance(self.optimizer, OURS)

    @property
    def max_norm(self) -> float:
        """The threshold (or offset) that its groups ask for; infinite if they have none."""
        name = threshold_name(self.optimizer)
        given = [float(group.get(name, math.inf)) for group in self.optimizer.param_groups]
        return min(given) if self.was_made else math.inf

    @property
    def has_stepped(self) -> bool:
        """Whether it has a state already."""
        return any(bool(state) for state in self.optimizer.state.values())

    def share(self, parameter: Tensor) -> float:
        """The parameter's learning rate, relative to the largest; zero if it is not trained."""
        for group in self.optimizer.param_groups:
            if any(p is parameter for p in group["params"]):
                return group_peak(group) / peak_lr(self.optimizer)
        return 0.0

    def copy(self, max_norm: float) -> tuple[Optimizer, list[float]]:
        """A second one of the same parameters, settings and state, and its groups' shares of ``lr``.

        Args:
            max_norm: The threshold (or offset) of one that clips itself and was given none.
        """
        groups = self.optimizer.param_groups
        made = copy.deepcopy(self.optimizer, {id(p): p for group in groups for p in group["params"]})
        for group in made.param_groups:
            # A frozen parameter may have a gradient left over; stepped on, it would not be put back.
            group["params"] = [p for p in group["params"] if p.requires_grad]
            if self.clips_itself and math.isinf(self.max_norm):
                group[threshold_name(made)] = max_norm
        return made, [group_peak(group) / peak_lr(self.optimizer) for group in groups]


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
        return Method(optimizer, was_made=True)
    kind = _class_of(optimizer)
    if settings.get("momentum", 0.0) >= 1:
        raise ValueError(f"`momentum` must be in [0, 1), got {momentum!r}.")
    if not family_of(kind).is_descent and settings.pop("momentum", 0.0) > 0:
        raise ValueError(f"`momentum` is SGD's, and {kind.__name__} is another: leave it at 0.")
    make: Any = kind
    return Method(make(trainable_parameters(model), **settings, **_required(kind)), was_made=False)


def threshold_name(optimizer: Optimizer) -> str:
    """What the optimizer's groups call the gradient norm at which steps stop growing."""
    return "offset" if isinstance(optimizer, NormalizedSGD) else "max_norm"


def _class_of(optimizer: Any) -> type[Optimizer]:
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        return optimizer
    known = {kind.__name__.lower(): kind for kind in (*Optimizer.__subclasses__(), *OURS)}
    known["adamw"] = torch.optim.AdamW
    if not isinstance(optimizer, str) or optimizer.lower() not in known:
        said = repr(optimizer) if isinstance(optimizer, (str, type)) else f"a {type(optimizer).__name__}"
        raise ValueError(
            "`optimizer` must be the optimizer that will train, its class, or a name such as 'AdamW' or "
            f"'ClippedSGD', got {said}."
        )
    return known[optimizer.lower()]


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
            f"`optimizer` trains {strangers} parameters that are not in `model`. Give the model whose "
            "parameters it was made from, and make it after the model is moved or wrapped."
        )
    _momentum(optimizer)
    peak_lr(optimizer)


def _momentum(optimizer: Optimizer) -> float:
    momenta = {float(group.get("momentum", 0.0)) for group in optimizer.param_groups}
    if len(momenta) > 1:
        raise ValueError(
            f"`optimizer` has groups of unequal momentum ({sorted(momenta)}), and the scale of a step is "
            "shared by all. Calibrate with one momentum."
        )
    return momenta.pop()
