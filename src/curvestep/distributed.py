"""Tensors and decisions that several processes share."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


def copies(parameters: Iterable[Tensor]) -> list[Tensor]:
    """A copy of each tensor; of a DTensor, a DTensor."""
    return [p.detach().clone() for p in parameters]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: of a DTensor its shard, else the tensor itself. It shares memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def communicates(model: nn.Module) -> bool:
    """Whether the model is wrapped to be trained by several processes, however many there are."""
    return any(isinstance(module, DistributedDataParallel) for module in model.modules()) or any(
        isinstance(p, DTensor) for p in model.parameters()
    )


def spans_ranks(model: nn.Module) -> bool:
    """Whether a backward pass of the model communicates with other processes."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return False
    return communicates(model)


def any_rank(flag: bool, model: nn.Module) -> bool:
    """Whether ``flag`` holds on any of the ranks that train ``model``."""
    if not spans_ranks(model):
        return flag
    votes = torch.tensor(float(flag), device=local(next(model.parameters())).device)
    dist.all_reduce(votes, dist.ReduceOp.MAX)
    return bool(votes > 0)


def gradients_live_in_buckets(model: nn.Module) -> bool:
    """Whether ``.grad`` shares memory with buckets that the next backward pass of DDP overwrites."""
    wrappers = (m for m in model.modules() if isinstance(m, DistributedDataParallel))
    return any(wrapper.gradient_as_bucket_view for wrapper in wrappers)


def from_rank_zero(value: float, model: nn.Module) -> float:
    """Rank 0's value, on all ranks that train ``model``."""
    if not spans_ranks(model):
        return value
    box = torch.tensor(value, dtype=torch.float64, device=local(next(model.parameters())).device)
    dist.broadcast(box, 0)
    return box.item()


def over_ranks(value: float, model: nn.Module, *, mean: bool) -> float:
    """The mean or the sum of each rank's value."""
    if not spans_ranks(model):
        return value
    box = torch.tensor(value, dtype=torch.float64, device=local(next(model.parameters())).device)
    dist.all_reduce(box)
    return box.item() / (dist.get_world_size() if mean else 1)


def is_writer(model: nn.Module) -> bool:
    """Whether this process writes files: rank 0, or a process that trains on its own."""
    return not spans_ranks(model) or dist.get_rank() == 0
