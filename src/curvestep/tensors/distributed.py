"""Ranks and shards: tensors and decisions that several processes share.

``torch.distributed.tensor`` is imported only where a DTensor is made: it takes longer than the rest of torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from traceback import walk_stack
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def is_sharded(t: Tensor) -> TypeGuard[Any]:
    """Whether ``t`` is a DTensor, spread over several processes."""
    return type(t) is not Tensor and hasattr(t, "placements") and hasattr(t, "device_mesh")


def as_sharded(local: Tensor, like: Tensor) -> Tensor:
    """``local`` as this rank's part of a tensor spread over ranks like ``like``, or as it is."""
    if not is_sharded(like):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False)


def replicated(number: Tensor, like: Tensor) -> Tensor:
    """``number`` as a tensor that every rank of ``like`` has, or as it is."""
    if not is_sharded(like):
        return number
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    return DTensor.from_local(number, mesh, [Replicate()] * mesh.ndim, run_check=False)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor: of a DTensor what all ranks have, else the tensor itself."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def placed(t: Any, placements: tuple[Any, ...]) -> Any:
    """A DTensor spread over the same ranks in this way; itself if it is already."""
    if t.placements == placements:
        return t
    return t.redistribute(t.device_mesh, placements)


def copies(parameters: Iterable[Tensor]) -> list[Tensor]:
    """A copy of each tensor; of a DTensor, a DTensor."""
    return [p.detach().clone() for p in parameters]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: of a DTensor its shard, else the tensor itself. It shares memory."""
    tensor = tensor.detach()
    return tensor.to_local() if is_sharded(tensor) else tensor


def in_zero_redundancy_optimizer() -> bool:
    """Whether a ZeroRedundancyOptimizer makes the caller, for this rank's part of the parameters."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    kind = getattr(module, "ZeroRedundancyOptimizer", None)
    if module is None or kind is None:
        return False
    for frame, _ in walk_stack(None):
        # Of its own frames alone: to ask a frame for its variables keeps them alive as long as it runs.
        if frame.f_code.co_filename == module.__file__:
            caller = frame.f_locals.get("self")
            if isinstance(caller, kind) and getattr(caller, "world_size", 1) > 1:
                return True
    return False


def communicates(model: nn.Module) -> bool:
    """Whether the model is wrapped to be trained by several processes, however many there are."""
    return bool(_data_parallel(model)) or any(is_sharded(p) for p in model.parameters())


def _data_parallel(model: nn.Module) -> list[DistributedDataParallel]:
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def spans_ranks(model: nn.Module) -> bool:
    """Whether a backward pass of the model communicates with other processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and communicates(model)


def any_rank(flag: bool, model: nn.Module) -> bool:
    """Whether ``flag`` holds on any of the ranks that train ``model``."""
    return over_ranks(float(flag), model, mean=False) > 0


def gradients_live_in_buckets(model: nn.Module) -> bool:
    """Whether ``.grad`` shares memory with buckets that the next backward pass of DDP overwrites."""
    return any(wrapper.gradient_as_bucket_view for wrapper in _data_parallel(model))


def from_rank_zero(value: float, model: nn.Module) -> float:
    """Rank 0's value, on all ranks that train ``model``."""
    if not spans_ranks(model):
        return value
    box = _on_device_of(model, value)
    dist.broadcast(box, 0)
    return box.item()


def over_ranks(value: float, model: nn.Module, *, mean: bool) -> float:
    """The mean or the sum of each rank's value."""
    if not spans_ranks(model):
        return value
    box = _on_device_of(model, value)
    dist.all_reduce(box)
    return box.item() / (dist.get_world_size() if mean else 1)


def _on_device_of(model: nn.Module, value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64, device=local(next(model.parameters())).device)


def is_writer(model: nn.Module) -> bool:
    """Whether this process writes files: rank 0, or a process that trains on its own."""
    return not spans_ranks(model) or dist.get_rank() == 0
