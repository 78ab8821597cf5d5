r"""The gradient of the mean loss over a fixed set of batches: the paper's "10 % of the training data"."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from curvestep._checks import check_positive
from curvestep.smoothness.observer import batch_length
from curvestep.smoothness.snapshot import detach_state


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
        batches: The fixed set, kept as a list: a loader is read once. On several ranks, each rank's share,
            all of the same size.
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
        if not self.batches:
            raise ValueError("`batches` must hold at least one batch, got none.")
        self.sizes = list(map(batch_length, self.batches) if sizes is None else sizes)
        if len(self.sizes) != len(self.batches):
            raise ValueError(
                f"`sizes` must be {len(self.batches)} numbers, one a batch, got {len(self.sizes)}."
            )
        for size in self.sizes:
            check_positive("sizes", size)

    def __call__(self) -> Tensor:
        """Run all batches backward; the mean loss."""
        total, state, mean = sum(self.sizes), None, torch.zeros(())
        for batch, size in zip(self.batches, self.sizes, strict=True):
            if self.carry_state:
                loss, state = self.loss_of_batch(batch, state)
                state = detach_state(state)
            else:
                loss = self.loss_of_batch(batch)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise TypeError(f"`loss_of_batch` must return a scalar tensor, got {_described(loss)}.")
            part = loss * (size / total)
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
        f"`oracle` must be a GradientOracle, got {_described(oracle)}. "
        "Make one: `GradientOracle(loss_of_batch, batches)`."
    )


def _described(value: object) -> str:
    return f"one of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{type(value).__name__}"
