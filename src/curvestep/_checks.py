"""Checks of what a caller handed in. Each returns what it accepts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer


def check_positive(name: str, value: float) -> float:
    """``value`` if it is positive and finite."""
    if type(value) is float and 0.0 < value < math.inf:
        return value  # at once: this runs in every step of an optimizer
    if not (_is_number(value) and math.isfinite(value) and value > 0):
        raise _error(name, "positive and finite", value)
    return value


def check_nonnegative(name: str, value: float) -> float:
    """``value`` if it is zero or more, and finite."""
    if not (_is_number(value) and math.isfinite(value) and value >= 0):
        raise _error(name, "zero or more, and finite", value)
    return value


def check_finite(name: str, value: float) -> float:
    """``value`` if it is a finite number."""
    if not (_is_number(value) and math.isfinite(value)):
        raise _error(name, "a finite number", value)
    return value


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    """``value`` if it is one of ``choices``."""
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"`{name}` must be one of {listed}, got {value!r}.")
    return value


def check_count(name: str, value: int, *, least: int = 1) -> int:
    """``value`` if it is a whole number of at least ``least``."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or int(value) < least:
        raise _error(name, f"a whole number of at least {least}", value)
    return int(value)


def check_optimizer(optimizer: Any) -> Optimizer:
    """The torch optimizer that steps: ``optimizer``, or what frameworks wrapped in it."""
    from torch.optim import Optimizer

    inner = inner_optimizer(optimizer)
    if not isinstance(inner, Optimizer):
        raise TypeError(f"`optimizer` must be a torch optimizer, got a {type(optimizer).__name__}.")
    return inner


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer inside the wrappers of frameworks (Accelerate's, Lightning's, Fabric's), or itself."""
    while hasattr(optimizer, "optimizer") and not _has_hooks(optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _has_hooks(optimizer: Any) -> bool:
    """Whether torch made it: only its own optimizers call hooks around a step."""
    return isinstance(getattr(optimizer, "_optimizer_step_pre_hooks", None), Mapping)


def _is_number(value: object) -> bool:
    return not isinstance(value, (str, bytes, bool)) and hasattr(value, "__float__")


def _error(name: str, needed: str, value: object) -> ValueError | TypeError:
    kind = ValueError if _is_number(value) else TypeError
    return kind(f"`{name}` must be {needed}, got {value!r}.")
