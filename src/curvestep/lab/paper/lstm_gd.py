r"""GD against clipped GD on the 2-layer LSTM: figure 8 of the paper, and its quantitative comparison."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvestep.fit.fit import fit_smoothness
from curvestep.lab.paper.curves import SMOOTHING, Curve, draw, gather
from curvestep.lab.paper.scatter import GRADIENT, measured, scatter_panel
from curvestep.lab.paper.style import describe, loaded, log_axes, panels, styled
from curvestep.lab.run.folder import Run
from curvestep.smoothness.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Comparison:
    r"""How much smaller clipping makes the gradients, predicted and measured.

    The paper takes the largest smoothness :math:`L_0 + L_1 M` from GD's run and :math:`L_0` from the clipped
    run. It prints their ratio as the prediction; its theorems bound the gradient norm by
    :math:`\sqrt{\,\cdot\,\Delta/T}`, so the square root of the ratio is what they predict.

    Args:
        largest_smoothness: :math:`L_0 + L_1 M` of the run without clipping, M its largest gradient norm.
        L0: :math:`L_0` of the clipped run.
        printed: The paper's prediction, ``largest_smoothness / L0``.
        corrected: What the theorems predict, its square root.
        measured: Mean gradient norm without clipping over the mean with it, up to the step both reached.
    """

    largest_smoothness: float
    L0: float
    printed: float
    corrected: float
    measured: float

    def __str__(self) -> str:
        return (
            f"gradient norms, GD over clipped GD: measured {self.measured:.2f}, "
            f"predicted {self.corrected:.2f} (as printed in the paper {self.printed:.2f})"
        )


def compare(gd: Run | str | Path, clipped: Run | str | Path) -> Comparison:
    """The quantitative comparison of the paper, from the traces of two runs."""
    gd, clipped = loaded(gd), loaded(clipped)
    plain, held = (fit_smoothness(Trace.load(run.trace_path)) for run in (gd, clipped))
    (gd_steps, gd_norms, _), (steps, norms, _) = measured(gd), measured(clipped)
    largest = plain.L0 + plain.L1 * float(gd_norms.max())
    printed = largest / held.L0 if held.L0 > 0 else math.inf
    end = min(gd_steps.max(), steps.max())
    ratio = float(gd_norms[gd_steps <= end].mean() / norms[steps <= end].mean())
    return Comparison(
        largest_smoothness=largest, L0=held.L0, printed=printed, corrected=math.sqrt(printed), measured=ratio
    )


def lstm_gd(gd: Run | str | Path, clipped: Run | str | Path, *, title: str = "") -> Figure:
    """Gradient norm and loss over the iterations, and the scatter of each run.

    Args:
        gd: The run without clipping.
        clipped: The run with clipping.
        title: Title of the figure.
    """
    runs = [loaded(gd), loaded(clipped)]
    with styled():
        figure, axes = panels(2, 2, width=5.0, height=4.0)
        _norms(axes[0], runs)
        axes[1].set_title(f"training loss, running mean of {SMOOTHING} steps")
        axes[1].set_ylabel("training loss")
        draw(axes[1], gather(runs, "loss", "train", smoothing=SMOOTHING))
        axes[1].legend(loc="best")
        for panel, run in zip(axes[2:], runs, strict=True):
            scatter_panel(panel, run)
        try:
            words = f"\n{compare(*runs)}"
        except ValueError:  # a run too short to fit
            words = ""
        describe(figure, (title or "GD against clipped GD on the 2-layer LSTM") + words, runs)
    return figure


def _norms(panel: Axes, runs: list[Run]) -> None:
    panel.set_title("gradient norm")
    found = []
    for run in runs:
        steps, norms, _ = measured(run)
        found.append(Curve(label=run.recipe.label, steps=steps, values=np.atleast_2d(norms)))
    draw(panel, found)
    log_axes(panel, x=False)
    panel.set_ylabel(GRADIENT)
    panel.legend(loc="best")
