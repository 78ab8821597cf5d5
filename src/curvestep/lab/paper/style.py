"""The figures of the paper as charts beside each other, and what is said around them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from curvestep.display.chart import Chart
from curvestep.display.drawing import figure_of
from curvestep.lab.cost import steps_of
from curvestep.lab.paper.plan import Planned
from curvestep.lab.recipes import Recipe
from curvestep.lab.run.folder import DIVERGED, FINISHED, Run, last_step

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
LETTERS = "abcdefgh"  # of panels
# Inches of a panel, so that a figure of two or of three can be read at half the width of a page.
PANEL, SMALL_PANEL = (4.0, 3.4), (3.1, 3.0)
TITLE_CHARACTERS, LEGEND_CHARACTERS = 24, 27  # in a line above a small panel, and of a legend of two columns
OTHER_COLOUR = 5  # of a setting that is not in the paper's legend


def colour_of(recipe: Recipe) -> int:
    """The colour of a setting."""
    return COLOURS.get((recipe.lr, recipe.momentum), OTHER_COLOUR)


def lettered(charts: Sequence[Chart], letters: str = LETTERS) -> list[Chart]:
    """Charts with the paper's (a), (b), (c) before their titles; a chart alone has none by itself."""
    if len(charts) == 1 and letters == LETTERS:
        return list(charts)
    return [
        replace(chart, title=f"({letter}) {chart.title}")
        for letter, chart in zip(letters, charts, strict=False)
    ]


def length_words(run: Run) -> str:
    """Length of a run: ``684 steps``; of one that has not ended ``20 of 200 epochs``."""
    if run.has_ended:
        return f"{run.status['step']:,} steps"
    step, planned, epochs = last_step(run.folder), steps_of(run.recipe), run.recipe.epochs
    if epochs > 1:
        return f"{step * epochs / planned:.3g} of {epochs} epochs"
    return f"{step:,} of about {planned:,} steps"


def missing_words(planned: Iterable[Planned], runs: Sequence[Run]) -> str:
    """Settings without a run, of a model that has none the model alone, in a sentence; empty without any."""
    there = {(run.recipe.model_words, run.recipe.label) for run in runs}
    models = {model for model, _ in there}
    names: dict[str, None] = {}
    for run in planned:
        model, label = run.recipe.model_words, run.recipe.label
        if model not in models:
            names[model] = None
        elif (model, label) not in there:
            names[label] = None
    return f"Not run yet: {'; '.join(names)}." if names else ""


def seed_words(runs: Iterable[Run | Planned]) -> str:
    """The seeds of runs: ``seed 1`` or ``seeds 10 to 14``."""
    first, *others = sorted({run.recipe.seed for run in runs})
    if not others:
        return f"seed {first}"
    if others[-1] == first + len(others):
        return f"seeds {first} to {others[-1]}"
    return f"seeds {', '.join(map(str, [first, *others]))}"


def setting(run: Run) -> str:
    """The setting in words for a panel's title or a legend, with the end of a run that did not finish."""
    label, status = run.recipe.label, run.status["status"]
    if status == FINISHED:
        return label
    if status == DIVERGED:
        return f"{label} (diverged at step {run.status['step']})"
    return f"{label} ({length_words(run)})"


def described(
    charts: Sequence[Chart],
    runs: Sequence[Run],
    *,
    title: str,
    columns: int = 2,
    size: tuple[float, float] = PANEL,
) -> Figure:
    """As :func:`figure_of`, each chart with its words, and below all what was trained on which data."""
    models = dict.fromkeys(run.recipe.model_words for run in runs)
    data = dict.fromkeys(str(run.status["data"]) for run in runs if run.status.get("data"))
    words = [*models, seed_words(runs), *data]
    width = size[0] * min(columns, len(charts))
    return figure_of(
        charts,
        title=_wrapped(title, width / 0.095),
        note=_wrapped("; ".join(words), width / 0.062),
        columns=columns,
        words=True,
        size=size,
    )


def _wrapped(text: str, characters: float) -> str:
    """Each line of ``text`` broken so that it fits."""
    return "\n".join(textwrap.fill(line, int(characters)) for line in text.split("\n"))
