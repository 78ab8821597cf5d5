"""Runs as the page shows them, read from their folders or from trace files alone."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from curvestep._files import read_rows
from curvestep.advice.advice import Advice, advise
from curvestep.calibration.result import Calibration, read_calibration
from curvestep.display.markup import visible
from curvestep.display.results import columns_of, common_threshold, thinned
from curvestep.fit.fit import SmoothnessFit, fit_smoothness
from curvestep.fit.samples import check_trace, final_loss
from curvestep.lab.recipes import OPTIMIZERS, Fields, to_dict
from curvestep.lab.run.folder import CONFIG, METRICS, TRACE, Run, find_runs
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
    max_norm: float = math.inf
    trace: Trace | None = None
    fit: SmoothnessFit | None = None
    advice: Advice | None = None
    notes: tuple[Note, ...] = ()
    fields: Fields = field(default_factory=dict)
    header: Fields = field(default_factory=dict)
    facts: Fields = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    final_loss: float = math.nan
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
            found += map(str, self.fit.warnings)
        if self.advice:
            found += map(str, self.advice.warnings)
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
        if not len(known):
            return math.nan
        return float(np.isfinite(known).mean())


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
    tasks = [_task(runs) for runs in groups.values()]
    # Of one recipe or model, tasks are told apart by all that makes them differ.
    names = Counter(task.name for task in tasks)
    for index, task in enumerate(tasks):
        if names[task.name] > 1:
            tasks[index] = replace(task, name=task.runs[0].task)
    return tasks


def _task(runs: Sequence[RunView]) -> Task:
    first = runs[0]
    name = first.fields.get("name") or first.name
    if len(runs) == 1 and first.advice is not None:
        return Task(name=str(name), runs=tuple(runs), advice=first.advice)
    if len(runs) > 1 and not first.fields:
        name = first.header.get("model") or name
    measured = [view.fit or view.trace for view in runs if view.trace]
    advice = advise(*measured) if measured else None
    return Task(name=str(name), runs=tuple(runs), advice=advice)


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
    views = []
    for source, name in zip(sources, names, strict=True):
        if isinstance(source, Run):
            views.append(_run_view(known.get(source.folder.resolve(), source), name))
        else:
            views.append(_trace_view(source, name))
    return views


def traces_by_task(paths: Iterable[str | Path | Trace]) -> dict[str, list[Trace]]:
    """The traces in ``paths``, found as for the page, those that can be compared together.

    Raises:
        ValueError: there is no trace.
    """
    found: dict[str, list[Trace]] = {}
    sources = find_sources(paths)
    for source in sources:
        if not isinstance(source, Run):
            trace = check_trace(source)
            found.setdefault(task_of(trace), []).append(trace)
            continue
        if source.lost_rows:
            warnings.warn(source.lost_rows, stacklevel=2)
        if source.trace_path.exists():
            found.setdefault(task_of(source), []).append(source.trace)
    if not found:
        where = ", ".join(str(place_of(source)) for source in sources) or "these folders"
        raise ValueError(f"There is no trace in {where}: nothing was measured. Train with a probe.")
    return found


def task_of(source: Run | Trace) -> str:
    """Model and data in words: runs that agree in them can be compared."""
    if isinstance(source, Run):
        recipe = source.recipe
        return f"{recipe.name}, {recipe.scale}, {recipe.problem}, batch {recipe.batch_size}"
    model, size, where = (source.header.get(key) for key in ("model", "num_parameters", "measured_on"))
    facts = []
    if model:
        facts.append(str(model))
    if isinstance(size, int):
        facts.append(f"{size:,} parameters")
    if where not in (None, "training batch"):
        facts.append(f"measured on {where}")
    return ", ".join(facts)


def place_of(source: Run | Trace | Path | str) -> Path:
    """The folder of a run or the file of a trace; of a trace in memory a name for it."""
    if isinstance(source, Trace):
        return source.path or Path(str(source.header.get("model", "a trace in memory")))
    if isinstance(source, Run):
        return source.folder
    return Path(source)


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
    # ``run2`` comes before ``run10``: digits stand at every second place.
    runs.sort(key=lambda run: _numbers_as_numbers(str(run.folder)))
    inside = {run.folder for run in runs}
    traces = [file for file in sorted(path.rglob("*.jsonl")) if file.parent not in inside and _is_trace(file)]
    if not (runs or traces) and not (path / CLAIMS).exists():
        raise ValueError(f"There is neither a run folder nor a trace in {path}.")
    return [*runs, *traces]


def _numbers_as_numbers(text: str) -> list[str | int]:
    parts: list[str | int] = list(re.split(r"([0-9]+)", text))
    parts[1::2] = map(int, parts[1::2])
    return parts


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
        steps, losses = next((one for one in evaluations if len(one[0])), evaluations[0])
        calibration = _calibration(run.folder, notes)
        measurement = _measurement_of(run, notes)
    if run.lost_rows:
        notes.append(Note(DAMAGED, run.lost_rows))
    if not measurement and not notes:
        notes.append(Note(NOT_MEASURED, "Nothing was measured: the run has no trace."))
    status, facts = run.status, ("data", "num_parameters", "seconds", "message")
    metrics = {}
    for split, values in (status.get("metrics") or {}).items():
        metrics |= {f"{split} {key}": float(value) for key, value in values.items() if key != "loss"}
    return RunView(
        name=name,
        setting=run.recipe.label,
        task=task_of(run),
        status=str(status.get("status", "")),
        # While a run goes on, its status is written now and then only.
        step=int(max(status.get("step") or 0, train["step"].max(initial=0))),
        train=train,
        held_out={"step": steps.astype(float), "loss": losses},
        max_norm=run.recipe.max_norm if run.recipe.optimizer == "clipped" else math.inf,
        fields=to_dict(run.recipe),
        facts={key: status[key] for key in facts if status.get(key)},
        metrics=metrics,
        final_loss=float(status.get("train_loss", math.nan)),
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
        measurement = _measurement(trace, partial(fit_smoothness, trace), notes)
        calibration = _calibration(path.parent, notes) if path.name == TRACE else None
    view = RunView(
        name=name,
        setting="a trace of your own loop",
        task=task_of(trace),
        max_norm=common_threshold(measurement["measured"]["clip_norm"]),
        held_out=_held_out_beside(path),
        calibration=calibration,
        notes=tuple(dict.fromkeys(notes)),
        **measurement,
    )
    if not len(trace):
        return view
    return replace(
        view,
        status="diverged" if trace[-1]["status"] == NONFINITE else "",
        step=int(trace.column("step")[-1]),
        final_loss=final_loss(trace.column("step"), trace.column("loss")),
    )


def _held_out_beside(trace: Path) -> Columns:
    """Held-out losses in ``metrics.jsonl`` beside a ``trace.jsonl``."""
    path = trace.parent / METRICS
    rows = []
    if trace.name == TRACE and path.exists():
        with path.open("rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # rows written by hand have no checksum
            rows = [row for chunk in read_rows(file, path) for row in chunk]
    rows = [row for row in rows if row.get("split") in ("valid", "test") and "loss" in row]
    return {key: np.array([row[key] for row in rows], dtype=float) for key in ("step", "loss")}


def _calibration(folder: Path, notes: list[Note]) -> Calibration | None:
    try:
        return read_calibration(folder)
    except ValueError as error:
        notes.append(Note(DAMAGED, str(error)))
        return None


def _measurement_of(run: Run, notes: list[Note]) -> Fields:
    """The measurement of a run; its fit is shared with all that show it."""
    if not run.trace_path.exists():
        return {}
    try:
        trace = run.trace
    except ValueError as error:
        notes.append(Note(DAMAGED, str(error)))
        return {}
    return _measurement(trace, lambda: run.fit, notes)


def _measurement(trace: Trace, fitted: Callable[[], SmoothnessFit], notes: list[Note]) -> Fields:
    """Columns, fit and advice of a trace."""
    fit, refusal = None, ""
    try:
        fit = fitted()
    except ValueError as error:
        refusal = str(error)
    advice = advise(fit or trace)
    if refusal:
        notes.append(Note(NOT_JUDGED, refusal))
    elif advice.refused:
        notes.append(Note(NOT_JUDGED, advice.verdict))
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
