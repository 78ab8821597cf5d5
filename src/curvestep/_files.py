r"""The file that a trace is kept in: strict JSON Lines, append-only, a header first.

A missing value is left out (``null`` is read as missing too); NaN and the infinities are the strings
``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, as in the JSON mapping of Protocol Buffers.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import warnings
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

FORMAT = "curvestep-trace"
SCHEMA = 1
_CHUNK = 4096  # lines parsed at once
_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def dump_line(row: Mapping[str, Any]) -> bytes:
    r"""One row as a line of strict JSON.

    Example:
        >>> dump_line({"step": 3, "loss": float("nan"), "kappa": None})
        b'{"step": 3, "loss": "NaN"}\n'
    """
    return json.dumps(_strict(row), allow_nan=False).encode() + b"\n"


def read_header(file: BinaryIO, path: Path) -> dict[str, Any]:
    """The first line, or an error in one line that says why this is no trace we can read."""
    line = file.readline()
    if not line.strip():
        raise ValueError(f"{path} is empty: no trace was written to it.")
    try:
        header = json.loads(line)
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(f"{path} is not a curvestep trace: its first line is no trace header.")
    schema = header.get("schema")
    if not isinstance(schema, int) or schema > SCHEMA:
        raise ValueError(
            f"{path} has schema {schema!r}, this version of curvestep reads up to {SCHEMA}. "
            "Install a newer curvestep to read it."
        )
    return _lenient(header)


def read_rows(file: BinaryIO, path: Path) -> Iterator[list[dict[str, Any]]]:
    """Rows after the header, in chunks; a line that is no JSON object is skipped with a warning."""
    number = 2
    while lines := list(itertools.islice(file, _CHUNK)):
        try:
            # One call for the whole chunk: about three times as fast as one a line.
            rows = json.loads(b"[" + b",".join(lines) + b"]", parse_constant=_refuse)
            if len(rows) != len(lines) or not all(isinstance(row, dict) for row in rows):
                raise ValueError
        except ValueError:
            rows = [row for i, line in enumerate(lines) if (row := _row(line, number + i, path)) is not None]
        yield [_lenient(row) for row in rows]
        number += len(lines)


def end_of_last_row(path: Path) -> int:
    """Where to append: the length of the file without a torn last line."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        start, tail = size, b""
        while start > 0 and b"\n" not in tail[:-1]:
            step = min(65_536, start)
            start -= step
            file.seek(start)
            tail = file.read(step) + tail
    last = tail.rstrip(b"\n").rfind(b"\n") + 1
    return size if _parse(tail[last:]) is not None else start + last


class AppendOnly:
    """File that grows by whole lines: a write that fails leaves it as it was, a second writer is found out.

    Each line goes to the operating system at once, so a killed process loses nothing. The descriptor is
    closed when the object dies.
    """

    def __init__(self, path: Path, *, end: int) -> None:
        # Not O_APPEND: the position is ours, so that a failed write can be cut off.
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
        self._path = str(path)
        self.close = weakref.finalize(self, os.close, self._descriptor)
        os.ftruncate(self._descriptor, end)
        os.lseek(self._descriptor, end, os.SEEK_SET)
        self._end = end
        if end and os.pread(self._descriptor, 1, end - 1) != b"\n":
            self.write(b"\n")

    def write(self, line: bytes) -> None:
        """Append ``line``; on ``OSError`` (a full disk) cut off what was written of it and raise."""
        size = os.fstat(self._descriptor).st_size
        if size != self._end:
            raise OSError(
                errno.EBUSY,
                f"the file has {size} bytes, not the {self._end} that were written here. Another trace or "
                "process writes to it: give each its own file",
                self._path,
            )
        written = 0
        try:
            while written < len(line):
                written += os.write(self._descriptor, line[written:])
        except OSError:
            os.ftruncate(self._descriptor, self._end)
            os.lseek(self._descriptor, self._end, os.SEEK_SET)
            raise
        self._end += written


def _row(line: bytes, number: int, path: Path) -> dict[str, Any] | None:
    row = _parse(line)
    if row is None and line.strip():
        torn = "the last write was cut short" if not line.endswith(b"\n") else "it is no JSON object"
        warnings.warn(f"{path}: skipped line {number}, {torn}.", stacklevel=2)
    return row


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line, parse_constant=_refuse)
    except ValueError:  # UnicodeDecodeError is one
        return None
    return row if isinstance(row, dict) else None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _strict(v) for key, v in value.items() if v is not None}
    if isinstance(value, (list, tuple)):
        return [_strict(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _lenient(value: Any) -> Any:
    if isinstance(value, dict):
        for key, v in value.items():
            if type(v) is not float:
                value[key] = _lenient(v)
    elif isinstance(value, list):
        return [_lenient(v) for v in value]
    elif isinstance(value, str):
        return _SPECIAL.get(value, value)
    return value
