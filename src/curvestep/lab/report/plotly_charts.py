"""Charts as plotly draws them: objects with its names, for the page's script."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from curvestep.display.chart import DASHES, Axis, Chart, Grid, Series
from curvestep.display.markup import plain

Spec = dict[str, Any]  # an object of plotly's
_LINE_WIDTH, _MARK_SIZE, _CROSS_SIZE = 1.6, 6, 11  # pixels
_DASHES = {"": "solid", **dict(zip(DASHES, DASHES, strict=True))}  # without a line it does not matter
_UNSAID = {"hoverinfo": "skip", "showlegend": False}
# What all charts of the page share. Colours are the style sheet's, which knows day and night.
_AXIS = {"gridcolor": "var(--line)", "linecolor": "var(--line)", "zeroline": False, "automargin": True}
TEMPLATE: Spec = {
    "layout": {
        "margin": {"l": 56, "r": 14, "t": 12, "b": 44}, "hovermode": "closest", "dragmode": False,
        "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "var(--ink)"},
        "hoverlabel": {
            "bgcolor": "var(--card)", "bordercolor": "var(--line)", "font": {"color": "var(--ink)"},
            "namelength": -1,
        },
        "legend": {
            "orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "itemclick": False,
            "itemdoubleclick": False, "tracegroupgap": 0,
        },
        **{name: {**_AXIS, "exponentformat": "power"} for name in ("xaxis", "yaxis")},
    }
}  # fmt: skip


def to_plotly(chart: Chart) -> Spec:
    """The chart as plotly's ``data`` and ``layout``; under ``scales`` what changes with the kind of axis."""
    layout: Spec = {
        "xaxis": {"title": {"text": plain(chart.x.label), "standoff": 8}},
        "yaxis": {"title": {"text": plain(chart.y.label), "standoff": 8}},
    }
    data: list[Spec] = []
    if chart.grid is None:
        layout["xaxis"] |= _scale(chart, "x", log=chart.x.log)
        layout["yaxis"] |= _scale(chart, "y", log=chart.y.log)
    else:
        data.append(_plotly_grid(chart.grid, chart))
        layout["xaxis"] |= _cells(chart.grid.across)
        layout["yaxis"] |= _cells(chart.grid.down)
        layout["showlegend"] = False
        layout["annotations"] = _notes(chart.grid)
    for number, series in enumerate(chart.series):
        data += _plotly_series(series, number)
    drawn = {"kind": chart.kind, "data": data, "layout": layout}
    if chart.switch:
        drawn["scales"] = {"log": _scales(chart, log=True), "linear": _scales(chart, log=False)}
    return drawn


def _scales(chart: Chart, *, log: bool) -> Spec:
    """The axes that a reader may change, all logarithmic or all linear."""
    return {f"{name}axis": _scale(chart, name, log=log) for name in chart.switch}


def _cells(names: Sequence[object]) -> Spec:
    """An axis of a grid: steps, or names; a grid line would cross out an empty cell."""
    kind = "category" if isinstance(next(iter(names), 0.0), str) else "linear"
    return {"type": kind, "showgrid": False}


def rounded(values: Iterable[Any]) -> list[Any]:
    """Five significant digits, whole numbers whole, None for what is not finite, texts as they are.

    Example:
        >>> rounded(np.array([0.123456789, 20.0, np.nan]))
        [0.12346, 20, None]
    """
    return [plain(value) if isinstance(value, str) else _rounded(float(value)) for value in values]


def _rounded(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    if value.is_integer() and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.5g}")


def _scale(chart: Chart, name: str, *, log: bool) -> Spec:
    """Kind and range of an axis, logarithmic or linear; few enough ticks for a phone."""
    axis: Axis = getattr(chart, name)
    if not log:
        return {"type": "linear", "range": axis.range, "tickformat": ""}
    ends = None
    if axis.range is not None and axis.range[0] > 0:  # else it was meant for a linear axis
        ends = np.log10(axis.range).tolist()
    # 1, 2 and 5 in each of a few decades; plotly chooses well for fewer and for more.
    values = np.concatenate([getattr(series, name) for series in chart.series])
    powers = np.log10(values[np.isfinite(values) & (values > 0)])
    decades = round(powers.max(initial=-99.0) - powers.min(initial=99.0))
    ticks = "D2" if decades in (1, 2) else None
    return {"type": "log", "range": ends, "dtick": ticks, "nticks": 6, "tickformat": "~g"}


def _plotly_series(series: Series, number: int) -> Iterator[Spec]:
    colour = f"var(--{series.shade_name})"
    common = {"type": "scatter", "legendgroup": str(number)}
    if series.band is not None:
        yield {**common, **_band(series, *series.band, colour)}
    parts = {"lines": series.dash, "markers": series.symbol}
    look = {
        "mode": "+".join(mode for mode, wanted in parts.items() if wanted),
        "line": {"color": colour, "width": _LINE_WIDTH * series.weight, "dash": _DASHES[series.dash]},
        "marker": _marker(series, colour),
    }
    if series.legend:
        yield {**common, **look, "name": plain(series.legend), "x": [None], "y": [None], "hoverinfo": "skip"}
    yield {
        **common,
        **_hover(series),
        "zorder": round(10 * series.weight),
        "name": plain(series.name),
        "x": rounded(series.x),
        "y": rounded(series.y),
        "showlegend": series.shade is None and series.legend is None,
        **look,
    }
    if series.is_lost:
        x, y = map(rounded, series.last)
        cross = {"symbol": "x", "size": _CROSS_SIZE, "color": colour}
        yield {**common, "x": x, "y": y, "mode": "markers", "marker": cross, "cliponaxis": False, **_UNSAID}


def _band(series: Series, low: np.ndarray, high: np.ndarray, colour: str) -> Spec:
    usable = np.isfinite(low) & np.isfinite(high)
    x, low, high = series.x[usable], low[usable], high[usable]
    return {
        "name": f"{plain(series.name)}, range",
        "x": rounded([*x, *x[::-1]]),
        "y": rounded([*high, *low[::-1]]),
        "mode": "lines",
        "fill": "toself",
        "fillcolor": colour,
        "opacity": 0.2,
        "line": {"width": 0},
        **_UNSAID,
    }


def _hover(series: Series) -> Spec:
    """Words of a point beyond its coordinates."""
    if not series.extra:
        return {}
    columns = map(rounded, series.extra.values())
    lines = [f"{label} %{{customdata[{i}]}}".lstrip() for i, label in enumerate(series.extra)]
    return {
        "customdata": list(zip(*columns, strict=True)),
        "hovertemplate": "<br>".join([*lines, "%{x:.4g}, %{y:.4g}<extra></extra>"]),
    }


def _marker(series: Series, colour: str) -> Spec:
    symbol = {"triangle": "triangle-up", "": "circle"}.get(series.symbol, series.symbol)
    marker: Spec = {"color": colour, "symbol": symbol, "size": _MARK_SIZE * series.weight}
    if series.shade is not None:
        bar = {"title": {"text": "iteration", "side": "right"}, "thickness": 10, "outlinewidth": 0}
        edge = {"width": 0.6, "color": "var(--soft)"}
        marker |= {"colorscale": "var(--shades)", "opacity": 0.9, "line": edge}
        marker |= {"color": rounded(series.shade), "colorbar": bar}
    return marker


def _plotly_grid(grid: Grid, chart: Chart) -> Spec:
    shown, label = grid.values, grid.label
    if grid.log:
        with np.errstate(divide="ignore", invalid="ignore"):
            shown, label = np.log10(grid.values), f"log10 {grid.label}"
    trace: Spec = {
        "type": "heatmap",
        "x": rounded(grid.across),
        "y": rounded(grid.down),
        "z": list(map(rounded, shown)),
        "colorscale": "Viridis",
        "reversescale": grid.reverse,
        "hoverongaps": False,
        "showscale": not grid.text,
        "colorbar": {"title": {"text": label, "side": "right"}, "thickness": 10, "outlinewidth": 0},
        "customdata": list(map(rounded, grid.values)),
        "hovertemplate": f"{plain(chart.y.label)} %{{y}}<br>{plain(chart.x.label)} %{{x}}<br>"
        f"{grid.label} %{{customdata:.4g}}<extra></extra>",
    }
    if grid.text:
        known = np.isfinite(grid.values)
        text = list(map(rounded, grid.text))
        trace |= {"text": np.where(known, text, "").tolist(), "texttemplate": "%{text}", "xgap": 2, "ygap": 2}
    return trace


def _notes(grid: Grid) -> list[Spec]:
    """Text of the cells without a number: plotly would write it as if they were white."""
    if not grid.text:
        return []
    look = {"showarrow": False, "font": {"color": "var(--soft)", "size": 10}}
    # By the number of the category: plotly takes a name such as "10" for the number of one.
    empty = np.argwhere(~np.isfinite(grid.values)).tolist()
    return [{**look, "x": j, "y": i, "text": plain(grid.text[i][j])} for i, j in empty]
