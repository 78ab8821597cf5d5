"""Many runs of one recipe over a grid of fields."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from curvestep.advice.settings import best_setting
from curvestep.lab.jobs import Job, run_jobs, stop_if_interrupted
from curvestep.lab.progress import show_live
from curvestep.lab.recipes import Fields, Recipe, with_fields
from curvestep.lab.run.folder import FAILED, FINISHED, RUNNING, STATUS, Run, RunResult, has_ended
from curvestep.lab.run.loop import train

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLE = "sweep.csv"
HEATMAP = "heatmap.png"
Grid = Mapping[str, Sequence[Any]]  # values to try, by field


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One point of the grid and what became of it."""

    fields: Fields
    folder: Path
    status: str
    result: RunResult | None = None
    message: str = ""

    @property
    def train_loss(self) -> float:
        """Final training loss, as in ``status.json``; NaN if the trial did not finish."""
        if self.result is None or self.status != FINISHED:
            return math.nan
        return self.result.train_loss

    @property
    def held_out(self) -> dict[str, float]:
        """Last evaluation on held-out data; empty if there was none."""
        if self.result is None:
            return {}
        return self.result.metrics.get("valid") or self.result.metrics.get("test") or {}


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """Every trial of a sweep, in the order of the grid."""

    folder: Path
    trials: tuple[Trial, ...]

    @property
    def best(self) -> Trial:
        """The trial with the lowest training loss of the best setting, which is judged over all its seeds."""
        settings: dict[tuple[object, ...], list[Trial]] = {}
        for trial in self.trials:
            setting = tuple(value for name, value in trial.fields.items() if name != "seed")
            settings.setdefault(setting, []).append(trial)
        try:
            best = best_setting({key: [t.train_loss for t in trials] for key, trials in settings.items()})
        except ValueError:
            raise ValueError(f"No setting of {self.folder} finished: there is no best trial.") from None
        return min(settings[best], key=lambda trial: trial.train_loss)

    def figure(self, *, title: str = "") -> Figure:
        """The final training loss over the two fields with most values, mean over the others."""
        from curvestep.display.drawing import figure_of
        from curvestep.lab.sweep_map import SweptRun, heat_map

        cells = []
        for trial in self.trials:
            names = {name: short(value) for name, value in trial.fields.items() if isinstance(value, str)}
            cells.append(SweptRun({**trial.fields, **names}, trial.train_loss, trial.status))
        chart = heat_map(cells)
        assert chart.grid is not None
        width = max(5.0, 2.6 + 1.1 * len(chart.grid.across))  # inches, for the text of the cells
        return figure_of([chart], title=title, size=(width, 3.4))

    def __str__(self) -> str:
        console = Console(width=110)
        with console.capture() as captured:
            console.print(_table(self.trials))
        return captured.get().rstrip()


def sweep(
    recipe: Recipe,
    grid: Grid,
    folder: str | Path,
    *,
    engine: str = "joblib",
    workers: int = 2,
    address: str | None = None,
    progress: bool = True,
    checkpoint_seconds: float = 60.0,
    offline: bool = False,
) -> SweepResult:
    """Train ``recipe`` at every point of ``grid``, each in a run folder of its own.

    Run again, it skips what has ended and goes on with the rest. A trial that fails or diverges is recorded
    and the others carry on. At the end there are ``sweep.csv`` and a heat map in ``folder``.

    Args:
        recipe: What the trials share.
        grid: Values to try, by field: ``{"lr": [1, 10], "max_norm": [0.25, inf], "seed": [0, 1, 2]}``.
        folder: Holds one folder a trial, named for its fields.
        engine: ``joblib``, processes on this machine; or ``ray``.
        workers: Trials at a time; they share torch's threads, so that cores are not oversubscribed.
        address: Of a Ray cluster; None starts one on this machine.
        progress: Show a live table (a line a trial without a terminal).
        checkpoint_seconds: Time between two checkpoints of a trial.
        offline: Use no network for the data.
    """
    folder = Path(folder)
    points = _points(recipe, grid)
    recipes = {name: with_fields(recipe, **fields) for name, fields in points.items()}
    folders = {name: folder / name for name in points}
    left = [name for name in points if not has_ended(folders[name], recipes[name])]
    jobs = [
        Job(
            name=name,
            folder=folders[name],
            function=train,
            arguments={
                "recipe": recipes[name],
                "folder": folders[name],
                "resume": True,
                "progress": False,
                "checkpoint_seconds": checkpoint_seconds,
                "offline": offline,
            },
        )
        for name in left
    ]
    folder.mkdir(parents=True, exist_ok=True)

    errors: dict[str, str] = {}

    def trials() -> tuple[Trial, ...]:
        return tuple(trial_in(fields, folders[name], errors.get(name, "")) for name, fields in points.items())

    outcomes = partial(run_jobs, jobs, engine=engine, workers=workers, address=address)
    with show_live(lambda: _table(trials()), shown=progress) as watch:
        for number, outcome in enumerate(outcomes(watch=watch), 1):
            stop_if_interrupted(outcome)
            errors[outcome.name] = outcome.error
            trial = trial_in(points[outcome.name], folders[outcome.name], outcome.error)
            if progress and watch is None:
                print(f"[{number}/{len(jobs)}] {outcome.name}: {_ending(trial)}", flush=True)
    from curvestep.display.drawing import save

    result = SweepResult(folder=folder, trials=trials())
    _write_csv(result, folder / TABLE)
    save(result.figure(), folder / HEATMAP)
    return result


def _ending(trial: Trial) -> str:
    if math.isfinite(trial.train_loss):
        return f"{trial.status}, training loss {trial.train_loss:.4f}"
    if trial.message:
        return f"{trial.status}: {trial.message}"
    return trial.status


def _points(recipe: Recipe, grid: Grid) -> dict[str, Fields]:
    """The points of the grid by name, each a valid recipe."""
    if not grid:
        raise ValueError("`grid` must name at least one field and its values.")
    for name, values in grid.items():
        if isinstance(values, (str, bytes)) or not len(values):
            raise ValueError(f"`grid` needs a list of values for {name!r}, got {values!r}.")
    points: dict[str, Fields] = {}
    for values in itertools.product(*grid.values()):
        trial = with_fields(recipe, **dict(zip(grid, values, strict=True)))
        fields = {name: getattr(trial, name) for name in grid}
        name = ",".join(f"{key}={short(value)}" for key, value in fields.items())
        if name in points:
            raise ValueError(f"`grid` has the point {name} twice.")
        points[name] = fields
    return points


def trial_in(fields: Fields, folder: Path, error: str = "") -> Trial:
    """The trial of these fields, as its run folder says it stands."""
    if not (folder / STATUS).exists():
        status = FAILED if error else "waiting"
        return Trial(fields=fields, folder=folder, status=status, message=error)
    run = Run.load(folder)
    status = run.status["status"]
    if error and status == RUNNING:  # a process that was killed could not write that its run is over
        status = FAILED
    result = run.result if "train_loss" in run.status else None
    message = error or run.status.get("message", "")
    return Trial(fields=fields, folder=folder, status=status, result=result, message=message)


def _table(trials: Sequence[Trial]) -> Table:
    table = Table(*trials[0].fields, "status", "step", "train loss", "held out")
    for trial in trials:
        step, loss = "", ""
        if trial.result:
            step = str(trial.result.step)
        if math.isfinite(trial.train_loss):
            loss = f"{trial.train_loss:.4f}"
        held_out = ", ".join(
            f"{name} {value:.4g}" for name, value in trial.held_out.items() if name != "loss"
        )
        table.add_row(*map(short, trial.fields.values()), trial.status, step, loss, held_out)
    return table


def _write_csv(result: SweepResult, path: Path) -> None:
    units = sorted({key for trial in result.trials for key in trial.held_out})
    held_out = [f"held_out_{unit}" for unit in units]
    header = [*result.trials[0].fields, "status", "steps", "train_loss", *held_out]
    rows: list[list[object]] = [[*header, "seconds", "folder", "message"]]
    for trial in result.trials:
        step, seconds = 0, ""
        if trial.result:
            step, seconds = trial.result.step, str(round(trial.result.seconds, 1))
        numbers = [step, trial.train_loss, *(trial.held_out.get(unit, "") for unit in units), seconds]
        rows.append([*trial.fields.values(), trial.status, *numbers, trial.folder.name, trial.message])
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def short(value: object) -> str:
    """A field's value as names of trials and tables show it; of a path its last part."""
    if isinstance(value, tuple):
        return "+".join(short(item) for item in value)
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).rpartition("/")[2]
