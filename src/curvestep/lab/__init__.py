"""The experiments of the paper (extra `lab`): one run, a grid of them, all of the paper, a page about them.

The names are looked up on first use, so that importing this package is cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names for type checkers; a test compares the two lists
    from curvestep.lab.grid import sweep as sweep
    from curvestep.lab.paper.reproduction import reproduce as reproduce
    from curvestep.lab.recipes import get_recipe as get_recipe
    from curvestep.lab.report.page import write_page as write_page
    from curvestep.lab.run.loop import train as train

_HOMES = {
    "get_recipe": "recipes",
    "train": "run.loop",
    "sweep": "grid",
    "reproduce": "paper.reproduction",
    "write_page": "report.page",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'curvestep.lab' has no attribute {name!r}")
    value = getattr(import_module(f"curvestep.lab.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
