"""Gradient norm and smoothness from a part of the data against all of it: figure 6 of the paper."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from curvestep.report.chart import GRADIENT, SMOOTHNESS, THIN, Axis, Chart, Series
from curvestep_reproduction.claims.claims import MissingRuns
from curvestep_reproduction.claims.statistics import measured
from curvestep_reproduction.figures import legend
from curvestep_reproduction.figures.layout import Panel, figure_of_panels, trained_on
from curvestep_reproduction.figures.legend import seed_words
from curvestep_reproduction.figures.plan import PaperFigure, Planned
from curvestep_reproduction.recipes import get_recipe
from curvestep_reproduction.training.run_folder import TrainedRun

ACCURATE = 0.1  # relative error of an accurate estimate
MARGIN = 1.05  # the line of equality ends this far beyond the points
DATA_SHARES = {"lm-share0.1": 0.1, "lm-share1": 1.0}


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How well one estimate follows another over the same iterations."""

    steps: np.ndarray  # iterations at which both were measured
    part: np.ndarray  # estimates from a part of the data
    whole: np.ndarray  # estimates from all of it
    correlation: float  # Pearson correlation of the logarithms
    ratio: float  # median of ``part / whole``
    mean_error: float  # of the relative error ``|part / whole - 1|``
    largest_error: float  # likewise


def data_fraction(part: TrainedRun, whole: TrainedRun) -> Figure:
    """Estimates from a part of the data against those from all of it, with a band of a tenth either way.

    The runs are the same training with another ``probe_data``: measuring does not change a run.
    """
    names = f"{part.recipe.probe_data:.0%} of the data", "all data"
    panels = []
    means = []
    for letter, found, label in zip("ab", agreement(part, whole), (GRADIENT, SMOOTHNESS), strict=True):
        quantity = label.rpartition(" ")[0]
        mean = found.mean_error
        largest = found.largest_error
        means.append(f"{100 * mean:.1f} %")
        points = Series("", found.whole, found.part, dash="", mark="circle", shade=found.steps)
        ends = np.array([found.whole.min() / MARGIN, found.whole.max() * MARGIN])
        band = (ends * (1 - ACCURATE), ends * (1 + ACCURATE))
        equal = Series("", ends, ends, colour="soft", weight=THIN, band=band)
        axes = Axis(f"from {names[1]}", log=True), Axis(f"from {names[0]}", log=True)
        panels.append(
            Panel(
                Chart("against", quantity, *axes, (points, equal)),
                letter=letter,
                paper="accurate",
                found=f"mean error {100 * mean:.1f} %, largest {100 * largest:.1f} %\n"
                f"{len(found.steps)} iterates, {seed_words([whole])}",
                reference=True,
            )
        )
    title = f"Figure 6: {names[0]} miss the gradient norm by {means[0]}, smoothness by {means[1]} in the mean"
    note = f"The line is equality, the band a tenth either way. {trained_on([part, whole])}."
    return figure_of_panels(panels, title=title, note=note)


def agreement(part: TrainedRun, whole: TrainedRun) -> tuple[Agreement, Agreement]:
    """How well the estimates of gradient norm and of smoothness agree, at the steps that both measured."""
    part_steps, part_norms, part_smoothness = measured(part)
    whole_steps, whole_norms, whole_smoothness = measured(whole)
    steps, at_part, at_whole = np.intersect1d(part_steps, whole_steps, return_indices=True)
    gradient = _compare(steps, part_norms[at_part], whole_norms[at_whole])
    smoothness = _compare(steps, part_smoothness[at_part], whole_smoothness[at_whole])
    return gradient, smoothness


def _compare(steps: np.ndarray, part: np.ndarray, whole: np.ndarray) -> Agreement:
    if len(steps) < 3:
        raise MissingRuns(f"{len(steps)} steps were measured by both runs, 3 are needed")
    errors = np.abs(part / whole - 1)
    return Agreement(
        steps=steps,
        part=part,
        whole=whole,
        correlation=float(np.corrcoef(np.log(part), np.log(whole))[0, 1]),
        ratio=float(np.median(part / whole)),
        mean_error=float(errors.mean()),
        largest_error=float(errors.max()),
    )


_SMALL_MODEL: dict[str, Any] = {**legend.SMALL_LSTM, "eval_every": 0}
_SHARE_RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "laptop": (
        "ptb-lstm",
        {**_SMALL_MODEL, "seed": legend.SHOWN_SEED, "num_words": 100_000, "steps": 120, "probe_every": 10},
    ),
    "longer": ("ptb-lstm", {**_SMALL_MODEL, "steps": 300, "probe_every": 25}),
    "epoch": ("ptb-awd-lstm", {"steps": 460, "probe_pieces": 0, "probe_every": 228}),
    "paper": ("ptb-awd-lstm", {**legend.PAPER_MEASURED, "probe_every": 60}),
}


def share_runs(scale: str) -> list[Planned]:
    """The same run twice, measured on a tenth of its text and on all of it, at half of each step.

    At laptop scale the text is the first 100,000 words: with all of PTB one gradient takes half a minute.
    The longer one has all of PTB. At the scale ``epoch`` AWD-LSTM is measured at three points.
    """
    model, fields = _SHARE_RUNS[scale]
    found = legend.LANGUAGE[legend.BY_HAND]
    common = {"seed": legend.LONGER[1], "lr": found.lr, "max_norm": found.max_norm, "fractions": (0.5,)}
    recipe = get_recipe(model, scale, **(common | fields))
    return [Planned(setting, replace(recipe, probe_data=share)) for setting, share in DATA_SHARES.items()]


FIG6 = PaperFigure(
    name="fig6",
    runs=share_runs,
    title="Figure 6: a tenth of the data against all of it",
    caption="A point is measured twice in one run: on a tenth of its text and on all of it.",
    draw=lambda results: data_fraction(*(results.runs_to_draw(name)[0] for name in DATA_SHARES)),
)
