"""Learning rates of an optimizer and its schedules, wherever torch keeps them; shapes of schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from curvestep.optimizer_family import group_peak


def constant(num_steps: int) -> list[float]:
    """The same rate at every step."""
    return [1.0] * num_steps


def warmup_decay(num_steps: int) -> list[float]:
    """A linear warm-up over a tenth of the steps, then a cosine to zero, as multiples of the peak.

    Example:
        >>> [round(share, 3) for share in warmup_decay(12)]
        [1.0, 1.0, 0.98, 0.921, 0.827, 0.708, 0.571, 0.429, 0.292, 0.173, 0.079, 0.02]
    """
    warm = max(1, round(num_steps / 10))
    decay = [0.5 * (1 + math.cos(math.pi * k / (num_steps - warm))) for k in range(num_steps - warm)]
    return [(k + 1) / warm for k in range(warm)] + decay


SCHEDULES: dict[str, Callable[[int], list[float]]] = {"constant": constant, "warmup-decay": warmup_decay}


def check_schedule(schedule: str) -> None:
    """Refuse a schedule of another name, with the one to take instead."""
    if schedule not in SCHEDULES:
        listed = " or ".join(map(repr, SCHEDULES))
        raise ValueError(
            f"`schedule` must be {listed}, got {schedule!r}. Every decay, cosine, linear or one-cycle, is "
            "'warmup-decay'."
        )


def peak_lr(optimizers: Iterable[Optimizer], schedulers: Iterable[Any] = ()) -> float:
    """Largest learning rate that the schedule reaches in any group."""
    peaks = [group_peak(group) for optimizer in optimizers for group in optimizer.param_groups]
    peaks += [float(lr) for scheduler in schedulers for lr in getattr(scheduler, "max_lrs", ())]
    if not max(peaks) > 0:
        raise ValueError(
            "`optimizer` has no learning rate above zero, so its groups have no ratio to keep. Make it with "
            "any positive lr; only the ratios count."
        )
    return max(peaks)


def shares_of_groups(optimizers: Sequence[Optimizer]) -> list[float]:
    """Learning rates of all groups, relative to the largest."""
    peak = peak_lr(optimizers)
    return [group_peak(group) / peak for optimizer in optimizers for group in optimizer.param_groups]


def shares_of_parameters(optimizers: Sequence[Optimizer], parameters: Iterable[Tensor]) -> list[float]:
    """Learning rates of parameters, relative to the largest; zero for one that is not trained."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    known: dict[int, float] = {}
    for group, share in zip(groups, shares_of_groups(optimizers), strict=True):
        known.update((id(p), share) for p in group["params"])
    return [known.get(id(p), 0.0) for p in parameters]


def is_below_peak(optimizer: Optimizer) -> bool:
    """Whether a schedule holds a learning rate below its peak now, as where a warm-up begins."""
    return any(float(group["lr"]) < group_peak(group) for group in optimizer.param_groups)


def flattened(schedulers: Iterable[Any]) -> list[Any]:
    """The schedulers, and those that they are made of."""
    found = []
    for scheduler in schedulers:
        found += [scheduler, *flattened(getattr(scheduler, "_schedulers", ()))]
    return found


def has_scheduler(optimizer: Optimizer) -> bool:
    """Whether a scheduler was made from it."""
    return any("initial_lr" in group for group in optimizer.param_groups)


def set_peak(optimizers: Sequence[Optimizer], schedulers: Iterable[Any], lr: float) -> None:
    """Scale all learning rates of optimizers and their schedules to the peak ``lr``, wherever they stand."""
    every = flattened(schedulers)
    owners = [getattr(scheduler, "optimizer", None) for scheduler in every]
    for scheduler, owner in zip(every, owners, strict=True):
        if not any(owner is optimizer for optimizer in optimizers):
            name = getattr(scheduler, "__name__", type(scheduler).__name__)
            raise ValueError(f"{name} is no scheduler that was made from this optimizer.")
    for optimizer in optimizers:
        if has_scheduler(optimizer) and not any(owner is optimizer for owner in owners):
            raise ValueError(
                "`optimizer` has a scheduler, which would set its own lr again. Give it too: "
                "`apply(optimizer, scheduler)`."
            )
    factor = lr / peak_lr(optimizers, every)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            _rescale_values(group, ("lr", "initial_lr", "max_lr", "min_lr"), factor)
    for scheduler in every:
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
