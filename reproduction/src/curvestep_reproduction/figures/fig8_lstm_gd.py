r"""GD against clipped GD on the 2-layer LSTM: figure 8 of the paper, and its quantitative comparison."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
from matplotlib.figure import Figure

from curvestep.report.chart import GRADIENT
from curvestep.report.results import on_common_steps, running_mean
from curvestep_reproduction.claims.statistics import measured
from curvestep_reproduction.figures.fig1_scatter import scatter_chart
from curvestep_reproduction.figures.fig4_curves import Curve, curve_chart, loss_chart
from curvestep_reproduction.figures.legend import LANGUAGE, colour_of, described, lettered, runs_of
from curvestep_reproduction.figures.plan import PaperFigure, Planned
from curvestep_reproduction.recipes import get_recipe
from curvestep_reproduction.training.run_folder import TrainedRun

ROWS = 5  # measurements in the running mean of the gradient norm
SETTINGS = ("lm-lr2", "lm-lr10clip0.25")  # gradient descent, and clipped


def compare(gd: TrainedRun, clipped: TrainedRun) -> tuple[float, float]:
    r"""How many times smaller clipping makes the gradients: as the paper predicts it, and measured.

    The paper takes the largest smoothness :math:`L_0 + L_1 M` from GD's run, M its largest gradient norm, and
    :math:`L_0` from the clipped run. It prints their ratio as the prediction; its theorems bound the gradient
    norm by :math:`\sqrt{\,\cdot\,\Delta/T}`, so the square root of the ratio is what they predict. Measured
    are means up to the step that both reached.
    """
    (gd_steps, gd_norms, _), (steps, norms, _) = measured(gd), measured(clipped)
    largest = gd.fit.L0 + gd.fit.L1 * float(gd_norms.max())
    with np.errstate(divide="ignore"):
        printed = float(np.divide(largest, clipped.fit.L0))
    end = min(gd_steps.max(), steps.max())
    return printed, float(gd_norms[gd_steps <= end].mean() / norms[steps <= end].mean())


def lstm_gd(*sides: Sequence[TrainedRun], title: str = "GD against clipped GD on the 2-layer LSTM") -> Figure:
    """Gradient norm and loss over the iterations, and a scatter of each: seeds of GD, seeds of clipped GD."""
    runs = list(chain(*sides))
    norms = []
    for side in sides:
        steps, values = on_common_steps(
            [running_mean(*measured(run)[:2], ROWS * run.recipe.probe_every) for run in side]
        )
        colour = colour_of(side[0].recipe)
        norms.append(Curve(label=side[0].recipe.label, steps=steps, values=values, colour=colour))
    charts = [
        curve_chart(norms, GRADIENT, title=f"gradient norm, mean of {ROWS} rows", log=True),
        loss_chart(runs),
        *map(scatter_chart, sides),
    ]
    return described(lettered(charts), runs, title=title)


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
    for name, found in zip(two_layer_settings(scale), map(LANGUAGE.__getitem__, SETTINGS), strict=True):
        recipe = get_recipe("ptb-lstm", scale, lr=found.lr, max_norm=found.max_norm)
        runs.append(Planned(name, recipe))
    return runs


FIG8 = PaperFigure(
    name="fig8",
    runs=two_layer_runs,
    title="Figure 8: GD against clipped GD on the 2-layer LSTM",
    caption="Plain and clipped gradient descent train the two-layer LSTM. Charts show gradient norms "
    "on the oracle, training losses, and smoothness against gradient norm.",
    draw=lambda results, title: lstm_gd(
        *map(results.shown, two_layer_settings(results.plan.scale)), title=title
    ),
)
