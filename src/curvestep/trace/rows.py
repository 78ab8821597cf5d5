"""Rows as they came, packed in memory, and the columns that are read from them."""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from curvestep.files import load_row
from curvestep.trace.schema import FIELDS, Row

BLOCK = 64  # rows that are compressed together, to about a quarter


class PackedRows:
    """Rows as the lines of JSON that a file holds; full blocks of them are compressed.

    Example:
        >>> rows = PackedRows()
        >>> for step in range(100):
        ...     rows.append(b'{"step": %d}' % step)
        >>> len(rows), rows[70], next(rows.lines())
        (100, {'step': 70}, b'{"step": 0}')
    """

    def __init__(self) -> None:
        self._blocks: list[bytes] = []
        self._recent: list[bytes] = []  # less than a block

    def append(self, line: bytes) -> None:
        """Add a row by its line, with or without the end of the line."""
        self._recent.append(line.rstrip(b"\n"))
        if len(self._recent) == BLOCK:
            self._blocks.append(zlib.compress(b"\n".join(self._recent), level=1))
            self._recent = []

    def __len__(self) -> int:
        return BLOCK * len(self._blocks) + len(self._recent)

    def __getitem__(self, index: int) -> Row:
        block, place = divmod(index, BLOCK)
        row, _ = load_row(self._lines_of(block)[place])
        return row

    def __iter__(self) -> Iterator[Row]:
        for line in self.lines():
            row, _ = load_row(line)
            yield row

    def lines(self) -> Iterator[bytes]:
        """Every line, without its end."""
        for block in range(len(self._blocks) + 1):
            yield from self._lines_of(block)

    def _lines_of(self, block: int) -> list[bytes]:
        if block == len(self._blocks):
            return self._recent
        return zlib.decompress(self._blocks[block]).split(b"\n")


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


def is_exact(value: object) -> TypeGuard[float]:
    """Whether a value is a number that float64 holds as it is."""
    return type(value) is float or (type(value) is int and value.bit_length() <= sys.float_info.mant_dig)


def is_number(value: object) -> bool:
    """Whether a value is such a number or a flag."""
    return type(value) is bool or is_exact(value)


def is_list(value: object) -> TypeGuard[list[float]]:
    """Whether a value is a list of numbers."""
    return type(value) is list and all(is_exact(v) for v in value)


def is_log(value: object) -> bool:
    """Whether a value is a list of objects that name their steps."""
    return type(value) is list and all(type(v) is dict and is_exact(v.get("step")) for v in value)
