r"""A training run as a folder, read.

``config.json`` holds what was trained, ``metrics.jsonl`` one row a step and one an evaluation,
``trace.jsonl`` what the probe measured, ``status.json`` how the run stands. What was trained is data to us:
under ``about`` whoever trained says it in words (``label``, ``task``), names the ``optimizer`` and where
clipping starts (``max_norm``), and lists fields that make no other setting (``not_settings``).

Rows of ``metrics.jsonl``: ``{"step": 1, "split": "train", "loss": ..., "grad_norm": ..., "coefficient": ...,
"lr": ...}`` after each step, and ``{"step": 300, "split": "valid", "loss": ..., "perplexity": ...}`` (or
``accuracy``, in per cent) after an evaluation; on a part of the data the split is ``valid-part``. ``step``
counts the steps taken.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from curvestep.files import dump_json, load_json, read_rows, take_checksum, write_atomically
from curvestep.trace.trace import TRACE as TRACE, Trace

Fields = dict[str, Any]  # plain values by name, as in a JSON object

CONFIG = "config.json"
METRICS = "metrics.jsonl"
STATUS = "status.json"
PART = "-part"  # ends the split of rows from a part of the held-out data

RUNNING = "running"
FINISHED = "finished"
DIVERGED = "diverged"
INTERRUPTED = "interrupted"
FAILED = "failed"
ENDED = (FINISHED, DIVERGED)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run folder: what was trained, its status and its rows, each file read once."""

    folder: Path
    config: Fields
    status: Fields

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """The run in ``folder``, as it stands now."""
        folder = Path(folder)
        config = read_json(folder / CONFIG, needed="; a run folder has one")
        status = read_status(folder, {"status": RUNNING, "step": 0})
        if status.get("status") not in (RUNNING, INTERRUPTED, FAILED, *ENDED):
            raise ValueError(f"{folder / STATUS} has no valid status: it is damaged. Delete it, then resume.")
        return cls(folder=folder, config=config, status=status)

    @property
    def about(self) -> Fields:
        """What whoever trained says of it; empty in older folders."""
        return self.config.get("about", {})

    @property
    def task(self) -> str:
        """Model and data in words: runs that agree in them can be compared."""
        names = [str(self.config[name]) for name in ("name", "scale") if name in self.config]
        return self.about.get("task", ", ".join(names) or self.folder.name)

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

    @property
    def lost_rows(self) -> str:
        """One sentence where ``status.json`` counts more steps than ``metrics.jsonl`` has; else empty."""
        last = last_step(self.folder)
        counted = self.status.get("step", 0)
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


def find_runs(folder: str | Path) -> list[Run]:
    """Every run under ``folder``, by path."""
    folders = [path.parent for path in sorted(Path(folder).rglob(STATUS))]
    return [Run.load(place) for place in folders if (place / CONFIG).exists()]


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
        _, key, rest = line.partition(b'"step": ')
        number = rest.split(b",")[0].rstrip(b"}")
        if key and number.isdigit():
            return int(number)
    return 0


def read_status(folder: Path, default: Fields) -> Fields:
    """The values in ``status.json``, or ``default`` if there is none."""
    path = folder / STATUS
    return read_json(path) if path.exists() else default


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
