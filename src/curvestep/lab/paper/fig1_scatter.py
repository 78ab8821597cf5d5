r"""Smoothness against gradient norm along training: figures 1, 2, 3 and 5 of the paper.

Each panel is one setting with all its seeds: a point a measurement, coloured by iteration, on axes of its
own, as in the paper. Above it stands the correlation of logs, the mean over the seeds.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from curvestep.display.chart import GRADIENT, SMOOTHNESS, Axis, Chart, Series
from curvestep.lab.paper.legend import (
    ALWAYS_CLIPPED,
    BY_HAND,
    IMAGES,
    LONG,
    SMALL_LR,
    SMALL_LR_CLIPPED,
    legend_runs,
    run_again,
)
from curvestep.lab.paper.plan import PaperFigure, Picture, Results
from curvestep.lab.paper.style import (
    LETTERS,
    SMALL_PANEL,
    TITLE_CHARACTERS,
    described,
    lettered,
    loaded,
    setting,
)
from curvestep.lab.paper.verdicts.claims import MissingRuns
from curvestep.lab.paper.verdicts.statistics import correlation, measured, spread
from curvestep.lab.run.folder import Run

Runs = Run | str | Path | Sequence[Run]
ROOM = 1.05  # a linear axis ends this far beyond its largest point


def scatter(
    runs: Sequence[Runs],
    *,
    title: str = "Smoothness against gradient norm",
    log: Sequence[bool] = (),
    letters: str = LETTERS,
) -> Figure:
    """One panel a setting, each on axes of its own.

    Args:
        runs: For each panel a run, a run folder with a trace, or the seeds of one setting.
        title: Title of the figure.
        log: Logarithmic axes for each panel; default for all.
        letters: Of the panels; default (a), (b), … where there are several.
    """
    found = [[loaded(run)] if isinstance(run, (Run, str, Path)) else list(run) for run in runs]
    if not found:
        raise ValueError("`runs` must be at least one run folder, got none.")
    scales = log or [True] * len(found)
    charts = [scatter_chart(seeds, log=scale) for seeds, scale in zip(found, scales, strict=True)]
    everything = [run for seeds in found for run in seeds]
    return described(lettered(charts, letters), everything, title=title, columns=3, size=SMALL_PANEL)


def scatter_chart(runs: Sequence[Run], *, log: bool = True) -> Chart:
    """The seeds of one setting: their points, and above them the correlation."""
    steps, norms, smoothness = (
        np.concatenate(values) for values in zip(*(measured(run) for run in runs), strict=True)
    )
    axes = Axis(GRADIENT, log=log), Axis(SMOOTHNESS, log=log)
    if len(steps) == 0:
        return Chart("scatter", setting(runs[0]), *axes, words="nothing was measured")
    if not log:
        axes = (
            Axis(GRADIENT, range=(0.0, ROOM * float(norms.max()))),
            Axis(SMOOTHNESS, range=(0.0, ROOM * float(smoothness.max()))),
        )
    points = Series("", norms, smoothness, dash="", mark="circle", shade=steps)
    title = textwrap.fill(setting(runs[0]), TITLE_CHARACTERS)
    return Chart("scatter", f"{title}{_correlation_words(runs)}", *axes, (points,))


def _correlation_words(runs: Sequence[Run]) -> str:
    try:
        return f"\ncorrelation of logs {spread(runs, correlation).mean:.2f}"
    except MissingRuns:
        return ""


# The figures


def _shown(*settings: str) -> Callable[[Results, str], Figure]:
    """The panels of settings that have a run, each with its letter in the paper."""

    def draw(results: Results, title: str) -> Figure:
        found = results.there(settings)
        letters = "".join(LETTERS[settings.index(setting)] for setting in found)
        panels = [results.shown(setting) for setting in found]
        return scatter(panels, title=title, letters=letters if len(settings) > 1 else LETTERS)

    return draw


_FIG5 = {BY_HAND: "a", LONG: "b"}


def _draw_linear_and_long(results: Results, title: str) -> Figure:
    """Figure 1 on linear axes; the longer run beside it where there is one."""
    found = results.there([BY_HAND, LONG])
    letters = "".join(_FIG5[setting] for setting in found)
    logs = [setting == LONG for setting in found]
    return scatter([results.shown(setting) for setting in found], title=title, log=logs, letters=letters)


FIG1 = PaperFigure(
    name="fig1",
    runs=lambda scale: legend_runs(scale, [BY_HAND]),
    pictures=(
        Picture(
            name="fig1",
            title="Figure 1: smoothness against gradient norm, language model",
            caption="A point is a measurement along training; later ones are lighter.",
            draw=_shown(BY_HAND),
        ),
    ),
)
FIG2 = PaperFigure(
    name="fig2",
    runs=lambda scale: legend_runs(scale, [BY_HAND, SMALL_LR, SMALL_LR_CLIPPED, ALWAYS_CLIPPED]),
    pictures=(
        Picture(
            name="fig2",
            title="Figure 2: smoothness against gradient norm, language model",
            caption="The paper's three settings. A point is a measurement; later ones are lighter.",
            draw=_shown(BY_HAND, SMALL_LR, SMALL_LR_CLIPPED),
        ),
    ),
)
FIG3 = PaperFigure(
    name="fig3",
    runs=lambda scale: legend_runs(scale, IMAGES),
    pictures=(
        Picture(
            name="fig3",
            title="Figure 3: smoothness against gradient norm, ResNet20",
            caption="The paper's settings (a) to (c), those that this scale has, past the start of training. "
            "Correlations are within stretches of constant learning rate.",
            draw=_shown(*IMAGES),
        ),
    ),
)
FIG5 = PaperFigure(
    name="fig5",
    # At laptop scale a run that is half as long again.
    runs=lambda scale: [
        *legend_runs(scale, [BY_HAND]),
        *run_again(scale, LONG, steps=600, probe_every=10),
    ],
    pictures=(
        Picture(
            name="fig5",
            title="Figure 5: figure 1 on linear axes, and more iterations",
            caption="(a) Figure 1 on linear axes. (b) The same setting for more iterations, if run.",
            draw=_draw_linear_and_long,
        ),
    ),
)
