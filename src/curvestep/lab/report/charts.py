"""The charts of a page as data: of one run, of the settings of a task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from curvestep.calibration.result import Calibration
from curvestep.display import results
from curvestep.display.chart import (
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
from curvestep.lab.recipe_fields import Fields
from curvestep.lab.report import captions
from curvestep.lab.report.views import RunView, seeds_by_setting

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


def run_charts(view: RunView) -> list[Chart]:
    """The charts of one run, as many as its records allow, with their captions."""
    own = [
        results.loss(view.rows, view.held_out, is_lost=view.is_lost),
        results.norm(view.rows, max_norm=view.max_norm),
        results.edge(view.measured),
        results.scatter(view.measured, view.fit),
        view.fit and results.within(view.fit),
        layers(view),
    ]
    charts = [replace(chart, words=captions.OF_RUN[chart.kind](view)) for chart in filter(None, own)]
    if view.calibration:
        charts += calibration_charts(view.calibration)
    return charts


def calibration_charts(found: Calibration) -> list[Chart]:
    """The chart of a calibration with its caption."""
    return [replace(chart, words=captions.calibration(found)) for chart in results.calibration(found)]


def layers(view: RunView) -> Chart | None:
    """Sharpness over the steps, one curve a layer, the sharpest first."""
    if not view.layers:
        return None
    steps = view.measured["step"]
    keep = results.thinned(np.arange(len(steps)), _MOST_COMPARED)
    looks = _looks([False] * len(view.layers))
    series = [
        Series(name, steps[keep], _running_mean(values)[keep], **look)
        for (name, values), look in zip(view.layers.items(), looks, strict=True)
    ]
    axes = Axis("iteration"), Axis("sharpness (running mean)", log=True)
    return Chart("layers", "Sharpness by layer", *axes, tuple(series))


def comparison(views: Sequence[RunView]) -> list[Chart]:
    """Settings of one task, best first, on shared axes, one chart a quantity; none of a run alone."""
    if len(views) < 2:
        return []
    settings = seeds_by_setting(views)
    words = captions.comparison(views, len(settings))
    looks = _looks([any(run.is_lost for run in runs) for runs in settings.values()])
    looks[0]["weight"] = BOLD
    charts = []
    for kind, title, label, log in OVER_STEPS:
        series = tuple(map(partial(_curve, kind), settings, settings.values(), looks))
        y = Axis(label, log=log, range=_calm_range(series, log=log))
        if y.range is not None:
            series = tuple(_cut(one, y.range[1]) for one in series)
        charts.append(
            Chart(f"comparison-{kind}", title, Axis("iteration"), y, series, words=words, switch="y")
        )
    return [chart for chart in charts if any(np.isfinite(one.y).any() for one in chart.series)]


def _looks(lost: Sequence[bool]) -> list[Fields]:
    """Colour, weight and legend of each curve: the first by name, of many the others by their number."""
    num_named = len(lost) if len(lost) <= NUM_COLOURS else _NUM_NAMED
    looks: list[Fields] = []
    for number, is_lost in enumerate(lost):
        if is_lost:
            looks.append({"colour": "bad", "dash": DASHES[number % len(DASHES)], "is_lost": True})
        elif number < num_named:
            looks.append({"colour": number})
        else:
            looks.append({"colour": "pale", "weight": THIN})
    for colour, most, name in _TOGETHER:
        alike = [look for look in looks if look["colour"] == colour]
        if len(alike) > most:
            for look in alike:
                look["legend"] = ""
            alike[0]["legend"] = f"{len(alike)} {name}"
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
    """A lost setting up to where it leaves the chart; the others as they are."""
    beyond = np.flatnonzero(series.y > top)
    if not series.is_lost or not len(beyond):
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
    calm = [one.y for one in series if not one.is_lost and one.legend is None]
    values = results.finite(np.concatenate([[], *calm]))
    if log:
        values = values[values > 0]
    if len(calm) == len(series) or not len(values):
        return None
    low, high = float(values.min()), float(values.max())
    if log:
        return low / 1.2, high * 1.2
    room = 0.08 * (high - low) or 1.0
    return low - room, high + room
