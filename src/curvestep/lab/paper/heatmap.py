"""A sweep at a glance: the final training loss over two fields of its grid."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from curvestep.lab.grid import SweepResult, Trial


def heatmap(result: SweepResult, *, title: str = "") -> Figure:
    """Final training loss over the two fields with most values, mean over the others; grey if one was lost.

    Args:
        result: A sweep of at least one trial.
        title: Above the figure.
    """
    from curvestep.lab.grid import short

    rows, columns = _axes(result)
    down, across = (_values(result, name) for name in (rows, columns))
    losses = np.full((len(down), len(across)), np.nan)
    words = np.full(losses.shape, "", dtype=object)
    for i, j in itertools.product(range(len(down)), range(len(across))):
        cell = [t for t in result.trials if _at(t, rows) == down[i] and _at(t, columns) == across[j]]
        finished = [t.train_loss for t in cell if math.isfinite(t.train_loss)]
        if finished and len(finished) == len(cell):
            losses[i, j] = np.mean(finished)
            words[i, j] = f"{losses[i, j]:.3g}"
        else:
            lost = Counter(t.status for t in cell if not math.isfinite(t.train_loss))
            words[i, j] = "\n".join(f"{n} of {len(cell)}\n{status}" for status, n in lost.items())
    figure = Figure(figsize=(2.6 + 1.1 * len(across), 1.6 + 0.8 * len(down)), layout="constrained")
    axes = figure.subplots()
    axes.set_facecolor("0.85")
    image = axes.imshow(losses, cmap="viridis_r", aspect="auto")
    middle = np.nanmean(losses) if np.isfinite(losses).any() else 0.0
    for i, j in itertools.product(range(len(down)), range(len(across))):
        dark = math.isfinite(losses[i, j]) and losses[i, j] > middle
        axes.text(j, i, words[i, j], ha="center", va="center", color="white" if dark else "black", fontsize=8)
    axes.set_xticks(range(len(across)), [short(value) for value in across])
    axes.set_yticks(range(len(down)), [short(value) for value in down])
    axes.set_xlabel(columns.replace("_", " "))
    axes.set_ylabel(rows.replace("_", " "))
    if np.isfinite(losses).any():
        others = [name for name in result.trials[0].fields if name not in (rows, columns)]
        mean = f", mean over {' and '.join(others)}" if others else ""
        figure.colorbar(image, label=f"final training loss{mean}".replace("_", " "))
    if title:
        figure.suptitle(title)
    return figure


def _axes(result: SweepResult) -> tuple[str, str]:
    """The two fields to draw: those with most values, the seed last of all."""
    names = list(result.trials[0].fields)
    ranked = sorted(names, key=lambda name: (name == "seed", -len(_values(result, name))))
    columns = ranked[0]
    return (ranked[1] if len(ranked) > 1 and ranked[1] != "seed" else ""), columns


def _values(result: SweepResult, name: str) -> list[Any]:
    return list(dict.fromkeys(_at(trial, name) for trial in result.trials))


def _at(trial: Trial, name: str) -> Any:
    return trial.fields[name] if name else ""
