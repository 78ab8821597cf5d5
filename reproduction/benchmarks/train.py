"""The training loop against a bare loop: same model, same batches, same optimizer, interleaved.

    python reproduction/benchmarks/train.py [--rounds 20] [--steps 3] [--json PATH]

Each round times a few steps of the bare loop and of ours, in alternating order, as CPU time of the process,
so that other work on the machine counts little. What is printed is the median over rounds of the ratio of
speeds, with the least and the largest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from curvestep_reproduction.progress import Progress
from curvestep_reproduction.recipes import Recipe, get_recipe, with_fields
from curvestep_reproduction.tasks import Task, make_task
from curvestep_reproduction.training.devices import make_fabric
from curvestep_reproduction.training.loop import _loop, _StatusFile
from curvestep_reproduction.training.run_folder import open_run
from curvestep_reproduction.training.session import Session, make_optimizer

RECIPES = {
    "ptb-lstm": get_recipe("ptb-lstm", probe_every=0, steps=10**6, eval_size=2000),
    "cifar-resnet20": get_recipe("cifar-resnet20", probe_every=0, steps=10**6, eval_size=200),
}


def bare_loop(recipe: Recipe, task: Task) -> Callable[[int], None]:
    """What a person would write by hand: no records, no checkpoints, no progress, no devices."""
    model = task.build()
    optimizer = make_optimizer(recipe, model)
    model.train()
    position, state = 0, None

    def run(steps: int) -> None:
        nonlocal position, state
        for _ in range(steps):
            loss, state = task.loss(model, task.batch(position), state)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            position += 1

    return run


def our_loop(recipe: Recipe, task: Task, folder: Path) -> Callable[[int], None]:
    """The loop of `curvestep_reproduction.training.loop`, a few steps at a time."""
    run_folder = open_run(folder, recipe, resume=False)
    fabric = make_fabric(recipe)
    fabric.launch()
    session = Session(fabric, run_folder, task)
    status_file = _StatusFile(run_folder, session, 60.0)

    def run(steps: int) -> None:
        # One step more would evaluate and save, as at the end of a run: that is not the loop's cost.
        stop = threading.Event()
        target = session.step + steps

        class StopAtTarget(Progress):
            def update(self, done: float, **numbers: float) -> None:
                if done == target:
                    stop.set()

        session.save = lambda: None  # pyright: ignore[reportAttributeAccessIssue] (nothing to resume here)
        _loop(session, 10**6, status_file, stop, StopAtTarget("", 10**6, shown=False))

    return run


def seconds(function: Callable[[int], None], steps: int) -> float:
    start = time.process_time()
    function(steps)
    return (time.process_time() - start) / steps


def compare(recipe: Recipe, *, rounds: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    task = make_task(recipe, offline=True)
    with tempfile.TemporaryDirectory() as folder:
        bare, ours = bare_loop(recipe, task), our_loop(recipe, task, Path(folder) / "run")
        bare(2), ours(2)
        pairs = []
        for number in range(rounds):
            if number % 2:
                mine = seconds(ours, steps)
                pairs.append((seconds(bare, steps), mine))
            else:
                pairs.append((seconds(bare, steps), seconds(ours, steps)))
    ratios = [b / o for b, o in pairs]
    return {
        "bare_seconds": statistics.median(b for b, _ in pairs),
        "our_seconds": statistics.median(o for _, o in pairs),
        "speed": statistics.median(ratios),
        "least": min(ratios),
        "largest": max(ratios),
        "data": task.data_source,
    }


def layouts(*, rounds: int, steps: int) -> float:
    """How much faster ResNet20 trains in channels_last than in the default layout."""
    recipe = with_fields(RECIPES["cifar-resnet20"])
    tasks = [make_task(recipe, offline=True) for _ in range(2)]
    tasks[1]._layout = torch.contiguous_format  # pyright: ignore[reportAttributeAccessIssue]
    last, first = (bare_loop(recipe, task) for task in tasks)
    last(2), first(2)
    return statistics.median(seconds(first, steps) / seconds(last, steps) for _ in range(rounds))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {
        name: compare(recipe, rounds=arguments.rounds, steps=arguments.steps)
        for name, recipe in RECIPES.items()
    }
    for name, result in results.items():
        bare, ours = 1e3 * result["bare_seconds"], 1e3 * result["our_seconds"]
        spread = f"[{result['least']:.3f}, {result['largest']:.3f}]"
        print(
            f"{name:15} bare {bare:.1f} ms, ours {ours:.1f} ms a step: speed {result['speed']:.3f} {spread}"
        )
    results["channels_last"] = layouts(rounds=max(3, arguments.rounds // 3), steps=arguments.steps)
    print(f"cifar-resnet20  channels_last {results['channels_last']:.2f} times as fast as the default layout")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
