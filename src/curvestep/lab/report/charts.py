"""Every chart of a report as data: built once, drawn by the page (plotly) and into files (matplotlib)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from curvestep.calibration.result import Calibration
from curvestep.fit.within import mean_norms
from curvestep.lab.report import captions
from curvestep.lab.report.views import RunView, thinned

DASHES = ("solid", "dash", "dashdot", "dot")
NUM_COLOURS = 7
GRADIENT = "gradient norm ‖∇f(x)‖"
SMOOTHNESS = "local smoothness L̂(x)"
NOT_RUN = "not run"  # in a cell of a map
_MOST_COMPARED = 500  # points of a curve among others
_NOT_SETTINGS = ("name", "figures", "scale", "seed")


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis: its label, whether it is logarithmic, and its range where the data should not decide."""

    label: str
    log: bool = False
    range: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve or cloud of points.

    Args:
        name: In the legend.
        x: Where, not finite where there is a gap.
        y: Likewise.
        colour: A number in the palette, or ``ink`` or ``soft``.
        dash: ``solid``, ``dash``, ``dashdot``, ``dot``; empty for points without a line.
        mark: ``circle``, ``triangle``, ``square`` or empty.
        hollow: Which marks are drawn open.
        shade: Iterations, to colour the marks by.
        low: Lower end of a band around the curve.
        high: Upper end of the band.
        extra: What a point says beyond its coordinates, by name.
        thin: Draw a fine line.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    colour: int | str = 0
    dash: str = "solid"
    mark: str = ""
    hollow: np.ndarray | None = None
    shade: np.ndarray | None = None
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    extra: Mapping[str, Sequence[Any] | np.ndarray] = field(default_factory=dict)
    thin: bool = False


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Numbers over two axes, shown by colour.

    Args:
        across: Values or names to the right.
        down: Names downwards.
        values: Shaped (down, across); not finite where there is none.
        label: What the numbers are.
        text: What to write into the cells.
        log: Colours by the logarithm.
        reverse: Dark is large.
    """

    across: Sequence[float | str]
    down: Sequence[str]
    values: np.ndarray
    label: str
    text: Sequence[Sequence[str]] = ()
    log: bool = False
    reverse: bool = False


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What a chart shows.

    Args:
        kind: ``scatter``, ``norm``, ``loss``, …: part of its name on the page and on disk.
        title: Above it.
        words: The same in a sentence or two: its caption, and all that a screen reader has of it.
        x: Horizontal axis.
        y: Vertical axis.
        series: Curves and points, in drawing order.
        grid: Instead of ``series``: a map.
        span: An interval on the horizontal axis, shown as an upright band.
        switch: The axes that the reader may change between logarithmic and linear: ``xy``, ``y`` or none.
    """

    kind: str
    title: str
    words: str
    x: Axis
    y: Axis
    series: tuple[Series, ...] = ()
    grid: Grid | None = None
    span: tuple[float, float] | None = None
    switch: str = ""


def run_charts(view: RunView) -> list[Chart]:
    """The charts of one run, as many as its records allow."""
    charts = [scatter(view), norm(view), loss(view), edge(view), within(view), layers(view)]
    if view.calibration is not None:
        charts += calibration(view.calibration)
    return [chart for chart in charts if chart is not None]


def scatter(view: RunView) -> Chart | None:
    """Smoothness against gradient norm, coloured by iteration, with the fitted line and the frontier."""
    found = view.usable("grad_norm", "smoothness", "step", "loss", "lr", positive=2)
    if not len(found["step"]):
        return None
    points = Series(
        name="measured",
        x=found["grad_norm"],
        y=found["smoothness"],
        dash="",
        mark="circle",
        shade=found["step"],
        extra={name: found[name] for name in ("step", "loss", "lr")},
    )
    fitted: list[Series] = []
    if view.fit is not None:
        norms = np.geomspace(*view.fit.grad_norm_range, 60)
        line = f"{view.fit.quantile:.0%} line: {view.fit.L0:.3g} + {view.fit.L1:.3g}‖g‖"
        fitted = [
            Series(name=line, x=norms, y=view.fit.L0 + view.fit.L1 * norms, colour=1),
            Series(
                name="frontier", x=norms, y=view.fit.envelope(norms), colour="ink", dash="dash", thin=True
            ),
        ]
    return Chart(
        kind="scatter",
        title="Smoothness against gradient norm",
        words=captions.scatter(view),
        x=Axis(label=GRADIENT, log=True),
        y=Axis(label=SMOOTHNESS, log=True),
        series=(points, *fitted),
        switch="xy",
    )


def norm(view: RunView) -> Chart | None:
    """Gradient norm over the steps, the clipped ones marked."""
    rows = view.rows
    if not np.isfinite(rows.get("grad_norm", np.array([]))).any():
        return None
    step, norms, clipped = rows["step"], rows["grad_norm"], np.isfinite(rows["clip_norm"])
    series = [Series(name="gradient norm", x=step, y=norms)]
    if clipped.any():
        marks = Series(
            name="clipped steps", x=step[clipped], y=norms[clipped], colour=1, dash="", mark="triangle"
        )
        series.append(marks)
    if math.isfinite(view.max_norm):
        series.append(_level(step, view.max_norm, "clipping starts"))
    return Chart(
        kind="norm",
        title="Gradient norm",
        words=captions.norm(view),
        x=Axis(label="iteration"),
        y=Axis(label=GRADIENT, log=True),
        series=tuple(series),
    )


def loss(view: RunView) -> Chart | None:
    """Training loss over the steps, and the held-out loss where there is one."""
    rows = view.rows
    if not np.isfinite(rows.get("loss", np.array([]))).any():
        return None
    series = [Series(name="training loss", x=rows["step"], y=rows["loss"])]
    if len(view.held_out.get("step", ())):
        held_out = view.held_out
        series.append(
            Series(name="held-out loss", x=held_out["step"], y=held_out["loss"], colour=1, mark="square")
        )
    return Chart(
        kind="loss",
        title="Loss",
        words=captions.loss(view),
        x=Axis(label="iteration"),
        y=Axis(label="loss", log=view.status == "diverged"),
        series=tuple(series),
        switch="y",
    )


def edge(view: RunView) -> Chart | None:
    """lr·L/2 over the steps: above 1 a step of plain descent overshoots."""
    found = view.usable("step", "lr", "smoothness", positive=0)
    if not (np.isfinite(found["lr"]) & np.isfinite(found["smoothness"])).any():
        return None
    series = [Series(name="lr·L/2", x=found["step"], y=found["lr"] * found["smoothness"] / 2)]
    m = view.measured
    with np.errstate(divide="ignore", invalid="ignore"):
        taken = m["step_norm"] / m["grad_norm"] * m["smoothness"] / 2
    series.append(Series(name="with the step as taken", x=m["step"], y=taken, colour=2, dash="dot"))
    series.append(_level(m["step"], 1.0, "edge of stability", colour=1))
    return Chart(
        kind="edge",
        title="lr·L/2 and the edge of stability",
        words=captions.edge(view),
        x=Axis(label="iteration"),
        y=Axis(label="lr·L/2", log=True),
        series=tuple(series),
    )


def within(view: RunView) -> Chart | None:
    """By how much smoothness and gradient norm change together inside single steps, on one batch."""
    if view.fit is None or view.fit.within.missing:
        return None
    samples = view.fit.samples
    norms = mean_norms(samples.grad_norm, samples.grad_norms, np.array(samples.fractions))
    with np.errstate(divide="ignore", invalid="ignore"):
        x, y = (np.diff(np.log(values), axis=1)[:, -1] for values in (norms, samples.secants))
    shown = np.isfinite(x) & np.isfinite(y)
    ends = np.array([min(0.0, x[shown].min()), max(0.0, x[shown].max())])
    elasticity = view.fit.within.elasticity
    points = Series(
        name="single steps",
        x=x[shown],
        y=y[shown],
        dash="",
        mark="circle",
        shade=samples.step[shown],
        extra={"step": samples.step[shown]},
    )
    return Chart(
        kind="within",
        title="Inside single steps",
        words=f"{captions.within(view)} Each point is one step: the change of both over its last part.",
        x=Axis(label="change of log gradient norm"),
        y=Axis(label="change of log smoothness"),
        series=(
            points,
            Series(name=f"elasticity {elasticity:.2f}", x=ends, y=elasticity * ends, colour=1),
            _level(ends, 0.0, "constant Hessian"),
        ),
    )


def layers(view: RunView) -> Chart | None:
    """Smoothness layer by layer over the steps."""
    if not view.layers:
        return None
    grid = Grid(
        across=view.measured["step"].tolist(),
        down=list(view.layers),
        values=np.array(list(view.layers.values())),
        label="smoothness",
        log=True,
    )
    return Chart(
        kind="layers",
        title="Smoothness by layer",
        words=captions.layers(view),
        x=Axis(label="iteration"),
        y=Axis(label=""),
        grid=grid,
    )


def calibration(found: Calibration) -> list[Chart]:
    """Change of the gradient and of the loss over steps of growing length, one line a batch.

    Filled marks are safe steps, open ones are not; the band is the 90 % interval of the safe step.
    """
    safe = median(batch.safe_step for batch in found.curve)
    low, high = (end / found.lr * safe for end in found.lr_interval)
    kappas, losses = [], []
    for number, batch in enumerate(found.curve):
        common = {
            "name": f"batch {number + 1}",
            "x": np.array([point.step for point in batch.points]),
            "colour": number % NUM_COLOURS,
            "mark": "circle",
            "hollow": np.array([not point.safe for point in batch.points]),
        }
        change = np.array([point.loss for point in batch.points]) - batch.loss
        said = [f"{by:+.3g}" if math.isfinite(by) else "not finite" for by in change.tolist()]
        notes = [
            f"{'safe' if point.safe else 'not safe'}, loss {by}"
            for point, by in zip(batch.points, said, strict=True)
        ]
        kappa = np.array([point.kappa for point in batch.points])
        kappas.append(Series(**common, y=kappa, extra={"": notes}))
        losses.append(Series(**common, y=change))
    # A step far beyond the safe ones may raise the loss a thousandfold, and is not the point.
    finite = np.concatenate([series.y[np.isfinite(series.y)] for series in losses] or [np.zeros(1)])
    lowest, highest = (float(finite.min()), float(finite.max())) if len(finite) else (-1.0, 1.0)
    steps = np.concatenate([series.x for series in kappas])
    ends = np.array([steps.min(), steps.max()])
    positive = np.concatenate([series.y[series.y > 0] for series in kappas])
    positive = np.append(positive[np.isfinite(positive)], found.max_kappa)
    words, span = captions.calibration(found), (low, high) if low < high else None
    changes = (
        "change of the slope along the step, κ(h)" if found.along_signs else "change of the gradient, h·L̂(h)"
    )
    upright = {"name": f"safe step {safe:.3g}", "x": np.array([safe, safe]), "colour": "soft"}
    room = (1.15 * lowest, min(max(highest, -0.2 * lowest), -0.8 * lowest)) if lowest < 0 else None
    return [
        Chart(
            kind="calibration",
            title="Where the step stops being safe",
            words=words,
            x=Axis(label="step h", log=True),
            y=Axis(label=changes, log=True),
            series=(
                *kappas,
                _level(ends, found.max_kappa, "largest safe change"),
                Series(**upright, y=np.array([positive.min(), positive.max()])),
            ),
            span=span,
        ),
        Chart(
            kind="calibration-loss",
            title="Change of the loss over the step",
            words=captions.calibration_loss(found),
            x=Axis(label="step h", log=True),
            y=Axis(label="change of the loss over the step", range=room),
            series=(
                *losses,
                _level(ends, 0.0, "no change"),
                Series(**upright, y=np.array(room or (lowest, highest))),
            ),
            span=span,
        ),
    ]


def comparison(views: Sequence[RunView]) -> list[Chart]:
    """Settings of one task on shared axes, one chart a quantity: the mean over the seeds, and their range."""
    settings: dict[str, list[RunView]] = {}
    for view in views:
        settings.setdefault(view.setting if view.fields else view.name, []).append(view)
    charts = []
    for kind, title in (
        ("loss", "training loss (running mean)"),
        ("grad_norm", GRADIENT),
        ("smoothness", SMOOTHNESS),
        ("scatter", SMOOTHNESS),
    ):
        series = tuple(
            _setting(name, number, runs, kind) for number, (name, runs) in enumerate(settings.items())
        )
        if not any(np.isfinite(one.y).any() for one in series):
            continue
        charts.append(
            Chart(
                kind=f"comparison-{kind}",
                title="smoothness against gradient norm" if kind == "scatter" else title.partition(" (")[0],
                words=captions.comparison(views),
                x=Axis(label=GRADIENT, log=True) if kind == "scatter" else Axis(label="iteration"),
                y=Axis(
                    label=title, log=kind != "loss", range=_calm_range(series, list(settings.values()), kind)
                ),
                series=series,
                switch="xy" if kind == "scatter" else "y",
            )
        )
    return charts


def heat_map(trials: Sequence[tuple[Mapping[str, Any], float, str]]) -> Chart:
    """Final training loss over the two fields with most values.

    Args:
        trials: Of each run its fields, its final training loss and its status; at least one. The mean is over
            runs that agree in both fields, and a cell with a run that has no loss says what became of it.
    """
    values = {name: _values(trials, name) for name in trials[0][0]}
    columns, *others = sorted(values, key=lambda name: (name in _NOT_SETTINGS, -len(values[name])))
    rows = next((name for name in others if len(values[name]) > 1 and name not in _NOT_SETTINGS), "")
    down, across = values.get(rows, [None]), values[columns]
    cells = [
        [
            [(loss, status) for fields, loss, status in trials if _at(fields, rows, columns) == (i, j)]
            for j in across
        ]
        for i in down
    ]
    grid = Grid(
        across=[_short(value) for value in across],
        down=[_short(value) for value in down],
        values=np.array([[_mean(cell) for cell in row] for row in cells]),
        label="final training loss",
        text=[[_note(cell) for cell in row] for row in cells],
        reverse=True,
    )
    return Chart(
        kind="heat",
        title="Final training loss",
        words=captions.heat(grid, rows, columns),
        x=Axis(label=columns.replace("_", " ")),
        y=Axis(label=rows.replace("_", " ")),
        grid=grid,
    )


def _level(x: np.ndarray, y: float, name: str, *, colour: int | str = "ink") -> Series:
    """A level line over the range of ``x``."""
    ends = np.array([np.nanmin(x), np.nanmax(x)])
    return Series(name=name, x=ends, y=np.array([y, y]), colour=colour, dash="dash", thin=True)


def _setting(name: str, number: int, runs: Sequence[RunView], kind: str) -> Series:
    look = {"name": name, "colour": number % NUM_COLOURS, "dash": DASHES[number // NUM_COLOURS % 4]}
    if kind == "scatter":
        x, y = (
            np.concatenate([run.measured.get(column, np.array([])) for run in runs])
            for column in ("grad_norm", "smoothness")
        )
        return Series(**{**look, "dash": "", "mark": "circle"}, x=x, y=y)
    found = [run.measured if kind == "smoothness" else run.rows for run in runs]
    found = [rows for rows in found if len(rows.get("step", ()))]
    if not found:
        return Series(**look, x=np.array([]), y=np.array([]))
    # Seeds end at different steps where one diverged: the mean is over steps that all of them have.
    steps = found[0]["step"]
    for rows in found[1:]:
        steps = np.intersect1d(steps, rows["step"])
    curves = np.array(
        [
            (_running_mean(rows[kind]) if kind == "loss" else rows[kind])[np.isin(rows["step"], steps)]
            for rows in found
        ]
    ).reshape(len(found), len(steps))
    keep = thinned(np.arange(len(steps)), _MOST_COMPARED)
    steps, curves = steps[keep], curves[:, keep]
    with np.errstate(over="ignore", invalid="ignore"):
        band = {"low": curves.min(axis=0), "high": curves.max(axis=0)} if len(found) > 1 else {}
        return Series(**look, x=steps, y=curves.mean(axis=0), **band)


def _running_mean(values: np.ndarray) -> np.ndarray:
    """Mean over the last twentieth of the rows, 50 at most: the loss of single batches hides what differs."""
    window = min(50, max(1, len(values) // 20))
    sums = np.concatenate([[0.0], np.cumsum(np.where(np.isfinite(values), values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(np.isfinite(values))])
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - window, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(
            np.isfinite(values), (sums[end] - sums[start]) / (counts[end] - counts[start]), np.nan
        )


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


def _values(trials: Sequence[tuple[Mapping[str, Any], float, str]], name: str) -> list[Any]:
    found = list(dict.fromkeys(_at(fields, name)[0] for fields, _, _ in trials))
    return sorted(found) if all(isinstance(value, (int, float)) for value in found) else found


def _at(fields: Mapping[str, Any], *names: str) -> tuple[Any, ...]:
    found = [fields.get(name) for name in names]
    return tuple(tuple(value) if isinstance(value, list) else value for value in found)


def _mean(cell: Sequence[tuple[float, str]]) -> float:
    losses = [loss for loss, _ in cell]
    return sum(losses) / len(losses) if losses and all(map(math.isfinite, losses)) else math.nan


def _note(cell: Sequence[tuple[float, str]]) -> str:
    """What a cell says: its loss, or what became of the runs that have none."""
    if not cell:
        return NOT_RUN
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
