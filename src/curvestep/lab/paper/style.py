"""How every figure looks, and how it is saved: readable in print, safe for colour-blind readers."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from curvestep.lab.run.folder import Run

# Okabe and Ito's palette, told apart with any colour vision; the light yellow is left out.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", "-.", ":")
ITERATIONS = "viridis"  # dark is early; grows evenly in lightness
LINE = "#D55E00"
FRONTIER = "#000000"

_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.fontsize": 7.5,
    "legend.framealpha": 0.9,
    "lines.linewidth": 1.4,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "curvestep",  # the same figure is the same file
    "figure.dpi": 100,
}


@contextmanager
def styled() -> Iterator[None]:
    """Draw inside with the project's style; matplotlib's own settings come back afterwards."""
    with matplotlib.rc_context(_STYLE):
        yield


def panels(rows: int, columns: int, *, width: float = 4.2, height: float = 3.4) -> tuple[Figure, list[Axes]]:
    """A figure of ``rows`` times ``columns`` panels of this size in inches, and the panels in a list."""
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, [panel for row in axes for panel in row]


def save(figure: Figure, path: str | Path) -> tuple[Path, Path]:
    """Write ``figure`` as PNG and as SVG beside it; the two paths.

    Args:
        figure: The figure.
        path: Where to, without or with a suffix; missing folders are made.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    png, svg = path.with_suffix(".png"), path.with_suffix(".svg")
    with styled():
        figure.savefig(png, dpi=160, metadata={"Software": None})
        figure.savefig(svg, metadata={"Date": None, "Creator": None})
    return png, svg


def loaded(run: Run | str | Path) -> Run:
    """The run itself, or the one in this folder."""
    return run if isinstance(run, Run) else Run.load(run)


def setting(run: Run) -> str:
    """The setting in words for a panel's title or a legend, with the end of a run that diverged."""
    if run.status.get("status") == "diverged":
        return f"{run.recipe.label} (diverged at step {run.status.get('step')})"
    return run.recipe.label


def describe(figure: Figure, title: str, runs: Sequence[Run]) -> None:
    """Put the title above the panels, and below them what was trained on which data."""
    width = figure.get_figwidth()
    figure.suptitle(_wrapped(title, width / 0.095), fontsize=11, fontweight="bold")
    recipes = dict.fromkeys(f"{run.recipe.name}, {run.recipe.scale} scale" for run in runs)
    data = dict.fromkeys(str(run.status["data"]) for run in runs if run.status.get("data"))
    seeds = sorted({run.recipe.seed for run in runs})
    words = [*recipes, f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}", *data]
    figure.supxlabel(_wrapped("; ".join(words), width / 0.062), fontsize=7.5, color="#555555")


def _wrapped(text: str, characters: float) -> str:
    """Each line of ``text`` broken so that it fits."""
    return "\n".join(part for line in text.split("\n") for part in textwrap.wrap(line, int(characters)))


def log_axes(panel: Axes, *, x: bool = True, y: bool = True) -> None:
    """Logarithmic axes with plain numbers at the ticks, also where the data span less than a decade."""
    for wanted, axis, setter in ((x, panel.xaxis, panel.set_xscale), (y, panel.yaxis, panel.set_yscale)):
        if wanted:
            setter("log")
            axis.set_major_locator(_Ticks())
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())


class _Ticks(LogLocator):
    """1, 2 and 5 in each decade; over more than two decades only 1."""

    def tick_values(self, vmin: float, vmax: float) -> Any:
        self.set_params(subs=(1.0,) if vmin > 0 and vmax / vmin > 200 else (1.0, 2.0, 5.0), numticks=15)
        return super().tick_values(vmin, vmax)


def legend_below(panel: Axes) -> None:
    """The legend under the panel, where it hides no point."""
    panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False, handlelength=1.6)
