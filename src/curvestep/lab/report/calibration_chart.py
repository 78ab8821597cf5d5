"""The panel "where the step stops being safe" of a run that was calibrated: its numbers, and its words."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

from curvestep.calibration.result import Calibration


def curve_data(found: Calibration) -> dict[str, Any]:
    """What the chart draws: every step that was measured, batch by batch."""
    step = median(batch.safe_step for batch in found.curve)
    low, high = (_finite(end / found.lr * step) for end in found.lr_interval)
    return {
        "kappa": found.max_kappa,
        "safe_step": _finite(step),
        "interval": None if low is None or high is None else [low, high],
        "batches": [
            {
                "step": [_finite(point.step) for point in batch.points],
                "kappa": [_finite(point.kappa) for point in batch.points],
                "loss": [_finite(point.loss - batch.loss) for point in batch.points],
                "safe": [int(point.safe) for point in batch.points],
            }
            for batch in found.curve
        ],
    }


def curve_in_words(found: Calibration) -> str:
    """The same for who cannot see it: where steps stop being safe, and what was made of it."""
    steps = [batch.safe_step for batch in found.curve]
    count = len(steps)
    batches = "one batch" if count == 1 else f"{count} batches"
    spread = f" ({min(steps):.3g} to {max(steps):.3g} over the batches)" if count > 1 else ""
    return (
        f"Change of the gradient over steps of growing length, {found.num_gradients} gradients of {batches} "
        f"before the first step of training: it passes {found.max_kappa:g}, or the loss falls too little, "
        f"beyond a step of {median(steps):.3g}{spread}. From this: lr {found.lr:.3g}{found.threshold}."
    )


def _finite(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None
