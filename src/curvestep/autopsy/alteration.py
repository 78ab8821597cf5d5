"""What can be changed about a step: its length, batch, clipping, optimizer state, precision, one block."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from curvestep.autopsy.kept_step import KeptStep
from curvestep.smoothness.replay import Gradients

State = dict[str, Any]  # a parameter group, or the state of a parameter, as torch keeps them


def _leave_state(optimizer: Optimizer, gradients: Gradients) -> None:
    """Change nothing."""


@dataclass(frozen=True)
class Alteration:
    """One thing to change in a step; by default nothing."""

    fraction: float = 1.0  # of the step's length
    batch_of: KeptStep | None = None  # the step whose batch gives the gradient
    max_norm: float = math.inf  # at which the gradient is clipped before the optimizer gets it
    # Changes the optimizer's state, given the gradient, before the step.
    change_state: Callable[[Optimizer, Gradients], None] = _leave_state
    computed_in: Callable[[], AbstractContextManager[object]] = nullcontext  # the gradient
    left_out: Sequence[int] = ()  # parameters that are not moved


class FullPrecision(TorchFunctionMode):
    """A block in which autocast has no effect on this thread, wherever the loss or the model enters it."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        """The function, without the autocast that may be around it."""
        with torch.autocast(self._device, enabled=False):
            return func(*args, **(kwargs or {}))


def has_momentum(states: Iterable[State]) -> bool:
    """Whether any of these states of parameters holds a first moment."""
    return any("exp_avg" in state or state.get("momentum_buffer") is not None for state in states)


def has_second_moment(states: Iterable[State]) -> bool:
    """Whether any of these states of parameters holds Adam's second moment."""
    return any("exp_avg_sq" in state for state in states)


@dataclass(frozen=True)
class BatchMoments:
    """Moments as if all gradients so far had been this one. The length of a usual step stays what it is."""

    parameters: Sequence[Tensor]  # those whose gradients are given
    coefficient: float  # by which the optimizer itself clips this gradient

    def set_first(self, optimizer: Optimizer, gradients: Gradients) -> None:
        r"""Adam's :math:`m = (1 - \beta_1^t)\,g`; of SGD with dampening d, :math:`g\,(1 - d)/(1 - \beta)`."""
        for group, state, gradient in self._states(optimizer, gradients):
            if "exp_avg" in state:
                weight = _weight(group["betas"][0], state)
                moment = state["exp_avg"]
            elif has_momentum([state]):
                weight = (1.0 - group["dampening"]) / (1.0 - group["momentum"])
                moment = state["momentum_buffer"]
            else:
                continue
            moment.copy_(gradient if moment.is_sparse else gradient.to_dense()).mul_(weight)

    def set_second(self, optimizer: Optimizer, gradients: Gradients) -> None:
        r"""Adam's :math:`v`, at least :math:`(1 - \beta_2^t)` times the mean of :math:`g^2` in the tensor.

        Coordinate by coordinate, steps would be divided by gradients that happen to be zero.
        """
        for group, state, gradient in self._states(optimizer, gradients):
            if "exp_avg_sq" in state:
                moment = _as_real(state["exp_avg_sq"])
                least = _as_real(gradient.to_dense()).square().mean().mul(_weight(group["betas"][1], state))
                moment.clamp_(min=least.to(moment))

    def _states(self, optimizer: Optimizer, gradients: Gradients) -> Iterator[tuple[State, State, Tensor]]:
        """Group, state and gradient, as the optimizer clips it, of each parameter that has all three."""
        by_parameter = {id(p): g for p, g in zip(self.parameters, gradients, strict=True)}
        for group in optimizer.param_groups:
            for p in group["params"]:
                gradient = by_parameter.get(id(p))
                if gradient is not None:
                    yield group, optimizer.state[p], gradient * self.coefficient


def _weight(beta: float, state: State) -> float:
    """Sum of the weights of a running mean after the steps so far."""
    return 1.0 - beta ** float(state.get("step", math.inf))


def _as_real(tensor: Tensor) -> Tensor:
    """A view of a complex tensor as real and imaginary parts, which Adam treats as numbers of their own."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
