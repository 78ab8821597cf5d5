"""What cannot be calibrated, in words that say what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, IterableDataset

from curvestep.bracket import Point


def check_arguments(model: nn.Module, loss_of_batch: Any, batches: Iterable[Any]) -> None:
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
    if _is_single_batch(batches):
        raise TypeError(
            f"`batches` must be a sequence of batches, got one batch or none of them, a "
            f"{type(batches).__name__}. Put a single batch in a list."
        )
    check_loader("batches", batches)


def _is_single_batch(batches: Any) -> bool:
    if isinstance(batches, (tuple, list)) and batches and all(isinstance(part, Tensor) for part in batches):
        return len({(part.dtype, part.dim()) for part in batches}) > 1  # inputs and targets, not two batches
    can_be_read = any(hasattr(type(batches), name) for name in ("__iter__", "__getitem__"))
    return isinstance(batches, (Tensor, Mapping, str)) or not can_be_read


def check_loader(name: str, loader: Any) -> None:
    """Refuse a DataLoader whose data has neither length nor index: torch says so when it is read."""
    data = loader.dataset if isinstance(loader, DataLoader) else None
    if isinstance(data, Iterator) and not isinstance(data, IterableDataset):
        raise TypeError(
            f"`{name}` is a DataLoader over a {type(data).__name__}, which has no length and is read once. "
            "Make a list of it, or wrap what makes it in a torch.utils.data.IterableDataset."
        )


def check_enough(num_batches: int) -> None:
    """Refuse fewer batches than trials need: they are judged on batches that they do not step on."""
    if num_batches < 3:
        raise ValueError(
            f"`batches` must hold at least three batches, one to step on and two others to judge by, got "
            f"{num_batches}. Is it a used-up iterator? Else use smaller batches; 24 are better."
        )


def check_loss(loss: Any, model: nn.Module) -> None:
    """Refuse what is not the loss of a batch."""
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


def check_start(loss: float, grad_norm: float) -> None:
    """Refuse a start from which nothing can be trained."""
    if not math.isfinite(loss):
        raise ValueError(
            f"The loss at the start is {loss}, so no step can be judged. Look at the initialisation, the "
            "precision, and the batch itself."
        )
    if not math.isfinite(grad_norm):
        raise ValueError(
            "The gradient at the start is not finite although the loss is. A square root or logarithm at "
            "zero, or an overflow in half precision, does that."
        )
    if grad_norm == 0:
        raise ValueError(
            "The gradient at the start is zero, so there is no direction to measure. The parameters may sit "
            "at a saddle (all zeros?), every unit may be dead, or the gradient may vanish in half precision."
        )


def no_bracket(point: Point, loss: float) -> ValueError:
    """The refusal of a loss on which every step works, or none."""
    if point.safe:
        return ValueError(
            f"No step became too long, up to {point.step:.3g}: the loss falls on and on along its gradient, "
            "so it does not limit the learning rate. Is it bounded below, and the loss to train on?"
        )
    return ValueError(
        f"No step works, down to {point.step:.3g}, which changes the gradient by {point.kappa:.2g} times "
        f"itself and takes the loss from {loss:.6g} to {point.loss:.6g}. The loss may jump, or rounding "
        "may drown its differences: calibrate in float64."
    )
