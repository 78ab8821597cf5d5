"""The package's own kernel for CPU tensors: an optimizer step in two passes over memory, distances in one.

``kernel.c`` is compiled when the package is built, wherever there is a C compiler. Without it everything
works the same, on torch's own functions, and slower. ``CURVESTEP_KERNEL=0`` in the environment leaves it out.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, chain
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

# A library beside this file, named as the build names it.
LIBRARY = Path(__file__).with_name("kernel.dylib" if sys.platform == "darwin" else "kernel.so")
DTYPES = (torch.float32, torch.float64)
PLAIN = (Tensor, torch.nn.Parameter)  # types whose numbers surely lie in memory

# As in kernel.c.
_RULE = Struct("dddddq")
_ADAM_RULE = Struct("dddddd")
_UNITS = Struct("PPdd")
Array: TypeAlias = np.ndarray[Any, Any]
_int64 = ctypes.c_int64
_double = ctypes.c_double
_pointer = ctypes.c_void_p
_PLAIN_IDS = (_pointer * 2)(*[id(kind) for kind in PLAIN])
# torch's dtype for the norms of tensors in half precision, whose squares overflow; of others their own.
DTYPE_OF_NORM = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
# What curvestep_view_plain returns if it is not -1: flags for float64 and for tensors of one element.
_DOUBLE = 1
_SINGLE = 2
_PROCESS = os.getpid()


class View(NamedTuple):
    """Where lists of tensors lie that the kernel can walk through: on CPU, of one dtype, without gaps.

    Good for as long as the tensors stay as they are: for one step.
    """

    addresses: Any  # of the first list, then of the others
    sizes: Any
    starts: Any  # number of each tensor's first unit, and at last of all, -1 if units lie between each other
    length: int  # of each list
    num_lists: int
    doubles: int  # 1 for float64, 0 for float32
    kernel: Kernel  # that can walk through them


class Units:
    """Units of gradients, tensors or rows of them, each clipped at a bound of its own while it is updated.

    ``starts`` is the number of each tensor's first unit, and at last of all. A bound is given, or made of
    ``of_weights``: ratio to the norm of a unit's weights, and least such norm. Factors are known after the
    update.
    """

    def __init__(self, starts: Any, of_weights: tuple[float, float] | None = None) -> None:
        count = starts[-1]
        self.starts = starts
        self._numbers = (_double * (3 * count + 2))()
        every = np.frombuffer(self._numbers)
        self.norms = every[:count]
        self.bounds = every[count : 2 * count]
        self.factors = every[2 * count : -2]
        # The struct of C, which holds for as long as this object.
        places = ctypes.addressof(starts), ctypes.addressof(self._numbers)
        self.as_c = _UNITS.pack(*places, *(of_weights or (0.0, 0.0)))

    @property
    def clipped(self) -> tuple[float, float]:
        """The smallest factor, and the share of units that were clipped."""
        return self._numbers[-2], self._numbers[-1]


class Kernel:
    """The functions of ``kernel.c``, compiled into ``library``."""

    def __init__(self, library: Path) -> None:
        with_lock = ctypes.PyDLL(str(library))
        loaded = ctypes.CDLL(str(library))
        flag = ctypes.c_int
        struct = ctypes.c_char_p
        lists = [_pointer, _pointer, _int64, flag, flag, flag]
        adamw = [*lists, struct, _pointer, flag, struct, _pointer]
        views = [_pointer, _pointer, _pointer, _int64, _int64, _pointer, _pointer, _pointer]
        self._describe = _describe()
        self._view = _typed(with_lock.curvestep_view_plain, flag, views)
        self._sum_of_squares = _typed(loaded.curvestep_sum_of_squares, _double, [*lists, _pointer, _pointer])
        self._update = _typed(loaded.curvestep_update, None, [*lists, struct, struct])
        self._adamw = _typed(loaded.curvestep_adamw, None, adamw)
        self._rms_of_ratios = _typed(loaded.curvestep_rms_of_ratios, flag, adamw)
        self._take_threads_from = _typed(loaded.curvestep_take_threads_from, None, [_pointer])
        self._take_threads_from(parallel_for())

    def view(self, tensors: list[Tensor], *others: list[Tensor], may_be_negated: bool = True) -> View | None:
        """Where ``tensors`` lie, and ``others`` of the same layout, or None if the kernel cannot take them.

        Only plain tensors and parameters surely have their numbers in memory: a subclass (fake, masked,
        wrapped) may have none, or others. Numbers that only we make are not looked at for marks.
        """
        lists = (tensors, *others)
        count = len(tensors)
        if any(len(other) != count for other in others):
            return None
        addresses = (_int64 * (count * len(lists)))()
        sizes = (_int64 * count)()
        starts = (_int64 * (count + 1))()
        if self._describe:
            at = (_pointer * len(lists))(*[id(each) for each in lists])
            try:
                kind = self._view(self._describe, _PLAIN_IDS, at, len(lists), count, addresses, sizes, starts)
            except RuntimeError:  # torch has nothing to describe: sparse, on no device
                return None
        else:
            kind = _view_by_attributes(lists, addresses, sizes, starts)
        # A mark on a tensor can say that its numbers lie in memory with the wrong sign. torch sets it for the
        # imaginary part of a conjugate, every second number in memory, which only a tensor of one element
        # walks through without gaps. A gradient, the first list, can have got it in other ways.
        looked_at = lists if kind & _SINGLE else lists[:1]
        # By map: with thousands of tensors a loop is a tenth of the step.
        if kind < 0 or (may_be_negated and True in map(Tensor.is_neg, chain(*looked_at))):
            return None
        return View(addresses, sizes, starts, count, len(lists), kind & _DOUBLE, self)

    def sum_of_squares(self, x: View, *, apart: bool = False) -> float:
        r""":math:`\sum_i \lVert t_i \rVert^2`, or :math:`\sum_i \lVert t_i - u_i \rVert^2` of two lists.

        Right to 1e-7 for float32 norms between 1e-12 and 1e18. Nothing is stored.
        """
        threads = _num_threads()
        return self._sum_of_squares(x.addresses, x.sizes, x.length, x.doubles, threads, apart, None, None)

    def norm(self, x: View) -> float | None:
        """The norm of the first list; None where squares may have overflowed, or vanished."""
        low, high = safe_norms(torch.float64 if x.doubles else torch.float32)
        norm = math.sqrt(self.sum_of_squares(x))
        return norm if low < norm < high else None

    def squares_of_tensors(self, x: View) -> list[float]:
        r""":math:`\lVert t_i \rVert^2` of each tensor of the first list, to the bit as of that one alone."""
        threads = _num_threads()
        squares: list[float] = []
        for at in range(0, x.length * ctypes.sizeof(_int64), ctypes.sizeof(_int64)):
            address = ctypes.byref(x.addresses, at)
            size = ctypes.byref(x.sizes, at)
            squares.append(self._sum_of_squares(address, size, 1, x.doubles, threads, False, None, None))
        return squares

    def norms_of_units(self, x: View, starts: Any, norms: Array, which: int = 0) -> float:
        r""":math:`\sum_u \lVert u \rVert^2` of list ``which``, and :math:`\lVert u \rVert` of each unit.

        ``starts`` has the number of the first unit of each tensor, and at last their count; a unit is as many
        elements in a row as the others of its tensor. ``norms`` is where their norms are put.
        """
        addresses = ctypes.byref(x.addresses, which * x.length * ctypes.sizeof(_int64))
        return self._sum_of_squares(
            addresses, x.sizes, x.length, x.doubles, _num_threads(), False, starts,
            ctypes.byref(_double.from_buffer(norms.data)),
        )  # fmt: skip

    def update(
        self,
        x: View,
        *,
        scale: float,
        weight_decay: float,
        momentum: float,
        dampening: float,
        lr: float,
        nesterov: bool,
        units: Units | None = None,
    ) -> None:
        """The formula of ``optim/sgd.py``. ``x`` has gradients, parameters and, with momentum, buffers."""
        self._update(
            x.addresses, x.sizes, x.length, x.doubles, _num_threads(), x.num_lists,
            _RULE.pack(scale, weight_decay, momentum, 1 - dampening, lr, nesterov),
            None if units is None else units.as_c,
        )  # fmt: skip

    def adamw(
        self,
        x: View,
        steps: View,
        *,
        scale: float,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        units: Units | None = None,
        update_rms: float = math.inf,
    ) -> None:
        """The formula of ``optim/adamw.py``, which counts ``steps`` on.

        ``x`` has gradients, parameters, first, second and, for ``amsgrad``, largest second moments.
        """
        given = (
            x.addresses, x.sizes, x.length, x.doubles, _num_threads(), x.num_lists,
            _ADAM_RULE.pack(scale, lr, *betas, eps, weight_decay), steps.addresses, steps.doubles,
            None if units is None else units.as_c,
        )  # fmt: skip
        if update_rms == math.inf:
            self._adamw(*given, None)
            return
        rms = np.zeros(x.length)
        if self._rms_of_ratios(*given, rms.ctypes.data):
            raise MemoryError("No memory for the sums of `update_rms`.")
        rates = 1 / np.maximum(1.0, rms / update_rms)
        self._adamw(*given, rates.ctypes.data)


def _typed(function: Any, result: Any, arguments: list[Any]) -> Callable[..., Any]:
    function.restype = result
    function.argtypes = arguments
    return function


@cache
def safe_norms(dtype: torch.dtype) -> tuple[float, float]:
    """Norms between which no square has overflowed, and none of an entry that matters has vanished.

    An entry matters if it is above the rounding error of the norm.
    """
    limits = torch.finfo(DTYPE_OF_NORM.get(dtype, dtype))
    return math.sqrt(limits.tiny) / limits.eps, math.sqrt(limits.max) / 16


@cache
def one_unit_each(count: int) -> Any:
    """The starts of so many tensors with one unit each."""
    return (_int64 * (count + 1))(*range(count + 1))


def is_non_overlapping_and_dense(t: Tensor) -> bool:
    """Whether some order of the dimensions makes ``t`` contiguous: no gaps and no overlaps."""
    return t.is_contiguous() or t.permute(sorted(range(t.dim()), key=t.stride, reverse=True)).is_contiguous()


def same_layout(t: Tensor, other: Tensor) -> bool:
    """Whether ``t`` lies in memory as ``other`` does: same device, dtype, shape and strides."""
    return (
        t.device == other.device
        and t.layout == other.layout
        and t.dtype is other.dtype
        and t.shape == other.shape
        and (t.stride() == other.stride() or (t.is_contiguous() and other.is_contiguous()))
    )


def _view_by_attributes(lists: Sequence[list[Tensor]], addresses: Any, sizes: Any, starts: Any) -> int:
    """Twin of ``curvestep_view_plain``, for a torch that does not let C look at its tensors."""
    first = lists[0]
    for tensors in lists:
        for t, of_first in zip(tensors, first, strict=True):
            if not _is_walkable(t) or not same_layout(t, of_first):
                return -1
    dtypes = {t.dtype for t in first}
    if len(dtypes) > 1:
        return -1
    sizes[:] = [t.numel() for t in first]
    addresses[:] = [t.data_ptr() for t in chain(*lists)]
    units = [_units_of(t) for t in first]
    starts[:] = [0, *accumulate(units)]
    if 0 in units:
        starts[len(first)] = -1
    return _DOUBLE * (torch.float64 in dtypes) + _SINGLE * (1 in sizes)


def _is_walkable(t: Tensor) -> bool:
    return (
        type(t) in PLAIN
        and t.is_cpu
        and t.layout == torch.strided
        and t.dtype in DTYPES
        and is_non_overlapping_and_dense(t)
        and (t.data_ptr() != 0 or t.numel() == 0)
    )


def _units_of(t: Tensor) -> int:
    """How many units a tensor has, each so many elements in a row; 0 if they lie between each other."""
    if t.dim() < 2 or t.numel() == 0:
        return 1
    return len(t) if t[0].numel() in (t.numel(), t.stride(0)) else 0


def _describe() -> int | None:
    """Address of the function with which C looks at a tensor: DLPack's, where torch has it (2.10 on)."""
    capsule = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    pointer_in: Callable[..., Any] = ctypes.pythonapi.PyCapsule_GetPointer
    _typed(pointer_in, _pointer, [ctypes.py_object, ctypes.c_char_p])
    interface = pointer_in(capsule, b"dlpack_exchange_api")
    # Two numbers of the version, a pointer, and the functions: this one is the fourth.
    major = ctypes.c_uint32.from_address(interface).value
    return _pointer.from_address(interface + 16 + 3 * 8).value if major == 1 else None


def parallel_for() -> int | None:
    """Address of the function with which C takes torch's threads, where torch has it (2.10 on)."""
    try:
        # Looked for in what torch's own module has loaded with it, libtorch_cpu too.
        function = ctypes.CDLL(torch._C.__file__).torch_parallel_for
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, _pointer).value


def _num_threads() -> int:
    """As torch's; one in a forked process, where torch waits for threads that were not forked."""
    return torch.get_num_threads() if os.getpid() == _PROCESS else 1


@cache
def native() -> Kernel | None:
    """The kernel, if it was built, may be used, and gives the right numbers on a small case."""
    if os.environ.get("CURVESTEP_KERNEL", "1") == "0" or not LIBRARY.exists():
        return None
    try:
        kernel = Kernel(LIBRARY)
        with _disable_current_modes(), torch.device("cpu"):  # a first trial may be among fake tensors
            is_right = _follows_formula(kernel)
    except (OSError, AttributeError, AssertionError):  # built for another machine, or by another version
        return None
    return kernel if is_right else None


def view_of(*lists: list[Any]) -> View | None:
    """Where the tensors of each list lie, if there is a kernel that can walk through all of them."""
    if torch.compiler.is_compiling():  # no call of the kernel can be part of a graph
        return None
    kernel = native()
    if kernel is None:
        return None
    return kernel.view(*lists)


def _follows_formula(kernel: Kernel) -> bool:
    """Try each function on seventy numbers of each dtype: more than a vector register holds, and a rest."""
    trials = (_sums_squares, _updates, _takes_adamw_step)
    return all(trial(kernel, dtype) for dtype in DTYPES for trial in trials)


def _walkable(kernel: Kernel, *lists: list[Tensor]) -> View:
    view = kernel.view(*lists)
    assert view is not None
    return view


def _sums_squares(kernel: Kernel, dtype: torch.dtype) -> bool:
    p = torch.arange(70, dtype=dtype)
    g = torch.full((70,), 2.0, dtype=dtype)
    view = _walkable(kernel, [g], [p])
    is_distance = math.isclose(kernel.sum_of_squares(view, apart=True), (p - 2).square().sum().item())
    return is_distance and math.isclose(kernel.sum_of_squares(view), 280)


def _updates(kernel: Kernel, dtype: torch.dtype) -> bool:
    p = torch.arange(70, dtype=dtype)
    g = torch.full((70,), 2.0, dtype=dtype)
    b = torch.ones(70, dtype=dtype)
    expected_b = 0.5 * b + 0.25 * (0.5 * g + 3.0 * p)
    expected_p = p - 0.125 * expected_b
    view = _walkable(kernel, [g], [p], [b])
    kernel.update(view, scale=0.5, weight_decay=3.0, momentum=0.5, dampening=0.75, lr=0.125, nesterov=False)
    return torch.allclose(b, expected_b) and torch.allclose(p, expected_p)


def _takes_adamw_step(kernel: Kernel, dtype: torch.dtype) -> bool:
    """The first step of AdamW from zero moments is one of length lr by the sign of the gradient."""
    g = torch.full((70,), 2.0, dtype=dtype)
    p = torch.ones_like(g)
    m = torch.zeros_like(g)
    v = torch.zeros_like(g)
    step = torch.zeros(())
    view = _walkable(kernel, [g], [p], [m], [v])
    steps = _walkable(kernel, [step])
    kernel.adamw(view, steps, scale=0.5, lr=0.25, betas=(0.75, 0.5), eps=0.0, weight_decay=0.5)
    found = [(p, 0.625), (m, 0.25), (v, 0.5), (step, 1.0)]
    return all(torch.allclose(t, torch.full_like(t, expected)) for t, expected in found)
