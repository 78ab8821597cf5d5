"""The experiments of the paper: one run, a grid of them, all of the paper.

The names are looked up on first use, so that importing this package is cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names for type checkers; a test compares the two lists
    from curvestep_reproduction.figures.reproduction import reproduce as reproduce
    from curvestep_reproduction.recipes import get_recipe as get_recipe
    from curvestep_reproduction.training.loop import train as train
    from curvestep_reproduction.training.sweep import sweep as sweep

_HOMES = {
    "get_recipe": "recipes",
    "train": "training.loop",
    "sweep": "training.sweep",
    "reproduce": "figures.reproduction",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'curvestep_reproduction' has no attribute {name!r}")
    value = getattr(import_module(f"curvestep_reproduction.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
