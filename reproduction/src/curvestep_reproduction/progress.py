"""Progress bars and notices of the experiments.

In a terminal a bar is redrawn in place, on standard error. Without one there are plain lines on standard
output (standard error for downloads), some seconds apart, so that a log shows that the work goes on.
"""

from __future__ import annotations

import math
import sys
import time
from functools import cache
from typing import Literal

from rich import progress as bars
from rich.console import Console
from rich.text import Text

Unit = Literal["steps", "share", "bytes"]
_COUNT: dict[Unit, bars.ProgressColumn] = {
    "steps": bars.MofNCompleteColumn(),
    "share": bars.TextColumn("{task.percentage:3.0f} %"),
    "bytes": bars.DownloadColumn(),
}


class Progress:
    """Progress of one piece of work, inside ``with``: a bar in a terminal, lines without one.

    ``total`` may be changed later; the time left does not count what was done at the ``start``. Without a
    terminal a line comes every ``interval`` seconds. ``unit`` writes 12/60, 20 % or 12/60 MB.

    Example:
        >>> with Progress("counting", 3) as progress:
        ...     for step in range(3):
        ...         progress.update(step + 1, loss=0.5)
        counting: 3/3 loss 0.5
    """

    def __init__(
        self,
        title: str,
        total: float = 0,
        *,
        start: float = 0,
        unit: Unit = "steps",
        interval: float = 10.0,
        shown: bool = True,
    ) -> None:
        self.title = title
        self.total = total
        self.interval = interval
        self.unit: Unit = unit
        self._first = start
        self._shown = shown
        self._ended = False
        self._bar: bars.Progress | None = None

    def __enter__(self) -> Progress:
        console = Console(stderr=True)
        if self._shown and console.is_terminal:
            columns = (
                bars.TextColumn("{task.description}"),
                bars.BarColumn(bar_width=24),
                _COUNT[self.unit],
                bars.TextColumn("{task.fields[text]}"),
                bars.TimeRemainingColumn(),
            )
            transient = self.unit == "bytes"
            self._bar = bars.Progress(*columns, console=console, auto_refresh=False, transient=transient)
            self._bar.add_task(self.title, total=self.total or None, completed=int(self._first), text="")
            self._bar.start()
        self._start = self._last = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, done: float, text: str = "", /, **numbers: float) -> None:
        """Show that ``done`` of the total is done, beside ``text`` and the numbers, in their order.

        May be called after every step: a bar is redrawn five times a second at most, a line written only
        after ``interval`` seconds or at the end.
        """
        now = time.monotonic()
        ended = 0 < self.total <= done
        is_due = ended or now - self._last >= (0.2 if self._bar else self.interval)
        if not self._shown or self._ended or not is_due:
            return
        self._last = now
        self._ended = ended
        words = [f"{name.replace('_', ' ')} {value:.4g}" for name, value in numbers.items()]
        text = "  ".join([text, *words] if text else words)
        if self._bar:
            self._bar.update(
                self._bar.task_ids[0], total=self.total or None, completed=done, text=text, refresh=True
            )
        else:
            line = f"{self.title}: {self._count(done)} {text}".rstrip()
            if not ended:
                line += f", {self.time_left(done)} left"
            # Downloads happen on the way to a result that standard output may be kept for.
            out = sys.stderr if self.unit == "bytes" else sys.stdout
            print(line, file=out, flush=True)

    def print(self, line: str) -> None:
        """Write a line now, above the bar if there is one."""
        if self._shown and self._bar:
            self._bar.console.print(line, highlight=False, markup=False)
        elif self._shown:
            self._last = time.monotonic()
            print(line, flush=True)

    def time_left(self, done: float) -> str:
        """Time that the rest will take at the speed so far."""
        if done <= self._first:
            return duration(math.inf)
        seconds_each = (time.monotonic() - self._start) / (done - self._first)
        return duration((self.total - done) * seconds_each)

    def _count(self, done: float) -> str:
        if self.unit == "share":
            return f"{100 * done / self.total:.0f} %"
        if self.unit == "bytes":
            return f"{done / 1e6:.0f}/{self.total / 1e6:.0f} MB"
        return f"{done:g}/{self.total:g}"


def print_notice(text: str) -> None:
    """Print a line to standard error."""
    Console(stderr=True, soft_wrap=True).print(Text.assemble(("curvestep: ", "dim"), text))


print_notice_once = cache(print_notice)  # the same line once per process


def duration(seconds: float) -> str:
    """Seconds as a person would say them.

    Example:
        >>> duration(3.2), duration(754), duration(9000)
        ('3 s', '13 min', '2.5 h')
    """
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def error_line(error: BaseException) -> str:
    r"""The kind of an error and the last line of its message.

    Example:
        >>> error_line(ValueError("In a traceback:\nno text.\n"))
        'ValueError: no text.'
    """
    last = str(error).strip().rpartition("\n")[2]
    return f"{type(error).__name__}: {last}"
