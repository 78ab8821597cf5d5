"""Two ways to draw a chart: plotly's JSON for the page, matplotlib for files; and how both look."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from curvestep.lab.report.charts import Chart, Grid, Series
from curvestep.lab.report.views import visible

# Okabe and Ito's palette, told apart with any colour vision; the light yellow is left out.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", "-.", ":")
ITERATIONS = "viridis"  # dark is early; grows evenly in lightness
LINE = "#D55E00"
FRONTIER = "#000000"
_INK = {"ink": "#000000", "soft": "#777777"}
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

# What all charts of the page share. Colours are the style sheet's, which knows day and night.
TEMPLATE: dict[str, Any] = {
    "layout": {
        "margin": {"l": 56, "r": 14, "t": 12, "b": 44},
        "hovermode": "closest",
        "dragmode": False,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "var(--ink)"},
        "hoverlabel": {
            "bgcolor": "var(--card)",
            "bordercolor": "var(--line)",
            "font": {"color": "var(--ink)"},
        },
        "legend": {
            "orientation": "h",
            "y": 1.02,
            "yanchor": "bottom",
            "x": 0,
            "itemclick": False,
            "itemdoubleclick": False,
        },
        **{
            name: {
                "gridcolor": "var(--line)",
                "linecolor": "var(--line)",
                "zeroline": False,
                "automargin": True,
                "exponentformat": "power",
            }
            for name in ("xaxis", "yaxis")
        },
    }
}


def to_plotly(chart: Chart) -> dict[str, Any]:
    """The chart as plotly's ``data`` and ``layout``; under ``scales`` what changes with the kind of axis."""
    axes = {}
    for name, axis in (("x", chart.x), ("y", chart.y)):
        axes[f"{name}axis"] = {"title": {"text": _plain(axis.label), "standoff": 8}}
        if chart.grid is None:
            axes[f"{name}axis"] |= _scale(chart, name, log=axis.log)
        else:
            names = chart.grid.down if name == "y" else chart.grid.across
            axes[f"{name}axis"]["type"] = "category" if names and isinstance(names[0], str) else "linear"
    data = [_plotly_grid(chart.grid, chart)] if chart.grid is not None else []
    for number, series in enumerate(chart.series):
        data += _plotly_series(series, number)
    layout: dict[str, Any] = {
        **axes,
        "showlegend": chart.grid is None and len(chart.series) <= 2 * len(COLOURS),
    }
    if chart.span is not None and all(map(math.isfinite, chart.span)):
        low, high = chart.span
        upright = {"type": "rect", "xref": "x", "yref": "paper", "x0": low, "x1": high, "y0": 0, "y1": 1}
        layout["shapes"] = [{**upright, "fillcolor": "var(--soft)", "opacity": 0.2, "line": {"width": 0}}]
    drawn = {"kind": chart.kind, "data": data, "layout": layout}
    if chart.switch:
        drawn["scales"] = {
            scale: {f"{name}axis": _scale(chart, name, log=scale == "log") for name in chart.switch}
            for scale in ("log", "linear")
        }
    return drawn


def rounded(values: Sequence[Any] | np.ndarray) -> list[Any]:
    """Five significant digits, whole numbers whole, None for what is not finite, texts as they are.

    Example:
        >>> rounded(np.array([0.123456789, 20.0, np.nan]))
        [0.12346, 20, None]
    """
    found: list[Any] = []
    for value in values.tolist() if isinstance(values, np.ndarray) else values:
        if isinstance(value, str):
            found.append(_plain(value))
        elif not math.isfinite(value):
            found.append(None)
        else:
            found.append(
                int(value) if float(value).is_integer() and abs(value) < 1e15 else float(f"{value:.5g}")
            )
    return found


def _plain(text: str) -> str:
    """Text that plotly, which reads a little markup, shows as it is."""
    return html.escape(visible(text), quote=False)


def _scale(chart: Chart, name: str, *, log: bool) -> dict[str, Any]:
    """Kind, range and ticks of an axis, logarithmic or linear."""
    values = np.concatenate([getattr(series, name) for series in chart.series] or [np.array([])])
    values = values[np.isfinite(values) & ((values > 0) | (not log))]
    limits = getattr(chart, name).range
    if limits is not None and log and limits[0] <= 0:
        limits = (float(values.min()), limits[1]) if len(values) else None
    ends = limits or ((float(values.min()), float(values.max())) if len(values) else (1.0, 10.0))
    if not log:
        whole = getattr(chart, name).label == "iteration" and ends[1] - ends[0] <= 8
        return {
            "type": "linear",
            "range": list(limits) if limits else None,
            "tickmode": "linear" if whole else "auto",
            **({"dtick": 1} if whole else {}),
        }
    ticks = log_ticks(*ends, most=6 if name == "x" else 8)
    return {
        "type": "log",
        "range": [math.log10(end) for end in limits] if limits else None,
        "tickmode": "array",
        "tickvals": rounded(ticks),
        "ticktext": [_power(tick) for tick in ticks],
    }


def log_ticks(low: float, high: float, *, most: int) -> list[float]:
    """Ticks of a logarithmic axis: 1, 2, 5 over two decades, else whole decades, few enough for a phone.

    Example:
        >>> log_ticks(0.9, 12.0, most=6), log_ticks(1e-4, 1e4, most=4)
        ([0.5, 1.0, 2.0, 5.0, 10.0, 20.0], [0.0001, 0.01, 1.0, 100.0, 10000.0])
    """
    bottom, top = math.log10(low), math.log10(high)
    decades = range(math.floor(bottom), math.ceil(top) + 1)
    if top - bottom > 2:
        every = max(1, math.ceil((top - bottom) / most))
        return [float(f"1e{d}") for d in decades if d % every == 0]
    span = top - bottom
    fine = (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9) if span <= 0.4 else (1, 2, 3, 5, 7) if span <= 1 else (1, 2, 5)
    ticks = [float(f"{m}e{d}") for d in decades for m in fine]
    inside = [i for i, tick in enumerate(ticks) if low <= tick <= high] or [0, len(ticks) - 1]
    return ticks[max(0, inside[0] - 1) : inside[-1] + 2]


def _power(value: float) -> str:
    if 0.00099 <= value < 10001:
        return f"{value:g}"
    digits, _, power = f"{value:e}".partition("e")
    return ("" if float(digits) == 1 else f"{float(digits):g}·") + f"10<sup>{int(power)}</sup>"


def _plotly_series(series: Series, number: int) -> Iterator[dict[str, Any]]:
    colour = f"var(--s{series.colour})" if isinstance(series.colour, int) else f"var(--{series.colour})"
    name, common = _plain(series.name), {"type": "scatter", "legendgroup": str(number)}
    if series.low is not None and series.high is not None:
        usable = np.isfinite(series.low) & np.isfinite(series.high)
        x, low, high = series.x[usable], series.low[usable], series.high[usable]
        yield {
            **common, "name": f"{name}, range",
            "x": rounded([*x, *x[::-1]]), "y": rounded([*high, *low[::-1]]),
            "mode": "lines", "fill": "toself", "fillcolor": colour, "opacity": 0.2, "line": {"width": 0},
            "hoverinfo": "skip", "showlegend": False,
        }  # fmt: skip
    lonely = np.isfinite(series.y).sum() < 2  # a line through one point cannot be seen
    marks = series.mark or ("circle" if lonely else "")
    mode = "+".join(part for part, on in (("lines", series.dash), ("markers", marks)) if on)
    trace: dict[str, Any] = {
        **common,
        "name": name,
        "x": rounded(series.x),
        "y": rounded(series.y),
        "mode": mode,
    }
    if series.dash:
        trace["line"] = {"color": colour, "width": 1.3 if series.thin else 1.6, "dash": series.dash}
    if marks:
        symbol: Any = {"triangle": "triangle-up"}.get(marks, marks)
        if series.hollow is not None:
            symbol = [f"{symbol}-open" if hollow else symbol for hollow in series.hollow]
        trace["marker"] = {"color": colour, "symbol": symbol, "size": 4 if series.thin else 6}
    if series.shade is not None:
        bar = {"title": {"text": "iteration", "side": "right"}, "thickness": 10, "outlinewidth": 0}
        look = {"colorscale": "var(--shades)", "opacity": 0.9, "line": {"width": 0.6, "color": "var(--soft)"}}
        trace["marker"] |= {**look, "color": rounded(series.shade), "colorbar": bar}
    if series.extra:
        columns = [rounded(column) for column in series.extra.values()]
        trace["customdata"] = [list(row) for row in zip(*columns, strict=True)]
        said = [f"{label} %{{customdata[{i}]}}".lstrip() for i, label in enumerate(series.extra)]
        trace["hovertemplate"] = "<br>".join([*said, "%{x:.4g}, %{y:.4g}<extra></extra>"])
    yield trace


def _plotly_grid(grid: Grid, chart: Chart) -> dict[str, Any]:
    with np.errstate(divide="ignore", invalid="ignore"):
        shown = np.log10(grid.values) if grid.log else grid.values
    label = f"log10 {grid.label}" if grid.log else grid.label
    trace: dict[str, Any] = {
        "type": "heatmap",
        "x": rounded(grid.across),
        "y": rounded(grid.down),
        "z": [rounded(row) for row in shown],
        "colorscale": "Viridis",
        "reversescale": grid.reverse,
        "hoverongaps": False,
        "colorbar": {"title": {"text": label, "side": "right"}, "thickness": 10, "outlinewidth": 0},
        "customdata": [rounded(row) for row in grid.values],
        "hovertemplate": f"{_plain(chart.y.label)} %{{y}}<br>{_plain(chart.x.label)} %{{x}}<br>"
        f"{grid.label} %{{customdata:.4g}}<extra></extra>",
    }
    if grid.text:
        trace |= {
            "text": [rounded(row) for row in grid.text],
            "texttemplate": "%{text}",
            "xgap": 2,
            "ygap": 2,
        }
    return trace


def draw(panel: Axes, chart: Chart) -> None:
    """Draw a chart into a panel of matplotlib."""
    assert panel.figure is not None
    if chart.grid is not None:
        _draw_grid(panel, chart.grid)
    if chart.span is not None:
        panel.axvspan(*chart.span, color=_INK["soft"], alpha=0.15, linewidth=0)
    for series in chart.series:
        _draw_series(panel, series)
    if chart.grid is None:
        log_axes(panel, x=chart.x.log, y=chart.y.log)
        if chart.y.range is not None and np.ptp(chart.y.range) > 0:
            panel.set_ylim(chart.y.range)
        if len(chart.series) > 4:
            legend_below(panel)
        else:
            panel.legend(loc="best")
    panel.set_xlabel(_literal(chart.x.label))
    panel.set_ylabel(_literal(chart.y.label))


def _draw_series(panel: Axes, series: Series) -> None:
    colour = COLOURS[series.colour] if isinstance(series.colour, int) else _INK[series.colour]
    name = _literal(series.name)
    if series.shade is not None:
        points = panel.scatter(
            series.x, series.y, c=series.shade, cmap=ITERATIONS, s=12, linewidths=0, label=name
        )
        assert panel.figure is not None
        panel.figure.colorbar(points, ax=panel, label="iteration", pad=0.02)
        return
    if series.low is not None and series.high is not None:
        panel.fill_between(series.x, series.low, series.high, color=colour, alpha=0.18, linewidth=0)
    marks = _MARKS[series.mark or ("circle" if np.isfinite(series.y).sum() < 2 else "")]
    shown = np.isfinite(series.y)
    if series.dash:
        # Gaps stay gaps, but for what lies out of range of a batch's other steps.
        line = shown if series.hollow is not None else slice(None)
        width = 1.0 if series.thin else 1.4
        panel.plot(
            series.x[line],
            series.y[line],
            color=colour,
            linestyle=_LINES[series.dash],
            linewidth=width,
            label=name,
        )
    if marks:
        hollow = np.zeros(len(series.x), dtype=bool) if series.hollow is None else series.hollow
        label = None if series.dash else name
        for mask, fill in ((shown & ~hollow, colour), (shown & hollow, "white")):
            look = {"color": colour, "markerfacecolor": fill, "markersize": 3 if series.thin else 4.5}
            panel.plot(series.x[mask], series.y[mask], marks, **look, label=label)
            label = None


def _draw_grid(panel: Axes, grid: Grid) -> None:
    assert panel.figure is not None
    panel.set_facecolor("0.85")
    panel.grid(visible=False)
    positive = grid.values[np.isfinite(grid.values) & ((grid.values > 0) | (not grid.log))]
    norm = LogNorm(positive.min(), positive.max()) if grid.log and len(positive) else None
    colours = "viridis_r" if grid.reverse else "viridis"
    image = panel.imshow(grid.values, cmap=colours, aspect="auto", norm=norm, interpolation="nearest")
    if len(positive):
        panel.figure.colorbar(image, ax=panel, label=grid.label)
    middle = positive.mean() if len(positive) else 0.0
    for i, row in enumerate(grid.text):
        for j, text in enumerate(row):
            dark = math.isfinite(grid.values[i, j]) and grid.values[i, j] > middle
            panel.text(
                j, i, _literal(text).replace(", ", "\n"), ha="center", va="center", fontsize=8,
                color="white" if dark else "black",
            )  # fmt: skip
    few = range(0, len(grid.across), -(-len(grid.across) // 10))
    panel.set_xticks(
        few,
        [
            _literal(f"{grid.across[i]:g}" if isinstance(grid.across[i], float) else str(grid.across[i]))
            for i in few
        ],
    )
    panel.set_yticks(range(len(grid.down)), [_literal(name) for name in grid.down])


def _literal(text: str) -> str:
    """Text in which matplotlib sees no formula."""
    return visible(text).replace("$", r"\$")


def figure_of(charts: Sequence[Chart], *, title: str = "", note: str = "") -> Figure:
    """Charts side by side in one figure for a file.

    Args:
        charts: At least one.
        title: Above the panels; each panel has its chart's own.
        note: In small print below them.
    """
    grid = charts[0].grid
    width = max(5.0, 2.6 + 1.1 * len(grid.across)) if grid is not None and grid.text else 5.0
    with styled():
        figure, axes = panels(1, len(charts), width=width)
        for panel, chart in zip(axes, charts, strict=True):
            draw(panel, chart)
            panel.set_title(_literal(chart.title))
        if title:
            figure.suptitle(_literal(title), fontsize=11, fontweight="bold")
        if note:
            figure.supxlabel(_literal(note), fontsize=7.5, color="#555555")
    return figure


@contextmanager
def styled() -> Iterator[None]:
    """Draw inside with the project's style; matplotlib's own settings come back afterwards."""
    with matplotlib.rc_context(_STYLE):
        yield


def panels(rows: int, columns: int, *, width: float = 4.2, height: float = 3.4) -> tuple[Figure, list[Axes]]:
    """A figure of ``rows`` times ``columns`` panels of this size in inches, and the panels in a list."""
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, [panel for row in axes for panel in row]


def save(figure: Figure, path: str | Path) -> tuple[Path, Path]:
    """Write ``figure`` as PNG and as SVG beside it; the two paths.

    Args:
        figure: The figure.
        path: Where to, without or with a suffix; missing folders are made.
    """
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

    def tick_values(self, vmin: float, vmax: float) -> Any:
        self.set_params(subs=(1.0,) if vmin > 0 and vmax / vmin > 200 else (1.0, 2.0, 5.0), numticks=15)
        return super().tick_values(vmin, vmax)


def legend_below(panel: Axes) -> None:
    """The legend under the panel, where it hides no point."""
    panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False, handlelength=1.6)
