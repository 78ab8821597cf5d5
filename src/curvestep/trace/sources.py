"""Runs and traces below the paths that a user names."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

from curvestep.report.markup import visible
from curvestep.trace.history import HasTrace, check_trace
from curvestep.trace.run import CONFIG, Run, find_runs
from curvestep.trace.trace import FORMAT, Trace

CLAIMS = "claims.json"
Source = Run | Path | Trace
Place = str | Path | Trace | HasTrace  # what a user may name: a probe has the trace that it writes


def find_sources(places: Iterable[Place]) -> list[Source]:
    """The runs, trace files and traces in ``places``; an error if one holds nothing of the kind."""
    named = list(places)
    if not named:
        raise ValueError("`paths` must name at least one run folder or trace file, got none.")
    return [source for place in named for source in _sources_at(place)]


def _sources_at(place: Place) -> Sequence[Source]:
    if not isinstance(place, (str, Path)):
        return [check_trace(place)]
    path = Path(place)
    if path.is_file():
        return [path]
    if not path.exists():
        raise ValueError(f"There is no {path}. Name run folders, folders of runs, or trace files.")
    if (path / CONFIG).exists():
        return [Run.load(path)]
    runs = sorted(find_runs(path), key=lambda run: _numbers_as_numbers(str(run.folder)))
    inside = {run.folder for run in runs}
    files = [file for file in sorted(path.rglob("*.jsonl")) if file.parent not in inside]
    sources = [*runs, *(file for file in files if _is_trace(file))]
    if not sources and not (path / CLAIMS).exists():
        raise ValueError(f"There is neither a run folder nor a trace in {path}.")
    return sources


def _numbers_as_numbers(text: str) -> list[str | int]:
    """A key by which ``run2`` comes before ``run10``: digits stand at every second place."""
    parts = re.split(r"([0-9]+)", text)
    return [int(part) if index % 2 else part for index, part in enumerate(parts)]


def _is_trace(file: Path) -> bool:
    with file.open("rb") as opened:
        return f'"format": "{FORMAT}"'.encode() in opened.readline(10_000)


def traces_by_task(places: Iterable[Place]) -> dict[str, list[Trace]]:
    """The traces in ``places``, found as for the page, those that can be compared together."""
    traces: dict[str, list[Trace]] = {}
    sources = find_sources(places)
    for source in sources:
        if not isinstance(source, Run):
            trace = check_trace(source)
            traces.setdefault(task_of(trace), []).append(trace)
            continue
        if source.lost_rows:
            warnings.warn(source.lost_rows, stacklevel=2)
        if source.trace_path.exists():
            traces.setdefault(task_of(source), []).append(source.trace)
    if not traces:
        where = ", ".join(str(place_of(source)) for source in sources) or "these folders"
        raise ValueError(f"There is no trace in {where}: nothing was measured. Train with a probe.")
    return traces


def task_of(source: Run | Trace) -> str:
    """Model and data in words: runs that agree in them can be compared."""
    if isinstance(source, Run):
        return source.task
    header = source.header
    facts = [str(header.get("model") or "")]
    size = header.get("num_parameters")
    where = header.get("measured_on")
    if isinstance(size, int):
        facts.append(f"{size:,} parameters")
    if where not in (None, "training batch"):
        facts.append(f"measured on {where}")
    return ", ".join(fact for fact in facts if fact)


def place_of(source: Source | Place) -> Path:
    """The folder of a run or the file of a trace; a name for a trace in memory."""
    if isinstance(source, Run):
        return source.folder
    if isinstance(source, (str, Path)):
        return Path(source)
    trace = check_trace(source)
    return trace.path or Path(str(trace.header.get("model", "a trace in memory")))


def short_names(folders: Sequence[Path]) -> list[str]:
    """The folders without what they share; a lone one by its own name.

    Example:
        >>> short_names([Path("runs/a/x"), Path("runs/b/x")]), short_names([Path("runs/mine")])
        (['a/x', 'b/x'], ['mine'])
    """
    absolute = [folder.resolve() for folder in folders]
    shared = os.path.commonpath([folder.parent for folder in absolute])
    return [visible(folder.relative_to(shared).as_posix()) for folder in absolute]
