"""Final training loss over the two recipe fields that vary most: the map of a sweep."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from curvestep.lab.report.views import RunView

_NOT_SETTINGS = ("name", "figures", "scale", "seed")


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """Mean final training loss on a grid; NaN where no run finished.

    Args:
        rows: Field that changes downwards.
        columns: Field that changes to the right.
        down: Its values, ascending.
        across: Its values, ascending.
        losses: One list a row.
        notes: What a cell without a number is: ``diverged``, ``2 of 3 diverged``, ``not run``.
    """

    rows: str
    columns: str
    down: tuple[str, ...]
    across: tuple[str, ...]
    losses: tuple[tuple[float, ...], ...]
    notes: tuple[tuple[str, ...], ...]

    @property
    def in_words(self) -> str:
        """The best cell, and how many have no number."""
        cells = [
            (loss, self.down[i], self.across[j])
            for i, row in enumerate(self.losses)
            for j, loss in enumerate(row)
            if math.isfinite(loss)
        ]
        empty = sum(not math.isfinite(loss) for row in self.losses for loss in row)
        words = f"Final training loss over {self.rows} and {self.columns}."
        if cells:
            loss, down, across = min(cells)
            words += f" Lowest: {loss:.4g} at {self.rows} {down}, {self.columns} {across}."
        return words + (f" {empty} of {sum(map(len, self.losses))} settings did not finish." if empty else "")


def heat_map(views: Sequence[RunView]) -> HeatMap | None:
    """The map over the two fields with most values; None unless two fields vary over a grid."""
    runs = [view for view in views if view.fields]
    varying = {
        name: values
        for name in (runs[0].fields if runs else ())
        if name not in _NOT_SETTINGS and len(values := _values(runs, name)) > 1
    }
    if len(varying) < 2:
        return None
    columns, rows = sorted(varying, key=lambda name: -len(varying[name]))[:2]
    grid = itertools.product(varying[rows], varying[columns])
    cells = {point: [v for v in runs if (_at(v, rows), _at(v, columns)) == point] for point in grid}
    # Runs that share nothing (two recipes, say) are no sweep: most cells would be empty.
    if sum(bool(cell) for cell in cells.values()) < len(cells) / 2:
        return None
    across = varying[columns]
    table = [[cells[down, right] for right in across] for down in varying[rows]]
    return HeatMap(
        rows=rows,
        columns=columns,
        down=tuple(_short(value) for value in varying[rows]),
        across=tuple(_short(value) for value in across),
        losses=tuple(tuple(_loss(cell) for cell in row) for row in table),
        notes=tuple(tuple(_note(cell) for cell in row) for row in table),
    )


def _values(views: Sequence[RunView], name: str) -> list[Any]:
    found = list(dict.fromkeys(_at(view, name) for view in views))
    numbers = all(isinstance(value, (int, float)) for value in found)
    return sorted(found) if numbers else found


def _at(view: RunView, name: str) -> Any:
    value = view.fields.get(name)
    if value == "Infinity":
        return math.inf
    return tuple(value) if isinstance(value, list) else value


def _loss(cell: Sequence[RunView]) -> float:
    finished = [view.final_loss for view in cell if math.isfinite(view.final_loss)]
    return sum(finished) / len(finished) if cell and len(finished) == len(cell) else math.nan


def _note(cell: Sequence[RunView]) -> str:
    if not cell or math.isfinite(_loss(cell)):
        return "" if cell else "not run"
    diverged = sum(view.status == "diverged" for view in cell)
    if not diverged:
        return cell[0].status or "no loss"
    return "diverged" if diverged == len(cell) else f"{diverged} of {len(cell)} diverged"


def _short(value: Any) -> str:
    if isinstance(value, tuple):
        return "+".join(_short(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
