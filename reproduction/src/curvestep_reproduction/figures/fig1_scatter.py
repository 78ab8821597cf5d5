r"""Smoothness against gradient norm along training: figures 1, 2, 3 and 5 of the paper.

Each panel is one setting with all its seeds: a point a measurement, coloured by iteration, on axes of its
own, as in the paper. Above it stands the correlation of logs, the mean over the seeds.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
from matplotlib.figure import Figure

from curvestep.report.chart import GRADIENT, SMOOTHNESS, Axis, Chart, Series
from curvestep_reproduction.claims.claims import MissingRuns
from curvestep_reproduction.claims.statistics import correlations, measured
from curvestep_reproduction.figures import legend
from curvestep_reproduction.figures.plan import PaperFigure, Results
from curvestep_reproduction.training.run_folder import TrainedRun

ROOM = 1.05  # a linear axis ends this far beyond its largest point


def scatter(
    settings: Sequence[Sequence[TrainedRun]],
    *,
    title: str = "Smoothness against gradient norm",
    linear: Sequence[int] = (),
    letters: str = legend.LETTERS,
) -> Figure:
    """One panel a setting, with its seeds, on axes of its own, which of the panels ``linear`` are linear."""
    charts = [scatter_chart(runs, log=panel not in linear) for panel, runs in enumerate(settings)]
    size = legend.SMALL_PANEL if len(charts) > 1 else legend.PANEL
    return legend.described(
        legend.lettered(charts, letters), list(chain(*settings)), title=title, columns=3, size=size
    )


def scatter_chart(runs: Sequence[TrainedRun], *, log: bool = True) -> Chart:
    """The seeds of one setting: their points, and above them the correlation."""
    steps, norms, smoothness = map(np.concatenate, zip(*map(measured, runs), strict=True))
    axes = Axis(GRADIENT, log=log), Axis(SMOOTHNESS, log=log)
    if len(steps) == 0:
        return Chart("scatter", legend.setting_words(runs[0]), *axes, (), words="nothing was measured")
    if not log:
        ends = [(0.0, ROOM * float(values.max())) for values in (norms, smoothness)]
        axes = Axis(GRADIENT, range=ends[0]), Axis(SMOOTHNESS, range=ends[1])
    points = Series("", norms, smoothness, dash="", mark="circle", shade=steps)
    title = textwrap.fill(legend.setting_words(runs[0]), legend.TITLE_CHARACTERS)
    return Chart("scatter", f"{title}{_correlation_words(runs)}", *axes, (points,))


def _correlation_words(runs: Sequence[TrainedRun]) -> str:
    try:
        return f"\ncorrelation of logs {math.tanh(correlations(runs).mean):.2f}"
    except MissingRuns:
        return ""


# The figures


def _shown(*settings: str) -> Callable[[Results, str], Figure]:
    """The panels of settings that have a run, each with its letter in the paper."""

    def draw(results: Results, title: str) -> Figure:
        found = results.there(settings)
        letters = "".join(legend.LETTERS[settings.index(name)] for name in found)
        return scatter(list(map(results.shown, found)), title=title, letters=letters)

    return draw


def _draw_one(results: Results, title: str) -> Figure:
    return scatter([results.shown(legend.BY_HAND)], title=title)


def _draw_linear_and_long(results: Results, title: str) -> Figure:
    """Figure 1 on linear axes, the panel (a); the longer run beside it where there is one."""
    results.shown(legend.BY_HAND)  # an error without it: (a) is the first panel
    found = results.there([legend.BY_HAND, legend.LONG])
    return scatter(list(map(results.shown, found)), title=title, linear=[0], letters="ab")


FIG1 = PaperFigure(
    name="fig1",
    runs=lambda scale: legend.runs_of(scale, [legend.BY_HAND]),
    title="Figure 1: smoothness against gradient norm, language model",
    caption="A point is a measurement along training; later ones are lighter.",
    draw=_draw_one,
)
FIG2 = PaperFigure(
    name="fig2",
    runs=lambda scale: legend.runs_of(
        scale, [legend.BY_HAND, legend.SMALL_LR, legend.SMALL_LR_CLIPPED, legend.ALWAYS_CLIPPED]
    ),
    title="Figure 2: smoothness against gradient norm, language model",
    caption="A panel is one of the paper's settings, a point a measurement; later ones are lighter.",
    draw=_shown(legend.BY_HAND, legend.SMALL_LR, legend.SMALL_LR_CLIPPED),
)
FIG3 = PaperFigure(
    name="fig3",
    runs=lambda scale: legend.runs_of(scale, legend.IMAGES),
    title="Figure 3: smoothness against gradient norm, ResNet20",
    caption="Panels show the settings (a) to (c) that this scale has, past the start of training. "
    "Correlations are within stretches of constant learning rate.",
    draw=_shown(*legend.IMAGES),
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
