"""The table of the benchmark, from its rows alone.

    python -m reproduction.benchmarks.calibrate.report --rows FOLDER [--out docs/results/calibrate-tasks.md]

Regret = (loss - loss of the grid's best) / (first loss - loss of the grid's best), on data that training
never sees; the grid's best is the rate with the lowest mean loss over the seeds that it was run on. A task
whose best does not beat a trivial predictor clearly, or is an end of its grid, does not count.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from reproduction.benchmarks.calibrate.judged import JUDGED
from reproduction.benchmarks.calibrate.judged_sgd import JUDGED_SGD
from reproduction.benchmarks.calibrate.ladder_report import ladder
from reproduction.benchmarks.calibrate.methods import BUDGETS, RIVALS, SGD_FIXED
from reproduction.benchmarks.calibrate.run import Job, loss_of, read
from reproduction.benchmarks.calibrate.tasks import DEVELOPMENT, FEW_PEAKS, is_alive

WITHIN = 0.05  # regret that counts as found


@dataclass(frozen=True)
class Best:
    """The grid of a task.

    Args:
        lr: Its best rate.
        loss: Mean loss there.
        first: Mean loss at the start.
        problem: Why the task does not count; empty if it does.
    """

    lr: float
    loss: float
    first: float
    problem: str

    def regret(self, row: Job) -> float:
        """Share of the best's progress that is missed."""
        return (loss_of(row) - self.loss) / (self.first - self.loss)


def best_of(rows: list[Job]) -> Best | None:
    """The best of the grid's rows of one task and kind; None if there are too few."""
    grid = [row for row in rows if row["method"] == "grid"]
    rates = sorted({row["lr"] for row in grid})
    if len(rates) < 3:
        return None
    most = max(len({row["seed"] for row in grid if row["lr"] == lr}) for lr in rates)
    losses = {
        lr: mean(loss_of(row) for row in grid if row["lr"] == lr)
        for lr in rates
        if len({row["seed"] for row in grid if row["lr"] == lr}) == most
    }
    lr = min(losses, key=lambda rate: losses[rate])
    first, trivial = (mean(row[name] for row in grid) for name in ("first", "trivial"))
    problem = ""
    if not is_alive(losses[lr], trivial):
        problem = f"dead: the grid's best is {losses[lr]:.3g}, a trivial predictor's loss {trivial:.3g}"
    elif lr in (rates[0], rates[-1]) and grid[0]["task"] not in FEW_PEAKS:
        problem = f"the grid's best, {lr:g}, is at its end"
    return Best(lr, losses[lr], first, problem)


def table(rows: list[Job], tasks: list[str], kind: str) -> list[str]:
    """Regret of every method on every task, mean over seeds, and what is left of them below."""
    ran = {row["method"] for row in rows if row["kind"] == kind and row["task"] in tasks}
    methods = ["calibrate", *(method for method in (*RIVALS, *SGD_FIXED, *BUDGETS) if method in ran)]
    lines = [f"| task (grid's lr) | {' | '.join(methods)} | seeds | gradients | confidence |"]
    lines.append("| --- " * (len(methods) + 4) + "|")
    missed: dict[str, dict[str, float]] = {method: {} for method in methods}
    notes = []
    for task in tasks:
        own = [row for row in rows if (row["task"], row["kind"]) == (task, kind)]
        best = best_of(own)
        if best is None or best.problem:
            notes += [f"Left out: {task}, {best.problem}."] if best else []
            continue
        cells = []
        for method in methods:
            found = [best.regret(row) for row in own if row["method"] == method]
            if found:
                missed[method][task] = mean(found)
            cells.append(f"{mean(found):.1%}" if found else "")
        ours = [row for row in own if row["method"] == "calibrate" and "found" in row]
        spent = f"{mean(row['spent'] for row in ours):.0f}" if ours else ""
        sure = ", ".join(sorted({said(row) for row in ours}))
        lines.append(f"| {task} ({best.lr:.3g}) | {' | '.join(cells)} | {len(ours)} | {spent} | {sure} |")
    if not any(missed.values()):
        return []
    own = missed["calibrate"]
    shared = {method: [own[task] for task in found if task in own] for method, found in missed.items()}
    regrets = {method: list(found.values()) for method, found in missed.items()}
    for name, of, values in (
        ("tasks", len, regrets), ("mean", mean, regrets), ("median", median, regrets),
        ("worst", max, regrets), (f"within {WITHIN:.0%}", _share, regrets),
        ("calibrate on the same, median", median, shared), ("calibrate on the same, worst", max, shared),
    ):  # fmt: skip
        cells = [_cell(of, values[method]) for method in methods]
        lines.append(f"| **{name}** | {' | '.join(cells)} | | | |")
    return [*lines, "", *notes, ""]


def _cell(of: Callable[[list[float]], float], values: list[float]) -> str:
    if not values:
        return ""
    return str(len(values)) if of is len else f"{of(values):.1%}"


def _share(regrets: list[float]) -> float:
    return mean(regret <= WITHIN for regret in regrets)


def said(row: Job) -> str:
    """The confidence of an answer, in the words of the rule that gave it."""
    return row["found"]["confidence"]


def confidence(rows: list[Job], tasks: list[str]) -> list[str]:
    """Of the answers of each confidence, the share within 5 %."""
    found: dict[str, list[float]] = {}
    for task in tasks:
        for kind in sorted({row["kind"] for row in rows if row["task"] == task}):
            own = [row for row in rows if (row["task"], row["kind"]) == (task, kind)]
            best = best_of(own)
            if best is None or best.problem:
                continue
            for row in own:
                if row["method"] == "calibrate" and "found" in row:
                    found.setdefault(said(row), []).append(best.regret(row))
    lines = ["| confidence | answers | within 5 % | worst |", "| --- | --- | --- | --- |"]
    for name, regrets in sorted(found.items()):
        lines.append(f"| {name} | {len(regrets)} | {_share(regrets):.0%} | {max(regrets):.1%} |")
    return [*lines, ""]


def failures(rows: list[Job], tasks: list[str]) -> list[str]:
    """Every answer beyond 5 %: by how much, and whether its rate is too small or too large."""
    lines = ["| task | optimizer | seed | missed | lr by the grid's | confidence |", "| --- " * 6 + "|"]
    for row in rows:
        if row["method"] != "calibrate" or row["task"] not in tasks or "found" not in row:
            continue
        best = best_of([r for r in rows if (r["task"], r["kind"]) == (row["task"], row["kind"])])
        if best is None or best.problem or best.regret(row) <= WITHIN:
            continue
        what = f"| {row['task']} | {row['kind']} | {row['seed']} | {best.regret(row):.1%} "
        lines.append(f"{what}| {row['found']['lr'] / best.lr:.2g} | {said(row)} |")
    return [*lines, ""]


def report(rows: list[Job]) -> str:
    """All tables: judged tasks first."""
    lines = ["# calibrate on every task", "", (__doc__ or "").strip(), "", *ladder(rows, best_of)]
    parts = (("Judged", JUDGED), ("Judged, SGD's second rule", JUDGED_SGD), ("Development", DEVELOPMENT))
    for title, recipes in parts:
        tasks = [recipe.task.name for recipe in recipes]
        if not any(row["task"] in tasks for row in rows):
            continue
        for kind in ("adamw", "momentum", "plain", "clipped"):
            found = table(rows, tasks, kind)
            lines += [f"## {title}: {kind}", "", *found] if found else []
        lines += [f"## {title}: confidence", "", *confidence(rows, tasks)]
        lines += [f"## {title}: beyond {WITHIN:.0%}", "", *failures(rows, tasks)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, required=True, help="folder of the cached runs")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    options = parser.parse_args()
    text = report(list(read(options.rows).values()))
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
