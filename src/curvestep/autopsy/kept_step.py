"""A training step in host memory: enough to take it again, bit for bit."""
# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false
# torch names its functions for lists of tensors with an underscore.

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from curvestep.optimizer_family import parameters_of
from curvestep.smoothness.observer import Pass, tensors_in
from curvestep.smoothness.snapshot import map_tensors

Settings = dict[str, object]  # of a parameter group: lr, betas and the like
_OF_SCALER = ("grad_scale", "found_inf")  # attributes that a GradScaler gives to an optimizer
NUM_ENTRIES = 256
_NUMBERS = (bool, int, float, str, type(None))


class KeptBatch:
    """A copy in host memory of tensors, numbers and strings, in tuples, lists and dicts however deep."""

    def __init__(self, batch: object) -> None:
        leaves = _leaves(batch)
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, *_NUMBERS)):
                raise TypeError(
                    f"`batch` holds a {type(leaf).__name__}, which cannot be kept: give tensors, numbers and "
                    "strings in tuples, lists and dicts."
                )
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._devices = [tensor.device for tensor in tensors]
        self._on_host: object = map_tensors(on_host, batch)
        self.nbytes = num_bytes(tensors)

    def batch(self) -> object:
        """The batch again, in memory of its own: the loss may write to it."""
        devices = iter(self._devices)
        return map_tensors(lambda tensor: tensor.to(next(devices), copy=True), self._on_host)


def _leaves(value: object) -> list[object]:
    """Leaves of nested tuples, lists and dicts."""
    inside = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(inside, (tuple, list)):
        return [inside]
    return [leaf for item in inside for leaf in _leaves(item)]


class KeptLoss:
    """The loss of a kept batch, under the autocast that training had around it.

    Attributes:
        scale: What ``backward`` multiplied its gradient by, such as the scale of a GradScaler.
        stateful: The states, before the pass, of what steps along with the optimizer.
    """

    def __init__(
        self,
        loss_of_batch: Callable[[object], object],
        kept: KeptBatch,
        device: str,
        stateful: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.scale: Tensor | None = None
        self.stateful = stateful
        self._kept = kept
        self._loss_of_batch = loss_of_batch
        self._autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)

    def __call__(self) -> object:
        """The loss."""
        with torch.autocast(*self._autocast):
            return self._loss_of_batch(self._kept.batch())

    def keep_scale(self, gradient: Tensor) -> None:
        """Keep the gradient of the objective with respect to this loss."""
        self.scale = gradient.detach()


@dataclass(frozen=True)
class KeptStep:
    """A step of training."""

    number: int  # of the steps before it
    passes: list[Pass]  # its batches, with the random states and buffers that each pass started from
    settings: list[Settings]  # of each parameter group, as the step found them
    norms: list[Tensor | None]  # of the gradient that the optimizer was handed, one a parameter
    nbytes: int  # of its batches
    # The same before hooks of the optimizer, such as that of `clip`, saw the gradient.
    norms_before_hooks: list[Tensor | None]
    entries: Tensor | None  # some of it
    scaler_state: dict[str, Tensor]  # that a GradScaler hands to an optimizer which unscales by itself


class StepStart:
    """Parameters and optimizer before a step, in host memory.

    ``is_break`` where something else than a step led here, such as a loaded checkpoint.
    """

    def __init__(
        self, number: int, parameters: Sequence[Tensor], optimizer: Optimizer, *, is_break: bool = False
    ) -> None:
        self.number = number
        self.is_break = is_break
        self.point = [on_host(p) for p in parameters]
        self.kinds = [(p.device, p.dtype) for p in parameters]
        # With what hooks write to it: the counters of `clip` are in no copy of an optimizer.
        self.groups: list[Settings] = copy.deepcopy(optimizer.state_dict()["param_groups"])
        self._devices = [tensor.device for tensor in _state_tensors(optimizer)]
        self._optimizer = _copy_of(optimizer, on_host)
        self.nbytes = num_bytes([*self.point, *_state_tensors(self._optimizer)])

    def optimizer(self) -> Optimizer:
        """The optimizer again: it steps the same parameters, with a state of its own."""
        devices = iter(self._devices)
        return _copy_of(self._optimizer, lambda tensor: tensor.to(next(devices), copy=True))


def versions_of(parameters: Sequence[Tensor], optimizer: Optimizer) -> list[tuple[int, int]]:
    """Marks of parameters and moments, which change with every write to them."""
    return [(id(tensor), tensor._version) for tensor in (*parameters, *_state_tensors(optimizer))]


def on_host(tensor: Tensor) -> Tensor:
    """A copy in host memory."""
    return tensor.detach().to("cpu", copy=True)


def num_bytes(tensors: Sequence[Tensor]) -> int:
    """Memory of the tensors, of sparse ones too."""
    return sum(part.nbytes for tensor in tensors for part in _dense_parts(tensor))


def _dense_parts(tensor: Tensor) -> Sequence[Tensor]:
    return (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,)


def scaler_state_of(optimizer: Optimizer) -> dict[str, Tensor]:
    """What a GradScaler handed to an optimizer that unscales by itself; else nothing."""
    found = {name: getattr(optimizer, name, None) for name in _OF_SCALER}
    return {name: value.clone() for name, value in found.items() if isinstance(value, Tensor)}


def settings_of(optimizer: Optimizer) -> list[Settings]:
    """The numbers of each parameter group, which a scheduler may change between steps."""
    return [_settings_of_group(group) for group in optimizer.param_groups]


def _settings_of_group(group: Settings) -> Settings:
    settings: Settings = {}
    for name, value in group.items():
        if isinstance(value, Tensor):
            settings[name] = value.clone()
        elif isinstance(value, _NUMBERS) or _is_pair(value):
            settings[name] = value
    return settings


def _is_pair(value: object) -> bool:
    """Whether these are betas, which some schedulers change."""
    return isinstance(value, tuple) and all(isinstance(part, _NUMBERS) for part in value)


def norms_of(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The norm of each gradient, left where the gradient is."""
    with torch.no_grad():
        real = [_real(g.to_dense()) for g in gradients if g is not None]
        norms = iter(torch._foreach_norm(real) if real else ())
    return [None if g is None else next(norms) for g in gradients]


def first_entries(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """A copy of some entries of the last gradient; they tell factors apart to the last bit."""
    for gradient in reversed(gradients):
        if gradient is not None:
            entries = gradient._values() if gradient.is_sparse else gradient
            return entries.detach().reshape(-1)[:NUM_ENTRIES].clone()
    return None


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _state_tensors(optimizer: Optimizer) -> list[Tensor]:
    tensors: list[Tensor] = []  # asked for twice in each step
    for state in optimizer.state.values():
        for value in state.values():
            tensors.extend(tensors_in(value))
    return tensors


def _copy_of(optimizer: Optimizer, move: Callable[[Tensor], Tensor]) -> Optimizer:
    """A copy of the same parameters; the tensors of its state are moved."""
    memo: dict[int, object] = {id(p): p for p in parameters_of(optimizer)}
    memo.update((id(tensor), move(tensor)) for tensor in _state_tensors(optimizer))
    return copy.deepcopy(optimizer, memo)
