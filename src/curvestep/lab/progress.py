"""What a person sees while a run trains: one live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Reporter(Protocol):
    """Shows how far a run is."""

    def __call__(self, step: int, **numbers: float) -> None:
        """Show the step and the numbers, in their order."""


@contextmanager
def run_progress(title: str, total: int, *, start: int = 0, shown: bool = True) -> Iterator[Reporter]:
    """A reporter for one run of ``total`` steps: a live bar in a terminal, otherwise a line now and then."""
    console = Console(stderr=True)
    if not shown:
        yield lambda step, **numbers: None
    elif not console.is_terminal:
        yield _Lines(title, total, start=start)
    else:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, auto_refresh=False) as bar:
            task = bar.add_task(title, total=total, completed=start, numbers="")
            yield _Live(bar, task, total)


class _Live:
    """Redraws the bar five times a second at most, so that fast steps are not slowed."""

    def __init__(self, bar: Progress, task: Any, total: int) -> None:
        self._bar, self._task, self._total = bar, task, total
        self._next = 0.0

    def __call__(self, step: int, **numbers: float) -> None:
        now = time.monotonic()
        if now >= self._next or step == self._total:
            self._next = now + 0.2
            self._bar.update(self._task, completed=step, numbers=_in_words(numbers), refresh=True)


class _Lines:
    """Writes a line at each tenth of the run, ten seconds apart or more, and at the end."""

    def __init__(self, title: str, total: int, *, start: int = 0) -> None:
        self._title, self._total, self._first = title, total, start
        self._start = self._last = time.monotonic()

    def __call__(self, step: int, **numbers: float) -> None:
        now = time.monotonic()
        if step < self._total and now - self._last < 10.0:
            return
        self._last = now
        left = (now - self._start) / max(step - self._first, 1) * (self._total - step)
        ending = f", {duration(left)} left" if step < self._total else ""
        print(f"{self._title}: {step}/{self._total} {_in_words(numbers)}{ending}", flush=True)


def duration(seconds: float) -> str:
    """Seconds in words.

    Example:
        >>> duration(3.2), duration(754), duration(9000)
        ('3 s', '13 min', '2.5 h')
    """
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _in_words(numbers: dict[str, float]) -> str:
    return "  ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in numbers.items())
