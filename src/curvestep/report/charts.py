"""The charts of a page as data: of one run and of the settings of a task; and as plotly draws them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from curvestep.report import page_words, results
from curvestep.report.chart import (
    BOLD,
    DASHES,
    GRADIENT,
    NUM_COLOURS,
    SHARPNESS,
    THIN,
    Axis,
    Chart,
    Series,
)
from curvestep.report.markup import plain
from curvestep.report.views import RunView, seeds_by_setting
from curvestep.trace.run import Fields

_MOST_COMPARED = 500  # points of a curve among others
_NUM_NAMED = 5  # the first curves, where there are more than colours
# Curves of a colour that share an entry of the legend if there are more than this many, and its name.
_TOGETHER = (("pale", 1, "others"), ("bad", 2, "diverged"))
# Of the comparison: column, title, label and whether its axis is logarithmic.
OVER_STEPS = (
    ("loss", "Training loss", "loss (running mean)", False),
    ("grad_norm", "Gradient norm", GRADIENT, True),
    ("smoothness", "Sharpness", SHARPNESS, True),
)
Spec = dict[str, Any]  # an object of plotly's
_LINE_WIDTH, _MARK_SIZE, _CROSS_SIZE = 1.6, 6, 11  # pixels
_SILENT = {"hoverinfo": "skip", "showlegend": False}
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


@dataclass(frozen=True)
class RunChart:
    """A chart of one run: from what it shows, and the sentences below it."""

    draw: Callable[[RunView], Chart | None]  # None where the run has no such records
    words: Callable[[RunView], str]
    _: KW_ONLY
    place: str = ""  # as in :class:`~curvestep.report.chart.Chart`


def of_column(column: str, title: str, *, log: bool = False) -> RunChart:
    """A column of the trace over the steps, none where it was not measured; the schema says what it means."""

    def draw(view: RunView) -> Chart | None:
        values = view.measured.get(column, np.array([]))
        if not np.isfinite(values).any():
            return None
        curve = Series(title.lower(), view.measured["step"], values)
        return Chart(column, title, Axis("iteration"), Axis(curve.name, log=log), (curve,))

    return RunChart(draw, partial(page_words.of_column, column=column, title=title))


def _loss(view: RunView) -> Chart | None:
    return results.loss(view.rows, view.held_out, diverged=view.diverged)


def _norm(view: RunView) -> Chart | None:
    return results.norm(view.rows, max_norm=view.max_norm)


def _stability_margin(view: RunView) -> Chart | None:
    return results.stability_margin(view.measured)


def _scatter(view: RunView) -> Chart | None:
    return results.scatter(view.measured, view.fit)


def _within(view: RunView) -> Chart | None:
    if view.fit is None:
        return None
    return results.within(view.fit)


def _layers(view: RunView) -> Chart | None:
    """Sharpness over the steps, one curve per layer, the sharpest first."""
    if not view.layers:
        return None
    steps = view.measured["step"]
    keep = results.thinned(np.arange(len(steps)), _MOST_COMPARED)
    looks = _looks([False] * len(view.layers))
    series = [
        Series(name, steps[keep], _running_mean(values)[keep], **look)
        for (name, values), look in zip(view.layers.items(), looks, strict=True)
    ]
    y = Axis("sharpness (running mean)", log=True)
    return Chart("layers", "Sharpness by layer", Axis("iteration"), y, tuple(series))


def _calibration(view: RunView) -> Chart | None:
    if view.calibration is None:
        return None
    return results.calibration(view.calibration)


CHARTS = (
    RunChart(_loss, page_words.loss, place="verdict"),
    RunChart(_norm, page_words.norm, place="row"),
    RunChart(_stability_margin, page_words.stability_margin, place="row"),
    RunChart(_scatter, page_words.scatter, place="row"),
    RunChart(_within, page_words.within_chart),
    RunChart(_layers, page_words.layers),
    RunChart(_calibration, page_words.calibration),
)
"""Every chart of one run, in the order of the page. That of a column alone is an :func:`of_column`."""


def run_charts(view: RunView) -> list[Chart]:
    """The charts of one run, as many as its records allow, with their words."""
    drawn = []
    for entry in CHARTS:
        chart = entry.draw(view)
        if chart is not None:
            drawn.append(replace(chart, words=entry.words(view), place=entry.place))
    return drawn


def comparison(views: Sequence[RunView]) -> list[Chart]:
    """Settings of one task, best first, on shared axes, one chart a quantity; none of a run alone."""
    if len(views) < 2:
        return []
    settings = seeds_by_setting(views)
    words = page_words.comparison(views, len(settings))
    looks = _looks([any(run.diverged for run in runs) for runs in settings.values()])
    looks[0]["weight"] = BOLD
    charts = []
    for kind, title, label, log in OVER_STEPS:
        series = tuple(
            _curve(kind, name, runs, look) for (name, runs), look in zip(settings.items(), looks, strict=True)
        )
        y = Axis(label, log=log, range=_calm_range(series, log=log))
        if y.range is not None:
            series = tuple(_cut(one, y.range[1]) for one in series)
        charts.append(
            Chart(f"comparison-{kind}", title, Axis("iteration"), y, series, words=words, switch="y")
        )
    return [chart for chart in charts if any(np.isfinite(one.y).any() for one in chart.series)]


def _looks(diverged: Sequence[bool]) -> list[Fields]:
    """Colour, weight and legend of each curve: the first by name, of many the others by their number."""
    num_named = len(diverged) if len(diverged) <= NUM_COLOURS else _NUM_NAMED
    looks: list[Fields] = []
    for number, is_bad in enumerate(diverged):
        if is_bad:
            looks.append({"colour": "bad", "dash": DASHES[number % len(DASHES)], "diverged": True})
        elif number < num_named:
            looks.append({"colour": number})
        else:
            looks.append({"colour": "pale", "weight": THIN})
    for colour, most, name in _TOGETHER:
        together = [look for look in looks if look["colour"] == colour]
        if len(together) > most:
            for look in together:
                look["legend"] = ""
            together[0]["legend"] = f"{len(together)} {name}"
    return looks


def _curve(kind: str, name: str, runs: Sequence[RunView], look: Fields) -> Series:
    """One column over the steps: the mean over the seeds of a setting, and their range."""
    columns = [run.curve(kind) for run in runs]
    columns = [(steps, values) for steps, values in columns if len(steps)]
    if not columns:
        return Series(name, np.array([]), np.array([]), **look)
    if kind == "loss":
        columns = [(steps, _running_mean(losses)) for steps, losses in columns]
    steps, values = results.on_common_steps(columns)
    keep = results.thinned(np.arange(len(steps)), _MOST_COMPARED)
    return results.over_seeds(name, steps[keep], values[:, keep], **look)


def _cut(series: Series, top: float) -> Series:
    """A setting that diverged up to where it leaves the chart; the others as they are."""
    beyond = np.flatnonzero(series.y > top)
    if not series.diverged or not len(beyond):
        return series
    shown = slice(beyond[0] + 1)
    return replace(series, x=series.x[shown], y=np.minimum(series.y[shown], top), band=None)


def _running_mean(values: np.ndarray) -> np.ndarray:
    """Mean over the last twentieth of the rows, 50 at most: jumps of single batches hide what differs."""
    window = min(50, max(1, len(values) // 20))
    rows, means = results.running_mean(np.arange(len(values)), values, window)
    smooth = np.full(len(values), np.nan)
    smooth[rows] = means
    return smooth


def _calm_range(series: Sequence[Series], *, log: bool) -> tuple[float, float] | None:
    """Runs that diverge would press the others flat: the axis ends a little above the ones with a name."""
    calm = [one.y for one in series if not one.diverged and one.legend is None]
    values = results.finite(np.concatenate([[], *calm]))
    if log:
        values = values[values > 0]
    if len(calm) == len(series) or not len(values):
        return None
    low = float(values.min())
    high = float(values.max())
    if log:
        return low / 1.2, high * 1.2
    room = 0.08 * (high - low) or 1.0
    return low - room, high + room


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
        "line": {"color": colour, "width": _LINE_WIDTH * series.weight, "dash": series.dash or "solid"},
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
    if series.diverged:
        x, y = series.last
        cross = {"symbol": "x", "size": _CROSS_SIZE, "color": colour}
        point = {"x": rounded(x), "y": rounded(y), "mode": "markers", "marker": cross, "cliponaxis": False}
        yield {**common, **point, **_SILENT}


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
        **_SILENT,
    }


def _hover(series: Series) -> Spec:
    """Words of a point beyond its coordinates."""
    if not series.extra:
        return {}
    columns = [rounded(values) for values in series.extra.values()]
    lines = [f"{label} %{{customdata[{i}]}}" for i, label in enumerate(series.extra)]
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
