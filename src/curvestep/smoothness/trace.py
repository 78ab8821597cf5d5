r"""The rows that a probe measures, in memory and in an append-only file.

A trace file is JSON Lines: a header, then one object a row, written as soon as it is measured::

    {"format": "curvestep-trace", "schema": 1, "versions": {"torch": "2.13.0", ...}, "fractions": [0.5, 1.0]}
    {"step": 5, "loss": 6.9, "grad_norm": 0.48, "step_norm": 0.75, "smoothness": 1.18, "status": "ok"}
"""

from __future__ import annotations

import csv
import math
import platform
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from curvestep._files import RowFile, dump_row, end_of_last_row, load_row, read_rows
from curvestep.smoothness.columns import Columns

if TYPE_CHECKING:
    import pandas as pd

FORMAT = "curvestep-trace"
SCHEMA = 1

OK = "ok"
NONFINITE = "nonfinite"  # a loss, gradient or step that is not finite
ZERO_STEP = "zero-step"  # the parameters did not move: the segment has no smoothness
FAILED = "failed: "  # followed by what went wrong

FIELDS = (
    "step",
    "loss",
    "grad_norm",
    "step_norm",
    "smoothness",
    "local_smoothness",
    "spectral_smoothness",
    "kappa",
    "lr",
    "coefficient",
    "batch_size",
    "eps",  # relative precision of the gradients; missing in older traces
    "self_test",  # relative difference of one gradient replayed twice; likewise
    "status",
    "layers",
)
_NUMBERS = frozenset(FIELDS) - {"status", "layers"}
_COUNTS = ("step", "batch_size")  # whole numbers, read back as int


class Trace:
    """Rows of a measured training run, as typed columns in memory and, with a ``path``, in a file.

    Opening an existing file continues it: its rows are read, a torn last line is cut off, and a row whose
    step is already there is not written twice. ``step`` is the key of a row; the first row of a step stays.

    Args:
        path: File to write, created with its folders if need be. None keeps the rows in memory only.
        header: What was measured on what, for the first line of the file: plain JSON values.

    Example:
        >>> trace = Trace(header={"model": "lstm"})
        >>> trace.append({"step": 0, "grad_norm": 0.5, "smoothness": 2.0, "status": OK})
        True
        >>> trace.append({"step": 0, "grad_norm": 0.7})    # this step is there already
        False
        >>> trace.column("grad_norm"), trace.column("kappa")
        (array([0.5]), array([nan]))
        >>> trace[0]["smoothness"], trace[0]["kappa"]
        (2.0, None)
    """

    def __init__(self, path: str | Path | None = None, *, header: dict[str, Any] | None = None) -> None:
        self.path = None if path is None else Path(path)
        self.header = {"format": FORMAT, "schema": SCHEMA, "versions": dict(_versions()), **(header or {})}
        self._columns = Columns()
        self._last_step = -math.inf
        self._file: RowFile | None = None
        self._unwritten: list[bytes] = []
        self._closed = False
        if self.path is not None:
            self._file = self._open(self.path, header or {})

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """The trace in a file, for reading: rows appended to it later stay in memory.

        A torn last line is skipped with a warning; a file that is no trace, or of a newer schema, is refused.
        """
        trace = cls()
        trace.path = Path(path)
        trace._read(trace.path)
        return trace

    @classmethod
    def merge(cls, *traces: Trace) -> Trace:
        """One trace in memory from the parts of a resumed run, by step and without duplicates.

        Where two parts have the same step, the part named first stays; the header is the first part's.

        Example:
            >>> first, second = Trace(), Trace()
            >>> _ = first.append({"step": 0}), first.append({"step": 5}), second.append({"step": 5})
            >>> _ = second.append({"step": 10})
            >>> Trace.merge(first, second).column("step")
            array([ 0.,  5., 10.])
        """
        if not traces:
            raise ValueError("`traces` must be at least one trace, got none.")
        merged = cls()
        merged.header = dict(traces[0].header)
        steps = np.concatenate([trace.column("step") for trace in traces])
        part = np.repeat(np.arange(len(traces)), [len(trace) for trace in traces])
        row = np.concatenate([np.arange(len(trace)) for trace in traces])
        order = np.argsort(steps, kind="stable")  # rows without a step (NaN) come last
        for start in range(0, len(order), 4096):
            chunk = order[start : start + 4096]
            merged._extend([traces[p]._columns.row(r) for p, r in zip(part[chunk], row[chunk], strict=True)])
        return merged

    def append(self, row: Mapping[str, Any]) -> bool:
        """Add ``row`` in memory and on disk; False if its step was there already.

        Known keys are in ``FIELDS``; unknown ones are kept. A file that cannot be written (a full disk)
        raises ``OSError``, but the row is kept in memory and written with the next one that succeeds.
        """
        if self._closed:
            raise ValueError("This trace is closed. Open it again with Trace(path) to append to it.")
        plain = _plain(row)
        line = dump_row(plain)  # a value that JSON has no form for is refused before anything is stored
        added = self._extend([plain]) == 1
        if self._file is not None:
            if added:
                self._unwritten.append(line)
            while self._unwritten:
                self._file.write(self._unwritten[0])
                del self._unwritten[0]
        return added

    def close(self) -> None:
        """Close the file; the rows stay readable."""
        if self._file is not None:
            self._file.close()
        self._file, self._closed = None, True

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._columns)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of a trace of {len(self)}")
        return {**dict.fromkeys(FIELDS), **_counted(self._columns.row(index % len(self)))}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        where = "" if self.path is None else f", {str(self.path)!r}"
        return f"<Trace: {len(self)} rows{where}>"

    @property
    def names(self) -> list[str]:
        """Names of the columns that occur, in the order of first sight."""
        return list(self._paths())

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the columns hold, spare room included."""
        return self._columns.nbytes

    @property
    def ok(self) -> np.ndarray:
        """Which rows were measured without trouble (status "ok", or none given), as booleans."""
        return self._columns.equals(("status",), OK) | self._columns.equals(("status",), None)

    def column(self, name: str) -> np.ndarray:
        """Values of one key as float64, NaN where missing: a read-only view, not a copy.

        Layers are columns of their own: ``column("layers/encoder/smoothness")``. A key that holds words
        (``status``) comes as an array of objects, None where missing.
        """
        path = self._paths().get(name, (name,))
        if path not in self._columns.paths and name not in FIELDS:
            known = ", ".join(self.names) or "none yet"
            raise KeyError(f"The trace has no column {name!r}; it has: {known}.")
        if self._columns.has_words(path) and name not in _NUMBERS:
            return self._columns.words(path)
        return self._columns.numbers(path)

    def to_pandas(self) -> pd.DataFrame:
        """The rows as a pandas data frame, one column a key; layers as ``layers/<name>/<key>``."""
        import pandas as pd

        return pd.DataFrame({name: self.column(name) for name in self.names})

    def to_csv(self, path: str | Path) -> None:
        """Write the rows as comma-separated values, an empty cell where a value is missing."""
        paths = self._paths()
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(paths)
            for index in range(len(self)):
                flat = ((name, self._columns.value(p, index)) for name, p in paths.items())
                writer.writerow(_count(name, value) for name, value in flat)

    def _paths(self) -> dict[str, tuple[str, ...]]:
        return {"/".join(path): path for path in self._columns.paths}

    def _open(self, path: Path, header: dict[str, Any]) -> RowFile:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.stat().st_size == 0:
            file = RowFile(path, end=0)
            file.append(self.header)
            return file
        self._read(path)
        _warn_of_other_header(path, self.header, header)
        return RowFile(path, end=end_of_last_row(path))

    def _read(self, path: Path) -> None:
        with path.open("rb") as file:
            self.header = _read_header(file.readline(), path)
            for rows in read_rows(file, path, first_line=2):
                self._extend(rows)

    def _extend(self, rows: Sequence[Mapping[str, Any]]) -> int:
        """Append the rows whose step is new; returns how many."""
        fresh = []
        for row in rows:
            step = row.get("step")
            if isinstance(step, (int, float)) and not math.isnan(step):
                # The usual row comes after all others; only a row that steps back is looked up.
                if step <= self._last_step and self._has_step(step, fresh):
                    continue
                self._last_step = max(self._last_step, step)
            fresh.append(row)
        self._columns.extend(fresh)
        return len(fresh)

    def _has_step(self, step: float, fresh: list[Mapping[str, Any]]) -> bool:
        return bool((self.column("step") == step).any()) or any(row.get("step") == step for row in fresh)


def _read_header(line: bytes, path: Path) -> dict[str, Any]:
    """The first line, or an error in one line that says why this is no trace we can read."""
    if not line.strip():
        raise ValueError(f"{path} is empty: no trace was written to it.")
    try:
        header, _ = load_row(line)
    except ValueError as error:
        raise ValueError(f"{path} is not a curvestep trace: its first line is no header, {error}.") from None
    if header.get("format") != FORMAT:
        raise ValueError(f"{path} is not a curvestep trace: its first line is no trace header.")
    schema = header.get("schema")
    if not isinstance(schema, int) or schema > SCHEMA:
        raise ValueError(
            f"{path} has schema {schema!r}, this version of curvestep reads up to {SCHEMA}. "
            "Install a newer curvestep to read it."
        )
    return header


def _plain(value: Any) -> Any:
    """``value`` without what is None, numpy scalars and one-element tensors as Python numbers."""
    if isinstance(value, Mapping):
        return {str(key): _plain(v) for key, v in value.items() if v is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value.item() if hasattr(value, "item") else value


def _counted(row: dict[str, Any]) -> dict[str, Any]:
    return {key: _count(key, value) for key, value in row.items()}


def _count(key: str, value: Any) -> Any:
    whole = key in _COUNTS and isinstance(value, float) and value.is_integer()
    return int(value) if whole else value


def _warn_of_other_header(path: Path, there: dict[str, Any], given: dict[str, Any]) -> None:
    differ = [key for key, value in given.items() if there.get(key) != _plain(value)]
    if differ:
        warnings.warn(
            f"{path} is continued, but its header differs in: {', '.join(differ)}. "
            "Rows measured in different ways do not make one fit; start a new file for a new run.",
            stacklevel=4,
        )


@cache
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in ("curvestep", "torch", "numpy", "scipy"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
