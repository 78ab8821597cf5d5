"""Locks between processes, for folders that one of them writes at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock


@contextmanager
def lock(path: Path, *, patience: float = 0.0, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock on ``path``; ``TimeoutError`` if another process holds it for ``patience`` seconds.

    ``on_wait`` is called once if it takes more than a second.

    ``path`` is a file for nothing else. It is created if need be and stays: a file that is replaced or
    deleted while it is locked can be locked twice. The system releases the lock when the process dies.
    """
    held = FileLock(path)
    try:
        held.acquire(timeout=min(1.0, patience), poll_interval=0.1)
    except TimeoutError:
        if patience <= 1:
            raise
        on_wait()
        held.acquire(timeout=patience - 1, poll_interval=0.1)
    try:
        yield
    finally:
        held.release()
