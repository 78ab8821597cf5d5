"""The figures of the paper as charts beside each other, and what is said around them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from curvestep.display.chart import Chart
from curvestep.display.drawing import figure_of
from curvestep.lab.recipes import Recipe
from curvestep.lab.run.folder import Run

# One colour a setting in every figure, by learning rate and momentum: numbers of the palette.
COLOURS = {
    (30.0, 0.0): 0,
    (10.0, 0.0): 1,
    (2.0, 0.0): 2,
    (4.0, 0.0): 3,
    (5.0, 0.0): 4,
    (20.0, 0.0): 5,
    (0.1, 0.9): 6,
}
OTHER_COLOUR = 5  # of a setting that is not in the paper's legend


def colour_of(recipe: Recipe) -> int:
    """The colour of a setting."""
    return COLOURS.get((recipe.lr, recipe.momentum), OTHER_COLOUR)


def lettered(charts: Sequence[Chart]) -> list[Chart]:
    """Charts with (a), (b), (c) before their titles, where there are several."""
    if len(charts) == 1:
        return list(charts)
    return [replace(chart, title=f"({chr(ord('a') + i)}) {chart.title}") for i, chart in enumerate(charts)]


def loaded(run: Run | str | Path) -> Run:
    """The run itself, or the one in this folder."""
    return run if isinstance(run, Run) else Run.load(run)


def setting(run: Run) -> str:
    """The setting in words for a panel's title or a legend, with the end of a run that diverged."""
    if run.status.get("status") == "diverged":
        return f"{run.recipe.label} (diverged at step {run.status.get('step')})"
    return run.recipe.label


def described(
    charts: Sequence[Chart],
    runs: Sequence[Run],
    *,
    title: str,
    columns: int = 2,
    share: str = "",
    size: tuple[float, float] = (5.0, 3.4),
) -> Figure:
    """As :func:`figure_of`, each chart with its words, and below all what was trained on which data."""
    recipes = dict.fromkeys(f"{run.recipe.name}, {run.recipe.scale} scale" for run in runs)
    data = dict.fromkeys(str(run.status["data"]) for run in runs if run.status.get("data"))
    seeds = sorted({run.recipe.seed for run in runs})
    words = [*recipes, f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}", *data]
    width = size[0] * min(columns, len(charts))
    return figure_of(
        charts,
        title=_wrapped(title, width / 0.095),
        note=_wrapped("; ".join(words), width / 0.062),
        columns=columns,
        share=share,
        words=True,
        size=size,
    )


def _wrapped(text: str, characters: float) -> str:
    """Each line of ``text`` broken so that it fits."""
    return "\n".join(part for line in text.split("\n") for part in textwrap.wrap(line, int(characters)))
