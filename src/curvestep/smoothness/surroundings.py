"""What a loss reads besides the model: globals, closures, objects. Put back after the loss was run again."""

from __future__ import annotations

import io
import random
import types
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from curvestep.smoothness.snapshot import PassState

MOST_VALUES = 1_000  # that are looked at, and entries of a container: one that holds more holds data
_CONTAINERS = (list, tuple, dict, set, deque)
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_CHANGED_IN_PLACE = (*_CONTAINERS, bytearray, *_GENERATORS, Tensor, np.ndarray, nn.Module)
# Packages whose functions and objects are no state of a loss.
_FOREIGN = {
    *("torch", "numpy", "scipy", "curvestep", "builtins", "logging", "threading", "tqdm"),
    *("lightning", "pytorch_lightning", "lightning_fabric", "transformers", "accelerate", "peft"),
}
_MAKERS = {"__init__", "__new__", "__post_init__"}  # called before there is a loss
_TORCHS_OWN = vars(nn.Module()).keys()
_ABSENT = object()


class Surroundings:
    """The values that a loss, and the modules of its model, reach by name, as they are now.

    :meth:`restore` gives names and attributes these values again. It puts back the content of lists, dicts,
    sets, arrays, plain tensors, random generators and other modules. Imported modules and what is inside of
    an object that can be iterated over, such as a data loader, are left as they are. An attribute counts if a
    function that the loss may call has its name in it.

    Args:
        loss_of_batch: The loss, or several.
        model: What it calls. A replay puts its parameters and buffers back.

    Raises:
        RuntimeError: an iterator is among the values: what was taken from it cannot be put back.
    """

    def __init__(
        self, loss_of_batch: Callable[..., object] | Sequence[Callable[..., object]], model: nn.Module
    ) -> None:
        self._globals: list[tuple[dict[str, object], str, object]] = []
        self._attributes: list[tuple[object, str, object]] = []
        self._names = {"forward", "cell_contents"}  # that the functions read, as far as they are known
        self._unread: defaultdict[str, list[tuple[object, object]]] = defaultdict(list)  # owners and values
        self._waiting = deque[object]([loss_of_batch])
        contents = nn.Module()  # a module that has all values as its own: a state of a pass puts them back
        known = {id(module) for module in model.modules()}
        for module in model.modules():
            self._look_into(module)
        most = len(known) + MOST_VALUES
        while self._waiting and len(known) < most:
            value = self._waiting.popleft()
            if id(value) in known:
                continue
            known.add(id(value))
            if isinstance(value, _CHANGED_IN_PLACE):
                setattr(contents, f"value{len(known)}", value)
            self._look_into(value)
        self._contents = PassState(contents)

    def restore(self) -> None:
        """Put everything back as it was when this was taken."""
        for names, name, value in self._globals:
            names[name] = value
        for owner, name, value in self._attributes:
            if getattr(owner, name, _ABSENT) is value:
                continue
            if isinstance(owner, type):
                type.__setattr__(owner, name, value)
            else:
                object.__setattr__(owner, name, value)
        self._contents.restore()

    def _look_into(self, value: object) -> None:
        """Take note of the values inside of this one, and of those that it reads when it is called."""
        if isinstance(value, types.FunctionType):
            self._look_into_function(value)
        elif isinstance(value, types.MethodType):
            self._waiting += [value.__self__, value.__func__]
        elif isinstance(value, partial):
            self._waiting += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, dict):
            self._waiting += value.values() if len(value) <= MOST_VALUES else ()
        elif isinstance(value, _CONTAINERS):
            self._waiting += value if len(value) <= MOST_VALUES else ()
        elif isinstance(value, nn.Module):
            self._waiting += value.children()
            self._look_into_object(value, vars(value).keys() - _TORCHS_OWN)
        elif isinstance(value, type):
            self._look_into_class(value)
        elif not isinstance(value, (types.ModuleType, io.IOBase, Optimizer)):
            self._look_into_object(value, [*getattr(value, "__dict__", ()), *_slots_of(type(value))])

    def _look_into_function(self, function: types.FunctionType) -> None:
        if _is_foreign(function.__module__):
            return
        self._waiting += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        self._look_into_attributes(function, vars(function))
        for name in _names_in(function.__code__):
            if name in function.__globals__:
                value = function.__globals__[name]
                self._globals.append((function.__globals__, name, value))
                self._waiting.append(value)
            self._names.add(name)
            for owner, value in self._unread.pop(name, ()):
                self._add(owner, name, value)
        for cell in function.__closure__ or ():
            self._look_into_attributes(cell, ["cell_contents"])

    def _look_into_object(self, value: object, names: Iterable[str]) -> None:
        own_classes = _own_classes(type(value))
        if isinstance(value, Iterator) and not (own_classes and names):
            raise RuntimeError(
                f"The loss takes from a {type(value).__name__}, which cannot be put back after the loss was "
                "computed again. Draw the batch before, and let the loss read that alone."
            )
        # An object that can be iterated over, such as a data loader, is left as it is.
        if not own_classes or (isinstance(value, Iterable) and not isinstance(value, (Iterator, nn.Module))):
            return
        self._look_into_attributes(value, names)
        for kind in own_classes:
            self._look_into_class(kind)

    def _look_into_class(self, kind: type) -> None:
        """Take note of its methods and of its values."""
        if _is_foreign(kind.__module__):
            return
        for name, member in vars(kind).items():
            function = getattr(member, "__func__", member)
            if isinstance(function, types.FunctionType):
                self._add(None, name, function)
            elif not name.startswith("__") and not hasattr(type(member), "__get__"):
                self._look_into_attributes(kind, [name])

    def _look_into_attributes(self, owner: object, names: Iterable[str]) -> None:
        for name in names:
            if hasattr(owner, name):
                self._add(owner, name, getattr(owner, name))

    def _add(self, owner: object, name: str, value: object) -> None:
        if name not in self._names and (not name.startswith("__") or name in _MAKERS):
            self._unread[name].append((owner, value))
            return
        self._waiting.append(value)
        if owner is not None:
            self._attributes.append((owner, name, value))


# A loss is looked into at each measurement: what a name, a class or code alone tells is found out once.


@lru_cache(MOST_VALUES)
def _is_foreign(module: str | None) -> bool:
    return (module or "builtins").partition(".")[0] in _FOREIGN


@lru_cache(MOST_VALUES)
def _own_classes(kind: type) -> Sequence[type]:
    """The class and those that it is derived from, if one of them is the caller's own."""
    # FSDP2 gives a module a class of its own, derived from the one that it had.
    return [] if all(_is_foreign(base.__module__) for base in kind.__mro__) else kind.__mro__


@lru_cache(MOST_VALUES)
def _slots_of(kind: type) -> Sequence[str]:
    names: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return names


@lru_cache(MOST_VALUES)
def _names_in(code: types.CodeType) -> set[str]:
    """Names that a function, or one defined inside of it, looks up outside of itself."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
    return names
