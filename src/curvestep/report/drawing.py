"""Charts drawn by matplotlib, and how figures look."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from curvestep.checks import needs_extra
from curvestep.report.chart import COLOURS, Chart, Series
from curvestep.report.markup import visible

with needs_extra("report"):
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

ITERATIONS = "viridis"  # dark is early; grows evenly in lightness
_PALETTE: dict[int | str, str] = {
    **dict(enumerate(COLOURS)), "ink": "#000000", "soft": "#777777", "pale": "#B0B0B0", "bad": "#A4161A",
}  # fmt: skip
_LINES = {"solid": "-", "dash": "--", "dashdot": "-.", "dot": ":", "": "none"}
_MARKS = {"circle": "o", "triangle": "^", "square": "s", "": ""}
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.fontsize": "small",
    "legend.framealpha": 0.6,
    "lines.linewidth": 1.4,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "curvestep",  # the same figure is the same file
}
# In an SVG: on a dark page light and dark change places, and every hue stays.
_DARK = "@media (prefers-color-scheme: dark) {svg {filter: invert(0.92) hue-rotate(180deg)}}"
# Inside `with styled():` the style above is in use; matplotlib's own settings come back afterwards.
styled = partial(matplotlib.rc_context, _STYLE)


def draw(panel: Axes, chart: Chart) -> None:
    """Draw a chart into a panel."""
    panel.set_xlabel(_literal(chart.x.label))
    panel.set_ylabel(_literal(chart.y.label))
    panel.set_title(_literal(chart.title))
    for series in chart.series:
        _draw_series(panel, series)
    log_axes(panel, x=chart.x.log, y=chart.y.log)
    for axis, limit in ((chart.x, panel.set_xlim), (chart.y, panel.set_ylim)):
        if axis.range is not None:
            limit(axis.range)
    _draw_legend(panel, chart)


def _draw_legend(panel: Axes, chart: Chart) -> None:
    """The legend: between panel and title over a cloud of points, under it if long, where it hides none."""
    num_names = sum(series.entry != "" for series in chart.series)
    outside = {"ncols": 2, "frameon": False, "handlelength": 1.6}
    if num_names == 0:
        return
    if any(series.shade is not None for series in chart.series):
        panel.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), borderaxespad=0.2, **outside)
        panel.set_title(panel.get_title(), pad=8 + 12 * -(-num_names // 2))
    elif num_names > 4:
        panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), **outside)
    else:
        panel.legend(loc="best")


def _draw_series(panel: Axes, series: Series) -> None:
    if series.shade is not None:
        _draw_cloud(panel, series)
        return
    colour = _PALETTE[series.colour]
    if series.band is not None:
        panel.fill_between(series.x, *series.band, color=colour, alpha=0.18, linewidth=0)
    (line,) = panel.plot(series.x, series.y, label=_literal(series.entry))
    line.set(color=colour, linestyle=_LINES[series.dash], marker=_MARKS[series.symbol])
    line.set(linewidth=1.4 * series.weight, markersize=4.5 * series.weight, zorder=2 + series.weight)
    if series.diverged:
        panel.plot(*series.last, "x", color=colour, markersize=8)


def _draw_cloud(panel: Axes, series: Series) -> None:
    """Points coloured by iteration, with the bar of colours."""
    look = {"cmap": ITERATIONS, "s": 12, "linewidths": 0}
    points = panel.scatter(series.x, series.y, c=series.shade, label=_literal(series.name), **look)
    assert panel.figure is not None
    panel.figure.colorbar(points, ax=panel, label="iteration", pad=0.02)


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


def figure_of(charts: Sequence[Chart], *, title: str = "", note: str = "") -> Figure:
    """Charts, at least one, two in a row: a title above, a note in small print below."""
    columns = min(2, len(charts))
    with styled():
        figure, axes = panels(-(-len(charts) // columns), columns, width=5.0, height=3.4)
        for panel in axes[len(charts) :]:
            panel.remove()
        for panel, chart in zip(axes, charts, strict=False):
            draw(panel, chart)
        if title:
            figure.suptitle(_literal(title), fontsize=11, fontweight="bold")
        if note:
            figure.supxlabel(_literal(note), fontsize=7.5, color="#555555")
    return figure


def panels(rows: int, columns: int, *, width: float, height: float) -> tuple[Figure, list[Axes]]:
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
    text = svg.read_text(encoding="utf-8")
    svg.write_text(text.replace("</style>", f"{_DARK}</style>", 1), encoding="utf-8")
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
    """1, 2 and 5 in each decade; over more than two decades only 1; in a part of one at least two."""

    def tick_values(self, vmin: float, vmax: float) -> Sequence[float]:
        if vmin > 0 and vmax / vmin > 200:
            self.set_params(subs=(1.0,), numticks=8)
        else:
            self.set_params(subs=(1.0, 2.0, 5.0), numticks=15)
        ticks = super().tick_values(vmin, vmax)
        if vmin <= 0 or vmax / vmin > 4:
            return ticks
        decades = 10.0 ** np.arange(np.floor(np.log10(vmin)), np.log10(vmax))
        for numbers in ((1, 2, 5), range(1, 10)):
            inside = [n * d for d in decades for n in numbers if vmin <= n * d <= vmax]
            if len(inside) > 1:
                return inside
        return [tick for tick in ticks if vmin <= tick <= vmax]
