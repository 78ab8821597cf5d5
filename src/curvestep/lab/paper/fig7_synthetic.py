"""The figures of the synthetic experiment, redrawn from its saved numbers: figure 7 of the paper and more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from curvestep.display.chart import NUM_COLOURS, Axis, Chart, Series
from curvestep.display.drawing import figure_of, save, styled
from curvestep.display.results import level
from curvestep.lab.paper.plan import PaperFigure, Picture, Results
from curvestep.lab.paper.synthetic import METHODS, SUMMARY, SyntheticResult, load_synthetic, run_synthetic
from curvestep.lab.paper.verdicts.claims import MissingRuns

Array = NDArray[Any]

NUM_LINES = 6  # step sizes shown in each of the six panels

GD, CLIPPED = 0, 1  # colours in the palette


def trajectories(result: SyntheticResult, numbers: dict[str, Array], title: str) -> Figure:
    """The six panels of the paper: distance, value and derivative, without and with clipping."""
    quantities = (
        ("|x|", np.abs),
        ("f(x) = x⁴", lambda x: x**4),
        ("|f′(x)| = 4|x|³", lambda x: np.abs(4 * x**3)),
    )
    charts = []
    for name, method in (("gd", "gradient descent"), ("clipped", "clipped GD")):
        lrs, points = numbers[f"{name}_lrs"], numbers[f"{name}_points"]
        best = int(np.argmin(np.abs(lrs - getattr(result, f"{name}_best_lr"))))
        # Two larger step sizes than the best, the best, and smaller ones.
        first = max(0, min(best - 2, len(lrs) - NUM_LINES))
        for label, quantity in quantities:
            series = []
            for order, index in enumerate(range(first, min(len(lrs), first + NUM_LINES))):
                with np.errstate(over="ignore", invalid="ignore"):
                    values = quantity(points[:, index])
                    values = np.where((values > 0) & (values < 1e3 * values[0]), values, np.nan)
                steps = np.arange(len(values))
                said = (
                    f"{lrs[index]:.2e}"
                    + ", best" * (index == best)
                    + ", diverges" * bool(np.isnan(values[-1]))
                )
                look = {"colour": order % NUM_COLOURS, "thin": index != best}
                series.append(Series(said * (label == "|x|"), steps, values, **look))
            axes = Axis("iteration"), Axis(label, log=True)
            charts.append(Chart(name, f"{method}: {label}", *axes, tuple(series)))
    # Below one another the same quantity: on the same axis.
    for i in range(3):
        values = np.concatenate([one.y for chart in charts[i::3] for one in chart.series])
        ends = np.nanmin(values) / 2, 2 * np.nanmax(values)
        for j in (i, i + 3):
            charts[j] = replace(charts[j], y=replace(charts[j].y, range=ends))
    note = (
        f"x⁴ from {result.config.x0:g}; clipping threshold {result.config.max_norm:g}. After "
        f"{result.config.num_steps} iterations the best step sizes reach |f′| = {result.gd_grad_norm:.2g} "
        f"and {result.clipped_grad_norm:.2g}; a band is a step that bounces for ever"
    )
    return figure_of(charts, title=title, note=note, columns=3, size=(4.2, 3.4))


def jittered(result: SyntheticResult, numbers: dict[str, Array], title: str) -> Figure:
    """Final gradients from many starts, and the ratio of the two methods."""
    starts = numbers["starts"]
    finals = {name: numbers[f"{name}_jittered_final"] for name in ("gd", "clipped")}
    best = {name: np.nanmin(values, axis=0) for name, values in finals.items()}
    kept = [
        finals[name][int(np.argmin(np.abs(numbers[f"{name}_lrs"] - lr)))]
        for name, lr in (("gd", result.gd_best_lr), ("clipped", result.clipped_best_lr))
    ]
    left = []
    for name, colour, label, mark in (
        ("gd", GD, "gradient descent", "circle"),
        ("clipped", CLIPPED, "clipped GD", "triangle"),
    ):
        left.append(Series(label, starts, best[name], colour=colour, dash="", mark=mark, thin=True))
        left.append(level(starts, float(np.median(best[name])), "", colour=colour))
    right = []
    for ratios, label, colour, dash in (
        (best["gd"] / best["clipped"], "best of the grid, each start", 2, "solid"),
        (kept[0] / kept[1], f"best step sizes from {result.config.x0:g}", 3, "dash"),
    ):
        shown = np.sort(ratios[np.isfinite(ratios)])
        shares = np.arange(1, len(shown) + 1) / len(shown)
        right.append(Series(label, shown, shares, colour=colour, dash=dash))
    ratio = np.array([result.ratio, result.ratio])
    right.append(Series("the paper's start", ratio, np.array([0.0, 1.0]), colour="soft", dash="dot"))
    final = Axis("start x0"), Axis("final |f′|, best of the grid", log=True)
    share = Axis("|f′| of GD over |f′| of clipped GD", log=True), Axis("share of starts below")
    charts = [
        Chart("starts", "Each start with its best step size", *final, tuple(left)),
        Chart("ratios", "How much better clipping is, and how lucky", *share, tuple(right)),
    ]
    low, high = result.jittered_range
    note = (
        f"{len(starts)} starts within {result.config.jitter:g} of {result.config.x0:g}: median ratio "
        f"{result.jittered_ratio:.2g}, range {low:.1e} to {high:.1e}; with fixed step sizes "
        f"{result.fixed_range[0]:.1e} to {result.fixed_range[1]:.1e}"
    )
    return figure_of(charts, title=title, note=note, size=(5.2, 3.6))


def growth(result: SyntheticResult, numbers: dict[str, Array], title: str) -> Figure:
    """Iterations on the lower-bound pair against the largest gradient norm, and what fixed steps lose."""
    M, iterations = numbers["M"], numbers["iterations"]
    lower, upper = numbers["fixed_lower"], numbers["fixed_upper"]
    left = [
        Series("fixed step: at least (Thm 4)", M, lower, colour=GD, dash="dot", low=lower, high=upper),
        Series("fixed step: at most (Thm 6)", M, upper, colour=GD, dash="dash"),
        Series("clipped: at most (Thm 3)", M, numbers["clipped_upper"], colour=CLIPPED, dash="dash"),
    ]
    marks = ("circle", "square", "triangle", "circle")
    for number, (method, row) in enumerate(zip(METHODS, iterations, strict=False)):
        left.append(Series(method, M, row, colour=number % NUM_COLOURS, mark=marks[number % 4], thin=True))
    kappas = M * result.config.L1 / result.config.L0
    ratio, predicted = iterations[0] / iterations[1], kappas / np.log1p(kappas)
    prediction = predicted * (ratio[-1] / predicted[-1])
    theory = f"κ / ln(1 + κ), slope {result.slope_theory:.2f}"
    right = (
        Series(f"measured, slope {result.slope:.2f}", M, ratio, colour=2, mark="circle"),
        Series(theory, M, prediction, colour="ink", dash="dash"),
    )
    largest = Axis("largest gradient norm M", log=True)
    titles = "Iterations to a small gradient, slower of the pair", "What a fixed step loses"
    charts = [
        Chart("iterations", titles[0], largest, Axis("iterations", log=True), tuple(left)),
        Chart("loses", titles[1], largest, Axis("best fixed step over clipped", log=True), right),
    ]
    note = (
        f"L0 = {result.config.L0:g}, L1 = {result.config.L1:g}, κ = L1·M/L0; corrected and sharp bounds; "
        "the prediction is scaled to the last point"
    )
    return figure_of(charts, title=title, note=note, size=(5.2, 4.0))


def table(result: SyntheticResult, numbers: dict[str, Array], title: str) -> Figure:
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
        figure.suptitle(title, fontweight="bold")
    return figure


FOLDER = "synthetic"  # inside the reproduction's


def draw_synthetic(folder: Path) -> list[Path]:
    """Draw every picture of the experiment in ``folder``, beside its numbers; the PNG and SVG files."""
    saved = load_synthetic(folder)
    return [
        path
        for picture in FIG7.pictures
        for path in save(_DRAW[picture.name][0](*saved, picture.title), folder / picture.name)
    ]


_DRAW = {
    "fig7": (
        trajectories,
        "gradient descent and clipped gradient descent on x⁴",
        "Distance to the minimum, value and gradient from x = 30, a line a step size.",
    ),
    "fig7_jittered": (
        jittered,
        "the same comparison over many starting points",
        "The last gradient of both methods from starts around 30, and how much smaller clipping makes it.",
    ),
    "fig7_table": (
        table,
        "theory against experiment: printed, corrected, measured",
        "What the paper prints, the same with its errors corrected, and what was measured.",
    ),
    "fig7_growth": (
        growth,
        "iterations against the largest gradient norm, with the bounds",
        "Iterations on the pair of functions behind Theorem 4, and the ratio of a fixed step to clipping.",
    ),
}


def _picture(name: str) -> Picture:
    draw, title, caption = _DRAW[name]
    return Picture(
        name=name,
        title=f"Figure 7: {title}",
        caption=caption,
        draw=lambda results, title: draw(*load_synthetic(results.folder / FOLDER), title),
    )


def run_once(folder: Path, progress: bool) -> None:
    """Make the experiment unless it is there."""
    if not (folder / FOLDER / SUMMARY).exists():
        run_synthetic(folder / FOLDER, progress=progress)


def summary_of(results: Results) -> SyntheticResult:
    """The numbers of the experiment."""
    if not (results.folder / FOLDER).exists():
        raise MissingRuns("the synthetic experiment has not been run")
    return load_synthetic(results.folder / FOLDER)[0]


FIG7 = PaperFigure(
    name="fig7",
    runs=lambda scale: (),
    pictures=tuple(_picture(name) for name in _DRAW),
    experiment=run_once,
)
