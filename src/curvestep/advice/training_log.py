"""Logs that trainers write, as columns: Hugging Face, Lightning, an export of W&B, TensorBoard's event files.

Only steps, losses, gradient norms and learning rates are kept, eight bytes each, however long the file is.
"""

from __future__ import annotations

import csv
import json
import math
import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from curvestep.trace.columns import is_number

TRAINER_STATE = "trainer_state.json"
METRICS = "metrics.csv"
EVENTS = "tfevents"

# A column by the end of its name, as trainers call it; the first that a log has is taken.
STEP = ("step", "_step", "global_step", "trainer/global_step")
COLUMNS = {
    "loss": ("loss", "train_loss", "training_loss", "train_loss_step", "loss_step", "train_loss_epoch"),
    "grad_norm": ("grad_norm", "gradient_norm", "global_norm", "total_grad_norm", "grad_norm_total"),
    "lr": ("learning_rate", "lr"),
}


@dataclass(frozen=True)
class TrainingLog:
    """What a trainer logged: NaN where a step has no such number.

    Args:
        path: The file.
        step: Numbers of the training steps, ascending.
        loss: Of training.
        grad_norm: Norm of the gradient, as a rule before clipping.
        lr: Learning rate.
        metrics: Every other number of the log, its last value by its name.
        written: For each of the three columns, which steps have one, be it finite or not.
    """

    path: Path
    step: np.ndarray
    loss: np.ndarray
    grad_norm: np.ndarray
    lr: np.ndarray
    metrics: dict[str, float]
    written: dict[str, np.ndarray]

    def last_of(self, name: str) -> float:
        """The last value of a metric, by its name or the end of it; NaN if the log has none."""
        for own, value in self.metrics.items():
            if name in (own, own.rsplit(" - ")[-1], own.rsplit("/")[-1]):
                return value
        return math.nan


class _Columns:
    """Numbers of a log as they are read: a step and a value each, by the name that the log gives them."""

    def __init__(self) -> None:
        self.steps: dict[str, array[float]] = {}
        self.values: dict[str, array[float]] = {}

    def add(self, name: str, step: float, value: float) -> None:
        """Keep a number; of one that is neither a loss, a norm nor a rate only the last."""
        if name not in self.steps:
            self.steps[name] = array("d")
            self.values[name] = array("d")
        if _role_of(name) or not self.steps[name]:
            self.steps[name].append(step)
            self.values[name].append(value)
        else:
            self.steps[name][0] = step
            self.values[name][0] = value


def is_log(path: str | Path) -> bool:
    """Whether a path is the log of a trainer, by its name; of a folder, whether one lies in it."""
    path = Path(path)
    if path.is_dir():
        return _log_in(path) is not None
    return path.suffix in (".csv", ".json") or EVENTS in path.name


def read_log(path: str | Path) -> TrainingLog:
    """The log in a file, or in a folder that holds one.

    Raises:
        ValueError: it is none that we know, damaged, or has no loss, gradient norm or learning rate.
    """
    place = Path(path)
    file = place
    if place.is_dir():
        file = _log_in(place) or place
    elif not place.exists():
        raise FileNotFoundError(f"there is no log at {place}.")
    columns = _Columns()
    try:
        if EVENTS in file.name:
            _read_events(file, columns)
        elif file.suffix == ".csv":
            with file.open(encoding="utf-8-sig", newline="") as text:
                _read_table(text, columns)
        else:
            with file.open(encoding="utf-8") as text:
                _read_state(text, columns)
    except (UnicodeDecodeError, csv.Error, json.JSONDecodeError, RecursionError) as error:
        problem = str(error).splitlines()[0]
        raise ValueError(f"{file} is damaged, or no log of a trainer: {problem}.") from None
    return _log_of(file, columns)


def _log_in(folder: Path) -> Path | None:
    """The log of a trainer in its folder, the newest of several event files; None without one."""
    for name in (TRAINER_STATE, METRICS):
        if (folder / name).is_file():
            return folder / name
    events = sorted(folder.glob(f"*{EVENTS}*"))
    return events[-1] if events else None


def _read_state(text: TextIO, columns: _Columns) -> None:
    """Hugging Face's ``trainer_state.json``: each entry is dropped as soon as its numbers are kept."""
    is_state = False

    def take(entry: dict[str, Any]) -> None:
        nonlocal is_state
        is_state = is_state or "log_history" in entry
        _take_entry(entry, columns)

    json.load(text, object_hook=take)
    if not is_state:
        raise ValueError(f"{text.name} is no log of a trainer: it has no `log_history`.")


def _read_table(text: TextIO, columns: _Columns) -> None:
    """Lightning's ``metrics.csv`` or an export of W&B: empty cells where nothing was logged."""
    for entry in csv.DictReader(text):
        numbers = {
            name: _number_of(cell) for name, cell in entry.items() if name and isinstance(cell, str) and cell
        }
        _take_entry(numbers, columns)


def _read_events(file: Path, columns: _Columns) -> None:
    """TensorBoard's scalars, one event at a time."""
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader  # pyright: ignore[reportMissingImports]
        from tensorboard.util.tensor_util import make_ndarray  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ImportError(f"Reading {file.name} needs tensorboard: pip install curvestep[loggers].") from None
    for event in EventFileLoader(str(file)).Load():
        for value in event.summary.value:
            number = make_ndarray(value.tensor) if value.HasField("tensor") else np.array(value.simple_value)
            if number.size == 1 and np.issubdtype(number.dtype, np.number):
                columns.add(value.tag, float(event.step), float(number))


def _take_entry(entry: Mapping[str, Any], columns: _Columns) -> None:
    """Keep the numbers of one entry, if it has a step."""
    steps = [value for name, value in entry.items() if name.lower() in STEP]
    if not steps or not is_number(steps[0]) or not math.isfinite(steps[0]):
        return
    for name, value in entry.items():
        if is_number(value) and name.lower() not in STEP:
            columns.add(name, float(steps[0]), float(value))


def _number_of(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _role_of(name: str) -> str:
    """Which column a name of a log is; empty for none. W&B puts the run's name before it."""
    own = name.lower().rsplit(" - ")[-1]
    if own.startswith("lr-"):  # of Lightning's LearningRateMonitor
        return "lr"
    short = re.sub(r"^grad_[0-9.a-z]+_norm", "grad_norm", own.rsplit("/")[-1])
    is_held_out = re.search(r"(^|[^a-z])(val|valid|validation|eval|test|dev)([^a-z]|$)", own)
    if is_held_out:
        return ""
    return next((role for role, names in COLUMNS.items() if short in names), "")


def _log_of(file: Path, columns: _Columns) -> TrainingLog:
    """The three columns over all their steps."""
    chosen: dict[str, str] = {}
    for role in COLUMNS:
        candidates = [name for name in columns.steps if _role_of(name) == role]
        if candidates:
            # Of several the one with most values: a loss of every step rather than one of every epoch.
            chosen[role] = max(candidates, key=lambda name: len(columns.steps[name]))
    if not chosen:
        raise ValueError(f"{file} has no column that is a loss, a gradient norm or a learning rate.")
    steps = np.unique(np.concatenate([np.frombuffer(columns.steps[name]) for name in chosen.values()]))
    values = {}
    written = {}
    for role in COLUMNS:
        values[role] = np.full(len(steps), math.nan)
        written[role] = np.zeros(len(steps), dtype=bool)
        if role in chosen:
            places = np.searchsorted(steps, np.frombuffer(columns.steps[chosen[role]]))
            values[role][places] = np.frombuffer(columns.values[chosen[role]])
            written[role][places] = True
    others = {name: values[-1] for name, values in columns.values.items() if not _role_of(name)}
    return TrainingLog(path=file, step=steps, metrics=others, written=written, **values)
