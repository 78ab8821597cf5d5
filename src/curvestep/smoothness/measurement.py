r"""One measured step: from :math:`x_k`, the gradient there and :math:`x_{k+1}` to the numbers of a row."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from curvestep._checks import check_choice, check_count
from curvestep.bracket import (
    LONG_STRIDE,
    PER_OCTAVE,
    START,
    NoBracket,
    OutOfBudget,
    Point,
    crossing,
    find_bracket,
    highest_loss,
)
from curvestep.distributed import any_rank, copies, over_ranks
from curvestep.smoothness.estimators import central_length, hessian_product
from curvestep.smoothness.geometry import ChangeInMetric, Geometry
from curvestep.smoothness.replay import Change, Replay
from curvestep.smoothness.spectral import spectral_smoothness
from curvestep.smoothness.trace import ESTIMATORS, NONFINITE, OK
from curvestep.vectors import change, difference, dot_of_changes, global_norm

Row = dict[str, Any]
LOCAL_TOLERANCE = 0.1  # relative change of a Hessian product when the difference step is halved
MOST_POINTS = 20  # measured to find where safe fractions of a step end; six is usual
OVERSHOT = 1.5  # κ above which the fractions of a step say little of shorter ones
ALONG = 0.99  # cosine between step and −g from which the step counts as one along the gradient


class Workspace:
    """Copies of lists of tensors, one list after the other in the same memory.

    Fresh memory of megabytes comes from the system page by page, which takes longer than the copy itself.

    Example:
        >>> workspace = Workspace()
        >>> [first] = workspace.copies([torch.ones(3)])
        >>> [second] = workspace.copies([torch.zeros(3)])
        >>> first is second, second
        (True, tensor([0., 0., 0.]))
    """

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}

    def copies(self, tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
        """A copy of each tensor, good until the next call; None stays None."""
        return [None if t is None else self._copy(i, t.detach()) for i, t in enumerate(tensors)]

    def _copy(self, i: int, tensor: Tensor) -> Tensor:
        kept = self._kept.get(i)
        if kept is not None and _alike(kept, tensor):
            return kept.copy_(tensor)
        copy = tensor.clone()
        if type(copy) is Tensor and copy.layout is torch.strided:
            self._kept[i] = copy
        return copy


def _alike(one: Tensor, two: Tensor) -> bool:
    return (
        type(one) is type(two)
        and one.layout is two.layout
        and (one.shape, one.dtype, one.device) == (two.shape, two.dtype, two.device)
        and one.stride() == two.stride()
    )


@dataclass
class Measurement:
    """What is known before the step, and what is computed from it after."""

    start: list[Tensor]  # copies of the parameters at x_k; `segment` uses them up
    gradients: list[Tensor | None]  # the gradient at x_k
    grad_norm: float  # its norm
    raw_norm: float  # norm of the gradient that training computed, before any clipping
    groups: Mapping[str, Sequence[int]]  # names of layers with the indices of their parameters
    geometry: Geometry | None = None  # the optimizer's metric, known after the step; None if it is not asked
    origin: list[Tensor] | None = None  # the start again, which `segment` leaves behind if the step overshot

    def norms(self, parameters: Sequence[Tensor]) -> Row:
        """Norms of gradient and step, whole and by layer, and the cosine between the step and −g."""
        lengths = [change(p.detach(), s) for p, s in zip(parameters, self.start, strict=True)]
        row: Row = {"grad_norm": self.grad_norm, "step_norm": global_norm(lengths).item()}
        slopes = [
            dot_of_changes(p, s, g, None)
            for p, s, g in zip(parameters, self.start, self.gradients, strict=True)
        ]
        if row["grad_norm"] > 0 and row["step_norm"] > 0:
            cosine = -math.fsum(slope.item() for slope in slopes) / row["grad_norm"] / row["step_norm"]
            row["cosine"] = min(1.0, max(-1.0, cosine)) if math.isfinite(cosine) else math.nan
        if self.groups:
            row["layers"] = {
                name: {
                    "grad_norm": global_norm(self.gradients[i] for i in part).item(),
                    "step_norm": global_norm(lengths[i] for i in part).item(),
                }
                for name, part in self.groups.items()
            }
        return row

    def estimate(
        self, replay: Replay, row: Row, *, due: Collection[str], fractions: Iterable[float], closer: bool
    ) -> None:
        """Put into ``row``, which has norms, lr and eps already, the estimators that are ``due``.

        And with any of them what is known at the end of the step, the edge and the status.
        """
        if "local_smoothness" in due:
            row.update(self.local(replay, row))
        if "spectral_smoothness" in due:
            row.update(self.spectral(replay, row))
        row.update(self.optimizer_spectral(replay, row, due="optimizer_spectral" in due))
        if "smoothness" in due:
            row.update(self.segment(replay, fractions, row, closer=closer))
        elif due:
            row.update(self.end(replay, row))
        if row.get("loss_after") is not None:
            row.setdefault("loss", row["loss_after"])
        measured = [row[name] for name in ESTIMATORS if row.get(name) is not None]
        row["status"] = OK if all(map(math.isfinite, measured)) else NONFINITE
        if row["lr"] is not None and measured:
            row["edge"] = row["lr"] * measured[0] / 2

    def segment(self, replay: Replay, fractions: Iterable[float], row: Row, *, closer: bool) -> Row:
        r"""The paper's estimate, with every secant kept.

        The fast twin of :func:`~curvestep.smoothness.estimators.segment_smoothness`, in place. Also
        :math:`\kappa`, at the largest fraction, and what is known at the end of the step: loss and curvature;
        and, if the step overshoots and ``closer`` is asked for, :meth:`safe_fraction`.
        """
        fractions = tuple(fractions)
        secants: dict[float, float] = {}
        grad_norms: dict[float, float] = {}
        layers: dict[str, dict[str, Any]] = row.get("layers", {})
        result: Row = {}
        for fraction in replay.along(self.start, fractions):
            at_end, largest = fraction == 1.0, fraction == max(fractions)
            visit = self._visitor(replay) if largest else None
            there = replay.change(self.gradients, start=self.start if at_end else None, visit=visit)
            size = global_norm(there.parts).item()
            secants[fraction] = size / (fraction * row["step_norm"])
            grad_norms[fraction] = there.grad_norm
            if largest:
                result["kappa"] = _kappa(size, row)
                result |= self._in_metric(visit, size, fraction, row)
            if at_end:
                result |= _end_of_step(replay, there, row)
            for name, part in self.groups.items():
                layer = layers[name]
                if layer["step_norm"]:
                    change_norm = global_norm(there.parts[i] for i in part).item()
                    secant = change_norm / (fraction * layer["step_norm"])
                    layer["smoothness"] = _largest(layer.get("smoothness", 0.0), secant)
            end = self._point(replay, there, size, row, max_kappa=OVERSHOT) if at_end and closer else None
            del there  # before the next pass: its gradient may take this one's place
            if end is not None and not end.safe:
                result["safe_fraction"] = self.safe_fraction(replay, row, end)
                self.origin = copies(self.start)  # the next fraction may take the memory of the start
        return {
            **result,
            "smoothness": _largest(*secants.values()),
            "secants": [secants[fraction] for fraction in fractions],
            "grad_norms": [grad_norms[fraction] for fraction in fractions],
        }

    def safe_fraction(self, replay: Replay, row: Row, end: Point) -> float | None:
        r"""The largest fraction of the step that is safe, or None: :func:`calibrate`'s search on one batch.

        .. math::
            \kappa(\gamma) \le 1 \quad\text{and}\quad f(x + \gamma d) \le f(x) + \tfrac{1}{10} \gamma\,
            \langle \nabla f(x), d \rangle

        from the same first point on the same lattice, so that along the gradient the answer is the same, too.
        The parameters end at :math:`x_k`.
        """
        # The closure's own, for that which was given may be another: scaled, or a mean. By a whole pass,
        # for a closure may differentiate by itself, which it cannot where gradients are off.
        replay.move_between(self.start, 0.0)
        first = replay.change(self.gradients).loss.item()
        row = {**row, "loss": over_ranks(first, replay.model, mean=True)}
        if end.kappa <= OVERSHOT and end.loss <= _highest_loss(row, 1.0):
            return None
        return self._longest_safe(replay, row, partial(replay.move_between, self.start), end)

    def _longest_safe(
        self, replay: Replay, row: Row, move: Callable[[float], None], end: Point | None = None
    ) -> float | None:
        """The largest safe fraction of a step, with ``move`` to go there; below ``end`` if there is one."""
        length = global_norm(self.start).item()
        unit = length / row["step_norm"] if length > 0 else 1.0

        def at(index: int) -> Point:
            fraction = unit * 2.0 ** (index / PER_OCTAVE)
            if end is not None and fraction >= 1.0:
                return end
            move(fraction)
            there = replay.change(self.gradients, start=self.start)
            return self._point(replay, there, global_norm(there.parts).item(), row, fraction)

        try:
            bracket = find_bracket(at, start=START, stride=LONG_STRIDE, budget=MOST_POINTS)
        except (NoBracket, OutOfBudget):
            return None
        finally:
            replay.move([None] * len(self.start), 0.0, origin=self.start)
        return crossing(bracket, max_kappa=1.0, loss=lambda fraction: _highest_loss(row, fraction))

    def _point(
        self,
        replay: Replay,
        there: Change,
        size: float,
        row: Row,
        fraction: float = 1.0,
        *,
        max_kappa: float = 1.0,
    ) -> Point:
        """A point of the step, safe if all ranks find it so."""
        assert there.along is not None
        kappa = size / row["grad_norm"]
        if row["cosine"] <= ALONG:  # the change of the slope alone: calibrate's, along signs
            kappa = there.along / (fraction * _slope(row))
        loss = over_ranks(there.loss.item(), replay.model, mean=True)
        safe = kappa <= max_kappa and math.isfinite(loss) and loss <= _highest_loss(row, fraction)
        unsafe = any_rank(not safe, replay.model)
        return Point(step=fraction, kappa=kappa, loss=loss, safe=not unsafe)

    def local(self, replay: Replay, row: Row) -> Row:
        r"""Smoothness at the start along the step, by central differences: they work with every model.

        The fast twin of :func:`~curvestep.smoothness.estimators.local_smoothness`. The difference step is no
        longer than the step of training: :math:`\sqrt[3]{\varepsilon}\lVert x\rVert` of a model with a large
        embedding can be a hundred times that. A second difference of half the length says how far the
        product is to be trusted.
        """
        d = [p.detach() - s for p, s in zip(replay.parameters, self.start, strict=True)]
        length = min(central_length(self.start, eps=row["eps"]), row["step_norm"])
        product, half = (
            hessian_product(replay, self.start, d, method="differences", length=part)
            for part in (length, length / 2)
        )
        replay.return_home()
        size = global_norm(product).item()
        gap = global_norm(difference(half, product, overwrite=True)).item()
        error = 0.0 if gap == 0 else gap / size if size else math.inf
        layers: dict[str, dict[str, Any]] = row.get("layers", {})
        for name, part in self.groups.items():
            if layers[name]["step_norm"]:
                layer_size = global_norm(product[i] for i in part).item()
                layers[name]["local_smoothness"] = layer_size / layers[name]["step_norm"]
        return {
            "local_smoothness": size / row["step_norm"],
            "local_error": error,
            "local_converged": error <= LOCAL_TOLERANCE,
        }

    def end(self, replay: Replay, row: Row) -> Row:
        """What :meth:`segment` says of the end of the step, for a row without it: κ, loss and curvature."""
        visit = self._visitor(replay)
        there = replay.change(self.gradients, start=self.start, visit=visit)
        size = global_norm(there.parts).item()
        in_metric = self._in_metric(visit, size, 1.0, row)
        return {"kappa": _kappa(size, row), **in_metric, **_end_of_step(replay, there, row)}

    def _visitor(self, replay: Replay) -> ChangeInMetric | None:
        """What measures the change of the gradient in the optimizer's metric, if that is another one."""
        geometry = self.geometry
        if geometry is None or geometry.missing or geometry.is_euclidean:
            return None
        return ChangeInMetric(geometry, replay.parameters, self.start)

    def _in_metric(self, visit: ChangeInMetric | None, size: float, fraction: float, row: Row) -> Row:
        """Smoothness along the step in the optimizer's metric."""
        if self.geometry is None or self.geometry.missing:
            return {}
        if visit is None:
            return {"optimizer_smoothness": size / (fraction * row["step_norm"])}
        change, step = visit.norms
        # Inside the step the start holds its end, see Replay.along: the rest of the step was seen.
        length = step if fraction == 1.0 else step / (1 - fraction)
        return {"optimizer_smoothness": change / (fraction * length)} if length else {}

    def optimizer_spectral(self, replay: Replay, row: Row, *, due: bool) -> Row:
        """Norm of the Hessian at the start in the optimizer's metric, if it is due or known already."""
        geometry = self.geometry
        if geometry is None or geometry.missing:
            return {}
        if geometry.is_euclidean and row.get("spectral_smoothness") is not None:
            value, converged = row["spectral_smoothness"], row["spectral_converged"]
        elif not due:
            return {}
        else:
            eps = row["eps"]
            found = spectral_smoothness(
                replay,
                self.start,
                eps=eps,
                length=min(central_length(self.start, eps=eps), row["step_norm"]),
                inverse_roots=None if geometry.is_euclidean else geometry.inverse_roots(self.start),
            )
            replay.return_home()
            value, converged = found.value, found.converged
        return {"optimizer_spectral": value, "optimizer_converged": converged}

    def spectral(self, replay: Replay, row: Row) -> Row:
        """The Hessian's norm at the start, whole and of each layer's block, and whether Lanczos converged."""
        result = spectral_smoothness(replay, self.start, eps=row["eps"])
        layers = {
            name: part for name, part in self.groups.items() if any(self.start[i].numel() for i in part)
        }
        blocks = spectral_smoothness(replay, self.start, eps=row["eps"], groups=layers)
        replay.return_home()
        for name, block in blocks.items():
            row["layers"][name]["spectral_smoothness"] = block.value
            row["layers"][name]["spectral_converged"] = block.converged
        return {
            "spectral_smoothness": result.value,
            "spectral_converged": result.converged,
            "spectral_residual": result.residual,
        }


def safe_start(replay: Replay, start: list[Tensor], *, eps: float) -> Row:
    """The row's ``start_step`` and ``start_grad_norm``: this batch's largest safe step where the run began.

    One batch's safe step scatters by a fifth; after a first step that overshot, the next batches are asked,
    too, at the same point. ``start`` is that point; the parameters end there.
    """
    first = replay.gradient_at([None] * len(start), 0.0, origin=start)
    g, norm = first.gradients, global_norm(first.gradients).item()
    if not (math.isfinite(norm) and norm > 0):
        return {}
    loss = over_ranks(first.loss.item(), replay.model, mean=True)
    row = {"grad_norm": norm, "step_norm": norm, "cosine": 1.0, "loss": loss, "eps": eps}  # of the step −g
    there = Measurement(start=start, gradients=g, grad_norm=norm, raw_norm=norm, groups={})
    step = there._longest_safe(replay, row, lambda size: replay.move(g, -size, origin=start))
    return {} if step is None else {"start_step": step, "start_grad_norm": norm}


def noise_of_halves(first: AbstractContextManager[Replay], second: AbstractContextManager[Replay]) -> Row:
    """The row's ``noise`` and ``grad_signal``, from the losses of the two halves of a batch."""
    with first as replay:
        one = replay.gradient().gradients
    with second as replay:
        two = replay.gradient().gradients
    squares = global_norm(one).item() ** 2 + global_norm(two).item() ** 2
    apart = global_norm(difference(two, one, overwrite=True)).item()
    # Independent halves: E‖g₁ − g₂‖² = 4 tr Σ / batch_size, and E g₁ᵀg₂ = ‖G‖².
    return {"noise": apart / 2, "grad_signal": (squares - apart**2) / 2}


def check_estimators(chosen: Iterable[str] | Mapping[str, int]) -> dict[str, int]:
    """Names of estimators with the period of each, in measurements."""
    if isinstance(chosen, str):
        chosen = (chosen,)
    periods = dict(chosen) if isinstance(chosen, Mapping) else dict.fromkeys(chosen, 1)
    if not periods:
        raise ValueError(f"`estimators` must name at least one of {ESTIMATORS}, got none.")
    for name, period in periods.items():
        check_choice("estimators", name, (*ESTIMATORS, "optimizer_spectral"))
        check_count(f"estimators[{name!r}]", period)
    return periods


def layer_groups(
    model: nn.Module, parameters: Sequence[Tensor], layers: bool | Mapping[str, Iterable[Tensor]]
) -> dict[str, list[int]]:
    """Names of layers with the indices of their parameters: one for each module, or as given."""
    index = {id(p): i for i, p in enumerate(parameters)}
    if layers is False or layers is None:
        return {}
    if layers is True:
        groups: dict[str, list[int]] = {}
        for name, p in model.named_parameters():
            if id(p) in index:
                for wrapper in ("module.", "_orig_mod."):
                    name = name.removeprefix(wrapper)
                groups.setdefault(name.rpartition(".")[0] or name, []).append(index[id(p)])
        return groups
    chosen = {name: list(tensors) for name, tensors in layers.items()}
    for name, tensors in chosen.items():
        foreign = sum(id(p) not in index for p in tensors)
        if foreign or not tensors:
            raise ValueError(
                f"`layers[{name!r}]` must be trainable parameters of the model, at least one; "
                f"{foreign} of {len(tensors)} are not."
            )
    return {name: [index[id(p)] for p in tensors] for name, tensors in chosen.items()}


def _end_of_step(replay: Replay, there: Change, row: Row) -> Row:
    assert there.along is not None
    loss = over_ranks(there.loss.item(), replay.model, mean=True)
    return {"loss_after": loss, "curvature": there.along / row["step_norm"] / row["step_norm"]}


def _slope(row: Row) -> float:
    """By how much the loss would fall over the step if its slope stayed."""
    return row["cosine"] * row["grad_norm"] * row["step_norm"]


def _highest_loss(row: Row, fraction: float) -> float:
    return highest_loss(row.get("loss", math.inf), fraction * _slope(row), eps=row["eps"])


def _kappa(size: float, row: Row) -> float | None:
    return size / row["grad_norm"] if row["grad_norm"] else None


def _largest(*values: float) -> float:
    """The largest; NaN if any is."""
    return math.nan if any(map(math.isnan, values)) else max(values)
