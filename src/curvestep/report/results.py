"""The charts of a trace, a fit and a calibration, as data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from curvestep.report.chart import GRADIENT, NUM_COLOURS, SHARPNESS, THIN, Axis, Chart, Series
from curvestep.trace.schema import FIELDS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvestep.calibration.result import Calibration
    from curvestep.fit.fit import SmoothnessFit
    from curvestep.trace.step_gains import StepGains
    from curvestep.trace.trace import Trace

SHOWN_ROWS = 4000  # longer series are shown by evenly spaced rows
Columns = Mapping[str, np.ndarray]
Look = dict[str, Any]  # keyword arguments of a series
_NONE = np.array([])


def draw_charts(charts: Sequence[Chart], *, title: str = "", note: str = "") -> Figure:
    """The charts side by side, by matplotlib (extra `report`)."""
    from curvestep.report.drawing import figure_of

    return figure_of(charts, title=title, note=note)


def columns_of(trace: Trace) -> dict[str, np.ndarray]:
    """Columns of the rows that were measured without trouble, with ``Trace.clip_norm``.

    Layers are columns as in the trace: ``layers/encoder/smoothness``.
    """
    keep = thinned(np.flatnonzero(trace.ok & np.isfinite(trace.column("grad_norm"))))
    names = [name for name, field in FIELDS.items() if field.kind in ("count", "number")]
    names += [name for name in trace.names if name.startswith("layers/") and name.endswith("/smoothness")]
    rows = {name: trace.column(name)[keep] for name in names}
    rows["clip_norm"] = trace.clip_norm[keep]
    return rows


def finite(values: np.ndarray) -> np.ndarray:
    """The values without NaN and infinity."""
    return values[np.isfinite(values)]


def thinned(rows: np.ndarray, most: int = SHOWN_ROWS) -> np.ndarray:
    """At most ``most`` of the rows, evenly spaced, the first and the last among them."""
    if len(rows) <= most:
        return rows
    return rows[np.unique(np.linspace(0, len(rows) - 1, most).round().astype(int))]


def usable(rows: Columns, *names: str, positive: int | None = None) -> dict[str, np.ndarray]:
    """These columns, of the rows where the first ``positive`` of them (default all) are positive."""
    columns = {name: rows.get(name, _NONE) for name in names}
    checked = np.array([columns[name] for name in names[:positive]])
    keep = np.all(np.isfinite(checked) & (checked > 0), axis=0)
    return {name: column[keep] for name, column in columns.items()}


def common_threshold(clip_norm: np.ndarray) -> float:
    """The one gradient norm at which steps were clipped; inf if none was, or at different ones."""
    clipped = finite(clip_norm)
    if len(clipped) and np.ptp(clipped) <= 1e-3 * np.median(clipped):
        return float(np.median(clipped))
    return math.inf


def trace_charts(trace: Trace) -> list[Chart]:
    """Loss, gradient norm, smoothness against it, and the stability margin, as far as they were measured."""
    rows = columns_of(trace)
    charts = [
        loss(rows),
        norm(rows, max_norm=common_threshold(rows["clip_norm"])),
        scatter(rows),
        stability_margin(rows),
    ]
    if not any(charts):
        raise ValueError(f"There is nothing to plot: none of the {len(trace)} rows was measured.")
    return [chart for chart in charts if chart is not None]


def gain_charts(gains: StepGains) -> list[Chart]:
    """Gain, penalty and rest of each measured step, and the penalty of the layers where it is largest."""
    x = Axis("iteration")
    y = Axis("loss")
    step = gains.step.astype(float)
    curves = {"gain": gains.gain, "penalty": gains.penalty, "rest": gains.rest}
    series = [Series(name, step, values, colour=i) for i, (name, values) in enumerate(curves.items())]
    charts = [Chart("step_gains", "Gain and penalty of a step", x, y, tuple(series))]
    if gains.layers:
        names = sorted(gains.layers, key=lambda name: -gains.layers[name].penalty.sum())[:NUM_COLOURS]
        series = [Series(name, step, gains.layers[name].penalty, colour=i) for i, name in enumerate(names)]
        charts.append(Chart("layer_penalty", "Penalty of a step by layer", x, y, tuple(series)))
    return charts


def shows_law(fit: SmoothnessFit) -> bool:
    """Whether a line may stand for the points: not where the test within steps cannot tell."""
    return fit.within.doubt is None


def scatter(rows: Columns, fit: SmoothnessFit | None = None) -> Chart | None:
    """Smoothness against gradient norm, coloured by iteration; line and frontier where there is a law."""
    points = usable(rows, "grad_norm", "smoothness", "step", "loss", "lr", positive=2)
    step = points["step"]
    if not len(step):
        return None
    extra = {name: points[name] for name in ("step", "loss", "lr")}
    look: Look = {"dash": "", "mark": "circle", "shade": step, "extra": extra}
    series = [Series("measured", points["grad_norm"], points["smoothness"], **look)]
    if fit is not None and shows_law(fit):
        norms = np.geomspace(*fit.grad_norm_range, 60)
        line = f"{fit.quantile:.0%} line: {fit.L0:.3g} + {fit.L1:.3g}‖g‖"
        series.append(Series(line, norms, fit.L0 + fit.L1 * norms, colour=1))
        frontier = fit.envelope(norms)
        series.append(Series("frontier", norms, frontier, colour="ink", dash="dash", weight=THIN))
    x = Axis(GRADIENT, log=True)
    y = Axis(SHARPNESS, log=True)
    return Chart("scatter", "Sharpness against gradient norm", x, y, tuple(series), switch="xy")


def norm(rows: Columns, *, max_norm: float = math.inf) -> Chart | None:
    """Gradient norm over the steps, the clipped ones marked."""
    if not np.isfinite(rows.get("grad_norm", _NONE)).any():
        return None
    step = rows["step"]
    norms = rows["grad_norm"]
    clipped = np.isfinite(rows["clip_norm"])
    series = [Series("gradient norm", step, norms)]
    if clipped.any():
        look = {"colour": 1, "dash": "", "mark": "triangle"}
        series.append(Series("clipped steps", step[clipped], norms[clipped], **look))
    if math.isfinite(max_norm):
        series.append(level(step, max_norm, "clipping starts"))
    return Chart("norm", "Gradient norm", Axis("iteration"), Axis(GRADIENT, log=True), tuple(series))


def loss(rows: Columns, held_out: Columns | None = None, *, diverged: bool = False) -> Chart | None:
    """Training loss over the steps, red if the run diverged, and the held-out loss where there is one."""
    if not np.isfinite(rows.get("loss", _NONE)).any():
        return None
    colour = "bad" if diverged else 0
    series = [Series("training loss", rows["step"], rows["loss"], colour=colour, diverged=diverged)]
    if held_out and len(held_out["step"]):
        series.append(Series("held-out loss", held_out["step"], held_out["loss"], colour=1, mark="square"))
    return Chart("loss", "Loss", Axis("iteration"), Axis("loss", log=diverged), tuple(series), switch="y")


def stability(rows: Columns) -> tuple[np.ndarray, float]:
    """For each row lr times smoothness over what is stable on a quadratic, and that limit.

    It is 2 for plain descent; for momentum and Adam it is another, of the smoothness in their own metric.
    """
    known = finite(rows.get("optimizer_limit", _NONE))
    limit = 2.0
    column = "smoothness"
    if len(known) and np.median(known) != limit:
        limit = float(np.median(known))
        column = "optimizer_smoothness"
    with np.errstate(invalid="ignore"):
        return rows["lr"] * rows[column] / limit, limit


def stability_margin(rows: Columns) -> Chart | None:
    """lr·L/2 over the steps, or over another limit of the optimizer's: above 1 a step overshoots."""
    if not rows:
        return None
    margins, limit = stability(rows)
    if not np.isfinite(margins).any():
        return None
    name = f"lr·sharpness/{limit:.3g}"
    limit_line = level(rows["step"], 1.0, "edge of stability", colour=1)
    series = (Series(name, rows["step"], margins), limit_line)
    return Chart("stability_margin", "Stability margin", Axis("iteration"), Axis(name, log=True), series)


def within(fit: SmoothnessFit) -> Chart | None:
    """By how much smoothness and gradient norm change together inside single steps, on one batch."""
    if fit.within.missing:
        return None
    x, y = fit.changes_within()
    shown = np.isfinite(x) & np.isfinite(y)
    x = x[shown]
    y = y[shown]
    step = fit.samples.step[shown]
    ends = np.array([min(0.0, x.min()), max(0.0, x.max())])
    elasticity = fit.within.elasticity
    series = (
        Series("single steps", x, y, dash="", mark="circle", shade=step, extra={"step": step}),
        Series(f"slope {elasticity:.2f}", ends, elasticity * ends, colour=1),
        level(ends, 0.0, "constant sharpness"),
    )
    across = Axis("change of log gradient norm")
    up = Axis("change of log sharpness")
    return Chart("within", "Inside single steps", across, up, series)


def fit_charts(fit: SmoothnessFit) -> list[Chart]:
    """The rows with the fitted line, and what happens inside single steps where that was measured."""
    samples = fit.samples
    names = ("step", "loss", "grad_norm", "smoothness", "lr")
    charts = [scatter({name: getattr(samples, name) for name in names}, fit), within(fit)]
    return [chart for chart in charts if chart is not None]


def calibration(result: Calibration) -> Chart:
    """The gain of each trial against its learning rate, one line per length, and the choice."""
    series = []
    heights = [0.0]
    for number, length in enumerate(result.lengths):
        trials = [trial for trial in result.trials_of(length) if math.isfinite(trial.gain)]
        rates, gains, errors = np.array([(t.lr, t.gain, t.error) for t in trials]).reshape(-1, 3).T
        look = {"colour": number, "mark": "circle", "band": (gains - errors, gains + errors)}
        series.append(Series(f"{length} steps", rates, gains, **look))
        heights += gains.tolist()
    ends = np.array([min(heights), max(heights)])
    chosen_lr = np.array([result.lr, result.lr])
    chosen = Series(f"lr {result.lr:.3g}", chosen_lr, ends, colour="ink", dash="dash")
    x = Axis("learning rate", log=True)
    y = Axis("fall of the loss of other batches")
    return Chart("calibration", "What short trials gained", x, y, (*series, chosen))


def running_mean(steps: np.ndarray, values: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean over the last ``window`` steps at each row; rows that are not finite are left out.

    Example:
        >>> running_mean(np.array([5, 10, 15]), np.array([1.0, 2.0, 6.0]), 10)[1]
        array([1. , 1.5, 4. ])
    """
    usable = np.isfinite(values)
    steps = steps[usable]
    values = values[usable]
    sums = np.concatenate([[0.0], np.cumsum(values)])
    end = np.arange(1, len(values) + 1)
    start = np.searchsorted(steps, steps - window, side="right")
    return steps, (sums[end] - sums[start]) / (end - start)


def on_common_steps(series: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Steps that all seeds have, and their values, shaped (seeds, steps): seeds may end at different ones."""
    common, _ = series[0]
    for steps, _ in series[1:]:
        common = np.intersect1d(common, steps)
    shared = [values[np.isin(steps, common)] for steps, values in series]
    return common, np.array(shared).reshape(len(series), len(common))


def over_seeds(name: str, steps: np.ndarray, values: np.ndarray, **look: Any) -> Series:
    """The mean over the seeds at each step, with their range as a band; ``values`` are (seeds, steps)."""
    with np.errstate(over="ignore", invalid="ignore"):
        mean = Series(name, steps, values.mean(axis=0), **look)
    if len(values) == 1:
        return mean
    return replace(mean, band=(values.min(axis=0), values.max(axis=0)))


def level(x: np.ndarray, y: float, name: str, *, colour: int | str = "ink") -> Series:
    """A level line over the range of ``x``."""
    ends = np.array([np.nanmin(x), np.nanmax(x)])
    return Series(name, ends, np.array([y, y]), colour=colour, dash="dash", weight=THIN)
