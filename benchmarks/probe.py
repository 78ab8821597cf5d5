"""What a measurement of smoothness costs: time, memory, and eigenvalue tracking beside it.

    python benchmarks/probe.py [--rounds 12] [--quick] [--json PATH]

Everything is timed in CPU time of one thread, and the variants take turns in one process, so that a busy
machine slows them alike; times are of the fastest rounds, because other work on the machine only adds.
The rival is power iteration over Hessian products by double backward, as PyHessian does it (at most 100
products, relative tolerance 1e-3), written out here. Cockpit cannot be timed: it does not import with a
current setuptools.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import clipwise as cw
from clipwise.lab.models import LSTMModel, ResNet20


def lstm(quick=False):
    model = LSTMModel(2_000 if quick else 10_000)
    tokens = torch.randint(model.embedding.num_embeddings, (36, 20))
    return model, lambda: F.cross_entropy(model(tokens[:-1])[0].flatten(0, 1), tokens[1:].flatten())


def resnet20(quick=False):
    model = ResNet20()
    size = 16 if quick else 64
    x, y = torch.randn(size, 3, 32, 32), torch.randint(10, (size,))
    return model, lambda: F.cross_entropy(model(x), y)


TASKS = {"LSTM, 128/200": lstm, "ResNet20": resnet20}


def cpu_seconds(work):
    start = time.thread_time()
    work()
    return time.thread_time() - start


class Loop:
    """A training loop of plain clipped SGD, with or without a probe."""

    def __init__(self, make, quick, **options):
        torch.manual_seed(0)
        self.model, self.loss_fn = make(quick)
        self.optimizer = cw.ClippedSGD(self.model.parameters(), lr=0.1, max_norm=0.25)
        self.probe = cw.SmoothnessProbe(self.model, **options) if options else None

    def forward_backward(self):
        """One pass."""
        self.optimizer.zero_grad()
        self.loss_fn().backward()

    def step(self):
        """One training step."""
        self.forward_backward()
        if self.probe is None:
            self.optimizer.step()
        else:
            with self.probe(self.loss_fn):
                self.optimizer.step()

    def steps(self, count):
        """Several training steps."""
        for _ in range(count):
            self.step()


def cost_of_one_measurement(make, *, rounds, quick):
    """Extra CPU time of a measured step, in forward-backward passes, for 1, 2 and 4 fractions."""
    grids = {1: (1.0,), 2: (0.5, 1.0), 4: (0.25, 0.5, 0.75, 1.0)}
    loops = {n: Loop(make, quick, every=1, fractions=fractions) for n, fractions in grids.items()}
    loops[0] = Loop(make, quick)
    for loop in loops.values():
        loop.steps(2)  # the first measurement tests itself
    times = {n: [] for n in loops}
    passes = []
    for _ in range(rounds):
        passes.append(cpu_seconds(loops[0].forward_backward))
        for n, loop in loops.items():
            times[n].append(cpu_seconds(loop.step))
    one, plain = min(passes), min(times[0])
    return one, {n: (min(times[n]) - plain) / one for n in grids}


def length_of_run(make, *, rounds, quick, every=10):
    """Time of a probed run over that of an unprobed one: the two step in turn."""
    plain, probed = Loop(make, quick), Loop(make, quick, every=every, fractions=(1.0,))
    plain.step()
    probed.step()  # the self-test of the first measurement
    times = {"plain": [], "between": [], "measured": []}
    for k in range(1, rounds * every + 1):
        times["plain"].append(cpu_seconds(plain.step))
        times["between" if k % every else "measured"].append(cpu_seconds(probed.step))
    # Not the fastest: of few measured steps that is later than of many others.
    usual = {kind: statistics.quantiles(values)[0] for kind, values in times.items()}
    return ((every - 1) * usual["between"] + usual["measured"]) / (every * usual["plain"])


def length_under_budget(*, rounds, steps=400, budget=0.05):
    """Time of runs with ``max_overhead`` over that of runs without, self-test included."""

    def small(quick):
        model = nn.Sequential(
            nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10)
        )
        x, y = torch.randn(128, 64), torch.randint(10, (128,))
        return model, lambda: F.cross_entropy(model(x), y)

    Loop(small, False).steps(5)
    without, budgeted, rows = [], [], 0
    for _ in range(rounds):  # whole runs, because the probe times the steps of its own run
        without.append(cpu_seconds(lambda: Loop(small, False).steps(steps)))
        probed = Loop(small, False, every=1, fractions=(1.0,), max_overhead=budget)
        budgeted.append(cpu_seconds(lambda probed=probed: probed.steps(steps)))
        rows = len(probed.probe.trace)
    return statistics.median(budgeted) / statistics.median(without), rows


def power_iteration(model, loss_fn, *, max_products=100, tolerance=1e-3):
    """Top eigenvalue by power iteration with double backward, as PyHessian computes it."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss_fn(), parameters, create_graph=True)
    v = [torch.randn_like(p) for p in parameters]
    eigenvalue = None
    count = 0
    while count < max_products:
        count += 1
        length = math.sqrt(sum(t.square().sum().item() for t in v))
        v = [t / length for t in v]
        product = torch.autograd.grad(gradients, parameters, grad_outputs=v, retain_graph=True)
        last, eigenvalue = eigenvalue, sum((a * b).sum().item() for a, b in zip(product, v, strict=True))
        if last is not None and abs(eigenvalue - last) <= tolerance * abs(eigenvalue):
            break
        v = [t.detach() for t in product]
    return eigenvalue, count


def cost_of_eigenvalue(make, *, quick, max_products):
    """CPU time of the rival's measurement and of ours, in forward-backward passes."""
    loop = Loop(make, quick)
    loop.step()
    one = min(cpu_seconds(loop.forward_backward) for _ in range(5))
    found = []
    rival = cpu_seconds(
        lambda: found.append(power_iteration(loop.model, loop.loss_fn, max_products=max_products))
    )
    return rival / one, found[0][1]


MEMORY_WIDTH = 1600


def memory_child(fractions, clip):
    """Peak memory of a few steps of a model that is all parameters, in a process of its own."""
    model = nn.Sequential(*[nn.Linear(MEMORY_WIDTH, MEMORY_WIDTH, bias=False) for _ in range(8)])
    x = torch.randn(4, MEMORY_WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

    def loss_fn():
        return model(x).square().mean()

    probe = cw.SmoothnessProbe(model, every=1, fractions=fractions or (1.0,))
    for _ in range(3):
        optimizer.zero_grad()
        loss_fn().backward()
        if fractions:
            with probe(loss_fn):
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), 1e-3, foreach=False)
                optimizer.step()
        else:
            optimizer.step()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    # Not getrusage: its peak is inherited from the process that started this one.
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    print(json.dumps([peak, size]))


def extra_memory(fractions, *, clip=True):
    """Peak memory of probed steps minus that of plain ones, in units of the parameters."""

    def peak(*options):
        arguments = [sys.executable, __file__, "--memory-child", *map(str, options), "--clip", str(int(clip))]
        # Freed memory goes back to the system at once, so that the peak is what is held.
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
        done = subprocess.run(arguments, check=True, capture_output=True, text=True, env=environment)
        return json.loads(done.stdout)

    (probed, size), (plain, _) = peak(*fractions), peak()
    return (probed - plain) / size


def report_task(name, make, *, rounds, quick):
    seconds, costs = cost_of_one_measurement(make, rounds=rounds, quick=quick)
    print(f"\n{name}: one forward-backward {1e3 * seconds:.0f} ms")
    for n, cost in costs.items():
        print(f"  a measurement with {n} fraction{'s' * (n > 1)}: {cost:.2f} forward-backwards", flush=True)
    run = length_of_run(make, rounds=rounds, quick=quick)
    print(f"  whole run, every=10, one fraction: {run:.3f} times as long", flush=True)
    eigen, products = cost_of_eigenvalue(make, quick=quick, max_products=20 if quick else 100)
    print(
        f"  power iteration: {eigen:.0f} forward-backwards ({products} products), {eigen / costs[1]:.0f} "
        "times a measurement with one fraction at the same interval",
        flush=True,
    )
    return {
        "forward_backward_seconds": seconds,
        "cost_in_forward_backwards": costs,
        "run_ratio_every_10_one_fraction": run,
        "power_iteration_in_forward_backwards": eigen,
        "power_iteration_products": products,
        "power_iteration_over_probe": eigen / costs[1],
    }


def report(*, rounds, quick):
    print(__doc__.split("\n\n")[2], flush=True)
    results = {name: report_task(name, make, rounds=rounds, quick=quick) for name, make in TASKS.items()}
    ratio, rows = length_under_budget(rounds=3 if quick else 7)
    print(f"\nmax_overhead=0.05: run {ratio:.3f} times as long, {rows} rows", flush=True)
    grids = {"1 fraction": (1.0,), "2 fractions": (0.5, 1.0), "4 fractions": (0.25, 0.5, 0.75, 1.0)}
    memory = {name: extra_memory(grid, clip=False) for name, grid in grids.items()}
    memory["4 fractions, .grad clipped in place"] = extra_memory(grids["4 fractions"], clip=True)
    for name, value in memory.items():
        print(f"extra memory, {name}: {value:.2f} times the parameters")
    return {
        **results,
        "max_overhead=0.05": {"run_ratio": ratio, "rows": rows},
        "extra memory, in parameters": memory,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--quick", action="store_true", help="small models, a minute in all")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--memory-child", nargs="*", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--clip", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory_child is not None:
        return memory_child(tuple(arguments.memory_child), bool(arguments.clip))
    results = report(rounds=arguments.rounds, quick=arguments.quick)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
