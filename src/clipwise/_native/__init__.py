"""The package's own kernel for CPU tensors: an optimizer step in two passes over memory.

``kernel.c`` is compiled when the package is built, wherever there is a C compiler. Without it everything
works the same, on torch's own functions, and slower. ``CLIPWISE_NATIVE=0`` in the environment leaves it out.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from struct import Struct

import torch
from torch import Tensor

# A library beside this file, named as the build names it.
LIBRARY = Path(__file__).with_name("kernel.dylib" if sys.platform == "darwin" else "kernel.so")
DTYPES = (torch.float32, torch.float64)

_RULE = Struct("dddddq")  # as in kernel.c
_address, _numel = Tensor.data_ptr, Tensor.numel


class Kernel:
    """The two functions of ``kernel.c`` for lists of contiguous CPU tensors of one dtype in :data:`DTYPES`.

    Args:
        library: The compiled file.
    """

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        pointer, count, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self._sum_of_squares = loaded.clipwise_sum_of_squares
        self._sum_of_squares.argtypes = [pointer, pointer, count, flag, flag]
        self._sum_of_squares.restype = ctypes.c_double
        self._update = loaded.clipwise_update
        self._update.argtypes = [pointer, pointer, pointer, pointer, count, flag, flag, ctypes.c_char_p]
        self._update.restype = None

    def sum_of_squares(self, tensors: Sequence[Tensor]) -> float:
        r""":math:`\sum_i \lVert t_i \rVert^2`, right to about 1e-7 for float32; inf where it is too large."""
        addresses, sizes = array("Q", map(_address, tensors)), array("q", map(_numel, tensors))
        return self._sum_of_squares(
            addresses.buffer_info()[0], sizes.buffer_info()[0], len(sizes),
            tensors[0].dtype is torch.float64, torch.get_num_threads(),
        )  # fmt: skip

    def update(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        buffers: Sequence[Tensor],
        *,
        scale: float,
        weight_decay: float,
        momentum: float,
        dampening: float,
        lr: float,
        nesterov: bool,
    ) -> None:
        """The formula of ``optim/_update.py`` on all tensors at once; ``buffers`` is empty without momentum.

        Raises:
            ValueError: A list has other sizes than the parameters; then nothing has been written.
        """
        sizes = array("q", map(_numel, params))
        for others in (grads, buffers) if buffers else (grads,):
            if array("q", map(_numel, others)) != sizes:
                raise ValueError("gradients and momentum must have the sizes of their parameters.")
        lists = [array("Q", map(_address, tensors)) for tensors in (params, grads, buffers)]
        self._update(
            *[addresses.buffer_info()[0] if addresses else None for addresses in lists],
            sizes.buffer_info()[0], len(sizes), params[0].dtype is torch.float64, torch.get_num_threads(),
            _RULE.pack(scale, weight_decay, momentum, 1 - dampening, lr, nesterov),
        )  # fmt: skip
        # torch must know that the values changed, or it would not notice a stale graph.
        torch.autograd.graph.increment_version(params)
        if buffers:
            torch.autograd.graph.increment_version(buffers)


@cache
def native() -> Kernel | None:
    """The kernel, if it was built, may be used, and gives the right numbers on a small case."""
    if os.environ.get("CLIPWISE_NATIVE", "1") == "0" or not LIBRARY.exists():
        return None
    try:
        kernel = Kernel(LIBRARY)
    except (OSError, AttributeError):  # built for another machine, or by another version
        return None
    return kernel if _follows_formula(kernel) else None


def _follows_formula(kernel: Kernel) -> bool:
    """Try one step on seventy numbers of each dtype: more than a vector register holds, and a rest."""
    for dtype in DTYPES:
        p, g = torch.arange(70, dtype=dtype), torch.full((70,), 2.0, dtype=dtype)
        b = torch.ones(70, dtype=dtype)
        expected_b = 0.5 * b + 0.25 * (0.5 * g + 3.0 * p)
        expected_p = p - 0.125 * expected_b
        if not math.isclose(kernel.sum_of_squares([g]), 280.0):
            return False
        kernel.update(
            [p], [g], [b], scale=0.5, weight_decay=3.0, momentum=0.5, dampening=0.75, lr=0.125, nesterov=False
        )
        if not (torch.allclose(b, expected_b) and torch.allclose(p, expected_p)):
            return False
    return True
