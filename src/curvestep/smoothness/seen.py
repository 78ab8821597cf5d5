"""What a probe sees of the forward passes that lead to a step: how they began, and what they were fed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from curvestep.smoothness.oracle import size_of
from curvestep.smoothness.snapshot import PassState


@dataclass
class SeenPass:
    """Calls of the model: how many, with how many samples together, and marks of what they were fed."""

    calls: int = 0
    size: float = 0.0
    inputs: list[Any] = field(default_factory=list)

    def saw(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, closely: bool) -> None:
        """Count one call; ``closely``, also remember its inputs."""
        self.calls += 1
        self.size += size_of([*args, *kwargs.values()])
        if closely:
            self.inputs.append(fingerprint((args, kwargs)))


@dataclass
class StepSeen:
    """Everything about one training step that is forgotten after it.

    Attributes:
        state: Random states and buffers that the first training pass started from.
        oracle_state: Those that the first gradient of the oracle started from.
        trained: Training's calls of the model since the step before.
        replayed: The replays' calls of it in the self-test.
        eps: Relative precision under autocast, None without.
        in_block: Whether the optimizer is stepping: it may call the model as often as it likes.
        in_replay: Whether a replay calls the model.
        spent: Seconds of this step that went into measuring.
    """

    state: PassState | None = None
    oracle_state: PassState | None = None
    trained: SeenPass = field(default_factory=SeenPass)
    replayed: SeenPass = field(default_factory=SeenPass)
    eps: float | None = None
    in_block: bool = False
    in_replay: bool = False
    spent: float = 0.0


def fingerprint(value: Any) -> list[tuple[Any, ...]]:
    """A few numbers for every tensor in nested ``value``: equal values have equal ones."""
    if isinstance(value, Tensor):
        t = value.detach()
        t = (t.to_dense() if t.layout != torch.strided else t).reshape(-1).to(torch.float64)
        weights = torch.cos(torch.arange(t.numel(), dtype=torch.float64, device=t.device))
        return [(tuple(value.shape), t.sum().item(), (t @ weights).item(), t.abs().sum().item())]
    if isinstance(value, dict):
        return [mark for part in value.values() for mark in fingerprint(part)]
    if isinstance(value, (tuple, list)):
        return [mark for part in value for mark in fingerprint(part)]
    return []


def alike(one: Sequence[tuple[Any, ...]], two: Sequence[tuple[Any, ...]], tolerance: float) -> bool:
    """Whether two fingerprints are of the same values, up to rounding."""
    if [mark[0] for mark in one] != [mark[0] for mark in two]:
        return False
    return all(
        abs(a - b) <= tolerance * max(scale, other) or a == b
        for (_, *first, scale), (_, *second, other) in zip(one, two, strict=True)
        for a, b in zip(first, second, strict=True)
    )
