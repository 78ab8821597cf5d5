"""Moments of an optimizer as this batch alone would have made them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from curvestep.smoothness.replay import Gradients

Entries = dict[str, Any]  # a parameter group, or the state of a parameter, as torch keeps them


def has_first(state: Entries) -> bool:
    """Whether a parameter has momentum."""
    return "exp_avg" in state or state.get("momentum_buffer") is not None


def has_second(state: Entries) -> bool:
    """Whether a parameter has a second moment."""
    return "exp_avg_sq" in state


@dataclass(frozen=True)
class BatchMoments:
    """Moments as if all gradients so far had been this one. The length of a usual step stays what it is."""

    parameters: Sequence[Tensor]  # those whose gradients are given
    coefficient: float  # by which the optimizer itself clips this gradient

    def set_first(self, optimizer: Optimizer, gradients: Gradients) -> None:
        r"""Adam's :math:`m = (1 - \beta_1^t)\,g`; of SGD with dampening d, :math:`g\,(1 - d)/(1 - \beta)`."""
        for group, state, gradient in self._states(optimizer, gradients):
            if "exp_avg" in state:
                state["exp_avg"].copy_(gradient).mul_(_weight(group["betas"][0], state))
            elif has_first(state):
                weight = (1.0 - group["dampening"]) / (1.0 - group["momentum"])
                state["momentum_buffer"].copy_(gradient).mul_(weight)

    def set_second(self, optimizer: Optimizer, gradients: Gradients) -> None:
        r"""Adam's :math:`v`, at least :math:`(1 - \beta_2^t)` times the mean of :math:`g^2` in the tensor.

        Coordinate by coordinate, steps would be divided by gradients that happen to be zero.
        """
        for group, state, gradient in self._states(optimizer, gradients):
            if has_second(state):
                least = gradient.square().mean().mul(_weight(group["betas"][1], state))
                state["exp_avg_sq"].clamp_(min=least.to(state["exp_avg_sq"]))

    def _states(
        self, optimizer: Optimizer, gradients: Gradients
    ) -> Iterator[tuple[Entries, Entries, Tensor]]:
        """Group, state and gradient, as the optimizer clips it, of each parameter that has all three."""
        by_parameter = {id(p): g for p, g in zip(self.parameters, gradients, strict=True)}
        for group in optimizer.param_groups:
            for p in group["params"]:
                gradient = by_parameter.get(id(p))
                if gradient is not None:
                    yield group, optimizer.state[p], gradient * self.coefficient


def _weight(beta: float, state: Entries) -> float:
    """Sum of the weights of a running mean after the steps so far."""
    return 1.0 - beta ** float(state.get("step", math.inf))
