import os
from pathlib import Path

import pytest

from curvestep.lab.jobs import Job, run_jobs, threads_of_each


def threads_given(*, threads):
    return threads


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(None, 8), ("3", 3), ("3,2", 3), (" 1 ", 1), ("64", 8), ("0", 8), ("many", 8), ("", 8)],
)
def test_a_lone_worker_takes_no_more_threads_than_the_user_allows(monkeypatch, limit, expected):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if limit is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", limit)
    job = Job(name="one", folder=Path(), function=threads_given, arguments={})
    (outcome,) = run_jobs([job], workers=1)
    assert outcome.value == expected


def test_workers_share_the_cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [threads_of_each(workers) for workers in (1, 2, 3, 16)] == [8, 4, 2, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert [threads_of_each(workers) for workers in (1, 2, 3, 16)] == [3, 3, 2, 1]
