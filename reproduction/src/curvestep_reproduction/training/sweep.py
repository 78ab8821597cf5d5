"""Many runs of one recipe over a grid of fields."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from curvestep.display.views import short
from curvestep.trace.run import FAILED, FINISHED, RUNNING, Fields, read_status
from curvestep_reproduction.recipes import Recipe, with_fields
from curvestep_reproduction.training.jobs import Job, run_jobs, stop_if_interrupted
from curvestep_reproduction.training.loop import train
from curvestep_reproduction.training.run_folder import has_ended

Grid = Mapping[str, Sequence[object]]  # values to try, by field


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One point of the grid and what became of it."""

    fields: Fields
    folder: Path
    status: str
    train_loss: float = math.nan  # at the end; NaN if the trial did not finish
    held_out: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """Every trial of a sweep, in the order of the grid."""

    folder: Path
    trials: tuple[Trial, ...]

    def __str__(self) -> str:
        """A line for each trial, the lowest loss first."""
        ranked = sorted(self.trials, key=lambda trial: np.nan_to_num(trial.train_loss, nan=math.inf))
        width = max(len(trial.folder.name) for trial in ranked)
        return "\n".join(f"{trial.folder.name:<{width}}  {ending(trial)}" for trial in ranked)


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
    and the others carry on. ``curvestep report`` compares them.

    Args:
        recipe: What the trials share.
        grid: Values to try, by field: ``{"lr": [1, 10], "max_norm": [0.25, inf], "seed": [0, 1, 2]}``.
        folder: Holds one folder a trial, named for its fields.
        engine: ``joblib``, processes on this machine; or ``ray``.
        workers: Trials at a time; they share torch's threads, so that cores are not oversubscribed.
        address: Of a Ray cluster; None starts one on this machine.
        progress: Print a line when a trial has ended.
        checkpoint_seconds: Time between two checkpoints of a trial.
        offline: Use no network for the data.
    """
    folder = Path(folder)
    recipes = _recipes(recipe, grid)
    points = {name: {key: getattr(point, key) for key in grid} for name, point in recipes.items()}
    common = {"resume": True, "progress": False, "checkpoint_seconds": checkpoint_seconds, "offline": offline}
    jobs = []
    for name, point in recipes.items():
        if not has_ended(folder / name, point):
            arguments = {"recipe": point, "folder": folder / name, **common}
            jobs.append(Job(name=name, folder=folder / name, function=train, arguments=arguments))
    folder.mkdir(parents=True, exist_ok=True)

    errors: dict[str, str] = {}
    outcomes = run_jobs(jobs, engine=engine, workers=workers, address=address)
    for number, outcome in enumerate(outcomes, 1):
        stop_if_interrupted(outcome)
        errors[outcome.name] = outcome.error
        if progress:
            trial = trial_in(points[outcome.name], folder / outcome.name, outcome.error)
            print(f"[{number}/{len(jobs)}] {outcome.name}: {ending(trial)}", flush=True)
    found = (trial_in(fields, folder / name, errors.get(name, "")) for name, fields in points.items())
    return SweepResult(folder=folder, trials=tuple(found))


def ending(trial: Trial) -> str:
    """How a trial ended, in a few words."""
    if not math.isfinite(trial.train_loss):
        return f"{trial.status}: {trial.message}".removesuffix(": ")
    units = [f", {name} {value:.4g}" for name, value in trial.held_out.items() if name != "loss"]
    return f"{trial.status}, training loss {trial.train_loss:.4f}{''.join(units)}"


def _recipes(recipe: Recipe, grid: Grid) -> dict[str, Recipe]:
    """The recipe at each point of the grid, by name."""
    if not grid:
        raise ValueError("`grid` must name at least one field and its values.")
    for name, values in grid.items():
        if isinstance(values, str) or not values:
            raise ValueError(f"`grid` needs a list of values for {name!r}, got {values!r}.")
    points: dict[str, Recipe] = {}
    for values in itertools.product(*grid.values()):
        point = with_fields(recipe, **dict(zip(grid, values, strict=True)))
        name = ",".join(f"{key}={short(getattr(point, key))}" for key in grid)
        if name in points:
            raise ValueError(f"`grid` has the point {name} twice.")
        points[name] = point
    return points


def trial_in(fields: Fields, folder: Path, error: str = "") -> Trial:
    """The trial of these fields, as its run folder says it stands."""
    found = {"status": "waiting", "train_loss": math.nan, "message": "", **read_status(folder, {})}
    status = found["status"]
    if error and status in (RUNNING, "waiting"):  # a process that was killed could not write that it failed
        status = FAILED
    return Trial(
        fields=fields,
        folder=folder,
        status=status,
        train_loss=found["train_loss"] if status == FINISHED else math.nan,
        held_out=next(iter(found.get("metrics", {}).values()), {}),
        message=error or found["message"],
    )
