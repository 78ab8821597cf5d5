"""The figures of the paper as charts beside each other, and what is said around them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from curvestep.display.chart import Chart
from curvestep.display.drawing import figure_of
from curvestep.lab.cost import steps_of
from curvestep.lab.paper.plan import Planned
from curvestep.lab.recipes import ImageRecipe, LanguageRecipe, Recipe
from curvestep.lab.run.folder import DIVERGED, Run, last_step

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
    pairs = zip(letters, charts, strict=False)
    return [replace(chart, title=f"({letter}) {chart.title}") for letter, chart in pairs]


def model_words(recipe: Recipe) -> str:
    """The model that a recipe trains, and what its data were cut to.

    Example:
        >>> from curvestep.lab.recipes import get_recipe
        >>> model_words(get_recipe("ptb-lstm", "longer")), model_words(get_recipe("cifar-resnet20"))
        ('LSTM 200/512', 'ResNet20')
    """
    if isinstance(recipe, LanguageRecipe):
        words = [f"{recipe.model.upper()} {recipe.embedding}/{recipe.hidden}"]
        if recipe.vocabulary:
            words.append(f"{recipe.vocabulary:,} different words")
        if recipe.num_words:
            words.append(f"{recipe.num_words:,} words of text")
        return ", ".join(words)
    assert isinstance(recipe, ImageRecipe)
    return "ResNet20" if recipe.pooling == 1 else f"ResNet20, {32 // recipe.pooling} pixels a side"


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
    there = {run.folder.name for run in runs}
    models = {model_words(run.recipe) for run in runs}
    settings: dict[str, list[Planned]] = {}
    for run in planned:
        settings.setdefault(run.setting, []).append(run)
    names = {}
    for own in settings.values():
        model = model_words(own[0].recipe)
        if not there.intersection(run.name for run in own):
            names[own[0].recipe.label if model in models else model] = None
    return f"Not run yet: {'; '.join(names)}." if names else ""


def seed_words(runs: Iterable[Run | Planned]) -> str:
    """The seeds of runs: ``seed 1`` or ``seeds 10 to 14``."""
    seeds = sorted({run.recipe.seed for run in runs})
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    if seeds == list(range(seeds[0], seeds[-1] + 1)):
        return f"seeds {seeds[0]} to {seeds[-1]}"
    return f"seeds {', '.join(map(str, seeds))}"


def loaded(run: Run | str | Path) -> Run:
    """The run itself, or the one in this folder."""
    return run if isinstance(run, Run) else Run.load(run)


def setting(run: Run) -> str:
    """The setting in words for a panel's title or a legend, with the end of a run that did not finish."""
    if run.status["status"] == DIVERGED:
        return f"{run.recipe.label} (diverged at step {run.status['step']})"
    return run.recipe.label if run.has_ended else f"{run.recipe.label} ({length_words(run)})"


def described(
    charts: Sequence[Chart],
    runs: Sequence[Run],
    *,
    title: str,
    columns: int = 2,
    share: str = "",
    size: tuple[float, float] = PANEL,
) -> Figure:
    """As :func:`figure_of`, each chart with its words, and below all what was trained on which data."""
    models = dict.fromkeys(model_words(run.recipe) for run in runs)
    data = dict.fromkeys(str(run.status["data"]) for run in runs if run.status.get("data"))
    words = [*models, seed_words(runs), *data]
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
