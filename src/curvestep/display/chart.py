"""A chart as data: axes, curves, points and maps, drawn by the page (plotly) and by matplotlib alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

import numpy as np

DASHES = ("solid", "dash", "dashdot", "dot")
NUM_COLOURS = 7
GRADIENT = "gradient norm ‖∇f(x)‖"
SMOOTHNESS = "smoothness L̂(x)"


@dataclass(frozen=True)
class Axis:
    """One axis: its label, whether it is logarithmic, and its range where the data should not decide."""

    label: str
    _: KW_ONLY
    log: bool = False
    range: tuple[float, float] | None = None


@dataclass(frozen=True)
class Series:
    """One curve or cloud of points.

    Args:
        name: In the legend.
        x: Where, not finite where there is a gap.
        y: Likewise.
        colour: A number in the palette, or ``ink`` or ``soft``.
        dash: ``solid``, ``dash``, ``dashdot``, ``dot``; empty for points without a line.
        mark: ``circle``, ``triangle``, ``square`` or empty.
        shade: Iterations, to colour the marks by.
        low: Lower end of a band around the curve.
        high: Upper end of the band.
        extra: What a point says beyond its coordinates, by name.
        thin: Draw a fine line.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    _: KW_ONLY
    colour: int | str = 0
    dash: str = "solid"
    mark: str = ""
    shade: np.ndarray | None = None
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    extra: Mapping[str, Sequence[float | str] | np.ndarray] = field(default_factory=dict)
    thin: bool = False


@dataclass(frozen=True)
class Grid:
    """Numbers over two axes, shown by colour.

    Args:
        across: Values or names to the right.
        down: Names downwards.
        values: Shaped (down, across); not finite where there is none.
        label: What the numbers are.
        text: What to write into the cells.
        log: Colours by the logarithm.
        reverse: Dark is large.
    """

    across: Sequence[float | str]
    down: Sequence[str]
    values: np.ndarray
    label: str
    _: KW_ONLY
    text: Sequence[Sequence[str]] = ()
    log: bool = False
    reverse: bool = False


@dataclass(frozen=True)
class Chart:
    """Axes, curves or a map, and the words for them.

    Args:
        kind: ``scatter``, ``norm``, ``loss``, …: part of its name on the page and on disk.
        title: Above it.
        x: Horizontal axis.
        y: Vertical axis.
        series: Curves and points, in drawing order.
        words: The same in a sentence or two: its caption, and all that a screen reader has of it.
        grid: Instead of ``series``: a map.
        switch: The axes that the reader may change between logarithmic and linear: ``xy``, ``y`` or none.
    """

    kind: str
    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...] = ()
    _: KW_ONLY
    words: str = ""
    grid: Grid | None = None
    switch: str = ""
