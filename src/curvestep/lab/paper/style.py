"""How the figures of the paper are described; how they look is ``display/drawing``."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from curvestep.display.drawing import (
    COLOURS as COLOURS,
    DASHES as DASHES,
    FRONTIER as FRONTIER,
    ITERATIONS as ITERATIONS,
    LINE as LINE,
    legend_below as legend_below,
    log_axes as log_axes,
    panels as panels,
    save as save,
    styled as styled,
)
from curvestep.lab.run.folder import Run


def loaded(run: Run | str | Path) -> Run:
    """The run itself, or the one in this folder."""
    return run if isinstance(run, Run) else Run.load(run)


def setting(run: Run) -> str:
    """The setting in words for a panel's title or a legend, with the end of a run that diverged."""
    if run.status.get("status") == "diverged":
        return f"{run.recipe.label} (diverged at step {run.status.get('step')})"
    return run.recipe.label


def describe(figure: Figure, title: str, runs: Sequence[Run]) -> None:
    """Put the title above the panels, and below them what was trained on which data."""
    width = figure.get_figwidth()
    figure.suptitle(_wrapped(title, width / 0.095), fontsize=11, fontweight="bold")
    recipes = dict.fromkeys(f"{run.recipe.name}, {run.recipe.scale} scale" for run in runs)
    data = dict.fromkeys(str(run.status["data"]) for run in runs if run.status.get("data"))
    seeds = sorted({run.recipe.seed for run in runs})
    words = [*recipes, f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}", *data]
    figure.supxlabel(_wrapped("; ".join(words), width / 0.062), fontsize=7.5, color="#555555")


def _wrapped(text: str, characters: float) -> str:
    """Each line of ``text`` broken so that it fits."""
    return "\n".join(part for line in text.split("\n") for part in textwrap.wrap(line, int(characters)))
