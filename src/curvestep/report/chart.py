"""A chart as data: axes, curves and points, drawn by the page (plotly) and by matplotlib alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field

import numpy as np

DASHES = ("solid", "dash", "dashdot", "dot")
# Okabe and Ito's palette, told apart with any colour vision; the light yellow is left out.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
NUM_COLOURS = len(COLOURS)
THIN, BOLD = 0.7, 2.0  # weights of a series
GRADIENT = "gradient norm ‖∇f(x)‖"
SMOOTHNESS = "smoothness L̂(x)"  # as the paper says
SHARPNESS = "sharpness along the step L̂(x)"  # as users read it


@dataclass(frozen=True)
class Axis:
    """One axis: its label, whether it is logarithmic, and its range where the data should not decide."""

    label: str
    _: KW_ONLY
    log: bool = False
    range: tuple[float, float] | None = None


@dataclass(frozen=True)
class Series:
    """One curve or cloud of points."""

    name: str  # when it is pointed at, and in the legend
    x: np.ndarray  # where, not finite where there is a gap
    y: np.ndarray  # likewise
    _: KW_ONLY
    colour: int | str = 0  # a number in the palette, or ``ink``, ``soft``, ``pale``, ``bad``
    dash: str = "solid"  # ``solid``, ``dash``, ``dashdot``, ``dot``; empty for points without a line
    mark: str = ""  # ``circle``, ``triangle``, ``square`` or empty
    shade: np.ndarray | None = None  # iterations, to colour the marks by
    band: tuple[np.ndarray, np.ndarray] | None = None  # lower and upper end of a band around the curve
    # What a point says beyond its coordinates, by name.
    extra: Mapping[str, np.ndarray] = field(default_factory=dict)
    weight: float = 1.0  # factor on the width of its line and the size of its marks; heavier ones lie above
    legend: str | None = None  # instead of its name in the legend; empty for no entry
    diverged: bool = False  # whether a cross marks its last point: the run diverged there

    @property
    def entry(self) -> str:
        """Its entry in the legend; empty for none."""
        return self.name if self.legend is None else self.legend

    @property
    def symbol(self) -> str:
        """Its mark; a line through one point cannot be seen without."""
        if np.isfinite(self.y).sum() < 2:
            return self.mark or "circle"
        return self.mark

    @property
    def shade_name(self) -> str:
        """The variable of the page's style sheet that holds its colour."""
        return self.colour if isinstance(self.colour, str) else f"s{self.colour}"

    @property
    def last(self) -> tuple[np.ndarray, np.ndarray]:
        """Where its last finite point is; empty without one."""
        rows = np.flatnonzero(np.isfinite(self.y))[-1:]
        return self.x[rows], self.y[rows]


@dataclass(frozen=True)
class Chart:
    """Axes, curves, and the words for them."""

    kind: str  # ``scatter``, ``norm``, ``loss``, …: part of its name on the page and on disk
    title: str  # above it
    x: Axis  # horizontal axis
    y: Axis  # vertical axis
    series: tuple[Series, ...]  # curves and points, in drawing order
    _: KW_ONLY
    words: str = ""  # the same in a sentence or two: its caption, and all that a screen reader has of it
    # The axes that the reader may change between logarithmic and linear: ``xy``, ``y`` or none.
    switch: str = ""
    # Where the best run's chart stands on the page: ``verdict`` (beside it), ``row`` (below it) or none.
    place: str = ""
