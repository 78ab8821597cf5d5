r"""Gradients of batches: one after another, or the mean of a fixed set, as "10 % of the training data"."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from curvestep.checks import check_positive
from curvestep.smoothness.determinism import (
    NonDeterministicError,
    check_repeatable,
    computed_precision,
    leaves,
)
from curvestep.smoothness.observer import batch_length
from curvestep.smoothness.replay import Gradients, Replay, checked_loss
from curvestep.smoothness.snapshot import detach_state
from curvestep.tensors.distributed import is_sharded, over_ranks


class GradientOracle:
    r"""A closure for the mean loss over a fixed set of batches, each weighted by its size.

    .. math::
        f(x) = \frac{\sum_i n_i f_i(x)}{\sum_i n_i}

    Calling it runs the batches one after the other, each with its own ``backward()``, so that memory is that
    of one batch, and returns the mean loss. It is a closure like any other: give it to
    :class:`~curvestep.smoothness.replay.Replay`, or to the probe as ``oracle=``.

    Args:
        loss_of_batch: The mean loss of one batch, ``loss_of_batch(batch)``. With ``carry_state`` it takes the
            recurrent state too, None for the first batch, and returns both:
            ``loss, state = loss_of_batch(batch, state)``.
        batches: The fixed set, kept as a list: a DataLoader is consumed once. On several ranks, each rank's
            share, all of the same size.
        sizes: The :math:`n_i`. Default: the length of the first tensor in each batch.
        carry_state: Hand the state of each batch, detached, to the next one.

    Example:
        >>> w = torch.nn.Parameter(torch.zeros(()))
        >>> oracle = GradientOracle(lambda x: (x * w).mean(), [torch.tensor([1.0, 2.0]), torch.tensor([6.0])])
        >>> oracle().item(), w.grad.item()
        (0.0, 3.0)
    """

    def __init__(
        self,
        loss_of_batch: Callable[..., Any],
        batches: Iterable[object],
        *,
        sizes: Sequence[float] | None = None,
        carry_state: bool = False,
    ) -> None:
        if not callable(loss_of_batch):
            raise TypeError(f"`loss_of_batch` must be a function of a batch, got {loss_of_batch!r}.")
        self.loss_of_batch = loss_of_batch
        self.batches = list(batches)
        self.carry_state = carry_state
        self.eps = 0.0  # relative precision of the coarsest dtype that its losses were computed in
        if not self.batches:
            raise ValueError("`batches` must hold at least one batch, got none.")
        if sizes is None:
            sizes = [batch_length(batch) for batch in self.batches]
        self.sizes = list(sizes)
        if len(self.sizes) != len(self.batches):
            raise ValueError(
                f"`sizes` must be {len(self.batches)} numbers, one a batch, got {len(self.sizes)}."
            )
        for size in self.sizes:
            check_positive("sizes", size)

    def __call__(self) -> Tensor:
        """Run all batches backward; the mean loss."""
        total = sum(self.sizes)
        state = None
        mean = torch.zeros(())
        for batch, size in zip(self.batches, self.sizes, strict=True):
            if self.carry_state:
                loss, state = self.loss_of_batch(batch, state)
                state = detach_state(state)
            else:
                loss = self.loss_of_batch(batch)
            part = checked_loss(loss, "loss_of_batch") * (size / total)
            self.eps = max(self.eps, computed_precision(part))
            if part.requires_grad:
                part.backward()
            mean = mean + part.detach().to(mean.device, torch.float64)
        return mean

    def __len__(self) -> int:
        return len(self.batches)


def check_oracle(oracle: object) -> GradientOracle | None:
    """The oracle, or None; anything else is refused with the way out."""
    if oracle is None or isinstance(oracle, GradientOracle):
        return oracle
    raise TypeError(
        f"`oracle` must be a GradientOracle, got {type(oracle).__name__}. "
        "Make one: `GradientOracle(loss_of_batch, batches)`."
    )


class BatchReplay(Replay):
    """Losses and gradients of one batch after another, the same on all ranks; a replay that keeps count."""

    function = "loss_of_batch"

    def __init__(self, model: nn.Module, loss_of_batch: Callable[[object], Tensor | float]) -> None:
        super().__init__(model, lambda: None)  # each pass sets the closure of its batch
        self._loss_of_batch = loss_of_batch
        self._needs_graph = False  # a loss that differentiates inside fails without
        self._known = {id(p) for p in model.parameters()}
        self._is_sharded = any(is_sharded(p) for p in self.parameters)  # computes with tensors of its own
        self._outside: list[tuple[Tensor, Tensor | None]] = []
        self.num_gradients = 0  # computed so far
        self.keep_home()

    def _put_back(self) -> None:
        super()._put_back()
        for leaf, gradient in self._outside:
            leaf.grad = gradient

    @property
    def num_outside(self) -> int:
        """Tensors outside the model that the loss trains too; not those that it only differentiates by."""
        return sum(isinstance(leaf, nn.Parameter) or g is not None for leaf, g in self._outside)

    def gradient_of(self, batch: object, *, seed: int | None = None) -> tuple[float, list[Tensor | None]]:
        """Loss and gradient where the parameters are; a ``seed`` gives the pass randomness of its own."""
        self._look_at(batch, seed)
        there = self.gradient()
        self.num_gradients += 1
        return over_ranks(there.loss.item(), self.model, mean=True), there.gradients

    def losses_of(self, batches: Sequence[object]) -> np.ndarray:
        """Losses where the parameters are, by forward passes if the loss allows it."""
        return np.array([self._loss_of(batch) for batch in batches])

    def _loss_of(self, batch: object) -> float:
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

    def check_repeatable(self, batch: object, gradients: Gradients, *, tolerance: float) -> None:
        """Refuse a loss whose gradient at the start differs from itself."""
        self._look_at(batch)
        self.num_gradients += 1
        try:
            check_repeatable(self, gradients, tolerance=tolerance)
        except NonDeterministicError as error:
            raise ValueError(str(error)) from None

    def _look_at(self, batch: object, seed: int | None = None) -> None:
        def closure() -> Tensor:
            if seed is not None:  # else every step would have the same dropout masks
                torch.manual_seed(seed)
            loss = checked_loss(self._loss_of_batch(batch), self.function)
            for leaf in leaves(loss):  # sets gradients outside aside, before a backward pass adds to them
                if id(leaf) not in self._known and not self._is_sharded:
                    self._known.add(id(leaf))
                    self._outside.append((leaf, leaf.grad))
                    leaf.grad = None
            return loss

        self.closure = closure
