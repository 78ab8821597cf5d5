"""Jobs on processes. Their functions live here, where a process that calls one need not import torch."""

import os
import signal
import sys
import time
import types
from functools import partial
from types import SimpleNamespace

import pytest

from curvestep_reproduction.training.jobs import Outcome, run_jobs, threads_of_each


def write_threads(path, *, threads):
    with path.open("a") as file:
        file.write(f"{threads} ")


@pytest.mark.parametrize(
    ("limit", "workers", "expected"),
    [
        ("", 1, 8), ("", 3, 2), ("", 16, 1), ("3", 1, 3), ("3", 3, 2), ("3,2", 1, 3), (" 1 ", 1, 1),
        ("64", 1, 8), ("0", 1, 8), ("many", 1, 8),
    ],
)  # fmt: skip
def test_workers_take_no_more_threads_than_the_user_allows(monkeypatch, limit, workers, expected):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", limit)
    assert threads_of_each(workers) == expected


@pytest.mark.slow
def test_processes_of_workers_are_told_their_threads(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = os.cpu_count() or 1
    for workers, threads in ((cores, 1), (1, cores)):
        path = tmp_path / f"workers{workers}"
        jobs = {str(i): partial(write_threads, path) for i in range(2)}
        assert [outcome.error for outcome in run_jobs(jobs, workers=workers)] == ["", ""]
        assert path.read_text() == f"{threads} " * 2


def _die_or_count(folder, threads):
    """Count this call; the process of a job called ``doomed`` dies."""
    with (folder / "calls").open("a") as file:
        file.write("x")
    if folder.name == "doomed":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)


@pytest.mark.slow
def test_a_job_whose_process_dies_is_tried_three_times(tmp_path):
    names = ["doomed", *(f"job{i}" for i in range(6))]
    for name in names:
        (tmp_path / name).mkdir()
    jobs = {name: partial(_die_or_count, tmp_path / name) for name in names}
    outcomes = {outcome.name: outcome for outcome in run_jobs(jobs, workers=2)}
    assert outcomes.keys() == set(names)
    assert "its process died 3 times" in outcomes.pop("doomed").error
    assert [outcome.error for outcome in outcomes.values()] == [""] * 6
    calls = {name: len((tmp_path / name / "calls").read_text()) for name in names}
    assert calls == {"doomed": 3, **dict.fromkeys(names[1:], 1)}  # no innocent job is counted or run again


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("WorkerCrashedError", "WorkerCrashedError: its process died 3 times"),
        ("LocalRayletDiedError", None),
        ("NodeDiedError", None),
    ],
)
def test_ray_says_whether_a_process_or_the_node_was_lost(monkeypatch, error, words):
    exceptions = pytest.importorskip("ray.exceptions")
    kind = getattr(exceptions, error)

    class FakeRay(types.ModuleType):
        """Ray without a cluster: the first job is lost, the others succeed."""

        is_initialized = staticmethod(lambda: True)
        wait = staticmethod(lambda refs, num_returns: (refs[:1], refs[1:]))

        @staticmethod
        def remote(**options):
            return lambda function: SimpleNamespace(remote=lambda name, job, threads: name)

        @staticmethod
        def get(name):
            if name == "job0":
                raise kind("lost") if error == "NodeDiedError" else kind()
            return Outcome(name)

    fake = FakeRay("ray")
    monkeypatch.setitem(sys.modules, "ray", fake)
    jobs = dict.fromkeys(("job0", "job1", "job2", "job3"), print)
    if words:
        assert [(o.name, o.error) for o in run_jobs(jobs, engine="ray")] == [
            ("job0", words), ("job1", ""), ("job2", ""), ("job3", ""),
        ]  # fmt: skip
        return
    with pytest.raises(RuntimeError, match=rf"lost the node .*\({error}\); 4 of 4 jobs are left"):
        list(run_jobs(jobs, engine="ray"))
