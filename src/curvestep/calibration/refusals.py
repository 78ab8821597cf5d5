"""Refusals: what cannot be calibrated, and the way out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Real

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import IterableDataset

from curvestep.bracket import Point


def check_arguments(model: object, loss_of_batch: object, batches: object) -> None:
    """Refuse what is not a model, a function and a sequence, in this order."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch module, got a {type(model).__name__}.")
    if any(map(is_lazy, model.parameters())):
        raise ValueError("`model` has a lazy layer, not initialised yet. Run one forward pass first.")
    if not callable(loss_of_batch):
        raise TypeError(
            "`loss_of_batch` must be a function that takes a batch and returns its loss, got a "
            f"{type(loss_of_batch).__name__}. The order is `calibrate(model, loss_of_batch, batches)`."
        )
    if _is_single_batch(batches):
        raise TypeError(
            f"`batches` must be a sequence of batches, got one batch or none of them, a "
            f"{type(batches).__name__}. Give a list of batches or a data loader."
        )
    data = getattr(batches, "dataset", None)
    if isinstance(data, Iterator) and not isinstance(data, IterableDataset):
        raise TypeError(
            f"`batches` is a DataLoader over a {type(data).__name__}, which has no length and is read once. "
            "Make a list of it, or wrap what makes it in a torch.utils.data.IterableDataset."
        )


def _is_single_batch(batches: object) -> bool:
    if isinstance(batches, (tuple, list)):  # inputs and targets, not two batches
        return len({(part.dtype, part.dim()) for part in batches if isinstance(part, Tensor)}) > 1
    is_iterable = isinstance(batches, Iterable) or hasattr(type(batches), "__getitem__")
    return isinstance(batches, (Tensor, Mapping, str)) or not is_iterable


def check_enough(num_batches: int) -> None:
    """Refuse fewer batches than trials need: they are judged on batches that they do not step on."""
    if num_batches < 3:
        raise ValueError(
            "`batches` must hold at least three batches, one to step on and two others to judge by, got "
            f"{num_batches}. Is it a used-up iterator? Else use smaller batches; 24 are better."
        )


def check_loss(loss: object) -> Tensor:
    """The value of ``loss_of_batch``, if it is the loss of a batch."""
    if isinstance(loss, Real):
        return torch.tensor(float(loss))
    if not isinstance(loss, Tensor):
        raise TypeError(f"`loss_of_batch` must return the loss alone, got a {type(loss).__name__}.")
    if loss.numel() != 1:
        raise ValueError(
            f"`loss_of_batch` must return a scalar, got a tensor of shape {tuple(loss.shape)}. "
            "Reduce it with `.mean()`, as in training."
        )
    return loss


def no_gradient() -> ValueError:
    """The refusal of a loss that no parameter of the model has a gradient of."""
    return ValueError(
        "`loss_of_batch` gives no gradient of `model`. Compute the loss with this model, outside "
        "`torch.no_grad()`. Return the tensor, not `.item()`, or call `backward()` inside."
    )


def check_start(loss: float, grad_norm: float) -> None:
    """Refuse a start from which nothing can be trained."""
    if not math.isfinite(loss):
        raise ValueError(f"The loss at the start is {loss}. Look at the initialisation and the batch.")
    if not math.isfinite(grad_norm):
        raise ValueError(
            "The gradient at the start is not finite although the loss is. A square root at zero does that."
        )
    if grad_norm == 0:
        raise ValueError("The gradient at the start is zero. Are all parameters zero, or all units dead?")


def check_representable(step: float, grad_norm: float, parameters: Sequence[Tensor]) -> None:
    """Refuse a step beyond what the parameters can hold."""
    if step > min(torch.finfo(p.dtype).max for p in parameters):
        raise ValueError(
            f"A gradient norm of {grad_norm:.2g} needs steps beyond the parameters' precision. Multiply the "
            "loss by a constant, or calibrate in float64."
        )


def no_bracket(point: Point, loss: float) -> ValueError:
    """The refusal of a loss on which every step works, or none."""
    if point.safe:
        return ValueError(
            f"No step up to {point.step:.3g} is too long: the loss falls without end along its gradient. "
            "Is it bounded below, and is it the one to train on?"
        )
    return ValueError(
        f"No step works, down to {point.step:.3g}, which takes the loss from {loss:.6g} to {point.loss:.6g}. "
        "The loss may jump, or rounding may drown its differences: calibrate in float64."
    )
