"""AdamW and momentum under warm-up and cosine: the measured peak beside a tuned one and rivals.

    python -m benchmarks.schedules --part develop | batches | held-out | report [--tasks ...] [--methods ...]

Every run warms up linearly over a tenth of its steps and decays by a cosine to zero, and clips at 1.0 unless
its threshold is measured. The grid's peaks are a factor of two apart: on the first seed it widens until its
best is inside, on the others the best and its neighbours run again; its one peak is that with the lowest mean
loss. Regret = (loss - loss of the grid's peak) / (loss at the start - loss of the grid's peak), with the loss
of data that training never sees. Neither the grid's nor any other search is taken off the steps; the table
says what each costs.

Each finished run is a line of the results file, and no run is repeated. The constants of the rule are in
``benchmarks/schedules.json``: the held-out part refuses to run with others.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from benchmarks.calibrate import read
from benchmarks.schedules_tasks import BATCHES, DEVELOPMENT, HELD_OUT, RECIPES, Recipe
from torch import nn
from torch.optim import Optimizer

from curvestep import ClippedAdamW, ClippedSGD, calibrate
from curvestep.calibration import search
from curvestep.calibration.method import WARMUP, warmup_decay
from curvestep.vectors import global_norm

FROZEN = Path(__file__).with_suffix(".json")
SEEDS = (4, 5, 6)
NUM_JUDGES = 12  # batches that the final loss is read from
PILOT = 100
FIXED = {"AdamW 1e-3": 1e-3, "AdamW 3e-4": 3e-4}  # points of the grid
RIVALS = (*FIXED, "lr_find", "Prodigy", "D-Adaptation", "schedule-free")
OURS = ("measured", "measured and pilot")
CLIPPED = ("MLP, digits", "char LSTM", "char transformer", "char GPT, 2 layers")  # thresholds are compared
FIRST_RATE = {"adamw": 2e-3, "momentum": 0.1, "plain": 1.0}

Job = dict[str, Any]


def constants() -> dict[str, Any]:
    """The numbers of the rule that this benchmark judges."""
    return {
        "max_kappa": search.MAX_KAPPA, "adam_share": search.ADAM_SHARE, "scheduled": search.SCHEDULED,
        "clip_at": list(search.CLIP_AT), "adam_clip_at": list(search.ADAM_CLIP_AT), "pilot": PILOT,
    }  # fmt: skip


def make(recipe: Recipe, kind: str, model: nn.Module, lr: float, max_norm: float) -> Optimizer:
    """The optimizer that a recipe is trained with."""
    if kind == "adamw":
        groups = recipe.groups(model, recipe.weight_decay)
        return ClippedAdamW(groups, lr=lr, max_norm=max_norm, betas=recipe.betas, nonfinite="propagate")
    momentum, decay = (0.9 if kind == "momentum" else 0.0), min(recipe.weight_decay, 5e-4)
    return ClippedSGD(
        model.parameters(), lr=lr, max_norm=max_norm, momentum=momentum, weight_decay=decay,
        nonfinite="propagate",
    )  # fmt: skip


def lr_find(recipe: Recipe, seed: int) -> tuple[float, int]:
    """Lightning's learning rate finder, written again: its suggestion, and the steps it took.

    100 steps of AdamW from 1e-8 to 1, loss smoothed by 0.98, an end at four times its lowest, and the rate
    where the smoothed loss falls most steeply, without the first ten steps and the last one.
    """
    model, rates = recipe.task.start(seed), np.geomspace(1e-8, 1.0, 100)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-8)
    average, smooth = 0.0, []
    for i, batch in enumerate(islice(recipe.task.stream(seed, "measuring"), len(rates))):
        opt.param_groups[0]["lr"] = rates[i]
        opt.zero_grad()
        loss = recipe.task.loss(model, batch)
        loss.backward()
        opt.step()
        average = 0.98 * average + 0.02 * loss.item()
        smooth.append(average / (1 - 0.98 ** (i + 1)))
        if not smooth[-1] < 4 * min(smooth[:-1], default=math.inf):
            break
    kept = np.array(smooth[10:-1])
    best = 10 + int(np.argmin(np.gradient(kept))) if len(kept) > 1 else 0
    return float(rates[best]), len(smooth)


def prepare(job: Job, recipe: Recipe, model: nn.Module) -> tuple[Optimizer, dict[str, Any], bool]:
    """The optimizer of a job, what was measured, and whether the schedule drives it."""
    kind, method = job["kind"], job["method"]
    if method in OURS or method.startswith("measured"):
        opt = make(recipe, kind, model, 1.0, math.inf)
        batches = islice(recipe.task.stream(job["seed"], "measuring"), 8 + PILOT)
        cal = calibrate(
            model, lambda batch: recipe.task.loss(model, batch), batches, optimizer=opt,
            schedule="warmup-decay", pilot=PILOT if "pilot" in method else 0,
        )  # fmt: skip
        cal.apply(opt)
        step = median(batch.safe_step for batch in cal.curve)
        found = {"lr": cal.lr, "max_norm": cal.max_norm, "step": step, "pilot": cal.pilot}
        return opt, {**found, "spent": cal.num_gradients, "limit": cal.limit}, True
    if method == "grid":
        lr, max_norm = job["lr"], job.get("max_norm", 1.0)
        if kind != "adamw" or job.get("relative"):
            max_norm = job.get("relative", math.inf) * first_norm(recipe, job["seed"], model)
        return make(recipe, kind, model, lr, max_norm), {"lr": lr, "max_norm": max_norm}, True
    if method == "lr_find":
        lr, spent = lr_find(recipe, job["seed"])
        return make(recipe, kind, model, lr, 1.0), {"lr": lr, "spent": spent}, True
    groups, decay = recipe.groups(model, recipe.weight_decay), recipe.weight_decay
    if method == "Prodigy":  # its README: lr 1, a cosine, safeguard_warmup with a warm-up, bias correction
        from prodigyopt import Prodigy

        options: dict[str, Any] = {
            "weight_decay": decay,
            "safeguard_warmup": True,
            "use_bias_correction": True,
            "betas": recipe.betas,
        }
        return Prodigy(groups, lr=1.0, **options), {}, True
    if method == "D-Adaptation":  # its README: lr 1, the schedule that one would use anyway
        from dadaptation import DAdaptAdam

        options = {"weight_decay": decay, "decouple": True, "betas": recipe.betas}
        return DAdaptAdam(groups, lr=1.0, **options), {}, True
    from schedulefree import AdamWScheduleFree  # its README: no schedule, a warm-up of its own

    steps = round(WARMUP * recipe.task.steps)
    return AdamWScheduleFree(groups, lr=0.0025, weight_decay=decay, warmup_steps=steps), {}, False


def first_norm(recipe: Recipe, seed: int, model: nn.Module) -> float:
    """Median gradient norm at the start."""
    norms = []
    for batch in islice(recipe.task.stream(seed, "measuring"), 3):
        grads = torch.autograd.grad(
            recipe.task.loss(model, batch), list(model.parameters()), allow_unused=True
        )
        norms.append(global_norm(grads).item())
    return median(norms)


def train(job: Job) -> Job:
    """Run one job; its row of the results."""
    torch.set_num_threads(1)
    recipe, started = RECIPES[job["task"]], time.process_time()
    model, judges = recipe.task.start(job["seed"]), recipe.judging(NUM_JUDGES)
    first = judged(recipe, model, judges)
    model.train()
    try:
        opt, found, driven = prepare(job, recipe, model)
    except ValueError as error:  # a refusal is a result, too
        return {**job, "first": first, "loss": None, "problem": str(error)}
    peaks = [group["lr"] for group in opt.param_groups]
    clips = isinstance(opt, (ClippedAdamW, ClippedSGD))
    if not driven:
        opt.train()  # type: ignore[attr-defined]
    num_steps, loss = recipe.task.steps, torch.tensor(first)
    for share, batch in zip(
        warmup_decay(num_steps), recipe.task.stream(job["seed"], "training"), strict=False
    ):
        if driven:
            for group, peak in zip(opt.param_groups, peaks, strict=True):
                group["lr"] = peak * share
        opt.zero_grad()
        loss = recipe.task.loss(model, batch)
        if not torch.isfinite(loss):
            break
        loss.backward()
        if not clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
    if not driven:
        opt.eval()  # type: ignore[attr-defined]
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
            with torch.no_grad():  # its README: BatchNorm's averages belong to other weights
                for batch in islice(recipe.task.stream(job["seed"], "measuring"), 50):
                    recipe.task.loss(model, batch)
    clipped = None
    if isinstance(opt, (ClippedAdamW, ClippedSGD)):
        clipped = opt.clip_stats()["clipped_fraction"]
    last = judged(recipe, model, judges) if torch.isfinite(loss) else math.inf
    seconds = time.process_time() - started
    return {
        **job, "first": first, "loss": last if math.isfinite(last) else None, "clipped": clipped,
        "found": {k: None if v == math.inf else v for k, v in found.items()}, "seconds": round(seconds, 2),
    }  # fmt: skip


def judged(recipe: Recipe, model: nn.Module, judges: list) -> float:
    """Mean loss of data that training never sees."""
    model.eval()
    with torch.no_grad():
        return mean(recipe.task.loss(model, batch).item() for batch in judges)


# Which runs


def key(job: Job) -> str:
    """What makes two runs the same."""
    names = ("task", "kind", "method", "seed", "lr", "max_norm", "relative")
    return json.dumps([job.get(name) for name in names])


class Results:
    """The results file: every run once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = {key(row): row for row in read(path)}

    def run(self, **job: Any) -> Job:
        """The row of a job, trained if it is not there."""
        if key(job) not in self.rows:
            row = self.rows[key(job)] = train(job)
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(
                {k: row.get(k) for k in ("task", "kind", "method", "seed", "lr", "loss", "seconds")},
                flush=True,
            )
        return self.rows[key(job)]


def loss_of(row: Job) -> float:
    """The final loss, that of the start if the run diverged or was refused."""
    return row["first"] if row["loss"] is None else row["loss"]


def widen(run: Callable[[float], float], start: float, factor: float = 2.0) -> dict[float, float]:
    """Losses at rates a factor apart from ``start``, until the best has worse neighbours."""
    losses = {0: run(start)}
    while True:
        best = min(losses, key=lambda k: losses[k])
        missing = [k for k in (best - 1, best + 1) if k not in losses]
        if not missing or len(losses) > 12:
            return {start * factor**k: losses[k] for k in sorted(losses)}
        losses[missing[0]] = run(start * factor ** missing[0])


def tuned(results: Results, task: str, kind: str, seeds: tuple[int, ...], **options: Any) -> float:
    """The grid's peak: the lowest mean loss over the seeds."""
    run = lambda lr, seed: loss_of(  # noqa: E731
        results.run(task=task, kind=kind, method="grid", seed=seed, lr=lr, **options)
    )
    first = widen(lambda lr: run(lr, seeds[0]), FIRST_RATE[kind])
    best = min(first, key=lambda lr: first[lr])
    near = [lr for lr in first if best / 2.1 < lr < 2.1 * best]
    return min(near, key=lambda lr: mean(run(lr, seed) for seed in seeds))


def develop(results: Results, task: str, seed: int = 100) -> None:
    """One seed of a development task: what is measured, the grid, and thresholds at its best and beyond."""
    for kind in RECIPES[task].optimizers:
        options = {} if kind == "adamw" else {"relative": 1.0}
        for method in OURS[: 2 if kind == "adamw" else 1]:
            results.run(task=task, kind=kind, method=method, seed=seed)
        best = tuned(results, task, kind, (seed,), **options)
        if kind == "adamw":
            for lr in (best, 4 * best) if task in CLIPPED else ():
                results.run(task=task, kind=kind, method="grid", seed=seed, lr=lr)
                results.run(task=task, kind=kind, method="grid", seed=seed, lr=lr, relative=1.0)
                results.run(task=task, kind=kind, method="grid", seed=seed, lr=lr, max_norm=1e9)


def held_out(results: Results, tasks: list[str], methods: list[str], seeds: tuple[int, ...]) -> None:
    """Ours first, then the grid, then the rivals; refused where the constants are not the frozen ones."""
    frozen = json.loads(FROZEN.read_text())
    if frozen != constants():
        raise SystemExit(f"The constants are {constants()}, and {FROZEN.name} has {frozen}.")
    every = [(task, kind) for task in tasks for kind in RECIPES[task].optimizers]
    for method in methods:
        for task, kind in every:
            if method == "grid":
                tuned(results, task, kind, seeds, **({} if kind == "adamw" else {"relative": 1.0}))
            elif kind == "adamw" or method in OURS:
                job = {"method": "grid", "lr": FIXED[method]} if method in FIXED else {"method": method}
                for seed in seeds:
                    results.run(task=task, kind=kind, seed=seed, **job)


# The tables

COMMAND = "`python -m benchmarks.schedules --part held-out`, then `--part report`."
LIMITS = """\
Every held-out run has 1,000 steps (those of the development half 300 to 500), a warm-up of a tenth and a
cosine to zero. Regret is the share of the tuned grid's progress that is missed, on data that training does
not see; a cell is the median over the seeds, their number in brackets. The constants were committed in
`benchmarks/schedules.json` before any held-out task was run; these seeds are the second look at the tasks,
after three other seeds of 500 steps, with the same constants. (Between the two looks `calibrate` changed for
SGD: straight steps are stretched less, and of two trials the longer step must lead clearly. Both were chosen
on other tasks at a constant learning rate, and concern the rows of momentum only.)

Limits. Models of 20,000 to 150,000 parameters. With three seeds a difference of 1 % means little. The grid's
peaks are a factor of two apart, and its AdamW clips at 1.0 where ours clips at its measured threshold:
regrets may be negative. lr_find is Lightning's rule, written again. In the development tables, multiples of h
are read off the grid, beyond its ends as at its ends; the columns "measured" and "with pilot" are of before
the constants were chosen (AdamW's threshold was the first norm, plain SGD's peak h).
"""


def regret(row: Job, best: Job) -> float:
    """Share of the best's progress that is missed."""
    return (loss_of(row) - loss_of(best)) / (best["first"] - loss_of(best))


def report(rows: list[Job]) -> str:
    """Both tables: the held-out tasks, and what the constants were read from."""
    seeded = [row for row in rows if row["seed"] in SEEDS]
    seeds = sorted({row["seed"] for row in seeded})
    minutes = sum(row.get("seconds", 0) for row in rows) / 60
    head = f"{len(rows)} runs, {minutes:.0f} minutes of one CPU; seeds {', '.join(map(str, seeds))}."
    lines = ["# AdamW and momentum under schedules", "", COMMAND, "", head, "", LIMITS]
    for kind in ("adamw", "momentum"):
        lines += held_out_table([row for row in seeded if row["kind"] == kind], kind)
    names = [recipe.task.name for recipe in BATCHES]
    lines += batches_table([row for row in rows if row["task"] in names])
    rows = [row for row in rows if row["seed"] == 100 and row["task"] not in names]
    for kind in ("adamw", "momentum", "plain"):
        lines += development_table([row for row in rows if row["kind"] == kind], kind)
    return "\n".join(lines) + "\n"


def held_out_table(rows: list[Job], kind: str) -> list[str]:
    """Regret of every method on every task, the median over its seeds."""
    grids: dict[str, dict[float, dict[int, Job]]] = {}
    for row in rows:
        if row["method"] == "grid":
            grids.setdefault(row["task"], {}).setdefault(row["lr"], {})[row["seed"]] = row
    best: dict[str, dict[int, Job]] = {}
    for task, rates in grids.items():
        most = max(len(found) for found in rates.values())
        whole = [found for found in rates.values() if len(found) == most]
        best[task] = min(whole, key=lambda found: mean(map(loss_of, found.values())))
    if not best:
        return []
    named = {"adamw": "AdamW", "momentum": "momentum 0.9"}[kind]
    lines = [
        f"## {named}, held out", "",
        "| method | " + " | ".join(best) + " | median | worst | diverged | gradients before |",
        (len(best) + 5) * "|---" + "|",
    ]  # fmt: skip
    for method in (*OURS, *RIVALS):
        cells, medians, diverged, spent = [], [], 0, []
        for task in best:
            job = ("grid", FIXED[method]) if method in FIXED else (method, None)
            mine = [r for r in rows if r["task"] == task and (r["method"], r.get("lr")) == job]
            mine = [r for r in mine if r["seed"] in best[task]]
            regrets = [regret(r, best[task][r["seed"]]) for r in mine]
            diverged += sum(r["loss"] is None or r["loss"] > r["first"] for r in mine)
            spent += [r["found"].get("spent", 0) for r in mine if r["loss"] is not None]
            medians += [median(regrets)] if regrets else []
            cells.append(f"{median(regrets):.1%} ({len(regrets)})" if regrets else "not run")
        if medians:
            lines.append(
                f"| {method} | {' | '.join(cells)} | {median(medians):.1%} | {max(medians):.1%} | {diverged} "
                f"| {median(spent) if spent else 0:.0f} |"
            )
    peaks = [f"{next(iter(found.values()))['lr']:.3g} ({len(found)})" for found in best.values()]
    lines.append(f"| grid's peak (seeds) | {' | '.join(peaks)} | | | | |")
    for method in OURS:
        mine = [
            [r["found"]["lr"] for r in rows if (r["task"], r["method"]) == (task, method)] for task in best
        ]
        cells = [f"{min(found):.2g} to {max(found):.2g}" if found else "" for found in mine]
        lines.append(f"| peak, {method} | {' | '.join(cells)} | | | | |")
    return [*lines, ""]


def batches_table(rows: list[Job]) -> list[str]:
    """The measured and the best peak of one model in batches of several sizes."""
    lines = [
        "## What the best peak depends on: the size of a batch", "",
        "`--part batches`: AdamW, 500 steps, clip 1.0, one seed. Near: peaks within 1 % of the best one's "
        "progress. The safe step hardly depends on the size, and the best peak in units of it on the model "
        "first: 0.3 to 0.7 for a ViT of any size of batch, 3 to 16 for a GPT. So noise alone is not what the "
        "measurement misses on a ViT; what curvature does after the start is the suspect.", "",
        "| task | safe step h | peak, measured | best peak | near | regret, measured |", 6 * "|---" + "|",
    ]  # fmt: skip
    for task in dict.fromkeys(row["task"] for row in rows):
        mine = [row for row in rows if row["task"] == task]
        ours = next(row for row in mine if row["method"] == "measured")
        grid = [row for row in mine if row["method"] == "grid"]
        best = min(grid, key=loss_of)
        near = [row["lr"] for row in grid if regret(row, best) <= 0.01]
        lines.append(
            f"| {task} | {ours['found']['step']:.2g} | {ours['found']['lr']:.2g} | {best['lr']:.2g} "
            f"| {min(near):.2g} to {max(near):.2g} | {regret(ours, best):.1%} |"
        )
    return [*lines, ""] if rows else []


MULTIPLES = {"adamw": (0.5, 0.75, 1.0, 1.4, 1.8, 2.4, 3.4), "momentum": (0.1, 0.2, 0.3, 0.4, 0.6, 1.0)}


def development_table(rows: list[Job], kind: str) -> list[str]:
    """Where the best peak lies in units of the safe step, and the regret at multiples of it."""
    multiples = MULTIPLES.get(kind, (0.5, 1.0, 1.5, 2.0, 3.0))
    lines = [
        f"## Development: {kind}", "",
        "| task | safe step h | best peak / h | pilot's peak | measured | with pilot | "
        + " | ".join(f"{m:g} h" for m in multiples) + " | unclipped, best | first norm, best | 1.0, 4 x | "
        "unclipped, 4 x | first norm, 4 x |",
        (11 + len(multiples)) * "|---" + "|",
    ]  # fmt: skip
    columns: list[list[float]] = [[] for _ in multiples]
    for task in dict.fromkeys(row["task"] for row in rows):
        mine = [row for row in rows if row["task"] == task]
        grid = [
            r
            for r in mine
            if r["method"] == "grid" and r.get("relative") == (None if kind == "adamw" else 1.0)
        ]
        grid = sorted((r for r in grid if "max_norm" not in r), key=lambda r: r["lr"])
        ours = {r["method"]: r for r in mine if r["method"] in OURS}
        if not grid or "measured" not in ours:
            continue
        best, step = min(grid, key=loss_of), ours["measured"]["found"]["step"]
        rates, losses = [math.log(r["lr"]) for r in grid], [loss_of(r) for r in grid]
        at = lambda lr, x=rates, y=losses: float(np.interp(math.log(lr), x, y))  # noqa: E731
        whole = best["first"] - loss_of(best)
        regrets = [(at(m * step) - loss_of(best)) / whole for m in multiples]
        for column, value in zip(columns, regrets, strict=True):
            column.append(value)
        extra = []
        for lr, settings in ((best["lr"], ({"max_norm": 1e9}, {"relative": 1.0})),
                             (4 * best["lr"], ({}, {"max_norm": 1e9}, {"relative": 1.0}))):  # fmt: skip
            for setting in settings:
                found = [r for r in mine if r["method"] == "grid" and r["lr"] == lr
                         and {k: r[k] for k in ("max_norm", "relative") if k in r} == setting]  # fmt: skip
                extra.append(f"{regret(found[0], best):.1%}" if found and kind == "adamw" else "")
        pilot = ours.get("measured and pilot")
        flown = (
            ""
            if pilot is None
            else f"{pilot['found']['lr'] ** 2 / ours['measured']['found']['lr'] / step:.2f} h"
        )
        cells = [
            task, f"{step:.3g}", f"{best['lr'] / step:.2f}", flown, f"{regret(ours['measured'], best):.1%}",
            "" if pilot is None else f"{regret(pilot, best):.1%}",
            *(f"{value:.1%}" for value in regrets), *extra,
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    if not columns[0]:
        return []
    for name, of in (("mean", mean), ("worst", max)):
        cells = " | ".join(f"{of(column):.1%}" for column in columns)
        lines.append(f"| {name} | | | | | | {cells} | | | | | |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("develop", "batches", "held-out", "report"), required=True)
    parser.add_argument("--tasks", nargs="+", choices=list(RECIPES), metavar="TASK")
    parser.add_argument("--methods", nargs="+", choices=[*OURS, "grid", *RIVALS], metavar="METHOD",
                        default=[*OURS, "grid", *RIVALS])  # fmt: skip
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--results", type=Path, default=Path("docs/results/schedules.jsonl"))
    options = parser.parse_args()
    results = Results(options.results)
    if options.part == "develop":
        for task in options.tasks or [recipe.task.name for recipe in DEVELOPMENT]:
            develop(results, task)
    if options.part == "batches":
        for recipe in BATCHES:
            results.run(task=recipe.task.name, kind="adamw", method="measured", seed=100)
            tuned(results, recipe.task.name, "adamw", (100,))
    if options.part == "held-out":
        tasks = options.tasks or [recipe.task.name for recipe in HELD_OUT]
        held_out(results, tasks, options.methods, tuple(options.seeds))
    text = report(list(results.rows.values()))
    options.results.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
