"""What the page shows of a run, read from its folder or from a trace file alone."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from curvestep._files import read_rows
from curvestep.advice.advice import Advice, advise
from curvestep.advice.decision import TRY
from curvestep.calibration.result import Calibration, read_calibration
from curvestep.display.markup import visible
from curvestep.display.results import columns_of, common_threshold, thinned
from curvestep.fit.fit import SmoothnessFit, fit_smoothness
from curvestep.fit.samples import check_trace, final_loss
from curvestep.lab.recipes import OPTIMIZERS, to_dict
from curvestep.lab.run.folder import CONFIG, METRICS, STATUS, TRACE, Run, find_runs
from curvestep.notes import Note
from curvestep.smoothness.trace import FORMAT, NONFINITE, Trace
from curvestep.steps import clip_norms

CLAIMS = "claims.json"
NOT_MEASURED, NOT_JUDGED, DAMAGED = "not-measured", "not-judged", "damaged"  # kinds of notes
Columns = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class RunView:
    """One run as the page shows it.

    Args:
        name: Its folder, as short as the other runs allow.
        setting: Learning rate and threshold in words, or what the trace file is called.
        task: What was trained on what; runs of one task can be compared.
        status: ``finished``, ``diverged``, …; empty for a trace without a run folder.
        step: Steps taken.
        measured: Columns of the trace, rows that were measured without trouble only.
        train: Columns of the training metrics.
        held_out: Columns of the held-out loss; empty if there was no evaluation.
        layers: Smoothness by layer, aligned with ``measured``.
        max_norm: The clipping line; ``inf`` without one.
        trace: The trace itself.
        fit: The fit of the trace, or None with the reason in ``notes``.
        advice: What follows from it, or None with the reason in ``notes``.
        notes: Why something is not there.
        fields: The recipe's fields; empty for a trace alone.
        header: The header of the trace: versions and what was measured.
        facts: What ``status.json`` says: data, parameters, seconds, message.
        metrics: The last evaluation: ``valid perplexity``, ``test accuracy``, ….
        final_loss: Mean training loss at the end; NaN if it diverged or is unknown.
        calibration: Where ``lr`` and ``max_norm`` were measured before training.
    """

    name: str
    setting: str
    task: str = ""
    status: str = ""
    step: int = 0
    measured: Columns = field(default_factory=dict)
    train: Columns = field(default_factory=dict)
    held_out: Columns = field(default_factory=dict)
    layers: Columns = field(default_factory=dict)
    max_norm: float = float("inf")
    trace: Trace | None = None
    fit: SmoothnessFit | None = None
    advice: Advice | None = None
    notes: tuple[Note, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)
    header: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    final_loss: float = float("nan")
    calibration: Calibration | None = None

    @property
    def doubts(self) -> tuple[str, ...]:
        """The notes as sentences."""
        return tuple(note.text for note in self.notes)

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings of the fit and of the advice, each once."""
        found: list[str] = []
        if self.fit:
            found += self.fit.warnings
        if self.advice:
            found += self.advice.warnings
        return tuple(dict.fromkeys(found))

    @property
    def rows(self) -> Columns:
        """Columns of the training metrics, or of the trace where that is all there is."""
        return self.train if len(self.train.get("step", ())) else self.measured

    @property
    def clipped_fraction(self) -> float:
        """Share of the steps that were clipped, over the rows that say so; NaN if none does."""
        norms = self.rows.get("clip_norm", np.array([]))
        known = norms[~np.isnan(norms)]
        return float(np.isfinite(known).mean()) if len(known) else float("nan")


@dataclass(frozen=True, kw_only=True)
class Task:
    """Runs that can be compared, and what they say together.

    Args:
        name: Recipe or model.
        runs: At least one.
        advice: From all of their fits; None if none of them measured anything.
    """

    name: str
    runs: tuple[RunView, ...]
    advice: Advice | None


def tasks_of(views: Sequence[RunView]) -> list[Task]:
    """The runs task by task, in the order in which tasks first appear."""
    groups: dict[str, list[RunView]] = {}
    for view in views:
        groups.setdefault(view.task or view.name, []).append(view)
    tasks = []
    for runs in groups.values():
        fits = [view.fit or view.trace for view in runs if view.trace is not None and len(view.trace)]
        advice = runs[0].advice if len(runs) == 1 else None
        if advice is None and fits:
            advice = advise(*(fit for fit in fits if fit is not None))
        model = runs[0].header.get("model") if len(runs) > 1 else None
        name = str(runs[0].fields.get("name") or model or runs[0].name)
        tasks.append(Task(name=name, runs=tuple(runs), advice=advice))
    # Of one recipe or model, tasks are told apart by all that makes them differ.
    names = [task.name for task in tasks]
    return [replace(task, name=task.runs[0].task) if names.count(task.name) > 1 else task for task in tasks]


def find_views(paths: Iterable[str | Path | Trace], *, loaded: Iterable[Run] = ()) -> list[RunView]:
    """The runs in ``paths``: run folders, folders of run folders, trace files; or traces themselves.

    A reproduction may have claims and figures but no run. Where ``paths`` lead to a run in ``loaded``, it is
    taken as it is, with its fit.

    Raises:
        ValueError: a path does not exist, or there is neither a run nor a trace in it.
    """
    sources = find_sources(paths)
    if not sources:
        return []
    known = {run.folder.resolve(): run for run in loaded}
    # A run is named after its folder, a trace file after its own name unless that is just ``trace.jsonl``.
    files = [place_of(source) for source in sources]
    names = short_names([file.resolve().parent if file.name == TRACE else file for file in files])
    return [
        _run_view(known.get(source.folder.resolve(), source), name)
        if isinstance(source, Run)
        else _trace_view(source, name)
        for source, name in zip(sources, names, strict=True)
    ]


def traces_by_task(paths: Iterable[str | Path | Trace]) -> dict[str, list[Trace]]:
    """The traces in ``paths``, found as for the page, those that can be compared together.

    Raises:
        ValueError: there is no trace.
    """
    found: dict[str, list[Trace]] = {}
    sources = find_sources(paths)
    for source in sources:
        if isinstance(source, Run) and source.lost_rows:
            warnings.warn(source.lost_rows, stacklevel=2)
        if isinstance(source, Run) and not source.trace_path.exists():
            continue
        trace = source.trace if isinstance(source, Run) else check_trace(source)
        found.setdefault(task_of(source if isinstance(source, Run) else trace), []).append(trace)
    if not found:
        where = ", ".join(str(place_of(source)) for source in sources) or "these folders"
        raise ValueError(f"There is no trace in {where}: nothing was measured. Train with a probe.")
    return found


def task_of(source: Run | Trace) -> str:
    """What was trained on what: runs that agree in it can be compared."""
    if isinstance(source, Run):
        recipe = source.recipe
        return f"{recipe.name}, {recipe.scale}, {recipe.problem}, batch {recipe.batch_size}"
    model, size, where = (source.header.get(key) for key in ("model", "num_parameters", "measured_on"))
    facts = [
        str(model or ""),
        f"{size:,} parameters" if isinstance(size, int) else "",
        f"measured on {where}" if where not in (None, "training batch") else "",
    ]
    return ", ".join(fact for fact in facts if fact)


def place_of(source: Run | Trace | Path) -> Path:
    """The folder of a run or the file of a trace; of a trace in memory a name for it."""
    if isinstance(source, Trace):
        return source.path or Path(str(source.header.get("model", "a trace in memory")))
    return source.folder if isinstance(source, Run) else source


def short_names(folders: Sequence[Path]) -> list[str]:
    """The folders without what they share; a lone one by its own name.

    Example:
        >>> short_names([Path("runs/a/x"), Path("runs/b/x")]), short_names([Path("runs/mine")])
        (['a/x', 'b/x'], ['mine'])
    """
    absolute = [folder.resolve() for folder in folders]
    shared = os.path.commonpath([folder.parent for folder in absolute])
    return [visible(folder.relative_to(shared).as_posix()) for folder in absolute]


def find_sources(paths: Iterable[str | Path | Trace]) -> list[Run | Path | Trace]:
    """The runs, trace files and traces in ``paths``."""
    places = [path if isinstance(path, Trace) else Path(path) for path in paths]
    if not places:
        raise ValueError("`paths` must name at least one run folder or trace file, got none.")
    return [source for place in places for source in _sources(place)]


def _sources(path: Path | Trace) -> Sequence[Run | Path | Trace]:
    if isinstance(path, Trace) or path.is_file():
        return [path]
    if not path.exists():
        raise ValueError(f"There is no {path}. Name run folders, folders of runs, or trace files.")
    if (path / CONFIG).exists():
        return [Run.load(path)]
    runs = find_runs(path)
    # ``run2`` comes before ``run10``.
    parts = {run.folder: re.split(r"([0-9]+)", str(run.folder)) for run in runs}
    runs.sort(key=lambda run: [int(part) if part.isdigit() else part for part in parts[run.folder]])
    inside = {run.folder for run in runs}
    traces = [file for file in sorted(path.rglob("*.jsonl")) if file.parent not in inside and _is_trace(file)]
    if not (runs or traces) and not (path / CLAIMS).exists():
        raise ValueError(f"There is neither a run folder nor a trace in {path}.")
    return [*runs, *traces]


def _is_trace(file: Path) -> bool:
    with file.open("rb") as opened:
        return f'"format": "{FORMAT}"'.encode() in opened.readline(10_000)


def _run_view(run: Run, name: str) -> RunView:
    notes: list[Note] = []
    with _noted(notes):
        rows = run.rows("train")
        rows = [rows[index] for index in thinned(np.arange(len(rows)))]
        names = ("step", "loss", "grad_norm", "coefficient")
        train = {name: np.array([row.get(name, np.nan) for row in rows], dtype=np.float64) for name in names}
        train["clip_norm"] = clip_norms({**train, "optimizer": OPTIMIZERS[run.recipe.optimizer]})
        del train["coefficient"]
        evaluations = [run.column("loss", split) for split in ("valid", "test")]
        steps, losses = next((found for found in evaluations if len(found[0])), evaluations[0])
        calibration = _calibration(run.folder, notes)
        measurement = _measurement(run, notes) if run.trace_path.exists() else {}
    if run.lost_rows:
        notes.append(Note(DAMAGED, run.lost_rows))
    if not measurement and not notes:
        notes.append(Note(NOT_MEASURED, "Nothing was measured: the run has no trace."))
    status = run.status if (run.folder / STATUS).exists() else {"status": "running", "step": 0}
    facts = ("data", "num_parameters", "seconds", "message")
    return RunView(
        name=name,
        setting=run.recipe.label,
        task=task_of(run),
        status=str(status.get("status", "")),
        # While a run goes on, its status is written now and then only.
        step=int(max(status.get("step") or 0, train["step"].max(initial=0))),
        train=train,
        held_out={"step": steps.astype(float), "loss": losses},
        max_norm=run.recipe.max_norm if run.recipe.optimizer == "clipped" else float("inf"),
        fields=to_dict(run.recipe),
        facts={key: status[key] for key in facts if status.get(key)},
        metrics={
            f"{split} {key}": float(value)
            for split, found in (status.get("metrics") or {}).items()
            for key, value in found.items()
            if key != "loss"
        },
        final_loss=float(status.get("train_loss", float("nan"))),
        calibration=calibration,
        notes=tuple(dict.fromkeys(notes)),
        **measurement,
    )


def _trace_view(source: Path | Trace, name: str) -> RunView:
    """A trace alone; ``metrics.jsonl`` and ``calibration.json`` beside it are shown too."""
    notes: list[Note] = []
    with _noted(notes):
        trace = source if isinstance(source, Trace) else Trace.load(source)
        path = place_of(trace)
        measurement = _measurement(trace, notes)
        calibration = _calibration(path.parent, notes) if path.name == TRACE else None
    beside, rows = path.parent / METRICS, []
    if path.name == TRACE and beside.exists():
        with beside.open("rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # rows written by hand have no checksum
            rows = [row for chunk in read_rows(file, beside) for row in chunk]
    held_out = [row for row in rows if row.get("split") in ("valid", "test") and "loss" in row]
    return RunView(
        name=name,
        setting="a trace of your own loop",
        task=task_of(trace),
        status="diverged" if len(trace) and trace[-1]["status"] == NONFINITE else "",
        step=int(trace.column("step")[-1]) if len(trace) else 0,
        max_norm=common_threshold(measurement["measured"]["clip_norm"]),
        held_out={key: np.array([row[key] for row in held_out], dtype=float) for key in ("step", "loss")},
        calibration=calibration,
        final_loss=final_loss(trace.column("step"), trace.column("loss")) if len(trace) else float("nan"),
        notes=tuple(dict.fromkeys(notes)),
        **measurement,
    )


def _calibration(folder: Path, notes: list[Note]) -> Calibration | None:
    try:
        return read_calibration(folder)
    except ValueError as error:
        notes.append(Note(DAMAGED, str(error)))
        return None


def _measurement(source: Run | Trace, notes: list[Note]) -> dict[str, Any]:
    """Columns, fit and advice of a trace; a run's own fit is shared with all that show it."""
    fit = None
    try:
        trace = source if isinstance(source, Trace) else source.trace
    except ValueError as error:
        notes.append(Note(DAMAGED, str(error)))
        return {}
    refusal = ""
    try:
        fit = fit_smoothness(source) if isinstance(source, Trace) else source.fit
    except ValueError as error:
        refusal = str(error)
    advice = advise(fit or trace)
    if refusal and not (advice.action == TRY and trace.ok.all()):  # there the advice itself says: too few
        notes.append(Note(NOT_JUDGED, refusal))
    if advice.refused:
        notes += [Note(NOT_JUDGED, reason) for reason in advice.reasons]
    measured = columns_of(trace)
    layers = [name for name in measured if name.startswith("layers/")]
    return {
        "layers": {visible(name.split("/", 1)[1].rsplit("/", 1)[0]): measured.pop(name) for name in layers},
        "measured": measured,
        "fit": fit,
        "advice": None if advice.refused else advice,
        "header": trace.header,
        "trace": trace,
    }


@contextmanager
def _noted(notes: list[Note]) -> Iterator[None]:
    """Turn warnings of the readers (a torn last line) into notes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    notes += [Note(DAMAGED, str(warning.message)) for warning in caught]
