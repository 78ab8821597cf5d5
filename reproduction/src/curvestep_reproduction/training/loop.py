"""The training loop: one recipe, one run folder."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.spawn import ProcessRaisedException

from curvestep.checks import check_count, check_nonnegative
from curvestep.trace.history import final_loss
from curvestep.trace.run import (
    DIVERGED,
    ENDED,
    FAILED,
    FINISHED,
    INTERRUPTED,
    PART,
    RUNNING,
    last_step,
    read_status,
)
from curvestep_reproduction.progress import Progress, error_line
from curvestep_reproduction.recipes import Recipe
from curvestep_reproduction.tasks import make_task
from curvestep_reproduction.training.controls import measured_beside
from curvestep_reproduction.training.devices import (
    ignore_sigint,
    make_fabric,
    raised_by_process,
    run_context,
    stop_signal,
)
from curvestep_reproduction.training.run_folder import (
    RunResult,
    TrainedRun,
    has_ended,
    locked,
    open_run,
    space_in,
    write_status,
)
from curvestep_reproduction.training.session import Session

if TYPE_CHECKING:
    from lightning_fabric import Fabric

KEPT = "The run so far is kept: free space, then `--resume`."


def train(
    recipe: Recipe,
    folder: str | Path,
    *,
    resume: bool = False,
    progress: bool = True,
    devices: int = 1,
    checkpoint_seconds: float = 60.0,
    threads: int | None = None,
    offline: bool = False,
) -> RunResult:
    """Train ``recipe`` and keep everything in ``folder``.

    A run that was killed goes on with ``resume=True`` as if nothing had happened: on the CPU its parameters,
    metrics and trace end bit for bit as those of a run never killed. Ctrl-C ends with a checkpoint. A run
    that diverges is a result: it ends with the status ``diverged`` and keeps its rows.

    Args:
        recipe: What to train; see :func:`curvestep_reproduction.recipes.get_recipe`.
        folder: The run folder: new, or with ``resume`` that of the same recipe.
        resume: Go on from the folder's checkpoint, or start if there is none.
        progress: Show a live line (plain lines without a terminal).
        devices: Processes that share each batch, on GPUs if there are any; must divide ``batch_size``.
        checkpoint_seconds: Time between two checkpoints.
        threads: Torch threads of each process; None leaves them alone.
        offline: Use no network for the data.
    """
    check_nonnegative("checkpoint_seconds", checkpoint_seconds)
    if threads is not None:
        check_count("threads", threads)
    folder = Path(folder)
    fabric = make_fabric(recipe, devices=devices)
    if has_ended(folder):
        return open_run(folder, recipe, resume=resume).result  # reads only: the folder need not be writable
    with space_in(folder, KEPT), locked(folder), ignore_sigint(fabric):
        run = open_run(folder, recipe, resume=resume)
        process = partial(
            _train,
            run=run,
            progress=progress,
            checkpoint_seconds=checkpoint_seconds,
            threads=threads,
            offline=offline,
        )
        _launch(fabric, run, process)
    return TrainedRun.load(folder).result


def _launch(fabric: Fabric, run: TrainedRun, process: Callable[[Fabric], None]) -> None:
    """Train on every process; what one of them raises is raised here and left in ``status.json``."""
    start = time.monotonic()
    try:
        try:
            fabric.launch(process)
        except ProcessRaisedException as error:
            raise raised_by_process(error) from error
    except BaseException as error:
        values = {
            **read_status(run.folder, run.status),
            "status": FAILED,
            "step": last_step(run.folder),
            "seconds": run.status.get("seconds", 0.0) + time.monotonic() - start,
            "message": error_line(error),
        }
        with suppress(OSError):  # a full disk has no space for this either
            write_status(run.folder, **values)
        raise


def _train(
    fabric: Fabric,
    run: TrainedRun,
    *,
    progress: bool,
    checkpoint_seconds: float,
    threads: int | None,
    offline: bool,
) -> None:
    """One process of a run, from the start or the checkpoint to the end."""
    if run.status["status"] in ENDED:
        return
    recipe = run.recipe
    with space_in(run.folder, KEPT), run_context(recipe, threads=threads), stop_signal() as stop:
        task = make_task(recipe, rank=fabric.global_rank, world_size=fabric.world_size, offline=offline)
        session = Session(fabric, run, task)
        status_file = _StatusFile(run, session, checkpoint_seconds)
        total = task.num_steps()
        title = f"{recipe.name} {recipe.label}"
        shown = progress and fabric.is_global_zero
        with closing(session), Progress(title, total, start=session.step, shown=shown) as bar:
            status_file.write(RUNNING)
            status, message = _loop(session, total, status_file, stop, bar)
        status_file.write(status, message)
        fabric.barrier()


def _loop(
    session: Session, total: int, status_file: _StatusFile, stop: threading.Event, progress: Progress
) -> tuple[str, str]:
    """Train until the last step, divergence, or a signal; the status and its reason."""
    fabric = session.fabric
    task = session.task
    recipe = session.run.recipe
    model = session.model
    optimizer = session.optimizer
    probe = session.probe
    # Both begin anew with each row, and a checkpoint is only taken after one: they need no place in it.
    loss_sum = torch.zeros((), device=fabric.device)
    steps_summed = 0
    model.train()
    while session.step < total:
        step = session.step
        batch = fabric.to_device(task.batch(step))
        state = None if task.starts_over(step) else session.state
        for group in session.raw_optimizer.param_groups:
            drops = sum(step / total >= share for share in recipe.lr_drops)
            group["lr"] = recipe.lr * 0.1**drops * task.lr_factor(step)

        def loss_of_batch(batch: Any = batch, state: Any = state) -> torch.Tensor:
            return session.loss(batch, state)[0]

        loss, session.state = session.loss(batch, state)
        fabric.backward(loss)
        size = batch[1].numel() * fabric.world_size
        measuring = probe(loss_of_batch, loss=loss, batch_size=size) if probe else nullcontext()
        with measured_beside(session, total), measuring:
            optimizer.step()
        optimizer.zero_grad()
        session.step += 1
        loss_sum += loss.detach()
        steps_summed += 1

        over = session.step == total
        evaluating = over or _is_multiple(session.step, recipe.eval_every)
        if not evaluating and not _is_multiple(session.step, recipe.log_every):
            continue
        # Only here is the device waited for.
        reason = _record(session, loss_sum / steps_summed, progress)
        loss_sum.zero_()
        steps_summed = 0
        if reason:
            return DIVERGED, reason
        if evaluating:
            _evaluate(session, task.splits[:1], recipe.eval_part)
        if over:
            _evaluate(session, task.splits if recipe.eval_part < 1 else task.splits[1:])
        # All processes stop, or save, at the same step.
        stopping, saving = (
            fabric.strategy.reduce_boolean_decision(wish, all=False)
            for wish in (stop.is_set(), status_file.checkpoint_is_due())
        )
        if over or stopping or saving:
            session.save()
            status_file.checkpoint_written()
        if stopping and not over:
            return INTERRUPTED, "stopped by a signal; resume it"
    return FINISHED, ""


def _record(session: Session, loss: torch.Tensor, progress: Progress) -> str:
    """Write the row of this step; the reason if the run has diverged."""
    recipe = session.run.recipe
    fabric = session.fabric
    reduced = fabric.all_reduce(loss, reduce_op="mean")
    assert isinstance(reduced, torch.Tensor)
    value = float(reduced)
    stats = session.raw_optimizer.clip_stats()
    if session.first_loss is None:
        session.first_loss = value
    row = {
        "step": session.step,
        "split": "train",
        "loss": value,
        "grad_norm": stats["grad_norm"],
        "coefficient": stats["coefficient"],
        "lr": session.raw_optimizer.param_groups[0]["lr"],
    }
    session.write(row)
    numbers = {"loss": value}
    if session.task.metric == "perplexity":
        numbers["perplexity"] = math.exp(min(value, 700.0))
    numbers |= {"grad_norm": stats["grad_norm"], "clipped_percent": 100 * stats["clipped_fraction"]}
    progress.update(session.step, **numbers)
    if not math.isfinite(value + stats["grad_norm"]):
        return f"the loss or the gradient is not finite at step {session.step}"
    if value > recipe.diverged_above * session.first_loss:
        return f"the loss passed {recipe.diverged_above:g} times the first one at step {session.step}"
    return ""


def _evaluate(session: Session, splits: tuple[str, ...], share: float = 1.0) -> None:
    """Write a row for each split, evaluated on this share of it."""
    session.model.eval()
    for split in splits:
        values = session.task.evaluate(session.model, split, session.fabric.device, share=share)
        name = split if share == 1 else f"{split}{PART}"
        session.write({"step": session.step, "split": name, **values})
    session.model.train()


class _StatusFile:
    """Keeps the time of a run and its ``status.json``."""

    def __init__(self, run: TrainedRun, session: Session, interval: float) -> None:
        self._run = run
        self._session = session
        self._interval = interval
        self._before = float(run.status.get("seconds", 0.0))
        self._start = self._last = time.monotonic()

    def checkpoint_is_due(self) -> bool:
        """Whether it is time for a checkpoint."""
        return time.monotonic() - self._last >= self._interval

    def checkpoint_written(self) -> None:
        """Start counting the time to the next one."""
        self._last = time.monotonic()
        self.write(RUNNING)

    def write(self, status: str, message: str = "") -> None:
        """Replace ``status.json``."""
        session = self._session
        if not session.fabric.is_global_zero:
            return
        train_loss = math.nan
        metrics = {}
        if status != RUNNING:
            run = TrainedRun.load(self._run.folder)
            for row in [*run.rows("valid")[-1:], *run.rows("test")[-1:]]:
                metrics[row["split"]] = {k: v for k, v in row.items() if k not in ("step", "split")}
            if status != DIVERGED:
                train_loss = final_loss(*run.column("loss"))
        write_status(
            self._run.folder,
            status=status,
            step=session.step,
            train_loss=train_loss,
            metrics=metrics,
            num_parameters=session.num_parameters,
            seconds=self._before + time.monotonic() - self._start,
            data=session.task.data_source,
            message=message,
        )


def _is_multiple(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
