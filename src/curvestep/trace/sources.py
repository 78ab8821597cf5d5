"""Runs and traces below the paths that a user names."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

from curvestep.display.markup import visible
from curvestep.trace.history import check_trace
from curvestep.trace.run import CONFIG, Run, find_runs
from curvestep.trace.trace import FORMAT, Trace

CLAIMS = "claims.json"
Source = Run | Path | Trace


def find_sources(paths: Iterable[str | Path | Trace]) -> list[Source]:
    """The runs, trace files and traces in ``paths``; an error if one holds nothing of the kind."""
    places = list(paths)
    if not places:
        raise ValueError("`paths` must name at least one run folder or trace file, got none.")
    return list(chain.from_iterable(map(_sources_at, places)))


def _sources_at(place: str | Path | Trace) -> Sequence[Source]:
    if isinstance(place, Trace):
        return [place]
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
    sources = [*runs, *filter(_is_trace, files)]
    if not sources and not (path / CLAIMS).exists():
        raise ValueError(f"There is neither a run folder nor a trace in {path}.")
    return sources


def _numbers_as_numbers(text: str) -> list[str | int]:
    """A key by which ``run2`` comes before ``run10``: digits stand at every second place."""
    parts: list[str | int] = list(re.split(r"([0-9]+)", text))
    parts[1::2] = map(int, parts[1::2])
    return parts


def _is_trace(file: Path) -> bool:
    with file.open("rb") as opened:
        return f'"format": "{FORMAT}"'.encode() in opened.readline(10_000)


def traces_by_task(paths: Iterable[str | Path | Trace]) -> dict[str, list[Trace]]:
    """The traces in ``paths``, found as for the page, those that can be compared together."""
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
        where = ", ".join(map(str, map(place_of, sources))) or "these folders"
        raise ValueError(f"There is no trace in {where}: nothing was measured. Train with a probe.")
    return found


def task_of(source: Run | Trace) -> str:
    """Model and data in words: runs that agree in them can be compared."""
    if isinstance(source, Run):
        return source.task
    model, size, where = map(source.header.get, ("model", "num_parameters", "measured_on"))
    facts = [str(model or "")]
    if isinstance(size, int):
        facts.append(f"{size:,} parameters")
    if where not in (None, "training batch"):
        facts.append(f"measured on {where}")
    return ", ".join(filter(None, facts))


def place_of(source: Source | str) -> Path:
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
    absolute = list(map(Path.resolve, folders))
    shared = os.path.commonpath([folder.parent for folder in absolute])
    return [visible(folder.relative_to(shared).as_posix()) for folder in absolute]
