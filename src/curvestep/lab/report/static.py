"""Each figure of the page as PNG and SVG, for papers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from curvestep.lab.paper.scatter import GRADIENT, SMOOTHNESS, draw_fit
from curvestep.lab.paper.style import (
    COLOURS,
    DASHES,
    FRONTIER,
    ITERATIONS,
    LINE,
    log_axes,
    panels,
    save,
    styled,
)
from curvestep.lab.report.calibration_figure import calibration
from curvestep.lab.report.views import Columns, RunView


def save_figures(views: Sequence[RunView], folder: str | Path) -> list[Path]:
    """Write every figure of these runs into ``folder``; the files.

    A run's figures are ``<run>-scatter``, ``-norm``, ``-loss`` and ``-edge``, and ``-calibration`` if its
    numbers were measured; all runs together are ``comparison``. Each is a PNG and an SVG.

    Args:
        views: The runs, as on the page.
        folder: Made if it is not there.
    """
    written: list[Path] = []
    for view in views:
        for kind, draw in _DRAW.items():
            with styled():
                figure, (panel,) = panels(1, 1, width=5.0)
                if not draw(panel, view):
                    continue
                panel.set_title(f"{view.name}: {view.setting}", parse_math=False)
            written += save(figure, Path(folder) / f"{_file_name(view.name)}-{kind}.png")
        if view.calibration is not None:
            title = view.name.replace("$", r"\$") + ": where the step stops being safe"
            figure = calibration(view.calibration, title=title)
            written += save(figure, Path(folder) / f"{_file_name(view.name)}-calibration.png")
    if len(views) > 1:
        written += save(_comparison(views), Path(folder) / "comparison.png")
    return written


def _scatter(panel: Axes, view: RunView) -> bool:
    if view.fit is None:
        return False
    m = view.measured
    keep = np.isfinite(m["smoothness"]) & (m["smoothness"] > 0) & (m["grad_norm"] > 0)
    log_axes(panel)
    points = panel.scatter(
        m["grad_norm"][keep], m["smoothness"][keep], c=m["step"][keep], cmap=ITERATIONS, s=12
    )
    assert panel.figure is not None
    panel.figure.colorbar(points, ax=panel, label="iteration", pad=0.02)
    draw_fit(panel, view.fit, m["grad_norm"][keep], log=True)
    panel.set_xlabel(GRADIENT)
    panel.set_ylabel(SMOOTHNESS)
    return True


def _norm(panel: Axes, view: RunView) -> bool:
    rows = _rows(view)
    if not len(rows.get("step", ())):
        return False
    log_axes(panel, x=False)
    panel.plot(rows["step"], rows["grad_norm"], color=COLOURS[0], label="gradient norm")
    clipped = rows["clipped"] == 1
    panel.plot(
        rows["step"][clipped],
        rows["grad_norm"][clipped],
        "^",
        color=LINE,
        markersize=3,
        label="clipped steps",
    )
    if np.isfinite(view.max_norm):
        panel.axhline(view.max_norm, color=FRONTIER, linestyle="--", linewidth=1, label="clipping starts")
    return _labelled(panel, GRADIENT)


def _loss(panel: Axes, view: RunView) -> bool:
    rows = _rows(view)
    if not len(rows.get("step", ())):
        return False
    panel.plot(rows["step"], rows["loss"], color=COLOURS[0], label="training loss")
    if len(view.held_out.get("step", ())):
        panel.plot(view.held_out["step"], view.held_out["loss"], "s-", color=LINE, label="held-out loss")
    return _labelled(panel, "loss")


def _edge(panel: Axes, view: RunView) -> bool:
    m = view.measured
    if not len(m.get("step", ())) or not np.isfinite(m["lr"]).any():
        return False
    log_axes(panel, x=False)
    panel.plot(m["step"], m["lr"] * m["smoothness"] / 2, color=COLOURS[0], label=r"$\eta L/2$")
    with np.errstate(divide="ignore", invalid="ignore"):
        taken = m["step_norm"] / m["grad_norm"] * m["smoothness"] / 2
    panel.plot(m["step"], taken, ":", color=COLOURS[2], label="with the step as taken")
    panel.axhline(1, color=LINE, linestyle="--", linewidth=1, label="edge of stability")
    return _labelled(panel, r"learning rate $\times$ smoothness / 2")


_DRAW = {"scatter": _scatter, "norm": _norm, "loss": _loss, "edge": _edge}


def _comparison(views: Sequence[RunView]) -> Figure:
    with styled():
        figure, (panel,) = panels(1, 1, width=6.0)
        for number, view in enumerate(views):
            rows = _rows(view)
            panel.plot(
                rows.get("step", []),
                _smooth(rows.get("loss", np.array([]))),
                color=COLOURS[number % len(COLOURS)],
                linestyle=DASHES[number // len(COLOURS) % len(DASHES)],
                label=view.name.replace("$", r"\$"),
            )
        steady = [_rows(v) for v in views if v.status != "diverged"]
        calm = [_smooth(rows["loss"]) for rows in steady if len(rows.get("loss", ()))]
        if calm and any(v.status == "diverged" for v in views):
            low, high = min(np.nanmin(c) for c in calm), max(np.nanmax(c) for c in calm)
            panel.set_ylim(low - 0.05 * (high - low), high + 0.15 * (high - low))
        panel.set_title("training loss")
        _labelled(panel, "training loss (running mean)")
    return figure


def _smooth(loss: np.ndarray) -> np.ndarray:
    """Mean over the last twentieth of the rows, 50 at most: as on the page."""
    window = min(50, max(1, len(loss) // 20))
    return np.array([np.mean(loss[max(0, i - window + 1) : i + 1]) for i in range(len(loss))])


def _labelled(panel: Axes, label: str) -> bool:
    panel.set_xlabel("iteration")
    panel.set_ylabel(label)
    panel.legend(loc="best")
    return True


def _rows(view: RunView) -> Columns:
    return view.train if len(view.train.get("step", ())) else view.measured


def _file_name(name: str) -> str:
    """The run's name with everything but letters, digits, ``.,=-`` as an underscore.

    Example:
        >>> _file_name("sweep/lr=3,max_norm=inf")
        'sweep_lr=3,max_norm=inf'
    """
    return re.sub(r"[^\w.,=-]+", "_", name).strip(".") or "run"
