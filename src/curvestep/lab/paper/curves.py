"""Loss and accuracy over the iterations, setting by setting: figure 4 of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvestep.lab.paper.style import COLOURS, DASHES, describe, loaded, panels, styled
from curvestep.lab.recipes import LanguageRecipe
from curvestep.lab.run.folder import Run

SMOOTHING = 20  # steps in the running mean of the training loss


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One setting over several seeds.

    Args:
        label: The setting in words.
        steps: Iterations that all seeds reached, ascending.
        values: One row a seed, shaped (seeds, steps).
        diverged: Steps at which seeds diverged.
    """

    label: str
    steps: np.ndarray
    values: np.ndarray
    diverged: tuple[int, ...] = ()


def curves(runs: Sequence[Run | str | Path], *, title: str = "Training with and without clipping") -> Figure:
    """A row of two panels for each task: training loss, and what the paper shows beside it.

    For a language model that is the validation loss, for images the test accuracy. A line is the mean over
    the seeds of a setting, the band their range; a cross marks where a run diverged.

    Args:
        runs: Runs or run folders, of one task or of both, any settings and seeds.
        title: Title of the figure.
    """
    found = [loaded(run) for run in runs]
    if not found:
        raise ValueError("`runs` must be at least one run folder, got none.")
    tasks = [[run for run in found if is_language(run) == kind] for kind in (True, False)]
    tasks = [task for task in tasks if task]
    with styled():
        figure, axes = panels(len(tasks), 2, width=5.0)
        for row, task in enumerate(tasks):
            _task(axes[2 * row], axes[2 * row + 1], task)
        describe(figure, title, found)
    return figure


def is_language(run: Run) -> bool:
    """Whether the run trains a language model."""
    return isinstance(run.recipe, LanguageRecipe)


def _task(left: Axes, right: Axes, runs: Sequence[Run]) -> None:
    language = is_language(runs[0])
    name = runs[0].recipe.name
    training = gather(runs, "loss", "train", smoothing=SMOOTHING)
    held_out = gather(runs, "loss", "valid") if language else gather(runs, "accuracy", "test")
    draw(left, training)
    draw(right, held_out)
    left.set_title(f"{name}: training loss, running mean of {SMOOTHING} steps")
    left.set_ylabel("training loss")
    _cap(left, training)
    right.set_title(f"{name}: {'validation loss' if language else 'test accuracy'}")
    right.set_ylabel("validation loss" if language else "test accuracy (%)")
    left.legend(loc="best")


def gather(runs: Sequence[Run], column: str, split: str, *, smoothing: int = 1) -> list[Curve]:
    """The curves of one column, one for each setting, in the order in which settings first appear."""
    settings = dict.fromkeys(run.recipe.label for run in runs)
    found = []
    for label in settings:
        own = [run for run in runs if run.recipe.label == label]
        series = [_smoothed(*run.column(column, split), smoothing) for run in own]
        diverged = tuple(int(run.status["step"]) for run in own if run.status.get("status") == "diverged")
        # Seeds end at different steps where one diverged: the mean is over steps that all of them have.
        steps = _common([steps for steps, _ in series])
        values = np.array([v[np.isin(s, steps)] for s, v in series]).reshape(len(own), len(steps))
        found.append(Curve(label=label, steps=steps, values=values, diverged=diverged))
    return found


def draw(panel: Axes, found: Sequence[Curve]) -> None:
    """Draw curves: colour and dash tell settings apart, the band is the range over seeds."""
    panel.set_xlabel("iteration")
    for number, curve in enumerate(found):
        colour, dash = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
        label = curve.label
        if curve.diverged:
            last = max(curve.diverged)
            label += f" (diverged: {len(curve.diverged)} of {len(curve.values)}, by step {last})"
        if len(curve.steps) == 0:
            panel.plot([], [], color=colour, linestyle=dash, label=label)
            continue
        mean = curve.values.mean(axis=0)
        few = "o" if len(curve.steps) < 12 else None
        panel.plot(curve.steps, mean, color=colour, linestyle=dash, marker=few, markersize=4, label=label)
        if len(curve.values) > 1:
            low, high = curve.values.min(axis=0), curve.values.max(axis=0)
            panel.fill_between(curve.steps, low, high, color=colour, alpha=0.18, linewidth=0)
        if curve.diverged:
            # At the upper edge: where it went is out of the range of the others.
            end = {"transform": panel.get_xaxis_transform(), "clip_on": False}
            panel.plot(max(curve.diverged), 1.0, marker="x", color=colour, markersize=8, **end)


def _cap(panel: Axes, found: Sequence[Curve]) -> None:
    """Leave what explodes out of the range, so that the runs that train can be told apart."""
    calm = [c.values for c in found if not c.diverged and c.values.size]
    if calm and any(c.diverged for c in found):
        low, high = min(v.min() for v in calm), max(v.max() for v in calm)
        panel.set_ylim(low - 0.05 * (high - low), high + 0.15 * (high - low))


def _smoothed(steps: np.ndarray, values: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Running mean over at most ``window`` values up to each step; what is not finite is left out."""
    usable = np.isfinite(values)
    steps, values = steps[usable], values[usable]
    sums = np.concatenate([[0.0], np.cumsum(values)])
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - window, 0)
    return steps, (sums[end] - sums[start]) / (end - start) if len(values) else values


def _common(all_steps: Sequence[np.ndarray]) -> np.ndarray:
    common = all_steps[0]
    for steps in all_steps[1:]:
        common = np.intersect1d(common, steps)
    return common
