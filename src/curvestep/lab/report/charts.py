"""The charts of a page as data, and as plotly draws them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from curvestep.calibration.result import Calibration
from curvestep.display import results
from curvestep.display.chart import DASHES, GRADIENT, NUM_COLOURS, SMOOTHNESS, Axis, Chart, Grid, Series
from curvestep.display.markup import plain
from curvestep.lab.report import captions
from curvestep.lab.report.views import RunView

_MOST_COMPARED = 500  # points of a curve among others
# Fields of a recipe that do not decide how a run trains, or, the seed, by chance only.
_NOT_SETTINGS = (
    "name", "figures", "scale", "seed", "probe_every", "probe_from", "fractions", "probe_data", "eval_every",
    "eval_size", "log_every",
)  # fmt: skip

# What all charts of the page share. Colours are the style sheet's, which knows day and night.
_AXIS = {"gridcolor": "var(--line)", "linecolor": "var(--line)", "zeroline": False, "automargin": True}
TEMPLATE: dict[str, Any] = {
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
    return charts + (calibration_charts(view.calibration) if view.calibration else [])


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
    charts = []
    kinds = {"loss": "training loss (running mean)", "grad_norm": GRADIENT, "smoothness": SMOOTHNESS}
    for kind, label in (*kinds.items(), ("scatter", SMOOTHNESS)):
        series = tuple(_setting(name, i, runs, kind) for i, (name, runs) in enumerate(settings.items()))
        if not any(np.isfinite(one.y).any() for one in series):
            continue
        points = kind == "scatter"
        title = "smoothness against gradient norm" if points else label.partition(" (")[0]
        x = Axis(GRADIENT, log=True) if points else Axis("iteration")
        y = Axis(label, log=kind != "loss", range=_calm_range(series, list(settings.values()), kind))
        words, switch = captions.comparison(views, len(settings)), "xy" if points else "y"
        charts.append(Chart(f"comparison-{kind}", title, x, y, series, words=words, switch=switch))
    return charts


def seeds_by_setting(views: Sequence[RunView]) -> dict[str, list[RunView]]:
    """The seeds of each setting, by its name; a trace alone is a setting of its own.

    Settings of one name are told apart by the fields in which they differ, such as the number of steps.
    """
    groups: dict[str, dict[tuple[tuple[str, Any], ...], list[RunView]]] = {}
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


TrialRow = tuple[Mapping[str, Any], float, str]  # of one run: fields, final training loss, status


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


def _value(fields: Mapping[str, Any], name: str) -> Any:
    found = fields.get(name)
    return tuple(found) if isinstance(found, list) else found


def _setting(name: str, number: int, runs: Sequence[RunView], kind: str) -> Series:
    look: dict[str, Any] = {"colour": number % NUM_COLOURS, "dash": DASHES[number // NUM_COLOURS % 4]}
    if kind == "scatter":
        x, y = (
            np.concatenate([run.measured.get(column, np.array([])) for run in runs])
            for column in ("grad_norm", "smoothness")
        )
        return Series(name, x, y, colour=look["colour"], dash="", mark="circle")
    found = [run.measured if kind == "smoothness" else run.rows for run in runs]
    found = [rows for rows in found if len(rows.get("step", ()))]
    if not found:
        return Series(name, np.array([]), np.array([]), **look)
    curves = [_running_mean(rows[kind]) if kind == "loss" else rows[kind] for rows in found]
    steps, values = results.on_common_steps([(r["step"], c) for r, c in zip(found, curves, strict=True)])
    keep = results.thinned(np.arange(len(steps)), _MOST_COMPARED)
    return results.over_seeds(name, steps[keep], values[:, keep], **look)


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
    wild = [any(run.status == "diverged" for run in runs) for runs in settings]
    calm = [one.y[np.isfinite(one.y)] for one, away in zip(series, wild, strict=True) if not away]
    calm = np.concatenate(calm) if calm else np.array([])
    calm = calm if kind == "loss" else calm[calm > 0]
    if kind == "scatter" or not any(wild) or not len(calm):
        return None
    low, high = float(calm.min()), float(calm.max())
    if kind != "loss":
        room = (high / low) ** 0.08 if high > low else 2.0
        return low / room, high * room
    room = 0.08 * (high - low) or 1.0
    return low - room, high + room


def _mean(cell: Sequence[tuple[float, str]]) -> float:
    losses = [loss for loss, _ in cell]
    return sum(losses) / len(losses) if losses and all(map(math.isfinite, losses)) else math.nan


def _note(cell: Sequence[tuple[float, str]]) -> str:
    """What a cell says: its loss, or what became of the runs that have none."""
    if not cell:
        return captions.NOT_RUN
    if math.isfinite(mean := _mean(cell)):
        return f"{mean:#.3g}".rstrip(".")
    lost = [status or "no loss" for loss, status in cell if not math.isfinite(loss)]
    counts = {status: lost.count(status) for status in dict.fromkeys(lost)}
    return ", ".join(
        status if count == len(cell) else f"{count} of {len(cell)} {status}"
        for status, count in counts.items()
    )


def _short(value: Any) -> str:
    if isinstance(value, tuple):
        return "+".join(_short(item) for item in value)
    if isinstance(value, float) and math.isinf(value):
        return "no clipping"
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def to_plotly(chart: Chart) -> dict[str, Any]:
    """The chart as plotly's ``data`` and ``layout``; under ``scales`` what changes with the kind of axis."""
    axes = {}
    for name, axis in (("x", chart.x), ("y", chart.y)):
        axes[f"{name}axis"] = {"title": {"text": plain(axis.label), "standoff": 8}}
        if chart.grid is None:
            axes[f"{name}axis"] |= _scale(chart, name, log=axis.log)
        else:
            names = chart.grid.down if name == "y" else chart.grid.across
            kind = "category" if names and isinstance(names[0], str) else "linear"
            axes[f"{name}axis"] |= {"type": kind, "showgrid": False}  # a line would cross out an empty cell
    data = [_plotly_grid(chart.grid, chart)] if chart.grid is not None else []
    for number, series in enumerate(chart.series):
        data += _plotly_series(series, number)
    legend = chart.grid is None and len(chart.series) <= 2 * NUM_COLOURS
    layout: dict[str, Any] = {**axes, "showlegend": legend}
    if chart.grid is not None:
        layout["annotations"] = _notes(chart.grid)
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

    def one(value: Any) -> Any:
        if isinstance(value, str):
            return plain(value)
        if not math.isfinite(value):
            return None
        return int(value) if float(value).is_integer() and abs(value) < 1e15 else float(f"{value:.5g}")

    return [one(value) for value in (values.tolist() if isinstance(values, np.ndarray) else values)]


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
    lonely = np.isfinite(series.y).sum() < 2  # a line through one point cannot be seen
    marks = series.mark or ("circle" if lonely else "")
    mode = "+".join(part for part, on in (("lines", series.dash), ("markers", marks)) if on)
    trace: dict[str, Any] = {**common, "name": name, "mode": mode}
    trace |= {"x": rounded(series.x), "y": rounded(series.y)}
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
        "hovertemplate": f"{plain(chart.y.label)} %{{y}}<br>{plain(chart.x.label)} %{{x}}<br>"
        f"{grid.label} %{{customdata:.4g}}<extra></extra>",
    }
    if grid.text:
        trace |= {
            "text": [
                [plain(text) if math.isfinite(value) else "" for text, value in zip(*row, strict=True)]
                for row in zip(grid.text, grid.values, strict=True)
            ],
            "texttemplate": "%{text}",
            "xgap": 2,
            "ygap": 2,
        }
    return trace


def _notes(grid: Grid) -> list[dict[str, Any]]:
    """What stands in cells without a number: plotly would write it as if they were white."""
    look = {"showarrow": False, "font": {"color": "var(--soft)"}}
    empty = np.argwhere(~np.isfinite(grid.values)).tolist() if grid.text else []
    # By the number of the category: plotly takes a name such as "10" for the number of one.
    return [{**look, "x": j, "y": i, "text": plain(grid.text[i][j])} for i, j in empty]
