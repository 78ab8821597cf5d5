"""Checks of what a caller handed in. Each returns what it accepts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TypeVar

Number = TypeVar("Number", bound=float)


def check_positive(name: str, value: float) -> float:
    """``value`` if it is positive and finite."""
    return _check_number(name, value, "positive and finite", lambda number: 0 < number < math.inf)


def check_threshold(name: str, value: float) -> float:
    """``value`` if it is positive; infinity is a threshold that never clips."""
    if type(value) is float and value > 0.0:
        return value  # at once: each step of an optimizer asks
    return _check_number(name, value, "positive: a number, or inf for no limit", lambda number: number > 0)


def check_nonnegative(name: str, value: float) -> float:
    """``value`` if it is zero or more, and finite."""
    return _check_number(name, value, "zero or more, and finite", lambda number: 0 <= number < math.inf)


def check_finite(name: str, value: float) -> float:
    """``value`` if it is a finite number."""
    return _check_number(name, value, "a finite number", math.isfinite)


def check_inside(name: str, value: float, low: float, high: float) -> float:
    """``value`` if it is between two numbers, and neither of them."""
    return _check_number(name, value, f"between {low:g} and {high:g}", lambda number: low < number < high)


def check_count(name: str, value: int, *, least: int = 1) -> int:
    """``value`` if it is a whole number of at least ``least``."""

    def holds(number: float) -> bool:
        return hasattr(number, "__index__") and number >= least

    return int(_check_number(name, value, f"a whole number of at least {least}", holds))


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    """``value`` if it is one of ``choices``."""
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(_message(name, value, f"one of {listed}"))
    return value


def _check_number(name: str, value: Number, needed: str, holds: Callable[[float], bool]) -> Number:
    """``value`` if it is a number for which the condition holds."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        function = getattr(value, "__name__", "")
        call = f" Call it: `{function}()`." if function else ""
        raise TypeError(f"{_message(name, value, needed)}{call}")
    if not holds(value):
        raise ValueError(_message(name, value, needed))
    return value


def _message(name: str, value: object, needed: str) -> str:
    return f"`{name}` must be {needed}, got {value!r}."


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint at the one of ``names`` that is closest to a mistyped one; empty if none is.

    Example:
        >>> nearest("max_nrom", ["lr", "max_norm"])
        ' Did you mean max_norm?'
    """
    plain = {one.strip("-"): one for one in names}
    close = get_close_matches(name.lower().strip("-"), plain, n=1)
    return f" Did you mean {plain[close[0]]}?" if close else ""


class MissingExtraError(ImportError):
    """A package of an extra is not installed; the message names both and how to install them."""


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Import packages of an extra inside: where one is missing, say how to install all of them."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"this needs the extra `{extra}`: {error.name} is not installed. In the folder of curvestep: "
            f"pip install -c constraints.txt '.[{extra}]'",
            name=error.name,
        ) from None
