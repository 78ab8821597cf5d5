"""Many runs of one recipe over a grid of fields."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from curvestep.report.views import short
from curvestep_reproduction.recipes import Recipe, with_fields
from curvestep_reproduction.training.jobs import run_jobs
from curvestep_reproduction.training.loop import train
from curvestep_reproduction.training.run_folder import RunResult, has_ended, result_in

Grid = Mapping[str, Sequence[object]]  # values to try, by field


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
) -> list[RunResult]:
    """Train ``recipe`` at every point of ``grid``, each in a run folder of its own.

    Run again, it skips what has ended and goes on with the rest. A trial that fails or diverges is recorded
    and the others carry on. ``curvestep report`` compares them. The results are in the order of the grid.

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
    common = {"resume": True, "progress": False, "checkpoint_seconds": checkpoint_seconds, "offline": offline}
    jobs = {
        name: partial(train, point, folder / name, **common)
        for name, point in recipes.items()
        if not has_ended(folder / name, point)
    }
    folder.mkdir(parents=True, exist_ok=True)

    errors: dict[str, str] = {}
    outcomes = run_jobs(jobs, engine=engine, workers=workers, address=address)
    for number, outcome in enumerate(outcomes, 1):
        errors[outcome.name] = outcome.error
        if progress:
            trial = result_in(folder / outcome.name, outcome.error)
            print(f"[{number}/{len(jobs)}] {outcome.name}: {trial.ending}", flush=True)
    return [result_in(folder / name, errors.get(name, "")) for name in recipes]


def ranking(trials: Sequence[RunResult]) -> str:
    """A line for each trial, the lowest loss first."""
    ranked = sorted(trials, key=lambda trial: trial.score)
    width = max(len(trial.folder.name) for trial in ranked)
    return "\n".join(f"{trial.folder.name:<{width}}  {trial.ending}" for trial in ranked)


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
