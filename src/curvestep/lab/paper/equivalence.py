r"""Clipped and normalized descent from the same start on the same batches: section 3 of the paper, as a run.

With :math:`\eta_n = \gamma\eta_c` and :math:`\beta = \gamma` the two step sizes agree up to a factor of two
at every gradient norm. The paper concludes that both methods are the same up to a constant; it shows no run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from matplotlib.figure import Figure

from curvestep.display.results import level, on_common_steps
from curvestep.lab.paper.claims import Evidence, Spread, decide
from curvestep.lab.paper.fig4_curves import Curve, curve_chart, final_loss, loss_chart
from curvestep.lab.paper.plan import BY_HAND, PaperFigure, Picture, Planned, Results, legend_runs
from curvestep.lab.paper.style import CLIPPED, NORMALIZED as NORMALIZED_STEPS, described
from curvestep.lab.recipes import with_fields
from curvestep.lab.run.folder import Run
from curvestep.steps import clipped_step, normalized_from_clipped, normalized_step

NORMALIZED = "lm-normalized"
SAME = 0.05  # share of the way down by which two final losses may differ and count as the same


def equivalence_runs(scale: str) -> list[Planned]:
    """The first setting, and the normalized one that corresponds to it, on every seed at laptop scale."""
    if scale != "laptop":
        return []
    clipped = legend_runs(scale, [BY_HAND])
    runs = []
    for run in clipped:
        steps = normalized_from_clipped(lr=run.recipe.lr, max_norm=run.recipe.max_norm)
        recipe = with_fields(run.recipe, optimizer="normalized", probe_every=0, **steps)
        runs.append(Planned(NORMALIZED, recipe))
    return [*clipped, *runs]


def step_sizes(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Steps, and the factor of the gradient in each."""
    steps, norms = run.column("grad_norm")
    recipe = run.recipe
    if recipe.optimizer == "normalized":
        return steps, normalized_step(norms, lr=recipe.lr, offset=recipe.offset)
    return steps, clipped_step(norms, lr=recipe.lr, max_norm=recipe.max_norm)


def step_ratio(clipped: Run, normalized: Run) -> tuple[np.ndarray, np.ndarray]:
    """Steps that both runs took, and the normalized step size over the clipped one at each."""
    (at, h_clipped), (there, h_normalized) = step_sizes(clipped), step_sizes(normalized)
    common, first, second = np.intersect1d(at, there, return_indices=True)
    return common, h_normalized[second] / h_clipped[first]


def judge_equivalence(results: Results) -> Evidence:
    """Final losses of both, and how far apart their steps are."""
    clipped, normalized = results.paired(BY_HAND, NORMALIZED)
    missed, ratios, inside = [], [], []
    for one, other in zip(clipped, normalized, strict=True):
        first = float(one.column("loss")[1][0])
        missed.append((final_loss(other) - final_loss(one)) / (first - final_loss(one)))
        _, ratio = step_ratio(one, other)
        ratios.append(float(np.median(ratio)))
        inside.append(float(((ratio >= 0.5) & (ratio <= 2)).mean()))
    gap, middle, share = (Spread(values=tuple(values)) for values in (missed, ratios, inside))
    words = (
        f"from the same start on the same batches the normalized run ends {gap} of the way down above the "
        f"clipped one (up to {SAME:g} either way counts as the same); its steps are {middle} times as long "
        f"(median), {share.mean:.0%} of them within a factor of two"
    )
    return decide(words, Spread(values=tuple(SAME - abs(value) for value in missed)))


def draw_equivalence(clipped: Sequence[Run], normalized: Sequence[Run], *, title: str = "") -> Figure:
    """Training loss of both, and the ratio of their steps, seed by seed."""
    steps, values = on_common_steps([step_ratio(*pair) for pair in zip(clipped, normalized, strict=True)])
    right = curve_chart(
        [Curve(label="normalized over clipped", steps=steps, values=values, colour=NORMALIZED_STEPS)],
        "ratio of step sizes",
        title="step sizes, normalized over clipped",
        log=True,
    )
    bounds = [level(steps, bound, "a factor of two" * (bound > 1), colour="soft") for bound in (0.5, 2.0)]
    right = replace(right, series=(*right.series, *bounds))
    runs = [*clipped, *normalized]
    left = loss_chart(runs, roles=(CLIPPED, NORMALIZED_STEPS))
    return described([left, right], runs, title=title, size=(5.2, 3.6))


EQUIVALENCE = PaperFigure(
    name="equivalence",
    runs=equivalence_runs,
    pictures=(
        Picture(
            name="equivalence",
            title="Clipped and normalized descent from the same start",
            caption="Two runs on the same batches: their training losses, and the ratio of their step sizes "
            "with the factor of two that the paper's section 3 gives (dashed). The paper shows no such run.",
            draw=lambda results, title: draw_equivalence(*results.paired(BY_HAND, NORMALIZED), title=title),
        ),
    ),
    claims={
        "Clipped and normalized descent are the same up to a constant factor of the step.": judge_equivalence,
    },
)
