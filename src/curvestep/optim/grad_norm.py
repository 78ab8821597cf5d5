r"""``clip_grad_norm_`` with torch's signature, for gradients that lie on any number of device meshes."""
# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false
# torch names its functions for lists of tensors with an underscore.

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from curvestep.checks import check_nonnegative
from curvestep.tensors.distributed import is_sharded, local, placed
from curvestep.tensors.vectors import global_norm, on_one_device, widest_dtype

AGREEMENT = 1e-6  # relative, of what the ranks of a mesh take for the norm
_NAN = -math.inf  # stands for NaN where ranks compare their norms


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    r"""Scale the gradients of ``parameters`` in place so that their joint norm is at most ``max_norm``.

    .. math::
        g \leftarrow g \cdot \min\{1,\ \gamma / \lVert g \rVert_p\}

    A replacement for :func:`torch.nn.utils.clip_grad_norm_`, which raises where DTensors have different
    meshes or are mixed with plain tensors (pytorch#180346). Here dense, sparse, complex, half-precision and
    sharded gradients count alike. Every rank must call, as with torch.

    Args:
        parameters: The parameters, or one. Those without a gradient are left out.
        max_norm: The largest norm :math:`\gamma \ge 0` that the gradient may have.
        norm_type: The order :math:`p > 0` of the norm; ``inf`` for the largest entry.
        error_if_nonfinite: Raise, and change nothing, if the norm is infinite or NaN. Else the gradients are
            multiplied by what that makes of the factor, zero or NaN, as by torch.
        foreach: Accepted for calls that were written for torch; the result does not depend on it.

    Returns:
        The norm of the whole gradient before clipping, the same bits on every rank. A plain scalar tensor,
        never a DTensor.

    Raises:
        RuntimeError: the ranks of a mesh have different norms, thresholds or numbers of gradients, or the
            norm is negative. Nothing was changed.

    Note:
        torch divides by ``norm + 1e-6``, here nothing is added to the norm. With DTensors the norm is read,
        which waits for an accelerator.

    Example:
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> (0.5 * w**2).sum().backward()  # the gradient is w, of norm 5
        >>> clip_grad_norm_([w], max_norm=1.0).item()
        5.0
        >>> w.grad
        tensor([0.6000, 0.8000])
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not params and isinstance(parameters, Iterator):
        warnings.warn("`parameters` is an iterator that has ended, so nothing is clipped.", stacklevel=2)
    bound = max_norm if max_norm == math.inf else check_nonnegative("max_norm", max_norm)
    order = float(norm_type)
    if not order > 0:
        raise ValueError(f"`norm_type` must be positive or inf, got {norm_type!r}.")
    gradients = [p.grad for p in params if p.grad is not None]
    meshes = _meshes_of(params)
    for mesh in meshes:
        shards = [gradient for gradient in gradients if _mesh_of(gradient) == mesh]
        _check_calls_agree(mesh, {"max_norm": bound, "norm_type": order, "gradients": float(len(shards))})
    norm = _norm(gradients, order)
    for mesh in meshes:
        norm = _agreed(norm, mesh)
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(
            f"The norm of the gradients is {float(norm)}, so they cannot be clipped. "
            "Nothing was changed. With `error_if_nonfinite=False` they are scaled anyway."
        )
    # Not a clamp: a threshold of zero and a norm of zero would give NaN.
    _scale_(gradients, torch.where(norm <= bound, torch.ones_like(norm), bound / norm))
    return norm


def _scale_(gradients: Sequence[Tensor], coefficient: Tensor) -> None:
    """Multiply the gradients in place."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        entries = _entries_in_place(local(gradient))
        by_device.setdefault(entries.device, []).append(entries)
    for device, entries_here in by_device.items():
        if device.type != "cpu":
            torch._foreach_mul_(entries_here, coefficient.to(device))
        elif coefficient != 1.0:
            torch._foreach_mul_(entries_here, float(coefficient))


def _entries_in_place(gradient: Tensor) -> Tensor:
    """The entries of a gradient, in its own memory; a product with a sparse tensor would be a new one."""
    if gradient.layout == torch.strided:
        return gradient
    return gradient._values() if gradient.layout == torch.sparse_coo else gradient.values()


def _norm(gradients: Sequence[Tensor], order: float) -> Tensor:
    """The norm of this order, of all gradients as one vector."""
    if order == 2.0 or not gradients:
        return global_norm(gradients)
    largest = _joint(gradients, math.inf)
    if order == math.inf:
        return largest
    # In units of the largest entry: no power overflows, and none that matters vanishes.
    unit = torch.where((largest > 0) & largest.isfinite(), largest, torch.ones_like(largest))
    return unit * _joint(gradients, order, unit) ** (1 / order)


def _joint(gradients: Sequence[Tensor], order: float, unit: Tensor | None = None) -> Tensor:
    r"""The largest :math:`|g_i|`, or :math:`\sum_i |g_i / u|^p`, over all gradients and ranks."""
    plain: list[Tensor] = []
    of_shards: dict[tuple[Any, tuple[bool, ...]], list[Tensor]] = {}
    for gradient in gradients:
        if is_sharded(gradient):
            placements = tuple(_without_partial(gradient.placements))
            key = (gradient.device_mesh, tuple(p.is_replicate() for p in placements))
            part = _of_entries(placed(gradient, placements).to_local(), order, unit)
            of_shards.setdefault(key, []).append(part)
        else:
            plain.append(_of_entries(gradient, order, unit))
    wholes = [_over_mesh(_sum_or_max(parts, order), order, *key) for key, parts in of_shards.items()]
    return _sum_or_max([*plain, *wholes], order)


def _sum_or_max(numbers: list[Tensor], order: float) -> Tensor:
    together = torch.stack(on_one_device(numbers))
    return together.amax() if order == math.inf else together.sum()


def _of_entries(gradient: Tensor, order: float, unit: Tensor | None) -> Tensor:
    """The largest entry, or the sum of the powers, of one plain tensor."""
    if gradient.layout == torch.sparse_coo:
        gradient = gradient.coalesce()
    entries = gradient if gradient.layout == torch.strided else gradient.values()
    sizes = entries.abs().to(widest_dtype(entries.device))
    if order == math.inf:
        return sizes.amax() if sizes.numel() else sizes.new_zeros(())
    assert unit is not None
    return ((sizes / unit.to(sizes.device)) ** order).sum()


def _without_partial(placements: Sequence[Any]) -> list[Any]:
    """The placements once what is still to be summed over ranks is summed."""
    from torch.distributed.tensor import Replicate

    return [Replicate() if p.is_partial() else p for p in placements]


def _over_mesh(part: Tensor, order: float, mesh: Any, are_copies: tuple[bool, ...]) -> Tensor:
    """The sum or the largest of each rank's part; along some dimensions of the mesh these are copies."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    reduced = Partial("max" if order == math.inf else "sum")
    parts = [Replicate() if is_copy else reduced for is_copy in are_copies]
    return DTensor.from_local(part, mesh, parts, run_check=False).full_tensor()


def _mesh_of(tensor: Any) -> Any:
    """The mesh of a DTensor's ranks, else None."""
    return tensor.device_mesh if is_sharded(tensor) else None


def _meshes_of(params: Sequence[Tensor]) -> list[Any]:
    """The meshes of the parameters, each once, in an order that all ranks have."""
    meshes: list[Any] = []
    for p in params:
        mesh = _mesh_of(p)
        if mesh is not None and mesh not in meshes:
            meshes.append(mesh)
    return meshes


def _limits_over(mesh: Any, values: Sequence[float]) -> tuple[list[float], list[float]]:
    """The smallest and the largest value that a rank of the mesh has, of each of these."""
    from torch.distributed.tensor import DTensor, Partial

    both = [*values, *(-value for value in values)]
    numbers = torch.tensor(both, dtype=widest_dtype(torch.device(mesh.device_type)), device=mesh.device_type)
    parts = [Partial("max")] * mesh.ndim
    reduced = DTensor.from_local(numbers, mesh, parts, run_check=False).full_tensor()
    largest = [number.item() for number in reduced]
    return [-value for value in largest[len(values) :]], largest[: len(values)]


def _check_calls_agree(mesh: Any, values: dict[str, float]) -> None:
    """Raise unless the ranks ask for one thing: one that computes more norms would wait for the others."""
    lows, highs = _limits_over(mesh, list(values.values()))
    for name, low, high in zip(values, lows, highs, strict=True):
        if low != high:
            raise RuntimeError(
                f"The ranks call clip_grad_norm_ with different {name}: {low:g} to {high:g}. "
                "Nothing was changed."
            )


def _agreed(norm: Tensor, mesh: Any) -> Tensor:
    """The norm that all ranks of the mesh have, to the last bit."""
    value = float(norm)
    [low], [high] = _limits_over(mesh, [_NAN if math.isnan(value) else value])
    if low != high and not high - low <= AGREEMENT * abs(high):
        raise RuntimeError(
            f"The ranks have different norms of the gradient, {low:g} to {high:g}: their plain "
            "gradients differ. Average these over the ranks before clipping. Nothing was changed."
        )
    if high < 0 and high != _NAN:
        raise RuntimeError(
            f"The norm of the gradient is negative, {high:g}: a reduction over ranks is broken. Nothing was "
            "changed."
        )
    return torch.full_like(norm, math.nan if high == _NAN else high)
