"""The regret of calibrated training against a tuned grid, with the rivals beside it.

    python -m benchmarks.calibrate [--part PART] [--tasks ...] [--seeds 1 2 3] [--results PATH] [--jobs 2]

Parts: ``grid`` tunes lr x max_norm on seeds of its own, ``adamw`` and ``momentum`` do so for other
optimizers, ``choose`` tries the constants of the method on the development tasks and ``batches`` how many
batches to measure, ``evaluate`` runs every method on fresh seeds, ``report`` writes table and figure; ``all``
is the default. Each finished run is a line of the results file; a run that is there already is not repeated,
so the benchmark may be stopped and started again at any time.

The budget of a run is counted in gradient evaluations: what a method spends before training is taken off its
steps. Its loss is the mean over 40 fresh batches, one after each of the last 40 steps, the same batches for
every method. Regret = (loss - loss of the best of the grid) / (loss at the start - loss of the best).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import torch
from benchmarks.calibrate_methods import METHODS, Run, gradients
from benchmarks.calibrate_tasks import DEVELOPMENT, TASKS

WINDOW = 40  # steps, and fresh batches, over which the final loss is averaged
TUNING_SEEDS = (100, 101)  # the whole grid on the first, its best settings again on the others
SEEDS = (1, 2, 3)
RATES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # six of them for each task
THRESHOLDS = (math.inf, 2.0, 0.7, 0.25)  # times the gradient norm at the start
ADAMW_RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
FIRST = ("best of grid", "calibrated", "calibrated, no clipping")
RETUNED = 3  # best settings of the grid that are run again

# The constants tried on the development tasks: largest change of the gradient, and thresholds in units of the
# gradient norm at the start, for batches whose gradients have nothing in common and for batches that agree.
# Those that were taken are the runs "calibrated", which the report puts beside these.
CONSTANTS = (
    (1.0, (0.7, 0.7)),
    (1.0, (1.75, 1.75)),
    (1.0, (0.5, 1.75)),
    (1.0, (0.7, 1.75)),
    (0.7, (0.6, 1.75)),
    (1.4, (0.6, 1.75)),
)
NUM_BATCHES = (2, 6)  # beside the default

Job = dict[str, Any]


def job(task: str, seed: int, label: str, method: str, **options: Any) -> Job:
    """One run, as it is kept in the results file."""
    return {"task": task, "seed": seed, "label": label, "method": method, "options": options}


def key(job: Job) -> str:
    """What makes two runs the same; the label is only a name."""
    return json.dumps([job[k] for k in ("task", "seed", "method", "options")], sort_keys=True)


def train(job: Job, *, steps: int | None = None) -> Job:
    """Run one job; its row for the results file."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    start, task = time.process_time(), TASKS[job["task"]]
    model = task.start(job["seed"])
    model.train()
    run = Run(task, job["seed"], model, job["options"])
    fresh = list(islice(task.stream(job["seed"], "fresh"), WINDOW))
    with torch.no_grad():
        first = float(np.mean([run.loss(batch).item() for batch in fresh]))
    try:
        trainer = METHODS[job["method"]](run)
        losses = list(_losses(run, trainer, fresh, (steps or task.steps) - trainer.spent))
        problem = ""
    except (ValueError, FloatingPointError) as error:  # a calibration that was refused is a result, too
        trainer, losses, problem = None, [math.nan], str(error)
    loss = float(np.mean(losses))
    diverged = not loss < first
    return {
        **job,
        "first_loss": first,
        "loss": None if math.isnan(loss) or math.isinf(loss) else loss,
        "diverged": diverged,
        "spent": trainer.spent if trainer else 0,
        "chosen": {k: v if math.isfinite(v) else None for k, v in trainer.chosen.items()} if trainer else {},
        "problem": problem,
        "seconds": time.process_time() - start,
    }


def _losses(run: Run, trainer: Any, fresh: list, num_steps: int) -> Iterator[float]:
    """Losses of the deployed model on fresh batches after each of the last steps; NaN ends them."""
    optimizer = trainer.optimizer
    for step, batch in enumerate(islice(run.task.stream(run.seed, "training"), num_steps)):
        optimizer.zero_grad()
        loss = run.loss(batch)
        if not torch.isfinite(loss):
            yield math.nan
            return
        loss.backward()
        trainer.clip(gradients(run.model))
        optimizer.step()
        trainer.after_step()
        left = num_steps - 1 - step
        if left < len(fresh):
            with torch.no_grad():
                yield _deployed_loss(run, trainer, fresh[len(fresh) - 1 - left])


def _deployed_loss(run: Run, trainer: Any, batch: Any) -> float:
    if trainer.deployed is None:
        return run.loss(batch).item()
    with trainer.deployed() as model:
        return run.task.loss(model, batch).item()


# Which runs


def grid_jobs(tasks: list[str], seed: int, *, momentum: float = 0.0) -> list[Job]:
    """Every lr and threshold of the grid, for SGD with clipping."""
    label, extra = ("grid, momentum", {"momentum": momentum}) if momentum else ("grid", {})
    thresholds = THRESHOLDS[::2] if momentum else THRESHOLDS
    return [
        job(task, seed, label, "clipped", lr=lr / (10 if momentum else 1), relative=relative, **extra)
        for task in tasks
        for lr in RATES[RATES.index(TASKS[task].lowest_lr) :][:6]
        for relative in thresholds
    ]


def adamw_jobs(tasks: list[str], seed: int) -> list[Job]:
    """AdamW's grid: the learning rate alone, for its steps do not see a scaled gradient."""
    return [job(task, seed, "grid, AdamW", "adamw", lr=lr) for task in tasks for lr in ADAMW_RATES]


def choose_jobs(seeds: tuple[int, ...] = SEEDS[:1]) -> list[Job]:
    """The method's constants on the development tasks."""
    return [
        job(task.name, seed, "choose", "calibrated", max_kappa=max_kappa, clip_at=list(clip_at))
        for task in DEVELOPMENT
        for seed in seeds
        for max_kappa, clip_at in CONSTANTS
    ]


def batches_jobs(seeds: tuple[int, ...] = SEEDS[:1]) -> list[Job]:
    """Fewer and more batches to measure, on the development tasks."""
    return [
        job(task.name, seed, "choose, batches", "calibrated", num_batches=count)
        for task in DEVELOPMENT
        for seed in seeds
        for count in NUM_BATCHES
    ]


def retune_jobs(rows: list[Job], tasks: list[str], label: str) -> list[Job]:
    """The best settings of the first tuning seed, on the other tuning seeds."""
    jobs = []
    for task in tasks:
        found = [r for r in rows if (r["task"], r["seed"], r["label"]) == (task, TUNING_SEEDS[0], label)]
        best = sorted((r for r in found if not r["diverged"]), key=lambda r: r["loss"])[:RETUNED]
        for seed in TUNING_SEEDS[1:]:
            jobs += [job(task, seed, label, r["method"], **r["options"]) for r in best]
    return jobs


def best_setting(rows: list[Job], task: str, label: str) -> Job | None:
    """The setting with the lowest mean loss over the tuning seeds; max_norm as it was on the first."""
    settings: dict[str, list[Job]] = {}
    for r in rows:
        if r["task"] == task and r["label"] == label and r["seed"] in TUNING_SEEDS:
            settings.setdefault(json.dumps(r["options"], sort_keys=True), []).append(r)
    tried = [
        s for s in settings.values() if len(s) == len(TUNING_SEEDS) and not any(r["diverged"] for r in s)
    ]
    if not tried:
        return None
    best = min(tried, key=lambda s: sum(r["loss"] for r in s))
    return min(best, key=lambda r: r["seed"])


def evaluate_jobs(rows: list[Job], tasks: list[str], seeds: tuple[int, ...]) -> list[Job]:
    """Every method of the table, on seeds that nothing was tuned on."""
    jobs = []
    for task in tasks:
        for seed in seeds:
            add = lambda label, method, t=task, s=seed, **options: jobs.append(  # noqa: E731
                job(t, s, label, method, **options)
            )
            for label in ("grid", "grid, momentum", "grid, AdamW"):
                best = best_setting(rows, task, label)
                if best is not None:
                    options = {k: v for k, v in best["options"].items() if k != "relative"}
                    if best["method"] == "clipped":
                        options["max_norm"] = best["chosen"]["max_norm"] or math.inf
                    add(f"best of {label}", best["method"], **options)
                    if label == "grid":
                        add("AutoClip, grid's lr", "autoclip", lr=options["lr"])
                        add("ZClip, grid's lr", "zclip", lr=options["lr"])
            add("calibrated", "calibrated")
            add("calibrated, no clipping", "calibrated", clip=False)
            add("calibrated, search not counted", "calibrated", free=True)
            add("calibrated, NormalizedSGD", "calibrated", optimizer="NormalizedSGD")
            add("calibrated, momentum 0.9", "calibrated", momentum=0.9)
            add("calibrated, AdamW", "calibrated", optimizer="AdamW")
            add("SGD 0.1, clip 1", "clipped", lr=0.1, max_norm=1.0)
            add("AdamW 1e-3", "adamw", lr=1e-3)
            add("DoG", "dog")
            add("Prodigy", "prodigy")
            add("D-Adaptation, SGD", "d_adaptation", kind="SGD")
            add("D-Adaptation, Adam", "d_adaptation", kind="Adam")
            add("schedule-free SGD", "schedule_free", kind="SGD")
            add("schedule-free AdamW", "schedule_free", kind="AdamW")
            add("range test, clip 1", "lr_range")
    # What the aims are about comes first: a benchmark stopped early has said most.
    return sorted(jobs, key=lambda j: (j["label"] not in FIRST, j["seed"]))


# Running them


def read(path: Path) -> list[Job]:
    """The finished runs; a torn last line is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def run_all(jobs: list[Job], path: Path, *, processes: int) -> list[Job]:
    """Run the jobs that the results file lacks, and return all its rows."""
    done = {key(row) for row in read(path)}
    missing = list({key(j): j for j in jobs if key(j) not in done}.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    print(f"{len(jobs)} runs, {len(missing)} to do", flush=True)
    finished = joblib.Parallel(n_jobs=processes, return_as="generator_unordered")(
        joblib.delayed(train)(j) for j in missing
    )
    torn = path.exists() and not (path.read_bytes() or b"\n").endswith(b"\n")
    with path.open("a") as file:
        file.write("\n" if torn else "")  # or the first new row would be part of the torn line
        for number, row in enumerate(finished, 1):
            file.write(json.dumps(row) + "\n")
            file.flush()
            if number % 25 == 0:
                print(f"  {number} of {len(missing)}", flush=True)
    return read(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("all", "grid", "adamw", "momentum", "choose", "batches", "evaluate", "report")
    parser.add_argument("--part", choices=parts, default="all")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--labels", nargs="+", help="evaluate only these methods")
    parser.add_argument("--results", type=Path, default=Path("runs/calibrate.jsonl"))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--page", type=Path, help="quote the main tables in this page, between its marks")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    tasks, path, jobs = options.tasks, options.results, options.jobs
    grids = {
        "grid": ("grid", grid_jobs(tasks, TUNING_SEEDS[0])),
        "adamw": ("grid, AdamW", adamw_jobs(tasks, TUNING_SEEDS[0])),
        "momentum": ("grid, momentum", grid_jobs(tasks, TUNING_SEEDS[0], momentum=0.9)),
    }
    for part, (label, first) in grids.items():
        if options.part in ("all", part):
            rows = run_all(first, path, processes=jobs)
            run_all(retune_jobs(rows, tasks, label), path, processes=jobs)
    if options.part in ("all", "choose"):
        run_all(choose_jobs(), path, processes=jobs)
    if options.part in ("all", "batches"):
        run_all(batches_jobs(), path, processes=jobs)
    if options.part in ("all", "evaluate"):
        wanted = evaluate_jobs(read(path), tasks, tuple(options.seeds))
        wanted = [j for j in wanted if options.labels is None or j["label"] in options.labels]
        run_all(wanted, path, processes=jobs)
    if options.part in ("all", "report", "evaluate"):
        from benchmarks.calibrate_report import write

        command = f"python -m benchmarks.calibrate --results {path}"
        print(write(read(path), options.out, command=command, page=options.page))


if __name__ == "__main__":
    main()
