r"""The rows that a probe measures, in memory and in an append-only file, and the schema of a row.

A trace file is JSON Lines: a header, then one object per row, written as soon as it is measured::

    {"format": "curvestep-trace", "schema": 1, "fractions": [0.5, 1.0], "optimizer": "ClippedSGD", ...}
    {"step": 5, "loss": 6.9, "grad_norm": 0.48, "step_norm": 0.75, "smoothness": 1.2, "secants": [1.2, 1.0]}
"""

from __future__ import annotations

import copy
import itertools
import math
import platform
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import numpy as np

from curvestep._checks import check_choice
from curvestep._files import RowFile, dump_row, end_of_last_row, load_row, read_rows, write_atomically
from curvestep.display.markup import html_table
from curvestep.steps import clip_norms

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Row = dict[str, Any]  # JSON values by the names in FIELDS, and others that a caller added
T = TypeVar("T")

FORMAT = "curvestep-trace"
SCHEMA = 1

OK = "ok"
NONFINITE = "nonfinite"  # a loss, gradient or step that is not finite
ZERO_STEP = "zero-step"  # the parameters did not move: the segment has no smoothness
FAILED = "failed: "  # followed by what went wrong


@dataclass(frozen=True)
class Field:
    """One key of a row or of the header.

    Attributes:
        kind: ``"count"`` (a whole number), ``"number"``, ``"numbers"`` (a list, of a row one entry per
            fraction), ``"flag"``, ``"word"``, ``"group"`` (an object: layers with keys of this schema) or
            ``"log"`` (a list of objects).
        unit: In units of the loss and of the parameters (``x``).
        meaning: One sentence.
    """

    kind: str
    unit: str
    meaning: str


# Every key that the probe writes. Reading and documentation follow from this table. In a trace any
# key may be missing, in some rows or in all; d is the step from x to x + d, g the gradient of one batch.
# fmt: off
_TABLE = (
    ("step", "count", "steps", "Number of the training step; the key of a row."),
    ("loss", "number", "loss", "Loss at x if passed to the probe, else the loss after the step."),
    ("loss_after", "number", "loss", "Loss of the same batch at x + d."),
    ("grad_norm", "number", "loss/x", "‖g(x)‖, before any clipping."),
    ("step_norm", "number", "x", "‖d‖."),
    ("smoothness", "number", "loss/x²", "The paper's L̂: the largest of `secants`, along the step."),
    ("fractions", "numbers", "1", "Every γ of this row; those of the header where it has none."),
    ("secants", "numbers", "loss/x²", "‖g(x + γd) − g(x)‖/‖γd‖ for each γ in `fractions`."),
    ("grad_norms", "numbers", "loss/x", "‖g(x + γd)‖ for each γ in `fractions`."),
    ("local_smoothness", "number", "loss/x²", "‖∇²f(x) d‖/‖d‖, at x along the step."),
    ("local_converged", "flag", "", "Whether `local_error` is at most 0.1; if not, the value is not usable."),
    ("local_error", "number", "1", "Relative change of ∇²f(x) d when the difference step is halved."),
    ("spectral_smoothness", "number", "loss/x²", "‖∇²f(x)‖ over all directions."),
    ("spectral_converged", "flag", "", "Whether Lanczos reached its tolerance."),
    ("spectral_residual", "number", "1", "Residual of the eigenvector, relative to the eigenvalue."),
    ("kappa", "number", "1",
     "‖g(x + γd) − g(x)‖/‖g(x)‖ at the largest γ: the relative change over the step."),
    ("edge", "number", "1", "lr times the first smoothness that was measured, over 2: 1 at the edge."),
    ("curvature", "number", "loss/x²", "dᵀ(g(x + d) − g(x))/‖d‖², with its sign."),
    ("cosine", "number", "1", "Cosine of the angle between the step and −g(x)."),
    ("noise", "number", "loss/x",
     "‖g₁ − g₂‖/2 of the halves of the batch: standard deviation of g."),
    ("grad_variance", "number", "(loss/x)²",
     "tr Σ, of the gradient of one sample: `batch_size` times the square of `noise`."),
    ("grad_signal", "number", "(loss/x)²",
     "‖G‖² without the noise, g₁ᵀg₂ of the halves: right on average, negative at times."),
    ("lr", "number", "x²/loss", "lr of the optimizer that stepped; of several the largest."),
    ("coefficient", "number", "1",
     "What clipping multiplied the gradient by, 1 if it did not clip; of NormalizedSGD β/(‖g‖ + β)."),
    ("clipped", "flag", "", "Whether clipping shortened the step; missing where nobody knew."),
    ("spikes", "log", "",
     "What `optimizer.spikes()` logged since the row before; `step` there is the optimizer's own count."),
    ("optimizer", "word", "", "Class of the optimizer that stepped."),
    ("momentum", "number", "1", "Its momentum β; of Adam β₁."),
    ("optimizer_smoothness", "number", "1/lr",
     "‖P^(-½)Δg‖/‖P^½Δx‖ along the step, P = √v̂ + ε of Adam, I of SGD. lr times it has no unit."),
    ("optimizer_spectral", "number", "1/lr", "‖P⁻¹∇²f(x)‖ over all directions."),
    ("optimizer_converged", "flag", "", "Whether Lanczos reached its tolerance in the metric."),
    ("optimizer_limit", "number", "1",
     "Largest stable lr · `optimizer_spectral` on a quadratic: 2 for SGD, 38 for Adam at β₁ = 0.9."),
    ("optimizer_missing", "word", "", "Why there is no smoothness in the optimizer's metric."),
    ("batch_size", "count", "samples", "Samples of the step, over all calls and ranks."),
    ("num_gradients", "count", "gradients",
     "What the row cost, without self-tests; an oracle counts each batch."),
    ("eps", "number", "1", "Relative precision of the gradients: of the dtype or of autocast."),
    ("self_test", "number", "1", "Relative difference of one gradient that was replayed twice."),
    ("status", "word", "", '"ok", "nonfinite", "zero-step" or "failed: …"; none counts as "ok".'),
    ("layers", "group", "", "The same keys for each layer, by its name."),
)

# What the probe writes into the header. The lower half is known at the first measured step, and missing in
# traces of before; a header may hold other keys, too.
_HEADER_TABLE = (
    ("model", "word", "", "Class of the model."),
    ("num_parameters", "count", "", "How many numbers are trained."),
    ("dtype", "word", "", "Type of the parameters."),
    ("measured_on", "word", "", "The training batch, or how many fixed batches."),
    ("fractions", "numbers", "1", "Every γ, if it is the same in all rows."),
    ("estimators", "group", "", "Estimators with their periods, in measurements."),
    ("every", "count", "steps", "Fewest steps between measurements."),
    ("max_overhead", "number", "1",
     "Gradients for measuring over those for training, after the first ten rows."),
    ("world_size", "count", "", "How many processes train."),
    ("optimizer", "word", "", "Class of the optimizer."),
    ("optimizer_family", "word", "",
     '"sgd", "momentum", "normalized", "adam", "adam-like", "sign", "muon" or "unknown".'),
    ("momentum", "number", "1", "Its momentum; missing where groups differ."),
    ("betas", "numbers", "1", "β₁ and β₂ of Adam; missing where groups differ."),
    ("weight_decay", "number", "", "Its weight decay; missing where groups differ."),
    ("start_lr", "number", "x²/loss", "The largest lr of its groups at the first measured step."),
    ("clipping", "word", "",
     'Inside the optimizer: "norm", "normalized" or "none". A loop may clip before: see `coefficient`.'),
    ("max_norm", "number", "loss/x", "Threshold of clipping; missing where groups differ."),
    ("offset", "number", "loss/x", "β of normalized descent; missing where groups differ."),
    ("norm_scope", "word", "", 'Whose norm is clipped: "global", "group" or "tensor".'),
    ("training_mode", "flag", "", "Whether the model was in training mode."),
    ("num_steps", "count", "steps", "Steps that were planned, where the probe was told."),
)
# fmt: on
FIELDS = {name: Field(*rest) for name, *rest in _TABLE}
HEADER_FIELDS = {name: Field(*rest) for name, *rest in _HEADER_TABLE}
# The columns that ``clip_norms`` reads.
_CLIP_COLUMNS = ("clipped", "coefficient", "grad_norm", "step_norm", "lr", "optimizer")
# What an estimator is called: by the probe, the fit and the column.
ESTIMATORS = ("smoothness", "local_smoothness", "spectral_smoothness")
_LARGEST_EXACT = 2**53  # whole numbers beyond it do not fit a float64


class Trace:
    """Rows of a measured training run, as columns in memory and, with a ``path``, in a file.

    A file that is continued is read first: a torn last line is cut off, and a row whose step is already there
    is not written twice. ``step`` is the key of a row; the first row of a step stays.

    Args:
        path: File to write, created with its folders if need be. None keeps the rows in memory only.
        header: What was measured on what, for the first line of the file: plain JSON values.
        if_exists: What to do with a file that holds rows: ``"continue"`` it, write to a ``"new"`` one beside
            it (``trace-2.jsonl``), or ``"overwrite"`` it.

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
        self,
        path: str | Path | None = None,
        *,
        header: Row | None = None,
        if_exists: str = "continue",
    ) -> None:
        check_choice("if_exists", if_exists, ("continue", "new", "overwrite"))
        self.path = None if path is None else Path(path)
        if self.path is not None and self.path.is_dir():
            raise ValueError(f"{self.path} is a folder. Name a file in it: {self.path / 'trace.jsonl'}.")
        if self.path is not None and if_exists == "new":
            stem, suffix, numbers = self.path.stem, self.path.suffix, itertools.count(2)
            while _holds_rows(self.path):
                self.path = self.path.with_name(f"{stem}-{next(numbers)}{suffix}")
        elif self.path is not None and if_exists == "overwrite" and _holds_rows(self.path):
            self.path.unlink()
        self.header = {"format": FORMAT, "schema": SCHEMA, "versions": dict(_versions()), **(header or {})}
        # A value a row, None where it is missing; in the order of first sight.
        self._columns: dict[tuple[str, ...], list[object]] = {}
        self._read_columns: dict[str, np.ndarray] = {}  # by `column`, since the last row
        self._cached: dict[Hashable, Any] = {}  # by `cached`, likewise
        self._length = 0
        self._last_step = -math.inf
        self._file: RowFile | None = None
        self._unwritten: list[bytes] = []
        self._closed = False
        if self.path is not None:
            self._file = self._open(self.path, header or {})

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """The trace in a file, for reading: rows appended to it later stay in memory.

        A damaged line is skipped with a warning; a file that is no trace, or of a newer schema, is refused.
        """
        trace = cls()
        trace.path = Path(path)
        trace._read(trace.path)
        return trace

    def describe(self, facts: Mapping[str, object]) -> None:
        """Add facts about the run to the header, while there is no row; those that it has already stay."""
        if len(self):
            return
        self.header = _plain({**facts, **self.header})
        self._cached.clear()
        if self._file is not None and self.path is not None:
            self._rewrite([dump_row(self.header)])

    def append(self, row: Mapping[str, object]) -> bool:
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

    def cut(self, step: int) -> int:
        """Drop the rows from ``step`` on, in memory and on disk; returns how many.

        For a run that goes on from an older checkpoint: what was measured after it is not part of this run.
        """
        rows = [self._row(index) for index in range(len(self))]
        kept = [row for row in rows if not _is_from(row, step)]
        if len(kept) < len(rows):
            self._columns, self._length, self._last_step = {}, 0, -math.inf
            self._unwritten = []
            self._extend(kept)
            if self.path is not None and self._file is not None:
                lines = self.path.read_bytes().splitlines(keepends=True)
                self._rewrite([line for line in lines if not _is_line_from(line, step)])
        return len(rows) - len(kept)

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
        return self._length

    def __getitem__(self, index: int) -> Row:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of a trace of {len(self)}")
        return {**dict.fromkeys(FIELDS), **self._row(index % len(self))}

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

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
        """Loss, gradient norm, smoothness and the edge of stability of the rows so far; needs matplotlib."""
        from curvestep.display.drawing import figure_of
        from curvestep.display.results import trace_charts

        return figure_of(trace_charts(self))

    @property
    def names(self) -> list[str]:
        """Names of the columns that occur, in the order of first sight."""
        return list(dict.fromkeys(map("/".join, self._columns)))

    @property
    def fractions(self) -> tuple[float, ...]:
        """The fractions of a step that all rows share, ascending; empty if they are in the rows alone."""
        given = self.header.get("fractions")
        if not isinstance(given, (list, tuple)) or not all(map(_is_exact, given)):
            return ()
        return tuple(float(fraction) for fraction in given)

    @property
    def clip_norm(self) -> np.ndarray:
        """The gradient norm at which each step was clipped, as :func:`curvestep.steps.clip_norms` has it."""
        columns = {name: self.column(name) for name in _CLIP_COLUMNS}
        return self.cached("clip_norm", lambda: clip_norms(columns))

    @property
    def spikes(self) -> list[Row]:
        """The steps whose gradient norm stood out, as the optimizers that step logged them."""
        return [spike for log in self.column("spikes") for spike in log or ()]

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """``make()``, called once until a row is added: for what is computed from all rows."""
        if key not in self._cached:
            self._cached[key] = make()
        return self._cached[key]

    @property
    def ok(self) -> np.ndarray:
        """Which rows were measured without trouble (status "ok", or none given), as booleans."""
        return np.array([status in (OK, None) for status in self._values("status")], dtype=bool)

    def column(self, name: str) -> np.ndarray:
        """Values of one key, one per row: float64, read-only, NaN where missing.

        A list (``secants``, ``grad_norms``, ``fractions``) comes in two dimensions. Layers are
        columns of their own: ``column("layers/encoder/smoothness")``. A key that holds words (``status``)
        or logs (``spikes``) comes as an array of objects, None where missing. A key of the schema that no
        row has is all NaN.
        """
        if name not in self._read_columns:
            column = self._make_column(name)
            column.flags.writeable = False
            self._read_columns[name] = column
        return self._read_columns[name]

    def _make_column(self, name: str) -> np.ndarray:
        values, field = self._values(name), FIELDS.get(name)
        if name == "fractions":
            given = list(self.fractions)
            values = [given if value is None else value for value in values]
        if field is None and name not in self.names:
            known = ", ".join(self.names) or "none yet"
            raise KeyError(f"The trace has no column {name!r}; it has: {known}.")
        kind = _kind_of(values) if field is None else field.kind
        if kind == "numbers":
            return _lists(values, width=len(self.fractions))
        if kind in _OBJECTS:
            return _objects(values, _OBJECTS[kind])
        return _numbers(values)

    def to_pandas(self) -> pd.DataFrame:
        """The rows as a data frame; a layer's key is ``layers/<name>/<key>``, an entry ``secants/0``."""
        import pandas as pd

        frame = {}
        for name in self.names:
            values = self.column(name)
            if values.ndim == 1:
                frame[name] = values
            else:
                frame |= {f"{name}/{i}": values[:, i] for i in range(values.shape[1])}
        return pd.DataFrame(frame)

    def _values(self, name: str) -> Sequence[object]:
        """One key's values as they came, None where they are missing."""
        found = (values for path, values in self._columns.items() if "/".join(path) == name)
        return next(found, [None] * self._length)

    def _row(self, index: int) -> Row:
        """Row ``index`` as it came, without the keys that were missing."""
        row: Row = {}
        for (*above, key), values in self._columns.items():
            if values[index] is not None:
                place = row
                for step in above:
                    place = place.setdefault(step, {})
                place[key] = copy.copy(values[index])
        return row

    def _rewrite(self, lines: Sequence[bytes]) -> None:
        """Replace the file by these lines, and go on after them."""
        assert self.path is not None
        assert self._file is not None
        self._file.close()
        try:
            write_atomically(self.path, b"".join(lines))
        finally:  # also where the disk is full: then the file is as it was
            self._file = RowFile(self.path)

    def _open(self, path: Path, header: Row) -> RowFile:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.stat().st_size == 0:
            file = RowFile(path, end=0)
            file.append(self.header)
            return file
        self._read(path)
        differ = [key for key, value in header.items() if self.header.get(key) != _plain(value)]
        if differ:
            warnings.warn(
                f"{path} is continued, but its header differs in: {', '.join(differ)}. "
                "Rows measured in different ways do not make one fit; start a new file for a new run.",
                stacklevel=3,
            )
        return RowFile(path, end=end_of_last_row(path))

    def _read(self, path: Path) -> None:
        with path.open("rb") as file:
            self.header = _read_header(file.readline(), path)
            for rows in read_rows(file, path, first_line=2):
                self._extend(rows)

    def _extend(self, rows: Sequence[Mapping[str, object]]) -> int:
        """Append the rows whose step is new; returns how many."""
        fresh = []
        for row in rows:
            step = row.get("step")
            if _is_exact(step) and step == step:
                # The usual row comes after all others; only a row that steps back is looked up.
                if step <= self._last_step and self._has_step(step, fresh):
                    continue
                self._last_step = max(self._last_step, step)
            fresh.append(row)
        self._store(fresh, ())
        self._length += len(fresh)
        for values in self._columns.values():
            values += [None] * (self._length - len(values))
        self._read_columns.clear()
        self._cached.clear()
        return len(fresh)

    def _has_step(self, step: float, fresh: list[Mapping[str, object]]) -> bool:
        return bool((self.column("step") == step).any()) or any(row.get("step") == step for row in fresh)

    def _store(self, rows: Sequence[Mapping[str, object] | None], above: tuple[str, ...]) -> None:
        # Column by column, not row by row: one list a key instead of a path a cell.
        for key in dict.fromkeys(key for row in rows if row for key in row):
            values = [row.get(key) if row else None for row in rows]
            path = (*above, key)
            nested = [value if type(value) is dict else None for value in values]
            if any(nested):
                self._store(nested, path)
                values = [None if inner else value for value, inner in zip(values, nested, strict=True)]
            if any(value is not None for value in values):
                self._columns.setdefault(path, [None] * self._length).extend(values)


def _holds_rows(path: Path) -> bool:
    """Whether a trace has more than a header; a file that is no trace is not touched."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        _read_header(file.readline(), path)
        return bool(file.readline())


def _is_from(row: Mapping[str, object], step: int) -> bool:
    number = row.get("step")
    return _is_exact(number) and number >= step


def _is_line_from(line: bytes, step: int) -> bool:
    """Whether a line of the file is a row from ``step`` on; damaged ones stay."""
    try:
        return _is_from(load_row(line)[0], step)
    except ValueError:
        return False


def _is_exact(value: object) -> TypeGuard[float]:
    """Whether a value is a number that float64 holds as it is."""
    return type(value) is float or (type(value) is int and abs(value) <= _LARGEST_EXACT)


def _is_list(value: object) -> TypeGuard[list[float]]:
    """Whether a value is a list of numbers."""
    return type(value) is list and all(map(_is_exact, value))


def _is_log(value: object) -> bool:
    """Whether a value is a list of objects that name their steps."""
    return type(value) is list and all(type(v) is dict and _is_exact(v.get("step")) for v in value)


def _is_word(value: object) -> bool:
    """Whether a value is there and is no number."""
    return value is not None and type(value) is not bool and not _is_exact(value)


def _kind_of(values: Sequence[object]) -> str:
    """Kind of a column that the schema does not know."""
    return "word" if any(map(_is_word, values)) else "number"


def _lists(values: Sequence[object], *, width: int) -> np.ndarray:
    """Lists as rows of an array that is as wide as the longest and at least ``width``, NaN at their ends."""
    lists = [value if _is_list(value) else [] for value in values]
    array = np.full((len(lists), max([width, *map(len, lists)])), math.nan)
    for row, found in zip(array, lists, strict=True):
        row[: len(found)] = found
    return array


_OBJECTS = {"word": _is_word, "log": _is_log}  # kinds of columns that hold no numbers


def _objects(values: Sequence[object], is_kept: Callable[[object], bool]) -> np.ndarray:
    return np.fromiter((v if is_kept(v) else None for v in values), object, len(values))


def _numbers(values: Sequence[object]) -> np.ndarray:
    return np.array([None if _is_word(v) else v for v in values], dtype=np.float64)


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


@cache
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in ("curvestep", "torch", "numpy", "scipy"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
