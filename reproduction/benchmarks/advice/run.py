"""Runs that advise is asked about, each once: a line of JSON in the rows' folder, and a trace beside it.

    python -m reproduction.benchmarks.advice --rows FOLDER --part develop | judge | judge-bounds
        [--tasks …] [--kinds …] [--seeds 1 2]

Every task of :data:`DEVELOPMENT` or :data:`JUDGED` is trained by five kinds of optimizer at seven learning
rates over three decades, and at more where the best one is an end of that grid. Those of ``judge-bounds``
have one kind each, three seeds, and rates from a hundredth to thirty times the best. All is safe to kill at
any time.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from reproduction.benchmarks.advice.held_out import HELD_OUT
from reproduction.benchmarks.advice.judged_bounds import BOUNDS, BOUNDS_KIND
from reproduction.benchmarks.advice.noisy import NOISY, constant_loss
from reproduction.benchmarks.advice.spent import SPENT
from reproduction.benchmarks.calibrate.data import Batch
from reproduction.benchmarks.calibrate.methods import first_norm
from reproduction.benchmarks.calibrate.run import NUM_JUDGES, judged
from reproduction.benchmarks.calibrate.scheduled import Recipe
from reproduction.benchmarks.calibrate.tasks import RECIPES, trivial_loss
from torch import nn
from torch.optim import Optimizer

import curvestep as cs
from curvestep.calibration.lr_schedules import SCHEDULES

# By name from calibrate's benchmark. The second row judged a first rule, the third a second one,
# noisy.py a third, spent.py a fourth; all then changed: what judges now is in held_out.py.
DEVELOPMENT = (
    "MLP, digits", "autoencoder", "deep MLP, poor start", "regression", "logistic regression",
    "CNN, BatchNorm", "char LSTM", "char GPT, 2 layers", "word transformer",
    "char RNN", "GRU, words", "MLP-Mixer", "conv. autoencoder", "deep ReLU MLP", "char transformer",
    "tiny diffusion", "ResNet8, BatchNorm", "recommender", "CNN",
    "table, categories", "communities of graphs", "masked pixels, MADE", "halves of digits",
    "spread of a set", "denoising U-Net", "AWD-LSTM, dropout", "GRU, batches of 4",
    "separable convolutions, GroupNorm", *(recipe.task.name for recipe in (*NOISY, *SPENT)),
)  # fmt: skip
JUDGED = tuple(recipe.task.name for recipe in HELD_OUT)
OWN = {recipe.task.name: recipe for recipe in (*NOISY, *SPENT, *HELD_OUT, *BOUNDS)}
JUDGED_BOUNDS = tuple(recipe.task.name for recipe in BOUNDS)
PARTS = {"develop": DEVELOPMENT, "judge": JUDGED, "judge-bounds": JUDGED_BOUNDS}
SEEDS = (1, 2)
BOUNDS_SEEDS = (1, 2, 3)
BELOW_BEST, ABOVE_BEST = 4, 3  # rates of a grid of bounds: to a hundredth of the best, and to thirty times it
STEPS, EVERY = 150, 5
LOWEST = {"plain": 1e-2, "clipped": 1e-2, "momentum": 1e-3, "adamw": 1e-4, "adamw, schedule": 1e-4}
NUM_RATES, MOST_RATES = 7, 10
FAR = (10.0, 100.0)  # times the largest rate of the grid: starts that are far too large
RATIO = 10**0.5  # of neighbours on the grid

Job = dict[str, Any]


def recipe_of(task: str) -> Recipe:
    """A task of this benchmark or of calibrate's, cut to a few seconds."""
    recipe = OWN[task] if task in OWN else RECIPES[task]
    return replace(recipe, task=replace(recipe.task, steps=STEPS))


def trivial_of(task: str, judges: list[Batch]) -> float:
    """The loss of predicting the same for every input."""
    if task in OWN:
        return constant_loss(OWN[task], judges)
    return trivial_loss(RECIPES[task], judges)


def optimizer_of(
    kind: str, recipe: Recipe, model: nn.Module, lr: float, max_norm: float | None
) -> tuple[Optimizer, float]:
    """The optimizer of a kind, and the threshold that its gradients are clipped at; inf for none."""
    options: dict[str, Any] = {"lr": lr, "nonfinite": "propagate"}
    if kind == "plain" or kind == "momentum":
        norm = math.inf if max_norm is None else max_norm
        momentum = 0.9 if kind == "momentum" else 0.0
        return cs.ClippedSGD(model.parameters(), max_norm=norm, momentum=momentum, **options), norm
    if kind == "clipped":
        norm = first_norm(recipe, 0, model) if max_norm is None else max_norm
        return cs.ClippedSGD(model.parameters(), max_norm=norm, **options), norm
    norm = max_norm
    if norm is None:
        norm = 1.0 if kind == "adamw, schedule" else math.inf
    groups = recipe.groups(model, recipe.weight_decay)
    return cs.ClippedAdamW(groups, max_norm=norm, betas=recipe.betas, **options), norm


def schedule_of(kind: str) -> str:
    return "warmup-decay" if kind == "adamw, schedule" else "constant"


def train(job: Job, trace: Path | None) -> Job:
    """Run one job; its row."""
    torch.set_num_threads(1)
    recipe, started = recipe_of(job["task"]), time.process_time()
    model, judges = recipe.task.start(job["seed"]), recipe.judging(NUM_JUDGES)
    first = judged(recipe, model, judges)
    model.train()
    optimizer, norm = optimizer_of(job["kind"], recipe, model, job["lr"], job.get("max_norm"))
    probe = None
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        probe = cs.SmoothnessProbe(model, every=EVERY, trace=trace, if_exists="overwrite").watch(optimizer)
    is_finite = _run(recipe, optimizer, model, job, probe)
    last = judged(recipe, model, judges) if is_finite else math.nan
    found = {"first": first, "trivial": trivial_of(job["task"], judges), "clipped_at": norm}
    found = {name: value if math.isfinite(value) else None for name, value in found.items()}
    seconds = round(time.process_time() - started, 2)
    return {**job, **found, "loss": last if math.isfinite(last) else None, "seconds": seconds}


def _run(
    recipe: Recipe, optimizer: Optimizer, model: nn.Module, job: Job, probe: cs.SmoothnessProbe | None
) -> bool:
    """Whether the losses stayed finite; a lost run goes on until the probe has seen it twice."""
    peaks = [group["lr"] for group in optimizer.param_groups]
    shape = SCHEDULES[schedule_of(job["kind"])](STEPS)
    lost = 0
    loss_of = recipe.task.loss  # what the loss reads is put back: not the streams of the task
    for k, batch in enumerate(islice(recipe.task.stream(job["seed"], "training"), STEPS)):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * shape[k]
        optimizer.zero_grad()
        closure = lambda batch=batch: loss_of(model, batch)  # noqa: E731
        loss = closure() if probe is None else probe.record(closure)
        lost += not torch.isfinite(loss).item()
        if lost > 2 * EVERY:
            break
        loss.backward()
        optimizer.step()
    if probe is not None:
        probe.close()
    return lost == 0


class Rows:
    """The cache: every run once."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.rows = folder, dict[str, Job]()
        for path in sorted(folder.glob("*.jsonl")):
            for text in path.read_text(encoding="utf-8").splitlines():
                if text.endswith("}"):  # else it was torn
                    row = json.loads(text)
                    self.rows[key(row)] = row

    def run(self, *, probed: bool = True, **job: Any) -> Job:
        """The row of a job, trained if it is not there."""
        if key(job) not in self.rows:
            row = train(job, self.trace_of(job) if probed else None)
            self.keep(row)
            print(
                len(self.rows), {name: row[name] for name in (*job, "first", "loss", "seconds")}, flush=True
            )
        return self.rows[key(job)]

    def trace_of(self, job: Job) -> Path:
        """Where the trace of a probed run is kept."""
        name = "-".join(str(job[name]) for name in ("task", "kind", "seed", "lr"))
        return self.folder / "traces" / f"{name.replace(' ', '_').replace(',', '')}.jsonl"

    def keep(self, row: Job) -> None:
        """Write a finished row."""
        self.rows[key(row)] = row
        with (self.folder / "rows.jsonl").open("a", encoding="utf-8") as file:
            file.write("\n" + json.dumps(row) + "\n")  # the first ends a line that was torn

    def calibrated(self, task: str, kind: str, seed: int) -> Job:
        """What calibrate says, trained; its row, with ``lr`` None where it refuses."""
        name = {"task": task, "kind": kind, "seed": seed, "method": "calibrate"}
        if key(name) not in self.rows:
            found = _calibrate(task, kind, seed)
            row = {**name, **found, "loss": None}
            if found["found_lr"] is not None:
                job = {"task": task, "kind": kind, "seed": seed, "lr": found["found_lr"]}
                row["loss"] = train({**job, "max_norm": found["max_norm"]}, None)["loss"]
            self.keep(row)
            print(len(self.rows), row, flush=True)
        return self.rows[key(name)]

    def key_of(self, **job: Any) -> str:
        """The name of a job's row."""
        return key(job)


def _calibrate(task: str, kind: str, seed: int) -> Job:
    recipe = recipe_of(task)
    model = recipe.task.start(seed).train()
    optimizer, _ = optimizer_of(kind, recipe, model, 1.0, math.inf)
    batches = recipe.task.stream(seed, "measuring")
    try:
        found = cs.calibrate(
            model, lambda batch: recipe.task.loss(model, batch), batches,
            optimizer=optimizer, schedule=schedule_of(kind), num_steps=STEPS,
        )  # fmt: skip
    except ValueError as error:
        return {"found_lr": None, "problem": str(error)}
    norm = found.max_norm if found.max_norm is not None else math.inf
    return {"found_lr": found.lr, "max_norm": norm if math.isfinite(norm) else None}


def key(job: Job) -> str:
    """What makes two runs the same."""
    name = [job.get(name) for name in ("task", "kind", "seed", "lr", "method")]
    return json.dumps([*name, job["max_norm"]] if "max_norm" in job else name)


def loss_of(row: Job) -> float:
    """The final loss, that of the start if the run was lost or ended above it."""
    return row["first"] if row["loss"] is None else min(row["loss"], row["first"])


def rate(kind: str, index: int) -> float:
    """A learning rate of the grid."""
    return float(f"{LOWEST[kind] * RATIO**index:.3g}")


def grid(run: Callable[[float], float], kind: str) -> list[float]:
    """Rates of the grid: seven, and more on the side of the best while that is an end."""
    losses = {k: run(rate(kind, k)) for k in range(NUM_RATES)}
    while len(losses) < MOST_RATES:
        best = min(losses, key=lambda k: losses[k])
        if min(losses) < best < max(losses):
            break
        further = best - 1 if best == min(losses) else best + 1
        losses[further] = run(rate(kind, further))
    return [rate(kind, k) for k in sorted(losses)]


def grid_about_best(run: Callable[[float], float], kind: str) -> list[float]:
    """Rates from a hundredth to thirty times the best, which has two worse neighbours on each side."""
    losses: dict[int, float] = {}
    best = NUM_RATES // 2
    while missing := [k for k in (best, best - 1, best + 1, best - 2, best + 2) if k not in losses]:
        losses[missing[0]] = run(rate(kind, missing[0]))
        best = min(losses, key=lambda k: losses[k])
    return [rate(kind, k) for k in range(best - BELOW_BEST, best + ABOVE_BEST + 1)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, required=True, help="folder of the cached runs")
    parser.add_argument("--part", choices=list(PARTS), required=True)
    parser.add_argument("--tasks", nargs="+", metavar="TASK")
    parser.add_argument("--kinds", nargs="+", choices=list(LOWEST), default=list(LOWEST), metavar="KIND")
    parser.add_argument("--seeds", nargs="+", type=int, help="default: 1 2, and 1 2 3 for bounds")
    parser.add_argument("--far", action="store_true", help="also starts beyond the grid")
    parser.add_argument("--calibrate", action="store_true", help="also what calibrate says, trained")
    options = parser.parse_args()
    rows, tasks = Rows(options.rows), PARTS[options.part]
    is_bounds = options.part == "judge-bounds"
    seeds = options.seeds or (BOUNDS_SEEDS if is_bounds else SEEDS)
    find = grid_about_best if is_bounds else grid
    for task in options.tasks or tasks:
        if task not in tasks:
            raise SystemExit(f"{task} is no task of this part: {', '.join(tasks)}.")
        for kind in (BOUNDS_KIND[task],) if is_bounds else options.kinds:
            rates = find(lambda lr: loss_of(rows.run(task=task, kind=kind, seed=seeds[0], lr=lr)), kind)  # noqa: B023
            for seed in seeds:
                for lr in rates:
                    rows.run(task=task, kind=kind, seed=seed, lr=lr)
                for factor in FAR if options.far else ():
                    rows.run(task=task, kind=kind, seed=seed, lr=float(f"{factor * rates[-1]:.3g}"), far=True)
                if options.calibrate:
                    rows.calibrated(task, kind, seed)


if __name__ == "__main__":
    main()
