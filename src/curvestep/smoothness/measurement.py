r"""One measured step: from :math:`x_k`, the gradient there and :math:`x_{k+1}` to the numbers of a row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from curvestep._checks import check_choice, check_count
from curvestep.smoothness.estimators import hessian_product
from curvestep.smoothness.replay import Replay
from curvestep.smoothness.spectral import spectral_smoothness
from curvestep.vectors import change, global_norm

Row = dict[str, Any]
ESTIMATORS = ("segment", "local", "spectral")


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
    """What is known before the step, and what is computed from it after.

    Attributes:
        start: Copies of the parameters at :math:`x_k`; :meth:`segment` uses them up.
        gradients: The gradient at :math:`x_k`.
        grad_norm: Its norm.
        raw_norm: Norm of the gradient that training computed, before any clipping.
        groups: Names of layers with the indices of their parameters.
    """

    start: list[Tensor]
    gradients: list[Tensor | None]
    grad_norm: float
    raw_norm: float
    groups: Mapping[str, Sequence[int]]

    def norms(self, parameters: Sequence[Tensor]) -> Row:
        """Norms of gradient and step, whole and by layer."""
        lengths = [change(p.detach(), s) for p, s in zip(parameters, self.start, strict=True)]
        row: Row = {"grad_norm": self.grad_norm, "step_norm": global_norm(lengths).item()}
        if self.groups:
            row["layers"] = {
                name: {
                    "grad_norm": global_norm(self.gradients[i] for i in part).item(),
                    "step_norm": global_norm(lengths[i] for i in part).item(),
                }
                for name, part in self.groups.items()
            }
        return row

    def segment(self, replay: Replay, fractions: Iterable[float], row: Row) -> Row:
        r"""The paper's estimate: :func:`~curvestep.smoothness.estimators.segment_smoothness` in place.

        Also :math:`\kappa = \lVert \Delta g \rVert / \lVert g \rVert` and the loss, both at the largest
        fraction.
        """
        fractions = tuple(fractions)
        secants: list[float] = []
        layers: dict[str, dict[str, Any]] = row.get("layers", {})
        result: Row = {}
        for fraction in replay.along(self.start, fractions):
            there = replay.change(self.gradients)
            size = global_norm(there.parts).item()
            secants.append(size / (fraction * row["step_norm"]))
            if fraction == max(fractions):
                result["kappa"] = _kappa(size, row)
                result["loss_after"] = there.loss if fraction == 1.0 else None
            for name, part in self.groups.items():
                layer = layers[name]
                if layer["step_norm"]:
                    secant = global_norm(there.parts[i] for i in part).item() / (
                        fraction * layer["step_norm"]
                    )
                    layer["smoothness"] = _larger(layer.get("smoothness"), secant)
            del there  # before the next pass: its gradient may take this one's place
        best: float | None = None
        for secant in secants:
            best = _larger(best, secant)
        return {**result, "smoothness": best}

    def local(self, replay: Replay, row: Row, *, eps: float | None) -> Row:
        """Smoothness at the start along the step, by central differences: they work with every model."""
        d = _step(self.start, replay.parameters)
        product = hessian_product(replay, self.start, d, method="differences", eps=eps)
        replay.return_home()
        layers: dict[str, dict[str, Any]] = row.get("layers", {})
        for name, part in self.groups.items():
            if layers[name]["step_norm"]:
                size = global_norm(product[i] for i in part).item()
                layers[name]["local_smoothness"] = size / layers[name]["step_norm"]
        return {"local_smoothness": global_norm(product).item() / row["step_norm"]}

    def end(self, replay: Replay, row: Row) -> Row:
        """What :meth:`segment` says of the end of the step, for a row without it: κ and the loss."""
        there = replay.change(self.gradients)
        return {"kappa": _kappa(global_norm(there.parts).item(), row), "loss_after": there.loss}

    def spectral(self, replay: Replay, row: Row, *, eps: float | None) -> Row:
        """The Hessian's norm at the start, whole and of each layer's block, and whether Lanczos converged."""
        result = spectral_smoothness(replay, self.start, eps=eps)
        layers = {
            name: part for name, part in self.groups.items() if any(self.start[i].numel() for i in part)
        }
        blocks = spectral_smoothness(replay, self.start, eps=eps, groups=layers)
        replay.return_home()
        for name, block in blocks.items():
            row["layers"][name]["spectral_smoothness"] = block.value
            row["layers"][name]["spectral_converged"] = block.converged
        return {
            "spectral_smoothness": result.value,
            "spectral_converged": result.converged,
            "spectral_residual": result.residual,
        }


def check_estimators(chosen: Iterable[str] | Mapping[str, int]) -> dict[str, int]:
    """Names of estimators with the period of each, in measurements."""
    if isinstance(chosen, str):
        chosen = (chosen,)
    periods = dict(chosen) if isinstance(chosen, Mapping) else dict.fromkeys(chosen, 1)
    if not periods:
        raise ValueError(f"`estimators` must name at least one of {ESTIMATORS}, got none.")
    for name, period in periods.items():
        check_choice("estimators", name, ESTIMATORS)
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
        strangers = sum(id(p) not in index for p in tensors)
        if strangers or not tensors:
            raise ValueError(
                f"`layers[{name!r}]` must be trainable parameters of the model, at least one; "
                f"{strangers} of {len(tensors)} are not."
            )
    return {name: [index[id(p)] for p in tensors] for name, tensors in chosen.items()}


def _step(start: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor]:
    return [p.detach() - s for p, s in zip(parameters, start, strict=True)]


def _kappa(size: float, row: Row) -> float | None:
    return size / row["grad_norm"] if row["grad_norm"] else None


def _larger(best: float | None, value: float) -> float:
    """The larger of two; NaN if either is."""
    return value if best is None or value > best or value != value else best
