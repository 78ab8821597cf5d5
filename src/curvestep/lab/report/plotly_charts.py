"""Charts as plotly draws them: objects with its names, for the page's script."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from curvestep.display.chart import NUM_COLOURS, Axis, Chart, Grid, Series
from curvestep.display.markup import plain
from curvestep.display.results import finite

Spec = dict[str, Any]  # an object of plotly's
_LINE_WIDTH, _MARK_SIZE = {False: 1.6, True: 1.3}, {False: 6, True: 4}  # by whether a series is thin
_MOST_TICKS = {"x": 6, "y": 8}  # of a logarithmic axis, few enough for a phone
# Digits in each decade, by the largest number of decades that they serve.
_FINE_TICKS = {0.4: (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9), 1.0: (1, 2, 3, 5, 7), 2.0: (1, 2, 5)}
# What all charts of the page share. Colours are the style sheet's, which knows day and night.
_AXIS = {"gridcolor": "var(--line)", "linecolor": "var(--line)", "zeroline": False, "automargin": True}
TEMPLATE: Spec = {
    "layout": {
        "margin": {"l": 56, "r": 14, "t": 12, "b": 44}, "hovermode": "closest", "dragmode": False,
        "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "var(--ink)"},
        "hoverlabel": {
            "bgcolor": "var(--card)", "bordercolor": "var(--line)", "font": {"color": "var(--ink)"}
        },
        "legend": {
            "orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "itemclick": False,
            "itemdoubleclick": False,
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
        layout["showlegend"] = len(chart.series) <= 2 * NUM_COLOURS
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
    kind = "category" if names and isinstance(names[0], str) else "linear"
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
    """Kind, range and ticks of an axis, logarithmic or linear."""
    axis: Axis = getattr(chart, name)
    values = finite(np.concatenate([np.array([]), *(getattr(series, name) for series in chart.series)]))
    if log:
        return _log_scale(axis, values[values > 0], most=_MOST_TICKS[name])
    scale: Spec = {"type": "linear", "range": axis.range, "tickmode": "auto"}
    if axis.label == "iteration" and np.ptp(_ends(values)) <= 8:  # a tick at each step
        scale |= {"tickmode": "linear", "dtick": 1}
    return scale


def _log_scale(axis: Axis, values: np.ndarray, *, most: int) -> Spec:
    low, high = limits = axis.range or _ends(values)
    if low <= 0:  # of a range that was meant for a linear axis
        limits = (_ends(values)[0], high)
    ticks = log_ticks(*limits, most=most)
    return {
        "type": "log",
        "range": axis.range and np.log10(limits).tolist(),
        "tickmode": "array",
        "tickvals": rounded(ticks),
        "ticktext": list(map(_power, ticks)),
    }


def _ends(values: np.ndarray) -> tuple[float, float]:
    if not len(values):
        return 1.0, 10.0
    return float(values.min()), float(values.max())


def log_ticks(low: float, high: float, *, most: int) -> list[float]:
    """Ticks of a logarithmic axis: 1, 2, 5 over two decades, else whole decades, few enough for a phone.

    Example:
        >>> log_ticks(0.9, 12.0, most=6), log_ticks(1e-4, 1e4, most=4)
        ([0.5, 1.0, 2.0, 5.0, 10.0, 20.0], [0.0001, 0.01, 1.0, 100.0, 10000.0])
    """
    bottom, top = math.log10(low), math.log10(high)
    decades = range(math.floor(bottom), math.ceil(top) + 1)
    if top - bottom > max(_FINE_TICKS):
        every = max(1, math.ceil((top - bottom) / most))
        return [float(f"1e{decade}") for decade in decades if decade % every == 0]
    digits = next(digits for most_decades, digits in _FINE_TICKS.items() if top - bottom <= most_decades)
    ticks = [float(f"{digit}e{decade}") for decade in decades for digit in digits]
    # One tick below and one above what is inside.
    first = max(0, bisect_left(ticks, low) - 1)
    last = bisect_right(ticks, high) + 1
    return ticks[first:last]


def _power(value: float) -> str:
    if 0.00099 <= value < 10001:
        return f"{value:g}"
    digits, _, power = f"{value:e}".partition("e")
    ten = f"10<sup>{int(power)}</sup>"
    return ten if float(digits) == 1 else f"{float(digits):g}·{ten}"


def _plotly_series(series: Series, number: int) -> Iterator[Spec]:
    shade = f"s{series.colour}" if isinstance(series.colour, int) else series.colour
    colour = f"var(--{shade})"
    common = {"type": "scatter", "legendgroup": str(number)}
    if series.low is not None and series.high is not None:
        yield {**common, **_band(series, series.low, series.high, colour)}
    trace: Spec = {**common, "name": plain(series.name), "x": rounded(series.x), "y": rounded(series.y)}
    modes = []
    if series.dash:
        modes.append("lines")
        trace["line"] = {"color": colour, "width": _LINE_WIDTH[series.thin], "dash": series.dash}
    lonely = np.isfinite(series.y).sum() < 2  # a line through one point cannot be seen
    if series.mark or lonely:
        modes.append("markers")
        trace["marker"] = _marker(series, colour)
    trace["mode"] = "+".join(modes)
    yield {**trace, **_hover(series)}


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
        "hoverinfo": "skip",
        "showlegend": False,
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
    symbol = {"triangle": "triangle-up", "": "circle"}.get(series.mark, series.mark)
    marker: Spec = {"color": colour, "symbol": symbol, "size": _MARK_SIZE[series.thin]}
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
    look = {"showarrow": False, "font": {"color": "var(--soft)"}}
    # By the number of the category: plotly takes a name such as "10" for the number of one.
    empty = np.argwhere(~np.isfinite(grid.values)).tolist()
    return [{**look, "x": j, "y": i, "text": plain(grid.text[i][j])} for i, j in empty]
