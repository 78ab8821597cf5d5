"""The optimizer that training will use: its rule, its groups, and the learning rates of its schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from curvestep._checks import check_nonnegative
from curvestep.optimizer_family import Family, family_of, has_decoupled_decay, known_name, torch_name

SUPPORTED = ("ClippedSGD", "ClippedAdamW", "NormalizedSGD", "SGD", "Adam", "AdamW")
SCHEDULES = ("constant", "warmup-decay")
WARMUP = 0.1  # of the steps: linear, then a cosine to zero

# What a group says of its rule; the rest (lr, foreach, fused, ...) is not part of it.
_OPTIONS = ("betas", "eps", "amsgrad", "dampening", "nesterov")


@dataclass(frozen=True)
class Group:
    """Parameters that share a learning rate.

    Args:
        parameters: The parameters; None is all that no other group has.
        share: Their learning rate, relative to the largest.
        weight_decay: Their decay.
        options: Betas and the like, as torch's optimizers take them.
    """

    parameters: frozenset[int] | None
    share: float
    weight_decay: float
    options: dict[str, Any]


@dataclass(frozen=True)
class Method:
    r"""An optimizer's rule and groups.

    Args:
        name: One of ``SUPPORTED``.
        momentum: :math:`\beta` of SGD, zero for the others.
        groups: Its groups.
    """

    name: str
    momentum: float
    groups: tuple[Group, ...]

    @property
    def along_signs(self) -> bool:
        """Whether its first step goes along the signs of the gradient."""
        return family_of(self.name) is Family.ADAM

    def group_of(self, parameter: Tensor) -> Group | None:
        """The parameter's group; None if the optimizer does not train it."""
        for group in self.groups:
            if group.parameters is None or id(parameter) in group.parameters:
                return group
        return None

    def share(self, parameter: Tensor) -> float:
        """The parameter's learning rate, relative to the largest; zero if it is not trained."""
        group = self.group_of(parameter)
        return 0.0 if group is None else group.share

    def penalty(self, parameter: Tensor) -> float:
        r""":math:`\lambda` of a penalty :math:`\lambda\lVert x\rVert^2/2` on it; AdamW's decay is none."""
        group = self.group_of(parameter)
        return 0.0 if group is None or has_decoupled_decay(self.name) else group.weight_decay

    def coefficient(self, norm: float, max_norm: float) -> float:
        """What the optimizer multiplies a gradient of this norm with, before anything else."""
        if family_of(self.name) is Family.NORMALIZED:
            return 1.0 / (norm + max_norm)
        return min(1.0, max_norm / norm) if norm > 0 else 1.0

    def build(self, parameters: Sequence[nn.Parameter], lr: float) -> Optimizer:
        """Torch's own optimizer of this rule on the parameters, to be given gradients that are clipped."""
        groups = []
        for group in self.groups:
            own: list[nn.Parameter] = [p for p in parameters if self.group_of(p) is group]
            if own:
                settings = {"lr": lr * group.share, "weight_decay": group.weight_decay, **group.options}
                groups.append({"params": own, **settings})
        if not self.along_signs:
            return torch.optim.SGD(groups, lr=lr, momentum=self.momentum)
        return (torch.optim.AdamW if has_decoupled_decay(self.name) else torch.optim.Adam)(groups, lr=lr)


def method_of(
    optimizer: str | type | Optimizer,
    model: nn.Module,
    *,
    momentum: float | None = None,
    weight_decay: float | None = None,
) -> Method:
    """What an optimizer's name, class or instance says; an instance has its groups and settings itself."""
    kind = type(optimizer) if isinstance(optimizer, Optimizer) else optimizer
    name = known_name(kind)
    if name not in SUPPORTED:
        raise ValueError(
            f"`optimizer` must be one of {', '.join(SUPPORTED)}: an instance, a class or a name, got "
            f"{kind!r}. For others there is no evidence that this measurement finds a good learning rate."
        )
    signs = family_of(name) is Family.ADAM
    if isinstance(optimizer, Optimizer):
        given = {"momentum": momentum, "weight_decay": weight_decay}
        for argument in [argument for argument, value in given.items() if value is not None]:
            raise ValueError(f"`{argument}` is read from the optimizer itself: leave it out.")
        return _method_of_instance(optimizer, model, name)
    momentum, weight_decay = momentum or 0.0, weight_decay or 0.0
    if check_nonnegative("momentum", momentum) >= 1:
        raise ValueError(f"`momentum` must be in [0, 1), got {momentum!r}.")
    if signs and momentum:
        raise ValueError(
            f"`momentum` is SGD's, and {name} has betas instead: leave it at 0, got {momentum!r}."
        )
    return Method(name, momentum, (Group(None, 1.0, check_nonnegative("weight_decay", weight_decay), {}),))


def _method_of_instance(optimizer: Optimizer, model: nn.Module, name: str) -> Method:
    groups = optimizer.param_groups
    if any(group.get("maximize") for group in groups):
        raise ValueError("`optimizer` maximises: give a loss to minimise, and an optimizer without it.")
    if torch_name(name) == "Adam" and any(group.get("decoupled_weight_decay") for group in groups):
        name = "AdamW"
    momenta = {float(group.get("momentum", 0.0)) for group in groups}
    if len(momenta) > 1:
        raise ValueError(
            f"`optimizer` has groups of unequal momentum ({sorted(momenta)}), and the safe step is shared by "
            "all. Calibrate with one momentum."
        )
    known = {id(p) for p in model.parameters()}
    for group in groups:
        strangers = sum(id(p) not in known for p in group["params"])
        if strangers:
            raise ValueError(
                f"`optimizer` trains {strangers} parameters that are not in `model`. Give the model whose "
                "parameters it was made from, and make it after the model is moved or wrapped."
            )
    largest = peak_lr(optimizer)
    return Method(
        name,
        0.0 if family_of(name) is Family.ADAM else momenta.pop(),
        tuple(
            Group(
                frozenset(map(id, group["params"])),
                _peak(group) / largest,
                float(group.get("weight_decay", 0.0)),
                {key: group[key] for key in _OPTIONS if key in group},
            )
            for group in groups
        ),
    )


# Learning rates of an optimizer and its schedules


def _peak(group: dict[str, Any]) -> float:
    """Largest learning rate that a group's schedule reaches, as far as the group says."""
    return float(group.get("max_lr", group.get("initial_lr", group["lr"])))


def peak_lr(optimizer: Optimizer, schedulers: Iterable[Any] = ()) -> float:
    """Largest learning rate that the schedule reaches in any group."""
    peaks = [_peak(group) for group in optimizer.param_groups]
    peaks += [float(lr) for scheduler in schedulers for lr in getattr(scheduler, "max_lrs", ())]
    if not max(peaks) > 0:
        raise ValueError(
            "`optimizer` has no learning rate above zero, so its groups have no ratio to keep. Make it with "
            "any positive lr; only the ratios count."
        )
    return max(peaks)


def flattened(schedulers: Iterable[Any]) -> list[Any]:
    """The schedulers, and those that they are made of."""
    found = []
    for scheduler in schedulers:
        found += [scheduler, *flattened(getattr(scheduler, "_schedulers", ()))]
    return found


def rescale(optimizer: Optimizer, schedulers: Sequence[Any], factor: float) -> None:
    """Multiply every learning rate of an optimizer and its schedules, wherever those stand."""
    for group in optimizer.param_groups:
        _rescale_values(group, ("lr", "initial_lr", "max_lr", "min_lr"), factor)
    for scheduler in schedulers:
        names = ("base_lrs", "max_lrs", "min_lrs", "default_min_lr", "eta_min", "_last_lr")
        _rescale_values(vars(scheduler), names, factor)


def _rescale_values(values: dict[str, Any], names: Iterable[str], factor: float) -> None:
    for name in names:
        value = values.get(name)
        if isinstance(value, Tensor):  # a compiled or captured step reads this very tensor
            value.mul_(factor)
        elif isinstance(value, (list, tuple)):  # tensors in it may be shared with the group
            values[name] = [part * factor for part in value]
        elif value is not None:
            values[name] = factor * value


def warmup_decay(num_steps: int) -> list[float]:
    """A linear warm-up over a tenth of the steps, then a cosine to zero, as multiples of the peak.

    Example:
        >>> [round(share, 3) for share in warmup_decay(12)]
        [1.0, 1.0, 0.98, 0.921, 0.827, 0.708, 0.571, 0.429, 0.292, 0.173, 0.079, 0.02]
    """
    warm = max(1, round(WARMUP * num_steps))
    decay = [0.5 * (1 + math.cos(math.pi * k / (num_steps - warm))) for k in range(num_steps - warm)]
    return [(k + 1) / warm for k in range(warm)] + decay
