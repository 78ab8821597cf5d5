"""The optimizer that training will use, and copies of it for trials."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from curvestep._checks import check_nonnegative
from curvestep.clip_rules import ClipRule
from curvestep.lr_schedules import group_peak, peak_lr
from curvestep.optim.adamw import ClippedAdamW
from curvestep.optim.clipped import ClippedSGD
from curvestep.optim.normalized import NormalizedSGD
from curvestep.optimizer_family import Family, family_of, momenta, parameters_of
from curvestep.smoothness.replay import trainable_parameters

NEEDED: dict[type, dict[str, float]] = {  # to make ours; neither lr nor threshold matters
    ClippedSGD: {"lr": 1.0, "max_norm": math.inf},
    ClippedAdamW: {"lr": 1.0, "max_norm": math.inf},
    NormalizedSGD: {"lr": 1.0, "offset": 1.0},
}
OURS = tuple(NEEDED)


@dataclass(frozen=True)
class Method:
    """An optimizer, which is never stepped, and what it says of itself."""

    optimizer: Optimizer
    family: Family
    momentum: float  # of SGD, normalised or not; zero for the others
    max_norm: float  # the threshold (or offset) that the caller gave its groups; infinite if none

    @property
    def name(self) -> str:
        """The optimizer's class."""
        return type(self.optimizer).__name__

    @property
    def clips_itself(self) -> bool:
        """Whether its own step clips, or normalises; so does a copy's."""
        return isinstance(self.optimizer, OURS)

    @property
    def shares(self) -> list[float]:
        """Learning rates of the groups, relative to the largest."""
        peak = peak_lr(self.optimizer)
        return [group_peak(group) / peak for group in self.optimizer.param_groups]

    def shares_of(self, parameters: Sequence[Tensor]) -> list[float]:
        """Learning rates of parameters, relative to the largest; zero for one that is not trained."""
        pairs = zip(self.optimizer.param_groups, self.shares, strict=True)
        known = {id(p): share for group, share in pairs for p in group["params"]}
        return [known.get(id(p), 0.0) for p in parameters]

    def copy(self, max_norm: float) -> Optimizer:
        """Another of these settings and state, with ``max_norm`` if it clips, and at nothing smaller."""
        made = copy.deepcopy(self.optimizer, {id(p): p for p in parameters_of(self.optimizer)})
        sets_threshold = self.clips_itself and max_norm < self.max_norm
        for group in made.param_groups:
            # A frozen parameter may have a gradient left over; stepped on, it would not be put back.
            group["params"] = [p for p in group["params"] if p.requires_grad]
            if sets_threshold:
                group[self.family.threshold] = max_norm
        return made


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
    if not isinstance(optimizer, Optimizer):
        return _method(_made(_class_of(optimizer), model, settings), math.inf)
    if settings:
        raise ValueError(f"`{min(settings)}` is read from the optimizer itself: leave it out.")
    if any(group.get("maximize") for group in optimizer.param_groups):
        raise ValueError("`optimizer` maximises: give a loss to minimise, and an optimizer without it.")
    strangers = set(parameters_of(optimizer)).difference(model.parameters())
    if strangers:
        raise ValueError(
            f"`optimizer` trains {len(strangers)} parameters that are not in `model`. Make it from the "
            "parameters of this model, after that is moved or wrapped."
        )
    return _method(optimizer, _smallest_threshold(optimizer))


def _smallest_threshold(optimizer: Optimizer) -> float:
    name = family_of(optimizer).threshold
    bounds = [group.get(name, math.inf) for group in optimizer.param_groups]
    for rule in bounds:
        if isinstance(rule, ClipRule):
            raise ValueError(
                f"`optimizer` clips by the rule {rule.name}, and trials clip at a number. Calibrate with "
                "max_norm=math.inf, then set the rule."
            )
    return min(map(float, bounds))


def _method(optimizer: Optimizer, max_norm: float) -> Method:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("`optimizer` is LBFGS, which searches for its step itself: there is no lr to find.")
    family, (momentum, *others) = family_of(optimizer), momenta(optimizer)
    if others:
        raise ValueError(
            f"`optimizer` has groups of unequal momentum, {momentum:g} and {others[0]:g}. Calibrate with one."
        )
    if not family.is_descent:
        momentum = 0.0
    if momentum >= 1:
        raise ValueError(f"`momentum` must be in [0, 1), got {momentum!r}.")
    return Method(optimizer, family, momentum, max_norm)


def _class_of(optimizer: object) -> type[Optimizer]:
    kind = optimizer
    if isinstance(optimizer, str):
        known = {kind.__name__.lower(): kind for kind in (*Optimizer.__subclasses__(), *OURS)}
        kind = {**known, "adamw": torch.optim.AdamW}.get(optimizer.lower())
    if isinstance(kind, type) and issubclass(kind, Optimizer):
        return kind
    said = repr(optimizer) if isinstance(optimizer, (str, type)) else f"a {type(optimizer).__name__}"
    raise ValueError(f"`optimizer` must be one optimizer, its class, or a name such as 'AdamW', got {said}.")


def _made(kind: type[Optimizer], model: nn.Module, settings: dict[str, float]) -> Optimizer:
    """An optimizer of this class; a learning rate that it asks for does not matter to ours."""
    if not family_of(kind).is_descent and settings.pop("momentum", 0.0) > 0:
        raise ValueError(f"`momentum` is SGD's, and {kind.__name__} is another: leave it at 0.")
    make = cast("Callable[..., Optimizer]", kind)
    try:
        return make(trainable_parameters(model), **NEEDED.get(kind, {}), **settings)
    except TypeError as error:
        raise ValueError(f"`optimizer`: give the {kind.__name__} that will train ({error}).") from None
