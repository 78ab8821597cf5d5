"""Devices and processes: Lightning Fabric, kept quiet; sharded models; batch norm over the whole batch."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.loggers.csv_logs import CSVLogger
from lightning_fabric.loggers.logger import Logger
from lightning_fabric.loggers.tensorboard import TensorBoardLogger
from lightning_fabric.plugins.precision.amp import MixedPrecision
from lightning_fabric.plugins.precision.precision import Precision
from lightning_fabric.strategies.ddp import DDPStrategy
from lightning_fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.multiprocessing.spawn import ProcessRaisedException

from curvestep._checks import check_choice, check_count
from curvestep.lab.recipes import LanguageRecipe, Recipe
from curvestep.lab.tasks import share_of_batch

STRATEGIES = ("auto", "ddp", "fsdp")
LOGGERS = ("csv", "tensorboard")

# Here and not in a function: the processes that Fabric starts speak before they call anything of ours.
logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
# Where one process fails the others are ended: that is no news beside the error.
logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)


def make_fabric(
    recipe: Recipe,
    folder: Path,
    *,
    devices: int = 1,
    accelerator: str = "auto",
    strategy: str = "auto",
    loggers: tuple[str, ...] = (),
) -> Fabric:
    """Fabric for one run, or an error in one line if the devices are not here or do not suit the recipe."""
    check_count("devices", devices)
    check_choice("strategy", strategy, STRATEGIES)
    for name in loggers:
        check_choice("loggers", name, LOGGERS)
    if accelerator == "auto":
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    _check_devices(recipe, devices, accelerator, strategy)
    mixed = recipe.precision == "bf16-mixed"
    try:
        return Fabric(
            accelerator=accelerator,
            devices=devices,
            strategy=_strategy(devices, strategy),
            precision=None if mixed else recipe.precision,  # pyright: ignore[reportArgumentType] (checked by the recipe)
            plugins=UnscaledPrecision("bf16-mixed", "cpu" if accelerator == "cpu" else "cuda")
            if mixed
            else None,
            loggers=[_logger(name, folder) for name in loggers],
        )
    except (MisconfigurationException, ValueError) as error:
        raise ValueError(
            f"`devices` {devices} of `accelerator` {accelerator!r} cannot be had: {error}"
        ) from None


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def starts_processes(fabric: Fabric) -> bool:
    """Whether a launch of ``fabric`` starts processes of its own."""
    return fabric.world_size > 1 and not under_torchrun()


def raised_by_process(error: ProcessRaisedException) -> Exception:
    r"""What a process that we started raised, in its own words: torch hands on a traceback as text.

    Example:
        >>> text = "Process 0:\nTraceback (most recent call last):\n  File ...\nValueError: There is no text."
        >>> raised_by_process(ProcessRaisedException(text, 0, 1))
        ValueError('There is no text.')
    """
    last = str(error).rpartition("Traceback (most recent call last):\n")[2].rstrip()
    said = re.search(r"^\S.*", last, re.MULTILINE | re.DOTALL)
    name, _, words = (said.group() if said else last).partition(": ")
    module, _, short = name.rpartition(".")
    kind = getattr(sys.modules.get(module or "builtins"), short, Exception)
    if issubclass(kind, ValueError):
        return ValueError(words)
    if not issubclass(kind, OSError):
        return RuntimeError(f"{name}: {words}")
    of_system = re.fullmatch(r"\[Errno (\d+)\] (.*?)(?:: '(.*)')?", words)
    if of_system is None:
        return OSError(words)
    number, reason, path = of_system.groups()
    return OSError(int(number), reason, path) if path else OSError(int(number), reason)


def gathered(x: Tensor) -> list[Tensor]:
    """``x`` of every process, in the order of ranks."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return parts


class UnscaledPrecision(MixedPrecision):
    """Autocast whose losses need no scaling, so that ``loss.backward()`` is as good as Fabric's own.

    Fabric refuses a backward pass that it does not see where its precision has one of its own; the one of
    mixed precision only scales, for float16. The probe runs backward passes that Fabric does not see.
    """

    backward = Precision.backward


class ShardedStrategy(DDPStrategy):
    """Processes as with DDP; each keeps its part of every parameter (FSDP2) and of the optimizer's state."""

    def setup_module(self, module: nn.Module) -> Any:
        """``module``, every parameter sharded over all processes along its first dimension."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.root_device.type, (dist.get_world_size(),))
        # Only contiguous parameters can be sharded; images keep their channels-last layout.
        module = module.to(memory_format=torch.contiguous_format)  # pyright: ignore[reportCallIssue] (torch's own overloads)
        return fully_shard(module, mesh=mesh, reshard_after_forward=True)


def whole(value: Any) -> Any:
    """``value`` with every sharded tensor in it put together. All processes must take part."""
    if isinstance(value, Mapping):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(whole(item) for item in value)
    return value.full_tensor() if isinstance(value, DTensor) else value


def sharded_like(value: Tensor, like: Tensor) -> Tensor:
    """This process's part of ``value``, sharded as ``like`` is; ``value`` itself if it is not."""
    if not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)


def global_batch_norm(model: nn.Module, device: torch.device) -> nn.Module:
    """``model`` with every batch norm taking its statistics over all processes.

    Torch's own ``SyncBatchNorm`` runs on accelerators only; on the CPU :class:`GlobalBatchNorm2d` does it.
    """
    if device.type != "cpu":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = GlobalBatchNorm2d
    return model


class GlobalBatchNorm2d(nn.BatchNorm2d):
    r"""Batch norm with mean and variance over the batches of all processes together.

    .. math::
        \mu = \frac{1}{N}\sum x, \qquad \sigma^2 = \frac{1}{N}\sum (x - \mu)^2

    with both sums over every process, in two passes so that nothing cancels.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalised input; in evaluation mode, or alone, exactly ``BatchNorm2d``."""
        if not self.training or not dist.is_initialized() or dist.get_world_size() == 1:
            return super().forward(input)
        count = input.numel() / input.shape[1] * dist.get_world_size()
        mean = _sum_over_processes(input.sum((0, 2, 3))) / count
        centred = input - mean.view(1, -1, 1, 1)
        variance = _sum_over_processes(centred.square().sum((0, 2, 3))) / count
        self._remember(mean.detach(), variance.detach() * (count / (count - 1)))
        scale = torch.rsqrt(variance + self.eps)
        if self.affine:
            scale = scale * self.weight
        normalised = centred * scale.view(1, -1, 1, 1)
        return normalised + self.bias.view(1, -1, 1, 1) if self.affine else normalised

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        weight = self.momentum if self.momentum is not None else 1 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean, weight)
        self.running_var.lerp_(variance, weight)


def _sum_over_processes(x: Tensor) -> Tensor:
    total = _AllReduce.apply(x)
    assert isinstance(total, Tensor)
    return total


class _AllReduce(torch.autograd.Function):
    """The sum over processes; every process's loss depends on it, so its gradient is summed too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total)
        return total


def _check_devices(recipe: Recipe, devices: int, accelerator: str, strategy: str) -> None:
    started = int(os.environ["WORLD_SIZE"]) if under_torchrun() else devices
    if devices != started:
        raise ValueError(f"`devices` must be the {started} processes that torchrun started, got {devices}.")
    if accelerator == "cpu":
        cores = max(2, os.cpu_count() or 1)
        if devices > cores and not under_torchrun():
            raise ValueError(f"`devices` must be at most the {cores} cores of this machine, got {devices}.")
    elif accelerator == "cuda" and devices > torch.cuda.device_count():
        raise ValueError(
            f"`devices` must be at most the {torch.cuda.device_count()} GPUs here, got {devices}."
        )
    if strategy == "fsdp" and devices == 1 and not under_torchrun():
        raise ValueError("`strategy` 'fsdp' shares a model among several devices, got `devices` 1.")
    if strategy == "fsdp" and isinstance(recipe, LanguageRecipe) and recipe.averaging != "never":
        raise ValueError(
            f"`strategy` 'fsdp' cannot average a sharded model, got `averaging` {recipe.averaging!r}. Use "
            "'ddp', or set `averaging` to 'never'."
        )
    share_of_batch(recipe, devices)


def _strategy(devices: int, strategy: str) -> Any:
    if strategy == "fsdp":
        return ShardedStrategy(start_method="popen" if under_torchrun() else "spawn")
    if under_torchrun():
        return "ddp"
    return "auto" if devices == 1 else "ddp_spawn"


def _logger(name: str, folder: Path) -> Logger:
    if name == "csv":
        return CSVLogger(root_dir=folder, name="csv")
    return TensorBoardLogger(root_dir=folder, name="tensorboard")
