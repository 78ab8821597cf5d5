"""Runs of the larger scales that come with the package: packed, unpacked, and named where one is lost.

``kept/<scale>`` beside this file has an archive a run, or one of several: the run's folder without its
checkpoint, and ``origin.json`` with the commit that made it. Nothing is trained to draw a figure from them.
"""

from __future__ import annotations

import io
import lzma
import shutil
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from curvestep._files import dump_json
from curvestep.lab.paper.plan import Plan, Results
from curvestep.lab.run.folder import CONFIG, METRICS, STATUS, TRACE, Run, has_ended, read_json

KEPT = Path(__file__).with_name("kept")
KEPT_CLAIMS = KEPT / "claims.json"  # of the larger scales, written by docs/reproduction_figures.py
RUN_FILES = (CONFIG, STATUS, METRICS, TRACE, "calibration.json")
ORIGIN = "origin.json"
UNKNOWN = "an earlier commit"  # of runs that were packed before the commit was noted
# The scale that has the paper's own model for a figure; of figure 4 that of (c) and (d).
PAPER_SIZE = {
    "fig1": "epoch", "fig2": "epoch", "fig3": "paper", "fig4": "paper", "fig5": "epoch", "fig6": "epoch",
    "fig8": "longer",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class KeptRuns:
    """The kept runs of a plan.

    Args:
        results: Those that can be read, with the whole plan.
        damaged: A line for each archive or run that cannot be read.
        commits: The commit that made each run, by the run's name.
    """

    results: Results
    damaged: tuple[str, ...]
    commits: Mapping[str, str]

    @property
    def about(self) -> str:
        """How many runs there are, which commit made them, and what they cost, in a sentence."""
        runs = self.results.runs
        if not runs:
            return "No run is kept yet."
        hours = sum(run.status["seconds"] for run in runs) / 3600
        commits = ", ".join(sorted({self.commits[run.folder.name] for run in runs}))
        planned = len(self.results.plan.runs)
        return f"{len(runs)} of {planned} runs, made by {commits} in {hours:.1f} hours of one core."


def pack_runs(folder: Path, target: Path, *, commit: str, unended: bool = False) -> list[str]:
    """Pack every run below ``folder`` into ``target``, an archive each; their names.

    Runs that have not ended are left out, or with ``unended`` packed as they stand, to their last whole row.
    """
    found = sorted(path.parent for path in folder.rglob(CONFIG) if unended or has_ended(path.parent))
    target.mkdir(parents=True, exist_ok=True)
    for run in found:
        # In this order: rows that are written meanwhile may be more than the status counts, not fewer.
        contents = {name: (run / name).read_bytes() for name in RUN_FILES if (run / name).exists()}
        for rows in contents.keys() & {METRICS, TRACE}:
            contents[rows] = contents[rows][: contents[rows].rfind(b"\n") + 1]
        contents[ORIGIN] = (dump_json({"commit": commit}) + "\n").encode()
        with tarfile.open(target / f"{run.name}.tar.xz", "w:xz", preset=9) as packed:
            for name, content in contents.items():
                about = tarfile.TarInfo(f"{run.name}/{name}")  # no time, no owner: the same bytes each time
                about.size = len(content)
                packed.addfile(about, io.BytesIO(content))
    return [run.name for run in found]


def load_kept(plan: Plan, source: Path, folder: Path) -> KeptRuns:
    """Unpack the archives in ``source`` into ``folder`` and read the runs of the plan; the lost are named."""
    runs = folder / "runs"
    damaged = [*chain.from_iterable(_unpack(archive, runs) for archive in sorted(source.glob("*.tar.xz")))]
    damaged += chain.from_iterable(_damage(config.parent) for config in sorted(runs.rglob(CONFIG)))
    places, commits = {}, {}
    for config in runs.rglob(CONFIG):
        name = config.parent.name
        places[name] = str(config.parent.parent.relative_to(runs))
        commits[name] = _commit(config.parent)
    placed = tuple(replace(run, place=places.get(run.name, "")) for run in plan.runs)
    results = Results(replace(plan, runs=placed), folder)
    return KeptRuns(results=results, damaged=tuple(damaged), commits=commits)


def _unpack(archive: Path, runs: Path) -> Iterable[str]:
    """Unpack one archive; where it breaks off, a line, and the run that was cut is taken away."""
    last = Path()
    try:
        with tarfile.open(archive) as packed:
            for member in packed:
                last = (runs / member.name).parent
                packed.extract(member, runs, filter="data")
    except (tarfile.TarError, lzma.LZMAError, EOFError, OSError) as error:
        if last != Path():
            shutil.rmtree(last, ignore_errors=True)
        yield f"{archive.name} is damaged: {error}"


def _damage(path: Path) -> Iterable[str]:
    """A line if a run cannot be read to its end; it is taken away."""
    try:
        run = Run.load(path)
        reason = run.lost_rows
        _ = run.metrics
        if run.trace_path.exists():
            _ = run.trace
    except ValueError as error:
        reason = str(error)
    if reason:
        shutil.rmtree(path)
        yield f"{path.name} is damaged: {reason}"


def _commit(path: Path) -> str:
    file = path / ORIGIN
    return str(read_json(file).get("commit", UNKNOWN)) if file.exists() else UNKNOWN
