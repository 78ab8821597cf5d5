"""What a measurement costs in passes, operations and bytes; ``reproduction/benchmarks/probe.py`` times it."""

import json
import os
import subprocess
import sys
from collections import UserList

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from curvestep.smoothness.probe import SmoothnessProbe
from tests.models import mlp
from tests.smoothness.loops import block_steps

# Peak memory of a few steps of a model that is all parameters, and the bytes of these.
MEMORY = """
import json, sys
from pathlib import Path
import torch
from torch import nn
from curvestep.smoothness.probe import SmoothnessProbe

measured, clipped = sys.argv[1:]
model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(8)])
x = torch.randn(4, 1024)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
probe = SmoothnessProbe(model, every=1, fractions=(0.25, 0.5, 0.75, 1.0))
loss_fn = lambda: model(x).square().mean()
for _ in range(3):
    optimizer.zero_grad()
    loss_fn().backward()
    if measured == "plain":
        optimizer.step()
    else:
        with probe(loss_fn):
            if clipped == "clipped":
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3, foreach=False)
            optimizer.step()
status = Path("/proc/self/status").read_text()
peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
print(json.dumps([1024 * peak, sum(p.nbytes for p in model.parameters())]))
"""


def counting_loop(steps, **options):
    model = mlp()
    x, y = torch.randn(5, 6), torch.randint(3, (5,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SmoothnessProbe(model, **options)
    calls = UserList()  # what a loss adds to a list is taken back

    def loss_fn():
        calls.append(probe.step)
        return F.cross_entropy(model(x), y)

    block_steps(probe, optimizer, loss_fn, steps)
    return calls


@pytest.mark.parametrize("fractions", [(1.0,), (0.5, 1.0), (0.2, 0.4, 0.6, 0.8, 1.0)])
def test_measurement_with_n_fractions_takes_n_passes_beyond_training(fractions):
    calls = counting_loop(12, every=5, fractions=fractions)
    per_step = [calls.count(step) for step in range(12)]
    expected = [1 + len(fractions) * (step % 5 == 0) for step in range(12)]
    expected[0] += 3  # the self-test, and whether the loss writes to parameters …
    expected[5] += 1  # … and once more: a missing zero_grad() does not show at the first step
    assert per_step == expected


def test_local_estimate_takes_four_more_passes():
    calls = counting_loop(3, every=1, fractions=(1.0,), estimators=("smoothness", "local_smoothness"))
    assert calls.count(2) == 1 + 1 + 4  # two central differences: the second checks the first


class Operations(TorchDispatchMode):
    """Counts what torch is asked to compute."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_step_that_is_not_measured_computes_nothing_and_calls_little():
    model = nn.Linear(2, 1)
    probe = SmoothnessProbe(model, every=10**9)
    probe.schedule.next = 10**9
    closure_calls, python_calls = [], []

    def profile(frame, event, argument):
        if event == "call":
            python_calls.append(frame.f_code.co_name)

    with Operations() as operations:
        sys.setprofile(profile)
        try:
            with probe(lambda: closure_calls.append(1)):
                pass
        finally:
            sys.setprofile(None)
    assert not closure_calls
    assert operations.count == 0
    assert len(python_calls) < 25, python_calls  # whatever the size of the model


@pytest.mark.slow
def test_extra_memory_is_within_three_times_the_parameters():
    def peak(*options):
        # Freed memory goes back to the system at once, so that the peak is what is held.
        env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", MEMORY, *options]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
        return json.loads(done.stdout)

    plain, size = peak("plain", "free")
    for clip in ("free", "clipped"):
        probed, _ = peak("measured", clip)
        assert probed - plain < 3 * size  # about 2.2: two copies, one of eight layers, the allocator's own
