"""What a run needs of its process: float type, threads, random generators, signals, quiet."""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning_fabric import Fabric

from curvestep.lab.recipes import Recipe
from curvestep.lab.run.devices import starts_processes


@contextmanager
def surroundings(recipe: Recipe, *, threads: int | None) -> Iterator[None]:
    """Float type, threads and global generators for a run; the caller's come back afterwards."""
    dtype, threads_before = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float64 if recipe.precision == "64-true" else torch.float32)
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads_before)


@contextmanager
def stop_signal() -> Iterator[threading.Event]:
    """An event that Ctrl-C or a polite end sets; a second Ctrl-C ends at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def left_to_processes(fabric: Fabric) -> Iterator[None]:
    """While processes of ours train, Ctrl-C is theirs: they save, and end."""
    if not starts_processes(fabric) or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def quiet() -> Iterator[None]:
    """Without advice about things that a run folder settles, or that no code here does."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Experiment logs directory .* exists")
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        yield
