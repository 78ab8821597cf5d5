"""Shared by the integrations: needed versions, probes that are resumed, logging, double clipping."""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from curvestep.integrations.loggers import Logger
from curvestep.smoothness.observer import ClipsItself, batch_length
from curvestep.smoothness.probe import SmoothnessProbe
from curvestep.smoothness.schedule import Schedule
from curvestep.smoothness.snapshot import RandomState

State = dict[str, Any]  # of a checkpoint
Options = dict[str, Any]  # of a probe or a calibration
Item = TypeVar("Item")


def require(package: str, least: str, extra: str) -> None:
    """Raise an ImportError with a way out unless ``package`` is installed and new enough."""
    way_out = f"In the folder of curvestep: pip install -c constraints.txt '.[{extra}]'"
    try:
        installed = version(package)
    except PackageNotFoundError:
        raise ImportError(f"curvestep.integrations.{extra} needs {package}. {way_out}") from None
    if _numbers(installed) < _numbers(least):
        raise ImportError(
            f"curvestep.integrations.{extra} needs {package} {least} or newer, found {installed}. {way_out}"
        )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


class StepMeasurement:
    """The part of a callback that both frameworks have: options, a probe, and whether it is inside a step."""

    def __init__(
        self,
        every: int | None = None,
        fractions: tuple[float, ...] | None = None,
        estimators: list[str] | dict[str, int] | None = None,
        trace: str | Path | None = None,
        if_exists: str = "resume",
        max_overhead: float | None = None,
        layers: bool = False,
        on_error: str = "off",
        log: bool = True,
    ) -> None:
        """Options of the measurement.

        Args:
            every: Optimizer steps between measurements. Default: ten rows early, then 5 % of the gradients.
            fractions: Where on the step to take gradients, each in (0, 1]. Each costs one more pass over the
                batch of a measured step. Default: two short ones that follow the run, and the whole step.
            estimators: Columns of the trace, or a mapping from column to its period in measurements.
            trace: File for the rows; None for memory.
            if_exists: What to do with a file that holds a run: ``"resume"`` continues it after a checkpoint,
                and writes beside it without; ``"new"`` always writes beside it, ``"overwrite"`` starts again.
            max_overhead: Gradients for measuring over those for training, such as 0.02, after ten rows.
            layers: Also measure each layer.
            on_error: ``"off"`` warns once and measures nothing more, ``"mark"`` notes failures in the rows,
                ``"raise"`` stops training.
            log: Whether rows go to the framework's own loggers, as ``curvestep/…``.
        """
        self.options: Options = {
            "every": every, "fractions": fractions, "estimators": estimators or ["smoothness"],
            "trace": trace, "if_exists": if_exists, "max_overhead": max_overhead, "layers": layers,
            "on_error": on_error,
        }  # fmt: skip
        self.log = log
        self.probe: SmoothnessProbe | None = None
        self._saved: State = {}  # of the probe, in a checkpoint
        self._begins = False  # this callback begins each measured step, not the optimizer
        self._begun = False  # a measured step has begun and not ended
        self._undo: list[Callable[[], object]] = []

    def _start(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scaler: Any,
        write: Callable[[dict[str, float]], object],
        step: int,
        *,
        watches: bool,
    ) -> SmoothnessProbe:
        """Make the probe of a run that goes on after ``step`` steps; it ``watches``, or the callback begins.

        A run from the start is not written to a file that holds a run: its rows go to a new one beside it.
        """
        options = dict(self.options)
        if scaler is not None:
            options["backward"] = lambda loss: scaler.scale(loss).backward()
        if step == 0 and options["if_exists"] == "resume":
            options["if_exists"] = "new"
        probe = SmoothnessProbe(model, **options)
        self.probe = probe
        wanted = options["trace"]
        found = probe.trace.path
        if found is not None and found != Path(wanted):
            warnings.warn(f"{wanted} holds a run already. The rows of this one go to {found}.", stacklevel=4)
        if step > 0:
            probe.load_state_dict(self._saved or _state_after(step, probe.schedule))
        self._saved = {}
        if self.log:
            probe.listen(_logger(optimizer, write))
        if watches:
            probe.watch(optimizer)
        else:
            self._undo.append(optimizer.register_step_post_hook(self._end).remove)
        self._begins = not watches
        return probe

    def _end(self, *_: object) -> None:
        """End the step, also where the optimizer did not take it."""
        if self._begun:
            assert self.probe is not None
            self._begun = False
            self.probe._end()

    def _close(self) -> None:
        """Take the hooks away and close the trace; ``probe`` keeps the rows."""
        for undo in self._undo:
            undo()
        self._undo = []
        if self.probe is not None:
            self.probe.close()


def _state_after(step: int, schedule: Schedule) -> State:
    """The state of a probe whose own no checkpoint has."""
    done = math.ceil(step / schedule.every)
    at = schedule.state_dict() | {"next": done * schedule.every}
    return {"step": step, "measurements": done, "schedule": at}


def call_first_then(first: Callable[[], Item], again: Callable[[], Item]) -> Callable[[], Item]:
    """A function that calls ``first`` once, and ``again`` from then on."""
    calls = itertools.chain([first], itertools.repeat(again))
    return lambda: next(calls)()


def record_training_step(
    probe: SmoothnessProbe,
    train: Callable[[], Item],
    loss_of: Callable[[Item], object],
    again: Callable[[], object],
    batch: object,
) -> Item:
    """Output of a training step, whose loss the probe records; ``again`` computes that in replays."""
    outputs: list[Item] = []

    def trained() -> object:
        outputs.append(train())
        return loss_of(outputs[0])

    probe.record(call_first_then(trained, again), batch_size=round(batch_length(batch)))
    return outputs[0]


def is_one_shot(data: object) -> bool:
    """Whether reading a data set uses it up: an iterator, or what hands out the same one every time."""
    if isinstance(data, Iterator):
        return True
    random = RandomState.capture()  # an iterator may be made with random numbers
    try:
        return isinstance(data, IterableDataset) and iter(data) is iter(data)
    finally:
        random.restore()


def _logger(optimizer: Optimizer, write: Callable[[dict[str, float]], object]) -> Logger:
    """A listener for rows; the share of clipped steps is the optimizer's own, where it counts them."""

    def with_stats(numbers: dict[str, float], _: int) -> None:
        if isinstance(optimizer, ClipsItself):
            stats = optimizer.clip_stats()
            numbers["curvestep/clipped_fraction"] = stats["recent_clipped_fraction"]
            numbers["curvestep/skipped"] = float(stats["skipped"])
        write(numbers)

    return Logger(with_stats)


def warn_if_clipped_twice(optimizer: object, setting: str, way_out: str) -> None:
    """Warn if the framework clips before an optimizer that clips as well."""
    stop_check = getattr(optimizer, "stop_double_clip_check", None)
    if stop_check is not None:
        stop_check()  # of a check that would find out from the norms, and say so again
        warnings.warn(
            f"{setting} clips before {type(optimizer).__name__} does: gradients are clipped twice, and "
            f"clip_stats() counts what the first one left. {way_out}",
            stacklevel=3,
        )


def schedule_kind(decays: bool) -> str:
    """The kind of schedule to calibrate for."""
    return "warmup-decay" if decays else "constant"


def groups_of(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """The items in lists of ``size``; what is left over at the end is dropped."""
    source = iter(items)
    while len(group := list(itertools.islice(source, size))) == size:
        yield group
