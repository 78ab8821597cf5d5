r"""Smoothness against gradient norm along training: figures 1, 2, 3 and 5 of the paper.

Each panel is one run: a point a measurement, coloured by iteration; the fitted line :math:`L_0 + L_1 g`; the
frontier, the least that any pair (L0, L1) allows at each gradient norm; and the rank correlation with its
interval, beside what the same procedure shows where there is no (L0, L1) effect.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvestep.fit.correlation import spearman
from curvestep.fit.fit import SmoothnessFit
from curvestep.lab.paper.claims import Evidence, Spread, decide
from curvestep.lab.paper.plan import (
    BY_HAND,
    IMAGES,
    PaperFigure,
    Picture,
    Planned,
    Results,
    Statement,
    image_runs,
    language_runs,
)
from curvestep.lab.paper.style import (
    FRONTIER,
    ITERATIONS,
    LINE,
    describe,
    legend_below,
    loaded,
    log_axes,
    panels,
    setting,
    styled,
)
from curvestep.lab.run.folder import Run

GRADIENT = r"gradient norm $\|\nabla f(x)\|$"
SMOOTHNESS = r"local smoothness $\hat{L}(x)$"


def scatter(
    runs: Sequence[Run | str | Path],
    *,
    title: str = "Smoothness against gradient norm",
    log: bool | Sequence[bool] = True,
    notes: Sequence[str] = (),
) -> Figure:
    """One panel a run, titled by its setting.

    Args:
        runs: Runs or run folders with a trace.
        title: Title of the figure.
        log: Logarithmic axes, for all panels or for each.
        notes: What to add to the titles of the panels.
    """
    found = [loaded(run) for run in runs]
    if not found:
        raise ValueError("`runs` must be at least one run folder, got none.")
    scales = [log] * len(found) if isinstance(log, bool) else list(log)
    with styled():
        figure, axes = panels(1, len(found), height=4.3)
        for panel, run, scale in zip(axes, found, scales, strict=True):
            scatter_panel(panel, run, log=scale)
        for panel, note in zip(axes, notes, strict=False):
            panel.set_title(f"{panel.get_title()}, {note}")
        describe(figure, title, found)
    return figure


def scatter_panel(panel: Axes, run: Run, *, log: bool = True) -> None:
    """Draw one run: points, fitted line, frontier, and a legend with the numbers."""
    panel.set_title(setting(run))
    panel.set_xlabel(GRADIENT)
    panel.set_ylabel(SMOOTHNESS)
    steps, norms, smoothness = measured(run)
    if len(steps) == 0:
        panel.text(0.5, 0.5, "nothing was measured", ha="center", va="center", transform=panel.transAxes)
        return
    if log:
        log_axes(panel)
    points = panel.scatter(norms, smoothness, c=steps, cmap=ITERATIONS, s=12, linewidths=0, alpha=0.85)
    if not log:
        panel.set_xlim(left=0)
        panel.set_ylim(bottom=0)
    assert panel.figure is not None
    panel.figure.colorbar(points, ax=panel, label="iteration", pad=0.02)
    try:
        fit = run.fit
    except ValueError as error:
        words = "\n".join(textwrap.wrap(f"no fit: {str(error).split('. ')[0]}", 45))
        panel.plot([], [], " ", label=words)
        legend_below(panel)
        return
    draw_fit(panel, fit, norms, log=log)


def draw_fit(panel: Axes, fit: SmoothnessFit, norms: np.ndarray, *, log: bool) -> None:
    """The fitted line and the frontier over the range of the gradient norms, and the legend."""
    low, high = norms.min(), norms.max()
    g = np.geomspace(low, high, 200) if log else np.linspace(low, high, 200)
    line = f"{fit.quantile:.0%} line $L_0 + L_1 g$: $L_0$ = {fit.L0:.3g}, $L_1$ = {fit.L1:.3g}"
    panel.plot(g, fit.L0 + fit.L1 * g, color=LINE, label=line)
    panel.plot(g, fit.envelope(g), color=FRONTIER, linestyle="--", linewidth=1, label="frontier")
    for words in correlation_words(fit):
        panel.plot([], [], " ", label=words)
    legend_below(panel)


def correlation_words(fit: SmoothnessFit) -> list[str]:
    """The rank correlation with its interval, and the control's."""
    low, high = fit.spearman_interval
    words = [rf"rank correlation $\rho$ = {fit.spearman:.2f} [{low:.2f}, {high:.2f}]"]
    if fit.control is not None:
        low, high = fit.control.spearman_interval
        words.append(rf"control, constant Hessian: {fit.control.spearman:.2f} [{low:.2f}, {high:.2f}]")
    return words


def measured(run: Run) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps, gradient norms and smoothness of the rows that can stand on a logarithmic axis."""
    if not run.trace_path.exists():
        return np.array([]), np.array([]), np.array([])
    trace = run.trace
    steps, norms, smoothness = (trace.column(name) for name in ("step", "grad_norm", "smoothness"))
    usable = trace.ok & np.isfinite(norms) & np.isfinite(smoothness) & (norms > 0) & (smoothness > 0)
    return steps[usable], norms[usable], smoothness[usable]


LONG = "lm-long"  # the longer run of figure 5
_SMALL_LR, _SMALL_LR_CLIPPED = "lm-lr2", "lm-lr2clip0.25"


def correlations(large: str, small: str) -> Callable[[Results], Evidence]:
    """Judges by the rank correlation of smoothness and gradient norm in two settings, seed by seed."""

    def judge(results: Results) -> Evidence:
        one, other = (
            Spread(values=tuple(rank_correlation(run) for run in results.all_finished(setting)))
            for setting in (large, small)
        )
        gain = one - other
        words = (
            f"rank correlation {one} with {results.label(large)}, {other} with {results.label(small)}: "
            f"{gain} higher"
        )
        return decide(words, gain, one)

    return judge


def rank_correlation(run: Run) -> float:
    """Spearman's correlation of gradient norm and smoothness over the rows of a run."""
    _, norms, smoothness = measured(run)
    return float(spearman(norms[None], smoothness[None])[0])


def _shown(*settings: str, **options: Any) -> Callable[[Results, str], Figure]:
    def draw(results: Results, title: str) -> Figure:
        return scatter([results.shown(setting) for setting in settings], title=title, **options)

    return draw


def _longer_run(scale: str) -> list[Planned]:
    """At laptop scale a run of the first setting that is twice as long; at paper scale all are long."""
    (shown,) = [run for run in language_runs(scale, [BY_HAND]) if run.recipe.seed == 0]
    if scale != "laptop":
        return []
    recipe = replace(shown.recipe, steps=2 * shown.recipe.steps)
    return [replace(shown, setting=LONG, recipe=recipe, cost=2 * shown.cost)]


FIG1 = PaperFigure(
    name="fig1",
    runs=lambda scale: language_runs(scale, [BY_HAND]),
    pictures=(
        Picture(
            name="fig1",
            title="Figure 1: smoothness against gradient norm, LSTM on PTB",
            caption="smoothness against gradient norm along training, language model",
            draw=_shown(BY_HAND),
        ),
    ),
)
FIG2 = PaperFigure(
    name="fig2",
    runs=lambda scale: language_runs(scale, [BY_HAND, _SMALL_LR, _SMALL_LR_CLIPPED]),
    pictures=(
        Picture(
            name="fig2",
            title="Figure 2: language model",
            caption="smoothness against gradient norm, language model, three settings",
            draw=_shown(BY_HAND, _SMALL_LR, _SMALL_LR_CLIPPED),
        ),
    ),
    claims=(
        Statement(
            paper="Smoothness grows with the gradient norm under clipping with a large learning rate, and "
            "much less at a small one without clipping.",
            judge=correlations(BY_HAND, _SMALL_LR),
        ),
        Statement(
            paper="At the small learning rate the correlation is much weaker with clipping too.",
            judge=correlations(BY_HAND, _SMALL_LR_CLIPPED),
        ),
    ),
)
FIG3 = PaperFigure(
    name="fig3",
    runs=lambda scale: image_runs(scale, IMAGES),
    pictures=(
        Picture(
            name="fig3",
            title="Figure 3: ResNet20",
            caption="smoothness against gradient norm, ResNet20, three settings",
            draw=_shown(*IMAGES),
        ),
    ),
    claims=(
        Statement(
            paper="On images the correlation is absent with SGD and momentum and appears with a large "
            "learning rate and clipping.",
            judge=correlations("cifar-lr5clip0.25", "cifar-momentum"),
        ),
    ),
)
FIG5 = PaperFigure(
    name="fig5",
    runs=lambda scale: [*language_runs(scale, [BY_HAND]), *_longer_run(scale)],
    pictures=(
        Picture(
            name="fig5",
            title="Figure 5: linear scale, and the longer run",
            caption="smoothness against gradient norm on linear axes, and over a longer run",
            draw=lambda results, title: scatter(
                [results.shown(BY_HAND), results.shown(LONG if results.plan.of(LONG) else BY_HAND)],
                title=title,
                log=[False, True],
                notes=["linear scale", "longer run"],
            ),
        ),
    ),
)
