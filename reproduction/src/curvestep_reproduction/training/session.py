"""Everything that changes while a run trains, and how it is saved and brought back.

A checkpoint holds the parameters, buffers and optimizer, the states of the random generators, the recurrent
state, and the length that each row file had: on resume the files are cut there, so that no row is missing and
none is twice, and the run goes on bit for bit. It is tensors and plain numbers only, read with
``torch.load(weights_only=True)``, and replaced atomically: a run that is killed while it writes keeps the one
before.
"""

from __future__ import annotations

import errno
import os
import pickle
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import curvestep
from curvestep import ClippedAdamW, ClippedSGD, GradientOracle, NormalizedSGD, SmoothnessProbe
from curvestep.files import RowFile, replace_atomically
from curvestep.trace.run import METRICS, TRACE, Fields
from curvestep_reproduction.models import State
from curvestep_reproduction.recipes import Recipe
from curvestep_reproduction.tasks import LanguageTask, Task, seed_of
from curvestep_reproduction.training.devices import all_gather
from curvestep_reproduction.training.run_folder import CHECKPOINT, TrainedRun, synced_length

if TYPE_CHECKING:
    from lightning_fabric import Fabric

VERSION = 1
_FORMAT = "curvestep-checkpoint"
_UNREADABLE = (pickle.UnpicklingError, zipfile.BadZipFile, zlib.error)
_KINDS: dict[str, type | tuple[type, ...]] = {
    **{"step": int, "data": str, "first_loss": (float, type(None)), "lengths": dict},
    **{"model": dict, "optimizer": dict, "random": dict, "state": object, "probe": (dict, type(None))},
}


class Session:
    """Model, optimizer, probe, recurrent state and row files of one process of a run."""

    def __init__(self, fabric: Fabric, run: TrainedRun, task: Task) -> None:
        self.fabric = fabric
        self.run = run
        self.task = task
        recipe = run.recipe
        self.module = module = task.build()
        self.num_parameters = sum(p.numel() for p in module.parameters())
        self.model = fabric.setup_module(module)
        self.raw_optimizer = make_optimizer(recipe, module)
        self.optimizer: Any = fabric.setup_optimizers(self.raw_optimizer)
        self.step = 0
        self.state: Any = None
        self.first_loss: float | None = None
        torch.manual_seed(seed_of(recipe, f"dropout/{fabric.global_rank}"))
        path = run.folder / CHECKPOINT
        lengths = {METRICS: 0, TRACE: 0}
        saved = load_checkpoint(path) if path.exists() else None
        if saved:
            lengths = saved["lengths"]
            before = saved["data"]
            now = task.data_name
            if before != now:
                raise ValueError(
                    f"{run.folder} was trained on {before}, now there is {now}: it cannot be resumed. Choose "
                    "another folder."
                )
        self.metrics: RowFile | None = None
        if fabric.is_global_zero:
            for name in (METRICS, TRACE):
                truncate_rows(run.folder / name, lengths[name])
            self.metrics = RowFile(run.folder / METRICS)
        fabric.barrier()
        self.probe = make_probe(recipe, task, self.model, run.trace_path, fabric)
        if saved:
            self._restore(saved)

    def loss(self, batch: Any, state: Any) -> tuple[Tensor, Any]:
        """The training loss of a batch and the state after it, in the recipe's precision."""
        mixed = self.run.recipe.precision == "bf16-mixed"
        with torch.autocast(self.fabric.device.type, torch.bfloat16, enabled=mixed):
            return self.task.loss(self.model, batch, state)

    def save(self) -> None:
        """Replace the checkpoint by what is true now."""
        gathered = {
            # For all streams, whichever process has them; the streams are dimension 1.
            "state": map_state(lambda tensor: torch.cat(all_gather(tensor), dim=1), self.state),
            "random": {name: torch.stack(all_gather(value)) for name, value in random_state().items()},
            "model": self.module.state_dict(),
            "optimizer": self.raw_optimizer.state_dict(),
        }
        if not self.fabric.is_global_zero:
            return
        # A probe goes on without a disk; a checkpoint after lost rows would leave a gap in the trace.
        path = self.run.trace_path
        if self.probe and path.exists() and path.read_bytes().count(b"\n") <= len(self.probe.trace):
            raise OSError(errno.ENOSPC, "not all measurements could be written", str(path))
        content = {
            **gathered,
            "step": self.step,
            "data": self.task.data_name,
            "probe": self.probe and self.probe.state_dict(),
            "first_loss": self.first_loss,
            "lengths": {name: synced_length(self.run.folder / name) for name in (METRICS, TRACE)},
        }
        save_checkpoint(self.run.folder / CHECKPOINT, content)

    def write(self, row: Fields) -> None:
        """Append a row to the metrics, on the first process."""
        if self.metrics is not None:
            self.metrics.append(row)

    def close(self) -> None:
        """Close the row files."""
        if self.metrics is not None:
            self.metrics.close()
        if self.probe is not None:
            self.probe.close()

    def _restore(self, saved: Fields) -> None:
        self.module.load_state_dict(saved["model"])
        self.raw_optimizer.load_state_dict(saved["optimizer"])
        if self.probe:
            self.probe.load_state_dict(saved["probe"])
        self.step = saved["step"]
        self.first_loss = saved["first_loss"]
        mine = self.task.mine
        device = self.fabric.device
        self.state = map_state(lambda tensor: tensor[:, mine].contiguous().to(device), saved["state"])
        rank = self.fabric.global_rank
        if rank < len(saved["random"]["cpu"]):
            # A copy: torch crashes on a state that begins inside another tensor's memory.
            set_random_state({name: value[rank].clone() for name, value in saved["random"].items()})


def make_optimizer(recipe: Recipe, module: nn.Module) -> ClippedSGD | NormalizedSGD | ClippedAdamW:
    """The optimizer of ``recipe``. A gradient that is not finite goes through: the loop calls it diverged."""
    rule = recipe.rule
    options: Fields = {name: getattr(recipe, name) for name in rule.others}
    options["nonfinite"] = "propagate"
    make = getattr(curvestep, rule.optimizer)
    return make(module.parameters(), recipe.lr, recipe.threshold, **options)


def map_state(change: Callable[[Tensor], Tensor], state: State | None) -> State | None:
    """A recurrent state with every tensor changed."""
    if state is None:
        return None
    return tuple((change(hidden), change(cell)) for hidden, cell in state)


def make_probe(
    recipe: Recipe, task: Task, model: nn.Module, path: Path, fabric: Fabric
) -> SmoothnessProbe | None:
    """The probe of ``recipe``, or None if it measures nothing."""
    if recipe.probe_every == 0:
        return None
    estimators = {"smoothness": 1}
    if recipe.spectral_every:
        estimators["spectral_smoothness"] = recipe.spectral_every
    probe = SmoothnessProbe(
        model,
        every=recipe.probe_every,
        fractions=recipe.fractions,
        estimators=estimators,
        oracle=make_oracle(recipe, task, model, fabric),
        trace=path,
        num_steps=recipe.steps or None,
    )
    probe.schedule.next = recipe.probe_from
    return probe


def make_oracle(recipe: Recipe, task: Task, model: nn.Module, fabric: Fabric) -> GradientOracle | None:
    """The data that the probe measures on; None is the training batch."""
    if isinstance(task, LanguageTask) and task.recipe.probe_pieces:
        pieces = fabric.to_device(task.stacked_pieces(task.recipe.probe_pieces))
        return GradientOracle(partial(task.loss_of_pieces, model), [pieces])
    if recipe.probe_data == 0:
        return None
    batches = [fabric.to_device(batch) for batch in task.oracle_batches(recipe.probe_data)]
    sizes = [float(target.numel()) for _, target in batches]
    return GradientOracle(partial(task.loss, model), batches, sizes=sizes, carry_state=True)


def save_checkpoint(path: Path, state: Fields) -> None:
    """Replace the checkpoint at ``path`` by ``state``; the old one stays if the disk is full."""
    content = {"format": _FORMAT, "version": VERSION, **state}
    try:
        replace_atomically(path, lambda file: torch.save(content, file))
    except RuntimeError as error:  # torch's way to say that a write failed
        raise OSError(
            f"The checkpoint {path} could not be written ({error}); the one before is kept."
        ) from error


def load_checkpoint(path: Path) -> Fields:
    """The state in ``path``, on the CPU; an error in one line if it is damaged, foreign or newer."""
    corrupt = ValueError(f"{path} is corrupt or is no checkpoint. Delete it to start the run again.")
    try:
        with zipfile.ZipFile(path) as archive:  # torch itself does not look at its checksums
            if archive.testzip() is not None:
                raise ValueError
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (FileNotFoundError, PermissionError):
        raise
    except (OSError, RuntimeError, EOFError, LookupError, ValueError, TypeError, *_UNREADABLE):
        raise corrupt from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError(f"{path} is not a checkpoint of curvestep. Delete it to start the run again.")
    version = content.get("version")
    if version != VERSION:
        raise ValueError(
            f"{path} has version {version}, this curvestep reads up to {VERSION}. Update curvestep."
        )
    if not all(name in content and isinstance(content[name], kind) for name, kind in _KINDS.items()):
        raise corrupt
    return content


def random_state() -> dict[str, Tensor]:
    """States of torch's global generators: the CPU's, and each GPU's."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        for i, state in enumerate(torch.cuda.get_rng_state_all()):
            states[f"accelerator:{i}"] = state
    return states


def set_random_state(states: dict[str, Tensor]) -> None:
    """Go back to what :func:`random_state` returned; a device that it does not know keeps its state."""
    torch.set_rng_state(states["cpu"])
    for i in range(torch.cuda.device_count()):
        if f"accelerator:{i}" in states:
            torch.cuda.set_rng_state(states[f"accelerator:{i}"], i)


def truncate_rows(path: Path, length: int) -> None:
    """Cut a row file to the length that a checkpoint recorded: what came later is written again."""
    size = synced_length(path)
    if size < length:
        raise ValueError(f"{path} has {size} bytes, its checkpoint was written at {length}: rows were lost.")
    if size > length:
        os.truncate(path, length)
