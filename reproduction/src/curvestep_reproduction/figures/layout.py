"""How the paper's figures look: colours of settings, panels, and what is written on them.

Every panel shows the paper's own value in a grey tag. Clipped settings have solid lines and filled marks,
unclipped ones dashed lines and hollow marks, each setting the same everywhere. Lines are named at their ends.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvestep.report.chart import Chart, Series
from curvestep.report.drawing import draw, panels, styled
from curvestep_reproduction.figures.legend import seed_words
from curvestep_reproduction.recipes import Recipe
from curvestep_reproduction.training.run_folder import TrainedRun

# Number in the palette and mark of a setting, by learning rate and momentum.
LOOKS = {
    (30.0, 0.0): (0, "circle"),
    (10.0, 0.0): (1, "square"),
    (2.0, 0.0): (2, "triangle"),
    (4.0, 0.0): (3, "square"),
    (5.0, 0.0): (4, "circle"),
    (20.0, 0.0): (5, "triangle"),
    (3.0, 0.0): (6, "circle"),
    (1.0, 0.0): (5, "triangle"),  # on images alone, where there is no lr 20
    (0.1, 0.9): (6, "square"),  # likewise
}
OTHER_LOOK = (5, "circle")  # of a setting that is not in the paper's legend
PANEL = (4.2, 3.5)  # inches, so that two side by side can be read at half the width of a page
SMALL_PANEL = (3.3, 3.4)  # likewise of three
LEAST_POINTS = 50  # points from which a panel has the paper's letter
GREY = "#6b6b6b"
MARKS_A_LINE = 8  # marks on a line of many points
LABEL_GAP = 0.075  # between the names of lines, in heights of a panel
SPREADING = 200  # passes in which the names of lines move apart
CHARACTER = 0.075  # inches that a character of a panel's title takes


@dataclass(frozen=True)
class Panel:
    """A chart of a figure, and what is written on it."""

    chart: Chart  # with what is seen in its title
    _: KW_ONLY
    letter: str = ""  # of this panel in the paper; empty for one that the paper lacks
    found: str = ""  # what is found, with numbers of rows and seeds: below the title
    paper: str = ""  # what the paper finds here, in a few words
    inside: str = ""  # which settings have no line to look at
    reference: bool = False  # whether it stands for the paper's panel however few points it has

    @property
    def num_points(self) -> int:
        """Points of its longest series."""
        return max((int(np.isfinite(series.y).sum()) for series in self.chart.series), default=0)

    @property
    def stands_for_papers(self) -> bool:
        """Whether it has as many points as a panel needs that is named as one of the paper."""
        return self.reference or self.num_points >= LEAST_POINTS


def look_of(recipe: Recipe) -> tuple[int, str]:
    """Number in the palette, and mark, of a setting."""
    return LOOKS.get((recipe.lr, recipe.momentum), OTHER_LOOK)


def dash_of(recipe: Recipe) -> str:
    """Solid with clipping and dashed without; with dots where only some runs of a figure have drops of lr."""
    if recipe.threshold < math.inf:
        return "dashdot" if drops_are_special(recipe) else "solid"
    return "dot" if drops_are_special(recipe) else "dash"


def drops_are_special(recipe: Recipe) -> bool:
    """Whether the learning rate drops here, but not in the setting's other runs: so it is at laptop scale."""
    return bool(recipe.lr_drops) and recipe.scale == "laptop"


def short_label(recipe: Recipe) -> str:
    """The setting in few words, for the end of its line.

    Example:
        >>> from curvestep_reproduction.recipes import get_recipe
        >>> short_label(get_recipe("cifar-resnet20"))
        'lr 0.1, momentum'
    """
    if recipe.momentum and recipe.threshold == math.inf:
        words = f"lr {recipe.lr:g}, momentum"
    else:
        words = recipe.label.removesuffix(", lr drops")
    return f"{words}, drops" if drops_are_special(recipe) else words


def count_words(rows: int, runs: Sequence[TrainedRun]) -> str:
    """Rows and seeds of a panel: ``400 rows, seeds 10 to 14``."""
    return f"{rows:,} row{'s' * (rows != 1)}, {seed_words(runs)}"


def trained_on(runs: Sequence[TrainedRun]) -> str:
    """Models and data of runs, for the small print."""
    models = dict.fromkeys(run.recipe.model_words for run in runs)
    sources = [str(run.status["data"]) for run in runs if run.status.get("data")]
    data = dict.fromkeys(source.partition(" from ")[0] for source in sources)
    return "; ".join([*models, *data])


def figure_of_panels(
    drawn: Sequence[Panel], *, title: str, note: str = "", columns: int = 2, size: tuple[float, float] = PANEL
) -> Figure:
    """Panels side by side under a title that says what is found, with small print below.

    A title of the form ``Figure 3: …`` keeps its number only where a panel stands for one of the paper's.
    """
    columns = min(columns, len(drawn))
    if not any(panel.stands_for_papers for panel in drawn):
        points = max(panel.num_points for panel in drawn)
        title = f"Not the paper's figure yet, at most {points} points a panel. {title.partition(': ')[2]}"
    width = size[0] * columns
    with styled():
        rows = math.ceil(len(drawn) / columns)
        figure, axes = panels(rows, columns, width=size[0], height=size[1])
        for axis in axes[len(drawn) :]:
            axis.remove()
        for axis, panel in zip(axes, drawn, strict=False):
            _draw_panel(axis, panel, width=size[0])
        figure.suptitle(_literal(wrapped(title, width / 0.1)), fontsize=11.5, fontweight="bold")
        if note:
            figure.supxlabel(_literal(wrapped(note, width / 0.068)), fontsize=8.5, color=GREY)
    return figure


def _draw_panel(axis: Axes, panel: Panel, *, width: float) -> None:
    draw(axis, panel.chart)
    title = panel.chart.title
    if panel.letter and panel.stands_for_papers:
        title = f"({panel.letter}) {title}"
    lines = [wrapped(part, width / CHARACTER) for part in (title, panel.found) if part]
    axis.set_title("")  # the one in the middle
    room = 22 if panel.paper else 6  # for the tag
    axis.set_title(_literal("\n".join(lines)), fontsize=9.5, loc="left", pad=room)
    _mark_lines(axis)
    beside = panel.inside.count("\n") + 1 if panel.inside else 0
    _name_lines(axis, panel.chart.series, top=1.0 - LABEL_GAP * beside)
    if panel.paper:
        tag = {"boxstyle": "round,pad=0.25", "facecolor": "#e6e6e6", "edgecolor": "none"}
        axis.annotate(
            f"paper: {panel.paper}", (0.0, 1.0), xycoords="axes fraction", xytext=(3, 7),
            textcoords="offset points", va="bottom", ha="left", fontsize=8.5, color="#3d3d3d", bbox=tag,
        )  # fmt: skip
    if panel.inside:
        axis.annotate(
            _literal(panel.inside), (1.03, 1.0), xycoords="axes fraction", va="top", ha="left", fontsize=8,
            color=GREY,
        )  # fmt: skip


def _mark_lines(axis: Axes) -> None:
    """Few marks on long lines; hollow ones on lines that are not solid."""
    for line in axis.lines:
        if len(np.asarray(line.get_xdata())) > 2 * MARKS_A_LINE:
            line.set_markevery(1 / MARKS_A_LINE)
        if line.get_linestyle() in ("--", ":"):
            line.set_markerfacecolor("white")


def _name_lines(axis: Axes, series: Sequence[Series], *, top: float) -> None:
    """Name each line at its end, right of the panel and below ``top``, so that no name hides another."""
    curves = [one for one in series if one.shade is None]
    ends = []
    for one, line in zip(curves, axis.lines, strict=False):
        x, y = one.last
        if one.name and not one.entry and len(x):
            height = axis.transAxes.inverted().transform(axis.transData.transform((x[0], y[0])))[1]
            ends.append((float(np.clip(height, 0.0, 1.0)), one.name, line.get_color(), (x[0], y[0])))
    ends.sort(key=lambda end: end[0])
    heights = spread_out([end[0] for end in ends], gap=LABEL_GAP, top=top)
    for (_, name, colour, point), height in zip(ends, heights, strict=True):
        axis.annotate(
            _literal(name), point, xytext=(1.05, height), textcoords="axes fraction", color=colour,
            fontsize=8.5, va="center", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5, "relpos": (0.0, 0.5)},
        )  # fmt: skip


def spread_out(heights: Sequence[float], *, gap: float, top: float = 1.0) -> list[float]:
    """Ascending heights moved apart to about ``gap``, each as little as it can, all of them below ``top``.

    Example:
        >>> [round(height, 2) for height in spread_out([0.5, 0.5, 0.9], gap=0.1)]
        [0.45, 0.55, 0.9]
    """
    placed = [min(height, top) for height in heights]
    for _ in range(SPREADING):
        for number in range(1, len(placed)):
            missing = gap - (placed[number] - placed[number - 1])
            if missing > 0:
                placed[number - 1] -= missing / 2
                placed[number] += missing / 2
        if placed:
            placed[-1] = min(placed[-1], top)
    return placed


def wrapped(text: str, characters: float) -> str:
    """Each line of ``text`` broken so that it fits."""
    return "\n".join(textwrap.fill(line, max(12, int(characters))) for line in text.split("\n"))


def _literal(text: str) -> str:
    """Text in which matplotlib sees no formula."""
    return text.replace("$", r"\$")
