"""The folder of a training run, written as :mod:`curvestep.trace.run` reads it.

The two row files are append-only, the others are replaced atomically. Everything but ``status.json`` is a
function of the recipe and the data; only there are times kept. ``checkpoint.pt`` is the state to resume from,
``.lock`` is locked by the process that trains.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from curvestep import SmoothnessFit, fit_smoothness
from curvestep.files import add_checksum, remove_parts
from curvestep.trace.run import (
    CONFIG,
    ENDED,
    FAILED,
    FINISHED,
    METRICS,
    RUNNING,
    STATUS,
    TRACE,
    Run,
    read_status,
    write_json,
)
from curvestep_reproduction.locks import lock
from curvestep_reproduction.recipes import Recipe, from_dict, in_words, to_dict

CHECKPOINT = "checkpoint.pt"
LOCK = ".lock"
WAITING = "waiting"  # the status of a run without a folder
# What the status of a run has, that of one which failed before its first step but in part.
RESULT = ("status", "step", "train_loss", "metrics", "num_parameters", "seconds", "data")
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
PATIENCE = 3.0  # seconds to wait for another process to leave a folder


@contextmanager
def space_in(folder: Path, words: str) -> Iterator[None]:
    """Say what is kept and what to do if the disk is full; in each process, as an error leaves it as text."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        raise OSError(f"No space left in {folder}. {words}") from error


@dataclass(frozen=True, kw_only=True)
class TrainedRun(Run):
    """The folder of a run that a recipe trained."""

    recipe: Recipe

    @classmethod
    def load(cls, folder: str | Path) -> TrainedRun:
        """The run in ``folder``, as it stands now."""
        run = Run.load(folder)
        try:
            recipe = from_dict(run.config)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{run.folder / CONFIG} is not a recipe of this version: {error}") from None
        return cls(folder=run.folder, config=run.config, status=run.status, recipe=recipe)

    @cached_property
    def fit(self) -> SmoothnessFit:
        """The fit of (L0, L1) to the trace, computed once for all that show it."""
        return fit_smoothness(self.trace)

    @cached_property
    def result(self) -> RunResult:
        """How the run ended, or stood when that was last written; an error if it never was."""
        missing = [name for name in RESULT if name not in self.status]
        if missing:
            path = self.folder / STATUS
            raise ValueError(f"{path} has no {missing[0]!r}: there is no result. Delete it, then resume.")
        return result_in(self.folder)


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended, or stands."""

    folder: Path  # the run folder
    status: str = WAITING  # that, or one of :mod:`curvestep.trace.run`; resume what was interrupted
    step: int = 0  # steps taken
    # Mean training loss over the last twentieth of the steps, at most 50; NaN if it diverged.
    train_loss: float = math.nan
    # Result of the last evaluation, by split: loss, and perplexity or accuracy.
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    num_parameters: int = 0  # parameters of the model
    seconds: float = 0.0  # time spent training, over all resumptions
    data: str = ""  # where the data came from
    message: str = ""  # why the run diverged, or failed

    @property
    def score(self) -> float:
        """The training loss of a finished run; infinity for any other."""
        if self.status == FINISHED and math.isfinite(self.train_loss):
            return self.train_loss
        return math.inf

    @property
    def ending(self) -> str:
        """The same in a few words."""
        if not math.isfinite(self.score):
            return f"{self.status}: {self.message}".removesuffix(": ")
        held_out = next(iter(self.metrics.values()), {})
        units = [f", {name} {value:.4g}" for name, value in held_out.items() if name != "loss"]
        return f"{self.status}, training loss {self.train_loss:.4f}{''.join(units)}"


def result_in(folder: Path, error: str = "") -> RunResult:
    """The result that ``status.json`` has; of a run that ended with an ``error``, that too."""
    values = {name: value for name, value in read_status(folder, {}).items() if name in (*RESULT, "message")}
    result = RunResult(folder=folder, **values)
    if error:
        result = replace(result, message=error)
        if result.status in (RUNNING, WAITING):  # a process that was killed could not write that it failed
            result = replace(result, status=FAILED)
    return result


def open_run(folder: str | Path, recipe: Recipe, *, resume: bool) -> TrainedRun:
    """The run folder for ``recipe``: made, or with ``resume`` found again.

    A folder that already holds a run is refused without ``resume``, and with it if its recipe is another
    one. Nothing is overwritten, but for a run that failed before its first step (a corpus that does not
    exist, say): it left nothing to lose.
    """
    folder = Path(folder)
    files = [name for name in (METRICS, TRACE, CHECKPOINT, STATUS) if (folder / name).exists()]
    status = read_status(folder, {})
    has_config = (folder / CONFIG).exists()
    failed_at_the_start = (status.get("status"), status.get("step"), files) == (FAILED, 0, [STATUS])
    if has_config and not failed_at_the_start:
        run = TrainedRun.load(folder)
        if not resume:
            raise ValueError(f"{folder} already holds a run. Resume it, or choose another folder.")
        check_recipe(run, recipe)
        return run
    if files and not has_config:
        raise ValueError(f"{folder} has {files[0]} but no {CONFIG}: it is no run folder. Choose another.")
    folder.mkdir(parents=True, exist_ok=True)
    config = {**to_dict(recipe), "about": in_words(recipe)}
    write_json(folder / CONFIG, add_checksum(config))
    status = {"status": RUNNING, "step": 0, "seconds": 0.0}
    return TrainedRun(folder=folder, config=config, recipe=recipe, status=status)


def check_recipe(run: TrainedRun, recipe: Recipe, *, apart_from: Sequence[str] = ()) -> None:
    """An error that names what differs if ``run`` is of another recipe, ``apart_from`` these fields."""
    before = to_dict(run.recipe)
    now = to_dict(recipe)
    names = [name for name in {**before, **now} if name not in apart_from]
    changed = [f"{k} {before.get(k)!r} → {now.get(k)!r}" for k in names if before.get(k) != now.get(k)]
    if changed:
        raise ValueError(
            f"{run.folder} holds a run of another recipe ({', '.join(changed)}). Choose another folder."
        )


def has_ended(folder: Path, recipe: Recipe | None = None, *, apart_from: Sequence[str] = ()) -> bool:
    """Whether a run in ``folder`` finished or diverged; one of another ``recipe`` is an error."""
    if read_status(folder, {}).get("status") not in ENDED:
        return False
    if recipe is not None:
        check_recipe(TrainedRun.load(folder), recipe, apart_from=apart_from)
    return True


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the run folder, made if need be: a second process that wants it gets an error.

    Waits three seconds for a process that is just ending, as a worker does whose parent was killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(lock(folder / LOCK, patience=PATIENCE))
        except TimeoutError:
            raise ValueError(f"Another process is training in {folder}. Wait for it, or end it.") from None
        remove_parts(folder)
        yield


def synced_length(path: Path) -> int:
    """Flush the rows of a file to the disk; its length, 0 if there is none."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return file.seek(0, os.SEEK_END)


def write_status(folder: Path, **values: object) -> None:
    """Replace ``status.json``."""
    write_json(folder / STATUS, add_checksum(values))
