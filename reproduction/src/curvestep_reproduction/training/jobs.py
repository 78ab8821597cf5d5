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
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

from joblib.externals.loky import ProcessPoolExecutor
from joblib.externals.loky.process_executor import TerminatedWorkerError

from curvestep.checks import check_choice, check_count
from curvestep.trace.run import INTERRUPTED
from curvestep_reproduction.progress import error_line

Job = Callable[..., Any]  # takes ``threads`` by keyword
ENGINES = ("joblib", "ray")
ATTEMPTS = 3  # times that a job is started before a process that keeps dying is an error


class Outcome(NamedTuple):
    """How a job went; what it left is in its folder."""

    name: str
    error: str = ""  # in one line; empty if it raised none
    interrupted: bool = False  # it took a signal for itself, to write its checkpoint


def run_jobs(
    jobs: Mapping[str, Job],
    *,
    engine: str = "joblib",
    workers: int = 2,
    address: str | None = None,
    watch: Callable[[], None] = lambda: None,
) -> Iterator[Outcome]:
    """Run ``jobs``, functions by name, on ``workers`` processes and yield each outcome as it comes.

    A function takes the number of ``threads`` that it may use. One that raises is an outcome with an error,
    and the rest go on. If its process dies, it is run again in another one; a job whose process dies three
    times is an outcome with an error too. A run that Ctrl-C interrupted ends them all. Long jobs first keep
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
            for outcome in run:
                if outcome.interrupted:
                    raise KeyboardInterrupt
                yield outcome
    finally:
        watch()


def threads_of_each(workers: int) -> int:
    """Torch threads of each process: they share the cores, and none has more than ``OMP_NUM_THREADS``."""
    threads = max(1, (os.cpu_count() or 1) // workers)
    limit = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # a number a level of nesting
    with suppress(ValueError):
        return min(threads, int(limit) or threads)
    return threads


def _call(name: str, job: Job, threads: int, parent: int | None = None) -> Outcome:
    try:
        with _end_with_parent(parent):
            result = job(threads=threads)
    except Exception as error:
        return Outcome(name, error_line(error))
    return Outcome(name, interrupted=getattr(result, "status", "") == INTERRUPTED)


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


def _on_joblib(jobs: Mapping[str, Job], workers: int, threads: int) -> Iterator[Outcome]:
    """One executor of joblib's loky for each worker, so that a process that dies takes one job with it."""
    if workers == 1:
        for name, job in jobs.items():
            yield _call(name, job, threads)
        return
    variables = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    waiting = list(jobs)
    attempts = Counter[str]()
    # With a time after which idle processes end, should we be killed.
    start = partial(ProcessPoolExecutor, max_workers=1, timeout=60, env=variables)
    idle = [start() for _ in range(min(workers, len(jobs)))]
    running: dict[Future[Outcome], tuple[str, ProcessPoolExecutor]] = {}
    try:
        while waiting or running:
            while waiting and idle:
                name = waiting.pop(0)
                executor = idle.pop()
                attempts[name] += 1
                running[executor.submit(_call, name, jobs[name], threads, os.getpid())] = name, executor
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                name, executor = running.pop(future)
                if not isinstance(future.exception(), TerminatedWorkerError):
                    idle.append(executor)
                    yield future.result()
                    continue
                executor.shutdown(kill_workers=True)
                idle.append(start())
                if attempts[name] < ATTEMPTS:
                    waiting.append(name)
                    continue
                yield Outcome(
                    name,
                    f"its process died {ATTEMPTS} times, perhaps for lack of memory. Free some, run "
                    "the same command again",
                )
    finally:
        for executor in [*idle, *(executor for _, executor in running.values())]:
            executor.shutdown(kill_workers=True)


def _on_ray(jobs: Mapping[str, Job], workers: int, threads: int, address: str | None) -> Iterator[Outcome]:
    try:
        import ray
        from ray.exceptions import OutOfMemoryError, RayError, WorkerCrashedError
    except ImportError:
        raise ValueError(
            "`engine` 'ray' needs Ray. In curvestep's folder: pip install './reproduction[ray]'."
        ) from None
    with _ray(ray, workers, address):
        # Ray replaces a process that died; the job then goes on from its folder.
        task = ray.remote(num_cpus=1, max_retries=ATTEMPTS - 1)(_call)
        waiting = list(jobs)
        running = {}
        while waiting or running:
            while waiting and len(running) < workers:
                name = waiting.pop(0)
                running[task.remote(name, jobs[name], threads)] = name
            (done,), _ = ray.wait(list(running), num_returns=1)
            try:
                outcome = ray.get(done)
            except (OutOfMemoryError, WorkerCrashedError) as error:
                outcome = Outcome(running[done], f"{type(error).__name__}: its process died {ATTEMPTS} times")
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
