"""What a probe observes of a training loop that it does not control: forward passes and optimizer steps."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from curvestep.distributed import any_rank, over_ranks
from curvestep.smoothness.snapshot import PassState
from curvestep.vectors import SMALL, global_norm

Listener = Callable[[tuple[Any, ...], dict[str, Any]], None]


@dataclass
class ForwardCalls:
    """Calls of the model: how many, with how many samples in all, and fingerprints of their inputs."""

    calls: int = 0
    size: float = 0.0
    inputs: list[Any] = field(default_factory=list)

    def record(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, with_inputs: bool) -> None:
        """Count one call; ``with_inputs``, also keep a fingerprint of its inputs."""
        self.calls += 1
        self.size += batch_length([*args, *kwargs.values()])
        if with_inputs:
            self.inputs.append(fingerprint((args, kwargs)))


class RankGradients:
    """This rank's own gradient in a training pass of DDP, looked at before the ranks average theirs.

    Two batch sizes in one step, the rank's and that of all ranks, give the noise of the gradient for free.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._norms: dict[int, Tensor] = {}
        self._repeated = False
        # Of smaller parameters a linear mark is kept too: its mean over the ranks must be that of `.grad`.
        smallest = min(p.numel() for p in parameters)
        self._marked = [i for i, p in enumerate(parameters) if p.numel() <= max(smallest, SMALL)]
        self._marks: dict[int, float] = {}
        self._hooks = [
            p.register_post_accumulate_grad_hook(partial(self._take, i)) for i, p in enumerate(parameters)
        ]

    def _take(self, i: int, p: Tensor) -> None:
        self._repeated |= i in self._norms
        self._norms[i] = global_norm([p.grad])
        if i in self._marked:
            self._marks[i] = fingerprint(p.grad)[0][2]

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    def noise(self, grad_norm: float, model: nn.Module) -> dict[str, float]:
        """The row's ``noise`` and ``grad_signal``, given the norm of the mean gradient; nothing if in doubt.

        In doubt where a parameter was reached twice (what the first pass left is averaged already), and where
        the mean of the ranks' gradients is not what is in ``.grad``, as with a loss scaler.
        """
        square = over_ranks(math.fsum(n.item() ** 2 for n in self._norms.values()), model, mean=True)
        expected = over_ranks(math.fsum(self._marks.values()), model, mean=True)
        there = [mark for i in self._marked for mark in fingerprint(self._parameters[i].grad)]
        off = abs(expected - math.fsum(mark[2] for mark in there)) > 1e-3 * math.fsum(
            mark[3] for mark in there
        )
        if any_rank(self._repeated or off, model) or not math.isfinite(square):
            return {}
        # W ranks of b samples: E‖g_r‖² − E‖g‖² = (1 − 1/W) tr Σ/b, and the square of `noise` is tr Σ/(W b).
        variance = max(0.0, square - grad_norm**2) / (dist.get_world_size() - 1)
        return {"noise": math.sqrt(variance), "grad_signal": grad_norm**2 - variance}


@dataclass
class StepRecord:
    """Everything about one training step that is forgotten after it.

    Attributes:
        state: Random states and buffers that the first training pass started from.
        oracle_state: Those that the first gradient of the oracle started from.
        trained: Training's calls of the model since the step before.
        replayed: The replays' calls of it in the self-test.
        ranks: This rank's own gradient, under DDP.
        eps: Relative precision under autocast, None without.
        in_block: Whether the optimizer is stepping: it may call the model as often as it likes.
        in_replay: Whether a replay calls the model.
        spent: Seconds of this step that went into measuring.
    """

    state: PassState | None = None
    oracle_state: PassState | None = None
    trained: ForwardCalls = field(default_factory=ForwardCalls)
    replayed: ForwardCalls = field(default_factory=ForwardCalls)
    ranks: RankGradients | None = None
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


def batch_length(batch: Any) -> float:
    """How many samples a batch has: the length of its first tensor, 1 if it has none."""
    if isinstance(batch, Tensor):
        return float(batch.shape[0]) if batch.dim() else 1.0
    parts = batch.values() if isinstance(batch, Mapping) else batch
    if isinstance(batch, Mapping) or (isinstance(batch, Sequence) and not isinstance(batch, (str, bytes))):
        for part in parts:
            if isinstance(part, Tensor):
                return batch_length(part)
    return 1.0


class ForwardHook:
    """A forward pre-hook that holds its listener weakly and stays behind when the model is copied."""

    def __init__(self, listener: Listener) -> None:
        self._listener = weakref.WeakMethod(listener)
        # The compiler, where it is in use, is not to look into the listener. (Asking for it loads it.)
        self._tell: Any = torch.compiler.disable(_tell) if "torch._dynamo" in sys.modules else _tell

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell the listener, if it is still there."""
        listener = self._listener()
        if listener is not None:
            self._tell(listener, args, kwargs)

    def __reduce__(self) -> Any:
        return _no_hook, ()  # also when pickled with the model


def observe_forward(model: nn.Module, listener: Listener) -> RemovableHandle:
    """Call ``listener(args, kwargs)`` before every forward pass of ``model``."""
    return model.register_forward_pre_hook(ForwardHook(listener), with_kwargs=True)


def _tell(listener: Listener, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    listener(args, kwargs)


def _no_hook() -> Callable[..., None]:
    return _ignore


def _ignore(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    return None


class StepObserver:
    """The optimizers that stepped, their learning rate, and the gradient norm they were handed."""

    def __init__(self, parameters: Sequence[Tensor], clock: Callable[[], float]) -> None:
        self._parameters = parameters
        self._clock = clock
        self.seconds = 0.0  # that observing took
        self._ids = {id(p) for p in parameters}
        self.optimizers: list[Optimizer] = []
        self.grad_norm: Tensor | None = None

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        """Called by torch before every optimizer's step."""
        if any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"]):
            started = self._clock()
            self.optimizers.append(optimizer)
            if not callable(getattr(optimizer, "clip_stats", None)):  # one with statistics needs no norm
                self.grad_norm = global_norm(p.grad for p in self._parameters)
            self.seconds += self._clock() - started

    @property
    def lr(self) -> float | None:
        """The learning rate; of several, the largest."""
        rates = [float(g["lr"]) for o in self.optimizers for g in o.param_groups if "lr" in g]
        return max(rates, default=None)

    def coefficient(self, grad_norm: float) -> float | None:
        """What clipping multiplied the gradient by: as the optimizer reports it, or the ratio of norms."""
        for optimizer in self.optimizers:
            stats = getattr(optimizer, "clip_stats", None)
            if callable(stats):
                return float(stats()["coefficient"])  # pyright: ignore[reportIndexIssue] (any optimizer's own dict)
        if self.grad_norm is None or not grad_norm > 0:
            return None
        return self.grad_norm.item() / grad_norm


@contextmanager
def observe_steps(parameters: Sequence[Tensor], *, clock: Callable[[], float]) -> Iterator[StepObserver]:
    """Observe every optimizer that steps any of ``parameters`` inside the block, timed with ``clock``."""
    observer = StepObserver(parameters, clock)
    handle = register_optimizer_step_pre_hook(observer)
    try:
        yield observer
    finally:
        handle.remove()


def autocast_precision(parameter: Tensor) -> float | None:
    """Relative precision under autocast on the parameter's device; None without autocast."""
    device = parameter.device.type
    if not torch.is_autocast_enabled(device):
        return None
    return torch.finfo(torch.get_autocast_dtype(device)).eps
