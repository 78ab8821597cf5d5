"""What a measurement costs, counted where it can be counted and timed where it must be."""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clipwise as cw
from clipwise.smoothness.probe import SmoothnessProbe

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "probe.py"


def counting_loop(steps, **options):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    x, y = torch.randn(5, 6), torch.randint(3, (5,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SmoothnessProbe(model, **options)
    calls = []

    def loss_fn():
        calls.append(probe.step)
        return F.cross_entropy(model(x), y)

    for _ in range(steps):
        optimizer.zero_grad()
        loss_fn().backward()
        with probe(loss_fn):
            optimizer.step()
    return calls


@pytest.mark.parametrize("fractions", [(1.0,), (0.5, 1.0), (0.2, 0.4, 0.6, 0.8, 1.0)])
def test_measurement_with_n_fractions_takes_n_passes_beyond_training(fractions):
    calls = counting_loop(12, every=5, fractions=fractions)
    per_step = [calls.count(step) for step in range(12)]
    expected = [1 + len(fractions) * (step % 5 == 0) for step in range(12)]
    expected[0] += 2  # the self-test, once
    assert per_step == expected


def test_local_estimate_takes_two_more_passes():
    calls = counting_loop(2, every=1, fractions=(1.0,), estimators=("segment", "local"))
    assert calls.count(1) == 1 + 1 + 2


def test_step_that_is_not_measured_costs_next_to_nothing():
    model = nn.Linear(2, 1)
    probe = SmoothnessProbe(model, every=10**9)
    model.weight.grad = torch.ones_like(model.weight)
    model.bias.grad = torch.ones_like(model.bias)
    with probe(lambda: model.weight.sum() + model.bias.sum()):
        pass
    times = []
    for _ in range(500):
        start = time.thread_time()
        with probe(lambda: None):
            pass
        times.append(time.thread_time() - start)
    assert statistics.median(times) < 1e-4  # it takes about five microseconds


@pytest.mark.slow
def test_extra_memory_is_within_three_times_the_parameters():
    def peak(*options):
        command = [sys.executable, str(BENCHMARK), "--memory-child", *options]
        # Freed memory goes back to the system at once, so that the peak is what is held.
        env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
        return json.loads(done.stdout)

    (probed, size), (plain, _) = peak("0.25", "0.5", "0.75", "1.0"), peak()
    assert probed - plain < 3 * size + 16e6  # and a few megabytes of the allocator's


@pytest.mark.slow
def test_run_stays_within_its_budget_of_time():
    def run(**options):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10)
        )
        x, y = torch.randn(64, 64), torch.randint(10, (64,))
        optimizer = cw.ClippedSGD(model.parameters(), lr=0.1, max_norm=1.0)
        probe = SmoothnessProbe(model, **options)
        start = time.thread_time()
        for _ in range(300):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            with probe(lambda: F.cross_entropy(model(x), y)):
                optimizer.step()
        return time.thread_time() - start, len(probe.trace)

    run(every=10**9)
    ratios = []
    for _ in range(3):
        plain, _ = run(every=10**9)
        budgeted, rows = run(every=1, fractions=(1.0,), max_overhead=0.05)
        ratios.append(budgeted / plain)
        assert rows >= 2
    assert statistics.median(ratios) < 1.08
