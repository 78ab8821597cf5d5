"""A sweep as a map of colours: final training loss over the two fields with most values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from curvestep.display.chart import Axis, Chart, Grid
from curvestep.lab.recipe_fields import Fields, short

NOT_RUN = "–"  # in a cell
# Fields of a recipe that do not decide how a run trains, or, the seed, by chance only.
NOT_SETTINGS = (
    "name", "scale", "seed", "probe_every", "probe_from", "fractions", "probe_data", "eval_every",
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
    varied = _varied(_values(runs))
    points = {tuple(field_value(run.fields, name) for name in varied) for run in runs}
    return len(varied) > 1 and 2 * len(points) >= math.prod(map(len, varied.values()))


def _varied(values: dict[str, list[Hashable]]) -> dict[str, list[Hashable]]:
    """The settings with several values, those with most first."""
    settings = [name for name in values if len(values[name]) > 1 and name not in NOT_SETTINGS]
    return {name: values[name] for name in sorted(settings, key=lambda name: -len(values[name]))}


def heat_map(runs: Sequence[SweptRun]) -> Chart:
    """Final training loss of runs that fill a grid, over the two fields with most values.

    The mean is over runs that agree in both fields; a cell with a run that has no loss says how it ended.
    """
    varied = _varied(_values(runs))
    (columns, across), (rows, down), *_ = varied.items()
    means = np.full((len(down), len(across)), math.nan)
    text = np.full(means.shape, NOT_RUN, dtype=object)
    cells: dict[tuple[int, int], list[SweptRun]] = {}
    for run in runs:
        place = down.index(field_value(run.fields, rows)), across.index(field_value(run.fields, columns))
        cells.setdefault(place, []).append(run)
    for place, cell in cells.items():
        means[place] = np.mean([run.loss for run in cell])
        text[place] = _cell_text(means[place], cell)
    names, others = (list(map(short_value, axis)) for axis in (across, down))
    grid = Grid(names, others, means, "final training loss", text=text.tolist(), reverse=True)
    axes = Axis(columns.replace("_", " ")), Axis(rows.replace("_", " "))
    return Chart("heat", "Final training loss", *axes, words=_words(grid, rows, columns), grid=grid)


def _values(runs: Sequence[SweptRun]) -> dict[str, list[Hashable]]:
    """The values that each field has, numbers in their order."""
    values: dict[str, list[Hashable]] = {}
    for name in runs[0].fields:
        found: list[Hashable] = list(dict.fromkeys(field_value(run.fields, name) for run in runs))
        numbers = [value for value in found if isinstance(value, (int, float))]
        if len(numbers) == len(found):
            found = list[Hashable](sorted(numbers))
        values[name] = found
    return values


def field_value(fields: Fields, name: str) -> Hashable:
    """A field of a recipe, a list as a tuple."""
    value = fields.get(name)
    return tuple(value) if isinstance(value, list) else value


def short_value(value: object) -> str:
    """A field's value in few characters."""
    words = {"None": "", "inf": "no clipping"}
    return words.get(str(value), short(value))


def _words(grid: Grid, rows: str, columns: str) -> str:
    """The best cell of a sweep, and how many of those that were run have no number."""
    known = np.isfinite(grid.values)
    num_run = known.size - sum(row.count(NOT_RUN) for row in grid.text)
    words = [f"A cell shows the final training loss over {rows} and {columns}."]
    if known.any():
        words.append(_lowest_cell(grid, rows, columns))
    if num_run > known.sum():
        words.append(f"{num_run - known.sum()} of {num_run} settings did not finish.")
    if num_run < known.size:
        words.append(f"{NOT_RUN} was not run.")
    return " ".join(words)


def _cell_text(mean: float, cell: Sequence[SweptRun]) -> str:
    """The text of a cell of a sweep: its mean loss, or how the runs without one ended."""
    if math.isfinite(mean):
        return f"{mean:#.3g}".rstrip(".")
    endings = Counter(run.status for run in cell if not math.isfinite(run.loss))
    if endings.total() == len(cell) and len(endings) == 1:
        return next(iter(endings))
    return ", ".join(f"{count} of {len(cell)} {status}" for status, count in endings.items())


def _lowest_cell(grid: Grid, rows: str, columns: str) -> str:
    least = np.nanmin(grid.values)
    # Of equal cells the first by name.
    down, across = min((grid.down[i], str(grid.across[j])) for i, j in np.argwhere(grid.values == least))
    return f"The lowest is {least:.4g} at {rows} {down}, {columns} {across}."
