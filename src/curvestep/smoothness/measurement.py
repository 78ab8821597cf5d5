r"""Parts of a row, as functions of one step: norms, secants, smoothness at its start, noise, its safe part.

A :class:`Segment` is the step from :math:`x_k` to :math:`x_{k+1}` with the gradient at its start. Each
function takes it with a replay of its batch, and returns a part of the row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from curvestep.checks import check_choice, check_count
from curvestep.smoothness.estimators import central_difference, central_length, spectral_smoothness
from curvestep.smoothness.geometry import ChangeInMetric, Geometry
from curvestep.smoothness.replay import Gradients, Replay, Visitor
from curvestep.tensors.distributed import over_ranks
from curvestep.tensors.vectors import change, difference, dot_of_changes, global_norm
from curvestep.trace.schema import ESTIMATORS, LAYER_CURVATURE, NONFINITE, OK, Row

LOCAL_TOLERANCE = 0.1  # relative change of a Hessian product when the difference step is halved


@dataclass(frozen=True)
class Start:
    """Point and gradient before the step."""

    point: list[
        Tensor
    ]  # copies of the parameters at x_k; empty once measuring along the step overwrites them
    gradients: Gradients  # at x_k
    grad_norm: float  # their norm
    raw: Gradients | None  # the gradient that training computed, before any clipping; None with an oracle
    raw_norm: float  # its norm


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The step as the estimators see it."""

    start: Start
    step_norm: float
    eps: float
    groups: Mapping[str, Sequence[int]]
    layers: Mapping[str, Row]  # norms of gradient and step in each group
    geometry: Geometry  # the optimizer's metric


@dataclass(frozen=True)
class Secant:
    """How loss and gradient changed on the way to one fraction of the step."""

    fraction: float
    size: float  # of the change of the gradient
    slope: float  # size over the length of the way
    grad_norm: float  # of the gradient there
    loss: float  # there, of this rank
    layer_sizes: Mapping[str, float]  # of the change in each group


class SlopeAlong:
    """Inner product of a change of the gradient with the step from ``start``, parameter by parameter."""

    def __init__(self, parameters: Sequence[Tensor], start: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._start = start
        self._parts: dict[int, float] = {}

    def __call__(self, i: int, new: Tensor | None, old: Tensor | None) -> None:
        """Take one parameter's part."""
        self._parts[i] = dot_of_changes(self._parameters[i], self._start[i], new, old).item()

    @property
    def total(self) -> float:
        """The product over all parameters."""
        return math.fsum(self._parts.values())

    def share_of(self, indices: Iterable[int]) -> float:
        """The product over some parameters, such as a layer's; the shares of all layers add up."""
        return math.fsum(self._parts[i] for i in indices)


def norms_part(start: Start, parameters: Sequence[Tensor], groups: Mapping[str, Sequence[int]]) -> Row:
    """Norms of gradient and step, whole and by layer, and the cosine between the step and −g."""
    lengths = [change(p.detach(), s) for p, s in zip(parameters, start.point, strict=True)]
    g = start.grad_norm
    length = global_norm(lengths).item()
    part: Row = {"grad_norm": g, "step_norm": length}
    along = None
    if g > 0 and length > 0:
        along = SlopeAlong(parameters, start.point)
        for i, gradient in enumerate(start.gradients):
            along(i, gradient, None)
        part["cosine"] = _cosine(-along.total, g, length)
    if groups:
        part["layers"] = layer_norms(start.gradients, lengths, groups, along)
    return part


def layer_norms(
    gradients: Gradients, lengths: Gradients, groups: Mapping[str, Sequence[int]], along: SlopeAlong | None
) -> Row:
    """Norms of gradient and step in each layer, and the cosine between its part of the step and of −g."""
    layers: Row = {}
    for name, indices in groups.items():
        g = _norm_of(gradients, indices)
        length = _norm_of(lengths, indices)
        layers[name] = {"grad_norm": g, "step_norm": length}
        if along is not None and g > 0 and length > 0:
            layers[name]["cosine"] = _cosine(-along.share_of(indices), g, length)
    return layers


def _cosine(product: float, one: float, other: float) -> float:
    return float(np.clip(product / one / other, -1.0, 1.0))


def summary_part(row: Row) -> Row:
    """Status and stability margin of a row, and its loss where only that after the step is known."""
    measured = [row[name] for name in ESTIMATORS if row.get(name) is not None]
    status = OK if all(math.isfinite(value) for value in measured) else NONFINITE
    part: Row = {"status": status, "loss": row.get("loss", row.get("loss_after"))}
    if row["lr"] is not None:
        part["stability_margin"] = row["lr"] * row["smoothness"] / 2
    return part


def secant_at(segment: Segment, replay: Replay, fraction: float, visitors: Iterable[Visitor]) -> Secant:
    """The change of the gradient from the start of the step to where the parameters are."""
    there = replay.change(segment.start.gradients, visitors)
    size = global_norm(there.parts).item()
    return Secant(
        fraction=fraction,
        size=size,
        slope=size / (fraction * segment.step_norm),
        grad_norm=there.grad_norm,
        loss=there.loss.item(),
        layer_sizes={name: _norm_of(there.parts, part) for name, part in segment.groups.items()},
    )


def along_step(segment: Segment, replay: Replay, fractions: Sequence[float]) -> Row:
    r"""The paper's estimate, with every secant kept, κ, and loss and curvature at the end of the step.

    The fast twin of :func:`~curvestep.smoothness.estimators.segment_smoothness`, in place.
    """
    secants: dict[float, Secant] = {}
    start = [*segment.start.point]
    segment.start.point.clear()  # whoever reads it from now on gets an error, not the end of the step
    along = SlopeAlong(replay.parameters, start)
    metric: list[ChangeInMetric] = []
    if not segment.geometry.is_euclidean:
        metric.append(ChangeInMetric(segment.geometry, replay.parameters, start))
    for fraction in replay.along(start, fractions):
        visitors: list[Visitor] = []
        if fraction == 1.0:  # later the start is overwritten
            visitors.append(along)
        if fraction == fractions[-1]:
            visitors += metric
        secants[fraction] = secant_at(segment, replay, fraction, visitors)
    ordered = [secants[fraction] for fraction in fractions]
    slopes = [s.slope for s in ordered]
    part = {
        "smoothness": float(np.max(slopes)),  # NaN if any is
        "fractions": list(fractions),
        "secants": slopes,
        "grad_norms": [s.grad_norm for s in ordered],
        **change_part(segment, ordered[-1], metric),
    }
    if segment.layers:
        part["layers"] = {name: layer_part(name, norms, ordered) for name, norms in segment.layers.items()}
    if 1.0 in secants:
        part["loss_after"] = over_ranks(secants[1.0].loss, replay.model, mean=True)
        part["curvature"] = along.total / segment.step_norm / segment.step_norm
        for name, indices in segment.groups.items():
            length = part["layers"][name]["step_norm"]
            if length > 0:
                part["layers"][name]["curvature"] = along.share_of(indices) / length / length
    return part


def layer_part(name: str, norms: Row, secants: Sequence[Secant]) -> Row:
    """Norms and smoothness of one layer; of one that did not move the norms."""
    length = norms["step_norm"]
    if not length:
        return norms
    slopes = [s.layer_sizes[name] / (s.fraction * length) for s in secants]
    return {**norms, "smoothness": float(np.max(slopes))}


def change_part(segment: Segment, secant: Secant, metric: Sequence[ChangeInMetric]) -> Row:
    """κ and the smoothness in the optimizer's metric."""
    part: Row = {}
    if segment.start.grad_norm:
        part["kappa"] = secant.size / segment.start.grad_norm
    if segment.geometry.scales:
        part["optimizer_smoothness"] = secant.slope
    for visitor in metric:
        part["optimizer_smoothness"] = visitor.smoothness(secant.fraction)
    return part


def local_part(segment: Segment, replay: Replay) -> Row:
    r"""Smoothness at the start along the step, by central differences: they work with every model.

    The fast twin of :func:`~curvestep.smoothness.estimators.local_smoothness`. The difference step is no
    longer than the step of training: :math:`\sqrt[3]{\varepsilon}\lVert x\rVert` of a model with a large
    embedding can be a hundred times that. A second difference of half the length says how far the product is
    to be trusted.
    """
    x = segment.start.point
    d = [p.detach() - s for p, s in zip(replay.parameters, x, strict=True)]
    length = min(central_length(x, eps=segment.eps), segment.step_norm)
    product = central_difference(replay, x, d, length=length)
    half = central_difference(replay, x, d, length=length / 2)
    replay.return_home()
    size = global_norm(product).item()
    gap = global_norm(difference(half, product, overwrite=True)).item()
    error = gap / (size or math.ulp(0.0))  # infinite where only the product is zero
    return {
        "local_smoothness": size / segment.step_norm,
        "local_error": error,
        "local_converged": error <= LOCAL_TOLERANCE,
    }


def spectral_part(segment: Segment, replay: Replay) -> Row:
    """The Hessian's norm at the start, and whether Lanczos converged."""
    spectrum = spectral_smoothness(replay, segment.start.point, eps=segment.eps)
    replay.return_home()
    return {
        "spectral_smoothness": spectrum.value,
        "spectral_converged": spectrum.converged,
        "spectral_residual": spectrum.residual,
    }


def layer_curvature_part(segment: Segment, replay: Replay) -> Row:
    """The curvature within layers, from one gradient for each layer that moved, where it alone has moved."""
    x = segment.start.point
    d = [p.detach() - s for p, s in zip(replay.parameters, x, strict=True)]
    total = 0.0
    for name, indices in segment.groups.items():
        layer = segment.layers[name]
        length = layer["step_norm"]
        if not length:
            continue
        replay.move([d[i] if i in indices else None for i in range(len(d))], 1.0, origin=x)
        along = SlopeAlong(replay.parameters, x)
        replay.change(segment.start.gradients, [along])
        layer[LAYER_CURVATURE] = along.total / length / length
        total += along.total
    replay.return_home()
    return {LAYER_CURVATURE: total / segment.step_norm / segment.step_norm}


# How the estimators of the schema measure at the start of a step; the paper's is measured along it.
PARTS_AT_START: dict[str, Callable[[Segment, Replay], Row]] = {
    LAYER_CURVATURE: layer_curvature_part,
    "local_smoothness": local_part,
    "spectral_smoothness": spectral_part,
}


def check_estimators(chosen: Iterable[str] | Mapping[str, int]) -> dict[str, int]:
    """Names of estimators with the period of each, in measurements; the paper's is in every row."""
    if isinstance(chosen, str):
        chosen = (chosen,)
    periods = dict(chosen) if isinstance(chosen, Mapping) else dict.fromkeys(chosen, 1)
    periods = {"smoothness": 1, **periods}
    if periods["smoothness"] != 1:
        raise ValueError('`estimators["smoothness"]` must be 1: every row has it. Set `every` instead.')
    for name, period in periods.items():
        check_choice("estimators", name, ("smoothness", *PARTS_AT_START))
        check_count(f"estimators[{name!r}]", period)
    return periods


def noise_of_halves(one: Gradients, two: Gradients) -> Row:
    """The row's ``noise`` and ``grad_signal``, from the gradients of the two halves of a batch."""
    squares = global_norm(one).item() ** 2 + global_norm(two).item() ** 2
    apart = global_norm(difference(two, one, overwrite=True)).item()
    # Independent halves: E‖g₁ − g₂‖² = 4 tr Σ / batch_size, and E g₁ᵀg₂ = ‖G‖².
    return {"noise": apart / 2, "grad_signal": (squares - apart**2) / 2}


def _norm_of(tensors: Gradients, indices: Sequence[int]) -> float:
    return global_norm(tensors[i] for i in indices).item()


def layer_groups(model: nn.Module, parameters: Sequence[Tensor]) -> dict[str, list[int]]:
    """Names of the modules that have parameters of their own, with the indices of these."""
    index = {id(p): i for i, p in enumerate(parameters)}
    groups: dict[str, list[int]] = {}
    for name, p in model.named_parameters():
        if id(p) in index:
            plain = name.removeprefix("module.").removeprefix("_orig_mod.")
            groups.setdefault(plain.rpartition(".")[0] or plain, []).append(index[id(p)])
    return groups
