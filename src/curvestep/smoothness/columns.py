"""Rows kept as typed columns: eight bytes a number, four bytes a word, grown in chunks.

A list of dictionaries costs about a kilobyte a row. Here a row costs what its numbers cost, a key that
never occurs costs nothing, and a column is read as a view, without a copy.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Path = tuple[str, ...]

# A missing number is a NaN whose payload says so: arithmetic treats it as any NaN, and a NaN that was
# measured can still be told apart when the row is read back.
_MISSING_BITS = np.int64(0x7FF8_0000_0000_1DEA)
MISSING = np.array([_MISSING_BITS]).view(np.float64)[0]
_LARGEST_EXACT = 2**53  # whole numbers beyond it do not fit a float64


class Columns:
    """Growing table of rows; a nested mapping becomes one column per leaf.

    Example:
        >>> table = Columns()
        >>> table.extend([{"step": 0, "loss": 2.5}, {"step": 1, "layers": {"out": {"loss": 1.0}}}])
        >>> table.numbers(("loss",))
        array([2.5, nan])
        >>> table.row(1)
        {'step': 1.0, 'layers': {'out': {'loss': 1.0}}}
    """

    def __init__(self) -> None:
        self._numbers: dict[Path, _Growing] = {}
        self._words: dict[Path, _Words] = {}
        self._paths: dict[Path, None] = {}  # in the order of first sight
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def paths(self) -> list[Path]:
        """Every column's path, in the order of first sight."""
        return list(self._paths)

    @property
    def nbytes(self) -> int:
        """Bytes held by the columns, spare room included."""
        words = (column.codes for column in self._words.values())
        return sum(column.data.nbytes for column in [*self._numbers.values(), *words])

    def extend(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append ``rows``: numbers as float64, everything else as a code into a table of distinct values."""
        self._write_rows(rows, ())
        self._length += len(rows)

    def _write_rows(self, rows: Sequence[Mapping[str, Any] | None], above: Path) -> None:
        # Column by column, not row by row: one list and one array a key instead of a path a cell.
        for key in dict.fromkeys(key for row in rows if row for key in row):
            values = [row.get(key) if row else None for row in rows]
            path = (*above, str(key))
            if dict in set(map(type, values)):
                self._write_rows([v if type(v) is dict else None for v in values], path)
                values = [None if type(v) is dict and v else v for v in values]
            self._write_cells(values, path)

    def _write_cells(self, values: list[Any], path: Path) -> None:
        numbers, others = _as_numbers(values)
        if numbers is not None:
            column = self._numbers.setdefault(path, _Growing(_MISSING_BITS))
            column.write(self._length, numbers.view(np.int64))
        if others:
            self._words.setdefault(path, _Words()).write(self._length, len(values), others)
        if numbers is not None or others:
            self._paths.setdefault(path)

    def numbers(self, path: Path) -> np.ndarray:
        """The column as a read-only float64 view; NaN where there is no number."""
        if path not in self._numbers:
            return np.broadcast_to(MISSING, self._length)
        return self._numbers[path].view(self._length).view(np.float64)

    def words(self, path: Path) -> np.ndarray:
        """The column as an object array; None where there is no word."""
        if path not in self._words:
            return np.full(self._length, None)
        column = self._words[path]
        table = np.empty(len(column.table) + 1, dtype=object)
        table[:-1] = column.table
        return table[column.codes.view(self._length)]  # code -1 finds the None at the end

    def equals(self, path: Path, value: object) -> np.ndarray:
        """Where the column holds ``value``, as booleans; ``None`` asks where it holds no word."""
        if path not in self._words:
            return np.full(self._length, value is None)
        column = self._words[path]
        return column.codes.view(self._length) == (-1 if value is None else column.code_of(value))

    def has_words(self, path: Path) -> bool:
        """Whether anything but numbers occurs in the column."""
        return path in self._words

    def row(self, index: int) -> dict[str, Any]:
        """Row ``index`` as it came, without the keys that were missing."""
        row: dict[str, Any] = {}
        for path in self._paths:
            value = self.value(path, index)
            if value is not None:
                _put(row, path, value)
        return row

    def value(self, path: Path, index: int) -> Any:
        """One cell, None where missing."""
        if path in self._words:
            code = self._words[path].codes.view(self._length)[index]
            if code >= 0:
                return self._words[path].table[code]
        if path in self._numbers:
            bits = self._numbers[path].view(self._length)[index]
            return None if bits == _MISSING_BITS else float(bits.view(np.float64))
        return None


class _Growing:
    """Array that grows at the end by a quarter; what was never written holds ``fill``."""

    def __init__(self, fill: np.int64 | np.int32) -> None:
        self.fill = fill
        self.data = np.empty(0, dtype=fill.dtype)

    def write(self, start: int, values: np.ndarray) -> None:
        self._reserve(start + len(values))
        self.data[start : start + len(values)] = values

    def view(self, length: int) -> np.ndarray:
        self._reserve(length)
        view = self.data[:length]
        view.flags.writeable = False
        return view

    def _reserve(self, needed: int) -> None:
        if needed > len(self.data):
            bigger = np.full(max(needed, len(self.data) + len(self.data) // 4, 256), self.fill)
            bigger[: len(self.data)] = self.data
            self.data = bigger  # views of the old array keep it, and stay as they were


class _Words:
    """Values that are not numbers, as codes into a table of the distinct ones."""

    def __init__(self) -> None:
        self.codes = _Growing(np.int32(-1))
        self.table: list[Any] = []
        self._code: dict[object, int] = {}

    def write(self, start: int, count: int, values: Iterable[tuple[int, Any]]) -> None:
        codes = np.full(count, -1, dtype=np.int32)
        for offset, value in values:
            codes[offset] = self._intern(value)
        self.codes.write(start, codes)

    def code_of(self, value: object) -> int:
        """The code, or -2, which no row has."""
        return self._code.get(_key(value), -2)

    def _intern(self, value: Any) -> int:
        code = self._code.setdefault(_key(value), len(self.table))
        if code == len(self.table):
            self.table.append(value)
        return code


def _key(value: Any) -> object:
    return value if type(value) is str else (json.dumps(value, sort_keys=True),)


def _as_numbers(values: list[Any]) -> tuple[np.ndarray | None, list[tuple[int, Any]]]:
    """``values`` as float64 with MISSING in the gaps (None if there is no number), and what is no number."""
    kinds = set(map(type, values))
    if not kinds <= {float, int, type(None)} or (int in kinds and _too_large(values)):
        others = [(i, v) for i, v in enumerate(values) if v is not None and not _is_exact(v)]
        values = [v if _is_exact(v) else None for v in values]
        kinds = set(map(type, values))
    else:
        others = []
    if kinds == {type(None)}:
        return None, others
    numbers = np.array(values, dtype=np.float64)
    if type(None) in kinds:
        numbers.view(np.int64)[[v is None for v in values]] = _MISSING_BITS
    return numbers, others


def _is_exact(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) <= _LARGEST_EXACT)


def _too_large(values: list[Any]) -> bool:
    return any(type(value) is int and abs(value) > _LARGEST_EXACT for value in values)


def _put(row: dict[str, Any], path: Path, value: Any) -> None:
    for key in path[:-1]:
        row = row.setdefault(key, {})
    row[path[-1]] = value
