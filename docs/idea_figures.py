"""The two drawings of docs/idea.md, from formulas alone: python docs/idea_figures.py."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from curvestep.report.drawing import panels, save, styled

FOLDER = Path(__file__).parent / "images"
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#777777"
L0, L1 = 1.0, 2.0
LR, MAX_NORM = 0.5, 0.5
FRACTIONS = (0.0, 0.2, 0.4, 1.0)


def idea() -> Figure:
    """Step length against gradient norm: fixed, clipped, and the longest safe one."""
    figure, (panel,) = panels(1, 1, width=6.4, height=3.5)
    norms = np.linspace(0, 2.5, 400)
    safe = norms / (L0 + L1 * norms)
    panel.fill_between(norms, safe, 1.4, color=ORANGE, alpha=0.10, linewidth=0)
    panel.plot(norms, safe, color=GREY, linestyle="--")
    panel.plot(norms, LR * norms, color=ORANGE, linewidth=2.2)
    panel.plot(norms, LR * np.minimum(norms, MAX_NORM), color=BLUE, linewidth=2.2)
    panel.text(1.62, 0.93, "plain descent: lr · gradient norm", color=ORANGE, fontsize=11, ha="right")
    panel.text(1.25, 0.17, "clipped: at most lr · max_norm", color=BLUE, fontsize=11)
    panel.text(1.45, 0.44, "longest safe step", color=GREY, fontsize=11)
    panel.text(0.05, 1.06, "too long: the loss may rise", color=ORANGE, fontsize=11)
    panel.text(MAX_NORM + 0.03, 0.04, "max_norm", fontsize=11, color=BLUE)
    panel.plot([MAX_NORM] * 2, [0, LR * MAX_NORM], color=BLUE, linestyle=":")
    panel.set(xlim=(0, 2.5), ylim=(0, 1.2), xticks=[], yticks=[])
    panel.set_xlabel("gradient norm  (flat places left, sharp places right)", fontsize=11)
    panel.set_ylabel("step length", fontsize=11)
    panel.set_title("A clipped step stays safe where the loss is sharp", fontsize=12, fontweight="bold")
    return figure


def row() -> Figure:
    """The gradients of one measured step, and their secants."""
    figure, (panel,) = panels(1, 1, width=6.4, height=3.7)

    def loss(t: np.ndarray | float) -> np.ndarray | float:
        return 0.35 + 0.8 * np.cosh(2.2 * (np.asarray(t) - 0.72)) - 0.8

    way = np.linspace(-0.12, 1.12, 300)
    panel.plot(way, loss(way), color=GREY, linewidth=1.6)
    for fraction in FRACTIONS:
        slope = 0.8 * 2.2 * np.sinh(2.2 * (fraction - 0.72))
        reach = np.array([-0.085, 0.085]) / np.hypot(1, slope / 2)
        panel.plot(fraction + reach, loss(fraction) + slope * reach, color=ORANGE, linewidth=2.6, zorder=3)
        panel.plot(fraction, loss(fraction), "o", color=BLUE, markersize=8, zorder=4)
    for level, fraction in zip((0.10, -0.06, -0.22), FRACTIONS[1:], strict=True):
        panel.annotate("", (0, level), (fraction, level), arrowprops={"arrowstyle": "<->", "color": BLUE})
        words = "secant: change of gradient ÷ distance" if fraction == 1 else "secant"
        panel.text(
            fraction + 0.015 if fraction < 1 else 0.5,
            level + (0.0 if fraction < 1 else 0.05),
            words,
            color=BLUE,
            fontsize=10,
            va="center",
            ha="left" if fraction < 1 else "center",
        )
    for fraction, words, side in ((0.0, "x", "left"), (1.0, "x + d", "left")):
        panel.text(
            fraction + 0.03, loss(fraction) + (0.07 if fraction == 0 else -0.14), words, fontsize=12, ha=side
        )
    panel.text(0.50, 1.02, "orange: a gradient, all of one batch", color=ORANGE, fontsize=10.5)
    panel.set(xlim=(-0.15, 1.2), ylim=(-0.3, 1.75), xticks=[], yticks=[])
    panel.set_xlabel("way along the step d", fontsize=11)
    panel.set_ylabel("loss of the batch", fontsize=11)
    panel.set_title("A row: how the gradient changes along one step", fontsize=12, fontweight="bold")
    return figure


if __name__ == "__main__":
    with styled():
        for figure, name in ((idea(), "idea"), (row(), "row")):
            png, _ = save(figure, FOLDER / name)
            png.unlink()  # pages show the SVG
