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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from joblib.externals.loky import ProcessPoolExecutor
from joblib.externals.loky.process_executor import TerminatedWorkerError

from curvestep.checks import check_choice, check_count
from curvestep_reproduction.progress import error_line

ENGINES = ("joblib", "ray")
ATTEMPTS = 3  # times that a job is started before a process that keeps dying is an error


@dataclass(frozen=True, kw_only=True)
class Job:
    """One function call that leaves its result in a folder."""

    name: str  # unlike that of any other
    folder: Path  # where the result is, for displays of progress
    function: Callable[..., Any]  # takes ``threads`` besides ``arguments``
    arguments: dict[str, Any]  # by keyword
    total: int = 0  # steps that it takes, for displays of progress


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """Result of a job: its value, or the error in one line."""

    name: str
    value: Any = None
    error: str = ""


def stop_if_interrupted(outcome: JobResult) -> None:
    """Raise ``KeyboardInterrupt`` again if a run in this very process caught it to write a checkpoint."""
    if getattr(outcome.value, "status", "") == "interrupted":
        raise KeyboardInterrupt


def run_jobs(
    jobs: Sequence[Job],
    *,
    engine: str = "joblib",
    workers: int = 2,
    address: str | None = None,
    watch: Callable[[], None] = lambda: None,
) -> Iterator[JobResult]:
    """Run ``jobs`` on ``workers`` processes and yield each outcome as it comes.

    A job that raises is an outcome with an error, and the rest go on. If its process dies, it is run again in
    another one; a job whose process dies three times is an outcome with an error too. Long jobs first keep
    all processes busy to the end. ``address`` is that of a Ray cluster, whose nodes must share the folders;
    None starts one here. ``watch`` is called twice a second meanwhile, to show how far things are.
    """
    check_choice("engine", engine, ENGINES)
    check_count("workers", workers)
    if address is not None and engine != "ray":
        raise ValueError(f"`address` is for the engine 'ray', got {address!r} with {engine!r}.")
    threads = threads_of_each(workers)
    run = _on_ray(jobs, workers, threads, address) if engine == "ray" else _on_joblib(jobs, workers, threads)
    try:
        with _twice_a_second(watch):
            yield from run
    finally:
        watch()


def threads_of_each(workers: int) -> int:
    """Torch threads of each process: they share the cores, and none has more than ``OMP_NUM_THREADS``."""
    threads = max(1, (os.cpu_count() or 1) // workers)
    limit = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # a number a level of nesting
    with suppress(ValueError):
        return min(threads, int(limit) or threads)
    return threads


def _call(job: Job, threads: int, parent: int | None = None) -> JobResult:
    try:
        with _end_with_parent(parent):
            return JobResult(name=job.name, value=job.function(**job.arguments, threads=threads))
    except Exception as error:
        return JobResult(name=job.name, error=error_line(error))


@contextmanager
def _end_with_parent(parent: int | None) -> Iterator[None]:
    """Send this worker SIGTERM when its parent dies; the job can be resumed."""
    if parent is None:
        yield
        return

    def end_if_orphaned() -> bool:
        orphaned = os.getppid() != parent
        if orphaned:
            os.kill(os.getpid(), signal.SIGTERM)
        return orphaned  # once only: a second signal would not wait for the checkpoint

    with _twice_a_second(end_if_orphaned):
        yield
    if os.getppid() != parent:
        os._exit(1)  # else this process would wait for another job for ever


def _on_joblib(jobs: Sequence[Job], workers: int, threads: int) -> Iterator[JobResult]:
    """One executor of joblib's loky for each worker, so that a process that dies takes one job with it."""
    if workers == 1:
        yield from (_call(job, threads) for job in jobs)
        return
    variables = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    waiting, attempts = list(jobs), Counter[str]()
    # With a time after which idle processes end, should we be killed.
    start = partial(ProcessPoolExecutor, max_workers=1, timeout=60, env=variables)
    idle = [start() for _ in range(min(workers, len(jobs)))]
    running: dict[Future[JobResult], tuple[Job, ProcessPoolExecutor]] = {}
    try:
        while waiting or running:
            while waiting and idle:
                job, executor = waiting.pop(0), idle.pop()
                attempts[job.name] += 1
                running[executor.submit(_call, job, threads, os.getpid())] = job, executor
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                job, executor = running.pop(future)
                if not isinstance(future.exception(), TerminatedWorkerError):
                    idle.append(executor)
                    yield future.result()
                    continue
                executor.shutdown(kill_workers=True)
                idle.append(start())
                if attempts[job.name] < ATTEMPTS:
                    waiting.append(job)
                    continue
                yield JobResult(
                    name=job.name,
                    error=f"its process died {ATTEMPTS} times, perhaps for lack of memory. Free some, run "
                    "the same command again",
                )
    finally:
        for executor in [*idle, *(executor for _, executor in running.values())]:
            executor.shutdown(kill_workers=True)


def _on_ray(jobs: Sequence[Job], workers: int, threads: int, address: str | None) -> Iterator[JobResult]:
    try:
        import ray
        from ray.exceptions import OutOfMemoryError, RayError, WorkerCrashedError
    except ImportError:
        raise ValueError("`engine` 'ray' needs Ray. In curvestep's folder: pip install '.[ray]'.") from None
    with _ray(ray, workers, address):
        # Ray replaces a process that died; the job then goes on from its folder.
        task = ray.remote(num_cpus=1, max_retries=ATTEMPTS - 1)(_call)
        waiting, running = list(jobs), {}
        while waiting or running:
            while waiting and len(running) < workers:
                job = waiting.pop(0)
                running[task.remote(job, threads)] = job
            (done,), _ = ray.wait(list(running), num_returns=1)
            try:
                outcome = ray.get(done)
            except (OutOfMemoryError, WorkerCrashedError) as error:
                name = running[done].name
                outcome = JobResult(
                    name=name, error=f"{type(error).__name__}: its process died {ATTEMPTS} times"
                )
            except RayError as error:
                left = len(waiting) + len(running)
                raise RuntimeError(
                    f"Ray lost the node that the jobs ran on ({type(error).__name__}); {left} of {len(jobs)} "
                    "jobs are left. What is finished is kept: run the same command again."
                ) from error
            del running[done]
            yield outcome


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
def _twice_a_second(function: Callable[[], bool | None]) -> Iterator[None]:
    """Call ``function`` in a thread while the block runs, or until it returns True."""
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(0.5):
            if function():
                return

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
