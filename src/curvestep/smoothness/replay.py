r"""A loss's gradient again at another point: same batch, same randomness, nothing left changed.

A difference :math:`\nabla f(x + d) - \nabla f(x)` says something about :math:`f` only if both gradients are
of the *same* :math:`f`: the same batch, the same dropout masks, the same buffers.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from curvestep.checks import check_finite
from curvestep.smoothness.schedule import check_fractions
from curvestep.smoothness.snapshot import PassState, interrupts_held_back
from curvestep.tensors.distributed import (
    any_rank,
    communicates,
    copies,
    gradients_live_in_buckets,
    local,
    spans_ranks,
)
from curvestep.tensors.vectors import PIECE, change, difference, dot, global_norm

Gradients = Sequence["Tensor | None"]
Closure = Callable[[], object]  # computes a loss; what it returns is checked
# Takes the index of a parameter and its new and old gradient, while a backward pass goes on.
Visitor = Callable[[int, Tensor | None, Tensor | None], None]


@dataclass(frozen=True)
class Replayed:
    """A loss and its gradient at one point; None for a parameter that the loss does not depend on."""

    loss: Tensor
    gradients: list[Tensor | None]


@dataclass(frozen=True)
class Change:
    """A loss and how its gradient changed.

    The parts are one tensor for each parameter, or None. The joint norm of any of them is that of the change
    of the gradient there: each is the change itself, or its norm.
    """

    loss: Tensor
    parts: list[Tensor | None]
    grad_norm: float  # of the new gradient


class _Norm:
    """Norm of tensors that come one by one: a large one at once, small ones together."""

    def __init__(self) -> None:
        self._norms: list[Tensor] = []
        self._kept: list[Tensor] = []
        self._count = 0

    def __call__(self, _: int, tensor: Tensor | None, __: Tensor | None) -> None:
        if tensor is not None:
            self._kept.append(tensor.detach())
            self._count += tensor.numel()
        if self._count > PIECE:
            self._norms.append(global_norm(self._kept))
            self._kept = []
            self._count = 0

    def value(self) -> float:
        return math.hypot(*(norm.item() for norm in (*self._norms, global_norm(self._kept))))


class _Running(threading.local):
    """The replays of this thread."""

    def __init__(self) -> None:
        self.replays: set[Replay] = set()


class Replay:
    r"""Gradients of one loss at several points, with the same batch and the same randomness.

    Inside the ``with`` block the parameters may be moved; at its end parameters, ``.grad``, buffers, training
    modes and random states are what they were at its start, bit for bit, also when the closure raised.

    Args:
        model: The module whose parameters are moved: plain, compiled, DDP or FSDP2. Give the wrapped one,
            and one that holds all that the loss trains: the gradients of others are not put back.
        closure: Computes the loss and returns it as a scalar tensor; ``backward()`` is called on it. A
            closure may also call ``backward()`` itself, once for each of several micro-batches; the loss that
            it returns, a number or a tensor, is then only read.
        state: What the training pass saw, taken just before it. Default: the state at the start of the block.

    Attributes:
        closure: May be replaced, as may ``state``: one replay opens as many blocks as are asked for.
        inputs: Tensors outside of the model that the loss is differentiated by; training's ``.grad`` of
            these is put back too.
        num_passes: Of the closure, so far: the price of what was asked, in gradients.

    Example:
        >>> w = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.constant_(w.weight, 3.0)
        >>> with Replay(w, lambda: 2.0 * w.weight.square().sum()) as replay:
        ...     here = replay.gradient()
        ...     there = replay.gradient_at([torch.ones(1, 1)], 0.5)
        >>> here.loss.item(), here.gradients[0].item(), there.gradients[0].item(), w.weight.item()
        (18.0, 12.0, 14.0, 3.0)
    """

    running: ClassVar[_Running] = _Running()  # those that are computing a loss right now
    function: ClassVar[str] = "closure"  # what the caller knows the closure as

    def __init__(self, model: nn.Module, closure: Closure, *, state: PassState | None = None) -> None:
        if not callable(closure):
            raise TypeError(f"`closure` must be a function that returns the loss, got {closure!r}.")
        self.model = model
        self.closure = closure
        self.state = state
        self.parameters = trainable_parameters(model)
        self.inputs: Sequence[Tensor] = ()
        self.num_passes = 0
        self._home: list[Tensor] | None = None
        self._num_swapped: int | None = None  # pieces of the parameters that are in `_home`; None: all
        self._is_open = False
        self._aliased = gradients_live_in_buckets(model)  # the next backward() overwrites them there
        self._runs_backward = False  # the closure itself, by what it did last
        # DDP and FSDP2 sum gradients over ranks when the backward pass is past the parameter.
        self._one_by_one = not communicates(model)
        self._fsdp_modules = [module for module in model.modules() if isinstance(module, FSDPModule)]

    def __enter__(self) -> Replay:
        self._end = PassState(self.model)
        self._grad_mode = torch.is_grad_enabled()
        self._saved = [(tensor, tensor.grad) for tensor in (*self.parameters, *self.inputs)]
        gradients = [gradient for _, gradient in self._saved if gradient is not None]
        self._values = [(gradient, gradient.clone()) for gradient in gradients if self._aliased]
        self._is_open = True
        for tensor in self.inputs:
            tensor.grad = None
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave everything as the block found it; where no block is open, nothing happens.

        Ctrl-C waits for the end of this. If it comes before the first line, nothing is put back: who catches
        it calls this again.
        """
        try:
            with interrupts_held_back():
                self._put_back()
        except KeyboardInterrupt:  # it came before it was held back, or waited for the end
            self._put_back()
            raise

    def _put_back(self) -> None:
        if not self._is_open:
            return
        Replay.running.replays.discard(self)
        self._go_home()
        with torch.no_grad():
            for tensor, gradient in self._saved:
                tensor.grad = gradient
            for gradient, value in self._values:
                gradient.copy_(value)
        self._end.restore()
        torch.clear_autocast_cache()
        torch.set_grad_enabled(self._grad_mode)  # a signal inside of torch.no_grad().__exit__ leaves it off
        self._is_open = False
        self._home = None
        self._num_swapped = None
        del self._end, self._saved, self._values

    def changed_for_good(self) -> Tensor | None:
        """A tensor of the model that a pass changed in place and that is too large to be put back."""
        return self._end.changed_for_good()

    def checksums(self) -> list[tuple[Tensor, int]]:
        """Such tensors with the sum of their bits now; reads all of them."""
        return self._end.checksums()

    def gradient(self) -> Replayed:
        """Loss and gradient where the parameters are."""
        loss = self._differentiate()
        gradients: list[Tensor | None] = []
        for p in self.parameters:
            gradient = p.grad
            if gradient is not None:
                gradient = gradient.clone() if self._aliased else gradient.detach()
            gradients.append(gradient)
        self._drop_gradients()
        if is_empty(gradients):
            raise self._no_gradient()
        return Replayed(loss, gradients)

    def loss(self) -> Tensor:
        """The loss where the parameters are: one forward pass. A closure that runs ``backward()`` does."""
        self._prepare()
        loss = self._forward(differentiable=self._runs_backward).detach()
        self._drop_gradients()
        for module in self._fsdp_modules:  # without a backward pass the outermost stays whole
            module.reshard()
        return loss

    def change(self, old: Gradients, visitors: Iterable[Visitor] = ()) -> Change:
        r"""How the gradient where the parameters are differs from ``old``.

        On one process the whole gradient is never held: as soon as the backward pass is done with a
        parameter, the norms of its part and of the change are taken and the part dropped, unless it is tiny.
        That needs the memory of the largest parameter only, and finds the part in the cache.

        Each visitor is called with the index of each parameter and its new and old gradient; a second call
        with an index replaces the first.
        """
        size = _Norm()
        visitors = (size, *visitors)
        if not self._one_by_one:
            there = self.gradient()
            for i, new in enumerate(there.gradients):
                for visit in visitors:
                    visit(i, new, old[i])
            grad_norm = size.value()  # before the gradient is overwritten
            return Change(there.loss, difference(there.gradients, old, overwrite=True), grad_norm)
        parts: list[Tensor | None] = [None] * len(self.parameters)
        times = [0] * len(parts)

        def take(i: int, p: Tensor) -> None:
            if not self._is_open:  # an interrupt left the hook behind: training's gradient stays
                return
            times[i] += 1
            for visit in visitors:
                visit(i, p.grad, old[i])
            # Not of a small one: its norm is taken later, together with others.
            parts[i] = change(p.grad, old[i], overwrite=p.numel() > PIECE)
            p.grad = None

        loss = self._differentiate(take)
        if max(times) > 1:  # a backward pass in several parts (reentrant checkpoints): take the sum of them
            self._one_by_one = False
            return self.change(old, visitors[1:])
        if not any(times) and is_empty(gradients_of(self.parameters)):
            raise self._no_gradient()
        for i, p in enumerate(self.parameters):
            if not times[i]:  # the closure ran backward() itself, or its loss does not depend on this one
                take(i, p)
        return Change(loss, parts, size.value())

    def gradient_at(
        self, direction: Gradients, fraction: float, *, origin: Sequence[Tensor] | None = None
    ) -> Replayed:
        r"""Loss and gradient at :math:`x + \gamma d`; None in ``direction`` leaves a parameter where it is.

        The ``origin`` :math:`x` is by default the point at block entry, ``fraction`` any finite number.
        """
        self.move(direction, fraction, origin=origin)
        return self.gradient()

    def move(self, direction: Gradients, fraction: float, *, origin: Sequence[Tensor] | None = None) -> None:
        r"""Put the parameters at :math:`x + \gamma d`, always from a saved :math:`x`."""
        check_finite("fraction", fraction)
        home = self.keep_home()
        with torch.no_grad():
            for p, x, d in zip(self.parameters, origin or home, direction, strict=True):
                local(p).copy_(local(x))
                if d is not None:
                    local(p).add_(local(d), alpha=fraction)

    def is_moved_from(self, direction: Gradients, fraction: float) -> bool:
        """Whether the parameters are elsewhere than where :meth:`move` put them."""
        for p, x, d in zip(self.parameters, self.keep_home(), direction, strict=True):
            there = local(x).clone()
            if d is not None:
                there.add_(local(d), alpha=fraction)
            if not torch.equal(local(p), there) and bool(torch.isfinite(there).all()):
                return True
        return False

    @property
    def point(self) -> list[Tensor]:
        """A copy of the parameters at block entry."""
        return copies(self._home or self.parameters)

    def __call__(self, point: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradient at a point given whole, one tensor a parameter: a model as a gradient function."""
        return self.gradient_at([None] * len(point), 0.0, origin=point).gradients

    def keep_home(self) -> list[Tensor]:
        """Keep a copy of the parameters from now on, to come back to whatever happens."""
        if self._home is None:
            self._home = copies(self.parameters)
        return self._home

    def return_home(self) -> None:
        """Restore the parameters to their values at block entry."""
        self._go_home()
        self._home = None
        self._num_swapped = None

    def _go_home(self) -> None:
        if self._home is None:
            return
        count = 0
        with torch.no_grad():
            for p, home in zip(self.parameters, self._home, strict=True):
                for piece, home_piece in _pairs(p, home):
                    if count == self._num_swapped:
                        return
                    piece.copy_(home_piece)
                    count += 1

    def along(self, start: list[Tensor], fractions: Iterable[float]) -> Iterator[float]:
        r"""Put the parameters at each :math:`x_0 + \gamma (x_1 - x_0)`, with :math:`x_1` where they are.

        The end comes first, for it needs no move; then the inner points in ascending order. The copies of
        :math:`x_0` in ``start`` are overwritten with :math:`x_1`, so that two points of the segment, of which
        one is in the model itself, take the memory of one.
        """
        fractions = check_fractions(fractions)
        if 1.0 in fractions:
            yield 1.0
        passed = 0.0
        for fraction in fractions:
            if fraction == 1.0:
                continue
            with torch.no_grad():
                if self._home is None:
                    self._swap_in(start, fraction)
                else:  # towards the end only: every earlier rounding error shrinks
                    for p, end in zip(self.parameters, self._home, strict=True):
                        local(p).lerp_(local(end), (fraction - passed) / (1.0 - passed))
            passed = fraction
            yield fraction

    def hessian_product(self, direction: Gradients, *, origin: Sequence[Tensor]) -> list[Tensor | None]:
        r""":math:`\nabla^2 f(x)\,d` at the ``origin`` :math:`x`, by differentiating twice.

        Not every kernel has a second derivative (fused attention, cuDNN's LSTM): torch then raises a
        RuntimeError, and so do ranks. Central differences of :meth:`gradient_at` do without.
        """
        if spans_ranks(self.model):
            raise RuntimeError("Hessian products by autograd do not sum over ranks. Use central differences.")
        if self._runs_backward:
            raise RuntimeError("The closure runs backward() itself. Use central differences.")
        self.move([None] * len(origin), 0.0, origin=origin)
        self._prepare()
        loss = self._forward()
        gradients = torch.autograd.grad(loss, self.parameters, create_graph=True, allow_unused=True)
        pairs = zip(gradients, direction, strict=True)
        slopes = [(g * d).sum() for g, d in pairs if g is not None and d is not None and g.requires_grad]
        self._drop_gradients()
        if not slopes:  # a loss that is linear in every parameter
            return [None if g is None else torch.zeros_like(g) for g in gradients]
        slope = torch.stack(slopes).sum()
        return list(torch.autograd.grad(slope, self.parameters, allow_unused=True))

    def _prepare(self) -> None:
        state = self.state or self._end
        state.restore()
        self._drop_gradients()
        torch.clear_autocast_cache()  # it may hold casts of parameters from before the move
        for module in self._fsdp_modules:
            module.reshard()

    def _differentiate(self, take: Callable[[int, Tensor], None] | None = None) -> Tensor:
        """Loss where the parameters are; its gradient is in ``.grad``, or ``take`` had it part by part."""
        self._prepare()
        versions = versions_of(self.parameters)
        loss = self._forward()
        # The parts of a gradient that the closure computed are in ``.grad``.
        self._runs_backward = not is_empty(gradients_of(self.parameters))
        hooks: list[RemovableHandle] = []
        try:
            if loss.requires_grad and not self._runs_backward:
                if take is not None:
                    for i, p in enumerate(self.parameters):
                        hooks.append(p.register_post_accumulate_grad_hook(partial(take, i)))
                loss.backward()
        finally:
            for hook in hooks:
                hook.remove()
        if versions != versions_of(self.parameters):
            raise RuntimeError(
                "`closure` changes parameters in place: an optimizer's step inside it or in a backward hook, "
                "or `nn.Embedding(max_norm=…)`. Let it only compute the loss."
            )
        return loss.detach()

    def _forward(self, *, differentiable: bool = True) -> Tensor:
        loss = None
        failure = None
        self.num_passes += 1
        Replay.running.replays.add(self)
        try:
            with torch.set_grad_enabled(differentiable):
                loss = checked_loss(self.closure(), self.function)
        except Exception as error:
            failure = error
        finally:
            Replay.running.replays.discard(self)
        # A rank that failed must not leave the others waiting in backward(). (One that fails before a
        # collective of the forward pass itself, FSDP2's or BatchNorm's, still does: torch knows no way out.)
        if any_rank(failure is not None, self.model):
            raise failure or RuntimeError("The closure raised on another rank.")
        assert loss is not None
        return loss

    def _no_gradient(self) -> ValueError:
        return ValueError(
            f"`{self.function}` gives no gradient of `model`. Compute the loss with this model, outside "
            "`torch.no_grad()`. Return the tensor, not `.item()`, or call `backward()` inside."
        )

    def _drop_gradients(self) -> None:
        for p in self.parameters:
            p.grad = None

    def _swap_in(self, start: list[Tensor], fraction: float) -> None:
        """Move to a fraction of the step, while ``start`` takes up the end of it piece by piece."""
        self._num_swapped = 0  # before the next line: an interrupt between the two finds nothing to put back
        self._home = start
        for p, other in zip(self.parameters, start, strict=True):
            for end, begin in _pairs(p, other):
                inner = torch.lerp(begin, end, fraction)
                begin.copy_(end)
                self._num_swapped += 1  # in this order: an interrupt finds the end in one of both
                end.copy_(inner)
        self._num_swapped = None


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor | None]:
    """What is in ``.grad`` of each."""
    return [p.grad for p in parameters]


def is_empty(gradients: Gradients) -> bool:
    """Whether no parameter has a gradient."""
    return all(gradient is None for gradient in gradients)


def versions_of(parameters: Iterable[Tensor]) -> list[int]:
    """Numbers that grow when parameters are changed in place."""
    return [p._version for p in parameters]


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that training moves, tied ones once."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch module, got a {type(model).__name__}.")
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise TypeError(
            "`model` has a TorchScript module, whose buffers cannot be put back and which takes no hooks. "
            "Give the module of Python that it was made from."
        )
    if any(is_lazy(p) for p in model.parameters()):
        raise ValueError("`model` has a lazy layer, not initialised yet. Run one forward pass first.")
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise TypeError(
            "`model` is wrapped in FullyShardedDataParallel, whose flat parameters cannot be measured. "
            "Shard it with `torch.distributed.fsdp.fully_shard`."
        )
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError("`model` has no parameter with `requires_grad`: there is nothing to measure.")
    return parameters


def checked_loss(loss: object, function: str = "closure") -> Tensor:
    """The loss that a closure returned, if it is a scalar."""
    if isinstance(loss, Real):
        return torch.tensor(float(loss))
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"`{function}` must return a scalar tensor, the loss alone, got a {type(loss).__name__}."
        )
    if loss.numel() != 1:
        raise ValueError(
            f"`{function}` must return a scalar loss, got a tensor of shape {tuple(loss.shape)}. "
            "Reduce it with `.mean()`, as in training."
        )
    return loss


def _pairs(one: Tensor, other: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of two tensors of one form, side by side: a copy of one needs no memory to speak of."""
    one = local(one)
    other = local(other)
    if not (one.is_contiguous() and other.is_contiguous()):
        return iter([(one, other)])
    return zip(one.view(-1).split(PIECE), other.view(-1).split(PIECE), strict=True)


def relative_gap(one: Gradients, two: Gradients) -> float:
    """Norm of the difference of two gradients over that of the second, or over 1 where that is zero."""
    changes = [change(a, b) for a, b in zip(one, two, strict=True)]
    return global_norm(changes).item() / (global_norm(two).item() or 1.0)


def share_turned(gradients: Gradients, trained: Gradients) -> float:
    """Share of ``trained`` that no factor on each parameter's gradient explains."""
    scaled: list[Tensor | None] = []
    for gradient, handed in zip(gradients, trained, strict=True):
        factor = dot([handed], [gradient]) / (dot([gradient], [gradient]) or 1.0)
        scaled.append(None if gradient is None else gradient * factor)
    return relative_gap(scaled, trained)
