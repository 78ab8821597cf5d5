"""The columns of rows as arrays, and where steps were clipped, from the columns."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import ArrayLike

from curvestep.files import is_exact
from curvestep.optimizer_family import family_of
from curvestep.trace.schema import COEFFICIENT_TOLERANCE, FIELDS, Row

CLIP_COLUMNS = ("clipped", "coefficient", "grad_norm", "step_norm", "lr", "max_norm")


def columns_of(rows: Iterable[Row], num: int, fractions: Sequence[float]) -> dict[str, np.ndarray]:
    """Every column that occurs in ``num`` rows, by the path of its keys, in the order of first sight.

    Numbers are float64, NaN where missing. Lists of numbers are rows of two dimensions, at least as wide as
    there are ``fractions``. Words and logs are objects, None where missing.
    """
    columns: dict[str, _Column] = {}
    for place, row in enumerate(rows):
        for name, value in _cells(row):
            if name not in columns:
                columns[name] = _new_column(name, num, fractions)
            columns[name].put(place, value)
    return {name: column.values for name, column in columns.items()}


def _cells(row: Mapping[str, object], above: str = "") -> Iterator[tuple[str, object]]:
    """Every value of a row with the path of its keys."""
    for key, value in row.items():
        if type(value) is dict and value:
            yield from _cells(value, f"{above}{key}/")
        elif value is not None:
            yield above + key, value


class _Column:
    """A column of numbers; what is no number counts as missing."""

    def __init__(self, num: int) -> None:
        self.values = np.full(num, math.nan)

    def put(self, place: int, value: Any) -> None:
        if is_number(value):
            self.values[place] = value


class _ListColumn(_Column):
    """Lists of numbers as rows of two dimensions; ``default`` where there is none."""

    def __init__(self, num: int, width: int, default: Sequence[float] = ()) -> None:
        self.values = np.full((num, width), math.nan)
        self.values[:, : len(default)] = default

    def put(self, place: int, value: Any) -> None:
        if is_list(value) and value:
            wider = len(value) - self.values.shape[1]
            if wider > 0:
                self.values = np.pad(self.values, ((0, 0), (0, wider)), constant_values=math.nan)
            self.values[place] = math.nan
            self.values[place, : len(value)] = value


class _WordColumn(_Column):
    """What is no number, as it came."""

    def __init__(self, num: int) -> None:
        self.values = np.full(num, None, dtype=object)

    def put(self, place: int, value: Any) -> None:
        if type(value) is str:
            self.values[place] = sys.intern(value)  # one object for all rows
        elif not is_number(value):
            self.values[place] = value


class _LogColumn(_WordColumn):
    """Lists of objects that name their steps."""

    def put(self, place: int, value: Any) -> None:
        if is_log(value):
            self.values[place] = value


class _FreeColumn(_Column):
    """A key that the schema does not know: numbers, or words as soon as one comes."""

    def put(self, place: int, value: Any) -> None:
        if is_number(value) and self.values.dtype != object:
            self.values[place] = value
        elif not is_number(value):
            if self.values.dtype != object:
                self.values = np.full(len(self.values), None, dtype=object)
            self.values[place] = value


def _new_column(name: str, num: int, fractions: Sequence[float]) -> _Column:
    if name not in FIELDS:
        return _FreeColumn(num)
    kind = FIELDS[name].kind
    if kind == "numbers":
        return _ListColumn(num, len(fractions), fractions if name == "fractions" else ())
    if kind == "word":
        return _WordColumn(num)
    return _LogColumn(num) if kind == "log" else _Column(num)


def is_number(value: object) -> bool:
    """Whether a value is such a number or a flag."""
    return type(value) is bool or is_exact(value)


def is_list(value: object) -> TypeGuard[list[float]]:
    """Whether a value is a list of numbers."""
    return type(value) is list and all(is_exact(v) for v in value)


def is_log(value: object) -> bool:
    """Whether a value is a list of objects that name their steps."""
    return type(value) is list and all(type(v) is dict and is_exact(v.get("step")) for v in value)


def clip_norms(columns: Mapping[str, ArrayLike]) -> np.ndarray:
    r"""The gradient norm at which each step was clipped: inf where it was not, NaN where that is unknown.

    Rows say whether a step was ``clipped``. Of rows that do not, the ``coefficient`` tells, and without it,
    but for Adam, a step shorter than lr·‖g‖. The threshold is the ``max_norm`` of the row where it has one,
    else coefficient times gradient norm, or step length over lr.

    Args:
        columns: Columns of a trace, of which any may be missing and any number NaN: ``clipped``,
            ``coefficient``, ``grad_norm``, ``step_norm``, ``lr``, ``max_norm`` and ``optimizer``.

    Example:
        >>> clip_norms({"coefficient": [0.5, 1.0], "grad_norm": 4.0})
        array([ 2., inf])
        >>> clip_norms({"grad_norm": 4.0, "step_norm": [1, np.nan], "lr": 0.5})
        array([ 2., nan])
        >>> clip_norms({"clipped": [False, True], "coefficient": 0.5, "grad_norm": 4.0})
        array([inf,  2.])
        >>> clip_norms({"clipped": True, "coefficient": 0.25, "grad_norm": 4.0, "max_norm": 3.0})
        array(3.)
    """
    numbers = [np.asarray(columns.get(name, math.nan), dtype=float) for name in CLIP_COLUMNS]
    flag, coefficient, g, length, lr, max_norm = np.broadcast_arrays(*numbers)
    optimizer = columns.get("optimizer", "")
    # Adam's steps do not grow with the gradient: their length tells nothing.
    has_length = np.isfinite(length * lr) & ~_is_adaptive(optimizer)
    has_coefficient = np.isfinite(coefficient)
    # Older rows have no `max_norm`. Normalized descent multiplied by offset / (norm + offset) in them.
    normalized = np.asarray(optimizer, dtype=object) == "NormalizedSGD"
    edge = np.where(normalized, 0.5, 1.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        by_coefficient = coefficient * g / np.where(normalized, 1 - coefficient, 1.0)
        threshold = np.where(has_coefficient, by_coefficient, length / lr)
        is_shorter = length < (1 - 1e-3) * (lr * g)
    threshold = np.where(np.isfinite(max_norm), max_norm, threshold)
    inferred = np.where(has_coefficient, coefficient < edge * (1 - COEFFICIENT_TOLERANCE), is_shorter)
    clipped = np.where(np.isfinite(flag), flag != 0, inferred)
    known = np.isfinite(flag) | has_coefficient | has_length
    return np.where(known, np.where(clipped, threshold, math.inf), math.nan)


def _is_adaptive(optimizer: ArrayLike) -> np.ndarray:
    names = np.asarray(optimizer, dtype=object)
    adaptive = {name: family_of(name).is_adaptive for name in set(names.flat)}
    return np.array([adaptive[name] for name in names.flat], dtype=bool).reshape(names.shape)
