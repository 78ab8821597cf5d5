"""What cannot be calibrated, in words that say what to do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, IterableDataset

from curvestep.bracket import Point
from curvestep.calibration.line import Line
from curvestep.distributed import any_rank
from curvestep.smoothness.determinism import leaves
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
    check_loader("batches", batches)


def check_loader(name: str, loader: Any) -> None:
    """Refuse a DataLoader whose data has neither length nor index: torch says so when it is read."""
    data = loader.dataset if isinstance(loader, DataLoader) else None
    if isinstance(data, Iterator) and not isinstance(data, IterableDataset):
        raise TypeError(
            f"`{name}` is a DataLoader over a {type(data).__name__}, which has no length and is read once. "
            "Make a list of it, or wrap what makes it in a torch.utils.data.IterableDataset."
        )


def shared(batches: Iterable[Any], model: nn.Module) -> Iterator[Any]:
    """The batches, as long as every rank has one."""
    iterator, end = iter(batches), object()
    while True:
        batch = next(iterator, end)
        if any_rank(batch is end, model):
            return
        yield batch


class OutsideParameters:
    """Trainable tensors outside the model that losses depend on; their gradients are put back at the end.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        parameters = list(model.parameters())
        self._sharded = any(isinstance(p, DTensor) for p in parameters)  # computes with tensors of its own
        self._known = {id(p) for p in parameters}
        self.gradients: list[tuple[Tensor, Tensor | None]] = []

    def find(self, loss: Tensor) -> None:
        """Keep the gradients of those that are new; call it before ``loss.backward()``."""
        if self._sharded:
            return
        for leaf in leaves(loss):
            # A tensor made to differentiate by, as for a gradient penalty, is not trained.
            if id(leaf) not in self._known and (isinstance(leaf, nn.Parameter) or leaf.grad is not None):
                self._known.add(id(leaf))
                self.gradients.append((leaf, leaf.grad))
                leaf.grad = None

    def restore(self) -> None:
        """Put their gradients back."""
        for leaf, gradient in self.gradients:
            leaf.grad = gradient


def closure_of(
    loss_of_batch: Loss, batch: Any, model: nn.Module, outside: OutsideParameters
) -> Callable[[], Tensor | float]:
    """The loss of ``batch``, checked every time."""
    first = True

    def closure() -> Tensor | float:
        nonlocal first
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
        if first and has_gradient and isinstance(loss, Tensor):
            outside.find(loss)
            first = False
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


def standing_still(line: Line, outside: OutsideParameters) -> str | None:
    """A warning if the loss depends on trainable tensors that a step does not move; None if not."""
    idle = sum(g is not None and not share for g, share in zip(line.raw_gradients, line.shares, strict=True))
    number = len(outside.gradients) + idle
    if not number:
        return None
    return (
        f"cannot tell how far the loss follows this lr: it also depends on {number} trainable tensors that "
        f"{'the optimizer does not train' if idle else 'are not in `model`'}, and here they stood still. "
        "Where another optimizer trains them, as a GAN's other network, the game may need far smaller steps: "
        "a tenth of this lr is worth a try. If they are trained together, give one module and one optimizer."
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
