r"""Smoothness against gradient norm along training: figures 1, 2, 3 and 5 of the paper.

Each panel is one setting with all its seeds: a point a measurement, coloured by iteration; the fitted line
:math:`L_0 + L_1 g`; the frontier, the least that any pair (L0, L1) allows at each gradient norm; the power
law of every seed; and the numbers, beside what the same procedure shows where there is no (L0, L1) effect.

What decides a claim about growth is the exponent, the slope of :math:`\log\hat L` on
:math:`\log\lVert g\rVert` over the rows of a run:

1. Where step lengths vary, the exponent itself: positive, and larger than that of the other setting.
2. Where nearly all steps of one of the two settings are clipped (nine of ten or more), its steps are all
   equally long, and a constant Hessian shows an exponent near 1 under such steps. There both settings
   are compared *beyond their controls*: the exponent less the one that constant Hessians show with the run's
   own step lengths and noise. The spectrum of the run is not known, so the control has limits (nine of ten
   simulated quadratics lie inside); they widen the interval of the difference.
3. Where one of these controls is known to no better than ±0.3, or diverges, the exponent beyond it says
   nothing. There the elasticity inside single steps decides, which needs no control, as a constant Hessian
   shows none: above the 0.2 that counts as none, and larger than that of the other setting.
4. Beside it, without a vote: the same at each fraction of the step, without the start of the run, ranks, and
   whichever of exponent and elasticity does not decide, with what it would say.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from curvestep.display.chart import GRADIENT, SMOOTHNESS, Axis, Chart, Series
from curvestep.fit.correlation import slope, spearman
from curvestep.fit.frontier import envelope, frontier_points, quantile_line
from curvestep.fit.samples import LEAST_ROWS
from curvestep.fit.within import LEAST_ELASTICITY
from curvestep.lab.paper.claims import Evidence, MissingRuns, NotPlanned, Spread, decide
from curvestep.lab.paper.plan import (
    ALWAYS_CLIPPED,
    BY_HAND,
    IMAGES,
    PaperFigure,
    Picture,
    Results,
    legend_runs,
    run_again,
)
from curvestep.lab.paper.style import EXPONENT, LINE, described, loaded, setting
from curvestep.lab.recipes import OPTIMIZERS
from curvestep.lab.run.folder import Run
from curvestep.steps import clip_norms

Runs = Run | str | Path | Sequence[Run]


def scatter(
    runs: Sequence[Runs],
    *,
    title: str = "Smoothness against gradient norm",
    log: bool | Sequence[bool] = True,
    notes: Sequence[str] = (),
) -> Figure:
    """One panel a setting, all on the same axes.

    Args:
        runs: For each panel a run, a run folder with a trace, or the seeds of one setting.
        title: Title of the figure.
        log: Logarithmic axes, for all panels or for each.
        notes: What to add to the titles of the panels.
    """
    found = [[loaded(run)] if isinstance(run, (Run, str, Path)) else list(run) for run in runs]
    if not found:
        raise ValueError("`runs` must be at least one run folder, got none.")
    scales = [log] * len(found) if isinstance(log, bool) else list(log)
    charts = [scatter_chart(seeds, log=scale) for seeds, scale in zip(found, scales, strict=True)]
    for i, note in enumerate(notes):
        charts[i] = replace(charts[i], title=f"{charts[i].title}, {note}")
    same = len(set(scales)) == 1
    everything = [run for seeds in found for run in seeds]
    size = (4.4, 4.6)
    return described(charts, everything, title=title, columns=4, share="xy" if same else "", size=size)


def scatter_chart(runs: Sequence[Run], *, log: bool = True) -> Chart:
    """The seeds of one setting: their points, the line and the frontier over all, and the numbers."""
    rows = [measured(run) for run in runs]
    steps, norms, smoothness = (np.concatenate(values) for values in zip(*rows, strict=True))
    ends = [None if log or not len(steps) else (0.0, 1.05 * values.max()) for values in (norms, smoothness)]
    axes = Axis(GRADIENT, log=log, range=ends[0]), Axis(SMOOTHNESS, log=log, range=ends[1])
    if len(steps) == 0:
        return Chart("scatter", setting(runs[0]), *axes, words="nothing was measured")
    points = Series("measured", norms, smoothness, dash="", mark="circle", shade=steps)
    try:
        words = "\n".join(words_of(runs))
    except ValueError as error:
        words = "\n".join(textwrap.wrap(f"no fit: {str(error).split('. ')[0]}", 45))
        return Chart("scatter", setting(runs[0]), *axes, (points,), words=words)
    g = np.geomspace(norms.min(), norms.max(), 100)
    quantile = runs[0].fit.quantile
    L0, L1 = quantile_line(norms, smoothness, quantile=quantile)
    line = f"{quantile:.0%} line: {L0:.3g} + {L1:.3g}‖g‖"
    frontier = envelope(frontier_points(norms, smoothness), g)
    series = [
        points,
        Series(line, g, L0 + L1 * g, colour=LINE),
        Series("frontier", g, frontier, colour="ink", dash="dash", thin=True),
    ]
    for number, (run, (_, own, ell)) in enumerate(zip(runs, rows, strict=True)):
        ends, alpha = np.array([own.min(), own.max()]), exponent(run)
        level = np.exp(np.log(ell).mean() - alpha * np.log(own).mean())
        name = "exponent" + ", a line a seed" * (len(runs) > 1)
        look = {"colour": EXPONENT, "dash": "dot", "thin": True}
        series.append(Series(name * (number == 0), ends, level * ends**alpha, **look))
    return Chart("scatter", setting(runs[0]), *axes, tuple(series), words=words)


def words_of(runs: Sequence[Run]) -> list[str]:
    """The numbers of a panel: exponent, rank correlation, control, inside steps, clipped steps.

    Over several seeds means with intervals of the mean; of one run with its own intervals.
    """
    fits = [run.fit for run in runs]

    def said(name: str, values: Sequence[float], interval: tuple[float, float]) -> str:
        found = Spread(values=tuple(values))
        low, high = found.interval if len(values) > 1 else interval
        return f"{name} {found.mean:.2f} [{low:.2f}, {high:.2f}]"

    words = [said("exponent α =", [exponent(run) for run in runs], fits[0].exponent_interval)]
    if fractions_of(runs[0]):
        parts = [
            f"{spread(runs, partial(exponent, fraction=f)).mean:.2f} at {f:g}" for f in fractions_of(runs[0])
        ]
        words.append(f"by fraction of the step: {', '.join(parts)}")
    words.append(said("rank correlation ρ =", [fit.spearman for fit in fits], fits[0].spearman_interval))
    controls = [fit.control for fit in fits if fit.control is not None]
    if len(controls) == len(fits):
        low, high = control_exponents(runs).interval if len(runs) > 1 else controls[0].exponent_interval
        alpha, rho = (np.mean([getattr(one, name) for one in controls]) for name in ("exponent", "spearman"))
        shown = f"α = {alpha:.2f} [{low:.2f}, {high:.2f}], ρ = {rho:.2f}"
        words.append(f"control, constant Hessian: {'diverges' if math.isnan(alpha) else shown}")
    with suppress(MissingRuns):
        inside = [elasticity(run) for run in runs]
        words.append(said("elasticity inside steps", inside, fits[0].within.elasticity_interval))
    return [*words, f"{spread(runs, clipped_share).mean:.0%} of steps clipped"]


def measured(run: Run, fraction: float | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps, gradient norms and smoothness of the rows that can stand on a logarithmic axis.

    Smoothness is the secant up to ``fraction`` of the step, or the paper's estimate, the largest secant.
    """
    if not run.trace_path.exists():
        return np.array([]), np.array([]), np.array([])
    trace = run.trace
    steps, norms = trace.column("step"), trace.column("grad_norm")
    if fraction is None:
        smoothness = trace.column("smoothness")
    else:
        smoothness = trace.column("secants")[:, fractions_of(run).index(fraction)]
    usable = trace.ok & np.isfinite(norms) & np.isfinite(smoothness) & (norms > 0) & (smoothness > 0)
    return steps[usable], norms[usable], smoothness[usable]


# What a run shows. The exponent of the paper's estimate decides; the rest stands beside it.


def exponent(run: Run, fraction: float | None = None, *, past: float = 0.0) -> float:
    r"""Slope of :math:`\log\hat L` on :math:`\log\lVert g\rVert` over the rows of :func:`measured`.

    Rows of the first part of the run, such as a tenth (``past``), may be left out.
    """
    steps, norms, smoothness = measured(run, fraction)
    kept = steps >= past * run.status["step"]
    norms, smoothness = norms[kept], smoothness[kept]
    _check_rows(run, norms)
    return float(slope(np.log(norms)[None], np.log(smoothness)[None])[0])


def fractions_of(run: Run) -> tuple[float, ...]:
    """Fractions of the step that the trace keeps apart; none in one that has only the largest secant."""
    return tuple(sorted(run.recipe.fractions)) if "secants" in run.trace.names else ()


def rank_correlation(run: Run) -> float:
    """Spearman's correlation of gradient norm and smoothness over the measured rows."""
    _, norms, smoothness = measured(run)
    _check_rows(run, norms)
    return float(spearman(norms[None], smoothness[None])[0])


def _check_rows(run: Run, norms: np.ndarray) -> None:
    if len(norms) < LEAST_ROWS:
        raise MissingRuns(f"{run.folder.name} has {len(norms)} usable rows, {LEAST_ROWS} are needed")


def clipped_share(run: Run) -> float:
    """Share of the training steps that were clipped."""
    columns: dict[str, Any] = {name: run.column(name)[1] for name in ("coefficient", "grad_norm")}
    columns["optimizer"] = OPTIMIZERS[run.recipe.optimizer]
    return float(np.isfinite(clip_norms(columns)).mean())


def control_exponents(runs: Sequence[Run]) -> Spread:
    """The exponents that constant Hessians show with the runs' own steps and noise, and their limits."""
    controls = [run.fit.control for run in runs]
    for run, control in zip(runs, controls, strict=True):
        if control is None:
            raise MissingRuns(f"{run.folder.name} has no control: a step length is unknown")
    known = [control for control in controls if control is not None]
    below, above = (
        float(np.mean([abs(control.exponent_interval[end] - control.exponent) for control in known]))
        for end in (0, 1)
    )
    return Spread(values=tuple(control.exponent for control in known), doubt=(below, above))


def elasticity(run: Run) -> float:
    """How smoothness follows the gradient norm inside single steps, where a constant Hessian shows 0."""
    if run.fit.within.missing:
        raise MissingRuns(str(run.fit.within.missing))
    return run.fit.within.elasticity


def spread(runs: Sequence[Run], statistic: Callable[[Run], float]) -> Spread:
    """A statistic over the seeds."""
    return Spread(values=tuple(statistic(run) for run in runs))


def contrast(results: Results, large: str, small: str) -> Evidence:
    """Whether the exponent of one setting is positive and above another's, seed by seed.

    Beyond their controls where nearly all steps of one are clipped, and inside steps where these are vague:
    see the rule at the top of this module.
    """
    pair = results.paired(large, small)
    shares = [spread(runs, clipped_share).mean for runs in pair]
    beyond = max(shares) >= NEARLY_ALL

    def compared(fraction: float | None = None) -> tuple[Spread, Spread]:
        one, other = (spread(runs, partial(exponent, fraction=fraction)) for runs in pair)
        if beyond:
            return one - control_exponents(pair[0]), other - control_exponents(pair[1])
        return one, other

    found = compared()
    gain = found[0] - found[1]
    said = []
    for own, runs, share in zip(found, pair, shares, strict=True):
        parts = f"{share:.0%} of steps clipped"
        if beyond:
            mean, control = spread(runs, exponent).mean, control_exponents(runs).mean
            parts += f", exponent {mean:.3g}, control "
            parts += "diverges" if math.isnan(control) else f"{control:.3g}"
        said.append(f"{own} with {runs[0].recipe.label} ({parts})")
    words = f"exponent {'beyond its control ' * beyond}{said[0]}, {said[1]}: {gain} higher"
    beside = []
    for fraction in fractions_of(pair[0][0]):
        one, other = compared(fraction)
        beside.append(f"at {fraction:g} of the step {one - other}")
    one, other = (spread(runs, partial(exponent, past=START)) for runs in pair)
    beside.append(f"{'without controls, ' * beyond}past the first {START:.0%} of the run {one - other}")
    one, other = (spread(runs, rank_correlation) for runs in pair)
    words += "; " + ", ".join([*beside, f"by ranks {one - other}"])
    by_exponent = decide(words, gain, found[0])
    try:
        one, other = (spread(runs, elasticity) for runs in pair)
    except MissingRuns:
        return by_exponent
    grows = Spread(values=tuple(value - LEAST_ELASTICITY for value in one.values))
    by_elasticity = decide("", one - other, grows)
    if not (beyond and vague(pair)):
        words += (
            f"; inside steps, where no control is needed, elasticity {one} and {other}: {one - other} "
            f"higher ({by_elasticity.verdict} by that)"
        )
        return replace(by_exponent, measured=words)
    labels = [
        f"with {runs[0].recipe.label} ({share:.0%} of steps clipped)"
        for runs, share in zip(pair, shares, strict=True)
    ]
    return replace(
        by_elasticity,
        measured=f"elasticity inside steps {one} {labels[0]}, {other} {labels[1]}: {one - other} higher; "
        f"the exponents do not decide, as a control is known to no better than ±{VAGUE:g}: {words} "
        f"({by_exponent.verdict} by that)",
    )


def vague(pair: Sequence[Sequence[Run]]) -> bool:
    """Whether the limits of one of the controls lie further from it than ``VAGUE``, or it diverges."""
    limits = [end for runs in pair for end in control_exponents(runs).doubt]
    return not all(end <= VAGUE for end in limits)


def beyond_control(results: Results, setting: str) -> Evidence:
    """Whether the exponent is above the one that a constant Hessian shows with the same steps."""
    runs = results.all_finished(setting)
    own, control = spread(runs, exponent), control_exponents(runs)
    words = f"exponent {own} with {runs[0].recipe.label}, its control {control}: {own - control} higher"
    return decide(words, own - control)


def grows_inside_steps(results: Results, setting: str) -> Evidence:
    """The elasticity inside single steps, beyond what counts as none."""
    runs = results.all_finished(setting)
    found = spread(runs, elasticity)
    shown = sum(run.fit.within.grows for run in runs)
    words = (
        f"elasticity {found} with {runs[0].recipe.label} (1 where L1 rules, 0 for a constant Hessian, up "
        f"to {LEAST_ELASTICITY:g} counts as none), growth shown in {shown} of {len(runs)} runs by themselves"
    )
    return decide(words, Spread(values=tuple(value - LEAST_ELASTICITY for value in found.values)))


def absent(results: Results, setting: str) -> Evidence:
    """Whether the rank correlation is below the 0.2 that counts as none."""
    runs = results.all_finished(setting)
    ranks, slopes = spread(runs, rank_correlation), spread(runs, exponent)
    words = (
        f"rank correlation {ranks} with {runs[0].recipe.label} (up to {ABSENT:g} counts as absent), "
        f"exponent {slopes}"
    )
    return decide(words, Spread(values=tuple(ABSENT - value for value in ranks.values)))


# The figures

LONG = "lm-long"  # the longer run of figure 5
ABSENT = 0.2
START = 0.1  # of a run, in which a few rows can outweigh the rest
NEARLY_ALL = 0.9  # share of clipped steps from which all steps count as equally long
VAGUE = 0.3  # limits of a control's exponent beyond which it decides nothing
_SMALL_LR, _SMALL_LR_CLIPPED = "lm-lr2", "lm-lr2clip0.25"
_MOMENTUM, _CLIPPED_IMAGES = "cifar-momentum", "cifar-lr5clip0.25"
_SCALES_SAID = (
    "At laptop scale: LSTM 64/100 without dropout on the 2,000 most frequent words of PTB, measured on 2,800 "
    "words at 0.1, 1/2 and 1 of each step."
)


def _shown(*settings: str, **options: Any) -> Callable[[Results, str], Figure]:
    def draw(results: Results, title: str) -> Figure:
        found = [setting for setting in settings if results.plan.of(setting)]
        if not found:
            raise NotPlanned(f"the plan has no run of {', '.join(settings)}")
        return scatter([results.shown(setting) for setting in found], title=title, **options)

    return draw


FIG1 = PaperFigure(
    name="fig1",
    runs=lambda scale: legend_runs(scale, [BY_HAND]),
    pictures=(
        Picture(
            name="fig1",
            title="Figure 1: smoothness against gradient norm, LSTM on PTB",
            caption=f"Smoothness against gradient norm along training of the language model. {_SCALES_SAID}",
            draw=_shown(BY_HAND),
        ),
    ),
)
FIG2 = PaperFigure(
    name="fig2",
    runs=lambda scale: legend_runs(scale, [BY_HAND, _SMALL_LR, _SMALL_LR_CLIPPED, ALWAYS_CLIPPED]),
    pictures=(
        Picture(
            name="fig2",
            title="Figure 2: language model",
            caption="Smoothness against gradient norm: the paper's three settings, and a threshold that "
            f"clips nearly every step, to show what clipping itself does. {_SCALES_SAID}",
            draw=_shown(BY_HAND, _SMALL_LR, _SMALL_LR_CLIPPED, ALWAYS_CLIPPED),
        ),
    ),
    claims={
        "Smoothness grows with the gradient norm under clipping with a large learning rate, and "
        "much less at a small one without clipping.": partial(contrast, large=BY_HAND, small=_SMALL_LR),
        "At the small learning rate the correlation is much weaker with clipping too.": partial(
            contrast, large=BY_HAND, small=_SMALL_LR_CLIPPED
        ),
        "Not in the paper: the growth is more than a constant Hessian shows under the same steps.": partial(
            beyond_control, setting=BY_HAND
        ),
        "Not in the paper: inside single steps, too, smoothness grows with the gradient norm.": partial(
            grows_inside_steps, setting=BY_HAND
        ),
        "Not in the paper: clipping nearly every step makes the growth stronger at the same "
        "learning rate.": partial(contrast, large=ALWAYS_CLIPPED, small=BY_HAND),
    },
)
FIG3 = PaperFigure(
    name="fig3",
    runs=lambda scale: legend_runs(scale, IMAGES),
    pictures=(
        Picture(
            name="fig3",
            title="Figure 3: ResNet20",
            caption="Smoothness against gradient norm past the start of training. At laptop scale: 10,000 "
            "images averaged to 16 x 16, measured on 60 of them from step 60 on.",
            draw=_shown(*IMAGES),
        ),
    ),
    claims={
        "On images the growth appears with a large learning rate and clipping, and is weaker with "
        "SGD and momentum.": partial(contrast, large=_CLIPPED_IMAGES, small=_MOMENTUM),
        "On images with SGD and momentum there is no correlation.": partial(absent, setting=_MOMENTUM),
    },
)
FIG5 = PaperFigure(
    name="fig5",
    # At laptop scale a run that is half as long again; elsewhere all are long.
    runs=lambda scale: [
        *legend_runs(scale, [BY_HAND]),
        *run_again(scale, LONG, steps=600, probe_every=10),
    ],
    pictures=(
        Picture(
            name="fig5",
            title="Figure 5: linear scale, and the longer run",
            caption="Smoothness against gradient norm on linear axes, and over a longer run.",
            draw=lambda results, title: scatter(
                [results.shown(BY_HAND), results.shown(LONG if results.plan.of(LONG) else BY_HAND)],
                title=title,
                log=[False, True],
                notes=["linear scale", "longer run"],
            ),
        ),
    ),
)
