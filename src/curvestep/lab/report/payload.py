"""The numbers of the page, packed: JSON with five significant digits, compressed, as text."""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from curvestep.lab.report.calibration_chart import curve_data
from curvestep.lab.report.heat import HeatMap
from curvestep.lab.report.views import RunView

_MEASURED = ("step", "loss", "grad_norm", "step_norm", "smoothness", "lr", "clipped")


def pack(text: str) -> str:
    """Text, compressed and in base64; the browser unpacks it with ``DecompressionStream``.

    Example:
        >>> gzip.decompress(base64.b64decode(pack("π"))).decode()
        'π'
    """
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=9, mtime=0)).decode()


def page_data(views: Sequence[RunView], heat: HeatMap | None) -> str:
    """Everything that the charts draw, as JSON."""
    data = {"runs": [_run(view) for view in views], "heat": None if heat is None else _heat(heat)}
    return json.dumps(data, allow_nan=False, separators=(",", ":"))


def rounded(values: np.ndarray) -> list[float | int | None]:
    """Five significant digits, whole numbers whole, None for what is not finite.

    Example:
        >>> rounded(np.array([0.123456789, 20.0, np.nan]))
        [0.12346, 20, None]
    """
    return [_rounded(value) for value in values.tolist()]


def _rounded(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    if value.is_integer() and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.5g}")


def _run(view: RunView) -> dict[str, Any]:
    empty = np.array([])
    return {
        "name": view.name,
        "diverged": view.status == "diverged",
        "max_norm": _rounded(view.max_norm),
        "measured": {name: rounded(view.measured.get(name, empty)) for name in _MEASURED},
        "train": {
            name: rounded(view.train.get(name, empty)) for name in ("step", "loss", "grad_norm", "clipped")
        },
        "held_out": {name: rounded(view.held_out.get(name, empty)) for name in ("step", "loss")},
        "line": None if view.fit is None else [_rounded(view.fit.L0), _rounded(view.fit.L1)],
        "frontier": _frontier(view),
        "calibration": None if view.calibration is None else curve_data(view.calibration),
        "layers": None
        if not view.layers
        else {"names": list(view.layers), "smoothness": [rounded(column) for column in view.layers.values()]},
    }


def _frontier(view: RunView) -> list[list[float | int | None]]:
    if view.fit is None:
        return []
    low, high = view.fit.grad_norm_range
    norms = np.geomspace(low, high, 60)
    return [rounded(np.array(point)) for point in zip(norms, view.fit.envelope(norms), strict=True)]


def _heat(heat: HeatMap) -> dict[str, Any]:
    text = [
        [f"{loss:.4g}" if math.isfinite(loss) else note for loss, note in zip(losses, notes, strict=True)]
        for losses, notes in zip(heat.losses, heat.notes, strict=True)
    ]
    return {
        "rows": heat.rows,
        "columns": heat.columns,
        "down": heat.down,
        "across": heat.across,
        "losses": [rounded(np.array(row)) for row in heat.losses],
        "text": text,
    }
