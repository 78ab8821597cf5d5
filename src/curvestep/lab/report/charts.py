"""The charts of a page as data: of one run, of the settings of a task, and of a sweep."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np

from curvestep.calibration.result import Calibration
from curvestep.display import results
from curvestep.display.chart import DASHES, GRADIENT, NUM_COLOURS, SMOOTHNESS, Axis, Chart, Grid, Series
from curvestep.lab.report import captions
from curvestep.lab.report.views import RunView
from curvestep.lab.sweep_map import NOT_SETTINGS, field_value, short_value

_MOST_COMPARED = 500  # points of a curve among others


def run_charts(view: RunView) -> list[Chart]:
    """The charts of one run, as many as its records allow, with their captions."""
    own = [
        results.scatter(view.measured, view.fit),
        results.norm(view.rows, max_norm=view.max_norm),
        results.loss(view.rows, view.held_out, log=view.status == "diverged"),
        results.edge(view.measured),
        view.fit and results.within(view.fit),
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
    """Settings of one task on shared axes, one chart a quantity: the mean over the seeds, and their range.

    A run alone has nothing to be compared with: no chart.
    """
    if len(views) < 2:
        return []
    settings = seeds_by_setting(views)
    words = captions.comparison(views, len(settings))
    charts = []
    for kind, title, label in (
        ("loss", "training loss", "training loss (running mean)"),
        ("grad_norm", GRADIENT, GRADIENT),
        ("smoothness", SMOOTHNESS, SMOOTHNESS),
    ):
        series = tuple(_curve(name, i, runs, kind) for i, (name, runs) in enumerate(settings.items()))
        log = kind != "loss"
        y = Axis(label, log=log, range=_calm_range(series, list(settings.values()), log=log))
        charts.append(
            Chart(f"comparison-{kind}", title, Axis("iteration"), y, series, words=words, switch="y")
        )
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
        names = [name for name in view.fields if name not in NOT_SETTINGS]
        fields = tuple((name, field_value(view.fields, name)) for name in names)
        own = groups.setdefault(view.setting if fields else view.name, {})
        own.setdefault(fields, []).append(view)
    settings: dict[str, list[RunView]] = {}
    for name, own in groups.items():
        shared = set.intersection(*map(set, own))
        for fields, runs in own.items():
            differ = [(field, value) for field, value in fields if value and (field, value) not in shared]
            words = [f"{field.replace('_', ' ')} {short_value(value)}" for field, value in differ]
            settings.setdefault(", ".join([name, *words]), []).extend(runs)
    return settings


def _curve(name: str, number: int, runs: Sequence[RunView], kind: str) -> Series:
    """One column over the steps: the mean over the seeds of a setting, and their range."""
    look = {"colour": number % NUM_COLOURS, "dash": DASHES[number // NUM_COLOURS % len(DASHES)]}
    tables = [run.measured if kind == "smoothness" else run.rows for run in runs]
    columns = [(rows["step"], rows[kind]) for rows in tables if len(rows.get("step", ()))]
    if not columns:
        return Series(name, np.array([]), np.array([]), **look)
    if kind == "loss":
        columns = [(steps, _running_mean(losses)) for steps, losses in columns]
    steps, values = results.on_common_steps(columns)
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
    series: Sequence[Series], settings: Sequence[Sequence[RunView]], *, log: bool
) -> tuple[float, float] | None:
    """A run that diverged would press all others flat: the axis ends a little above the ones that did not."""
    calm = []
    for one, runs in zip(series, settings, strict=True):
        if "diverged" not in {run.status for run in runs}:
            calm.append(one.y)
    if len(calm) in (0, len(series)):
        return None
    on_axis, back = (np.log2, np.exp2) if log else (np.positive, np.positive)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = results.finite(on_axis(np.concatenate(calm)))
    if not len(values):
        return None
    room = 0.08 * float(np.ptp(values)) or 1.0
    return float(back(values.min() - room)), float(back(values.max() + room))
