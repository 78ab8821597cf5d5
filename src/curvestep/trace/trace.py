r"""The rows that a probe measures, in memory and in an append-only file; their schema is the package's.

A trace file is JSON Lines: a header, then one object per row, written as soon as it is measured::

    {"format": "curvestep-trace", "schema": 1, "fractions": [0.5, 1.0], "optimizer": "ClippedSGD", ...}
    {"step": 5, "loss": 6.9, "grad_norm": 0.48, "step_norm": 0.75, "smoothness": 1.2, "secants": [1.2, 1.0]}
"""

from __future__ import annotations

import errno
import math
import platform
import warnings
from array import array
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from curvestep.checks import check_choice
from curvestep.files import PackedRows, RowFile, dump_row, end_of_last_row, is_exact, load_row, read_lines
from curvestep.report.markup import html_table
from curvestep.trace.columns import CLIP_COLUMNS, clip_norms, columns_of, is_list
from curvestep.trace.schema import FAILED, FIELDS, OK, Row, with_current_keys

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvestep.trace.step_gains import StepGains

FORMAT = "curvestep-trace"
SCHEMA = 1
TRACE = "trace.jsonl"  # its name in the folder of a run

_MISSING: Row = dict.fromkeys(FIELDS)


class Trace:
    """Rows of a measured training run, in memory and, with a ``path``, in a file; columns on demand.

    A file that is continued is read first: a torn last line is cut off, and a row whose step is already there
    is not written twice. ``step`` is the key of a row; the first row of a step stays.

    Args:
        path: File to write, created with its folders if need be. None keeps the rows in memory only.
        header: What was measured on what, for the first line of the file: plain JSON values.
        if_exists: What to do with a file that holds rows: ``"resume"`` it, write to a ``"new"`` one beside it
            (``trace-2.jsonl``), or ``"overwrite"`` it.

    Example:
        >>> trace = Trace(header={"model": "lstm", "fractions": [0.5, 1.0]})
        >>> trace.append({"step": 0, "grad_norm": 0.5, "smoothness": 2.0, "secants": [2.0, 1.5]})
        True
        >>> trace.append({"step": 0, "grad_norm": 0.7})    # this step is there already
        False
        >>> trace.column("grad_norm"), trace.column("kappa"), trace.column("secants")
        (array([0.5]), array([nan]), array([[2. , 1.5]]))
        >>> trace[0]["smoothness"], trace[0]["kappa"], trace.fractions
        (2.0, None, (0.5, 1.0))
    """

    def __init__(
        self, path: str | Path | None = None, *, header: Row | None = None, if_exists: str = "resume"
    ) -> None:
        check_choice("if_exists", if_exists, ("resume", "new", "overwrite"))
        header = header or {}
        self.path: Path | None = None
        self.header = _plain({"format": FORMAT, "schema": SCHEMA, "versions": _versions(), **header})
        self._rows = PackedRows()
        self._steps = array("d")  # one a row, NaN where it has none
        self._last_step = -math.inf
        # Read when asked for, and kept until a row comes.
        self._read_columns: dict[str, np.ndarray] | None = None
        self._read_clip_norm: np.ndarray | None = None
        self._file: RowFile | None = None
        self._unwritten: list[bytes] = []
        self._closed = False
        if path is not None:
            self._file = _open_file(Path(path), if_exists)
            self.path = self._file.path
            self._begin(self._file, header)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """The trace in a file, for reading: rows appended to it later stay in memory.

        A damaged line is skipped with a warning; a file that is no trace, or of a newer schema, is refused.
        """
        trace = cls()
        trace.path = Path(path)
        with trace.path.open("rb") as file:
            trace._read(file, trace.path)
        return trace

    def describe(self, facts: Mapping[str, object]) -> None:
        """Add facts about the run to the header before the first row; existing keys are kept."""
        if len(self):
            return
        self.header = _plain({**facts, **self.header})
        self._rewrite()

    def append(self, row: Mapping[str, object]) -> bool:
        """Add ``row`` in memory and on disk; False if its step was there already.

        A file that cannot be written (a full disk) raises ``OSError``, but the row is kept in memory and
        written with the next one that succeeds.

        Raises:
            ValueError: the trace is closed, or a value cannot be written.
        """
        if self._closed:
            raise ValueError("This trace is closed. Open it again with Trace(path) to append to it.")
        plain = _plain(row)
        line = dump_row(plain)  # a value that JSON has no form for is refused before anything is stored
        added = self._add(line, _step_of(plain))
        if self._file is not None:
            if added:
                self._unwritten.append(line)
            while self._unwritten:
                self._file.write(self._unwritten[0])
                del self._unwritten[0]
        return added

    def cut(self, step: int) -> int:
        """Drop the rows from ``step`` on, in memory and on disk; returns how many.

        For a run that goes on from an older checkpoint: what was measured after it is not part of this run.
        """
        old = list(zip(self._rows.lines(), self._steps, strict=True))
        kept = [(line, at) for line, at in old if not at >= step]  # a row without a step stays
        if len(kept) < len(old):
            self._rows = PackedRows()
            self._steps = array("d")
            self._last_step = -math.inf
            self._read_columns = None
            self._read_clip_norm = None
            self._unwritten = []
            for line, at in kept:
                self._add(line, at)
            self._rewrite()
        return len(old) - len(kept)

    def close(self) -> None:
        """Close the file; the rows stay readable."""
        if self._file is not None:
            self._file.close()
        self._file = None
        self._closed = True

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, index: int) -> Row:
        if not -len(self) <= index < len(self):
            raise IndexError(f"there is no row {index}: the trace has {len(self)}")
        return {**_MISSING, **self._rows[index % len(self)]}

    def __iter__(self) -> Iterator[Row]:
        for row in islice(self._rows, len(self)):  # not those that come meanwhile
            yield {**_MISSING, **row}

    def __repr__(self) -> str:
        where = "" if self.path is None else f", {str(self.path)!r}"
        return f"<Trace: {len(self)} rows{where}>"

    def _repr_html_(self) -> str:
        rows = [("column", "first", "median", "last")]
        for name in self.names:
            values = self.column(name)
            if values.dtype != object and values.ndim == 1 and np.isfinite(values).any():
                middle = float(np.median(values[np.isfinite(values)]))
                rows.append((name, f"{values[0]:.4g}", f"{middle:.4g}", f"{values[-1]:.4g}"))
        return html_table(repr(self)[1:-1], rows)

    def plot(self) -> Figure:
        """Loss, gradient norm, smoothness and the stability margin of the rows so far; needs matplotlib."""
        from curvestep.report.results import draw_charts, trace_charts

        return draw_charts(trace_charts(self))

    def step_gains(self) -> StepGains:
        """What each measured step gained to first order and what curvature took back, of each layer too."""
        from curvestep.trace.step_gains import step_gains

        return step_gains(self)

    @property
    def names(self) -> list[str]:
        """Names of the columns that occur, in the order of first sight."""
        return list(self._columns)

    @property
    def fractions(self) -> tuple[float, ...]:
        """The fractions of a step that all rows share, ascending; empty if they are in the rows alone."""
        given = self.header.get("fractions")
        if not is_list(given):
            return ()
        return tuple(float(fraction) for fraction in given)

    def column(self, name: str) -> np.ndarray:
        """Values of one key, one per row: float64, read-only, NaN where missing.

        Lists (``secants``) are rows of two dimensions, NaN at their ends; words (``status``) and logs
        (``spikes``) objects, None where missing. A layer's: ``column("layers/encoder/smoothness")``.

        Returns:
            One number for each row, NaN where a row has none.

        Raises:
            KeyError: no row and no schema knows the name.
        """
        columns = self._columns
        if name in columns:
            return columns[name]
        if name in FIELDS:
            return self._missing_column(name)
        known = ", ".join(columns) or "none yet"
        raise KeyError(f"The trace has no column {name!r}; it has: {known}.")

    def _missing_column(self, name: str) -> np.ndarray:
        """The column of a key of the schema that no row has; it takes no memory."""
        kind = FIELDS[name].kind
        if name == "fractions":
            return np.broadcast_to(np.array(self.fractions, dtype=float), (len(self), len(self.fractions)))
        if kind == "numbers":
            return np.broadcast_to(math.nan, (len(self), len(self.fractions)))
        if kind in ("word", "log"):
            return np.broadcast_to(np.array(None, dtype=object), len(self))
        return np.broadcast_to(math.nan, len(self))

    @property
    def _columns(self) -> dict[str, np.ndarray]:
        """Every column that occurs: all are read when one is asked for."""
        if self._read_columns is None:
            self._read_columns = columns_of(self._rows, len(self), self.fractions)
            for column in self._read_columns.values():
                column.flags.writeable = False
        return self._read_columns

    @property
    def clip_norm(self) -> np.ndarray:
        """The gradient norm at which each step was clipped, as ``columns.clip_norms`` has it."""
        if self._read_clip_norm is None:
            columns = {name: self.column(name) for name in (*CLIP_COLUMNS, "optimizer")}
            if not any(columns["optimizer"]):  # older rows leave it to the header
                columns["optimizer"] = np.array(str(self.header.get("optimizer", "")), dtype=object)
            self._read_clip_norm = clip_norms(columns)
            self._read_clip_norm.flags.writeable = False
        return self._read_clip_norm

    @property
    def spikes(self) -> list[Row]:
        """The steps whose gradient norm stood out, as the optimizers that step logged them."""
        return [spike for log in self.column("spikes") if log for spike in log]

    @property
    def ok(self) -> np.ndarray:
        """Which rows were measured without trouble (status "ok", or none given), as booleans."""
        return np.array([status in (OK, None) for status in self.column("status")], dtype=bool)

    @property
    def failed(self) -> np.ndarray:
        """Which rows tell of a measurement that failed, as booleans; they have no loss."""
        status = self.column("status")
        return np.array([str(word).startswith(FAILED) for word in status], dtype=bool)

    def _rewrite(self) -> None:
        """Replace the file, if there is one, by the header and the rows."""
        if self._file is not None:
            lines = [line + b"\n" for line in self._rows.lines()]
            self._file.replace(dump_row(self.header) + b"".join(lines))

    def _begin(self, file: RowFile, header: Row) -> None:
        """Write the header to a new file, or read what an older one holds."""
        if file.is_empty:
            file.append(self.header)
            return
        with file.reader() as content:
            self._read(content, file.path)
            end = end_of_last_row(content)
        file.cut(end)
        differ = [key for key, value in header.items() if self.header.get(key) != _plain(value)]
        if differ:
            warnings.warn(
                f"{file.path} is continued, but its header differs in: {', '.join(differ)}. "
                "Rows measured in different ways do not make one fit; start a new file for a new run.",
                stacklevel=3,
            )

    def _read(self, file: BinaryIO, path: Path) -> None:
        self.header = _read_header(file.readline(), path)
        for line, row in read_lines(file, path, first_line=2):
            current = with_current_keys(row)
            self._add(line if current is row else dump_row(current), _step_of(row))

    def _add(self, line: bytes, step: float) -> bool:
        """Append a row in memory; False if its step is there already."""
        # The usual row comes after all others; only one that steps back is looked up.
        if step <= self._last_step and step in self._steps:
            return False
        self._last_step = max(self._last_step, step)  # stays where the step is NaN
        self._rows.append(line)
        self._steps.append(step)
        self._read_columns = None
        self._read_clip_norm = None
        return True


def _open_file(path: Path, if_exists: str) -> RowFile:
    """The file to write, where one of this name may hold rows."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder. Name a file in it: {path / 'trace.jsonl'}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    if if_exists == "new":
        return _open_free_file(path)
    file = RowFile(path)
    if if_exists == "overwrite" and _holds_rows(path):
        file.close()
        path.unlink()
        return RowFile(path)
    return file


def _open_free_file(path: Path) -> RowFile:
    """The first of ``trace.jsonl``, ``trace-2.jsonl`` … without rows that no other process has open."""
    candidate = path
    number = 1
    while True:
        if not _holds_rows(candidate):
            try:
                return RowFile(candidate)
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
        number += 1
        candidate = path.with_name(f"{path.stem}-{number}{path.suffix}")


def _holds_rows(path: Path) -> bool:
    """Whether a trace has more than a header; a file that is no trace is not touched."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        _read_header(file.readline(), path)
        return bool(file.readline())


def _step_of(row: Mapping[str, object]) -> float:
    """The step of a row; NaN if it has none that is a number."""
    step = row.get("step")
    return step if is_exact(step) else math.nan


def _read_header(line: bytes, path: Path) -> Row:
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
    if schema != SCHEMA:
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


@cache
def _versions() -> dict[str, str]:
    from curvestep import __version__

    versions = {name: metadata.version(name) for name in ("torch", "numpy", "scipy")}
    return {"python": platform.python_version(), "curvestep": __version__, **versions}
