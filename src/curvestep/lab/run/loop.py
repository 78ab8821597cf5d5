"""The training loop: one recipe, one run folder."""

from __future__ import annotations

import errno
import math
import threading
import time
from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_fabric import Fabric
from torch.multiprocessing.spawn import ProcessRaisedException

from curvestep._checks import check_count, check_nonnegative
from curvestep.lab.progress import Progress, show_progress
from curvestep.lab.recipes import LanguageRecipe, Recipe
from curvestep.lab.run.devices import (
    ignore_sigint,
    make_fabric,
    raised_by_process,
    run_context,
    stop_signal,
    suppress_warnings,
    under_torchrun,
)
from curvestep.lab.run.folder import (
    DIVERGED,
    ENDED,
    FAILED,
    FINISHED,
    INTERRUPTED,
    RUNNING,
    STATUS,
    Run,
    locked,
    open_run,
    write_status,
)
from curvestep.lab.run.session import Session
from curvestep.lab.tasks import make_task

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LAST_STEPS = 50  # the final training loss is the mean over so many steps


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended.

    Args:
        folder: The run folder.
        status: ``finished``, ``diverged`` or ``interrupted`` (resume it).
        step: Steps taken.
        train_loss: Mean training loss over the last 50 steps; NaN if it diverged.
        metrics: What the last evaluation said, by split: loss, and perplexity or accuracy.
        num_parameters: Parameters of the model.
        seconds: Time spent training, over all resumptions.
        data: Where the data came from.
        message: Why the run diverged, or what its data are not.
    """

    folder: Path
    status: str
    step: int
    train_loss: float
    metrics: dict[str, dict[str, float]]
    num_parameters: int
    seconds: float
    data: str
    message: str = ""

    @classmethod
    def load(cls, folder: str | Path) -> RunResult:
        """The result that a run left in its folder."""
        run = Run.load(folder)
        values = {k: v for k, v in run.status.items() if k in cls.__dataclass_fields__}
        missing = [name for name in cls.__dataclass_fields__ if name not in {"folder", "message", *values}]
        if missing:
            path = run.folder / STATUS
            raise ValueError(f"{path} has no {missing[0]!r}: there is no result. Delete it, then resume.")
        return cls(folder=run.folder, **values)


@dataclass(frozen=True, kw_only=True)
class _Options:
    progress: bool
    checkpoint_seconds: float
    threads: int | None
    offline: bool


def train(
    recipe: Recipe,
    folder: str | Path,
    *,
    resume: bool = False,
    progress: bool = True,
    devices: int = 1,
    accelerator: str = "auto",
    strategy: str = "auto",
    loggers: tuple[str, ...] = (),
    checkpoint_seconds: float = 60.0,
    threads: int | None = None,
    offline: bool = False,
) -> RunResult:
    """Train ``recipe`` and keep everything in ``folder``.

    A run that was killed goes on with ``resume=True`` as if nothing had happened: on the CPU its parameters,
    metrics and trace end bit for bit as those of a run never killed. Ctrl-C ends with a checkpoint. A run
    that diverges is a result: it ends with the status ``diverged`` and keeps its rows.

    Args:
        recipe: What to train; see :func:`curvestep.lab.recipes.get_recipe`.
        folder: The run folder: new, or with ``resume`` that of the same recipe.
        resume: Go on from the folder's checkpoint, or start if there is none.
        progress: Show a live line (plain lines without a terminal).
        devices: Processes that share each batch; it must divide ``batch_size``. Under torchrun, the number of
            its processes; they must see the same folder.
        accelerator: ``cpu``, ``cuda``, or whichever is there.
        strategy: ``ddp`` (``auto``), every device with the whole model; or ``fsdp``, each with a part of it.
        loggers: ``csv`` and ``tensorboard``, written inside the folder.
        checkpoint_seconds: Time between two checkpoints.
        threads: Torch threads of each process; None leaves them alone.
        offline: Use no network for the data.
    """
    check_nonnegative("checkpoint_seconds", checkpoint_seconds)
    if threads is not None:
        check_count("threads", threads)
    folder = Path(folder)
    fabric = make_fabric(
        recipe, folder, devices=devices, accelerator=accelerator, strategy=strategy, loggers=loggers
    )
    # Of torchrun's processes the first has the folder: the others wait for it in the launch.
    run = open_run(folder, recipe, resume=resume) if fabric.is_global_zero else None
    if run and run.status["status"] in ENDED and not under_torchrun():
        return RunResult.load(folder)
    options = _Options(
        progress=progress, checkpoint_seconds=checkpoint_seconds, threads=threads, offline=offline
    )
    with locked(folder) if run else nullcontext(), ignore_sigint(fabric):
        try:
            _launch(fabric, partial(_train, run=run, options=options))
        except BaseException as error:
            if run:
                with suppress(OSError):  # a full disk has no room for this either
                    write_status(folder, **{**run.status, "status": FAILED, "message": _one_line(error)})
            if isinstance(error, OSError) and error.errno in _NO_ROOM:
                raise OSError(
                    f"{folder} has no room: {error.strerror}. What is there is kept: make room, resume."
                ) from error
            raise
    return RunResult.load(folder)


def _launch(fabric: Fabric, function: Callable[[Fabric], None]) -> None:
    """Run ``function`` on every process; what one of them raises is raised here."""
    try:
        fabric.launch(function)
    except ProcessRaisedException as error:
        raise raised_by_process(error) from error


def _train(fabric: Fabric, run: Run | None, options: _Options) -> None:
    """One process of a run, from the start or the checkpoint to the end; the first one knows the run."""
    run = fabric.broadcast(run)
    assert run is not None
    if run.status["status"] in ENDED:
        return
    recipe = run.recipe
    with suppress_warnings(), run_context(recipe, threads=options.threads), stop_signal() as stop:
        task = make_task(
            recipe, rank=fabric.global_rank, world_size=fabric.world_size, offline=options.offline
        )
        session = Session(fabric, run, task)
        clock = _Clock(run, session, options.checkpoint_seconds)
        total = task.num_steps()
        title = f"{recipe.name} {recipe.label}"
        shown = options.progress and fabric.is_global_zero
        with closing(session), show_progress(title, total, start=session.step, shown=shown) as progress:
            clock.write(RUNNING)
            status, message = _loop(session, total, clock, stop, progress)
        clock.write(status, message)
        fabric.barrier()


def _loop(
    session: Session, total: int, clock: _Clock, stop: threading.Event, progress: Progress
) -> tuple[str, str]:
    """Train until the last step, divergence, or a signal; the status and its reason."""
    fabric, task, recipe = session.fabric, session.task, session.run.recipe
    model, optimizer, probe = session.model, session.optimizer, session.probe
    # Both begin anew with each row, and a checkpoint is only taken after one: they need no place in it.
    loss_sum, steps_summed = torch.zeros((), device=fabric.device), 0
    model.train()
    while not _is_over(session, total):
        step = session.step
        batch = fabric.to_device(task.batch(step))
        state = None if task.starts_over(step) else session.state
        for group in session.raw_optimizer.param_groups:
            group["lr"] = recipe.lr * _drop(recipe, step / total) * task.lr_factor(step)

        def loss_of_batch(batch: Any = batch, state: Any = state) -> torch.Tensor:
            return task.loss(model, batch, state)[0]

        loss, session.state = task.loss(model, batch, state)
        fabric.backward(loss)
        size = batch[1].numel() * fabric.world_size
        with probe(loss_of_batch, loss=loss, batch_size=size) if probe else nullcontext():
            optimizer.step()
        optimizer.zero_grad()
        if session.averaging:
            session.averaging.after_step()
        session.step += 1
        loss_sum += loss.detach()
        steps_summed += 1

        evaluating = session.step == total or _is_multiple(session.step, recipe.eval_every)
        if not evaluating and not _is_multiple(session.step, recipe.log_every):
            continue
        # Only here is the device waited for.
        reason = _record(session, loss_sum / steps_summed, progress)
        loss_sum.zero_()
        steps_summed = 0
        if reason:
            return DIVERGED, reason
        if evaluating:
            _evaluate(session, task.splits[:1])
        over = _is_over(session, total)
        if over:
            _evaluate(session, task.splits[1:])
        stopping = _any_process(fabric, stop.is_set())
        if over or stopping or _any_process(fabric, clock.is_due()):
            session.save()
            clock.saved()
        if stopping and not over:
            return INTERRUPTED, "stopped by a signal; resume it"
    return FINISHED, "" if session.step == total else "validation no longer improves"


def _is_over(session: Session, total: int) -> bool:
    """Whether the last step is taken, or fine-tuning no longer improves what is validated."""
    recipe, averaging = session.run.recipe, session.averaging
    fine_tuning = isinstance(recipe, LanguageRecipe) and recipe.averaging == "always"
    return session.step == total or (fine_tuning and averaging is not None and averaging.finished)


def _record(session: Session, loss: torch.Tensor, progress: Progress) -> str:
    """Write the row of this step; the reason if the run has diverged."""
    recipe, fabric = session.run.recipe, session.fabric
    reduced = fabric.all_reduce(loss, reduce_op="mean") if fabric.world_size > 1 else loss
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
    _write(session, row)
    unit = {"perplexity": math.exp(min(value, 700.0))} if session.task.metric == "perplexity" else {}
    clipped = 100 * stats["clipped_fraction"]
    progress.update(session.step, loss=value, **unit, grad_norm=stats["grad_norm"], clipped_percent=clipped)
    if not math.isfinite(value) or not math.isfinite(stats["grad_norm"]):
        return f"the loss or the gradient is not finite at step {session.step}"
    if value > recipe.diverged_above * session.first_loss:
        return f"the loss passed {recipe.diverged_above:g} times the first one at step {session.step}"
    return ""


def _evaluate(session: Session, splits: tuple[str, ...]) -> None:
    """Write a row for each split, of the average where there is one."""
    task, averaging = session.task, session.averaging
    averaged = averaging is not None and averaging.evaluated is not session.module
    model = averaging.evaluated if averaging and averaged else session.model
    model.eval()
    for split in splits:
        values = task.evaluate(model, split, session.fabric.device)
        _write(session, {"step": session.step, "split": split, **values})
        if averaging and split == task.splits[0]:
            averaging.after_validation(values["loss"])
    session.model.train()


def _write(session: Session, row: dict[str, Any]) -> None:
    if session.metrics is not None:
        session.metrics.append(row)
        if session.fabric.loggers:
            numbers = {f"{row['split']}/{k}": v for k, v in row.items() if k not in ("step", "split")}
            session.fabric.log_dict(numbers, step=row["step"])


class _Clock:
    """Keeps the time of a run and its ``status.json``."""

    def __init__(self, run: Run, session: Session, interval: float) -> None:
        self._run, self._session, self._interval = run, session, interval
        self._before = float(run.status.get("seconds", 0.0))
        self._start = self._last = time.monotonic()

    def is_due(self) -> bool:
        """Whether it is time for a checkpoint."""
        return time.monotonic() - self._last >= self._interval

    def saved(self) -> None:
        """A checkpoint was written."""
        self._last = time.monotonic()
        self.write(RUNNING)

    def write(self, status: str, message: str = "") -> None:
        """Replace ``status.json``."""
        run, session = self._run, self._session
        ended = status != RUNNING
        result = RunResult(
            folder=run.folder,
            status=status,
            step=session.step,
            train_loss=_final_loss(run) if ended and status != DIVERGED else math.nan,
            metrics=_final_metrics(run) if ended else {},
            num_parameters=session.num_parameters,
            seconds=self._before + time.monotonic() - self._start,
            data=session.task.data_source,
            message=message,
        )
        if session.fabric.is_global_zero:
            values = {name: getattr(result, name) for name in result.__dataclass_fields__ if name != "folder"}
            write_status(run.folder, **values)


def _final_loss(run: Run) -> float:
    """Mean over the last steps, in whole rows; each is a mean over the steps since the row before."""
    steps, losses = run.column("loss")
    if not len(steps):
        return math.nan
    spans = np.diff(steps, prepend=0)
    last = steps - spans >= steps[-1] - LAST_STEPS
    last[-1] = True
    return float(np.average(losses[last], weights=spans[last]))


def _final_metrics(run: Run) -> dict[str, dict[str, float]]:
    last = {split: run.rows(split)[-1:] for split in ("valid", "test")}
    return {
        split: {k: v for k, v in rows[0].items() if k not in ("step", "split")}
        for split, rows in last.items()
        if rows
    }


def _is_multiple(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _drop(recipe: Recipe, share: float) -> float:
    """Factor of the learning rate after so large a share of the run."""
    return 0.1 ** sum(share >= drop for drop in recipe.lr_drops)


def _any_process(fabric: Fabric, flag: bool) -> bool:
    """Whether any process says so: all must stop, or save, at the same step."""
    if fabric.world_size == 1:
        return flag
    votes = fabric.all_reduce(torch.tensor(float(flag), device=fabric.device), reduce_op="sum")
    return bool(votes)


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}"
