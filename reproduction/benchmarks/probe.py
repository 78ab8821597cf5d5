"""What a measurement of smoothness costs: time, memory, and eigenvalue tracking beside it.

    python reproduction/benchmarks/probe.py [--tasks lstm …] [--json PATH]
        [--parts cost run budget geometry rival memory]

Everything is timed in CPU time of one thread, and the variants take turns in one process, so that a busy
machine slows them alike; medians count.

The C library's allocator gives large blocks back to the system and has to fetch them again page by page.
How often it does so depends on the layout of the heap by chance: one plain step of the LSTM costs between 0
and 28,000 page faults, up to a third of its time. By default the program therefore tells it to keep its
memory, as the allocators of accelerators do; ``--allocator default`` leaves it as it is.

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
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn

import curvestep as cs
from curvestep.smoothness import probed_step
from curvestep.smoothness.geometry import Geometry
from curvestep_reproduction.models import LSTMModel, ResNet20


def lstm(quick=False):
    model = LSTMModel(2_000 if quick else 10_000)
    tokens = torch.randint(model.embedding.num_embeddings, (36, 20))
    return model, lambda: F.cross_entropy(model(tokens[:-1])[0].flatten(0, 1), tokens[1:].flatten())


def resnet20(quick=False):
    model = ResNet20()
    size = 16 if quick else 64
    x, y = torch.randn(size, 3, 32, 32), torch.randint(10, (size,))
    return model, lambda: F.cross_entropy(model(x), y)


def mlp(quick=False):
    width = 64 if quick else 512
    model = nn.Sequential(
        nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10)
    )
    x, y = torch.randn(128, 64), torch.randint(10, (128,))
    return model, lambda: F.cross_entropy(model(x), y)


TASKS = {"lstm": lstm, "resnet20": resnet20, "mlp": mlp}
LABELS = {"lstm": "LSTM 128/200", "resnet20": "ResNet20", "mlp": "MLP 64-512-512-10"}
MODELS = 4
GRIDS = {1: (1.0,), 2: (0.5, 1.0), 4: (0.25, 0.5, 0.75, 1.0)}


def cpu_seconds(work):
    start = time.thread_time()
    work()
    return time.thread_time() - start


class Loop:
    """A training loop of clipped SGD or AdamW, with or without a probe."""

    def __init__(self, make, quick, *, adamw=False, **options):
        torch.manual_seed(0)
        self.model, self.loss_fn = make(quick)
        make_optimizer = partial(cs.ClippedAdamW, lr=1e-3) if adamw else partial(cs.ClippedSGD, lr=0.1)
        self.optimizer = make_optimizer(self.model.parameters(), max_norm=0.25)
        self.probe = cs.SmoothnessProbe(self.model, **options) if options else None

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

    @contextmanager
    def unprobed(self):
        """Steps of the same loop as if there were no probe."""
        probe, self.probe = self.probe, None
        due, probe.schedule.next = probe.schedule.next, None
        yield
        self.probe, probe.schedule.next = probe, due

    def steps(self, count):
        """Several training steps."""
        for _ in range(count):
            self.step()


def cost_of_one_measurement(make, *, rounds, quick):
    """Extra time of a measured step, in forward-backward passes, for 1, 2 and 4 fractions.

    The unit is what training spends on one: ``zero_grad()``, the loss, ``backward()``. In each round as many
    units as there are fractions, a plain step and a measured step of the same model follow each other; the
    medians of the three count. Several models take their turn, each for some of the rounds: of two that are
    alike one may be slower by some per cent, by where in memory it happens to lie.
    """
    units, costs = [], {}
    for n, fractions in GRIDS.items():
        passes, plain, measured = [], [], []
        for _ in range(MODELS):
            loop = Loop(make, quick, every=1, fractions=fractions)
            loop.steps(2)  # the first measurement tests itself
            for _ in range(math.ceil(rounds / MODELS)):
                with loop.unprobed():
                    passes.append(sum(cpu_seconds(loop.forward_backward) for _ in range(n)) / n)
                    plain.append(cpu_seconds(loop.step))
                measured.append(cpu_seconds(loop.step))
            assert len(loop.probe.trace) == 2 + math.ceil(rounds / MODELS)
        units.append(statistics.median(passes))
        costs[n] = (statistics.median(measured) - statistics.median(plain)) / units[-1]
    return statistics.median(units), costs


def cost_of_geometry(make, *, rounds, quick):
    """Extra time of a measurement in AdamW's own metric beside one without it, in forward-backward passes."""
    passes, plain, measured = [], [], []
    for _ in range(MODELS):
        loop = Loop(make, quick, adamw=True, every=1, fractions=(1.0,))
        loop.steps(2)
        for _ in range(math.ceil(rounds / MODELS)):
            with loop.unprobed():
                passes.append(cpu_seconds(loop.forward_backward))
            with patch.object(probed_step, "geometry_of", return_value=Geometry(missing="left out here")):
                plain.append(cpu_seconds(loop.step))
            measured.append(cpu_seconds(loop.step))
        assert loop.probe.trace[-1]["optimizer_smoothness"] > 0
    return (statistics.median(measured) - statistics.median(plain)) / statistics.median(passes)


def length_of_run(make, *, rounds, quick, every=10):
    """Time of a probed run over that of an unprobed one: ``every`` steps of one, then of the other.

    The measured step is amid its block, so that what it does to the steps after it counts too. Both are steps
    of the same model, and several models take their turn, as above.
    """
    ratios = []
    for _ in range(MODELS):
        loop = Loop(make, quick, every=every, fractions=(1.0,))
        loop.steps(1 + every // 2)  # with the self-test of the first measurement
        for _ in range(math.ceil(rounds / MODELS)):
            with loop.unprobed():
                without = cpu_seconds(partial(loop.steps, every))
            ratios.append(cpu_seconds(partial(loop.steps, every)) / without)
        assert len(loop.probe.trace) == 1 + math.ceil(rounds / MODELS)
    return statistics.median(ratios)


def length_under_budget(make, *, steps, quick, budget=0.05, block=20):
    """Time of a run with ``max_overhead`` over that of one without, self-test and all; and its rows.

    The runs take turns on one model, ``block`` steps each.
    """
    loop = Loop(make, quick, every=1, fractions=(1.0,), max_overhead=budget)
    without = 0.0
    within = 0.0
    for _ in range(steps // block):
        with loop.unprobed():
            without += cpu_seconds(partial(loop.steps, block))
        within += cpu_seconds(partial(loop.steps, block))
    return within / without, len(loop.probe.trace)


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


MEMORY_WIDTH = 1600


def memory_child(fractions, clip):
    """Peak memory of a few steps of a model that is all parameters, in a process of its own."""
    model = nn.Sequential(*[nn.Linear(MEMORY_WIDTH, MEMORY_WIDTH, bias=False) for _ in range(8)])
    x = torch.randn(4, MEMORY_WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

    def loss_fn():
        return model(x).square().mean()

    probe = cs.SmoothnessProbe(model, every=1, fractions=fractions or (1.0,))
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
        environment = {name: value for name, value in os.environ.items() if name not in STEADY}
        environment["MALLOC_MMAP_THRESHOLD_"] = "1000000"
        done = subprocess.run(arguments, check=True, capture_output=True, text=True, env=environment)
        return json.loads(done.stdout)

    (probed, size), (plain, _) = peak(*fractions), peak()
    return (probed - plain) / size


def report_cost(make, *, rounds, quick):
    seconds, costs = cost_of_one_measurement(make, rounds=rounds, quick=quick)
    print(f"  one forward-backward: {1e3 * seconds:.0f} ms")
    for n, cost in costs.items():
        print(f"  a measurement with {n} fraction{'s' * (n > 1)}: {cost:.2f} forward-backwards", flush=True)
    return {"forward_backward_seconds": seconds, "cost_in_forward_backwards": costs}


def report_run(make, *, rounds, quick):
    ratio = length_of_run(make, rounds=rounds, quick=quick)
    print(f"  whole run, every=10, one fraction: {ratio:.3f} times as long", flush=True)
    return {"run_ratio_every_10_one_fraction": ratio}


def report_budget(make, *, rounds, quick):
    ratio, rows = length_under_budget(make, steps=20 * rounds, quick=quick)
    steps = f"{20 * rounds} steps, {rows} rows"
    print(f"  max_overhead=0.05: run {ratio:.3f} times as long, {steps}", flush=True)
    return {"budget_run_ratio": ratio, "budget_rows": rows, "budget_steps": 20 * rounds}


def report_geometry(make, *, rounds, quick):
    cost = cost_of_geometry(make, rounds=rounds, quick=quick)
    print(f"  AdamW's own metric: {cost:.2f} forward-backwards more", flush=True)
    return {"geometry_in_forward_backwards": cost}


def report_rival(make, *, rounds, quick):
    loop = Loop(make, quick, every=1, fractions=(1.0,))
    loop.steps(2)
    plain = Loop(make, quick)
    plain.steps(2)
    ours = statistics.median(cpu_seconds(loop.step) - cpu_seconds(plain.step) for _ in range(rounds))
    found = []
    rival = cpu_seconds(lambda: found.append(power_iteration(plain.model, plain.loss_fn)))
    products = found[0][1]
    print(f"  power iteration: {products} products, {rival / ours:.0f} times a measurement", flush=True)
    return {"power_iteration_products": products, "power_iteration_over_probe": rival / ours}


def report_memory():
    memory = {f"{n} fraction{'s' * (n > 1)}": extra_memory(grid, clip=False) for n, grid in GRIDS.items()}
    memory["4 fractions, .grad clipped in place"] = extra_memory(GRIDS[4], clip=True)
    for name, value in memory.items():
        print(f"extra memory, {name}: {value:.2f} times the parameters", flush=True)
    return memory


PARTS = {
    "cost": report_cost, "run": report_run, "budget": report_budget, "geometry": report_geometry,
    "rival": report_rival,
}  # fmt: skip
# Memory that is freed stays with the process, so that every pass finds it there.
STEADY = {
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TOP_PAD_": "256000000",
}


def restart_with_steady_memory():
    """Run this program again with an allocator that keeps what it has, unless it does already."""
    if any(os.environ.get(name) != value for name, value in STEADY.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **STEADY})


def keep(path, results):
    """Add ``results`` to those in the file, and write them all as tables beside it."""
    known = json.loads(path.read_text()) if path.exists() else {}
    for name, values in json.loads(json.dumps(results)).items():
        known.setdefault(name, {}).update(values)
    path.write_text(json.dumps(known, indent=2) + "\n")
    path.with_suffix(".md").write_text(page(known, path))


def page(known, path):
    """The results in Markdown."""
    head = [
        "task",
        "1 fraction",
        "2",
        "4",
        "AdamW's metric",
        "run, every=10",
        "run, max_overhead=0.05",
        "power iteration",
    ]
    lines = [head, ["---"] * len(head)]
    for name, values in known.items():
        costs = values.get("cost_in_forward_backwards", {})
        cells = [f"{costs[n]:.2f}" if n in costs else "" for n in ("1", "2", "4")]
        for key, form in (
            ("geometry_in_forward_backwards", "{:.2f}"),
            ("run_ratio_every_10_one_fraction", "{:.3f}"),
            ("budget_run_ratio", "{:.3f}"),
            ("power_iteration_over_probe", "{:.0f} times"),
        ):
            cells.append(form.format(values[key]) if key in values else "")
        if any(cells):
            lines.append([name, *cells])
    memory = known.get("extra memory in parameters", {})
    return f"""# Cost of a measurement

A measurement costs about one forward-backward pass of training for each fraction of the step; a run that
measures every tenth step by one fraction is a tenth longer.

CPU time of one thread, torch {torch.__version__}, variants in turn, medians of several calls; repetitions
differ by 0.1 in the costs and by 0.03 in the lengths of runs. The steady allocator keeps freed memory.
Numbers: `{path.name}`.

```
python reproduction/benchmarks/probe.py --json docs/results/probe.json
```

{chr(10).join("| " + " | ".join(line) + " |" for line in lines)}

Peak memory beyond training's, in units of the parameters (eight layers of one size):

| fractions | times the parameters |
| --- | --- |
{chr(10).join(f"| {name} | {value:.2f} |" for name, value in memory.items())}
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tasks", nargs="*", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--parts", nargs="*", choices=[*PARTS, "memory"], default=[*PARTS, "memory"])
    parser.add_argument("--allocator", choices=["steady", "default"], default="steady")
    parser.add_argument("--quick", action="store_true", help="small models")
    parser.add_argument("--json", type=Path, help="add the results to this file")
    parser.add_argument("--memory-child", nargs="*", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--clip", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory_child is not None:
        return memory_child(tuple(arguments.memory_child), bool(arguments.clip))
    if arguments.allocator == "steady":
        restart_with_steady_memory()
    print(f"CPU time of one thread; {arguments.allocator} allocator; torch {torch.__version__}", flush=True)
    results = {}
    for task in arguments.tasks:
        print(task, flush=True)
        values = results.setdefault(f"{LABELS[task]}, {arguments.allocator} allocator", {})
        for part in arguments.parts:
            if part in PARTS:
                values |= PARTS[part](TASKS[task], rounds=arguments.rounds, quick=arguments.quick)
    if "memory" in arguments.parts:
        results["extra memory in parameters"] = report_memory()
    if arguments.json:
        keep(arguments.json, results)


if __name__ == "__main__":
    main()
