"""What cannot be calibrated, in words that say what to do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from curvestep.calibration.bracket import Point
from curvestep.calibration.line import Line
from curvestep.distributed import any_rank
from curvestep.vectors import global_norm

MOST_UNEVEN = 2000.0  # gradient per size of one weight matrix, relative to that of another

Loss = Callable[[Any], "Tensor | float"]


def check_arguments(model: nn.Module, loss_of_batch: Loss, batches: Iterable[Any]) -> None:
    """Refuse what is not a model, a function and a sequence, in this order."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch module, got a {type(model).__name__}.")
    if any(is_lazy(p) for p in model.parameters()):
        raise ValueError(
            "`model` has parameters that are not initialised yet (a lazy layer). Run one forward pass first."
        )
    if not callable(loss_of_batch):
        raise TypeError(
            "`loss_of_batch` must be a function that takes a batch and returns its loss, got a "
            f"{type(loss_of_batch).__name__}. The order is `calibrate(model, loss_of_batch, batches)`."
        )
    can_be_read = any(hasattr(type(batches), name) for name in ("__iter__", "__getitem__"))
    single = isinstance(batches, (Tensor, Mapping, str)) or not can_be_read
    if isinstance(batches, (tuple, list)) and batches and all(isinstance(part, Tensor) for part in batches):
        single = (
            len({(part.dtype, part.dim()) for part in batches}) > 1
        )  # inputs and targets, not two batches
    if single:
        raise TypeError(
            f"`batches` must be a sequence of batches, got a {type(batches).__name__}"
            f"{' of tensors of different kind' if isinstance(batches, (tuple, list)) else ''}. Put a single "
            "batch in a list."
        )


def shared(batches: Iterable[Any], model: nn.Module) -> Iterator[Any]:
    """The batches, as long as every rank has one."""
    iterator, end = iter(batches), object()
    while True:
        batch = next(iterator, end)
        if any_rank(batch is end, model):
            return
        yield batch


def closure_of(loss_of_batch: Loss, batch: Any, model: nn.Module) -> Callable[[], Tensor | float]:
    """The loss of ``batch``, checked every time."""

    def closure() -> Tensor | float:
        loss: Any = loss_of_batch(batch)
        if isinstance(loss, Tensor) and loss.numel() != 1:
            raise ValueError(
                f"`loss_of_batch` must return a scalar, got a tensor of shape {tuple(loss.shape)}. "
                "Reduce it with `.mean()`, as in training."
            )
        if not isinstance(loss, (Tensor, Real)):
            raise TypeError(f"`loss_of_batch` must return the loss alone, got a {type(loss).__name__}.")
        has_gradient = isinstance(loss, Tensor) and loss.requires_grad
        if torch.is_grad_enabled() and not has_gradient and all(p.grad is None for p in model.parameters()):
            raise ValueError(
                "`loss_of_batch` gave no gradient: its loss does not depend on any trainable parameter of "
                "`model`, or is a number and `backward()` was not called. Compute the loss with the model "
                "itself, outside `torch.no_grad()`, and return it as a tensor, without `.item()`."
            )
        return loss if isinstance(loss, Tensor) else float(loss)

    return closure


def check_start(line: Line) -> None:
    """Refuse a start that has no direction to measure."""
    if not math.isfinite(line.loss):
        raise ValueError(
            f"The loss at the start is {line.loss}, so no step can be judged. Look at the initialisation, "
            "the precision, and the batch itself."
        )
    if not math.isfinite(line.grad_norm):
        raise ValueError(
            "The gradient at the start is not finite although the loss is. A square root or logarithm at "
            "zero, or an overflow in half precision, does that."
        )
    if line.raw_norm == 0:
        raise ValueError(
            "The gradient at the start is zero, so there is no direction to measure. The parameters may sit "
            "at a saddle (all zeros?), every unit may be dead, or the gradient may vanish in half precision."
        )


def vanishing(line: Line) -> str | None:
    """A warning if the gradient hardly reaches some of the weights; None if it does."""
    reach = {}
    for (name, p), g in zip(line.named_parameters, line.raw_gradients, strict=True):
        if g is not None and p.dim() > 1:
            length, pull = global_norm([p]).item(), global_norm([g]).item()
            if length > 0 and pull > 0:
                reach[name] = pull / length
    if not reach:
        return None
    least, most = min(reach, key=lambda name: reach[name]), max(reach, key=lambda name: reach[name])
    ratio = reach[most] / reach[least]
    if ratio <= MOST_UNEVEN:
        return None
    return (
        f"cannot tell how long the first steps are typical: relative to its size, `{most}` gets {ratio:.0f} "
        f"times the gradient of `{least}`. A plateau is likely once `{most}` is trained; three to ten times "
        "this lr may be needed to leave it. Another initialisation or normalisation layers help more."
    )


def no_bracket(point: Point, line: Line) -> ValueError:
    """The refusal of a loss on which every step is safe, or none."""
    if point.safe:
        return ValueError(
            f"No step became unsafe, up to {point.step:.3g}: the loss falls on and on along its gradient, so "
            "it does not limit the learning rate. Is it bounded below, and is it the loss to train on?"
        )
    return ValueError(
        f"No step is safe, down to {point.step:.3g}, which changes the gradient by {point.kappa:.2g} times "
        f"itself and takes the loss from {line.loss:.6g} to {point.loss:.6g}. The loss may jump, or rounding "
        "may drown its differences: calibrate in float64."
    )
