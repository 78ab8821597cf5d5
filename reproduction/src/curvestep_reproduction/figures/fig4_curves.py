"""Loss and accuracy over the iterations, setting by setting: figure 4 of the paper."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from curvestep.report.chart import Axis, Chart, Series
from curvestep.report.results import on_common_steps, over_seeds, running_mean
from curvestep.steps import normalized_from_clipped
from curvestep.trace.run import DIVERGED, PART
from curvestep_reproduction.claims.statistics import accuracy, final_loss, spread
from curvestep_reproduction.cost import steps_of
from curvestep_reproduction.figures import legend
from curvestep_reproduction.figures.layout import (
    PANEL,
    Panel,
    dash_of,
    figure_of_panels,
    look_of,
    short_label,
    trained_on,
)
from curvestep_reproduction.figures.plan import PaperFigure, Planned, Results
from curvestep_reproduction.recipes import ImageRecipe, LanguageRecipe, Recipe, with_fields
from curvestep_reproduction.training.run_folder import TrainedRun

TUNED = "lm-lr10clip0.25"  # the best clipped setting at laptop scale
SMOOTHING = 20  # steps in the running mean of the training loss
PARTS = 200  # parts of a long run, one of which it is over
START = 0.1  # share of a run whose losses do not decide the axis: some settings begin with a spike
ROOM = 1.05  # an axis of single points ends this far beyond them
SURVIVOR = 0.5  # weight of the line of a seed whose setting diverges on others
NOTE = (
    "A line is the mean over the seeds, a band their range; thin lines are single seeds of settings that "
    "diverge on others, a triangle marks where the last of those diverged; a mark without a line is a seed "
    "of which only the end is known, on all held-out data."
)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One setting over the seeds that did not diverge."""

    label: str  # the setting in words
    steps: np.ndarray  # iterations that all these seeds reached, ascending
    values: np.ndarray  # one row a seed, shaped (seeds, steps)
    num_seeds: int = 1  # seeds of the setting
    diverged_at: tuple[float, ...] = ()  # where on the axis seeds diverged, the last first
    # Points of seeds that have no more than one, where others have a line.
    alone: tuple[tuple[float, float], ...] = ()
    colour: int = 0  # number in the palette, by learning rate and momentum
    mark: str = "circle"  # likewise
    dash: str = "solid"  # by clipping

    @property
    def fate(self) -> str:
        """How many seeds diverged, and by when; empty if none did."""
        if not self.diverged_at:
            return ""
        return f"{self.label}: {len(self.diverged_at)} of {self.num_seeds}"

    def series(self, top: float) -> list[Series]:
        """Its lines, named at their ends, and the mark of its divergence at the ``top`` of the axis."""
        look = {"colour": self.colour, "dash": self.dash, "mark": self.mark, "legend": ""}
        drawn = []
        if len(self.values) and not self.diverged_at:
            drawn.append(over_seeds(self.label, self.steps, self.values, **look))
        elif len(self.values):
            *others, last = self.values
            for one in others:
                drawn.append(Series("", self.steps, one, weight=SURVIVOR, **look))
            drawn.append(Series(self.label, self.steps, last, weight=SURVIVOR, **look))
        for step, value in self.alone:
            drawn.append(Series("", np.array([step]), np.array([value]), **look))
        if self.diverged_at:
            look |= {"dash": "", "mark": "triangle"}
            drawn.append(Series("", np.array(self.diverged_at[:1]), np.array([top]), **look))
        return drawn


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
    unit = _unit_of(runs)
    curves = []
    for own in settings.values():
        trained = [run for run in own if run.status["status"] != DIVERGED]
        ends = [run.status["step"] / unit for run in own if run.status["status"] == DIVERGED]
        lines = [running_mean(*held_out_column(run, column, split), smoothing) for run in trained]
        longest = max((len(steps) for steps, _ in lines), default=0)
        short = [(steps, values) for steps, values in lines if len(steps) == 1 < longest]
        steps = np.zeros(0)
        values = np.zeros((0, 0))
        if trained:
            steps, values = on_common_steps([line for line in lines if len(line[0]) > 1 or not short])
        recipe = own[0].recipe
        colour, mark = look_of(recipe)
        curves.append(
            Curve(
                label=f"{short_label(recipe)}{_unended(own)}",
                steps=steps / unit,
                values=values,
                num_seeds=len(own),
                diverged_at=tuple(sorted(ends, reverse=True)),
                alone=tuple((float(at[0] / unit), float(value[0])) for at, value in short),
                colour=colour,
                mark=mark,
                dash=dash_of(recipe),
            )
        )
    return curves


def held_out_column(run: TrainedRun, column: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a column; from evaluations on a part of the data where the run has such."""
    part = f"{split}{PART}"
    return run.column(column, part if run.rows(part) else split)


def _unended(runs: Sequence[TrainedRun]) -> str:
    """How far the first run came that has not ended; empty if all have."""
    lengths = [f" ({legend.length_words(run)})" for run in runs if not run.has_ended]
    return "".join(lengths[:1])


def loss_panel(runs: Sequence[TrainedRun], *, letter: str = "", paper: str = "") -> Panel:
    """The training loss of every setting among ``runs``, as a running mean."""
    window = max(SMOOTHING, *(steps_of(run.recipe) // PARTS for run in runs))
    curves = gather(runs, "loss", "train", smoothing=window)
    label = f"training loss, mean of {window} steps"
    return curve_panel(
        curves, label, time=time_of(runs), letter=letter, paper=paper, past=START, names_lost_seeds=True
    )


def curve_panel(
    curves: Sequence[Curve],
    label: str,
    *,
    time: str = "iteration",
    title: str = "",
    letter: str = "",
    paper: str = "",
    log: bool = False,
    past: float = 0.0,
    names_lost_seeds: bool = False,
) -> Panel:
    """Curves over the run: the mean over the seeds, their range as a band.

    The axis holds every seed that did not diverge, but for the first part of the run (``past``, a share).
    With ``names_lost_seeds`` the settings whose seeds diverge stand beside it.
    """
    limits = axis_limits(curves, past=past)
    if log:
        limits = None
    series: list[Series] = []
    for curve in curves:
        series += curve.series(limits[1] if limits else math.nan)
    fates = [curve.fate for curve in curves if curve.fate] if names_lost_seeds else []
    across = None
    if all(len(curve.steps) <= 1 for curve in curves):  # a point is no scale
        across = (
            0.0,
            ROOM * max((float(curve.steps[-1]) for curve in curves if len(curve.steps)), default=1),
        )
    title = title or label.partition(",")[0]
    return Panel(
        Chart("curves", title, Axis(time, range=across), Axis(label, log=log, range=limits), tuple(series)),
        letter=letter,
        paper=paper,
        found=_seeds_of(curves),
        inside="seeds that diverge:\n" + "\n".join(fates) if fates else "",
    )


def _seeds_of(curves: Sequence[Curve]) -> str:
    """How many seeds and points the settings have: ``3 to 5 seeds, 14 points``."""
    seeds = sorted({curve.num_seeds for curve in curves})
    points = sorted({len(curve.steps) for curve in curves if len(curve.steps)}) or [0]
    return f"seeds a setting: {_from_to(seeds)}; points a line: {_from_to(points)}"


def _from_to(counts: Sequence[int]) -> str:
    """Ascending counts in words: ``3``, or ``3 to 5``."""
    if counts[0] == counts[-1]:
        return str(counts[0])
    return f"{counts[0]} to {counts[-1]}"


def axis_limits(curves: Sequence[Curve], *, past: float = 0.0) -> tuple[float, float] | None:
    """The range of the axis; None where no seed is left.

    Values of the first part of the run (``past``, a share) may lie outside of it, a quarter above the rest.
    """
    calm = [curve for curve in curves if curve.values.size]
    if not calm:
        return None
    end = max(curve.steps[-1] for curve in calm)
    late = np.concatenate([curve.values[:, curve.steps >= past * end].ravel() for curve in calm])
    every = np.concatenate([curve.values.ravel() for curve in calm])
    low = float(every.min())
    high = float(late.max()) if late.size else float(every.max())
    span = max(high - low, 0.01 * abs(high))  # of one point, too
    if past:
        high = min(float(every.max()), high + 0.25 * span)
    return low - 0.05 * span, high + 0.3 * span  # room for what is written at the top


# The runs and the pictures


def _all_runs(scale: str) -> list[Planned]:
    short = () if scale == "paper" else (*legend.LANGUAGE, *legend.UNCLIPPED_EPOCH)
    return [
        *legend.runs_of(scale, [*short, *legend.IMAGES, *legend.IMAGES_WITH_DROPS]),
        *legend.long_runs(scale),
        *legend.float32_runs(scale),
        *legend.run_again(
            scale, legend.CALIBRATED, seeds=legend.THREE, calibrated=True, probe_every=0, eval_every=0
        ),
    ]


def curve_panels(runs: Sequence[TrainedRun]) -> list[Panel]:
    """Two panels for each task: training loss, and what the paper shows beside it."""
    panels = []
    language = [run for run in runs if isinstance(run.recipe, LanguageRecipe)]
    images = [run for run in runs if isinstance(run.recipe, ImageRecipe)]
    if language:
        validation = gather(language, "loss", "valid")
        shares = sorted({run.recipe.eval_part for run in language if run.rows(f"valid{PART}")})
        of_a_part = f", {shares[0]:.0%} of the text" if shares else ""
        panels.append(loss_panel(language, letter="a", paper="clipping is faster"))
        panels.append(
            curve_panel(
                validation,
                f"validation loss{of_a_part}",
                time=time_of(language),
                letter="b",
                paper="clipping is best",
            )
        )
    if images:
        tested = gather(images, "accuracy", "test")
        panels.append(loss_panel(images, letter="c", paper="clipping is fastest"))
        panels.append(
            curve_panel(
                tested, "test accuracy (%)", time=time_of(images), letter="d", paper="95.2 %, momentum 95.0 %"
            )
        )
    return panels


def _draw_curves(results: Results) -> Figure:
    names = [
        legend.trained_name(results.plan.scale, name) for name in (*legend.LANGUAGE, *legend.UNCLIPPED_EPOCH)
    ]
    there = results.settings_with_runs((*names, *legend.IMAGES, *legend.IMAGES_WITH_DROPS))
    settings = [results.runs_to_draw(name) for name in there]
    runs = [run for setting in settings for run in setting]
    panels = curve_panels(runs)
    return figure_of_panels(
        panels, title=f"Figure 4: {_finding(settings)}", note=f"{NOTE} {trained_on(runs)}.", size=PANEL
    )


def _finding(settings: Sequence[Sequence[TrainedRun]]) -> str:
    """Where each task ends with clipping and without: the best setting of each that no seed lost."""
    language = [runs for runs in settings if isinstance(runs[0].recipe, LanguageRecipe)]
    images = [runs for runs in settings if isinstance(runs[0].recipe, ImageRecipe)]
    words = []
    lost = [runs[0].recipe for runs in settings if any(run.status["status"] == DIVERGED for run in runs)]
    if lost:
        lrs = sorted({recipe.lr for recipe in lost if recipe.threshold == math.inf})
        words.append(f"without clipping, lr {', '.join(f'{lr:g}' for lr in lrs)} diverge")
    ended = [runs for runs in language if all(run.has_ended for run in runs)]
    losses = _best_of(ended, lambda runs: spread(runs, final_loss).mean)
    if all(math.isfinite(loss) for loss in losses):
        words.append(f"training loss ends at {losses[0]:.2f} with clipping, {losses[1]:.2f} without")
    ended = [runs for runs in images if all(run.has_ended and run.rows("test") for run in runs)]
    errors = _best_of(ended, lambda runs: 100 - spread(runs, accuracy).mean)
    if all(math.isfinite(error) for error in errors):
        words.append(f"images reach {100 - errors[0]:.1f} % with it, {100 - errors[1]:.1f} % without")
    return "; ".join(words) or "training with and without clipping"


def _best_of(
    settings: Sequence[Sequence[TrainedRun]], score: Callable[[Sequence[TrainedRun]], float]
) -> tuple[float, float]:
    """The lowest score with clipping, and without; infinity where there is no setting."""
    best = {True: math.inf, False: math.inf}
    for runs in settings:
        clips = runs[0].recipe.threshold < math.inf
        if all(run.status["status"] != DIVERGED for run in runs):
            best[clips] = min(best[clips], score(runs))
    return best[True], best[False]


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
        recipe: Recipe = with_fields(run.recipe, optimizer="normalized", probe_every=0, **steps)
        runs.append(Planned(legend.NORMALIZED, recipe))
    return runs


def _draw_equivalence(results: Results) -> Figure:
    """Training losses of clipped descent and of the normalized descent that corresponds."""
    clipped = results.runs_to_draw(legend.BY_HAND)
    normalized = results.runs_to_draw(legend.NORMALIZED)
    runs = [*clipped, *normalized]
    ends = [spread(one, final_loss).mean for one in (clipped, normalized)]
    title = f"Clipped descent ends at a loss of {ends[0]:.2f}, the corresponding normalized at {ends[1]:.2f}"
    panel = loss_panel(runs, paper="same up to a factor of the step")
    return figure_of_panels([panel], title=title, note=f"{NOTE} {trained_on(runs)}.", size=(6.0, 3.6))


EQUIVALENCE = PaperFigure(
    name="equivalence",
    runs=equivalence_runs,
    title="Clipped and normalized descent from the same start",
    caption="Both train on the same batches. The paper shows no such run.",
    draw=_draw_equivalence,
)
