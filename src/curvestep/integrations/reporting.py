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

from torch import Tensor, nn
from torch.utils.data import IterableDataset

from curvestep.loggers import Logger
from curvestep.smoothness.probe import SmoothnessProbe
from curvestep.smoothness.snapshot import RandomState

State = dict[str, Any]  # of a checkpoint
Options = dict[str, Any]  # of a probe or a calibration
Item = TypeVar("Item")


def need(package: str, least: str, extra: str) -> None:
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
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


def probe_at(step: int, model: nn.Module, state: State, options: Options) -> SmoothnessProbe:
    """A probe for a run that goes on after ``step`` steps, from a checkpoint's ``state`` if that has one.

    A run from the start is not written to a file that holds a run: its rows go to a new one beside it.
    """
    wanted = options["trace"]
    if step == 0 and options["if_exists"] == "resume":
        options = {**options, "if_exists": "new"}
    probe = SmoothnessProbe(model, **options)
    found = probe.trace.path
    if isinstance(wanted, (str, Path)) and found not in (None, Path(wanted)):
        warnings.warn(f"{wanted} holds a run already. The rows of this one go to {found}.", stacklevel=4)
    if step == 0:
        return probe
    if not state:
        schedule, done = probe.schedule.state_dict(), math.ceil(step / probe.schedule.every)
        schedule["next"] = done * probe.schedule.every
        state = {"step": step, "measurements": done, "schedule": schedule}
    probe.load_state_dict(state)
    return probe


class StepMeasurement:
    """The part of a callback that both frameworks have: a probe, and whether it is inside a step."""

    probe: SmoothnessProbe | None = None
    _begun = False

    def _end(self, *_: object) -> None:
        """End the step, also where the optimizer did not take it."""
        if self._begun:
            assert self.probe is not None
            self._begun = False
            self.probe._end()


def first_then(first: Callable[[], Item], again: Callable[[], Item]) -> Callable[[], Item]:
    """A function that calls ``first`` once, and ``again`` from then on."""
    calls = itertools.chain([first], itertools.repeat(again))
    return lambda: next(calls)()


def can_be_read_once(data: object) -> bool:
    """Whether reading a data set uses it up: an iterator, or what hands out the same one every time."""
    if isinstance(data, Iterator):
        return True
    random = RandomState.capture()  # an iterator may be made with random numbers
    try:
        return isinstance(data, IterableDataset) and iter(data) is iter(data)
    finally:
        random.restore()


def clips(optimizer: object) -> bool:
    """Whether an optimizer, or the class of one, clips by itself."""
    return callable(getattr(optimizer, "clip_stats", None))


def log_to(optimizer: object, write: Callable[[dict[str, float], int], object]) -> Logger:
    """A listener for rows; the share of clipped steps is the optimizer's own, where it counts them."""

    def with_stats(numbers: dict[str, float], step: int) -> None:
        clip_stats = getattr(optimizer, "clip_stats", None)
        if clip_stats is not None:
            stats = clip_stats()
            numbers["curvestep/clipped_fraction"] = stats["recent_clipped_fraction"]
            numbers["curvestep/skipped"] = float(stats["skipped"])
        write(numbers, step)

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


def backward_by(scaler: Any) -> Callable[[Tensor], None] | None:
    """How a loss is run backward where a ``GradScaler`` scales it; None where there is none."""
    if scaler is None:
        return None
    return lambda loss: scaler.scale(loss).backward()


def schedule_kind(decays: bool) -> str:
    """The kind of schedule to calibrate for."""
    return "warmup-decay" if decays else "constant"


def groups_of(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """The items in lists of ``size``; what is left over at the end is dropped."""
    source = iter(items)
    while len(group := list(itertools.islice(source, size))) == size:
        yield group
