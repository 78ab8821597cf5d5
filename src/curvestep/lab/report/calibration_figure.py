"""Where the step stops being safe: the curve of a calibration."""

from __future__ import annotations

from statistics import median

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvestep.calibration.result import Calibration
from curvestep.lab.paper.style import COLOURS, log_axes, panels, styled

GREY = "#555555"  # no batch has it


def calibration(cal: Calibration, *, title: str = "Where the step stops being safe") -> Figure:
    r"""Change of the gradient and of the loss over steps of growing length, one line a batch.

    Left :math:`h\,\hat L(h)` with its limit (along the signs of the gradient, the change of the slope), right
    the loss after the step less the loss before it. Filled marks are safe steps, open ones are not; the band
    is the 90 % interval of the safe step.

    Args:
        cal: What :func:`curvestep.calibrate` returned.
        title: Title of the figure.
    """
    step = median(batch.safe_step for batch in cal.curve)
    low, high = (end / cal.lr * step for end in cal.lr_interval)
    with styled():
        figure, (left, right) = panels(1, 2, width=4.8)
        for panel in (left, right):
            if len(cal.curve) > 1:
                panel.axvspan(low, high, color=GREY, alpha=0.15, linewidth=0)
            panel.axvline(step, color=GREY, linewidth=1.2, label=f"safe step {step:.3g}")
            panel.set_xlabel("step $h$")
        losses = []
        for number, batch in enumerate(cal.curve):
            colour, name = COLOURS[number % len(COLOURS)], f"batch {number + 1}"
            steps, safe = np.array([[p.step, p.safe] for p in batch.points]).T
            losses.append(np.array([p.loss for p in batch.points]) - batch.loss)
            _line(left, steps, np.array([p.kappa for p in batch.points]), safe > 0, colour, name)
            _line(right, steps, losses[-1], safe > 0, colour, name)
        left.axhline(cal.max_kappa, color="black", linestyle="--", linewidth=1.0)
        left.set_ylabel(
            r"change of the slope along the step, $\kappa(h)$"
            if cal.along_signs
            else r"change of the gradient, $h\,\hat{L}(h)$"
        )
        right.axhline(0.0, color="black", linestyle="--", linewidth=1.0)
        right.set_ylabel("change of the loss over the step")
        # A step far beyond the safe ones may raise the loss a thousandfold, and is not the point.
        lowest = min(float(np.nanmin(values)) for values in losses)
        highest = max(float(np.max(values[np.isfinite(values)])) for values in losses)
        right.set_ylim(1.15 * lowest, min(max(highest, -0.2 * lowest), -0.8 * lowest))
        log_axes(left)
        log_axes(right, y=False)
        left.legend(loc="best")
        figure.suptitle(title, fontsize=11, fontweight="bold")
        words = f"{cal.optimizer}: lr {cal.lr:.3g}{cal.threshold}; {cal.num_gradients} gradients"
        figure.supxlabel(words, fontsize=7.5, color=GREY)
    return figure


def _line(
    panel: Axes, steps: np.ndarray, values: np.ndarray, safe: np.ndarray, colour: str, name: str
) -> None:
    shown = np.isfinite(values)
    panel.plot(steps[shown], values[shown], color=colour, linewidth=1.0, label=name)
    for mask, fill in ((shown & safe, colour), (shown & ~safe, "white")):
        panel.plot(steps[mask], values[mask], "o", color=colour, markerfacecolor=fill, markersize=4.5)
