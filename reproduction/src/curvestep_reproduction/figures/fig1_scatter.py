r"""Smoothness against gradient norm along training: figures 1, 2, 3 and 5 of the paper.

Each panel is one setting with all its seeds: a point a measurement, coloured by iteration, on axes of its
own, as in the paper. Above it stand the correlation of logs, the mean over the seeds, and how many rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.figure import Figure

from curvestep.report.chart import GRADIENT, SMOOTHNESS, Axis, Chart, Series
from curvestep_reproduction.claims.claims import MissingRuns
from curvestep_reproduction.claims.statistics import (
    as_correlation,
    correlations,
    log_spread,
    measured,
    variation,
)
from curvestep_reproduction.figures import legend
from curvestep_reproduction.figures.layout import (
    LEAST_POINTS,
    PANEL,
    SMALL_PANEL,
    Panel,
    count_words,
    figure_of_panels,
    trained_on,
)
from curvestep_reproduction.figures.plan import PaperFigure, Results
from curvestep_reproduction.training.run_folder import TrainedRun

ROOM = 1.05  # a linear axis ends this far beyond its largest point
NOTE = (
    "A point is one measurement, coloured by iteration. r: correlation of the logarithms within stretches of "
    "constant lr, mean over seeds with 90 % interval."
)
# What the paper finds in the panels, in its words.
PAPER_SAYS = {
    legend.BY_HAND: "strong",
    legend.SMALL_LR: "much less",
    legend.SMALL_LR_CLIPPED: "much less",
    legend.MOMENTUM: "none",
    legend.LARGE_LR_IMAGES: "much weaker",
    legend.CLIPPED_IMAGES: "present",
    legend.LONG: "lasts 200 epochs",
}


def scatter(panels: Sequence[Panel], runs: Sequence[TrainedRun], *, title: str) -> Figure:
    """Panels of points side by side, at most three in a row."""
    size = SMALL_PANEL if len(panels) > 2 else PANEL
    note = f"{NOTE} {trained_on(runs)}."
    if any(run.recipe.lr_drops for run in runs):
        note += " Groups of one colour: the learning rate dropped between them."
    return figure_of_panels(panels, title=title, note=note, columns=3, size=size)


def scatter_panel(
    runs: Sequence[TrainedRun], *, log: bool = True, letter: str = "", paper: str = "", title: str = ""
) -> Panel:
    """The seeds of one setting: their points, and above them the correlation."""
    columns = [measured(run) for run in runs]
    steps, norms, smoothness = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    title = title or legend.setting_words(runs[0])
    if len(steps) == 0:
        chart = Chart("scatter", title, Axis(GRADIENT), Axis(SMOOTHNESS), ())
        return Panel(chart, letter=letter, inside="nothing was measured")
    if log:
        axes = Axis(GRADIENT, log=True), Axis(SMOOTHNESS, log=True)
    else:
        ends = [(0.0, ROOM * float(values.max())) for values in (norms, smoothness)]
        axes = Axis(GRADIENT, range=ends[0]), Axis(SMOOTHNESS, range=ends[1])
    points = Series("", norms, smoothness, dash="", mark="circle", shade=steps)
    found = f"{_correlation_words(runs)}{count_words(len(steps), runs)}"
    return Panel(Chart("scatter", title, *axes, (points,)), letter=letter, paper=paper, found=found)


def _correlation_words(runs: Sequence[TrainedRun]) -> str:
    """The correlation of logs, as the panels show it; empty where there are too few rows."""
    try:
        z = correlations(runs)
    except MissingRuns:
        return ""
    if len(runs) == 1:
        return f"r = {math.tanh(z.mean):.2f}\n"
    return f"r = {as_correlation(z)}\n"


def correlation_of(runs: Sequence[TrainedRun]) -> str:
    """The mean correlation of logs with two digits, for a title; empty where there are too few rows."""
    if sum(len(measured(run)[0]) for run in runs) < LEAST_POINTS:
        return ""
    try:
        return f"{math.tanh(correlations(runs).mean):.2f}"
    except MissingRuns:
        return ""


# The figures


def _shown(name: str, words: dict[str, str]) -> Callable[[Results], Figure]:
    """The panels of settings that have a run, each with its letter in the paper, titled by correlations."""
    settings = tuple(words)

    def draw(results: Results) -> Figure:
        panels = []
        found = []
        runs = []
        for setting in results.settings_with_runs(settings):
            shown = results.runs_to_draw(setting)
            letter = legend.LETTERS[settings.index(setting)]
            panels.append(scatter_panel(shown, letter=letter, paper=PAPER_SAYS[setting]))
            if correlation_of(shown):
                found.append(f"{correlation_of(shown)} {words[setting]}")
            runs += shown
        correlated = f"smoothness and gradient norm have r = {', '.join(found)}"
        title = f"{name}: {correlated if found else 'too few rows for a correlation'}"
        return scatter(panels, runs, title=title)

    return draw


def _draw_one(results: Results) -> Figure:
    runs = results.runs_to_draw(legend.BY_HAND)
    panel = scatter_panel(runs, paper=PAPER_SAYS[legend.BY_HAND])
    title = "Figure 1: too few rows for a correlation"
    if correlation_of(runs):
        factor = math.exp(log_spread(runs, variation).mean)
        title = (
            f"Figure 1: smoothness spans a factor of {factor:.1f} and follows the gradient norm, r = "
            f"{correlation_of(runs)}"
        )
    return scatter([panel], runs, title=title)


def _draw_linear_and_long(results: Results) -> Figure:
    """Figure 1 on linear axes, the panel (a); the longer run beside it where there is one."""
    runs = results.runs_to_draw(legend.BY_HAND)  # an error without it: (a) is the first panel
    words = f"linear axes, {legend.length_words(runs[0])}"
    panels = [scatter_panel(runs, log=False, letter="a", paper=PAPER_SAYS[legend.BY_HAND], title=words)]
    title = f"Figure 5: r = {correlation_of(runs) or 'unknown'} over {words.partition(', ')[2]}"
    if legend.LONG in results.settings_with_runs([legend.BY_HAND, legend.LONG]):
        longer = results.runs_to_draw(legend.LONG)
        words = legend.length_words(longer[0])
        panels.append(scatter_panel(longer, letter="b", paper=PAPER_SAYS[legend.LONG], title=words))
        title += f", {correlation_of(longer) or 'unknown'} over {words}"
        runs = [*runs, *longer]
    return scatter(panels, runs, title=title)


FIG1 = PaperFigure(
    name="fig1",
    runs=lambda scale: legend.runs_of(scale, [legend.BY_HAND]),
    title="Figure 1: smoothness against gradient norm, language model",
    caption="A point is a measurement along training, coloured by iteration.",
    draw=_draw_one,
)
FIG2 = PaperFigure(
    name="fig2",
    runs=lambda scale: legend.runs_of(
        scale, [legend.BY_HAND, legend.SMALL_LR, legend.SMALL_LR_CLIPPED, legend.ALWAYS_CLIPPED]
    ),
    title="Figure 2: smoothness against gradient norm, language model",
    caption="A panel is one of the paper's settings, a point a measurement, coloured by iteration.",
    draw=_shown(
        "Figure 2",
        {
            legend.BY_HAND: "at lr 30 with clipping",
            legend.SMALL_LR: "at lr 2 without",
            legend.SMALL_LR_CLIPPED: "at lr 2 with it",
        },
    ),
)
FIG3 = PaperFigure(
    name="fig3",
    runs=lambda scale: legend.runs_of(scale, legend.IMAGES),
    title="Figure 3: smoothness against gradient norm, ResNet20",
    caption="Panels show the settings (a) to (c) that this scale has, past the start of training. "
    "Correlations are within stretches of constant learning rate.",
    draw=_shown(
        "Figure 3",
        {
            legend.MOMENTUM: "with momentum",
            legend.LARGE_LR_IMAGES: "at lr 1",
            legend.CLIPPED_IMAGES: "at lr 5 with clipping",
        },
    ),
)
FIG5 = PaperFigure(
    name="fig5",
    # At laptop scale a run that is half as long again.
    runs=lambda scale: [
        *legend.runs_of(scale, [legend.BY_HAND]),
        *legend.run_again(scale, legend.LONG, steps=600, probe_every=10),
        *legend.long_measured_runs(scale),
    ],
    title="Figure 5: figure 1 on linear axes, and more iterations",
    caption="(a) is figure 1 on linear axes. (b) is the same setting for more iterations, if run.",
    draw=_draw_linear_and_long,
)
