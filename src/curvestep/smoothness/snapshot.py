"""The state of a forward pass besides the parameters: kept, and put back bit for bit."""

from __future__ import annotations

import copy
import math
import random
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, ClassVar, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

_SEQUENCES = (list, deque)
_CONTAINERS = (*_SEQUENCES, dict, set)
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_PLAIN = (int, float, complex, str, bytes, type(None), tuple, Tensor, *_CONTAINERS, *_GENERATORS)
_MODERATE = 1 << 18  # numbers of a tensor: larger ones would cost memory that nobody expects
_MANY = 1000  # entries of a list: a longer one holds data, such as a replay buffer's
_TORCHS_OWN = vars(nn.Module()).keys()  # with ``training``, which is kept apart


@dataclass(frozen=True)
class RandomState:
    """States of every global random generator: torch's CPU and accelerator, Python's, numpy's."""

    cpu: Tensor
    accelerator: Tensor | list[Tensor] | None  # None if it was not in use
    python: tuple[object, ...]
    numpy: Any

    @classmethod
    def capture(cls) -> RandomState:
        """The states now."""
        states = None
        if _is_accelerator_in_use():
            device = _accelerator_module()
            states = getattr(device, "get_rng_state_all", device.get_rng_state)()
        return cls(torch.get_rng_state(), states, random.getstate(), np.random.get_state())

    def restore(self) -> None:
        """Put the states back."""
        torch.set_rng_state(self.cpu)
        if self.accelerator is not None:
            device = _accelerator_module()
            getattr(device, "set_rng_state_all", device.set_rng_state)(self.accelerator)
        random.setstate(self.python)
        np.random.set_state(self.numpy)


class PassState:
    """The state of a forward pass besides parameters: random states, buffers, modes, attributes.

    A module's own attributes come back too: a counter, a recurrent state carried as ``self.hidden = new``, a
    random generator, a plain tensor that the pass changes in place, a list or dict that it adds to, and the
    same inside of these. What is inside other objects, in a list of more than a thousand entries, or in a
    plain tensor of more than a quarter of a million numbers is not copied.

    Args:
        model: The module that the pass calls.
        keep: Other objects that the pass changes, such as a metric or a trainer with counters. Their
            attributes come back, with the contents of lists, dicts and sets however deep.
    """

    def __init__(self, model: nn.Module, keep: Sequence[object] = ()) -> None:
        self.random = RandomState.capture()
        modules = list(model.modules())
        modules += [m for other in keep if isinstance(other, nn.Module) for m in other.modules()]
        self._modes = [(module, module.training) for module in modules]
        self._buffers = [(module, dict(module._buffers)) for module in modules if module._buffers]
        tensors = {id(b): b for _, own in self._buffers for b in own.values() if b is not None}
        self._values = [(buffer, buffer.detach().clone()) for buffer in tensors.values()]
        self._attributes = [(m, _state_of(m)) for m in modules if not _is_wrapper(m)]
        self._kept = [(vars(other), dict(vars(other))) for other in keep if not isinstance(other, nn.Module)]
        values = [value for _, own in self._attributes for value in own.values()]
        inside = _inside(values, most=_MANY)
        containers = [value for value in inside if type(value) in _CONTAINERS]
        others = _inside([own for _, own in self._kept])
        containers += [value for value in others if isinstance(value, _CONTAINERS)]
        tensors = list(filter(_may_change_in_place, [*inside, *others]))
        self._tensors = [(t, t._version, t.detach().clone()) for t in tensors if t.numel() <= _MODERATE]
        self._large = [(t, t._version) for t in tensors if t.numel() > _MODERATE]
        self._contents = [(c, copy.copy(c)) for c in containers]
        self._rewind = [_rewinder(value) for value in [*inside, *others] if _is_generator(value)]

    def modes_changed(self) -> bool:
        """Whether a module is not in the training mode that it was in then."""
        return any(module.training != training for module, training in self._modes)

    def changed_for_good(self) -> Tensor | None:
        """A tensor too large to be copied that was changed in place since; None if there is none."""
        return next((tensor for tensor, version in self._large if tensor._version != version), None)

    def restore(self) -> None:
        """Put everything back as it was when this was taken."""
        for module, training in self._modes:
            module.training = training
        for module, buffers in self._buffers:
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for buffer, value in self._values:
                buffer.copy_(value)
        for module, attributes in self._attributes:
            for name in _state_of(module).keys() - attributes.keys():
                del module.__dict__[name]
            module.__dict__.update(attributes)
        for now, then in self._kept:
            now.clear()
            now.update(then)
        with torch.no_grad():
            for tensor, version, value in self._tensors:
                if tensor._version != version:  # else leave it alone: a graph may need it as it is
                    tensor.copy_(value)
        for container, content in self._contents:
            _refill(container, content)
        for rewind in self._rewind:
            rewind()
        self.random.restore()


class Workspace:
    """Copies of lists of tensors, one list after the other in the same memory.

    Fresh memory of megabytes comes from the system page by page, which takes longer than the copy itself.

    Example:
        >>> workspace = Workspace()
        >>> [first] = workspace.copies([torch.ones(3)])
        >>> [second] = workspace.copies([torch.zeros(3)])
        >>> first is second, second
        (True, tensor([0., 0., 0.]))
    """

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}

    def copies(self, tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
        """A copy of each tensor, good until the next call; None stays None."""
        copies: list[Tensor | None] = []
        for i, tensor in enumerate(tensors):
            copies.append(None if tensor is None else self._copy(i, tensor.detach()))
        return copies

    def _copy(self, i: int, tensor: Tensor) -> Tensor:
        kept = self._kept.get(i)
        if kept is not None and _same_form(kept, tensor):
            return kept.copy_(tensor)
        copy = tensor.clone()
        if type(copy) is Tensor and copy.layout is torch.strided:
            self._kept[i] = copy
        return copy


def _same_form(one: Tensor, two: Tensor) -> bool:
    return (
        type(one) is type(two)
        and one.layout is two.layout
        and (one.shape, one.dtype, one.device) == (two.shape, two.dtype, two.device)
        and one.stride() == two.stride()
    )


class UndoOnSignal:
    """Blocks that are undone before the exception of a signal, such as Ctrl-C's, leaves its handler.

    A ``with`` statement alone cannot promise that: the signal may come while it puts things back, or before
    its first line. So while a block is open, each handler of the process is called from here, and if it
    raises, open blocks are undone at once, the innermost first. Handlers run in the main thread only, and so
    do exceptions of theirs: blocks in other threads need no such care.
    """

    _open: ClassVar[list[Callable[[], object]]] = []
    _handlers: ClassVar[dict[int, Callable[[int, FrameType | None], object]]] = {}

    @classmethod
    def enter(cls, undo: Callable[[], object]) -> None:
        """Open a block; ``undo`` must bear being called twice, and while it runs."""
        if threading.current_thread() is not threading.main_thread():
            return
        if not cls._open:
            cls._take_over()
        cls._open.append(undo)

    @classmethod
    def leave(cls, undo: Callable[[], object]) -> None:
        """Close a block that was undone."""
        if undo in cls._open:
            cls._open.remove(undo)
            if not cls._open:
                cls._hand_back()

    @classmethod
    def _take_over(cls) -> None:
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler) and handler != cls._handle:
                cls._handlers[number] = handler
                signal.signal(number, cls._handle)

    @classmethod
    def _hand_back(cls) -> None:
        for number, handler in cls._handlers.items():
            if signal.getsignal(number) == cls._handle:
                signal.signal(number, handler)

    @classmethod
    def _handle(cls, number: int, frame: FrameType | None) -> None:
        try:
            cls._handlers[number](number, frame)
        except BaseException:
            while cls._open:
                cls._open[-1]()
                cls._open.pop()
            cls._hand_back()
            raise


@contextmanager
def undone(undo: Callable[[], object]) -> Iterator[None]:
    """A block at whose end ``undo`` runs, once or twice, also where a signal ends it."""
    UndoOnSignal.enter(undo)
    try:
        yield
    finally:
        undo()
        UndoOnSignal.leave(undo)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """``function`` of a tensor, or of all tensors in tuples (named ones too), lists and dicts."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [map_tensors(function, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def detach_state(state: Any) -> Any:
    """A recurrent state cut from its graph."""
    return map_tensors(Tensor.detach, state)


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, _SEQUENCES):
        container.extend(content)
    else:
        container.update(content)


def _is_generator(value: object) -> bool:
    return isinstance(value, _GENERATORS) and not isinstance(value, random.SystemRandom)


def _rewinder(generator: Any) -> Callable[[], object]:
    """Function that puts a random generator back into its present state."""
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.Generator):
        return partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    return partial(generator.set_state, generator.get_state())


def _inside(values: Sequence[object], most: float = math.inf) -> list[object]:
    """All of these, and what is in nested lists, tuples, dicts and sets of at most so many entries, once."""
    waiting = list(values)
    seen: dict[int, object] = {}
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, (*_CONTAINERS, tuple)) and len(value) <= most:
            waiting.extend(value.values() if isinstance(value, dict) else value)
    return list(seen.values())


def _is_wrapper(module: nn.Module) -> bool:
    """DDP or a compiled module: its attributes are machinery, not state of the model."""
    return isinstance(module, DistributedDataParallel) or hasattr(module, "_orig_mod")


def _state_of(module: nn.Module) -> dict[str, object]:
    """A module's own attributes: public ones of any kind, and what is plain of the private ones."""
    own = vars(module)  # of which most belong to torch
    # Machinery is not plain, nor is what torch's own modules keep for themselves: their state is in buffers.
    plain = () if type(module).__module__.startswith("torch.") else _PLAIN
    names = own.keys() - _TORCHS_OWN
    return {name: own[name] for name in names if not name.startswith("_") or isinstance(own[name], plain)}


def _may_change_in_place(value: object) -> TypeGuard[Tensor]:
    """A plain tensor; one with a graph is made anew by each pass."""
    return (
        isinstance(value, Tensor)
        and not (value.requires_grad or value.is_inference())
        and value.layout is torch.strided
    )


def _accelerator_module() -> Any:
    """``torch.cuda``, ``torch.mps`` and the like."""
    return torch.get_device_module(torch.accelerator.current_accelerator())


def _is_accelerator_in_use() -> bool:
    if not torch.accelerator.is_available():  # torch 2.6 raises if asked which one it is
        return False
    return getattr(_accelerator_module(), "is_initialized", lambda: True)()
