"""Progress bars for downloads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn


class Bar:
    """One rich progress bar with the methods that pooch calls."""

    def __init__(self, progress: Progress, title: str) -> None:
        self._progress = progress
        self._task = progress.add_task(title, total=None)

    @property
    def total(self) -> int | None:
        """Bytes to come, or None while unknown."""
        total = self._progress.tasks[0].total
        return None if total is None else int(total)

    @total.setter
    def total(self, value: int) -> None:
        self._progress.update(self._task, total=value or None)

    def update(self, count: int) -> None:
        """Count ``count`` more bytes as done."""
        self._progress.update(self._task, advance=count)

    def reset(self) -> None:
        """Start again from zero."""
        self._progress.update(self._task, completed=0)

    def reach(self, count: int) -> None:
        """Count ``count`` bytes as done altogether."""
        self._progress.update(self._task, completed=count)

    def close(self) -> None:
        """Nothing to do: the bar closes with its context."""


@contextmanager
def bar(title: str, *, show: bool) -> Iterator[Bar]:
    """A progress bar on standard error, invisible unless ``show`` and standard error is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    hidden = not (show and console.is_terminal)
    with Progress(*columns, console=console, disable=hidden, transient=True) as progress:
        yield Bar(progress, title)
