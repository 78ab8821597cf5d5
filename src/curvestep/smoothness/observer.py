"""What a probe sees of a training loop it does not control: forward passes and optimizer steps."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from curvestep.vectors import global_norm

Seen = Callable[[tuple[Any, ...], dict[str, Any]], None]


class ForwardWatch:
    """A forward pre-hook that holds its listener weakly and stays behind when the model is copied."""

    def __init__(self, listener: Seen) -> None:
        self._listener = weakref.WeakMethod(listener)
        # The compiler, where it is in use, is not to look into the listener. (Asking for it loads it.)
        self._tell: Any = torch.compiler.disable(_tell) if "torch._dynamo" in sys.modules else _tell

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell the listener, if it is still there."""
        listener = self._listener()
        if listener is not None:
            self._tell(listener, args, kwargs)

    def __reduce__(self) -> Any:
        return _nobody_watches, ()  # also when pickled with the model


def watch_forward(model: nn.Module, listener: Seen) -> RemovableHandle:
    """Call ``listener(args, kwargs)`` before every forward pass of ``model``."""
    return model.register_forward_pre_hook(ForwardWatch(listener), with_kwargs=True)


def _tell(listener: Seen, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    listener(args, kwargs)


def _nobody_watches() -> Callable[..., None]:
    return _ignore


def _ignore(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    return None


class StepWatch:
    """The optimizers that stepped, their learning rate, and the gradient norm they were handed."""

    def __init__(self, parameters: Sequence[Tensor], clock: Callable[[], float]) -> None:
        self._parameters = parameters
        self._clock = clock
        self.seconds = 0.0  # that watching took
        self._ids = {id(p) for p in parameters}
        self.optimizers: list[Optimizer] = []
        self.grad_norm: Tensor | None = None

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        """Called by torch before every optimizer's step."""
        if any(id(p) in self._ids for group in optimizer.param_groups for p in group["params"]):
            started = self._clock()
            self.optimizers.append(optimizer)
            if not callable(getattr(optimizer, "clip_stats", None)):  # one that tells needs no watching
                self.grad_norm = global_norm(p.grad for p in self._parameters)
            self.seconds += self._clock() - started

    @property
    def lr(self) -> float | None:
        """The learning rate; of several, the largest."""
        rates = [float(g["lr"]) for o in self.optimizers for g in o.param_groups if "lr" in g]
        return max(rates, default=None)

    def coefficient(self, grad_norm: float) -> float | None:
        """What clipping multiplied the gradient by: the optimizer's word, or the ratio of norms."""
        for optimizer in self.optimizers:
            stats = getattr(optimizer, "clip_stats", None)
            if callable(stats):
                return float(stats()["coefficient"])  # pyright: ignore[reportIndexIssue] (any optimizer's own dict)
        if self.grad_norm is None or not grad_norm > 0:
            return None
        return self.grad_norm.item() / grad_norm


@contextmanager
def watch_steps(parameters: Sequence[Tensor], *, clock: Callable[[], float]) -> Iterator[StepWatch]:
    """Watch every optimizer that steps any of ``parameters`` inside the block, timed with ``clock``."""
    watch = StepWatch(parameters, clock)
    handle = register_optimizer_step_pre_hook(watch)
    try:
        yield watch
    finally:
        handle.remove()


def autocast_precision(parameter: Tensor) -> float | None:
    """Relative precision under autocast on the parameter's device; None without autocast."""
    device = parameter.device.type
    if not torch.is_autocast_enabled(device):
        return None
    return torch.finfo(torch.get_autocast_dtype(device)).eps
