r"""GD against clipped GD on the 2-layer LSTM: figure 8 of the paper, and its quantitative comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from matplotlib.figure import Figure

from curvestep.report.chart import GRADIENT, Series
from curvestep.report.results import on_common_steps
from curvestep_reproduction.claims.statistics import measured
from curvestep_reproduction.figures.fig1_scatter import scatter_panel
from curvestep_reproduction.figures.fig4_curves import Curve, curve_panel, loss_panel
from curvestep_reproduction.figures.layout import (
    Panel,
    dash_of,
    figure_of_panels,
    look_of,
    short_label,
    trained_on,
)
from curvestep_reproduction.figures.legend import LANGUAGE, runs_of
from curvestep_reproduction.figures.plan import PaperFigure, Planned, Results
from curvestep_reproduction.recipes import get_recipe
from curvestep_reproduction.training.run_folder import TrainedRun

ROWS = 5  # measurements in the running median of the gradient norm
PAPERS_TOP = 25.0  # M L1 + L0 that the paper reads off GD's points
PAPERS_L0 = 5.0  # that it reads off those of clipped GD
PAPERS_L1 = 10.0  # likewise
SETTINGS = ("lm-lr2", "lm-lr10clip0.25")  # gradient descent, and clipped


def compare(gd: TrainedRun, clipped: TrainedRun) -> tuple[float, float]:
    r"""How many times smaller clipping makes the gradients: as the paper predicts it, and measured.

    The paper takes the largest smoothness :math:`L_0 + L_1 M` from GD's run, M its largest gradient norm, and
    :math:`L_0` from the clipped run. It prints their ratio as the prediction; its theorems bound the gradient
    norm by :math:`\sqrt{\,\cdot\,\Delta/T}`, so the square root of the ratio is what they predict. Measured
    are means up to the step that both reached.
    """
    gd_steps, gd_norms, _ = measured(gd)
    steps, norms, _ = measured(clipped)
    largest = gd.fit.L0 + gd.fit.L1 * float(gd_norms.max())
    with np.errstate(divide="ignore"):
        printed = float(np.divide(largest, clipped.fit.L0))
    end = min(gd_steps.max(), steps.max())
    return printed, float(gd_norms[gd_steps <= end].mean() / norms[steps <= end].mean())


def lstm_gd(gd: Sequence[TrainedRun], clipped: Sequence[TrainedRun]) -> Figure:
    """Gradient norm and loss over the iterations, and a scatter of each, with the paper's own lines."""
    runs = [*gd, *clipped]
    norms = []
    for side in (gd, clipped):
        steps, values = on_common_steps([_running_median(run) for run in side])
        recipe = side[0].recipe
        colour, mark = look_of(recipe)
        look = {"colour": colour, "mark": mark, "dash": dash_of(recipe)}
        norms.append(
            Curve(label=short_label(recipe), steps=steps, values=values, num_seeds=len(side), **look)
        )
    by_seed = {run.recipe.seed: run for run in gd}
    pairs = [(by_seed[run.recipe.seed], run) for run in clipped if run.recipe.seed in by_seed]
    logs = [math.log(compare(*pair)[1]) for pair in pairs]
    words = f"{math.exp(np.mean(logs)):.1f} times" if logs else "beside"
    title = "gradient norm"
    panels = [
        curve_panel(norms, GRADIENT, title=title, log=True, letter="a", paper="about 3 times"),
        loss_panel(runs, letter="b", paper="GD lowers the loss"),
        with_line(scatter_panel(gd, letter="c", paper="M L1 + L0 = 25"), L0=PAPERS_TOP, L1=0.0),
        with_line(scatter_panel(clipped, letter="d", paper="L0 = 5, L1 = 10"), L0=PAPERS_L0, L1=PAPERS_L1),
    ]
    note = (
        f"(a): median of {ROWS} rows. Lines in (c, d): what the paper reads off its own, whose estimate sums "
        f"over batches. {trained_on(runs)}."
    )
    title = f"Figure 8: GD's gradients are {words} those of clipped GD, {clipped[0].recipe.label}"
    return figure_of_panels(panels, title=title, note=note)


def _running_median(run: TrainedRun) -> tuple[np.ndarray, np.ndarray]:
    """Steps and the median of the last few measured gradient norms: single large rows do not smear."""
    steps, norms, _ = measured(run)
    medians = [np.median(norms[max(0, row + 1 - ROWS) : row + 1]) for row in range(len(norms))]
    return steps, np.array(medians)


def with_line(panel: Panel, *, L0: float, L1: float) -> Panel:
    """The panel with the line L0 + L1 g over its points."""
    chart = panel.chart
    if not chart.series:
        return panel
    norms = chart.series[0].x
    ends = np.linspace(norms.min(), norms.max(), 50)
    line = Series("", ends, L0 + L1 * ends, colour="bad", dash="dash")
    return replace(panel, chart=replace(chart, series=(*chart.series, line)))


def two_layer_settings(scale: str) -> tuple[str, str]:
    """GD and clipped GD on the two-layer LSTM; at larger scales the legend's names are AWD-LSTM's."""
    at_size = "lstm-lr2", "lstm-lr10clip0.25"
    return at_size if scale == "paper" else SETTINGS


def two_layer_runs(scale: str) -> list[Planned]:
    """Runs of both settings; none at the scale ``epoch``, which has AWD-LSTM alone."""
    if scale == "epoch":
        return []
    if scale != "paper":
        return runs_of(scale, two_layer_settings(scale))
    runs = []
    for name, of_legend in zip(two_layer_settings(scale), SETTINGS, strict=True):
        line = LANGUAGE[of_legend]
        recipe = get_recipe("ptb-lstm", scale, lr=line.lr, max_norm=line.max_norm)
        runs.append(Planned(name, recipe))
    return runs


def _draw(results: Results) -> Figure:
    gd, clipped = two_layer_settings(results.plan.scale)
    return lstm_gd(results.runs_to_draw(gd), results.runs_to_draw(clipped))


FIG8 = PaperFigure(
    name="fig8",
    runs=two_layer_runs,
    title="Figure 8: GD against clipped GD on the 2-layer LSTM",
    caption="Plain and clipped gradient descent train the two-layer LSTM. Charts show gradient norms "
    "on the oracle, training losses, and smoothness against gradient norm.",
    draw=_draw,
)
