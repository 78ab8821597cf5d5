"""Devices and processes of a run: Lightning Fabric, and the settings of a process for a run."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.strategies.ddp import DDPStrategy
from torch import Tensor
from torch.multiprocessing.spawn import ProcessRaisedException

from curvestep.checks import check_count
from curvestep_reproduction.recipes import Recipe
from curvestep_reproduction.tasks import part_of_batch

# At import: workers log before our code runs.
logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
# If one process fails the others are ended: a log line about it would hide the error.
logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)


def make_fabric(recipe: Recipe, *, devices: int = 1) -> Fabric:
    """Fabric for one run on GPUs, else on cores; an error in one line if there are too few for it."""
    check_count("devices", devices)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ValueError("A run starts its own processes: use `devices`, not torchrun.")
    accelerator = "cpu"
    most = max(2, os.cpu_count() or 1)
    what = "cores of this machine"
    if torch.cuda.is_available():
        accelerator = "cuda"
        most = torch.cuda.device_count()
        what = "GPUs here"
    if devices > most:
        raise ValueError(f"`devices` must be at most the {most} {what}, got {devices}.")
    part_of_batch(recipe, 0, devices)  # which checks that they divide it
    strategy = LocalProcesses() if devices > 1 else "auto"
    # Of mixed precision the session takes care: measurements and evaluations are in float32.
    precision = "64-true" if recipe.precision == "64-true" else "32-true"
    return Fabric(accelerator=accelerator, devices=devices, strategy=strategy, precision=precision)


def raised_by_process(error: ProcessRaisedException) -> Exception:
    r"""The error of a process that we started, in its own words: torch hands on a traceback as text.

    Example:
        >>> text = "Process 0:\nTraceback (most recent call last):\n  File ...\nValueError: There is no text."
        >>> raised_by_process(ProcessRaisedException(text, 0, 1))
        ValueError('There is no text.')
    """
    name, _, words = str(error).rstrip().rpartition("\n")[2].partition(": ")
    module, _, short = name.rpartition(".")
    kind = getattr(sys.modules.get(module or "builtins"), short, Exception)
    for known in (ValueError, OSError):
        if issubclass(kind, known):
            return known(words)
    return RuntimeError(f"{name}: {words}")


def all_gather(x: Tensor) -> list[Tensor]:
    """``x`` of every process, in the order of ranks."""
    if not dist.is_initialized():
        return [x]
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return parts


class LocalProcesses(DDPStrategy):
    """DDP on processes of this machine that meet in a file; gloo listens on the loopback interface only.

    Torch's default is a TCP store, which listens on all interfaces and asks nobody who they are.
    """

    def __init__(self) -> None:
        super().__init__(start_method="spawn")
        number, self._store = tempfile.mkstemp(prefix="curvestep-")
        os.close(number)
        weakref.finalize(self, Path(self._store).unlink, missing_ok=True)

    def setup_environment(self) -> None:
        """Join the others; Fabric leaves a group alone that is there already."""
        if self.root_device.type == "cpu":
            backend = "gloo"
            # The loopback interface: ``lo``, ``lo0`` on macOS.
            names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
            os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])
        else:
            backend = "nccl"
        store = f"file://{self._store}"
        dist.init_process_group(
            backend, init_method=store, rank=self.local_rank, world_size=self.num_processes
        )
        super().setup_environment()


@contextmanager
def run_context(recipe: Recipe, *, threads: int | None = None) -> Iterator[None]:
    """Float type, torch threads and global generators for a run; the caller's come back afterwards."""
    dtype = torch.get_default_dtype()
    threads_before = torch.get_num_threads()
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
def _handled(handler: Callable[[int, FrameType | None], None], *numbers: int) -> Iterator[None]:
    """Handle these signals while the block runs; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        numbers = ()
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def stop_signal() -> Iterator[threading.Event]:
    """An event that SIGINT (Ctrl-C) or SIGTERM sets; a second signal raises ``KeyboardInterrupt``."""
    stop = threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    with _handled(ask, signal.SIGINT, signal.SIGTERM):
        yield stop


def ignore_sigint(fabric: Fabric) -> AbstractContextManager[None]:
    """Ignore Ctrl-C while processes that we start train: they get it too, save, and end."""
    numbers = [signal.SIGINT] if fabric.world_size > 1 else []
    return _handled(lambda number, frame: None, *numbers)
