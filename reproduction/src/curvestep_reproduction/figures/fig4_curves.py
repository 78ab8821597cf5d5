"""Loss and accuracy over the iterations, setting by setting: figure 4 of the paper."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from matplotlib.figure import Figure

from curvestep.report.chart import Axis, Chart, Series
from curvestep.report.results import on_common_steps, over_seeds, running_mean
from curvestep.steps import normalized_from_clipped
from curvestep.trace.run import DIVERGED
from curvestep_reproduction.cost import steps_of
from curvestep_reproduction.figures import legend
from curvestep_reproduction.figures.plan import PaperFigure, Planned, Results
from curvestep_reproduction.recipes import ImageRecipe, LanguageRecipe, with_fields
from curvestep_reproduction.training.run_folder import TrainedRun

TUNED = "lm-lr10clip0.25"  # the best clipped setting at laptop scale
MARKED_POINTS = 12  # points up to which a curve has marks
SMOOTHING, PARTS = 20, 200  # the running mean of the training loss: steps, or a part of a long run


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One setting over several seeds."""

    label: str  # the setting in words
    steps: np.ndarray  # iterations that all seeds reached, ascending
    values: np.ndarray  # one row a seed, shaped (seeds, steps)
    diverged: tuple[float, ...] = ()  # where on the axis seeds diverged, the last first
    colour: int = 0  # number in the palette, by learning rate and momentum
    dash: str = "solid"  # solid with clipping, dashed without; dotted where the learning rate drops

    @property
    def name(self) -> str:
        """The label, and how many seeds diverged."""
        if not self.diverged:
            return self.label
        return f"{self.label} ({len(self.diverged)} of {len(self.values)} diverge)"


def curves(runs: Sequence[TrainedRun], *, title: str = "Training with and without clipping") -> Figure:
    """A row of two panels for each task: training loss, and what the paper shows beside it.

    A line is the mean over the seeds of a setting, the band their range; a triangle at the upper edge marks
    where a run diverged. Colours are learning rates; lines are solid with clipping and dashed without.
    """
    charts: list[Chart] = []
    for kind, beside in _BESIDE.items():
        task = [run for run in runs if isinstance(run.recipe, kind)]
        if task:
            charts += legend.lettered(_task_charts(task, *beside), beside[0])
    return legend.described(charts, runs, title=title)


# Letters of the paper, and what it shows beside the training loss: column, split and title, and the unit.
_BESIDE = {
    LanguageRecipe: ("ab", "loss", "valid", "validation loss", ""),
    ImageRecipe: ("cd", "accuracy", "test", "test accuracy", " (%)"),
}


def _task_charts(
    runs: Sequence[TrainedRun], _: str, column: str, split: str, name: str, unit: str
) -> list[Chart]:
    """Training loss of the runs of one task, and what stands beside it."""
    task, held_out = runs[0].recipe.name, gather(runs, column, split)
    beside = curve_chart(held_out, f"{name}{unit}", title=f"{task}: {name}", time=time_of(runs))
    return [loss_chart(runs, title=f"{task}: training loss"), beside]


def time_of(runs: Sequence[TrainedRun]) -> str:
    """Whether curves go over epochs, as the paper's, or over iterations of runs shorter than one."""
    return "epoch" if all(run.recipe.epochs for run in runs) else "iteration"


def _unit_of(runs: Sequence[TrainedRun]) -> float:
    """Steps that the unit of the axis has: those of an epoch, or one."""
    return steps_of(runs[0].recipe) / runs[0].recipe.epochs if time_of(runs) == "epoch" else 1


def gather(runs: Sequence[TrainedRun], column: str, split: str, *, smoothing: int = 1) -> list[Curve]:
    """The curves of one column, one for each setting, in the order in which settings first appear."""
    settings: dict[str, list[TrainedRun]] = {}
    for run in runs:
        settings.setdefault(run.recipe.label, []).append(run)
    unit, found = _unit_of(runs), []
    for label, own in settings.items():
        series = [running_mean(*run.column(column, split), smoothing) for run in own]
        ends = [run.status["step"] / unit for run in own if run.status["status"] == DIVERGED]
        steps, values = on_common_steps(series)
        recipe = own[0].recipe
        looks = ("dashdot", "dot") if recipe.lr_drops else ("solid", "dash")
        found.append(
            Curve(
                label=f"{label}{_unended(own)}",
                steps=steps / unit,
                values=values,
                diverged=tuple(sorted(ends, reverse=True)),
                colour=legend.colour_of(recipe),
                dash=looks[recipe.max_norm == math.inf],
            )
        )
    return found


def _unended(runs: Sequence[TrainedRun]) -> str:
    """How far the first run came that has not ended; empty if all have."""
    lengths = [f" ({legend.length_words(run)})" for run in runs if not run.has_ended]
    return "".join(lengths[:1])


def loss_chart(runs: Sequence[TrainedRun], *, title: str = "") -> Chart:
    """The training loss of every setting among ``runs``, as a running mean."""
    window = max(SMOOTHING, *(steps_of(run.recipe) // PARTS for run in runs))
    found = gather(runs, "loss", "train", smoothing=window)
    label = f"loss, mean of {window} steps"
    return curve_chart(found, label, title=title or "training loss", time=time_of(runs))


def curve_chart(
    found: Sequence[Curve], label: str, *, title: str, time: str = "iteration", log: bool = False
) -> Chart:
    """Curves over the run: the mean over the seeds, their range as a band.

    The axis holds every seed of the curves that did not diverge: a run that exploded does not decide it.
    """
    limits = None if log else _limits(found)
    series = []
    for curve in found:
        mark = "circle" if len(curve.steps) < MARKED_POINTS else ""
        name = textwrap.fill(curve.name, legend.LEGEND_CHARACTERS)
        look = {"colour": curve.colour, "dash": curve.dash, "mark": mark}
        series.append(over_seeds(name, curve.steps, curve.values, **look))
        if curve.diverged and limits:
            at = np.array(curve.diverged[:1]), np.array([limits[1]])
            series.append(Series("", *at, colour=curve.colour, dash="", mark="triangle"))
    return Chart("curves", title, Axis(time), Axis(label, log=log, range=limits), tuple(series))


def _limits(found: Sequence[Curve]) -> tuple[float, float] | None:
    """The range of the axis; None where nothing was drawn or all diverged."""
    calm = [curve.values.ravel() for curve in found if not curve.diverged and curve.values.size]
    if not calm:
        return None
    low, high = np.min(np.concatenate(calm)), np.max(np.concatenate(calm))
    span = max(high - low, 0.01 * abs(high))  # of one point, too
    return low - 0.05 * span, high + 0.15 * span


# The runs and the pictures


def _all_runs(scale: str) -> list[Planned]:
    short = () if scale == "paper" else (*legend.LANGUAGE, *legend.UNCLIPPED_EPOCH)
    return [
        *legend.runs_of(scale, [*short, *legend.IMAGES, *legend.IMAGES_WITH_DROPS]),
        *legend.long_runs(scale),
        *legend.float32_runs(scale),
        *legend.run_again(scale, legend.CALIBRATED, calibrated=True, probe_every=0, eval_every=0),
    ]


def _draw_curves(results: Results, title: str) -> Figure:
    language = [
        legend.trained_name(results.plan.scale, name) for name in (*legend.LANGUAGE, *legend.UNCLIPPED_EPOCH)
    ]
    settings = results.there((*language, *legend.IMAGES, *legend.IMAGES_WITH_DROPS))
    return curves(list(chain.from_iterable(map(results.shown, settings))), title=title)


FIG4 = PaperFigure(
    name="fig4",
    runs=_all_runs,
    title="Figure 4: training with and without clipping",
    caption="Curves show training and held-out loss, and accuracy. Training losses leave out the "
    "weight penalty, which the paper's include.",
    draw=_draw_curves,
)


# Section 3 as runs: with η_n = γη_c and β = γ the steps agree up to a factor of two at every gradient norm.


def equivalence_runs(scale: str) -> list[Planned]:
    """Clipped settings, and the normalized one that corresponds to the first, at laptop scale."""
    if scale != "laptop":
        return []
    runs = legend.runs_of(scale, [legend.BY_HAND, TUNED])
    for run in legend.runs_of(scale, [legend.BY_HAND]):
        steps = normalized_from_clipped(lr=run.recipe.lr, max_norm=run.recipe.max_norm)
        recipe = with_fields(run.recipe, optimizer="normalized", probe_every=0, **steps)
        runs.append(Planned(legend.NORMALIZED, recipe))
    return runs


def _draw_equivalence(results: Results, title: str) -> Figure:
    """Training losses of clipped descent at two learning rates and of normalized descent."""
    runs = list(chain.from_iterable(map(results.shown, (legend.BY_HAND, TUNED, legend.NORMALIZED))))
    return legend.described([loss_chart(runs)], runs, title=title)


EQUIVALENCE = PaperFigure(
    name="equivalence",
    runs=equivalence_runs,
    title="Clipped and normalized descent from the same start",
    caption="Both train on the same batches. The paper shows no such run.",
    draw=_draw_equivalence,
)
