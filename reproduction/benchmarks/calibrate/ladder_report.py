"""Tables of the ladder's judged tasks: regret, the practitioner's number, budgets, confidence, long tasks.

Regret is that of ``report``, at least 0 and at most 1. The practitioner's number says by how many times more
steps an answer needs for what the grid's best reaches; it compares curves of the same seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import mean, median, stdev
from typing import Any

from reproduction.benchmarks.calibrate.judged_ladder import JUDGED_LADDER, LONG
from reproduction.benchmarks.calibrate.ladder import steps_needed
from reproduction.benchmarks.calibrate.methods import (
    LADDER_BUDGETS,
    LADDER_RIVALS,
    RANDOM,
    RANDOM_BUDGETS,
)

Job = dict[str, Any]
KINDS = ("adamw", "momentum", "plain", "muon")
DEFAULT = "calibrate"  # with the budget that it takes by itself
CALLED_WITHIN = (0.02, 0.05)


class Judged:
    """The rows of one task and kind, read against the best of their grid.

    Args:
        rows: Of this task and kind.
        lr: The best rate of the grid.
        first: Mean loss at the start.
        best: Mean loss of the best.
    """

    def __init__(self, rows: list[Job], lr: float, first: float, best: float) -> None:
        self.rows, self.lr, self.first, self.best = rows, lr, first, best

    def of(self, method: str) -> list[Job]:
        """The rows of a method."""
        return [row for row in self.rows if row["method"] == method]

    def regret(self, row: Job) -> float:
        """Share of the best's progress that is missed, from 0 to 1."""
        loss = row["first"] if row["loss"] is None else row["loss"]
        return min(1.0, max(0.0, (loss - self.best) / (self.first - self.best)))

    def steps(self, row: Job) -> float:
        """The practitioner's number of a row; NaN without the curves for it."""
        same = [other for other in self.of("grid") if (other["lr"], other["seed"]) == (self.lr, row["seed"])]
        if not same or not same[0].get("held_out"):
            return math.nan
        return math.inf if row["loss"] is None else steps_needed(_curve(row), _curve(same[0]))


def _curve(row: Job) -> list[float]:
    return [math.inf if loss is None else loss for loss in row.get("held_out", [])]


def judged_of(rows: list[Job], kind: str, best_of: Callable[[list[Job]], Any]) -> dict[str, Judged]:
    """The judged tasks of a kind that count, by name."""
    found = {}
    for recipe in JUDGED_LADDER:
        own = [row for row in rows if (row["task"], row["kind"]) == (recipe.task.name, kind)]
        best = best_of(own)
        if best is not None and not best.problem:
            found[recipe.task.name] = Judged(own, best.lr, best.first, best.loss)
    return found


def by_method(tasks: dict[str, Judged], kind: str) -> list[str]:
    """Regret and the practitioner's number of each method on each task, mean over the seeds."""
    wanted = (DEFAULT, RANDOM, *LADDER_RIVALS[kind])
    methods = [method for method in wanted if any(task.of(method) for task in tasks.values())]
    lines = [f"| task (grid's lr) | {' | '.join(methods)} |", "| --- " * (len(methods) + 1) + "|"]
    regrets: dict[str, list[float]] = {method: [] for method in methods}
    steps: dict[str, list[float]] = {method: [] for method in methods}
    for name, task in tasks.items():
        cells = []
        for method in methods:
            own = task.of(method)
            if not own:
                cells.append("")
                continue
            regrets[method].append(mean(task.regret(row) for row in own))
            steps[method].append(mean(task.steps(row) for row in own))
            cells.append(f"{regrets[method][-1]:.1%}, x {steps[method][-1]:.2f}")
        lines.append(f"| {name} ({task.lr:.3g}) | {' | '.join(cells)} |")
    for label, reduce in (("median", median), ("worst", max)):
        pairs = ((reduce(regrets[method]), reduce(steps[method])) for method in methods)
        cells = [f"{regret:.1%}, x {more:.2f}" for regret, more in pairs]
        lines.append(f"| **{label}** | {' | '.join(cells)} |")
    return [*lines, ""]


def by_budget(tasks: dict[str, Judged]) -> list[str]:
    """Regret against budget: mean over the tasks, its standard error, the median and the worst."""
    lines = ["| budget | calibrate | random search | tasks |", "| --- " * 4 + "|"]
    pairs = ((DEFAULT, RANDOM), *zip(LADDER_BUDGETS, RANDOM_BUDGETS, strict=True))
    for own, rival in pairs:
        cells = []
        for method in (own, rival):
            means = [mean(map(task.regret, task.of(method))) for task in tasks.values() if task.of(method)]
            cells.append(_spread(means))
        count = sum(bool(task.of(own)) for task in tasks.values())
        name = "default" if own == DEFAULT else own.removeprefix("budget ")
        lines.append(f"| {name} | {' | '.join(cells)} | {count} |")
    return [*lines, ""]


def _spread(values: list[float]) -> str:
    if not values:
        return ""
    error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan
    return f"{mean(values):.1%} ± {error:.1%}, median {median(values):.1%}, worst {max(values):.1%}"


def by_confidence(tasks: list[Judged]) -> list[str]:
    """Of the answers of each confidence, by the words that the answer used: how far off they were."""
    found: dict[str, list[float]] = {}
    for task in tasks:
        for row in task.of(DEFAULT):
            if row.get("found"):
                found.setdefault(row["found"]["confidence"], []).append(task.regret(row))
    lines = ["| confidence | answers | within 2 % | within 5 % | worst |", "| --- " * 5 + "|"]
    for name, regrets in sorted(found.items()):
        shares = (mean(regret <= most for regret in regrets) for most in CALLED_WITHIN)
        cells = " | ".join(f"{share:.0%}" for share in shares)
        lines.append(f"| {name} | {len(regrets)} | {cells} | {max(regrets):.1%} |")
    good = [word for word, regrets in found.items() for regret in regrets if regret <= CALLED_WITHIN[0]]
    if good:
        lines += ["", f"Of the answers within 2 %, {good.count('high') / len(good):.0%} are called high."]
    return [*lines, ""]


def long_tasks(rows: list[Job]) -> list[str]:
    """The rate of calibrate on tasks of 5,000 steps beside half, twice and four times it."""
    lines = ["| task | seed | calibrate's lr | answer | x 0.5 | x 2 | x 4 |", "| --- " * 7 + "|"]
    for recipe in LONG:
        own = [row for row in rows if row["task"] == recipe.task.name]
        for answer in (row for row in own if row["method"] == DEFAULT):
            same = {row["method"]: row for row in own if row["seed"] == answer["seed"]}
            tried = [answer, *(same.get(f"answer x {factor}") for factor in ("0.5", "2", "4"))]
            losses = [row["loss"] for row in tried if row is not None and row["loss"] is not None]
            best = next(
                (row for row in tried if row is not None and losses and row["loss"] == min(losses)), answer
            )
            cells = [_end(row, best) for row in tried]
            start = f"| {recipe.task.name} | {answer['seed']} | {answer['found']['lr']:.3g} "
            lines.append(f"{start}| {' | '.join(cells)} |")
    return [*lines, ""] if len(lines) > 2 else []


def _end(row: Job | None, best: Job) -> str:
    if row is None:
        return ""
    if row["loss"] is None:
        return "diverged"
    return f"{row['loss']:.4g}, x {steps_needed(_curve(row), _curve(best)):.2f}"


def ladder(rows: list[Job], best_of: Callable[[list[Job]], Any]) -> list[str]:
    """All tables of the ladder; empty if none of its tasks was run."""
    lines: list[str] = []
    counted: list[Judged] = []
    for kind in KINDS:
        tasks = judged_of(rows, kind, best_of)
        if any(task.of(DEFAULT) for task in tasks.values()):
            lines += [f"## Judged, the ladder: {kind}", "", *by_method(tasks, kind)]
            lines += [f"### Regret against budget: {kind}", "", *by_budget(tasks)]
            counted += tasks.values()
    if counted:
        lines += ["## Judged, the ladder: confidence", "", *by_confidence(counted)]
        lines += left_out(rows, best_of)
    long = long_tasks(rows)
    return [*lines, *(["## Long tasks", "", *long] if long else [])]


def left_out(rows: list[Job], best_of: Callable[[list[Job]], Any]) -> list[str]:
    """The tasks that do not count, and why."""
    lines = []
    for recipe in JUDGED_LADDER:
        for kind in recipe.optimizers:
            best = best_of([row for row in rows if (row["task"], row["kind"]) == (recipe.task.name, kind)])
            if best is not None and best.problem:
                lines.append(f"Left out: {recipe.task.name}, {kind}, {best.problem}.")
    return [*lines, ""]
