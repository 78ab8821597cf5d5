"""The state of a forward pass besides the parameters: kept, and put back bit for bit."""

from __future__ import annotations

import copy
import ctypes
import random
import signal
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeGuard
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from curvestep.tensors.distributed import is_sharded, local
from curvestep.tensors.vectors import PIECE

_SEQUENCES = (list, deque)
_CONTAINERS = (*_SEQUENCES, dict, set)
_PUT_BACK = (*_CONTAINERS, OrderedDict, defaultdict, Counter, bytearray)  # of other kinds nobody knows enough
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_PLAIN = (int, float, complex, str, bytes, type(None), tuple, Tensor, np.ndarray, *_PUT_BACK, *_GENERATORS)
_GATHERED = "_unsharded_param"  # an attribute of FSDP2's parameters
_SHARES_BUFFERS = "require_forward_param_sync"  # an attribute of DistributedDataParallel
MOST_KEPT = 1 << 26  # numbers of large tensors that are copied while one gradient is computed
_MANY = 1000  # entries of a list: a longer one holds data, such as a replay buffer's
_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by their size in bytes
_MERSENNE_BYTES = ctypes.sizeof(ctypes.c_uint32) * 624 + ctypes.sizeof(ctypes.c_int)  # words and place
_TORCHS_OWN = vars(nn.Module()).keys()  # with ``training``, which is kept apart


@dataclass(frozen=True)
class RandomState:
    """States of every global random generator: torch's CPU and accelerator, Python's, numpy's."""

    cpu: Tensor
    accelerator: Tensor | list[Tensor] | None  # None if it was not in use
    python: tuple[object, ...]
    numpy: dict[str, Any]

    @classmethod
    def capture(cls) -> RandomState:
        """The states now."""
        states = None
        if torch.accelerator.is_available():  # torch 2.6 raises if asked which one it is
            device = _accelerator_module()
            if getattr(device, "is_initialized", lambda: True)():  # else it is not in use
                states = getattr(device, "get_rng_state_all", device.get_rng_state)()
        return cls(torch.get_rng_state(), states, random.getstate(), _NumpyState.capture())

    def restore(self) -> None:
        """Put the states back."""
        torch.set_rng_state(self.cpu)
        if self.accelerator is not None:
            device = _accelerator_module()
            getattr(device, "set_rng_state_all", device.set_rng_state)(self.accelerator)
        random.setstate(self.python)
        np.random.set_state(self.numpy)


class _NumpyState:
    """State of numpy's global generator, which takes numpy thirty times as long to tell as to compare.

    While the words of its Mersenne twister are those of the last state, and that one held no second normal
    number for the next call, it is the last state.
    """

    _words: ClassVar[bytes] = b""
    _state: ClassVar[dict[str, object]] = {}

    @classmethod
    def capture(cls) -> dict[str, object]:
        generator = get_bit_generator()
        if not isinstance(generator, np.random.MT19937):  # somebody put another in its place
            return np.random.get_state(legacy=False)
        words = ctypes.string_at(generator.ctypes.state_address, _MERSENNE_BYTES)
        if words != cls._words or cls._state["has_gauss"]:
            cls._words = words
            cls._state = np.random.get_state(legacy=False)
        return cls._state


class FrozenParameter:
    """The value of a parameter that needs no gradient; all states that hold the same value share one copy.

    Compared by value, not by version: a pass that writes to ``.data`` leaves the version as it was.
    """

    _last: ClassVar[WeakValueDictionary[int, FrozenParameter]] = WeakValueDictionary()  # by identity

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = parameter
        self.value = local(parameter).clone()

    @classmethod
    def keep(cls, parameter: Tensor) -> FrozenParameter:
        """The value now."""
        last = cls._last.get(id(parameter))
        if last is None or last.parameter is not parameter or last.is_changed():
            last = cls._last[id(parameter)] = cls(parameter)
        return last

    def is_changed(self) -> bool:
        """Whether the parameter has another value now."""
        return not torch.equal(local(self.parameter), self.value)

    def restore(self) -> None:
        """Put the value back, unless it is trained by now."""
        if not self.parameter.requires_grad and self.is_changed():
            local(self.parameter).copy_(self.value)


class PassState:
    """The state of a forward pass besides trained parameters: random states, buffers, modes, attributes.

    A module's own attributes come back too: a counter, a recurrent state carried as ``self.hidden = new``, a
    random generator, a plain tensor that the pass changes in place, a list or dict that it adds to, and the
    same inside of these. What is inside other objects, in a list of more than a thousand entries, or in a
    plain tensor of more than a quarter of a million numbers is not copied.

    So do parameters that need no gradient, such as those of a momentum encoder. Copied are those of a quarter
    of a million numbers at most, and larger ones of the shape of a trained parameter. A frozen backbone costs
    no memory.

    Args:
        model: The module that the pass calls.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        owned = [(module, _state_of(module)) for module in modules]
        inside = _inside([own for _, own in owned])
        containers = [value for value in inside if type(value) in _PUT_BACK]
        arrays = [value for value in inside if type(value) is np.ndarray and value.size <= PIECE]
        tensors = [value for value in inside if _may_change_in_place(value)]
        self._long = [value for value in inside if isinstance(value, _SEQUENCES) and len(value) > _MANY]
        followers, others = _frozen_parameters(model)
        self._large = [t for t in tensors if t.numel() > PIECE] + others
        self.frozen = [FrozenParameter.keep(p) for p in followers]
        self._marks = [_mark(t) for t in self._large]
        sharded = [module for module in modules if isinstance(module, FSDPModule)]
        plain = [] if sharded else modules  # FSDP2 exchanges whole and sharded parameters by itself
        self._modes = [(module, module.training) for module in modules]
        self._undo: list[Callable[[], object]] = [
            *(partial(setattr, module, "training", mode) for module, mode in self._modes),
            *(partial(_refill, module._buffers, dict(module._buffers)) for module in modules),
            *(partial(_put_parameters_back, module, dict(module._parameters)) for module in plain),
            *(partial(buffer.copy_, buffer.detach().clone()) for buffer in model.buffers()),
            *(parameter.restore for parameter in self.frozen),
            *(_gathered_again(shard) for module in sharded for shard in _shards(module)),
            *(partial(_set_attributes, owner, own) for owner, own in owned),
            # A copy of a larger tensor would cost memory that nobody expects.
            *(partial(_set_values, t, t._version, t.detach().clone()) for t in tensors if t.numel() <= PIECE),
            *(partial(_refill, container, copy.copy(container)) for container in containers),
            *(partial(np.copyto, array, array.copy()) for array in arrays if array.flags.writeable),
            *(_rewinder(value) for value in inside if _is_generator(value)),
            RandomState.capture().restore,
        ]

    def modes_changed(self) -> bool:
        """Whether a module is not in the training mode that it was in then."""
        return any(module.training != training for module, training in self._modes)

    def changed_for_good(self) -> Tensor | None:
        """A tensor too large to be copied that was changed in place since; None if there is none.

        A change through ``.data`` shows in :meth:`checksums` only.
        """
        pairs = zip(self._large, self._marks, strict=True)
        return next((tensor for tensor, mark in pairs if _mark(tensor) != mark), None)

    def changed_since(self, checksums: Sequence[tuple[Tensor, int]]) -> Tensor | None:
        """One of the tensors that are not copied that has other bits than then, or was changed in place."""
        changed = (tensor for tensor, old in checksums if _checksum(tensor) != old)
        return next(changed, self.changed_for_good())

    def keep_large(self) -> Callable[[], None]:
        """Function that puts the tensors back that are not copied; nothing, if that needs much memory."""
        large = [t for t in self._not_copied() if not t.is_meta]
        if sum(t.numel() for t in large) > MOST_KEPT:
            return lambda: None
        return partial(put_back_changed, [(t, local(t).detach().clone()) for t in large])

    def checksums(self) -> list[tuple[Tensor, int]]:
        """The tensors that are not copied, each with the sum of its bits; reads all of them."""
        return [(tensor, _checksum(tensor)) for tensor in self._not_copied()]

    def _not_copied(self) -> list[Tensor]:
        """Large tensors, and those in long lists."""
        listed = [value for values in self._long for value in values if _may_change_in_place(value)]
        return [*self._large, *listed]

    def restore(self) -> None:
        """Put everything back as it was when this was taken."""
        with torch.no_grad():
            for undo in self._undo:
                undo()


def _frozen_parameters(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters that need no gradient: those that a pass may well change, and others.

    A pass may well change small ones, and those shaped like a trained one, such as a momentum encoder's.
    """
    frozen = [p for p in model.parameters() if not p.requires_grad]
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        frozen = [p for p in frozen if is_sharded(p)]  # those that are whole at the moment will not stay
    trained_shapes = {p.shape for p in model.parameters() if p.requires_grad}
    followers: list[Tensor] = []
    others: list[Tensor] = []
    for p in frozen:
        is_readable = (_is_plain(p) or is_sharded(p)) and not p.is_meta
        if is_readable and (p.numel() <= PIECE or p.shape in trained_shapes):
            followers.append(p)
        else:
            others.append(p)
    return followers, others


def _shards(module: FSDPModule) -> Iterator[Any]:
    """What FSDP2 keeps of each parameter of a wrapped module."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # torch 2.6: one
    for group in groups:
        yield from group.fsdp_params if group is not None else ()


def _gathered_again(shard: Any) -> Callable[[], object]:
    """Function that gives FSDP2 the parameter back that it gathers from shards, with the memory it has now.

    It is the same object in every pass. One that a pass gave other memory by ``.data = …`` keeps it.
    """
    whole = vars(shard).get(_GATHERED)
    is_frozen = not shard.sharded_param.requires_grad
    if whole is None:  # before the first pass: FSDP2 makes one again
        return partial(vars(shard).pop, _GATHERED if is_frozen else None, None)
    memory = whole.data
    is_copied = is_frozen and _has_memory(memory)
    return partial(_give_memory, shard, whole, memory, memory.clone() if is_copied else None)


def _give_memory(shard: Any, whole: Tensor, memory: Tensor, values: Tensor | None) -> None:
    vars(shard)[_GATHERED] = whole
    if whole.data_ptr() != memory.data_ptr():
        whole.data = memory
    if values is not None and _has_memory(memory):
        memory.copy_(values)


def _has_memory(tensor: Tensor) -> bool:
    """Whether a parameter that FSDP2 gathered has numbers; between passes it frees its own memory."""
    return tensor.untyped_storage().nbytes() > 0


def _mark(tensor: Tensor) -> tuple[int, int]:
    """Changes when a tensor is changed in place, or gets other memory by ``.data = …``."""
    return tensor._version, tensor.data_ptr() if _is_plain(tensor) else 0


def _is_plain(tensor: Tensor) -> bool:
    """Whether its numbers are in memory of its own, as they are."""
    return type(tensor) in (Tensor, nn.Parameter)


def _checksum(tensor: Tensor) -> int:
    """The sum of a tensor's bits as whole numbers, piece by piece; zero of a kind that is not known."""
    if not _is_plain(tensor) or tensor.is_meta:
        return 0
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in tensor.detach().reshape(-1).split(PIECE):
        total += piece.view(_WHOLE_NUMBERS.get(piece.element_size(), torch.int64)).sum()
    return int(total)


class restore_on_exit:
    """A block at whose end ``restore`` runs, and which Ctrl-C cannot keep from it.

    One place is left: before the first line of ``__exit__``. Whoever cannot bear that restores again where
    the exception arrives. A generator would be no better: one that an interrupt leaves suspended restores
    whenever the garbage is collected.

    Args:
        restore: Puts everything back. It must be idempotent.
    """

    def __init__(self, restore: Callable[[], object]) -> None:
        self._restore = restore

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        try:
            with interrupts_held_back():
                self._restore()
        except KeyboardInterrupt:  # either before it was held back, or after everything was put back
            self._restore()
            raise


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """In the main thread Ctrl-C waits for the end of the block; no other thread is ever interrupted by it."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    waiting: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: waiting.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if waiting:
            signal.raise_signal(signal.SIGINT)


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


def _put_parameters_back(module: nn.Module, parameters: dict[str, nn.Parameter | None]) -> None:
    if any(module._parameters.get(name) is not p for name, p in parameters.items()):
        _refill(module._parameters, parameters)


def _set_attributes(owner: nn.Module, attributes: dict[str, object]) -> None:
    for name in _state_of(owner).keys() - attributes.keys():
        del vars(owner)[name]
    vars(owner).update(attributes)


def put_back_changed(kept: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Give tensors the values that were kept of them, where they have others now."""
    for tensor, value in kept:
        if not torch.equal(local(tensor), local(value)):
            with torch.no_grad():
                local(tensor).copy_(local(value))


def _set_values(tensor: Tensor, version: int, values: Tensor) -> None:
    if tensor._version != version:  # else leave it alone: a graph may need it as it is
        tensor.copy_(values)


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, (*_SEQUENCES, bytearray)):
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


def _inside(values: Sequence[object]) -> list[object]:
    """All of these, and what is in nested lists, tuples, dicts and sets that are not long, each once."""
    waiting = list(values)
    seen: dict[int, object] = {}
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, (*_CONTAINERS, tuple)) and len(value) <= _MANY:
            waiting.extend(value.values() if isinstance(value, dict) else value)
    return list(seen.values())


def _state_of(owner: nn.Module) -> dict[str, object]:
    """Own attributes: public ones of any kind, and what is plain of the private ones."""
    if isinstance(owner, DistributedDataParallel):  # others say how it sums gradients now
        # A pass without gradients turns it off, and training's next pass would not share the buffers.
        return {_SHARES_BUFFERS: vars(owner).get(_SHARES_BUFFERS, True)}
    # Machinery is not plain, nor is what torch's own modules keep for themselves: their state is in buffers.
    plain = () if type(owner).__module__.startswith("torch.") else _PLAIN
    own = [(name, value) for name, value in vars(owner).items() if name not in _TORCHS_OWN]
    return {name: value for name, value in own if name[0] != "_" or isinstance(value, plain)}


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
