"""Passes through the model at its start: losses and gradients that all ranks share, and what is put back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from curvestep.calibration.refusals import check_loss
from curvestep.distributed import any_rank, over_ranks
from curvestep.smoothness.determinism import NonDeterministicError, check_repeatable, leaves
from curvestep.smoothness.replay import Replay
from curvestep.smoothness.snapshot import RandomState, undone

Closure = Callable[[], "Tensor | float"]
Gradients = list["Tensor | None"]


class Passes:
    """Losses and gradients of a model, which is put back at the end of the ``with`` block.

    Attributes:
        parameters: The parameters, which may be moved.
        num_gradients: Gradients computed so far.
    """

    def __init__(self, model: nn.Module, first: Closure) -> None:
        self._replay = Replay(model, first)
        self._needs_graph = False  # a loss that differentiates inside fails without
        self.parameters = self._replay.parameters
        self.num_gradients = 0

    def __enter__(self) -> Passes:
        self._replay.__enter__()
        self._replay.keep_home()
        return self

    def __exit__(self, *exception: object) -> None:
        self._replay.__exit__(*exception)

    def gradient(self, closure: Closure) -> tuple[float, Gradients]:
        """Loss and gradient where the parameters are."""
        self._replay.closure = closure
        there = self._replay.gradient()
        self.num_gradients += 1
        return over_ranks(there.loss.item(), self._replay.model, mean=True), there.gradients

    def loss(self, closure: Closure) -> float:
        """Loss where the parameters are, by a forward pass if the loss allows it."""
        self._replay.closure = closure
        if not self._needs_graph:
            try:
                return over_ranks(self._replay.loss().item(), self._replay.model, mean=True)
            except RuntimeError:  # torch: "element 0 of tensors does not require grad"
                self._needs_graph = True
        return self.gradient(closure)[0]

    def move(self, direction: Gradients, fraction: float) -> None:
        """Put the parameters at a fraction of ``direction`` from the start."""
        self._replay.move(direction, fraction)

    def return_home(self) -> None:
        """Put the parameters back at the start."""
        self._replay.move([None] * len(self.parameters), 0.0)

    def check_repeatable(self, closure: Closure, gradients: Gradients, *, tolerance: float) -> None:
        """Refuse a loss whose gradient at the start differs from itself."""
        self._replay.closure = closure
        self.num_gradients += 1
        try:
            check_repeatable(self._replay, gradients, tolerance=tolerance)
        except NonDeterministicError as error:
            said = str(error).replace("The closure", "`loss_of_batch`").replace("the closure", "it")
            raise ValueError(said) from None


def shared(batches: Iterable[Any], model: nn.Module) -> Iterator[Any]:
    """The batches, as long as every rank has one."""
    iterator, end = iter(batches), object()
    while True:
        batch = next(iterator, end)
        if any_rank(batch is end, model):
            return
        yield batch


@contextmanager
def unmoved(loader: Any) -> Iterator[None]:
    """Put back the random states that reading a data loader draws from: the global ones and its own."""
    samplers = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    owners = [loader, *samplers, getattr(samplers[1], "sampler", None)]
    generators = [getattr(owner, "generator", None) for owner in owners]
    states = [(own, own.get_state()) for own in generators if isinstance(own, torch.Generator)]
    random = RandomState.capture()

    def put_back() -> None:
        random.restore()
        for generator, state in states:
            generator.set_state(state)

    with undone(put_back):
        yield


class Losses:
    """Losses of batches; gradients of tensors outside the model are put back by ``restore``."""

    def __init__(self, model: nn.Module, loss_of_batch: Callable[[Any], Tensor | float]) -> None:
        self._model, self._loss_of_batch = model, loss_of_batch
        parameters = list(model.parameters())
        self._sharded = any(isinstance(p, DTensor) for p in parameters)  # computes with tensors of its own
        self._known = {id(p) for p in parameters}
        self._outside: list[tuple[Tensor, Tensor | None]] = []

    def __call__(self, batch: Any) -> Tensor | float:
        """The loss of ``batch``, checked."""
        loss: Any = self._loss_of_batch(batch)
        check_loss(loss, self._model)
        if not isinstance(loss, Tensor):
            return float(loss)
        if loss.requires_grad and not self._sharded:
            self._keep_gradients(loss)
        return loss

    def _keep_gradients(self, loss: Tensor) -> None:
        for leaf in leaves(loss):
            if id(leaf) not in self._known:
                self._known.add(id(leaf))
                self._outside.append((leaf, leaf.grad))
                leaf.grad = None

    @property
    def num_outside(self) -> int:
        """Parameters, and tensors with a gradient; not those that a loss only differentiates by."""
        return sum(isinstance(leaf, nn.Parameter) or g is not None for leaf, g in self._outside)

    def restore(self) -> None:
        """Put the gradients of tensors outside the model back."""
        for leaf, gradient in self._outside:
            leaf.grad = gradient
