"""Forward passes and optimizer steps of a training loop, as a probe observes them without controlling it."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from curvestep.optimizer_family import family_of, group_peak, parameters_of, threshold_of
from curvestep.smoothness.replay import Closure, Gradients, checked_loss, gradients_of, is_empty
from curvestep.smoothness.snapshot import PassState
from curvestep.tensors.distributed import local
from curvestep.tensors.vectors import global_norm
from curvestep.trace.schema import COEFFICIENT_TOLERANCE, Row

Listener = Callable[[tuple[object, ...], dict[str, object]], None]


class Mark(NamedTuple):
    """A few numbers that stand for a tensor."""

    shape: tuple[int, ...]
    total: float
    weighted: float  # sum
    size: float  # sum of absolute values

    def is_like(self, other: Mark, tolerance: float) -> bool:
        """Whether both are of the same values, up to rounding."""
        if self.shape != other.shape:
            return False
        gap = tolerance * max(self.size, other.size)
        pairs = ((self.total, other.total), (self.weighted, other.weighted))
        return all(math.isclose(a, b, rel_tol=0.0, abs_tol=gap) for a, b in pairs)


@dataclass
class RecentLoss:
    """Training's losses since the last row. They stay on their device: nothing waits for them."""

    total: float | Tensor = 0.0
    weight: float = 0.0
    num_steps: int = 0
    last_step: int = -1

    def see(self, loss: Any, weight: float, step: int) -> None:
        """Add the loss of a batch of this step, if it is one number."""
        value = loss
        if isinstance(loss, Tensor) and loss.numel() == 1:  # a sum of half precision would be rounded
            value = loss.detach().to(torch.promote_types(loss.dtype, torch.float32)).reshape(())
        elif not isinstance(loss, float):
            return
        self.total = self.total + weight * value
        self.weight += weight
        self.num_steps += step != self.last_step
        self.last_step = step


@runtime_checkable
class ClipsItself(Protocol):
    """An optimizer that clips inside its step, and says how."""

    def clip_stats(self) -> Mapping[str, float]:
        """What it counted."""
        ...

    def last_clip(self) -> tuple[float, float]:
        """The norm of the last gradient, and the factor on it."""
        ...

    def spikes(self) -> list[Row]:
        """The gradients that stood out, oldest first."""
        ...


@runtime_checkable
class HasEdge(Protocol):
    """An optimizer that says where its rule bends."""

    def clip_edge(self) -> tuple[float, float]:
        """The gradient norm there, and the coefficient."""
        ...


@dataclass
class ForwardCalls:
    """Calls of the model: how many, with how many samples in all, and fingerprints of their inputs."""

    calls: int = 0
    size: float = 0.0
    inputs: list[list[Mark]] = field(default_factory=list)  # one list a call

    def record(self, args: tuple[object, ...], kwargs: dict[str, object], *, with_inputs: bool) -> None:
        """Count one call; ``with_inputs``, also keep a fingerprint of its inputs."""
        self.calls += 1
        self.size += batch_length([*args, *kwargs.values()])
        if with_inputs:
            self.inputs.append(fingerprint((args, kwargs)))


@dataclass(eq=False)
class Pass:
    """One forward pass of training."""

    loss_fn: Closure  # its loss function
    weight: float = 1.0  # its share in the loss of the step, in any unit
    state: PassState | None = None  # random states and buffers that it started from
    loss: object = None  # the loss that training computed
    calls: ForwardCalls = field(default_factory=ForwardCalls)  # the calls of the model in it
    summed: bool = False  # whether its gradient went into ``.grad``


class TrainingLoss:
    r"""The loss of one training step, as the closure of a replay: the weighted mean of its micro-batches.

    .. math::
        f(x) = \frac{\sum_i w_i f_i(x)}{\sum_i w_i}

    Each pass starts from the state that training's pass started from, so that random numbers which a data
    loader drew in between make no difference. A factor that ``backward`` multiplies the loss by, such as that
    of a GradScaler, is divided out of the gradients of ``parameters`` again.
    """

    def __init__(
        self,
        passes: Sequence[Pass],
        parameters: Sequence[Tensor],
        backward: Callable[[Tensor], object] | None = None,
    ) -> None:
        self._passes = passes
        self._parameters = parameters
        self._backward = backward
        self._total = sum(part.weight for part in passes)

    def mean(self, losses: Sequence[object]) -> float:
        """The weighted mean of one loss per pass."""
        mean = 0.0
        for part, loss in zip(self._passes, losses, strict=True):
            mean += torch.as_tensor(loss).item() * (part.weight / self._total)
        return mean

    def __call__(self) -> object:
        """One micro-batch's loss as it is; of several, each is run backward and the mean returned."""
        if len(self._passes) == 1 and self._backward is None:
            return self._passes[0].loss_fn()
        losses: list[Tensor] = []
        scales: list[Tensor] = []
        backward = self._backward or Tensor.backward
        for part in self._passes:
            if part.state is not None:
                part.state.restore()
            loss = checked_loss(part.loss_fn())
            losses.append(loss.detach())
            if loss.requires_grad:
                loss = loss / (self._total / part.weight)  # as loops write it, to the last bit
                loss.register_hook(scales.append)
                backward(loss)
        if scales and scales[-1] != 1:
            for gradient in gradients_of(self._parameters):
                if gradient is not None:
                    gradient.div_(scales[-1].to(gradient.device))
        return torch.tensor(self.mean(losses), dtype=torch.float64)


@dataclass
class ObservedStep:
    """One step of training, as far as the probe saw it."""

    state: PassState | None = None  # random states and buffers that the first training pass started from
    passes: list[Pass] = field(default_factory=list)  # the passes that training recorded
    trained: ForwardCalls = field(default_factory=ForwardCalls)  # training's calls since the step before
    replayed: ForwardCalls = field(default_factory=ForwardCalls)  # the replays' calls in the self-test
    eps: float = 0.0  # relative precision under autocast, zero without
    inputs: dict[int, Tensor] = field(default_factory=dict)  # of the model, that require grad, by identity
    # Large tensors with their bits before training's first pass, where that is looked at.
    checksums: list[tuple[Tensor, int]] = field(default_factory=list)

    def changed_for_good(self) -> Tensor | None:
        """A tensor that training's own pass changed, and that is too large to put back."""
        return None if self.state is None else self.state.changed_since(self.checksums)

    def see_call(
        self,
        model: nn.Module,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        device: str,
        *,
        with_inputs: bool,
    ) -> None:
        """Take note of a call by training: state, autocast, and leaves that require a gradient.

        ``with_inputs``, also keep a fingerprint of what the model was called with.
        """
        if self.state is None:
            self.state = PassState(model)
        if with_inputs and not self.checksums:
            self.checksums = self.state.checksums()
        if torch.is_autocast_enabled(device):
            self.eps = max(self.eps, torch.finfo(torch.get_autocast_dtype(device)).eps)
        for tensor in tensors_in((args, kwargs)):
            if tensor.is_leaf and tensor.requires_grad:
                self.inputs[id(tensor)] = tensor
        self.trained.record(args, kwargs, with_inputs=with_inputs)

    def run(self, part: Pass, parameters: Sequence[Tensor]) -> Any:
        """The loss of one pass of training, which is recorded.

        A GradScaler may skip a step. The passes recorded for it are dropped when the gradient of a later one
        is not added to theirs.
        """
        from_zero = _is_zero(parameters)
        others = self.trained
        self.trained = part.calls
        self.passes.append(part)
        try:
            loss = part.loss_fn()
        finally:
            self.trained = others
        if isinstance(loss, Tensor) and loss.requires_grad:
            part.loss = loss.detach()
            loss.register_hook(lambda _: self._sum(from_zero=_is_zero(parameters)))
        else:  # it ran backward() itself
            part.loss = loss
            self._sum(from_zero=from_zero)
        return loss

    def _sum(self, *, from_zero: bool) -> None:
        self.passes = [part for part in self.passes if not (from_zero and part.summed)]
        for part in self.passes:
            part.summed = True

    def take_recorded(self) -> None:
        """The passes that training recorded are those of the step: its state and its calls are theirs."""
        if not self.passes:
            raise ValueError(
                "no loss was recorded for this step. Compute it with `loss = probe.record(loss_fn)` before "
                "each backward pass; with Lightning's manual optimization, `loss = record(self, loss_fn)`."
            )
        self.state = self.passes[0].state
        if self.passes[0].calls.calls:
            self.trained = ForwardCalls()
            for part in self.passes:
                self.trained.calls += part.calls.calls
                self.trained.size += part.calls.size
                self.trained.inputs += part.calls.inputs


def _is_zero(parameters: Sequence[Tensor]) -> bool:
    """Whether no gradient has been summed yet."""
    return not any(local(p.grad).to_dense().any() for p in parameters if p.grad is not None)


def fingerprint(value: object) -> list[Mark]:
    """A few numbers for every tensor in nested ``value``: equal values have equal ones."""
    marks = []
    for tensor in tensors_in(value):
        t = tensor.detach().to_dense().reshape(-1).to(torch.float64)
        weights = torch.cos(torch.arange(t.numel(), dtype=torch.float64, device=t.device))
        marks.append(Mark(tuple(tensor.shape), t.sum().item(), (t @ weights).item(), t.abs().sum().item()))
    return marks


def have_same_values(one: Sequence[Mark], two: Sequence[Mark], tolerance: float) -> bool:
    """Whether two fingerprints are of the same values, up to rounding."""
    return len(one) == len(two) and all(a.is_like(b, tolerance) for a, b in zip(one, two, strict=True))


def tensors_in(value: object) -> Iterator[Tensor]:
    """All tensors in nested sequences and mappings, in their order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for part in value:
            yield from tensors_in(part)


def batch_length(batch: object) -> float:
    """Samples in a batch: length of its first tensor, in nested containers too; 1 if there is no tensor."""
    shape = next((tensor.shape for tensor in tensors_in(batch)), ())
    return float(next(iter(shape), 1))


class ForwardHook:
    """A forward pre-hook that holds its listener weakly; in a copy of the model it has none."""

    def __init__(self, listener: Listener) -> None:
        self._listener = weakref.WeakMethod(listener)
        # The compiler, where it is in use, is not to look into the listener. (Asking for it loads it.)
        self._tell: Callable[..., object] = _tell
        if "torch._dynamo" in sys.modules:
            self._tell = torch.compiler.disable(_tell)

    def __call__(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Tell the listener, if it is still there."""
        self._tell(self._listener() or _ignore, args, kwargs)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return partial, (_ignore,)  # when copied or pickled with the model


def _ignore(*_: object) -> None:
    """Hear nothing."""


def _tell(listener: Listener, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    listener(args, kwargs)


class StepObserver:
    """The optimizers that step, their learning rates then, and the gradient that they are handed.

    Args:
        parameters: Of the model; an optimizer that has none of them is left alone.
        with_facts: Collect facts about the first optimizer, for the header of a trace.
    """

    def __init__(self, parameters: Sequence[Tensor], *, with_facts: bool = False) -> None:
        self._parameters = parameters
        self._with_facts = with_facts
        self.optimizers: list[Optimizer] = []
        self.rates: list[float] = []  # lr of each group of each optimizer
        self.facts: Row = {}
        self._grad_norm: Tensor | None = None
        self._handle = register_optimizer_step_pre_hook(self)

    def __call__(self, optimizer: Optimizer, *_: object) -> None:
        """Called by torch before every optimizer's step."""
        if not trains_any(optimizer, self._parameters):
            return
        self.expect(optimizer)
        if not isinstance(optimizer, ClipsItself):  # one with statistics needs no norm
            # A GradScaler may leave it to the optimizer to divide by its scale.
            scale = getattr(optimizer, "grad_scale", None) or 1.0
            self._grad_norm = global_norm(gradients_of(self._parameters)) / float(scale)

    def expect(self, optimizer: Optimizer) -> None:
        """Take note of an optimizer that is about to step: a scheduler may change its lr right after."""
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)
        groups = [group for stepping in self.optimizers for group in stepping.param_groups]
        rated = [group for group in groups if "lr" in group]
        self.rates = [float(group["lr"]) for group in rated]
        if self._with_facts:
            peaks = [group_peak(group) for group in rated]
            rates = {"start_lr": max(self.rates, default=None), "peak_lr": max(peaks, default=None)}
            self.facts = {**optimizer_facts(self.optimizers[0]), **rates}

    def stop(self) -> None:
        """Observe no longer."""
        self._handle.remove()

    def part(self, gradients: Gradients | None, grad_norm: float) -> Row:
        """The row's optimizer, lr and clipping; the gradient is the one before any clipping, if known."""
        part: Row = {"lr": max(self.rates, default=None)}
        part["coefficient"] = coefficient = self.coefficient(gradients, grad_norm)
        if self.optimizers:
            part["optimizer"] = type(self.optimizers[0]).__name__
        if coefficient is None:
            return part
        edges = [optimizer.clip_edge() for optimizer in self.optimizers if isinstance(optimizer, HasEdge)]
        edges.append((math.nan, 1.0))  # where none says
        max_norm, edge = edges[0]
        part["clipped"] = coefficient < edge * (1 - COEFFICIENT_TOLERANCE)
        if edge < 1 and math.isfinite(max_norm):  # a smooth rule: the coefficient does not tell it
            part["max_norm"] = max_norm
        return part

    def coefficient(self, gradients: Gradients | None, grad_norm: float) -> float | None:
        """The factor of clipping on the gradient of this norm, before the optimizer and in it."""
        for optimizer in self.optimizers:
            if not isinstance(optimizer, ClipsItself):
                continue
            norm, factor = optimizer.last_clip()
            if gradients is not None:  # it may train a part of the model
                own = {id(p) for group in optimizer.param_groups for p in group["params"]}
                pairs = zip(self._parameters, gradients, strict=True)
                grad_norm = global_norm(g for p, g in pairs if id(p) in own).item()
            if not grad_norm > 0:
                return factor
            return factor * norm / grad_norm
        if not (self.optimizers and grad_norm > 0):
            return None
        handed = self._grad_norm
        if handed is None:  # the step had begun already: `.grad` is still what it was handed
            given = gradients_of(self._parameters)
            if is_empty(given):
                return None
            handed = global_norm(given)
        return handed.item() / grad_norm

    def spike_log(self) -> list[Row] | None:
        """The spikes that the optimizers have logged; None if none of them keeps a log."""
        logs = [optimizer.spikes() for optimizer in self.optimizers if isinstance(optimizer, ClipsItself)]
        if not logs:
            return None
        return [spike for log in logs for spike in log]


def optimizer_facts(optimizer: Optimizer) -> Row:
    """The header's facts about an optimizer: its class, the options that all its groups share, its clipping.

    Example:
        >>> w = nn.Parameter(torch.ones(2))
        >>> optimizer_facts(torch.optim.AdamW([w], lr=0.1))["betas"]
        [0.9, 0.999]
    """
    groups = optimizer.param_groups
    threshold = threshold_of(optimizer)
    facts: Row = {name: _shared_option(groups, name) for name in ("momentum", "betas", "weight_decay")}
    clipping = "none"
    if threshold in groups[0] and isinstance(optimizer, ClipsItself):
        clipping = getattr(groups[0][threshold], "name", "norm")  # a rule has a name
    return {
        "optimizer": type(optimizer).__name__,
        "optimizer_family": family_of(optimizer).value,
        **facts,
        "clipping": clipping,
        "threshold": threshold,
        "max_norm": _shared_option(groups, threshold),
        "norm_scope": optimizer.defaults.get("norm_scope"),
    }


def _shared_option(groups: Sequence[Row], name: str) -> float | list[float] | None:
    """A number or a list of numbers that all groups have alike; None if they do not."""
    try:  # torch takes tensors too
        options = np.array([group.get(name) for group in groups], dtype=float)
    except (TypeError, ValueError):  # a rule instead of a norm, or a list beside a number
        return None
    if (options != options[0]).any():  # NaN, where a group has none, differs from itself
        return None
    return options[0].tolist()


def trains_any(optimizer: Optimizer, parameters: Sequence[Tensor]) -> bool:
    """Whether the optimizer has any of the parameters."""
    ids = {id(p) for p in parameters}
    return any(id(p) in ids for p in parameters_of(optimizer))


def differs_in_eval(module: nn.Module) -> bool:
    """Whether a layer acts in training in another way: it normalizes by the batch, or drops."""
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0
    if isinstance(module, _DropoutNd):
        return module.p > 0
    return isinstance(module, _BatchNorm)
