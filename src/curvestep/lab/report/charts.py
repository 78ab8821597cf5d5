"""The charts of a page as data, and as plotly draws them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from curvestep.calibration.result import Calibration
from curvestep.display import results
from curvestep.display.chart import DASHES, GRADIENT, NUM_COLOURS, SMOOTHNESS, Axis, Chart, Grid, Series
from curvestep.display.markup import plain
from curvestep.lab.recipes import Fields
from curvestep.lab.report import captions
from curvestep.lab.report.views import RunView

Spec = dict[str, Any]  # an object of plotly's
_MOST_COMPARED = 500  # points of a curve among others
# Fields of a recipe that do not decide how a run trains, or, the seed, by chance only.
_NOT_SETTINGS = (
    "name", "figures", "scale", "seed", "probe_every", "probe_from", "fractions", "probe_data", "eval_every",
    "eval_size", "log_every",
)  # fmt: skip

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


def run_charts(view: RunView) -> list[Chart]:
    """The charts of one run, as many as its records allow, with their captions."""
    own = [
        results.scatter(view.measured, view.fit),
        results.norm(view.rows, max_norm=view.max_norm),
        results.loss(view.rows, view.held_out, log=view.status == "diverged"),
        results.edge(view.measured),
        results.within(view.fit) if view.fit else None,
        layers(view),
    ]
    charts = [replace(chart, words=captions.OF_RUN[chart.kind](view)) for chart in own if chart is not None]
    if view.calibration:
        charts += calibration_charts(view.calibration)
    return charts


def calibration_charts(found: Calibration) -> list[Chart]:
    """The chart of a calibration with its caption."""
    return [replace(chart, words=captions.calibration(found)) for chart in results.calibration(found)]


def layers(view: RunView) -> Chart | None:
    """Smoothness layer by layer over the steps."""
    if not view.layers:
        return None
    values = np.array(list(view.layers.values()))
    grid = Grid(view.measured["step"].tolist(), list(view.layers), values, "smoothness", log=True)
    return Chart("layers", "Smoothness by layer", Axis("iteration"), Axis(""), grid=grid)


def comparison(views: Sequence[RunView]) -> list[Chart]:
    """Settings of one task on shared axes, one chart a quantity: the mean over the seeds, and their range."""
    settings = seeds_by_setting(views)
    words = captions.comparison(views, len(settings))
    iteration, runs_of = Axis("iteration"), list(settings.values())
    charts = []
    for kind, title, label in (
        ("loss", "training loss", "training loss (running mean)"),
        ("grad_norm", GRADIENT, GRADIENT),
        ("smoothness", SMOOTHNESS, SMOOTHNESS),
    ):
        series = tuple(_curve(name, i, runs, kind) for i, (name, runs) in enumerate(settings.items()))
        y = Axis(label, log=kind != "loss", range=_calm_range(series, runs_of, kind))
        charts.append(Chart(f"comparison-{kind}", title, iteration, y, series, words=words, switch="y"))
    points = tuple(_points(name, i, runs) for i, (name, runs) in enumerate(settings.items()))
    x, y = Axis(GRADIENT, log=True), Axis(SMOOTHNESS, log=True)
    title = "smoothness against gradient norm"
    charts.append(Chart("comparison-scatter", title, x, y, points, words=words, switch="xy"))
    return [chart for chart in charts if any(np.isfinite(one.y).any() for one in chart.series)]


def seeds_by_setting(views: Sequence[RunView]) -> dict[str, list[RunView]]:
    """The seeds of each setting, by its name; a trace alone is a setting of its own.

    Settings of one name are told apart by the fields in which they differ, such as the number of steps.
    """
    groups: dict[str, dict[tuple[tuple[str, Hashable], ...], list[RunView]]] = {}
    for view in views:
        fields = tuple((name, _value(view.fields, name)) for name in view.fields if name not in _NOT_SETTINGS)
        own = groups.setdefault(view.setting if view.fields else view.name, {})
        own.setdefault(fields, []).append(view)
    settings: dict[str, list[RunView]] = {}
    for name, own in groups.items():
        shared = set.intersection(*map(set, own))
        for fields, runs in own.items():
            told = [f"{k.replace('_', ' ')} {_short(v)}" for k, v in fields if v and (k, v) not in shared]
            settings.setdefault(", ".join([name, *told]), []).extend(runs)
    return settings


TrialRow = tuple[Fields, float, str]  # of one run: fields, final training loss, status


def fills_grid(trials: Sequence[TrialRow]) -> bool:
    """Whether runs are at half of the points, or more, of the grid that two or more of their fields span.

    Else a mean over some of them would be over runs that differ in other ways.
    """
    varied = {k: v for k, v in _values(trials).items() if len(v) > 1 and k not in _NOT_SETTINGS}
    points = {tuple(_value(fields, name) for name in varied) for fields, _, _ in trials}
    return len(varied) > 1 and 2 * len(points) >= math.prod(map(len, varied.values()))


def heat_map(trials: Sequence[TrialRow]) -> Chart:
    """Final training loss over the two fields with most values.

    Args:
        trials: At least one. The mean is over runs that agree in both fields, and a cell with a run that has
            no loss says what became of it.
    """
    values = _values(trials)
    columns, *others = sorted(values, key=lambda name: (name in _NOT_SETTINGS, -len(values[name])))
    rows = next((name for name in others if len(values[name]) > 1 and name not in _NOT_SETTINGS), "")
    down, across = values.get(rows, [None]), values[columns]
    cells: list[list[list[tuple[float, str]]]] = [[[] for _ in across] for _ in down]
    for fields, loss, status in trials:
        row, column = down.index(_value(fields, rows)), across.index(_value(fields, columns))
        cells[row][column].append((loss, status))
    grid = Grid(
        [_short(value) for value in across],
        [_short(value) for value in down],
        np.array([[_mean(cell) for cell in row] for row in cells]),
        "final training loss",
        text=[[_note(cell) for cell in row] for row in cells],
        reverse=True,
    )
    axes = Axis(columns.replace("_", " ")), Axis(rows.replace("_", " "))
    return Chart("heat", "Final training loss", *axes, words=captions.heat(grid, rows, columns), grid=grid)


def _values(trials: Sequence[TrialRow]) -> dict[str, list[Any]]:
    values: dict[str, list[Any]] = {}
    for name in trials[0][0]:
        found = list(dict.fromkeys(_value(fields, name) for fields, _, _ in trials))
        values[name] = sorted(found) if all(isinstance(v, (int, float)) for v in found) else found
    return values


def _value(fields: Fields, name: str) -> Any:
    found = fields.get(name)
    return tuple(found) if isinstance(found, list) else found


def _curve(name: str, number: int, runs: Sequence[RunView], kind: str) -> Series:
    """One column over the steps: the mean over the seeds of a setting, and their range."""
    look: Spec = {"colour": number % NUM_COLOURS, "dash": DASHES[number // NUM_COLOURS % 4]}
    found = []
    for run in runs:
        rows = run.measured if kind == "smoothness" else run.rows
        if not len(rows.get("step", ())):
            continue
        values = _running_mean(rows[kind]) if kind == "loss" else rows[kind]
        found.append((rows["step"], values))
    if not found:
        return Series(name, np.array([]), np.array([]), **look)
    steps, values = results.on_common_steps(found)
    keep = results.thinned(np.arange(len(steps)), _MOST_COMPARED)
    return results.over_seeds(name, steps[keep], values[:, keep], **look)


def _points(name: str, number: int, runs: Sequence[RunView]) -> Series:
    """Smoothness against gradient norm, all seeds of a setting together."""
    empty = np.array([])
    x = np.concatenate([run.measured.get("grad_norm", empty) for run in runs])
    y = np.concatenate([run.measured.get("smoothness", empty) for run in runs])
    return Series(name, x, y, colour=number % NUM_COLOURS, dash="", mark="circle")


def _running_mean(values: np.ndarray) -> np.ndarray:
    """Mean over the last twentieth of the rows, 50 at most: the loss of single batches hides what differs."""
    window = min(50, max(1, len(values) // 20))
    rows, means = results.running_mean(np.arange(len(values)), values, window)
    smooth = np.full(len(values), np.nan)
    smooth[rows] = means
    return smooth


def _calm_range(
    series: Sequence[Series], settings: Sequence[Sequence[RunView]], kind: str
) -> tuple[float, float] | None:
    """A run that diverged would press all others flat: the axis ends a little above the ones that did not."""
    calm = []
    for one, runs in zip(series, settings, strict=True):
        if not any(run.status == "diverged" for run in runs):
            calm.append(one.y[np.isfinite(one.y)])
    if not calm or len(calm) == len(series):
        return None
    values = np.concatenate(calm)
    if kind != "loss":
        values = values[values > 0]
    if not len(values):
        return None
    low, high = float(values.min()), float(values.max())
    if kind == "loss":
        room = 0.08 * (high - low) or 1.0
        return low - room, high + room
    room = (high / low) ** 0.08 if high > low else 2.0
    return low / room, high * room


def _mean(cell: Sequence[tuple[float, str]]) -> float:
    losses = [loss for loss, _ in cell]
    if not losses or not all(map(math.isfinite, losses)):
        return math.nan
    return sum(losses) / len(losses)


def _note(cell: Sequence[tuple[float, str]]) -> str:
    """The text of a cell: its loss, or what became of the runs that have none."""
    if not cell:
        return captions.NOT_RUN
    if math.isfinite(mean := _mean(cell)):
        return f"{mean:#.3g}".rstrip(".")
    lost = Counter(status or "no loss" for loss, status in cell if not math.isfinite(loss))
    if lost.total() == len(cell) and len(lost) == 1:
        return next(iter(lost))
    return ", ".join(f"{count} of {len(cell)} {status}" for status, count in lost.items())


def _short(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        return "+".join(_short(item) for item in value)
    if not isinstance(value, float):
        return str(value)
    return "no clipping" if math.isinf(value) else f"{value:g}"


def to_plotly(chart: Chart) -> Spec:
    """The chart as plotly's ``data`` and ``layout``; under ``scales`` what changes with the kind of axis."""
    layout: Spec = {
        f"{name}axis": {"title": {"text": plain(getattr(chart, name).label), "standoff": 8}} for name in "xy"
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

    def one(value: Any) -> Any:
        if isinstance(value, str):
            return plain(value)
        if not math.isfinite(value):
            return None
        if float(value).is_integer() and abs(value) < 1e15:
            return int(value)
        return float(f"{value:.5g}")

    return [one(value) for value in values]


def _scale(chart: Chart, name: str, *, log: bool) -> Spec:
    """Kind, range and ticks of an axis, logarithmic or linear."""
    axis = getattr(chart, name)
    values = np.concatenate([np.array([]), *(getattr(series, name) for series in chart.series)])
    values = values[np.isfinite(values)]
    if not log:
        return _linear_scale(axis, values)
    values = values[values > 0]
    limits = axis.range
    if limits is not None and limits[0] <= 0:
        limits = (float(values.min()), limits[1]) if len(values) else None
    ticks = log_ticks(*(limits or _ends(values)), most={"x": 6, "y": 8}[name])
    return {
        "type": "log",
        "range": limits and [math.log10(end) for end in limits],
        "tickmode": "array",
        "tickvals": rounded(ticks),
        "ticktext": [_power(tick) for tick in ticks],
    }


def _linear_scale(axis: Axis, values: np.ndarray) -> Spec:
    low, high = axis.range or _ends(values)
    scale: Spec = {"type": "linear", "range": axis.range and list(axis.range), "tickmode": "auto"}
    if axis.label == "iteration" and high - low <= 8:  # a tick at each step
        scale |= {"tickmode": "linear", "dtick": 1}
    return scale


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
    if top - bottom > 2:
        every = max(1, math.ceil((top - bottom) / most))
        return [float(f"1e{d}") for d in decades if d % every == 0]
    fine = (1, 2, 5)
    if top - bottom <= 1:
        fine = (1, 2, 3, 5, 7)
    if top - bottom <= 0.4:
        fine = (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)
    ticks = [float(f"{m}e{d}") for d in decades for m in fine]
    inside = [i for i, tick in enumerate(ticks) if low <= tick <= high] or [0, len(ticks) - 1]
    return ticks[max(0, inside[0] - 1) : inside[-1] + 2]


def _power(value: float) -> str:
    if 0.00099 <= value < 10001:
        return f"{value:g}"
    digits, _, power = f"{value:e}".partition("e")
    ten = f"10<sup>{int(power)}</sup>"
    return ten if float(digits) == 1 else f"{float(digits):g}·{ten}"


def _plotly_series(series: Series, number: int) -> Iterator[Spec]:
    shade = f"s{series.colour}" if isinstance(series.colour, int) else series.colour
    colour = f"var(--{shade})"
    name, common = plain(series.name), {"type": "scatter", "legendgroup": str(number)}
    if series.low is not None and series.high is not None:
        usable = np.isfinite(series.low) & np.isfinite(series.high)
        x, low, high = series.x[usable], series.low[usable], series.high[usable]
        yield {
            **common, "name": f"{name}, range",
            "x": rounded([*x, *x[::-1]]), "y": rounded([*high, *low[::-1]]),
            "mode": "lines", "fill": "toself", "fillcolor": colour, "opacity": 0.2, "line": {"width": 0},
            "hoverinfo": "skip", "showlegend": False,
        }  # fmt: skip
    trace: Spec = {**common, "name": name, "x": rounded(series.x), "y": rounded(series.y)}
    modes = []
    if series.dash:
        modes.append("lines")
        trace["line"] = {"color": colour, "width": 1.3 if series.thin else 1.6, "dash": series.dash}
    lonely = np.isfinite(series.y).sum() < 2  # a line through one point cannot be seen
    if series.mark or lonely:
        modes.append("markers")
        trace["marker"] = _marker(series, colour)
    trace["mode"] = "+".join(modes)
    if series.extra:
        columns = [rounded(column) for column in series.extra.values()]
        trace["customdata"] = [list(row) for row in zip(*columns, strict=True)]
        lines = [f"{label} %{{customdata[{i}]}}".lstrip() for i, label in enumerate(series.extra)]
        trace["hovertemplate"] = "<br>".join([*lines, "%{x:.4g}, %{y:.4g}<extra></extra>"])
    yield trace


def _marker(series: Series, colour: str) -> Spec:
    symbol = {"triangle": "triangle-up", "": "circle"}.get(series.mark, series.mark)
    marker: Spec = {"color": colour, "symbol": symbol, "size": 4 if series.thin else 6}
    if series.hollow is not None:
        marker["symbol"] = [f"{symbol}-open" if hollow else symbol for hollow in series.hollow]
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
        "z": [rounded(row) for row in shown],
        "colorscale": "Viridis",
        "reversescale": grid.reverse,
        "hoverongaps": False,
        "colorbar": {"title": {"text": label, "side": "right"}, "thickness": 10, "outlinewidth": 0},
        "customdata": [rounded(row) for row in grid.values],
        "hovertemplate": f"{plain(chart.y.label)} %{{y}}<br>{plain(chart.x.label)} %{{x}}<br>"
        f"{grid.label} %{{customdata:.4g}}<extra></extra>",
    }
    if grid.text:
        known = np.isfinite(grid.values)
        text = [[plain(cell) for cell in row] for row in grid.text]
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
