"""Charts as plotly draws them: objects with its names, for the page's script."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from curvestep.display.chart import DASHES, Axis, Chart, Series
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
    layout: Spec = {}
    for name, axis in (("x", chart.x), ("y", chart.y)):
        title = {"text": plain(axis.label), "standoff": 8}
        layout[f"{name}axis"] = {"title": title, **_scale(chart, name, log=axis.log)}
    data: list[Spec] = []
    for number, series in enumerate(chart.series):
        data += _plotly_series(series, number)
    drawn = {"kind": chart.kind, "data": data, "layout": layout}
    if chart.switch:
        drawn["scales"] = {"log": _scales(chart, log=True), "linear": _scales(chart, log=False)}
    return drawn


def _scales(chart: Chart, *, log: bool) -> Spec:
    """The axes that a reader may change, all logarithmic or all linear."""
    return {f"{name}axis": _scale(chart, name, log=log) for name in chart.switch}


def rounded(values: Iterable[float]) -> list[float | int | None]:
    """Five significant digits, whole numbers whole, None for what is not finite.

    Example:
        >>> rounded(np.array([0.123456789, 20.0, np.nan]))
        [0.12346, 20, None]
    """
    return [_rounded(float(value)) for value in values]


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
