r"""What a step gains to first order, what curvature takes back, and which layers it comes from.

For a step :math:`d` from :math:`x`, with the gradients :math:`g` at :math:`x` and :math:`g'` at :math:`x + d`
of the same batch, the trapezoid rule says

.. math::
    f(x) - f(x + d) = \underbrace{-\langle g, d \rangle}_{\text{gain}}
        - \underbrace{\tfrac12 \langle g' - g, d \rangle}_{\text{penalty}} + O(\lVert d \rVert^3),

exactly where :math:`f` is quadratic. Both products are sums over parameters, so each layer has a share, and
the shares add up. A layer's share of the penalty holds its interactions with other layers, too: half of
:math:`d_i^\top H_{ij} d_j` counts for layer :math:`i`, half for :math:`j`. What a layer costs without them,
:math:`\tfrac12 d_i^\top H_{ii} d_i`, takes a gradient where it alone has moved; the probe takes these for
``estimators={"layer_curvature": 10}``, here at every tenth measurement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from curvestep.trace.schema import LAYER_CURVATURE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from curvestep.trace.trace import Trace

MOST_NAMED = 5  # layers that the text names


@dataclass(frozen=True, kw_only=True)
class LayerGains:
    """One layer's share of gain and penalty, one entry per step; zero where it did not move.

    Args:
        gain: Its share of the gain.
        penalty: Its share of the penalty, with half of its interactions with each other layer.
        within: The penalty if it alone had moved; NaN where that was not measured.
    """

    gain: np.ndarray
    penalty: np.ndarray
    within: np.ndarray


@dataclass(frozen=True, kw_only=True)
class StepGains:
    r"""Gain and penalty of the measured steps, in units of the loss, one entry per step.

    Args:
        step: Numbers of the training steps.
        gain: :math:`-\langle g, d\rangle`, what the gradient at the start promises.
        penalty: :math:`\tfrac12 \langle g' - g, d\rangle`, what curvature takes back; negative where the
            curvature along the step is.
        within: The part of the penalty that lies within layers; NaN where that was not measured.
        fall: By how much the loss of the same batch fell; NaN where the row has no loss at the start.
        layers: The shares of each layer, if layers were measured.
    """

    step: np.ndarray
    gain: np.ndarray
    penalty: np.ndarray
    within: np.ndarray
    fall: np.ndarray
    layers: Mapping[str, LayerGains]

    @property
    def rest(self) -> np.ndarray:
        """What neither explains, of third order in the step: fall − (gain − penalty)."""
        return self.fall - (self.gain - self.penalty)

    @property
    def penalty_share(self) -> float:
        """The penalty of all steps over their gain."""
        return _ratio(self.penalty.sum(), self.gain.sum())

    @property
    def within_share(self) -> float:
        """How much of the penalty lies within layers, of the steps where that was measured."""
        known = np.isfinite(self.within)
        return _ratio(self.within[known].sum(), self.penalty[known].sum())

    def __str__(self) -> str:
        gain = self.gain.mean()
        penalty = self.penalty.mean()
        lines = [
            f"The mean of {len(self.step)} measured steps gains {gain:.3g} to first order. "
            f"Curvature takes back {penalty:.3g} ({self.penalty_share:.0%})."
        ]
        if np.isfinite(self.within).any():
            between = 1.0 - self.within_share
            lines.append(
                f"{self.within_share:.0%} of the penalty lies within layers, {between:.0%} between them."
            )
        known = np.isfinite(self.fall)
        if known.any():
            expected = (self.gain - self.penalty)[known].mean()
            lines.append(
                f"Gain minus penalty is {expected:.3g}. "
                f"The loss of the same batch falls by {self.fall[known].mean():.3g}."
            )
        by_penalty = sorted(self.layers, key=lambda name: -self.layers[name].penalty.sum())
        for name in by_penalty[:MOST_NAMED]:
            layer = self.layers[name]
            of_gain = _ratio(layer.gain.sum(), self.gain.sum())
            of_penalty = _ratio(layer.penalty.sum(), self.penalty.sum())
            lines.append(f"Layer {name} has {of_gain:.0%} of the gain and {of_penalty:.0%} of the penalty.")
        others = len(by_penalty) - MOST_NAMED
        if others > 0:
            lines.append(f"The shares of {others} more layers are in `.layers`.")
        return "\n".join(lines)

    def plot(self) -> Figure:
        """Gain, penalty and rest over the steps, and the penalty of each layer; needs matplotlib."""
        from curvestep.report.results import draw_charts, gain_charts

        return draw_charts(gain_charts(self))


def step_gains(trace: Trace) -> StepGains:
    """Gains of the rows that were measured without trouble over the whole step."""
    length = trace.column("step_norm")
    gain = trace.column("cosine") * trace.column("grad_norm") * length
    penalty = 0.5 * trace.column("curvature") * length**2
    within = 0.5 * trace.column(LAYER_CURVATURE) * length**2
    keep = trace.ok & np.isfinite(gain) & np.isfinite(penalty)
    if not keep.any():
        raise ValueError(
            "No row has a curvature over the whole step. Measure with 1.0 among the `fractions` of the probe."
        )
    loss = trace.column("loss")
    after = trace.column("loss_after")
    # A row whose loss at the start is not known has the loss after the step in its place.
    fall = np.where(loss != after, loss - after, math.nan)
    layers: dict[str, LayerGains] = {}
    for column in trace.names:
        if column.startswith("layers/") and column.endswith("/step_norm"):
            name = column.removeprefix("layers/").removesuffix("/step_norm")
            layer = _layer_gains(trace, name, keep)
            if np.isfinite(layer.gain + layer.penalty).all():  # older traces have no products of layers
                layers[name] = layer
    return StepGains(
        step=trace.column("step")[keep],
        gain=gain[keep],
        penalty=penalty[keep],
        within=within[keep],
        fall=fall[keep],
        layers=layers,
    )


def _layer_gains(trace: Trace, name: str, keep: np.ndarray) -> LayerGains:
    columns: dict[str, np.ndarray] = {}
    for key in ("cosine", "curvature", LAYER_CURVATURE, "grad_norm", "step_norm"):
        path = f"layers/{name}/{key}"
        columns[key] = np.full(len(trace), math.nan)
        if path in trace.names:
            columns[key] = trace.column(path)
    gain = columns["cosine"] * columns["grad_norm"] * columns["step_norm"]
    penalty = 0.5 * columns["curvature"] * columns["step_norm"] ** 2
    within = 0.5 * columns[LAYER_CURVATURE] * columns["step_norm"] ** 2
    is_still = columns["step_norm"] == 0
    gain = np.where(is_still | (columns["grad_norm"] == 0), 0.0, gain)
    penalty = np.where(is_still, 0.0, penalty)
    within = np.where(is_still, 0.0, within)
    return LayerGains(gain=gain[keep], penalty=penalty[keep], within=within[keep])


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else math.nan
