r"""A training run as a folder.

``config.json`` holds the recipe, ``metrics.jsonl`` one row a step and one an evaluation, ``trace.jsonl`` what
the probe measured, ``checkpoint.pt`` the state to resume from, ``status.json`` how the run stands. The two
row files are append-only, the others are replaced atomically. Everything but ``status.json`` is a function
of the recipe and the data; only there are times kept. ``.lock`` is locked by the process that trains.

Rows of ``metrics.jsonl``: ``{"step": 1, "split": "train", "loss": ..., "grad_norm": ..., "coefficient": ...,
"lr": ...}`` after each step, and ``{"step": 300, "split": "valid", "loss": ..., "perplexity": ...}`` (or
``accuracy``, in per cent) after an evaluation; on a part of the data the split is ``valid-part``. ``step``
counts the steps taken.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from curvestep._files import (
    RowFile as RowFile,
    add_checksum,
    dump_json,
    load_json,
    lock,
    read_rows,
    remove_parts,
    take_checksum,
    write_atomically,
)
from curvestep.fit.fit import SmoothnessFit, fit_smoothness
from curvestep.lab.recipe_fields import Fields
from curvestep.lab.recipes import Recipe, from_dict, to_dict
from curvestep.smoothness.trace import Trace

CONFIG = "config.json"
METRICS = "metrics.jsonl"
TRACE = "trace.jsonl"
CHECKPOINT = "checkpoint.pt"
STATUS = "status.json"
LOCK = ".lock"
PART = "-part"  # ends the split of rows from a part of the held-out data

RUNNING, FINISHED, DIVERGED = "running", "finished", "diverged"
INTERRUPTED, FAILED = "interrupted", "failed"
ENDED = (FINISHED, DIVERGED)
PATIENCE = 3.0  # seconds to wait for another process to leave a folder


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run folder: its recipe, its status and its rows, each file read once."""

    folder: Path
    recipe: Recipe
    status: Fields

    @classmethod
    def load(cls, folder: str | Path) -> Run:
        """The run in ``folder``, as it stands now."""
        folder = Path(folder)
        config = read_json(folder / CONFIG, needed="; a run folder has one")
        try:
            recipe = from_dict(config)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{folder / CONFIG} is not a recipe of this version: {error}") from None
        status = read_status(folder, {"status": RUNNING, "step": 0})
        if status.get("status") not in (RUNNING, INTERRUPTED, FAILED, *ENDED):
            raise ValueError(f"{folder / STATUS} has no valid status: it is damaged. Delete it, then resume.")
        return cls(folder=folder, recipe=recipe, status=status)

    @property
    def has_ended(self) -> bool:
        """Whether it finished or diverged."""
        return self.status["status"] in ENDED

    @property
    def trace_path(self) -> Path:
        """The file that the probe wrote; it may not exist."""
        return self.folder / TRACE

    @cached_property
    def metrics(self) -> list[Fields]:
        """All rows of ``metrics.jsonl``; a torn last line is left out with a warning."""
        path = self.folder / METRICS
        if not path.exists():
            return []
        with path.open("rb") as file:
            return list(read_rows(file, path, skip_damaged=False))

    @cached_property
    def trace(self) -> Trace:
        """The measurements of the probe."""
        return Trace.load(self.trace_path)

    @cached_property
    def fit(self) -> SmoothnessFit:
        """The fit of (L0, L1) to the trace, computed once for all that show it."""
        return fit_smoothness(self.trace)

    @cached_property
    def result(self) -> RunResult:
        """How the run ended, or stood when that was last written; an error if it never was."""
        fields = RunResult.__dataclass_fields__
        values = {name: value for name, value in self.status.items() if name in fields}
        missing = [name for name in fields if name not in {"folder", "message", *values}]
        if missing:
            path = self.folder / STATUS
            raise ValueError(f"{path} has no {missing[0]!r}: there is no result. Delete it, then resume.")
        return RunResult(folder=self.folder, **values)

    @property
    def lost_rows(self) -> str:
        """One sentence where ``status.json`` counts more steps than ``metrics.jsonl`` has; else empty."""
        last, counted = last_step(self.folder), self.status.get("step", 0)
        if last >= counted:
            return ""
        path = self.folder / METRICS
        return (
            f"{path} ends at step {last:,}, {STATUS} counts {counted:,} steps: rows were lost. Train again."
        )

    def rows(self, split: str = "train") -> list[Fields]:
        """The rows of one split (``train``, ``valid`` or ``test``), in the order of steps."""
        return [row for row in self.metrics if row["split"] == split]

    def column(self, name: str, split: str = "train") -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of one column of the metrics."""
        rows = [row for row in self.rows(split) if name in row]
        steps = np.array([row["step"] for row in rows], dtype=np.int64)
        return steps, np.array([row[name] for row in rows], dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended."""

    folder: Path  # the run folder
    status: str  # ``finished``, ``diverged`` or ``interrupted`` (resume it)
    step: int  # steps taken
    # Mean training loss over the last twentieth of the steps, at most 50; NaN if it diverged.
    train_loss: float
    # Result of the last evaluation, by split: loss, and perplexity or accuracy.
    metrics: dict[str, dict[str, float]]
    num_parameters: int  # parameters of the model
    seconds: float  # time spent training, over all resumptions
    data: str  # where the data came from
    message: str = ""  # why the run diverged, or failed


def find_runs(folder: str | Path) -> list[Run]:
    """Every run under ``folder``, by path."""
    found = (path.parent for path in sorted(Path(folder).rglob(STATUS)))
    return [Run.load(path) for path in found if (path / CONFIG).exists()]


def open_run(folder: str | Path, recipe: Recipe, *, resume: bool) -> Run:
    """The run folder for ``recipe``: made, or with ``resume`` found again.

    A folder that already holds a run is refused without ``resume``, and with it if its recipe is another
    one. Nothing is overwritten, but for a run that failed before its first step (a corpus that does not
    exist, say): it left nothing to lose.
    """
    folder = Path(folder)
    files = [name for name in (METRICS, TRACE, CHECKPOINT, STATUS) if (folder / name).exists()]
    status, has_config = read_status(folder, {}), (folder / CONFIG).exists()
    failed_at_the_start = (status.get("status"), status.get("step"), files) == (FAILED, 0, [STATUS])
    if has_config and not failed_at_the_start:
        run = Run.load(folder)
        if not resume:
            raise ValueError(f"{folder} already holds a run. Resume it, or choose another folder.")
        check_recipe(run, recipe)
        return run
    if files and not has_config:
        raise ValueError(f"{folder} has {files[0]} but no {CONFIG}: it is no run folder. Choose another.")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / CONFIG, add_checksum(to_dict(recipe)))
    return Run(folder=folder, recipe=recipe, status={"status": RUNNING, "step": 0, "seconds": 0.0})


def check_recipe(run: Run, recipe: Recipe, *, apart_from: Sequence[str] = ()) -> None:
    """An error that names what differs if ``run`` is of another recipe, ``apart_from`` these fields."""
    before, now = to_dict(run.recipe), to_dict(recipe)
    names = [name for name in {**before, **now} if name not in apart_from]
    changed = [f"{k} {before.get(k)!r} → {now.get(k)!r}" for k in names if before.get(k) != now.get(k)]
    if changed:
        raise ValueError(
            f"{run.folder} holds a run of another recipe ({', '.join(changed)}). Choose another folder."
        )


def has_ended(folder: Path, recipe: Recipe | None = None, *, apart_from: Sequence[str] = ()) -> bool:
    """Whether a run in ``folder`` finished or diverged; one of another ``recipe`` is an error."""
    if read_status(folder, {}).get("status") not in ENDED:
        return False
    if recipe is not None:
        check_recipe(Run.load(folder), recipe, apart_from=apart_from)
    return True


def last_step(folder: Path) -> int:
    """Steps that the run in ``folder`` has taken, as the last whole row of its metrics says; 0 without one.

    Reads the end of the file only: displays of progress ask for it twice a second.
    """
    try:
        with (folder / METRICS).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 2000))
            lines = file.read().split(b"\n")
    except OSError:
        return 0
    for line in reversed(lines[:-1]):
        _, found, rest = line.partition(b'"step": ')
        number = rest.split(b",")[0].rstrip(b"}")
        if found and number.isdigit():
            return int(number)
    return 0


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the run folder, made if need be: a second process that wants it gets an error.

    Waits three seconds for a process that is just ending, as a worker does whose parent was killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(lock(folder / LOCK, patience=PATIENCE))
        except TimeoutError:
            raise ValueError(f"Another process is training in {folder}. Wait for it, or end it.") from None
        remove_parts(folder)
        yield


def synced_length(path: Path) -> int:
    """Flush the rows of a file to the disk; its length, 0 if there is none."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return file.seek(0, os.SEEK_END)


def read_status(folder: Path, default: Fields) -> Fields:
    """The values in ``status.json``, or ``default`` if there is none."""
    path = folder / STATUS
    return read_json(path) if path.exists() else default


def write_status(folder: Path, **values: object) -> None:
    """Replace ``status.json``."""
    write_json(folder / STATUS, add_checksum(values))


def write_json(path: Path, values: Mapping[str, object]) -> None:
    """Replace ``path`` atomically: it holds the old values or the new ones, never half of them."""
    write_atomically(path, dump_json(values, indent=2) + "\n")


def read_json(path: Path, *, needed: str = "") -> Fields:
    """The object in ``path``; an error in one line if it is missing or is none."""
    try:
        values = load_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"There is no {path}{needed}.") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}.") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold an object, it holds {type(values).__name__}.")
    try:
        return take_checksum(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}.") from None
