"""The trials that the ladder's constants were chosen on, and what the rule makes of them in a second.

    python -m reproduction.benchmarks.calibrate.develop                     the table, from the kept trials
    python -m reproduction.benchmarks.calibrate.develop --collect ROWS      trials and runs again, into ROWS

Each task has trials of 16, 48 and 144 steps on a grid of rates a factor of two apart, one seed, 16 batches to
judge by, without a threshold and, for SGD, with the median first gradient norm. The rule asks for any length
and gets the nearest of the three. Whole runs are those of the judged tasks of earlier rules, or made here.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from reproduction.benchmarks.calibrate.data import Batch, Task, next_token, text
from reproduction.benchmarks.calibrate.judged import JUDGED
from reproduction.benchmarks.calibrate.judged_sgd import JUDGED_SGD
from reproduction.benchmarks.calibrate.methods import first_norm, make, peaks_of, scale_rates
from reproduction.benchmarks.calibrate.scheduled import GPT, SMALL, Recipe, ptb_characters
from torch import Tensor, nn

from curvestep.calibration.ladder import (
    GROWN,
    GROWN_WITH_CLIP,
    Budget,
    Ladder,
    Trial,
    answer,
    budget_of,
    doubts,
)
from curvestep.calibration.lr_schedules import SCHEDULES

ROWS = Path(__file__).parents[3] / "docs" / "results"
LENGTHS = (16, 48, 144)
NUM_JUDGES = 16
STARTS = {"adamw": 0.008, "momentum": 0.1, "plain": 1.0, "muon": 0.04}  # where the simulated ladder begins
RATES = {kind: [start * 2.0**k for k in range(-4, 6)] for kind, start in STARTS.items()}
BUDGETS = (None, 80, 320, 640)

Row = dict[str, Any]


def times(generator: torch.Generator) -> Iterator[Batch]:
    """Points of [0, 4]."""
    while True:
        yield 4 * torch.rand(64, 1, generator=generator), torch.zeros(1, 1)


def vibration(model: nn.Module, batch: Batch) -> Tensor:
    """Residual of u'' + 4 u = 0 with u(0) = 1 and u'(0) = 0."""
    with torch.enable_grad():
        t, zero = batch[0].detach().requires_grad_(), batch[1].detach().requires_grad_()
        u, first = model(t), model(zero)
        (slope,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        (bend,) = torch.autograd.grad(slope.sum(), t, create_graph=True)
        (start,) = torch.autograd.grad(first.sum(), zero, create_graph=True)
        return (bend + 4 * u).square().mean() + (first - 1).square().sum() + start.square().sum()


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))


def _gpt() -> nn.Module:
    return GPT(ptb_characters("train")[1], width=32, layers=2)


OWN = (
    Recipe(Task("PINN", 800, _net, times, vibration), weight_decay=0.0),
    Recipe(Task("small muon GPT", 400, _gpt, text(lambda: ptb_characters("train")[0], 6), next_token),
           text(lambda: ptb_characters("valid")[0], 64), betas=(0.9, 0.95)),
)  # fmt: skip
RECIPES = {recipe.task.name: recipe for recipe in (*JUDGED, *JUDGED_SGD, *SMALL, *OWN)}
TASKS = {  # with the kinds of optimizers
    "adamw": ("PINN", "ResNet for digits, BatchNorm", "communities of graphs", "denoising U-Net",
              "halves of digits", "masked pixels, MADE", "oscillator, physics-informed",
              "separable convolutions, GroupNorm", "spread of a set", "table, categories"),
    "momentum": ("ResNet for digits, BatchNorm", "char LSTM", "colours from grey, BatchNorm",
                 "pairs in order, RankNet", "quantiles, BatchNorm", "sums of digits, GRU",
                 "waves, 1-d convolutions, BatchNorm"),
    "plain": ("quantiles, BatchNorm", "waves, 1-d convolutions, BatchNorm"),
    "muon": ("small muon GPT",),
}  # fmt: skip


# Trials and runs


def losses_of(recipe: Recipe, model: nn.Module, judges: list[Batch]) -> np.ndarray:
    """Losses in the mode of training, with the same dropout masks at every call."""
    found = []
    with torch.no_grad():
        for i, batch in enumerate(judges):
            torch.manual_seed(1000 + i)
            found.append(recipe.task.loss(model, batch).item())
    return np.array(found)


def tried(
    recipe: Recipe, kind: str, lr: float, max_norm: float, steps: list[Batch], judges: list[Batch]
) -> Row:
    """Gain and error of a trial, and the held-out loss after it; None where it broke."""
    model = recipe.task.start(1).train()
    optimizers = make(recipe, kind, model, lr, max_norm)
    peaks = peaks_of(optimizers)
    before = losses_of(recipe, model, judges)
    torch.manual_seed(5)
    for share, batch in zip(SCHEDULES["warmup-decay"](len(steps)), steps, strict=True):
        scale_rates(optimizers, peaks, share)
        model.zero_grad()
        loss = recipe.task.loss(model, batch)
        if not math.isfinite(loss.item()):
            return {"gain": None, "loss": None}
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    falls = before - losses_of(recipe, model, judges)
    if not np.isfinite(falls).all():
        return {"gain": None, "loss": None}
    gain, error = falls.mean().item(), (falls.std(ddof=1) / math.sqrt(len(judges))).item()
    return {"gain": gain, "error": error, "loss": _held_out(recipe, model)}


def _held_out(recipe: Recipe, model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        return mean(recipe.task.loss(model, batch).item() for batch in recipe.judging(12))


def collect(recipe: Recipe, kind: str) -> Iterator[Row]:
    """Every trial and every whole run of a task."""
    batches = list(islice(recipe.task.stream(1, "measuring"), NUM_JUDGES + sum(LENGTHS)))
    judges, rest = batches[:NUM_JUDGES], iter(batches[NUM_JUDGES:])
    parts = {length: list(islice(rest, length)) for length in LENGTHS}
    parts[recipe.task.steps] = list(islice(recipe.task.stream(1, "training"), recipe.task.steps))
    first = _held_out(recipe, recipe.task.start(1))
    norm = first_norm(recipe, 1, recipe.task.start(1).train())
    usual = 1.0 if kind == "adamw" else math.inf
    thresholds = {False: usual, True: norm} if kind in ("momentum", "plain") else {False: usual}
    for length, steps in parts.items():
        for clipped, max_norm in thresholds.items():
            for lr in RATES[kind]:
                row = {
                    "task": recipe.task.name,
                    "kind": kind,
                    "clipped": clipped,
                    "num_steps": length,
                    "lr": lr,
                }
                yield {**row, **tried(recipe, kind, lr, max_norm, steps, judges), "first": first}


# What the rule makes of them


class Development:
    """The rows of one task and kind, and the runs that the benchmark keeps of it."""

    def __init__(self, task: str, kind: str, rows: list[Row], kept: list[Row]) -> None:
        self.task, self.kind, self.steps = task, kind, RECIPES[task].task.steps
        self.gains: dict[tuple[bool, int], dict[float, Row]] = defaultdict(dict)
        losses: dict[tuple[bool, float], list[float]] = defaultdict(list)
        firsts = [row["first"] for row in (*rows, *kept) if row.get("first")]
        self.first = mean(firsts)
        for row in rows:
            self.gains[row["clipped"], row["num_steps"]][row["lr"]] = row
            if row["num_steps"] == self.steps:
                losses[row["clipped"], row["lr"]].append(self._end(row))
        for row in kept:  # SGD's grids were clipped at the first norm
            losses[kind in ("momentum", "plain"), row["lr"]].append(self._end(row))
        self.losses = {key: mean(values) for key, values in losses.items()}

    def _end(self, row: Row) -> float:
        return self.first if row["loss"] is None else min(row["loss"], self.first)

    def trial(self, lr: float, max_norm: float, num_steps: int, _: int) -> Trial:
        """The kept trial that is nearest."""
        is_clipped = math.isfinite(max_norm) and (True, 144) in self.gains
        lengths = [length for clipped, length in self.gains if clipped == is_clipped and length in LENGTHS]
        length = min(lengths, key=lambda length: abs(math.log(length / num_steps)))
        rows = self.gains[is_clipped, length]
        near = min(rows, key=lambda rate: abs(math.log(rate / lr)))
        row, off = rows[near], abs(math.log2(near / lr))
        made = {"lr": lr, "num_steps": num_steps, "max_norm": max_norm}
        if row["gain"] is None:
            return Trial(gain=-math.inf, error=0.0, **made)
        # Beyond the grid gains fall: a rate that was not tried is none to choose.
        return Trial(gain=row["gain"] - 0.2 * off * abs(row["gain"]), error=row["error"], **made)

    def climbed(self, budget: float | None) -> Ladder:
        """The ladder on these trials."""
        earns = self.kind in ("momentum", "plain")
        limit = budget_of(budget, self.steps, GROWN_WITH_CLIP if earns else GROWN)
        if self.kind == "muon":
            limit = Budget(limit.most, uses_all=True, longest=limit.longest)
        found = Ladder(self.trial, limit, STARTS[self.kind], to_earn=1.0 if earns else math.inf)
        found.climb()
        return found

    def regret(self, lr: float, *, clipped: bool) -> float:
        """Share of the best's progress that is missed, linear in log lr between whole runs."""
        own = {rate: loss for (is_clipped, rate), loss in self.losses.items() if is_clipped == clipped}
        own = own or {rate: loss for (_, rate), loss in self.losses.items()}
        rates = sorted(own)
        loss = float(np.interp(math.log(lr), np.log(rates), [own[rate] for rate in rates]))
        best = min(self.losses.values())
        return (loss - best) / (self.first - best)


def table(developed: list[Development]) -> list[str]:
    """Regret of the answer with each budget."""
    names = ["default" if budget is None else str(budget) for budget in BUDGETS]
    lines = [f"| task, kind | {' | '.join(names)} | doubts |", "| --- " * (len(names) + 2) + "|"]
    found: dict[float | None, list[float]] = defaultdict(list)
    for task in developed:
        cells = []
        for budget in BUDGETS:
            ladder = task.climbed(budget)
            lr = answer(ladder.rungs, task.steps)
            found[budget].append(task.regret(lr, clipped=math.isfinite(ladder.max_norm)))
            cells.append(f"{lr:.2g}, {found[budget][-1]:.1%}")
        kinds = ", ".join(doubts(task.climbed(None).rungs))
        lines.append(f"| {task.task}, {task.kind} | {' | '.join(cells)} | {kinds} |")
    for label, reduce in (("median", median), ("worst", max)):
        values = " | ".join(f"{reduce(found[budget]):.1%}" for budget in BUDGETS)
        lines.append(f"| **{label}** | {values} | |")
    return lines


def read(path: Path) -> list[Row]:
    """Rows of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--collect", type=Path, metavar="ROWS", help="file to append rows to")
    options = parser.parse_args()
    pairs = [(name, kind) for kind, names in TASKS.items() for name in names]
    if options.collect is not None:
        torch.set_num_threads(1)
        for name, kind in pairs:
            for row in collect(RECIPES[name], kind):
                with options.collect.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
        return
    rows = read(ROWS / "calibrate-develop.jsonl")
    kept = [
        row
        for name in ("rows", "sgd", "widened")
        for row in read(ROWS / "calibrate-earlier" / f"{name}.jsonl")
    ]
    for kind, names in TASKS.items():
        developed = []
        for name in names:
            own = [row for row in rows if (row["task"], row["kind"]) == (name, kind)]
            grid = [row for row in kept if (row["task"], row["kind"], row["method"]) == (name, kind, "grid")]
            developed.append(
                Development(name, kind, [row for row in own if row["schedule"] != "constant"], grid)
            )
        print("\n".join([f"## {kind}", "", *table(developed), ""]))


if __name__ == "__main__":
    main()
