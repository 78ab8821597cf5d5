"""A sweep as a map of colours: final training loss over the two fields with most values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from curvestep.display.chart import Axis, Chart, Grid
from curvestep.lab.recipes import Fields

NOT_RUN = "not run"  # in a cell
# Fields of a recipe that do not decide how a run trains, or, the seed, by chance only.
NOT_SETTINGS = (
    "name", "figures", "scale", "seed", "probe_every", "probe_from", "fractions", "probe_data", "eval_every",
    "eval_size", "log_every",
)  # fmt: skip


@dataclass(frozen=True)
class SweptRun:
    """One run of a sweep: its recipe's fields, its final training loss, NaN without one, and its status."""

    fields: Fields
    loss: float
    status: str


def fills_grid(runs: Sequence[SweptRun]) -> bool:
    """Whether runs are at half of the points, or more, of the grid that two or more of their fields span.

    Else a mean over some of them would be over runs that differ in other ways.
    """
    varied = {k: v for k, v in _values(runs).items() if len(v) > 1 and k not in NOT_SETTINGS}
    points = {tuple(field_value(run.fields, name) for name in varied) for run in runs}
    return len(varied) > 1 and 2 * len(points) >= math.prod(map(len, varied.values()))


def heat_map(runs: Sequence[SweptRun]) -> Chart:
    """Final training loss over the two fields with most values.

    Args:
        runs: At least one. The mean is over runs that agree in both fields, and a cell with a run that has
            no loss says what became of it.
    """
    values = _values(runs)
    columns, *others = sorted(values, key=lambda name: (name in NOT_SETTINGS, -len(values[name])))
    rows = next((name for name in others if len(values[name]) > 1 and name not in NOT_SETTINGS), "")
    down, across = values.get(rows, [None]), values[columns]
    cells: dict[tuple[int, int], list[SweptRun]] = {}
    for run in runs:
        place = down.index(field_value(run.fields, rows)), across.index(field_value(run.fields, columns))
        cells.setdefault(place, []).append(run)
    means = np.full((len(down), len(across)), math.nan)
    text = np.full(means.shape, NOT_RUN, dtype=object)
    for place, cell in cells.items():
        means[place] = _mean_loss(cell)
        lost = [run.status for run in cell if not math.isfinite(run.loss)]
        text[place] = _cell_text(means[place], lost, len(cell))
    grid = Grid(
        [short_value(value) for value in across],
        [short_value(value) for value in down],
        means,
        "final training loss",
        text=text.tolist(),
        reverse=True,
    )
    axes = Axis(columns.replace("_", " ")), Axis(rows.replace("_", " "))
    return Chart("heat", "Final training loss", *axes, words=_words(grid, rows, columns), grid=grid)


def _mean_loss(runs: Sequence[SweptRun]) -> float:
    """Mean over runs of one setting; NaN where one of them has no loss."""
    mean = sum(run.loss for run in runs) / len(runs)
    return mean if math.isfinite(mean) else math.nan


def _values(runs: Sequence[SweptRun]) -> dict[str, list[Hashable]]:
    """The values that each field has, numbers in their order."""
    values: dict[str, list[Hashable]] = {}
    for name in runs[0].fields:
        found = dict.fromkeys(field_value(run.fields, name) for run in runs)
        values[name] = sorted(found, key=_number)
    return values


def _number(value: Hashable) -> float:
    """A key that sorts numbers and leaves all else in its order."""
    return value if isinstance(value, (int, float)) else 0.0


def field_value(fields: Fields, name: str) -> Hashable:
    """A field of a recipe, a list as a tuple."""
    value = fields.get(name)
    return tuple(value) if isinstance(value, list) else value


def short_value(value: object) -> str:
    """A field's value in few characters."""
    if isinstance(value, tuple):
        return "+".join(map(short_value, value))
    if isinstance(value, float):
        return "no clipping" if math.isinf(value) else f"{value:g}"
    return "" if value is None else str(value)


def _words(grid: Grid, rows: str, columns: str) -> str:
    """The best cell of a sweep, and how many of those that were run have no number."""
    fields = f"{rows} and {columns}" if rows else columns
    num_known = int(np.isfinite(grid.values).sum())
    num_run = sum(text != NOT_RUN for row in grid.text for text in row)
    lowest = _lowest_cell(grid, rows, columns) if num_known else ""
    unfinished = ""
    if num_run > num_known:
        unfinished = f"{num_run - num_known} of {num_run} settings did not finish."
    return " ".join(filter(None, (f"Final training loss over {fields}.", lowest, unfinished)))


def _cell_text(mean: float, lost: Sequence[str], num_runs: int) -> str:
    """The text of a cell of a sweep: its mean loss, or how the runs without one, ``lost``, ended."""
    if math.isfinite(mean):
        return f"{mean:#.3g}".rstrip(".")
    endings = Counter(status or "no loss" for status in lost)
    if list(endings.values()) == [num_runs]:
        return next(iter(endings))
    return ", ".join(f"{count} of {num_runs} {status}" for status, count in endings.items())


def _lowest_cell(grid: Grid, rows: str, columns: str) -> str:
    least = np.nanmin(grid.values)
    # Of equal cells the first by name.
    down, across = min((grid.down[i], str(grid.across[j])) for i, j in np.argwhere(grid.values == least))
    place = f"{rows} {down}, " if rows else ""
    return f"Lowest: {least:.4g} at {place}{columns} {across}."
