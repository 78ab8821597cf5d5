r"""Lists of tensors as one vector, stored in pieces: its norm, differences and inner products.

The norm of a gradient is the number everything in this package turns on, so it is computed with care:
accurate to about 1e-7 however large the tensors are, finite whenever the exact value is, and not rounded to
zero when the entries are tiny. Dense, sparse, complex, half-precision and sharded tensors count alike. A
piece that is None counts as zero.
"""
# pyright: reportPrivateImportUsage=false
# torch names its functions for lists of tensors with an underscore.

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cache
from typing import Any, TypeAlias, overload

import numpy as np
import torch
from torch import Tensor

from curvestep.tensors.distributed import is_sharded, placed, whole
from curvestep.tensors.kernel import (
    DTYPE_OF_NORM,
    DTYPES,
    PLAIN,
    Array,
    View,
    safe_norms,
    same_layout,
    view_of,
)

# torch adds up the fp32 squares of a vector one after the other on CPU: over 25 M elements the norm is off by
# 1e-3, or by 1e-2 if they are equal. In rows of at most this length it is right to 6e-7 whatever the entries,
# hardly slower, and all threads take part.
ROW = 512
# Up to this size a tensor is not worth cutting into rows: 1e-7, and 5e-5 at worst, if all entries are equal.
MIDDLE = 1 << 16
# Vectors up to this size are joined first: a call for each would cost more than the copy.
JOINED_SIZE = 1 << 10
# Entries of a large difference that are held at a time: a megabyte of float32, so that Python's share of the
# time is small.
PIECE = 1 << 18
# Up to this size a difference is kept as it is: a call costs more than its entries.
SMALL = 1 << 14

_WIDEST_DTYPE = {"mps": torch.float32}  # of every other device float64

# Tensors of one kind are summed by one call: the function for it, and what they have in common.
_Kind: TypeAlias = tuple[Callable[[list[Any]], Tensor], Hashable, Hashable]


def global_norm(tensors: Iterable[Tensor | None]) -> Tensor:
    r"""Euclidean norm of all ``tensors`` taken as one vector.

    .. math::
        \Bigl(\sum_i \lVert t_i \rVert^2\Bigr)^{1/2}

    Args:
        tensors: Dense, sparse, complex or DTensor tensors of any dtype and shape, on any devices; None is
            left out. Sparse tensors count each index once (duplicates are added up first); the shards of
            DTensors are counted across all ranks, so every rank must call.

    Returns:
        A scalar tensor: float64 on CPU; on an accelerator a device scalar; reading it would synchronize. No
        tensors at all have norm zero.

    Example:
        >>> global_norm([torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]).item()
        5.0
        >>> global_norm([torch.full((4,), 1e30, dtype=torch.float32)]).item() / 1e30
        2.0000000...
    """
    given = [t for t in tensors if t is not None]
    if not given:
        return _host_scalar(0.0)
    view = view_of(given)
    if view is not None:
        return _host_scalar(cpu_norm(given, view))
    kinds: dict[_Kind, list[Tensor]] = {}
    for t in given:
        kind, entries = _entries(t.detach())
        kinds.setdefault(kind, []).append(entries)
    in_order = sorted(kinds.items(), key=lambda item: item[0][0] is _sharded_norm)
    return joint([norm_of(of_kind) for (norm_of, *_), of_kind in in_order])


def joint(norms: list[Tensor]) -> Tensor:
    """The norm of vectors that have these norms."""
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(on_one_device(norms)))


def _host_scalar(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64, device="cpu")


def on_one_device(numbers: Sequence[Tensor]) -> list[Tensor]:
    """The numbers on the accelerator, if one of them is there."""
    device = next((number.device for number in numbers if not number.is_cpu), numbers[0].device)
    return [number.detach().to(device) for number in numbers]


def read(tensors: Sequence[Tensor]) -> list[Array]:
    """The numbers of each tensor as a vector on the host: one wait for a device.

    Example:
        >>> read([torch.tensor(2.0), torch.tensor([[1.0], [3.0]])])
        [array([2.]), array([1., 3.])]
    """
    if not tensors:
        return []
    flat = [t.reshape(-1) for t in on_one_device(tensors)]
    numbers = torch.cat(flat).to("cpu", torch.float64).numpy()
    ends = np.cumsum([len(t) for t in flat])
    return np.split(numbers, ends[:-1])


def widest_dtype(device: torch.device) -> torch.dtype:
    """The real dtype of the highest precision that a device has."""
    return _WIDEST_DTYPE.get(device.type, torch.float64)


def _entries(t: Tensor) -> tuple[_Kind, Tensor]:
    """The entries of ``t`` as real numbers in a strided tensor, each once, and their kind."""
    if is_sharded(t):
        return (_sharded_norm, t.device_mesh, t.placements), t
    if t.layout == torch.sparse_coo:
        t = t.coalesce()
    if t.layout != torch.strided:
        t = t.values()
    t = _real(t)
    norm_of = _norm_on_host if is_readable(t) else device_norm
    return (norm_of, t.dtype, t.device), t


def _real(t: Tensor) -> Tensor:
    if t.is_complex():
        return torch.view_as_real(t.resolve_conj())
    return t


def is_readable(t: Tensor) -> bool:
    """Whether Python can read the numbers of ``t`` at once: on CPU, and not while torch.compile traces."""
    return t.is_cpu and not torch.compiler.is_compiling()


def _norm_on_host(tensors: list[Tensor]) -> Tensor:
    return _host_scalar(cpu_norm(tensors, view_of(tensors)))


def cpu_norm(tensors: list[Tensor], view: View | None = None) -> float:
    """:func:`global_norm` of real, dense CPU tensors of one dtype; ``view`` is where they lie."""
    if view is not None:
        norm = view.kernel.norm(view)
        return _rescaled_norm(tensors) if norm is None else norm
    check_memory("a tensor", tensors)
    norm = _norm_by_torch(tensors)
    low, high = safe_norms(tensors[0].dtype)
    return norm if low < norm < high else _rescaled_norm(tensors)


def check_memory(name: str, tensors: Sequence[Any]) -> None:
    """Raise if the memory of a CPU tensor was given back: torch would read at address 0, a signal."""
    try:
        freed = [t for t in tensors if _is_in_memory(t) and _is_freed(t)]
    except (NotImplementedError, RuntimeError):  # what torch.func wraps does not tell
        return
    if freed:
        shape = tuple(freed[0].shape)
        raise RuntimeError(
            f"The storage of {name}, shape {shape}, was resized to 0, as FSDP1 does between its "
            "uses: there are no numbers. Gather or reload it first."
        )


def _is_freed(t: Tensor) -> bool:
    return t.untyped_storage().nbytes() == 0 < t.numel()


def _is_in_memory(t: Any) -> bool:
    """Whether the numbers of ``t`` surely lie in the host's memory, one for each entry."""
    return type(t) in PLAIN and t.is_cpu and t.layout is torch.strided


def difference(
    new: Sequence[Tensor | None], old: Sequence[Tensor | None], *, overwrite: bool = False
) -> list[Tensor | None]:
    """``new - old``, sparse where both are. ``overwrite`` may reuse the memory of ``new``.

    Example:
        >>> difference([torch.tensor([3.0]), None], [torch.tensor([1.0]), torch.tensor([2.0])])
        [tensor([2.]), tensor([-2.])]
    """
    return [_minus(a, b, overwrite=overwrite) for a, b in zip(new, old, strict=True)]


def distance(new: Tensor, old: Tensor, *, overwrite: bool = False) -> Tensor:
    r"""Norm of ``new - old``; of a large difference no more than a piece is ever held.

    A piece is still in the cache when its norm is taken, and asks for no memory that has to be fetched from
    the system first: for tensors of megabytes that is most of the time.

    Example:
        >>> distance(torch.tensor([3.0, 1.0]), torch.tensor([0.0, 5.0])).item()
        5.0
    """
    a = new.detach()
    b = old.detach()
    view = view_of([a], [b])
    if view is not None:
        apart = math.sqrt(view.kernel.sum_of_squares(view, apart=True))
        low, high = safe_norms(a.dtype)
        if low < apart < high:
            return _host_scalar(apart)
    return joint([global_norm([_minus(x, y, overwrite=overwrite)]) for x, y in _pieces([a, b], PIECE)])


def change(new: Tensor | None, old: Tensor | None, *, overwrite: bool = False) -> Tensor | None:
    """A tensor with the norm of ``new - old``: of two large ones their distance, else the difference itself.

    The joint norm of several such tensors is that of the joint difference, and one call for many small
    tensors is much cheaper than a call for each. ``overwrite`` may reuse the memory of ``new``.
    """
    if new is None or old is None or new.numel() <= SMALL:
        return _minus(new, old, overwrite=overwrite)
    return distance(new, old, overwrite=overwrite)


def dot(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> float:
    """Inner product over all pieces, in float64; of sharded ones across the ranks.

    Example:
        >>> dot([torch.tensor([1.0, 2.0]), None], [torch.tensor([3.0, 4.0]), torch.tensor([5.0])])
        11.0
    """
    pairs = zip(a, b, strict=True)
    total = 0.0
    for x, y in pairs:
        if x is not None and y is not None:
            total += whole((x.double() * y.double()).sum()).item()
    return total


def dot_of_changes(new: Tensor, old: Tensor, other_new: Tensor | None, other_old: Tensor | None) -> Tensor:
    """Inner product of ``new - old`` and ``other_new - other_old``; of large ones only pieces are held.

    Example:
        >>> a, b = torch.tensor([3.0, 1.0]), torch.tensor([1.0, 1.0])
        >>> dot_of_changes(a, b, torch.tensor([5.0, 7.0]), None).item()
        10.0
    """
    if other_new is None:  # turn both around: (new - old)(-o) = (old - new)o
        if other_old is None:
            return _host_scalar(0.0)
        return dot_of_changes(old, new, other_old, None)
    tensors = [_real(t.detach()) for t in (new, old, other_new, other_old) if t is not None]
    if tensors[0].dtype in DTYPES and _are_contiguous_alike(tensors):
        # Pieces short enough that float32 sums are right to 1e-6 and that the differences stay in the cache.
        pieces = _pieces(tensors, SMALL)
        return _host_scalar(sum(torch.dot(x - y, _minus(*others)).item() for x, y, *others in pieces))
    wide = widest_dtype(new.device)
    x, y, *others = tensors
    return whole(((x.to(wide) - y.to(wide)) * _minus(*others).to(wide)).sum())


def precision(tensors: Iterable[Tensor]) -> float:
    """The relative precision of the coarsest dtype among the tensors."""
    return max(torch.finfo(t.dtype).eps for t in tensors)


@overload
def _minus(new: Tensor, old: Tensor | None = None, *, overwrite: bool = False) -> Tensor: ...
@overload
def _minus(new: Tensor | None, old: Tensor | None, *, overwrite: bool) -> Tensor | None: ...
def _minus(new: Tensor | None, old: Tensor | None = None, *, overwrite: bool = False) -> Tensor | None:
    """``new - old``, sparse where both are; None is zero."""
    if old is None:
        return new
    if new is None:
        return -old
    if new.is_sparse != old.is_sparse:
        return new.to_dense() - old.to_dense()
    if new.is_sparse:
        return (new.coalesce() - old.coalesce()).coalesce()
    return new.sub_(old) if overwrite else new - old


def _norm_by_torch(tensors: Sequence[Tensor]) -> float:
    """The norm where there is no kernel for it: by rows, which torch adds up well enough."""
    dtype = DTYPE_OF_NORM.get(tensors[0].dtype)
    none = tensors[0].new_empty(0)
    tiny = [none]
    middle: list[Tensor] = []
    large: list[Tensor] = []
    for t in tensors:
        if t.dim() == 1 and t.numel() <= JOINED_SIZE:
            tiny.append(t)
        elif t.numel() <= MIDDLE:
            middle.append(t)
        else:
            large.append(t)
    joined = torch.cat(tiny)
    kind = middle if joined.numel() <= MIDDLE else large
    kind.append(joined)
    of_rows = [none]
    for t in large:
        of_rows += [torch.linalg.vector_norm(rows, ord=2, dim=1, dtype=dtype) for rows in _rows(t)]
    norms = [*torch._foreach_norm([*middle, none], 2, dtype=dtype)]
    norms.append(torch.linalg.vector_norm(torch.cat(of_rows).double()))
    return math.hypot(*[norm.item() for norm in norms])  # neither overflows nor loses digits


def _pieces(tensors: list[Tensor], size: int) -> Iterable[Sequence[Tensor]]:
    """Pieces of the tensors that belong together; the tensors themselves where they cannot be cut."""
    if not _are_contiguous_alike(tensors):
        return [tensors]
    return zip(*[t.view(-1).split(size) for t in tensors], strict=True)


def _are_contiguous_alike(tensors: list[Tensor]) -> bool:
    """Whether they are real numbers in the host's memory in one order."""
    first = tensors[0]
    return all(
        _is_in_memory(t) and t.is_floating_point() and t.is_contiguous() and same_layout(t, first)
        for t in tensors
    )


def _rows(t: Tensor) -> list[Tensor]:
    """The entries of ``t`` in rows; what is left over is a shorter row, unless a divisor suits."""
    order = sorted(range(t.dim()), key=t.stride, reverse=True)
    vector = t.permute(order).reshape(-1)  # a copy only where there are gaps or overlaps
    length = _row_length(t.numel())
    full = t.numel() // length * length
    return [part.view(-1, min(length, part.numel())) for part in vector.split(full)]


@cache
def _row_length(size: int) -> int:
    """Largest divisor of ``size`` between `ROW`/2 and `ROW`; `ROW` if it has none."""
    return next((n for n in range(ROW, ROW // 2 - 1, -1) if size % n == 0), ROW)


def _rescaled_norm(tensors: Sequence[Tensor]) -> float:
    """The norm by way of the largest entry: slower, and right from the smallest to the largest float."""
    filled = [tensors[0].new_zeros(1), *[t for t in tensors if t.numel() > 0]]
    largest = torch.stack(torch._foreach_norm(filled, math.inf)).max().item()  # NaN if one is
    if not 0.0 < largest < math.inf:
        return largest
    return largest * math.hypot(*(torch.linalg.vector_norm(t.double() / largest).item() for t in tensors))


def device_norm(tensors: list[Tensor]) -> Tensor:
    """Norm of real, dense tensors of one dtype where no number is read: a device scalar."""
    # Summed in float64 where there is one: then the range needs no check, and a check would wait.
    wide = widest_dtype(tensors[0].device)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors, 2, dtype=wide)))


def _sharded_norm(tensors: list[Any]) -> Tensor:
    """Norm of DTensors with one mesh and placement: each rank's part, then one sum over the ranks."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh = tensors[0].device_mesh
    placements = tuple(Replicate() if p.is_partial() else p for p in tensors[0].placements)
    local = [placed(t, placements).to_local() for t in tensors]
    square = global_norm(local).to(local[0].device) ** 2
    # Asked this way round: FSDP over tensor parallelism has shards whose `is_shard()` is False.
    parts = [Replicate() if p.is_replicate() else Partial() for p in placements]
    return DTensor.from_local(square, mesh, parts, run_check=False).full_tensor().sqrt()
