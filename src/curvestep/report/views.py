"""Runs as the page shows them, read from their folders or from trace files alone."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from curvestep.advice.advice import Advice, advise
from curvestep.advice.decision import DIVERGED
from curvestep.calibration.result import Calibration, read_calibration
from curvestep.files import read_rows
from curvestep.fit.fit import SmoothnessFit, fit_smoothness
from curvestep.notes import Note
from curvestep.report.results import columns_of, common_threshold, finite, thinned
from curvestep.trace.columns import clip_norms
from curvestep.trace.history import clipped_share, end_of_run, planned_lr
from curvestep.trace.run import METRICS, TRACE, Fields, Run
from curvestep.trace.schema import NONFINITE
from curvestep.trace.sources import Place, find_sources, place_of, short_names, task_of
from curvestep.trace.trace import Trace

NOT_MEASURED, NOT_JUDGED, DAMAGED = "not-measured", "not-judged", "damaged"  # kinds of notes
FACTS = ("data", "num_parameters", "seconds", "message")  # of a run's status, for the page
Columns = dict[str, np.ndarray]
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class RunView:
    """One run as the page shows it."""

    name: str  # its folder, as short as the other runs allow
    setting: str  # learning rate and threshold in words
    task: str = ""  # what was trained on what; runs of one task can be compared
    status: str = ""  # ``finished``, ``diverged``, …; empty for a trace without a run folder
    step: int = 0  # steps taken
    # Columns of the trace, rows that were measured without trouble only.
    measured: Columns = field(default_factory=dict)
    train: Columns = field(default_factory=dict)  # columns of the training metrics
    # Columns of the held-out loss; empty if there was no evaluation.
    held_out: Columns = field(default_factory=dict)
    # Smoothness by layer, the sharpest first, aligned with ``measured``.
    layers: Columns = field(default_factory=dict)
    max_norm: float = math.inf  # the clipping line; ``inf`` without one
    trace: Trace | None = None  # the trace itself
    fit: SmoothnessFit | None = None  # the fit of the trace, or None with the reason in ``notes``
    advice: Advice | None = None  # what follows from it; None without a trace
    notes: tuple[Note, ...] = ()  # why something is not there
    fields: Fields = field(default_factory=dict)  # its ``config.json``; empty for a trace alone
    not_settings: tuple[str, ...] = ()  # those of them that make no other setting
    header: Fields = field(default_factory=dict)  # the header of the trace: versions and what was measured
    # What ``status.json`` says: data, parameters, seconds, message.
    facts: Fields = field(default_factory=dict)
    # The last evaluation: ``valid perplexity``, ``test accuracy``, …
    metrics: dict[str, float] = field(default_factory=dict)
    final_loss: float = math.nan  # mean training loss at the end; NaN if it diverged or is unknown
    calibration: Calibration | None = None  # where ``lr`` and ``max_norm`` were measured before training

    @property
    def diverged(self) -> bool:
        """Whether it diverged, by its status or by what its trace shows."""
        return self.status == "diverged" or (self.advice is not None and self.advice.action == DIVERGED)

    @property
    def ending(self) -> str:
        """Its status, or that its trace shows that it diverged; empty if unknown."""
        return DIVERGED if self.diverged else self.status

    @property
    def doubts(self) -> tuple[str, ...]:
        """The notes as sentences."""
        return tuple(str(note) for note in self.notes)

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings of the fit and of the advice, each once."""
        notes: list[Note] = []
        if self.fit is not None:
            notes += self.fit.warnings
        if self.advice is not None:
            notes += self.advice.warnings
        return tuple(dict.fromkeys(str(note) for note in notes))

    @property
    def rows(self) -> Columns:
        """Columns of the training metrics, or of the trace where that is all there is."""
        return self.train if len(self.train.get("step", ())) else self.measured

    def curve(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and a column: of the training metrics, sharpness of the trace; both empty without it."""
        rows = self.measured if name == "smoothness" else self.rows
        none = np.array([])
        return rows.get("step", none), rows.get(name, none)

    @property
    def clipped_fraction(self) -> float:
        """Share of the steps that were clipped, over the rows that say so; NaN if none does."""
        return clipped_share(*self.curve("clip_norm"))


@dataclass(frozen=True, kw_only=True)
class Task:
    """Runs that can be compared, and what they say together."""

    name: str  # what its runs call themselves, or the model
    runs: tuple[RunView, ...]  # at least one; best setting first, diverged ones last
    advice: Advice | None  # from all of their fits; None if none of them measured anything


def tasks_of(views: Sequence[RunView]) -> list[Task]:
    """The runs task by task, in the order in which tasks first appear."""
    groups: dict[str, list[RunView]] = {}
    for view in views:
        groups.setdefault(view.task, []).append(view)
    tasks = [_task(runs) for runs in groups.values()]
    # Tasks of one model are told apart by all that makes them differ.
    names = Counter(task.name for task in tasks)
    return [task if names[task.name] == 1 else replace(task, name=task.runs[0].task) for task in tasks]


def _task(runs: Sequence[RunView]) -> Task:
    first = runs[0]
    known = {"name": first.header.get("model", first.name), **first.fields}
    measured = [view.fit or view.trace for view in runs if view.trace]
    advice = next((view.advice for view in runs if view.advice), None)
    if len(measured) > 1:
        advice = advise(*measured)
    best_first = sorted(seeds_by_setting(runs).values(), key=_mean_loss)
    in_order = tuple(view for seeds in best_first for view in seeds)
    return Task(name=str(known["name"]), runs=in_order, advice=advice)


def _mean_loss(seeds: Sequence[RunView]) -> float:
    """Final loss of a setting; infinite if one of its seeds diverged or has none."""
    mean = float(np.mean([view.final_loss for view in seeds]))
    if math.isnan(mean) or any(view.diverged for view in seeds):
        return math.inf
    return mean


def seeds_by_setting(views: Sequence[RunView]) -> dict[str, list[RunView]]:
    """The seeds of each setting, by its name and, among those of one name, the fields that differ."""
    identities = [_identity(view) for view in views]
    settings: dict[str, list[RunView]] = {}
    for view, own in zip(views, identities, strict=True):
        namesakes = [
            other for one, other in zip(views, identities, strict=True) if one.setting == view.setting
        ]
        differ = [name for name in own if any(other.get(name) != own[name] for other in namesakes)]
        words = [f"{name.replace('_', ' ')} {short(own[name])}" for name in differ if own[name]]
        settings.setdefault(", ".join([view.setting, *words]), []).append(view)
    return settings


def _identity(view: RunView) -> Fields:
    """The fields that make a setting; of a trace alone its name."""
    settings = {name: value for name, value in view.fields.items() if name not in view.not_settings}
    return settings or {"run": view.name}


def fit_run(run: Run) -> SmoothnessFit:
    """The fit of a run's trace."""
    return fit_smoothness(run.trace)


def find_views(places: Iterable[Place], *, fit: Callable[[Run], SmoothnessFit] = fit_run) -> list[RunView]:
    """The runs in ``places``; ``fit`` may know their fits already.

    Raises:
        ValueError: a path does not exist, or there is neither a run nor a trace in it.
    """
    sources = find_sources(places)
    if not sources:  # a reproduction may have claims and figures only
        return []
    # A run is named after its folder, a trace file after its own name unless that is just ``trace.jsonl``.
    files = [place_of(source) for source in sources]
    names = short_names([file.resolve().parent if file.name == TRACE else file for file in files])
    views = []
    for source, name in zip(sources, names, strict=True):
        if isinstance(source, Run):
            views.append(_run_view(source, name, fit))
        else:
            views.append(_trace_view(source, name))
    return views


def _run_view(run: Run, name: str, fit: Callable[[Run], SmoothnessFit]) -> RunView:
    notes: list[Note] = []
    with _warnings_as_notes(notes):
        train = _training_columns(run)
        held_out = _held_out(run.metrics)
        calibration = _read_or_note(partial(read_calibration, run.folder), DAMAGED, notes)
        measurement: Fields = {}
        if run.trace_path.exists():
            trace = _read_or_note(lambda: run.trace, DAMAGED, notes)
            if trace is not None:  # one without rows is false
                measurement = _measurement(trace, partial(fit, run), notes)
        else:
            notes.append(Note(NOT_MEASURED, "Nothing was measured: the run has no trace."))
    if run.lost_rows:
        notes.append(Note(DAMAGED, run.lost_rows))
    status = run.status
    return RunView(
        name=name,
        setting=label_of(run),
        task=run.task,
        status=str(status.get("status", "")),
        # While a run goes on, its status is written now and then only.
        step=int(max(status.get("step", 0), train["step"].max(initial=0))),
        train=train,
        held_out=held_out,
        max_norm=_threshold(run),
        fields={key: value for key, value in run.config.items() if key != "about"},
        not_settings=tuple(run.about.get("not_settings", ())),
        facts={key: status[key] for key in FACTS if status.get(key)},
        metrics=_metrics(status.get("metrics", {})),
        final_loss=float(status.get("train_loss", math.nan)),
        calibration=calibration,
        notes=tuple(dict.fromkeys(notes)),
        **measurement,
    )


def _training_columns(run: Run) -> Columns:
    rows = run.rows("train")
    columns: Columns = {}
    for name in ("step", "loss", "grad_norm", "coefficient"):
        values = np.array([row.get(name, np.nan) for row in rows], dtype=np.float64)
        columns[name] = thinned(values)
    columns["clip_norm"] = clip_norms({**columns, "optimizer": run.about.get("optimizer", "")})
    del columns["coefficient"]
    return columns


def _held_out(metrics: Sequence[Fields]) -> Columns:
    """Steps and losses on validation data, or where there are none on test data."""
    rows = _losses_of(metrics, "valid") or _losses_of(metrics, "test")
    return {key: np.array([row[key] for row in rows], dtype=float) for key in ("step", "loss")}


def _losses_of(metrics: Sequence[Fields], split: str) -> list[Fields]:
    return [row for row in metrics if row.get("split") == split and "loss" in row]


def short(value: object) -> str:
    """A field's value as names and tables show it; of a path its last part."""
    if isinstance(value, (list, tuple)):
        return "+".join(short(one) for one in value)
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).rpartition("/")[2]


def _metrics(by_split: Fields) -> dict[str, float]:
    """The last evaluation without its losses: ``valid perplexity``, ``test accuracy``, …."""
    metrics = {}
    for split, values in by_split.items():
        metrics |= {f"{split} {name}": float(values[name]) for name in values if name != "loss"}
    return metrics


def _trace_view(source: Path | Trace, name: str) -> RunView:
    """A trace alone; ``metrics.jsonl`` and ``calibration.json`` beside it are shown too."""
    notes: list[Note] = []
    with _warnings_as_notes(notes):
        trace = source if isinstance(source, Trace) else Trace.load(source)
        path = place_of(trace)
        measurement = _measurement(trace, partial(fit_smoothness, trace), notes)
        beside: Fields = {}
        if path.name == TRACE:
            beside = {
                "held_out": _held_out(_rows_beside(path)),
                "calibration": _read_or_note(partial(read_calibration, path.parent), DAMAGED, notes),
            }
    measured = measurement["measured"]
    max_norm = common_threshold(measured["clip_norm"])
    diverged = trace.column("status")[-1:].tolist() == [NONFINITE]
    return RunView(
        name=name,
        setting=_setting(planned_lr(trace.header, measured["lr"]), trace.header.get("max_norm", max_norm)),
        task=task_of(trace) or name,
        status="diverged" if diverged else "",
        step=int(trace.column("step").max(initial=0)),
        final_loss=end_of_run(trace)[0],
        max_norm=max_norm,
        notes=tuple(dict.fromkeys(notes)),
        **measurement,
        **beside,
    )


def label_of(run: Run) -> str:
    """The setting of a run in words: its own, or learning rate and threshold of an older folder."""
    lr = float(run.config.get("lr", math.nan))
    return run.about.get("label") or _setting(lr, _threshold(run))


def _threshold(run: Run) -> float:
    """Where clipping starts; infinite without it."""
    return float(run.about.get("max_norm", run.config.get("max_norm", math.inf)))


def _setting(lr: float, max_norm: float) -> str:
    """Learning rate, of a schedule its peak, and threshold, in words."""
    if math.isnan(lr):
        return "a trace of your own loop"
    clip = "no clip" if math.isinf(max_norm) else f"clip {max_norm:.3g}"
    return f"lr {lr:.3g}, {clip}"


def _rows_beside(trace: Path) -> list[Fields]:
    """The rows of ``metrics.jsonl`` beside a trace."""
    path = trace.parent / METRICS
    if not path.exists():
        return []
    with path.open("rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rows written by hand have no checksum
        return list(read_rows(file, path))


def _read_or_note(read: Callable[[], Result], kind: str, notes: list[Note]) -> Result | None:
    """What ``read`` gives, or None and a note of why it does not."""
    try:
        return read()
    except ValueError as error:
        notes.append(Note(kind, str(error)))
        return None


def _measurement(trace: Trace, fitted: Callable[[], SmoothnessFit], notes: list[Note]) -> Fields:
    """Columns, fit and advice of a trace."""
    fit = _read_or_note(fitted, NOT_JUDGED, notes)
    measured = columns_of(trace)
    return {
        "layers": _layers(measured),
        "measured": measured,
        "fit": fit,
        "advice": advise(fit or trace),
        "header": trace.header,
        "trace": trace,
    }


def _layers(measured: Columns) -> Columns:
    """The columns of layers with a number, the sharpest first."""
    layers: Columns = {}
    for name, values in measured.items():
        if name.startswith("layers/") and np.isfinite(values).any():
            layers[name.removeprefix("layers/").rsplit("/", 1)[0]] = values
    return dict(sorted(layers.items(), key=lambda layer: -np.median(finite(layer[1]))))


@contextmanager
def _warnings_as_notes(notes: list[Note]) -> Iterator[None]:
    """Turn warnings of the readers (a torn last line) into notes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", RuntimeWarning)  # numbers of a diverged run overflow
        yield
    notes += [Note(DAMAGED, str(warning.message)) for warning in caught]
