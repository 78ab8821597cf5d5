"""The figures of the synthetic experiment, redrawn from its saved numbers: figure 7 of the paper and more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from curvestep.lab.paper.claims import CONTRADICTED, SUPPORTED, Evidence, MissingRuns
from curvestep.lab.paper.plan import PaperFigure, Picture, Results, Statement
from curvestep.lab.paper.style import COLOURS, panels, save, styled
from curvestep.lab.paper.synthetic import METHODS, SUMMARY, SyntheticResult, load_synthetic, run_synthetic

Array = NDArray[Any]

GD, CLIPPED = COLOURS[0], COLOURS[1]
NUM_LINES = 6  # step sizes shown in each of the six panels


def trajectories(result: SyntheticResult, numbers: dict[str, Array]) -> Figure:
    """The six panels of the paper: distance, value and derivative, without and with clipping."""
    quantities = (
        ("|x|", np.abs),
        ("f(x) = x⁴", lambda x: x**4),
        ("|f′(x)| = 4|x|³", lambda x: np.abs(4 * x**3)),
    )
    with styled():
        figure, axes = panels(2, 3, width=3.7, height=3.0)
        for row, (name, title) in enumerate((("gd", "Gradient descent"), ("clipped", "Clipped GD"))):
            lrs, points = numbers[f"{name}_lrs"], numbers[f"{name}_points"]
            best_lr = result.gd_best_lr if name == "gd" else result.clipped_best_lr
            shown = _around(int(np.argmin(np.abs(lrs - best_lr))), len(lrs))
            for column, (label, quantity) in enumerate(quantities):
                panel = axes[3 * row + column]
                for order, index in enumerate(shown):
                    _trajectory(panel, quantity, points[:, index], lrs[index], order, lrs[index] == best_lr)
                panel.set(yscale="log", title=f"{title}: {label}", xlim=(0, len(points) - 1))
                panel.set_xlabel("iteration" if row else "")
            axes[3 * row].legend(
                title="step size",
                loc="upper right",
                title_fontsize=7.5,
                ncols=2,
                handlelength=1.0,
                columnspacing=0.7,
            )
        threshold = result.config.max_norm
        figure.suptitle(f"x⁴ from {result.config.x0:g}; clipping threshold {threshold:g}", fontweight="bold")
        figure.supxlabel(
            f"after {result.config.num_steps} iterations the best step sizes (thick) reach |f′| = "
            f"{result.gd_grad_norm:.2g} and {result.clipped_grad_norm:.2g}; a cross is a divergence, a band "
            "a step that bounces for ever",
            fontsize=8,
            color="#555555",
        )
    return figure


def _around(best: int, num: int) -> list[int]:
    """Two larger step sizes than the best, the best, and smaller ones."""
    first = max(0, min(best - 2, num - NUM_LINES))
    return list(range(first, min(num, first + NUM_LINES)))


def _trajectory(panel: Axes, quantity: Any, points: Array, lr: float, order: int, best: bool) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        values = quantity(points)
        values = np.where((values > 0) & (values < 1e3 * values[0]), values, np.nan)
    panel.plot(
        values,
        color=COLOURS[order % len(COLOURS)],
        linewidth=2.6 if best else 1.0,
        marker="x" if np.isnan(values[-1]) else None,
        markevery=[max(0, int(np.isfinite(values).sum()) - 1)],
        label=f"{lr:.2e}",
        zorder=3 if best else 2,
    )


def jittered(result: SyntheticResult, numbers: dict[str, Array]) -> Figure:
    """Final gradients from many starts, and the ratio of the two methods."""
    starts = numbers["starts"]
    finals = {name: numbers[f"{name}_jittered_final"] for name in ("gd", "clipped")}
    best = {name: np.nanmin(values, axis=0) for name, values in finals.items()}
    kept = [
        finals[name][int(np.argmin(np.abs(numbers[f"{name}_lrs"] - lr)))]
        for name, lr in (("gd", result.gd_best_lr), ("clipped", result.clipped_best_lr))
    ]
    with styled():
        figure, (left, right) = panels(1, 2, width=5.2, height=3.6)
        for name, colour, label, marker in (
            ("gd", GD, "gradient descent", "o"),
            ("clipped", CLIPPED, "clipped GD", "^"),
        ):
            left.scatter(starts, best[name], s=10, color=colour, marker=marker, linewidth=0, label=label)
            left.axhline(float(np.median(best[name])), color=colour, linewidth=0.9, linestyle="--")
        left.set(yscale="log", xlabel="start x0", ylabel="final |f′|, best of the grid")
        left.set_title("Each start with its best step size")
        left.legend(loc="center left", bbox_to_anchor=(0.0, 0.7))
        _ratios(right, best["gd"] / best["clipped"], "best of the grid, each start", COLOURS[2], "-")
        _ratios(
            right,
            kept[0] / kept[1],
            f"best step sizes from {result.config.x0:g}",
            COLOURS[3],
            "--",
        )
        right.axvline(result.ratio, color="#555555", linewidth=0.9, linestyle=":", label="the paper's start")
        right.set(xscale="log", xlabel="|f′| of GD over |f′| of clipped GD", ylabel="share of starts below")
        right.set_title("How much better clipping is, and how lucky")
        right.legend(loc="center right", bbox_to_anchor=(1.0, 0.3))
        low, high = result.jittered_range
        figure.supxlabel(
            f"{len(starts)} starts within {result.config.jitter:g} of {result.config.x0:g}: median ratio "
            f"{result.jittered_ratio:.2g}, range {low:.1e} to {high:.1e}; with fixed step sizes "
            f"{result.fixed_range[0]:.1e} to {result.fixed_range[1]:.1e}",
            fontsize=8,
            color="#555555",
        )
    return figure


def _ratios(panel: Axes, ratios: Array, label: str, colour: str, dashes: str) -> None:
    ratios = np.sort(ratios[np.isfinite(ratios)])
    panel.step(
        ratios,
        np.arange(1, len(ratios) + 1) / len(ratios),
        where="post",
        label=label,
        color=colour,
        linestyle=dashes,
    )


def table(result: SyntheticResult, numbers: dict[str, Array]) -> Figure:
    """The paper's quantitative comparison: as printed, corrected, measured."""
    header = ["", "printed", "corrected", "measured"]
    rows = [[row.quantity, row.printed, row.corrected, row.measured] for row in result.table]
    with styled():
        figure = Figure(figsize=(11, 0.36 * (len(rows) + 2)), layout="constrained")
        panel = figure.subplots()
        panel.axis("off")
        cells = panel.table(
            cellText=rows,
            colLabels=header,
            bbox=(0, 0, 1, 1),  # pyright: ignore[reportArgumentType]  # four numbers are a box, too
            cellLoc="left",
            colLoc="left",
            colWidths=[0.4, 0.17, 0.17, 0.26],
        )
        cells.auto_set_font_size(False)
        cells.set_fontsize(9)
        for (row, column), cell in cells.get_celld().items():
            cell.set_edgecolor("#cccccc")
            cell.visible_edges = "B"
            cell.PAD = 0.02 if column == 0 else 0.05
            if row == 0:
                cell.set_text_props(fontweight="bold")
        figure.suptitle("Theorems against experiments", fontweight="bold")
    return figure


def growth(result: SyntheticResult, numbers: dict[str, Array]) -> Figure:
    """Iterations on the lower-bound pair against the largest gradient norm, and what fixed steps lose."""
    M, iterations = numbers["M"], numbers["iterations"]
    with styled():
        figure, (left, right) = panels(1, 2, width=5.2, height=4.0)
        left.fill_between(
            M, numbers["fixed_lower"], numbers["fixed_upper"], color=COLOURS[0], alpha=0.12, linewidth=0
        )
        left.plot(
            M, numbers["fixed_lower"], color=COLOURS[0], linestyle=":", label="fixed step: at least (Thm 4)"
        )
        left.plot(
            M, numbers["fixed_upper"], color=COLOURS[0], linestyle="--", label="fixed step: at most (Thm 6)"
        )
        left.plot(
            M, numbers["clipped_upper"], color=COLOURS[1], linestyle="--", label="clipped: at most (Thm 3)"
        )
        for method, row, colour, marker in zip(METHODS, iterations, COLOURS, "os^D", strict=False):
            left.plot(M, row, marker=marker, markersize=4, color=colour, label=method)
        left.set(xscale="log", yscale="log", xlabel="largest gradient norm M", ylabel="iterations")
        left.set_title("Iterations to a small gradient, slower of the pair")
        left.legend(loc="upper left")
        growths = M * result.config.L1 / result.config.L0
        ratio, predicted = iterations[0] / iterations[1], growths / np.log1p(growths)
        right.plot(
            M, ratio, "o-", markersize=4, color=COLOURS[2], label=f"measured, slope {result.slope:.2f}"
        )
        right.plot(
            M,
            predicted * (ratio[-1] / predicted[-1]),
            color="#000000",
            linestyle="--",
            label=f"r / ln(1 + r), slope {result.slope_theory:.2f}",
        )
        right.set(xscale="log", yscale="log", xlabel="largest gradient norm M")
        right.set_ylabel("best fixed step over clipped")
        right.set_title("What a fixed step loses")
        right.legend(loc="upper left")
        figure.supxlabel(
            f"L0 = {result.config.L0:g}, L1 = {result.config.L1:g}, r = L1·M/L0; corrected and sharp bounds; "
            "the prediction is scaled to the last point",
            fontsize=8,
            color="#555555",
        )
    return figure


FOLDER = "synthetic"  # inside the reproduction's


def draw_synthetic(folder: Path, output: Path | None = None) -> list[Path]:
    """Draw every picture of the synthetic experiment.

    Args:
        folder: What :func:`curvestep.lab.paper.synthetic.run_synthetic` filled.
        output: Where to; default: beside the numbers.

    Returns:
        The files written, PNG and SVG of each.
    """
    saved = load_synthetic(folder)
    return [path for name, draw in _DRAW.items() for path in save(draw(*saved), (output or folder) / name)]


_DRAW = {"fig7": trajectories, "fig7_jittered": jittered, "fig7_table": table, "fig7_growth": growth}
_CAPTIONS = {
    "fig7": "gradient descent and clipped gradient descent on x⁴",
    "fig7_jittered": "the same comparison over many starting points",
    "fig7_table": "theory against experiment: printed, corrected, measured",
    "fig7_growth": "iterations against the largest gradient norm, with the bounds",
}


def _picture(name: str) -> Picture:
    return Picture(
        name=name,
        title=f"Figure 7: {_CAPTIONS[name]}",
        caption=_CAPTIONS[name],
        draw=lambda results, title: _DRAW[name](*load_synthetic(results.folder / FOLDER)),
    )


def run_once(folder: Path, progress: bool) -> None:
    """Make the experiment unless it is there."""
    if not (folder / FOLDER / SUMMARY).exists():
        run_synthetic(folder / FOLDER, progress=progress)


def judge_descent(results: Results) -> Evidence:
    """Final gradients on x⁴."""
    found = _summary(results)
    low, high = found.jittered_range
    words = (
        f"|f'| after {found.config.num_steps} steps: {found.gd_grad_norm:.2g} for gradient descent, "
        f"{found.clipped_grad_norm:.2g} with clipping, a ratio of {found.ratio:.2g}; over "
        f"{found.config.num_starts} jittered starts the median is {found.jittered_ratio:.2g}, "
        f"from {low:.2g} to {high:.2g}"
    )
    return Evidence(measured=words, verdict=SUPPORTED if low > 1 else CONTRADICTED)


def judge_theory(results: Results) -> Evidence:
    """What theory predicts on x⁴, as printed and corrected."""
    (row,) = (row for row in _summary(results).table if "by the bounds" in row.quantity)
    words = f"with the square root of the theorems' bounds {row.corrected}; measured {row.measured}"
    claimed, predicted = float(row.printed), float(row.corrected.rpartition(" ")[2])
    right = claimed / 2 < predicted < claimed * 2
    return Evidence(measured=words, verdict=SUPPORTED if right else CONTRADICTED)


def _summary(results: Results) -> SyntheticResult:
    if not (results.folder / FOLDER).exists():
        raise MissingRuns("the synthetic experiment has not been run")
    return load_synthetic(results.folder / FOLDER)[0]


FIG7 = PaperFigure(
    name="fig7",
    runs=lambda scale: (),
    pictures=tuple(_picture(name) for name in _DRAW),
    claims=(
        Statement(
            paper="On x⁴ clipped descent converges much faster than gradient descent.", judge=judge_descent
        ),
        Statement(paper="There theory predicts gradients 1e5 times smaller.", judge=judge_theory),
    ),
    experiment=run_once,
)
