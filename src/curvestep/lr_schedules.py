"""Learning rates of an optimizer and its schedules, wherever torch keeps them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def group_peak(group: dict[str, Any]) -> float:
    """Largest learning rate that a group's schedule reaches, as far as the group says."""
    return float(group.get("max_lr", group.get("initial_lr", group["lr"])))


def peak_lr(optimizer: Optimizer, schedulers: Iterable[Any] = ()) -> float:
    """Largest learning rate that the schedule reaches in any group."""
    peaks = list(map(group_peak, optimizer.param_groups))
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
