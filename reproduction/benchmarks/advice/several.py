"""Answers to several runs of the judged grids: pairs of seeds, pairs of settings, one of them unfinished.

    python -m reproduction.benchmarks.advice.several --rows FOLDER --part judge-bounds

An answer goes the wrong way if what it says to run ends worse than before, by more than 5 % of the best's
progress: for seeds than their mean, for settings than the better of the two. With an unfinished run beside it
the answer must be that of the whole run.
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from pathlib import Path
from statistics import mean

from reproduction.benchmarks.advice.run import PARTS, Rows, loss_of
from reproduction.benchmarks.advice.score import Grid, grids

from curvestep.advice.advice import Advice, advise
from curvestep.trace.trace import Trace

MARGIN = 0.05
CUT = 0.4  # share of its steps that an unfinished run has taken


def trace_of(grid: Grid, place: int) -> Trace:
    return Trace.load(grid.rows.trace_of(grid.runs[place]))


def goes_wrong(grid: Grid, advice: Advice, before: float) -> bool:
    """Whether following ends clearly worse; no number is no direction."""
    lr = advice.next_lr or advice.lr
    return lr is not None and grid.at(lr) > before + MARGIN


def pairs_of_seeds(seeds: list[Grid]) -> list[str]:
    found = []
    for one, other in itertools.combinations(seeds, 2):
        for k, lr in enumerate(one.rates):
            if lr not in other.rates:
                continue
            advice = advise(trace_of(one, k), trace_of(other, other.rates.index(lr)))
            if advice.action == "take":
                found.append("TAKE")
                continue
            after = [goes_wrong(grid, advice, grid.at(lr)) for grid in (one, other)]
            found.append("wrong" if all(after) else "right")
    return found


def pairs_of_settings(grid: Grid) -> list[str]:
    found = []
    for low, high in itertools.combinations(range(len(grid.runs)), 2):
        if high - low > 2:
            continue
        advice = advise(trace_of(grid, low), trace_of(grid, high))
        better = min(grid.regret(loss_of(grid.runs[k])) for k in (low, high))
        found.append("wrong" if goes_wrong(grid, advice, better) else "right")
    return found


def unfinished(grid: Grid) -> list[str]:
    found = []
    for k in range(len(grid.runs) - 1):
        whole, other = trace_of(grid, k), trace_of(grid, k + 1)
        cut = Trace(header=other.header)
        rows = list(other)
        for row in rows[: int(CUT * len(rows))]:
            cut.append(row)
        alone, together = advise(whole), advise(whole, cut)
        if advise(cut).action == "diverged":  # that is an ending
            continue
        found.append("right" if (alone.action, alone.lr) == (together.action, together.lr) else "wrong")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, required=True, help="folder of the cached runs")
    parser.add_argument("--part", choices=list(PARTS), required=True)
    parser.add_argument("--train", action="store_true", help="train answers beyond the grid")
    options = parser.parse_args()
    sound = [g for g in grids(Rows(options.rows), PARTS[options.part], train=options.train) if not g.problem]
    tasks = itertools.groupby(sound, key=lambda grid: (grid.name["task"], grid.name["kind"]))
    answers = {
        "pairs of seeds": [word for _, seeds in tasks for word in pairs_of_seeds(list(seeds))],
        "pairs of settings": [word for grid in sound for word in pairs_of_settings(grid)],
        "one unfinished": [word for grid in sound for word in unfinished(grid)],
    }
    print("| several runs | answers | right | wrong | TAKE for two seeds |\n" + "| --- " * 5 + "|")
    for name, words in answers.items():
        count = Counter(words)
        share = mean(word == "right" for word in words)
        print(f"| {name} | {len(words)} | {share:.1%} | {count['wrong']} | {count['TAKE']} |")


if __name__ == "__main__":
    main()
