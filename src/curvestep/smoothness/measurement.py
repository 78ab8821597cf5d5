r"""Parts of a row, as functions of one step: norms, secants, smoothness at its start, noise, its safe part.

A :class:`Segment` is the step from :math:`x_k` to :math:`x_{k+1}` with the gradient at its start. Each
function takes it with a replay of its batch, and returns a part of the row.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from curvestep.distributed import over_ranks
from curvestep.smoothness.estimators import (
    SpectralSmoothness,
    central_length,
    hessian_product,
    spectral_smoothness,
)
from curvestep.smoothness.geometry import Geometry
from curvestep.smoothness.replay import Gradients, Replay
from curvestep.smoothness.trace import ESTIMATORS, NONFINITE, OK, Row
from curvestep.vectors import change, difference, dot_of_changes, global_norm

LOCAL_TOLERANCE = 0.1  # relative change of a Hessian product when the difference step is halved


@dataclass(frozen=True)
class Start:
    """Point and gradient before the step."""

    point: list[Tensor]  # copies of the parameters at x_k, which measuring along the step overwrites
    gradients: Gradients  # at x_k
    grad_norm: float  # their norm
    raw_norm: float  # norm of the gradient that training computed, before any clipping


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The step as the estimators see it."""

    start: list[Tensor]
    gradients: Gradients
    grad_norm: float
    step_norm: float
    eps: float
    groups: Mapping[str, Sequence[int]] = field(default_factory=dict)
    layer_lengths: Mapping[str, float] = field(default_factory=dict)  # of the step in each group
    geometry: Geometry | None = None  # the optimizer's metric, if it is known and asked for


@dataclass(frozen=True)
class Secant:
    """How loss and gradient changed on the way to one fraction of the step."""

    fraction: float
    size: float  # of the change of the gradient
    grad_norm: float  # of the gradient there
    loss: float  # there, of this rank
    along: float | None  # inner product of the change with the way there, where it was asked for
    layer_sizes: Mapping[str, float]  # of the change in each group
    in_metric: float | None  # smoothness in the optimizer's metric, where it was asked for


def joined(row: Row, part: Row) -> Row:
    """A row with one more part; layers keep what they have.

    Example:
        >>> joined({"layers": {"out": {"lr": 2.0}}}, {"loss": 1.0, "layers": {"out": {"edge": 3.0}}})
        {'layers': {'out': {'lr': 2.0, 'edge': 3.0}}, 'loss': 1.0}
    """
    layers = dict(row.get("layers", {}))
    for name, values in part.get("layers", {}).items():
        layers[name] = {**layers.get(name, {}), **values}
    whole = {**row, **part, "layers": layers}
    if not layers:
        del whole["layers"]
    return whole


def norms_part(start: Start, parameters: Sequence[Tensor], groups: Mapping[str, Sequence[int]]) -> Row:
    """Norms of gradient and step, whole and by layer, and the cosine between the step and −g."""
    lengths = [change(p.detach(), s) for p, s in zip(parameters, start.point, strict=True)]
    g, length = start.grad_norm, global_norm(lengths).item()
    part: Row = {"grad_norm": g, "step_norm": length}
    if g > 0 and length > 0:
        triples = zip(parameters, start.point, start.gradients, strict=True)
        slopes = [dot_of_changes(p, s, gradient, None) for p, s, gradient in triples]
        cosine = -math.fsum(slope.item() for slope in slopes) / g / length
        part["cosine"] = min(1.0, max(-1.0, cosine)) if math.isfinite(cosine) else math.nan
    for name, indices in groups.items():
        layer = {
            "grad_norm": global_norm(start.gradients[i] for i in indices).item(),
            "step_norm": global_norm(lengths[i] for i in indices).item(),
        }
        part.setdefault("layers", {})[name] = layer
    return part


def summary_part(row: Row) -> Row:
    """Status and edge of a row, and its loss where only that after the step is known."""
    measured = [row[name] for name in ESTIMATORS if row.get(name) is not None]
    part: Row = {"status": OK if all(map(math.isfinite, measured)) else NONFINITE}
    if row.get("loss") is None and row.get("loss_after") is not None:
        part["loss"] = row["loss_after"]
    if row["lr"] is not None and measured:
        part["edge"] = row["lr"] * measured[0] / 2
    return part


def secant_at(
    segment: Segment, replay: Replay, fraction: float, *, with_slope: bool = True, in_metric: bool = False
) -> Secant:
    """The change of the gradient from the start of the step to where the parameters are.

    Args:
        segment: The step.
        replay: Its batch, with the parameters at the fraction.
        fraction: Of the step.
        with_slope: Whether to take the inner product with the way there; the start must be intact.
        in_metric: Whether to measure in the optimizer's metric, too, if there is one.
    """
    geometry = segment.geometry if in_metric else None
    visit = None if geometry is None else geometry.visitor(replay.parameters, segment.start)
    start = segment.start if with_slope else None
    there = replay.change(segment.gradients, start=start, visit=visit)
    size = global_norm(there.parts).item()
    metric = None
    if visit is not None:
        metric = visit.smoothness(fraction)
    elif geometry is not None:  # the plain metric
        metric = size / (fraction * segment.step_norm)
    return Secant(
        fraction=fraction,
        size=size,
        grad_norm=there.grad_norm,
        loss=there.loss.item(),
        along=there.along,
        layer_sizes={
            name: global_norm(there.parts[i] for i in indices).item()
            for name, indices in segment.groups.items()
        },
        in_metric=metric,
    )


def along_step(segment: Segment, replay: Replay, fractions: Sequence[float]) -> Row:
    r"""The paper's estimate, with every secant kept, κ, and loss and curvature at the end of the step.

    The fast twin of :func:`~curvestep.smoothness.estimators.segment_smoothness`, in place.

    Args:
        segment: The step.
        replay: Its batch.
        fractions: Where to take gradients, ascending.
    """
    secants: dict[float, Secant] = {}
    for fraction in replay.along(segment.start, fractions):
        ends, last = fraction == 1.0, fraction == fractions[-1]
        secants[fraction] = secant_at(segment, replay, fraction, with_slope=ends, in_metric=last)
    ordered = [secants[fraction] for fraction in fractions]
    slopes = [s.size / (s.fraction * segment.step_norm) for s in ordered]
    end = end_part(segment, replay, secants[1.0]) if 1.0 in secants else {}
    return {
        "smoothness": _largest(slopes),
        "fractions": list(fractions),
        "secants": slopes,
        "grad_norms": [s.grad_norm for s in ordered],
        **change_part(segment, ordered[-1]),
        **end,
        "layers": {
            name: {"smoothness": _largest([s.layer_sizes[name] / (s.fraction * length) for s in ordered])}
            for name, length in segment.layer_lengths.items()
            if length
        },
    }


def change_part(segment: Segment, secant: Secant) -> Row:
    """κ and the smoothness in the optimizer's metric."""
    kappa = secant.size / segment.grad_norm if segment.grad_norm else None
    return {"kappa": kappa, "optimizer_smoothness": secant.in_metric}


def end_part(segment: Segment, replay: Replay, end: Secant) -> Row:
    """Loss after the step, and the signed curvature along it."""
    assert end.along is not None
    return {
        "loss_after": over_ranks(end.loss, replay.model, mean=True),
        "curvature": end.along / segment.step_norm / segment.step_norm,
    }


def local_part(segment: Segment, replay: Replay) -> Row:
    r"""Smoothness at the start along the step, by central differences: they work with every model.

    The fast twin of :func:`~curvestep.smoothness.estimators.local_smoothness`. The difference step is no
    longer than the step of training: :math:`\sqrt[3]{\varepsilon}\lVert x\rVert` of a model with a large
    embedding can be a hundred times that. A second difference of half the length says how far the product is
    to be trusted.
    """
    d = [p.detach() - s for p, s in zip(replay.parameters, segment.start, strict=True)]
    length = _difference_length(segment)
    product, half = (
        hessian_product(replay, segment.start, d, method="differences", length=part)
        for part in (length, length / 2)
    )
    replay.return_home()
    size = global_norm(product).item()
    gap = global_norm(difference(half, product, overwrite=True)).item()
    error = _relative(gap, size)
    layers = {
        name: {"local_smoothness": global_norm(product[i] for i in segment.groups[name]).item() / length}
        for name, length in segment.layer_lengths.items()
        if length
    }
    return {
        "local_smoothness": size / segment.step_norm,
        "local_error": error,
        "local_converged": error <= LOCAL_TOLERANCE,
        "layers": layers,
    }


def _difference_length(segment: Segment) -> float:
    return min(central_length(segment.start, eps=segment.eps), segment.step_norm)


def _relative(gap: float, size: float) -> float:
    if gap == 0:
        return 0.0
    return gap / size if size else math.inf


def spectral_part(segment: Segment, replay: Replay, spectrum: SpectralSmoothness) -> Row:
    """The Hessian's norm at the start, whole and of each layer's block, and whether Lanczos converged."""
    groups = {
        name: indices
        for name, indices in segment.groups.items()
        if any(segment.start[i].numel() for i in indices)
    }
    blocks = spectral_smoothness(replay, segment.start, eps=segment.eps, groups=groups)
    replay.return_home()
    return {
        "spectral_smoothness": spectrum.value,
        "spectral_converged": spectrum.converged,
        "spectral_residual": spectrum.residual,
        "layers": {
            name: {"spectral_smoothness": block.value, "spectral_converged": block.converged}
            for name, block in blocks.items()
        },
    }


def optimizer_spectral_part(
    segment: Segment, replay: Replay, spectrum: SpectralSmoothness | None, *, due: Collection[str]
) -> Row:
    """Norm of the Hessian at the start in the optimizer's metric, if it is due or known already."""
    geometry = segment.geometry
    if geometry is None:
        return {}
    if spectrum is not None and geometry.is_euclidean:
        return {"optimizer_spectral": spectrum.value, "optimizer_converged": spectrum.converged}
    if "optimizer_spectral" not in due:
        return {}
    found = spectral_smoothness(
        replay,
        segment.start,
        eps=segment.eps,
        length=_difference_length(segment),
        inverse_roots=None if geometry.is_euclidean else geometry.inverse_roots(segment.start),
    )
    replay.return_home()
    return {"optimizer_spectral": found.value, "optimizer_converged": found.converged}


def noise_of_halves(one: Gradients, two: Gradients) -> Row:
    """The row's ``noise`` and ``grad_signal``, from the gradients of the two halves of a batch."""
    squares = global_norm(one).item() ** 2 + global_norm(two).item() ** 2
    apart = global_norm(difference(two, one, overwrite=True)).item()
    # Independent halves: E‖g₁ − g₂‖² = 4 tr Σ / batch_size, and E g₁ᵀg₂ = ‖G‖².
    return {"noise": apart / 2, "grad_signal": (squares - apart**2) / 2}


def _largest(values: Sequence[float]) -> float:
    """The largest; NaN if any is."""
    return math.nan if any(map(math.isnan, values)) else max(values)
