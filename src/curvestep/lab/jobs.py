"""Many jobs on a few processes: joblib on this machine, Ray on a cluster.

A job is a function that leaves its result in a folder, and finds it there if it is run again. So nothing is
lost with a process: whatever was under way when it died is run again, from where it stood.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from joblib import Parallel, delayed
from joblib.externals.loky.process_executor import TerminatedWorkerError

from curvestep._checks import check_choice, check_count
from curvestep.lab.run.folder import INTERRUPTED, METRICS

ENGINES = ("joblib", "ray")
ATTEMPTS = 3  # times that a job is started before a process that keeps dying is an error


@dataclass(frozen=True, kw_only=True)
class Job:
    """One function call that leaves its result in ``folder``; it takes ``threads`` besides ``arguments``."""

    name: str
    folder: Path
    function: Callable[..., Any]
    arguments: dict[str, Any]
    total: int = 0

    def steps(self) -> int:
        """Steps done so far, as the last row of the folder's metrics says."""
        return last_step(self.folder / METRICS)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a job: its value, or the error in one line."""

    name: str
    value: Any = None
    error: str = ""


def stop_if_interrupted(outcome: Outcome) -> None:
    """Pass on a Ctrl-C that a run in this very process took for itself: it has saved where it was."""
    if getattr(outcome.value, "status", "") == INTERRUPTED:
        raise KeyboardInterrupt


def run_jobs(
    jobs: Sequence[Job],
    *,
    engine: str = "joblib",
    workers: int = 2,
    address: str | None = None,
    watch: Callable[[], None] | None = None,
) -> Iterator[Outcome]:
    """Run ``jobs`` on ``workers`` processes and yield each outcome as it comes.

    A job that raises is an outcome with an error, and the rest go on. A process that dies has its job run
    again elsewhere, three times at most.

    Args:
        jobs: What to run; long ones first keeps all processes busy to the end.
        engine: ``joblib`` or ``ray``.
        workers: Processes on this machine; on a cluster, tasks at a time.
        address: Of a Ray cluster; None starts one on this machine. Its nodes must share the folders.
        watch: Called twice a second meanwhile, to show how far things are.
    """
    check_choice("engine", engine, ENGINES)
    check_count("workers", workers)
    if address is not None and engine != "ray":
        raise ValueError(f"`address` is for the engine 'ray', got {address!r} with {engine!r}.")
    threads = max(1, (os.cpu_count() or 1) // workers)
    run = _on_ray(jobs, workers, threads, address) if engine == "ray" else _on_joblib(jobs, workers, threads)
    with _watched(watch):
        yield from run


def last_step(path: Path) -> int:
    """The step of the last whole row of a row file; 0 if there is none.

    Reads the end of the file only: it is asked for twice a second.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 2000))
            lines = file.read().split(b"\n")
    except OSError:
        return 0
    for line in reversed(lines[:-1]):
        _, found, rest = line.partition(b'"step": ')
        if found:
            return int(rest.split(b",")[0].rstrip(b"}"))
    return 0


def _call(job: Job, threads: int, parent: int | None = None) -> Outcome:
    try:
        with _tied_to(parent):
            return Outcome(name=job.name, value=job.function(**job.arguments, threads=threads))
    except Exception as error:
        lines = str(error).strip().splitlines()
        return Outcome(name=job.name, error=f"{type(error).__name__}: {lines[-1] if lines else ''}")


@contextmanager
def _tied_to(parent: int | None) -> Iterator[None]:
    """End politely once the process that started us is gone: nobody waits, and the job can be resumed."""
    if parent in (None, os.getpid()):  # joblib runs a job in its own process where it can start no other
        yield
        return
    if os.getppid() != parent:
        os._exit(1)  # this job came out of the queue of a dead process

    def look() -> bool:
        orphaned = os.getppid() != parent
        if orphaned:
            os.kill(os.getpid(), signal.SIGTERM)
        return orphaned  # ask once: a second signal would not wait for the checkpoint

    with _twice_a_second(look):
        yield


def _on_joblib(jobs: Sequence[Job], workers: int, threads: int) -> Iterator[Outcome]:
    left = {job.name: job for job in jobs}
    for attempt in range(1, ATTEMPTS + 1):
        if not left:
            return
        parallel = Parallel(n_jobs=workers, backend="loky", return_as="generator_unordered")
        calls = (delayed(_call)(job, threads, os.getpid()) for job in list(left.values()))
        try:
            for outcome in parallel(calls):
                assert isinstance(outcome, Outcome)
                left.pop(outcome.name)
                yield outcome
        except TerminatedWorkerError as error:
            if attempt == ATTEMPTS:
                raise RuntimeError(
                    f"A worker process died {ATTEMPTS} times; {len(left)} of {len(jobs)} jobs are left. What "
                    "is finished is kept: free some memory and run the same command again."
                ) from error


def _on_ray(jobs: Sequence[Job], workers: int, threads: int, address: str | None) -> Iterator[Outcome]:
    try:
        import ray
        from ray.exceptions import RayError
    except ImportError:
        raise ValueError("`engine` 'ray' needs Ray. In curvestep's folder: pip install '.[ray]'.") from None
    with _ray(ray, workers, address):
        # A dead process is Ray's to replace; the job then goes on from its folder.
        task = ray.remote(num_cpus=1, max_retries=ATTEMPTS - 1)(_call)
        waiting = list(jobs)
        running = {task.remote(job, threads): job for job in waiting[:workers]}
        del waiting[:workers]
        while running:
            (done,), _ = ray.wait(list(running), num_returns=1)
            job = running.pop(done)
            try:
                yield ray.get(done)
            except RayError as error:
                yield Outcome(
                    name=job.name, error=f"{type(error).__name__}: its worker died {ATTEMPTS} times"
                )
            if waiting:
                following = waiting.pop(0)
                running[task.remote(following, threads)] = following


@contextmanager
def _ray(ray: Any, workers: int, address: str | None) -> Iterator[None]:
    """Ray for a while: a cluster that is there already is left as it is."""
    ours = not ray.is_initialized()
    if ours:
        local = {"num_cpus": workers, "include_dashboard": False} if address is None else {}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, module=r"ray\..*")
            warnings.filterwarnings("ignore", category=ResourceWarning)
            try:
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **local)
            except ConnectionError as error:
                raise ValueError(f"There is no Ray cluster at `address` {address!r}: {error}") from None
    try:
        yield
    finally:
        if ours:
            ray.shutdown()


@contextmanager
def _watched(watch: Callable[[], None] | None) -> Iterator[None]:
    """Call ``watch`` twice a second until the block ends, and once more then."""
    if watch is None:
        yield
        return
    try:
        with _twice_a_second(watch):
            yield
    finally:
        watch()


@contextmanager
def _twice_a_second(look: Callable[[], bool | None]) -> Iterator[None]:
    """Call ``look`` from a thread of its own while the block runs, or until it returns True."""
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(0.5):
            if look():
                return

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
