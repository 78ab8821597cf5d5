r"""A training run as a folder.

``config.json`` holds the recipe, ``metrics.jsonl`` one row a step and one an evaluation, ``trace.jsonl`` what
the probe measured, ``checkpoint.pt`` the state to resume from, ``status.json`` how the run stands. The two
row files are append-only, the others are replaced atomically. Everything but ``status.json`` is a function
of the recipe and the data; only there are times kept.

Rows of ``metrics.jsonl``: ``{"step": 1, "split": "train", "loss": ..., "grad_norm": ..., "coefficient": ...,
"lr": ...}`` after each step, and ``{"step": 300, "split": "valid", "loss": ..., "perplexity": ...}`` (or
``accuracy``, in per cent) after an evaluation. ``step`` counts the steps taken.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from curvestep import _files
from curvestep._files import RowFile as RowFile, dump_json, load_json, write_atomically
from curvestep.fit.fit import SmoothnessFit, fit_smoothness
from curvestep.lab.recipes import Recipe, from_dict, to_dict
from curvestep.smoothness.trace import Trace

CONFIG = "config.json"
METRICS = "metrics.jsonl"
TRACE = "trace.jsonl"
CHECKPOINT = "checkpoint.pt"
STATUS = "status.json"

RUNNING, FINISHED, DIVERGED = "running", "finished", "diverged"
INTERRUPTED, FAILED = "interrupted", "failed"
ENDED = (FINISHED, DIVERGED)
_STATUSES = (RUNNING, INTERRUPTED, FAILED, *ENDED)
PATIENCE = 3.0  # seconds to wait for another process to leave a folder


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run folder says: its recipe, how it stands, and its rows."""

    folder: Path
    recipe: Recipe
    status: dict[str, Any]

    @classmethod
    def load(cls, folder: str | Path) -> Run:
        """The run in ``folder``."""
        folder = Path(folder)
        config = read_json(folder / CONFIG, needed="a run folder has one")
        return cls(folder=folder, recipe=_recipe_of(folder, config), status=_status_of(folder))

    @property
    def trace_path(self) -> Path:
        """The file that the probe wrote; it may not exist."""
        return self.folder / TRACE

    @cached_property
    def trace(self) -> Trace:
        """What the probe measured, read once."""
        return Trace.load(self.trace_path)

    @cached_property
    def fit(self) -> SmoothnessFit:
        """The fit of the trace, made once; an error if there are too few rows."""
        return fit_smoothness(self.trace)

    def rows(self, split: str = "train") -> list[dict[str, Any]]:
        """The rows of one split (``train``, ``valid`` or ``test``), in the order of steps."""
        return [row for row in read_rows(self.folder / METRICS) if row["split"] == split]

    def column(self, name: str, split: str = "train") -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of one column of the metrics."""
        rows = [row for row in self.rows(split) if name in row]
        steps = np.array([row["step"] for row in rows], dtype=np.int64)
        return steps, np.array([row[name] for row in rows], dtype=np.float64)


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
    begun = (folder / CONFIG).exists()
    if not begun or _failed_at_the_start(folder):
        if not begun:
            _refuse_foreign(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / CONFIG, to_dict(recipe))
        return Run(folder=folder, recipe=recipe, status={"status": RUNNING, "step": 0, "seconds": 0.0})
    run = Run.load(folder)
    if not resume:
        raise ValueError(f"{folder} already holds a run. Resume it, or choose another folder.")
    check_recipe(run, recipe)
    return run


def check_recipe(run: Run, recipe: Recipe, *, apart_from: Sequence[str] = ()) -> None:
    """An error that names what differs if ``run`` is of another recipe, ``apart_from`` these fields."""
    before, now = to_dict(run.recipe), to_dict(recipe)
    names = [name for name in {**before, **now} if name not in apart_from]
    changed = [f"{k} {before.get(k)!r} → {now.get(k)!r}" for k in names if before.get(k) != now.get(k)]
    if changed:
        raise ValueError(
            f"{run.folder} holds a run of another recipe ({', '.join(changed)}). Choose another folder."
        )


def _failed_at_the_start(folder: Path) -> bool:
    status = read_json(folder / STATUS) if (folder / STATUS).exists() else {}
    kept = [name for name in (METRICS, TRACE, CHECKPOINT) if (folder / name).exists()]
    return status.get("status") == FAILED and not status.get("step") and not kept


def write_status(folder: Path, **values: Any) -> None:
    """Replace ``status.json``."""
    write_json(folder / STATUS, values)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the run folder: a second process that wants it gets an error. The system lets go when we die.

    Waits three seconds for a process that is just ending, as a worker does whose parent was killed.
    """
    try:
        import fcntl
    except ImportError:  # not a Unix: two writers are not kept apart
        yield
        return
    with (folder / CONFIG).open("r") as file:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    words = f"Another process is training in {folder}. Wait for it, or end it."
                    raise ValueError(words) from None
                time.sleep(0.1)
        yield


def synced_length(path: Path) -> int:
    """Bring the rows of a file to the disk; its length, 0 if there is none."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return file.seek(0, os.SEEK_END)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; a torn last line is left out with a warning, a damaged one is an error."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        return [row for rows in _files.read_rows(file, path, skip_damaged=False) for row in rows]


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Replace ``path`` atomically: it holds the old values or the new ones, never half of them."""
    write_atomically(path, dump_json(values, indent=2) + "\n")


def read_json(path: Path, *, needed: str = "") -> dict[str, Any]:
    """The object in ``path``; an error in one line if it is missing or is none."""
    try:
        values = load_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"There is no {path}{f'; {needed}' if needed else ''}.") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}.") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold an object, it holds {type(values).__name__}.")
    return values


def _refuse_foreign(folder: Path) -> None:
    strangers = [name for name in (METRICS, TRACE, CHECKPOINT, STATUS) if (folder / name).exists()]
    if strangers:
        raise ValueError(f"{folder} has {strangers[0]} but no {CONFIG}: it is no run folder. Choose another.")


def _recipe_of(folder: Path, config: dict[str, Any]) -> Recipe:
    try:
        return from_dict(config)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder / CONFIG} is not a recipe of this version: {error}") from None


def _status_of(folder: Path) -> dict[str, Any]:
    path = folder / STATUS
    status = read_json(path) if path.exists() else {"status": RUNNING, "step": 0}
    if status.get("status") not in _STATUSES:
        raise ValueError(f"{path} does not say how the run stands: it is damaged. Delete it, then resume.")
    return status
