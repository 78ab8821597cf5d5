"""What the page shows of a run, read from its folder or from a trace file alone."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from curvestep.advice.advice import Advice, advise
from curvestep.calibration.result import Calibration
from curvestep.fit.fit import SmoothnessFit, fit_smoothness
from curvestep.lab.calibration import read_calibration
from curvestep.lab.recipes import to_dict
from curvestep.lab.run.folder import CONFIG, STATUS, Run, find_runs
from curvestep.smoothness.trace import Trace

CLAIMS = "claims.json"
MOST_ROWS = 4000  # longer series are shown by evenly spaced rows
Columns = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class RunView:
    """One run as the page shows it.

    Args:
        name: Its folder, as short as the other runs allow.
        setting: Learning rate and threshold in words, or what the trace file is called.
        status: ``finished``, ``diverged``, …; empty for a trace without a run folder.
        step: Steps taken.
        measured: Columns of the trace, rows that were measured without trouble only.
        train: Columns of the training metrics.
        held_out: Columns of the held-out loss; empty if there was no evaluation.
        layers: Smoothness by layer, aligned with ``measured``.
        max_norm: The clipping line; ``inf`` without one.
        fit: The fit of the trace, or None with the reason in ``doubts``.
        advice: What follows from it, or None with the reason in ``doubts``.
        doubts: Why something is not there, a line each.
        fields: The recipe's fields; empty for a trace alone.
        header: The header of the trace: versions and what was measured.
        facts: What ``status.json`` says: data, parameters, seconds, message.
        final_loss: Mean training loss at the end; NaN if it diverged or is unknown.
        trace: The trace itself.
        calibration: Where ``lr`` and ``max_norm`` were measured before training.
    """

    name: str
    setting: str
    status: str = ""
    step: int = 0
    measured: Columns = field(default_factory=dict)
    train: Columns = field(default_factory=dict)
    held_out: Columns = field(default_factory=dict)
    layers: Columns = field(default_factory=dict)
    max_norm: float = float("inf")
    fit: SmoothnessFit | None = None
    advice: Advice | None = None
    doubts: tuple[str, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)
    header: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    final_loss: float = float("nan")
    trace: Trace | None = None
    calibration: Calibration | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings of the fit and of the advice, each once."""
        found = (*(self.fit.warnings if self.fit else ()), *(self.advice.warnings if self.advice else ()))
        return tuple(dict.fromkeys(found))

    @property
    def clipped_fraction(self) -> float:
        """Share of the steps that were clipped, over the rows that say so; NaN if none does."""
        clipped = self.train.get("clipped", self.measured.get("clipped", np.array([])))
        known = clipped[np.isfinite(clipped)]
        return float(known.mean()) if len(known) else float("nan")


def find_views(paths: Iterable[str | Path]) -> list[RunView]:
    """The runs in ``paths``: run folders, folders of run folders, trace files.

    A reproduction may have claims and figures but no run.

    Raises:
        ValueError: a path does not exist, or there is neither a run nor a trace in it.
    """
    places = [Path(path) for path in paths]
    sources = [source for path in places for source in _sources(path)]
    if not sources and places:
        return []
    if not sources:
        raise ValueError("`paths` must name at least one run folder or trace file, got none.")
    names = short_names([_place(source) for source in sources])
    return [
        _run_view(source, name) if isinstance(source, Run) else _trace_view(source, name)
        for source, name in zip(sources, names, strict=True)
    ]


def _place(source: Run | Path) -> Path:
    """What a run is named after: its folder, or a trace file that is not just called ``trace.jsonl``."""
    if isinstance(source, Run):
        return source.folder
    return source.resolve().parent if source.name == "trace.jsonl" else source


def short_names(folders: Sequence[Path]) -> list[str]:
    """The folders without what they share; a lone one by its own name.

    Example:
        >>> short_names([Path("runs/a/x"), Path("runs/b/x")]), short_names([Path("runs/mine")])
        (['a/x', 'b/x'], ['mine'])
    """
    absolute = [folder.resolve() for folder in folders]
    depth = 0
    shortest = min(len(folder.parts) for folder in absolute)
    while depth < shortest - 1 and len({folder.parts[depth] for folder in absolute}) == 1:
        depth += 1
    return ["/".join(folder.parts[depth:]) for folder in absolute]


def _sources(path: Path) -> list[Run | Path]:
    if path.is_file():
        return [path]
    if not path.exists():
        raise ValueError(f"There is no {path}. Name run folders, folders of runs, or trace files.")
    if (path / CONFIG).exists():
        return [Run.load(path)]
    runs = sorted(find_runs(path), key=lambda run: _by_number(run.folder))
    found: list[Run | Path] = [*runs]
    inside = [run.folder for run in runs]
    found += [trace for trace in sorted(path.rglob("trace.jsonl")) if trace.parent not in inside]
    if not found and not (path / CLAIMS).exists():
        raise ValueError(f"There is neither a run folder nor a trace.jsonl in {path}.")
    return found


def _by_number(path: Path) -> list[str | int]:
    """A key that sorts ``run2`` before ``run10``."""
    return [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", str(path))]


def _run_view(run: Run, name: str) -> RunView:
    notes: list[str] = []
    with _noted(notes):
        train = _train_columns(run)
        held_out = _held_out(run)
        trace = _load(run.trace_path, notes) if run.trace_path.exists() else None
    if trace is None and not notes:
        notes.append("Nothing was measured: the run has no trace.")
    try:
        calibration = read_calibration(run.folder)
    except ValueError as error:
        calibration = None
        notes.append(str(error))
    max_norm = run.recipe.max_norm if run.recipe.optimizer == "clipped" else float("inf")
    status = run.status if (run.folder / STATUS).exists() else {"status": "running", "step": 0}
    return RunView(
        name=name,
        setting=run.recipe.label,
        status=str(status.get("status", "")),
        step=int(status.get("step") or 0),
        train=train,
        held_out=held_out,
        max_norm=max_norm,
        fields=to_dict(run.recipe),
        facts={
            key: status[key] for key in ("data", "num_parameters", "seconds", "message") if status.get(key)
        },
        final_loss=float(status.get("train_loss", float("nan"))),
        calibration=calibration,
        **_measurement(trace, notes),
    )


def _trace_view(path: Path, name: str) -> RunView:
    notes: list[str] = []
    with _noted(notes):
        trace = Trace.load(path)
    measurement = _measurement(trace, notes)
    measured = measurement["measured"]
    step = int(np.nanmax(measured["step"])) if len(measured["step"]) else 0
    return RunView(
        name=name, setting="a trace of your own loop", step=step, max_norm=_threshold(measured), **measurement
    )


def _measurement(trace: Trace | None, notes: list[str]) -> dict[str, Any]:
    """Columns, fit, advice and doubts of a trace."""
    if trace is None:
        return {"doubts": tuple(notes)}
    fit = None
    try:
        fit = fit_smoothness(trace)
    except ValueError as error:
        notes.append(str(error))
    advice = advise(trace)
    if advice.refused:
        notes += [reason for reason in advice.reasons if reason not in notes]
    layers = [name for name in trace.names if name.startswith("layers/") and name.endswith("/smoothness")]
    keep = thinned(np.flatnonzero(trace.ok & np.isfinite(trace.column("grad_norm"))))
    names = (
        "step",
        "loss",
        "grad_norm",
        "step_norm",
        "smoothness",
        "local_smoothness",
        "spectral_smoothness",
    )
    measured = {column: trace.column(column)[keep] for column in (*names, "lr", "coefficient")}
    coefficient = measured.pop("coefficient")
    measured["clipped"] = np.where(np.isfinite(coefficient), coefficient < 1 - 1e-6, np.nan)
    measured["threshold"] = np.where(measured["clipped"] == 1, coefficient * measured["grad_norm"], np.nan)
    return {
        "measured": measured,
        "layers": {name.split("/", 1)[1].rsplit("/", 1)[0]: trace.column(name)[keep] for name in layers},
        "fit": fit,
        "advice": None if advice.refused else advice,
        "doubts": tuple(notes),
        "header": trace.header,
        "trace": trace,
    }


def _threshold(measured: Columns) -> float:
    """The norm at which steps were clipped, if it was one and the same."""
    found = measured["threshold"][np.isfinite(measured["threshold"])]
    return (
        float(np.median(found)) if len(found) and np.ptp(found) <= 1e-3 * np.median(found) else float("inf")
    )


def _train_columns(run: Run) -> Columns:
    rows = run.rows("train")
    rows = [rows[index] for index in thinned(np.arange(len(rows)))]
    names = ("step", "loss", "grad_norm", "coefficient")
    columns = {name: np.array([row.get(name, np.nan) for row in rows], dtype=np.float64) for name in names}
    coefficient = columns.pop("coefficient")
    columns["clipped"] = np.where(np.isfinite(coefficient), coefficient < 1 - 1e-6, np.nan)
    return columns


def _held_out(run: Run) -> Columns:
    for split in ("valid", "test"):
        steps, losses = run.column("loss", split)
        if len(steps):
            return {"step": steps.astype(float), "loss": losses}
    return {}


def _load(path: Path, notes: list[str]) -> Trace | None:
    try:
        return Trace.load(path)
    except ValueError as error:
        notes.append(str(error))
        return None


def thinned(rows: np.ndarray) -> np.ndarray:
    """At most ``MOST_ROWS`` of the rows, evenly spaced, the last one among them."""
    if len(rows) <= MOST_ROWS:
        return rows
    return rows[np.unique(np.linspace(0, len(rows) - 1, MOST_ROWS).round().astype(int))]


@contextmanager
def _noted(notes: list[str]) -> Iterator[None]:
    """Turn warnings of the readers (a torn last line) into notes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    notes += [str(warning.message) for warning in caught]
