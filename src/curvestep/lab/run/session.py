"""Everything that changes while a run trains, and how it is saved and brought back."""

from __future__ import annotations

import errno
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from curvestep.lab.recipes import LanguageRecipe, Recipe
from curvestep.lab.run.averaging import NonMonotoneAveraging
from curvestep.lab.run.checkpoint import (
    load_checkpoint,
    random_state,
    save_checkpoint,
    set_random_state,
    truncate_rows,
)
from curvestep.lab.run.devices import all_gather, full_tensors, shard_like
from curvestep.lab.run.folder import CHECKPOINT, METRICS, TRACE, RowFile, Run, synced_length
from curvestep.lab.tasks import Task, map_state, seed_of
from curvestep.optim import ClippedSGD, NormalizedSGD
from curvestep.smoothness.oracle import GradientOracle
from curvestep.smoothness.probe import SmoothnessProbe


class Session:
    """Model, optimizer, probe, recurrent state, average and row files of one process of a run.

    Args:
        fabric: Devices and processes; launched.
        run: The run folder.
        task: The task of the run's recipe.
    """

    def __init__(self, fabric: Fabric, run: Run, task: Task) -> None:
        self.fabric, self.run, self.task = fabric, run, task
        recipe = run.recipe
        module = load_start(recipe, task.build())
        if fabric.world_size > 1 and fabric.device.type != "cpu":
            module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
        self.module = module
        self.num_parameters = sum(p.numel() for p in module.parameters())
        self.model = fabric.setup_module(module)
        # Not before: sharding puts other parameters in the module's place.
        self.raw_optimizer = make_optimizer(recipe, module)
        self.optimizer: Any = fabric.setup_optimizers(self.raw_optimizer)
        self.averaging = make_averaging(recipe, module)
        self.step = 0
        self.state: Any = None
        self.first_loss: float | None = None
        torch.manual_seed(seed_of(recipe, f"dropout/{fabric.global_rank}"))
        saved = self._load() if (run.folder / CHECKPOINT).exists() else None
        if fabric.is_global_zero:
            for name in (METRICS, TRACE):
                truncate_rows(run.folder / name, saved["lengths"][name] if saved else 0)
        fabric.barrier()
        self.probe = make_probe(recipe, task, self.model, run.trace_path, fabric)
        if saved:
            self._restore(saved)
        self.metrics = RowFile(run.folder / METRICS) if fabric.is_global_zero else None

    def save(self) -> None:
        """Replace the checkpoint by what is true now."""
        gathered = {
            "state": self._gather(self.state),
            "random": {name: self._stack(value) for name, value in random_state().items()},
            "model": full_tensors(self.module.state_dict()),
            "optimizer": full_tensors(self.raw_optimizer.state_dict()),
        }
        if not self.fabric.is_global_zero:
            return
        self._check_trace()
        content = {
            **gathered,
            "step": self.step,
            "data": self.task.data_name,
            "probe": self.probe.state_dict() if self.probe else None,
            "averaging": self.averaging.state_dict() if self.averaging else None,
            "first_loss": self.first_loss,
            "lengths": {name: synced_length(self.run.folder / name) for name in (METRICS, TRACE)},
        }
        save_checkpoint(self.run.folder / CHECKPOINT, content)

    def _check_trace(self) -> None:
        """A probe goes on without a disk; a checkpoint after lost rows would leave a gap in the trace."""
        path = self.run.trace_path
        if self.probe and path.exists() and path.read_bytes().count(b"\n") <= len(self.probe.trace):
            raise OSError(errno.ENOSPC, "not all measurements could be written", str(path))

    def close(self) -> None:
        """Close the row files and the loggers."""
        for logger in self.fabric.loggers:
            logger.finalize("success")
        if self.metrics is not None:
            self.metrics.close()
        if self.probe is not None:
            self.probe.close()

    def _load(self) -> dict[str, Any]:
        saved = load_checkpoint(self.run.folder / CHECKPOINT)
        if saved["data"] != self.task.data_name:
            raise ValueError(
                f"{self.run.folder} was trained on {saved['data']}, now there is {self.task.data_name}: it "
                "cannot be resumed. Choose another folder."
            )
        return saved

    def _restore(self, saved: dict[str, Any]) -> None:
        now = self.module.state_dict()
        self.module.load_state_dict(
            {name: shard_like(value, now[name]) for name, value in saved["model"].items()}
        )
        self.raw_optimizer.load_state_dict(self._sharded_optimizer(saved["optimizer"]))
        if self.probe:
            self.probe.load_state_dict(saved["probe"])
        if self.averaging:
            self.averaging.load_state_dict(saved["averaging"])
        self.step, self.first_loss = saved["step"], saved["first_loss"]
        mine = self.task.mine
        device = self.fabric.device
        self.state = map_state(lambda t: t[:, mine].contiguous().to(device), saved["state"])
        rank = self.fabric.global_rank
        if rank < len(saved["random"]["cpu"]):
            # A copy: torch crashes on a state that begins inside another tensor's memory.
            set_random_state({name: value[rank].clone() for name, value in saved["random"].items()})

    def _sharded_optimizer(self, saved: dict[str, Any]) -> dict[str, Any]:
        """A whole optimizer state, each tensor of it sharded as the parameter that it belongs to."""
        params = [p for group in self.raw_optimizer.param_groups for p in group["params"]]
        state = {
            index: {
                name: shard_like(v, params[index]) if isinstance(v, Tensor) else v for name, v in of.items()
            }
            for index, of in saved["state"].items()
        }
        return {**saved, "state": state}

    def _gather(self, state: Any) -> Any:
        """A recurrent state for all streams, whichever process has them; the streams are dimension 1."""
        if self.fabric.world_size == 1:
            return state
        return map_state(lambda tensor: torch.cat(all_gather(tensor), dim=1), state)

    def _stack(self, value: Tensor) -> Tensor:
        return value[None] if self.fabric.world_size == 1 else torch.stack(all_gather(value))


def make_optimizer(recipe: Recipe, module: nn.Module) -> ClippedSGD | NormalizedSGD:
    """The optimizer of ``recipe``. A gradient that is not finite goes through: the loop calls it diverged."""
    common: dict[str, Any] = {
        "momentum": recipe.momentum,
        "weight_decay": recipe.weight_decay,
        "nonfinite": "propagate",
    }
    if recipe.optimizer == "normalized":
        return NormalizedSGD(module.parameters(), recipe.lr, recipe.offset, **common)
    return ClippedSGD(module.parameters(), recipe.lr, recipe.max_norm, **common)


def make_averaging(recipe: Recipe, module: nn.Module) -> NonMonotoneAveraging | None:
    """The averaging of ``recipe``, or None if it never averages."""
    if not isinstance(recipe, LanguageRecipe) or recipe.averaging == "never":
        return None
    return NonMonotoneAveraging(module, window=recipe.patience, start=recipe.averaging == "always")


def make_probe(
    recipe: Recipe, task: Task, model: nn.Module, path: Path, fabric: Fabric
) -> SmoothnessProbe | None:
    """The probe of ``recipe``, or None if it measures nothing."""
    if recipe.probe_every == 0:
        return None
    oracle = None
    if recipe.probe_data:
        oracle = make_oracle(task, model, recipe.probe_data, fabric)
    probe = SmoothnessProbe(
        model, every=recipe.probe_every, fractions=recipe.fractions, oracle=oracle, trace=path
    )
    probe.schedule.next = recipe.probe_from
    return probe


def make_oracle(task: Task, model: nn.Module, share: float, fabric: Fabric) -> GradientOracle:
    """The gradient on a fixed share of the training data."""
    batches = [fabric.to_device(batch) for batch in task.oracle_batches(share)]
    sizes = [float(target.numel()) for _, target in batches]
    return GradientOracle(partial(task.loss, model), batches, sizes=sizes, carry_state=True)


def load_start(recipe: Recipe, module: nn.Module) -> nn.Module:
    """``module`` with the parameters of the run that the recipe starts from, averaged ones if it has them."""
    if isinstance(recipe, LanguageRecipe) and recipe.start_from:
        saved = load_checkpoint(Path(recipe.start_from) / CHECKPOINT)
        average = (saved["averaging"] or {}).get("average") or {}
        prefix = "module."
        averaged = {k.removeprefix(prefix): v for k, v in average.items() if k.startswith(prefix)}
        module.load_state_dict(averaged or saved["model"])
    return module
