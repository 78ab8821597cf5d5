"""Gradient norm and smoothness from a part of the data against all of it: figure 6 of the paper."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from curvestep.display.chart import GRADIENT, SMOOTHNESS, THIN, Axis, Chart, Series
from curvestep.lab.paper.legend import BY_HAND, LANGUAGE, LONGER, PAPER_MEASURED, SHOWN_SEED, SMALL_LSTM
from curvestep.lab.paper.plan import PaperFigure, Picture, Planned
from curvestep.lab.paper.style import described, lettered, loaded
from curvestep.lab.paper.verdicts.statistics import measured
from curvestep.lab.recipes import get_recipe
from curvestep.lab.run.folder import Run

DATA_SHARES = {"lm-share0.1": 0.1, "lm-share1": 1.0}


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How well one estimate follows another over the same iterations.

    Args:
        steps: Iterations at which both were measured.
        part: Estimates from a part of the data.
        whole: Estimates from all of it.
        correlation: Pearson correlation of the logarithms; NaN for fewer than three points.
        ratio: Median of ``part / whole``.
        errors: Median, and 90 % quantile, of the relative error ``|part / whole - 1|``.
    """

    steps: np.ndarray
    part: np.ndarray
    whole: np.ndarray
    correlation: float
    ratio: float
    errors: tuple[float, float]


def data_fraction(part: Run | str | Path, whole: Run | str | Path, *, title: str = "") -> Figure:
    """Above, estimates from a part and the whole of the data over the iterations; below, against each other.

    The two runs must be the same training with another ``probe_data``: measuring does not change a run, so
    they pass through the same parameters.
    """
    part, whole = loaded(part), loaded(whole)
    names = share(part), share(whole)
    above, below = [], []
    for found, label in zip(agreement(part, whole), (GRADIENT, SMOOTHNESS), strict=True):
        quantity = label.rpartition(" ")[0]
        series = (
            Series(names[1], found.steps, found.whole, colour="soft", dash="", mark="square"),
            Series(names[0], found.steps, found.part, colour=1, dash="", mark="circle"),
        )
        axes = Axis("iteration"), Axis(label, log=True)
        above.append(Chart("over-time", f"{quantity} over training", *axes, series))
        points = Series("iterates", found.whole, found.part, dash="", mark="circle", shade=found.steps)
        ends = np.array([found.whole.min(), found.whole.max()]) if len(found.steps) else np.array([])
        equal = Series("equal", ends, ends, colour="soft", weight=THIN)
        axes = Axis(f"from {names[1]}", log=True), Axis(f"from {names[0]}", log=True)
        words = f"correlation of logs {found.correlation:.3f}, median ratio {found.ratio:.3f}"
        below.append(Chart("against", f"{quantity} from both", *axes, (points, equal), words=words))
    default = f"Measured on {names[0]} and on {names[1]} ({part.recipe.label})"
    return described([*lettered(above), *below], [part, whole], title=title or default)


def share(run: Run) -> str:
    """On how much of the training data the run's probe measured, in words."""
    if run.recipe.probe_data == 0:
        return "the batch"
    return "all data" if run.recipe.probe_data == 1 else f"{run.recipe.probe_data:.0%} of the data"


def agreement(part: Run | str | Path, whole: Run | str | Path) -> tuple[Agreement, Agreement]:
    """How well the estimates of gradient norm and of smoothness agree, at the steps that both measured."""
    part, whole = loaded(part), loaded(whole)
    if part.recipe.label != whole.recipe.label or part.recipe.seed != whole.recipe.seed:
        raise ValueError(
            f"`part` and `whole` must be the same training, got {part.recipe.label} with seed "
            f"{part.recipe.seed} and {whole.recipe.label} with seed {whole.recipe.seed}."
        )
    some, everything = measured(part), measured(whole)
    steps, at, there = np.intersect1d(some[0], everything[0], return_indices=True)
    gradient, smoothness = (_compare(steps, some[i][at], everything[i][there]) for i in (1, 2))
    return gradient, smoothness


def _compare(steps: np.ndarray, part: np.ndarray, whole: np.ndarray) -> Agreement:
    enough = len(steps) > 2
    correlation = float(np.corrcoef(np.log(part), np.log(whole))[0, 1]) if enough else np.nan
    ratio = float(np.median(part / whole)) if len(steps) else np.nan
    middle, most = np.quantile(np.abs(part / whole - 1), [0.5, 0.9]) if len(steps) else (np.nan, np.nan)
    return Agreement(
        steps=steps,
        part=part,
        whole=whole,
        correlation=correlation,
        ratio=ratio,
        errors=(float(middle), float(most)),
    )


def share_runs(scale: str) -> list[Planned]:
    """The same run twice, measured on a tenth of its text and on all of it, at half of each step.

    At laptop scale the text is the first 100,000 words: with all of PTB one gradient takes half a minute.
    The longer one has all of PTB. At the scale ``epoch`` AWD-LSTM is measured at three points.
    """
    found = LANGUAGE[BY_HAND]
    seed = SHOWN_SEED if scale == "laptop" else LONGER[1]
    fields: dict[str, Any] = {"lr": found.lr, "max_norm": found.max_norm, "seed": seed}
    if scale == "epoch":
        fields |= {"steps": 460, "probe_pieces": 0, "probe_every": 228, "fractions": (0.5,)}
        recipe = get_recipe("ptb-awd-lstm", scale, **fields)
    elif scale == "paper":
        recipe = get_recipe("ptb-awd-lstm", scale, **{**PAPER_MEASURED, **fields, "probe_every": 60})
    else:
        fields |= {**SMALL_LSTM, "fractions": (0.5,), "eval_every": 0}
        length = {"num_words": 100_000, "steps": 120} if scale == "laptop" else {"steps": 300}
        recipe = get_recipe("ptb-lstm", scale, probe_every=length["steps"] // 12, **length, **fields)
    return [Planned(setting, replace(recipe, probe_data=share)) for setting, share in DATA_SHARES.items()]


FIG6 = PaperFigure(
    name="fig6",
    runs=share_runs,
    pictures=(
        Picture(
            name="fig6",
            title="Figure 6: a tenth of the data against all of it",
            caption="Gradient norm and smoothness of one run, from a tenth of its text and from all of it.",
            draw=lambda results, title: data_fraction(
                *(results.shown(name)[0] for name in DATA_SHARES), title=title
            ),
        ),
    ),
)
