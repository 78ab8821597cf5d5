"""Charts drawn by matplotlib, and how figures look."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from curvestep.display.chart import Chart, Grid, Series
from curvestep.display.markup import visible

# Okabe and Ito's palette, told apart with any colour vision; the light yellow is left out.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
ITERATIONS = "viridis"  # dark is early; grows evenly in lightness
_PALETTE: dict[int | str, str] = {**dict(enumerate(COLOURS)), "ink": "#000000", "soft": "#777777"}
_LINES = {"solid": "-", "dash": "--", "dashdot": "-.", "dot": ":", "": "none"}
_MARKS = {"circle": "o", "triangle": "^", "square": "s", "": ""}
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.fontsize": 7.5,
    "legend.framealpha": 0.9,
    "lines.linewidth": 1.4,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "curvestep",  # the same figure is the same file
    "figure.dpi": 100,
}
# Inside `with styled():` the style above is in use; matplotlib's own settings come back afterwards.
styled = partial(matplotlib.rc_context, _STYLE)


def draw(panel: Axes, chart: Chart, *, iterations: Normalize | None = None) -> None:
    """Draw a chart into a panel; with a scale of colours that other panels have, too, without its bar."""
    assert panel.figure is not None
    if chart.grid is not None:
        _draw_grid(panel, chart.grid)
    for series in chart.series:
        _draw_series(panel, series, iterations)
    if chart.grid is None:
        log_axes(panel, x=chart.x.log, y=chart.y.log)
        for axis, limit in ((chart.x, panel.set_xlim), (chart.y, panel.set_ylim)):
            if axis.range is not None and np.ptp(axis.range) > 0:
                limit(axis.range)
    panel.set_xlabel(_literal(chart.x.label))
    panel.set_ylabel(_literal(chart.y.label))
    panel.set_title(_literal(chart.title))
    num_names = len(panel.get_legend_handles_labels()[1])
    if num_names:
        cloud = any(series.shade is not None for series in chart.series)
        _draw_legend(panel, num_names, cloud=cloud)


def _draw_legend(panel: Axes, num_names: int, *, cloud: bool) -> None:
    """The legend: between panel and title over a cloud of points, under it if long, where it hides none."""
    outside = {"ncols": 2, "frameon": False, "handlelength": 1.6}
    if cloud:
        panel.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), borderaxespad=0.2, **outside)
        panel.set_title(panel.get_title(), pad=8 + 12 * -(-num_names // 2))
    elif num_names > 4:
        panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), **outside)
    else:
        panel.legend(loc="best")


def _draw_series(panel: Axes, series: Series, iterations: Normalize | None = None) -> None:
    if series.shade is not None:
        _draw_cloud(panel, series, iterations)
        return
    colour = _PALETTE[series.colour]
    if series.low is not None and series.high is not None:
        panel.fill_between(series.x, series.low, series.high, color=colour, alpha=0.18, linewidth=0)
    if series.dash:
        _draw_line(panel, series, colour)
    _draw_marks(panel, series, colour)


def _draw_cloud(panel: Axes, series: Series, iterations: Normalize | None) -> None:
    """Points coloured by iteration; with the bar of colours unless other panels share it."""
    look = {"cmap": ITERATIONS, "norm": iterations, "s": 12, "linewidths": 0}
    points = panel.scatter(series.x, series.y, c=series.shade, label=_literal(series.name), **look)
    assert panel.figure is not None
    if iterations is None:
        panel.figure.colorbar(points, ax=panel, label="iteration", pad=0.02)


def _draw_line(panel: Axes, series: Series, colour: str) -> None:
    width = 1.0 if series.thin else 1.4
    look = {"color": colour, "linestyle": _LINES[series.dash], "linewidth": width}
    panel.plot(series.x, series.y, label=_literal(series.name), **look)


def _draw_marks(panel: Axes, series: Series, colour: str) -> None:
    """Marks where the series has them; a line of one point is invisible without."""
    shown = np.isfinite(series.y)
    mark = _MARKS[series.mark]
    if shown.sum() < 2:
        mark = mark or _MARKS["circle"]
    if not mark:
        return
    look = {"color": colour, "markersize": 3 if series.thin else 4.5}
    label = "" if series.dash else _literal(series.name)
    panel.plot(series.x[shown], series.y[shown], mark, label=label, **look)


def _draw_grid(panel: Axes, grid: Grid) -> None:
    assert panel.figure is not None
    panel.set_facecolor("0.85")
    panel.grid(visible=False)
    shown = grid.values[np.isfinite(grid.values)]
    scale = Normalize
    if grid.log:
        shown, scale = shown[shown > 0], LogNorm
    colours = "viridis_r" if grid.reverse else "viridis"
    image = panel.imshow(grid.values, cmap=colours, aspect="auto", interpolation="nearest")
    ink = np.full(grid.values.shape, "black")
    if len(shown):
        image.set_norm(scale(shown.min(), shown.max()))
        panel.figure.colorbar(image, ax=panel, label=grid.label)
        ink[grid.values > shown.mean()] = "white"
    look = {"ha": "center", "va": "center", "fontsize": 8}
    for i, row in enumerate(grid.text):
        for j, text in enumerate(row):
            panel.text(j, i, _literal(text).replace(", ", "\n"), color=ink[i, j], **look)
    few = range(0, len(grid.across), -(-len(grid.across) // 10))
    panel.set_xticks(few, [_tick(grid.across[i]) for i in few])
    panel.set_yticks(range(len(grid.down)), [*map(_literal, grid.down)])


def _tick(value: float | str) -> str:
    return f"{value:g}" if isinstance(value, float) else _literal(str(value))


def _literal(text: str) -> str:
    """Text in which matplotlib sees no formula."""
    return visible(text).replace("$", r"\$")


class NotebookFigure(Figure):
    """A figure that a notebook shows, whether or not pyplot is in use."""

    def _repr_png_(self) -> bytes:
        packed = io.BytesIO()
        with styled():
            self.savefig(packed, format="png")
        return packed.getvalue()


def figure_of(
    charts: Sequence[Chart],
    *,
    title: str = "",
    note: str = "",
    columns: int = 2,
    share: str = "",
    words: bool = False,
    size: tuple[float, float] = (5.0, 3.4),
) -> Figure:
    """Charts side by side in one figure.

    Args:
        charts: At least one.
        title: Above the panels; each panel has its chart's own.
        note: In small print below them.
        columns: Panels beside each other at most.
        share: Axes on which all panels have the same range, ``x``, ``y`` or ``xy``; iterations then have one
            scale of colours, too.
        words: Put each chart's words under its panel, line by line.
        size: Of a panel, in inches.
    """
    grid = charts[0].grid
    width, height = size
    if grid is not None and grid.text:
        width = max(width, 2.6 + 1.1 * len(grid.across))
    columns = min(columns, len(charts))
    iterations = _common_iterations(charts) if share else None
    with styled():
        figure, axes = panels(-(-len(charts) // columns), columns, width=width, height=height)
        for panel, chart in zip(axes, charts, strict=False):
            draw(panel, chart, iterations=iterations)
            if words and chart.words:
                # Part of the label, so that the layout leaves room for it.
                panel.set_xlabel(_literal(f"{chart.x.label}\n\n{chart.words}"), fontsize=8)
        for panel in axes[len(charts) :]:
            panel.remove()
        axes = axes[: len(charts)]
        for name in share:
            ends = np.array([getattr(panel, f"get_{name}lim")() for panel in axes])
            for panel in axes:
                getattr(panel, f"set_{name}lim")(ends[:, 0].min(), ends[:, 1].max())
        if iterations is not None:
            bar = ScalarMappable(norm=iterations, cmap=ITERATIONS)
            figure.colorbar(bar, ax=axes, label="iteration", pad=0.01, aspect=30)
        if title:
            figure.suptitle(_literal(title), fontsize=11, fontweight="bold")
        if note:
            figure.supxlabel(_literal(note), fontsize=7.5, color="#555555")
    return figure


def _common_iterations(charts: Sequence[Chart]) -> Normalize | None:
    """The scale of colours for the iterations of all charts; None if none of them has any."""
    series = [one for chart in charts for one in chart.series]
    shades = np.concatenate([np.array([]), *(one.shade for one in series if one.shade is not None)])
    return Normalize(shades.min(), shades.max()) if len(shades) else None


def panels(rows: int, columns: int, *, width: float = 4.2, height: float = 3.4) -> tuple[Figure, list[Axes]]:
    """A figure of ``rows`` times ``columns`` panels of this size in inches, and the panels in a list."""
    figure = NotebookFigure(figsize=(width * columns, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, [panel for row in axes for panel in row]


def save(figure: Figure, path: str | Path) -> tuple[Path, Path]:
    """Write ``figure`` as PNG and as SVG beside it, whatever the suffix of ``path``; the two paths."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    png, svg = path.with_suffix(".png"), path.with_suffix(".svg")
    with styled():
        figure.savefig(png, dpi=160, metadata={"Software": None})
        figure.savefig(svg, metadata={"Date": None, "Creator": None})
    return png, svg


def log_axes(panel: Axes, *, x: bool = True, y: bool = True) -> None:
    """Logarithmic axes with plain numbers at the ticks, also where the data span less than a decade."""
    for wanted, axis, setter in ((x, panel.xaxis, panel.set_xscale), (y, panel.yaxis, panel.set_yscale)):
        if wanted:
            setter("log")
            axis.set_major_locator(_Ticks())
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())


class _Ticks(LogLocator):
    """1, 2 and 5 in each decade; over more than two decades only 1."""

    def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
        if vmin > 0 and vmax / vmin > 200:
            self.set_params(subs=(1.0,), numticks=8)
        else:
            self.set_params(subs=(1.0, 2.0, 5.0), numticks=15)
        return super().tick_values(vmin, vmax)
