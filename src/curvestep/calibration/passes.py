"""Passes through the model at its start: losses and gradients that all ranks share, and what is put back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from curvestep.distributed import is_sharded, over_ranks
from curvestep.loaders import Batch
from curvestep.smoothness.determinism import NonDeterministicError, check_repeatable, leaves
from curvestep.smoothness.replay import Replay, checked_loss

Gradients = list["Tensor | None"]


class Passes(Replay):
    """Losses and gradients of batches; the model is put back at the end of the ``with`` block."""

    function = "loss_of_batch"

    def __init__(self, model: nn.Module, loss_of_batch: Callable[[Batch], Tensor | float]) -> None:
        super().__init__(model, lambda: None)  # each pass sets the closure of its batch
        self._loss_of_batch = loss_of_batch
        self._needs_graph = False  # a loss that differentiates inside fails without
        self._known = set(map(id, model.parameters()))
        self._is_sharded = any(map(is_sharded, self.parameters))  # computes with tensors of its own
        self._outside: list[tuple[Tensor, Tensor | None]] = []
        self.num_gradients = 0  # computed so far

    def __enter__(self) -> Passes:
        super().__enter__()
        self.keep_home()
        return self

    def _put_back(self) -> None:
        super()._put_back()
        for leaf, gradient in self._outside:
            leaf.grad = gradient

    @property
    def num_outside(self) -> int:
        """Tensors outside the model that the loss trains too; not those that it only differentiates by."""
        return sum(isinstance(leaf, nn.Parameter) or g is not None for leaf, g in self._outside)

    def gradient_of(self, batch: Batch, *, seed: int | None = None) -> tuple[float, Gradients]:
        """Loss and gradient where the parameters are; a ``seed`` gives the pass randomness of its own."""
        self._look_at(batch, seed)
        there = self.gradient()
        self.num_gradients += 1
        return over_ranks(there.loss.item(), self.model, mean=True), there.gradients

    def losses_of(self, batches: Sequence[Batch]) -> np.ndarray:
        """Losses where the parameters are."""
        return np.array(list(map(self.loss_of, batches)))

    def loss_of(self, batch: Batch) -> float:
        """Loss where the parameters are, by a forward pass if the loss allows it."""
        self._look_at(batch)
        if not self._needs_graph:
            try:
                return over_ranks(self.loss().item(), self.model, mean=True)
            except RuntimeError:  # torch: "element 0 of tensors does not require grad"
                self._needs_graph = True
        return self.gradient_of(batch)[0]

    def restart(self) -> None:
        """Put the parameters back at the start, and stay open."""
        self.move([None] * len(self.parameters), 0.0)

    def check_repeatable(self, batch: Batch, gradients: Gradients, *, tolerance: float) -> None:
        """Refuse a loss whose gradient at the start differs from itself."""
        self._look_at(batch)
        self.num_gradients += 1
        try:
            check_repeatable(self, gradients, tolerance=tolerance)
        except NonDeterministicError as error:
            said = str(error).replace("The closure", "`loss_of_batch`").replace("the closure", "it")
            raise ValueError(said) from None

    def _look_at(self, batch: Batch, seed: int | None = None) -> None:
        def closure() -> Tensor:
            if seed is not None:  # else every step would have the same dropout masks
                torch.manual_seed(seed)
            loss = checked_loss(self._loss_of_batch(batch), self.function)
            if loss.requires_grad and not self._is_sharded:
                self._keep_gradients(loss)
            return loss

        self.closure = closure

    def _keep_gradients(self, loss: Tensor) -> None:
        """Set gradients of tensors outside the model aside, before a backward pass adds to them."""
        for leaf in leaves(loss):
            if id(leaf) not in self._known:
                self._known.add(id(leaf))
                self._outside.append((leaf, leaf.grad))
                leaf.grad = None


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
