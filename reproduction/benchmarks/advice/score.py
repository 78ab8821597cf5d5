"""Regret before and after following each adviser, from the cached runs.

    python -m reproduction.benchmarks.advice.score --rows FOLDER --part develop | judge | judge-bounds
        [--default] [--far] [--train]

Regret = (loss - loss of the grid's best) / (first loss - loss of the grid's best), on data that training
never sees, 0 at least and 1 for a run that was lost or ended above its start. Each seed has its own grid. A
followed learning rate within the grid is read off it (losses linear in log lr between neighbours); one beyond
its ends is trained with ``--train``, and until then counted as its end. A task whose best does not beat a
trivial predictor by 5 %, or is an end of its grid, does not count. An answer without a number is scored as
keep. With ``--default`` the advisers see only the rows that a probe takes by itself; with ``--far`` they are
asked about starts ten and a hundred times beyond the grid.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

import numpy as np
from reproduction.benchmarks.advice.run import LOWEST, PARTS, Job, Rows, loss_of
from reproduction.benchmarks.advice.six_lines import six_lines
from reproduction.benchmarks.calibrate.tasks import is_alive

from curvestep.advice.advice import advise
from curvestep.advice.outcome import outcome_of
from curvestep.smoothness.schedule import Schedule
from curvestep.trace.trace import Trace

ROW_COST = 3  # gradients, of three fractions
BAD, GOOD, HARMED, LOST = 0.2, 0.05, 0.1, 1.0  # regrets

Adviser = Callable[[Trace], tuple[str, float]]  # what it says, and the factor on lr
KEPT = ("keep", "no sign", "cannot tell")  # answers that leave a run as it is


def ours(trace: Trace) -> tuple[str, float]:
    """What ``advise`` says."""
    advice, lr = advise(trace), outcome_of(trace).lr
    return advice.action, (advice.lr / lr if advice.lr is not None else 1.0)


def wider(trace: Trace) -> float | None:
    """The threshold that ``advise`` raises to in place of lr; None for none."""
    advice, run = advise(trace), outcome_of(trace)
    return advice.max_norm if advice.action == "raise" and advice.lr == run.lr else None


# What another version of curvestep says of traces whose paths it reads.
_ASK = """
import json, math, sys
from curvestep.advice.advice import advise
from curvestep.advice.outcome import outcome_of
from curvestep.trace.trace import Trace
for path in map(str.strip, sys.stdin):
    trace = Trace.load(path)
    advice, lr = advise(trace), outcome_of(trace).lr
    print(json.dumps([advice.action, advice.lr / lr if advice.lr is not None else 1.0]))
"""


def another_version(source: Path, traces: list[Path]) -> Adviser:
    """The adviser of a checkout's ``src``, asked about all traces at once."""
    asked = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _ASK], env={**os.environ, "PYTHONPATH": str(source)},
        input="\n".join(map(str, traces)), text=True, capture_output=True, check=True,
    )  # fmt: skip
    answers = dict(zip(map(str, traces), map(json.loads, asked.stdout.splitlines()), strict=True))
    return lambda trace: tuple(answers[str(trace.path)])


ADVISERS: dict[str, Adviser] = {
    "keep": lambda _: ("keep", 1.0),
    "lr / 3": lambda _: ("lower", 1 / 3),
    "lr x 3": lambda _: ("raise", 3.0),
    "six lines": six_lines,
    "advise": ours,
}


@dataclass
class Grid:
    """The runs of a task, kind and seed.

    Args:
        rows: The cache.
        runs: By ascending lr.
        far: Those beyond it.
        train: Whether to train what lies beyond its ends.
    """

    rows: Rows
    runs: list[Job]
    far: list[Job]
    train: bool
    name: dict[str, object] = field(init=False)

    def __post_init__(self) -> None:
        self.name = {key: self.runs[0][key] for key in ("task", "kind", "seed")}
        self.rates = [row["lr"] for row in self.runs]
        self.losses = [loss_of(row) for row in self.runs]
        self.best, self.first = min(self.losses), self.runs[0]["first"]

    @property
    def problem(self) -> str:
        """Why it does not count; empty if it does."""
        place = self.losses.index(self.best)
        if not is_alive(self.best, self.runs[0]["trivial"]):
            return f"the best, {self.best:.3g}, is no better than a trivial {self.runs[0]['trivial']:.3g}"
        if place in (0, len(self.runs) - 1):
            return f"the best lr, {self.rates[place]:g}, is an end"
        return ""

    def regret(self, loss: float) -> float:
        """Share of the best's progress that is missed."""
        return min(1.0, max(0.0, (loss - self.best) / (self.first - self.best)))

    def at(self, lr: float) -> float:
        """Regret of a learning rate."""
        lr = float(f"{lr:.3g}")
        if self.train and not self.rates[0] * 0.99 <= lr <= self.rates[-1] * 1.01:
            return self.regret(loss_of(self.rows.run(probed=False, **self.name, lr=lr)))
        return self.regret(float(np.interp(math.log(lr), np.log(self.rates), self.losses)))

    def at_threshold(self, lr: float, max_norm: float) -> float:
        """Regret of another threshold at a learning rate of the grid, trained."""
        job = {**self.name, "lr": lr, "max_norm": float(f"{max_norm:.3g}")}
        return self.regret(loss_of(self.rows.run(probed=False, **job)))

    def calibrated(self) -> float | None:
        """Regret of calibrate's answer, which was trained with its threshold; None if there is none."""
        row = self.rows.rows.get(self.rows.key_of(method="calibrate", **self.name))
        if row is None:
            return None
        lost = {"first": self.first, "loss": row["loss"]}
        return self.regret(loss_of(lost))


@dataclass(frozen=True)
class Case:
    """One run, what an adviser said, and the regrets before and after."""

    kind: str
    task: str
    seed: int
    lr: float
    off: float  # factor between it and the best of the grid, 1 or more
    said: str
    factor: float
    before: float
    after: float


def grids(rows: Rows, tasks: tuple[str, ...], *, train: bool) -> Iterator[Grid]:
    """All grids of these tasks."""
    for task in tasks:
        for kind in LOWEST:
            own = [row for row in rows.rows.values() if (row["task"], row["kind"]) == (task, kind)]
            plain = [row for row in own if "method" not in row and "max_norm" not in row]
            probed = [row for row in plain if rows.trace_of(row).exists()]
            for seed in sorted({row["seed"] for row in probed}):
                runs = sorted((row for row in probed if row["seed"] == seed), key=lambda row: row["lr"])
                near, far = ([row for row in runs if ("far" in row) == is_far] for is_far in (False, True))
                if len(near) >= 7:
                    yield Grid(rows, near, far, train)


def as_default(trace: Trace) -> Trace:
    """The rows that a probe takes where nothing else is asked for."""
    schedule, kept = Schedule(), Trace(header=trace.header)
    for row in trace:
        while schedule.next < row["step"]:
            schedule.finished(schedule.next, num_gradients=ROW_COST)
        if schedule.next == row["step"]:
            kept.append(row)
    return kept


def cases(grid: Grid, adviser: Adviser, *, far: bool, default: bool) -> Iterator[Case]:
    """Every run of a grid, or beyond it, with what the adviser says of its trace."""
    for row in grid.far if far else grid.runs:
        trace = Trace.load(grid.rows.trace_of(row))
        said, factor = adviser(as_default(trace) if default else trace)
        before = grid.regret(loss_of(row))
        after = before if factor == 1.0 else grid.at(row["lr"] * factor)
        if adviser is ours and grid.train and (norm := wider(trace)) is not None:
            after = grid.at_threshold(row["lr"], norm)
        off = math.exp(abs(math.log(row["lr"] / grid.rates[grid.losses.index(grid.best)])))
        yield Case(row["kind"], row["task"], row["seed"], row["lr"], off, said, factor, before, after)


def regrets(found: dict[str, list[Case]]) -> list[str]:
    """Mean regret after following each adviser, by kind."""
    lines = [f"| following | all | {' | '.join(LOWEST)} |", "| --- " * (len(LOWEST) + 2) + "|"]
    for name, of in found.items():
        groups = [of, *([case for case in of if case.kind == kind] for kind in LOWEST)]
        cells = (f"{mean(case.after for case in group):.1%}" if group else "" for group in groups)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def shares(found: list[Case], name: str) -> list[str]:
    """Of an adviser, by kind: bad runs that it left as they were, good ones that it harmed, runs it lost."""
    lines = [
        f"| {name} | runs | bad runs | told to stay | left as they were | good runs | harmed | lost after |"
    ]
    lines.append("| --- " * 8 + "|")
    for kind in ("all", *LOWEST):
        of = [case for case in found if kind in (case.kind, "all")]
        bad, good = [case for case in of if case.before > BAD], [case for case in of if case.before < GOOD]
        cells = (
            len(of), len(bad), _share(case.said in KEPT for case in bad),
            _share(case.factor == 1.0 for case in bad), len(good),
            _share(case.after > HARMED for case in good),
            sum(case.factor != 1.0 and case.after >= LOST for case in of),
        )  # fmt: skip
        lines.append(f"| {kind} | {' | '.join(map(str, cells))} |")
    return lines


def _share(facts: Iterable[bool]) -> str:
    known = list(facts)
    return f"{mean(known):.0%}" if known else ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, required=True, help="folder of the cached runs")
    parser.add_argument("--part", choices=list(PARTS), required=True)
    parser.add_argument("--default", action="store_true", help="show only the rows of a default probe")
    parser.add_argument("--far", action="store_true", help="ask about starts beyond the grid")
    parser.add_argument("--train", action="store_true", help="train answers beyond the grid")
    parser.add_argument("--each", action="store_true", help="print every run, too")
    parser.add_argument("--before", type=Path, metavar="SRC", help="ask another version's `src`, too")
    options = parser.parse_args()
    rows = Rows(options.rows)
    advisers = dict(ADVISERS)
    if options.before:
        advisers["advise before"] = another_version(options.before, sorted(options.rows.glob("traces/*")))
    found: dict[str, list[Case]] = {name: [] for name in advisers}
    calibrated: list[dict[str, float]] = []  # mean regrets of a grid
    left_out, counted = [], set()
    for grid in grids(rows, PARTS[options.part], train=options.train):
        if grid.problem:
            left_out.append(
                f"{grid.name['task']}, {grid.name['kind']}, seed {grid.name['seed']}: {grid.problem}"
            )
            continue
        counted.add(grid.name["task"])
        for name, adviser in advisers.items():
            found[name] += cases(grid, adviser, far=options.far, default=options.default)
        value = grid.calibrated()
        if value is not None and not options.far:
            same = {name: found[name][-len(grid.runs) :] for name in advisers}
            calibrated.append({name: mean(case.after for case in of) for name, of in same.items()})
            calibrated[-1]["calibrate"] = value
    if options.each:
        for six, own in zip(found["six lines"], found["advise"], strict=True):
            name = f"{own.task}, {own.kind}, seed {own.seed}, lr {own.lr:g}"
            answers = (f"{case.said} {case.factor:.3g} -> {case.after:.0%}" for case in (own, six))
            print(f"{name}: {own.before:.0%}, {'; six lines '.join(answers)}")
    print("\n".join([*regrets(found), "", *shares(found["advise"], "advise"), ""]))
    for name in ("six lines", "advise before"):
        if name in found:
            print("\n".join([*shares(found[name], name), ""]))
    said = Counter(case.said for case in found["advise"])
    print("advise said " + ", ".join(f"{word} {count}" for word, count in said.most_common()) + ".")
    kept = [case for case in found["advise"] if case.said in KEPT]
    median, most = np.quantile([case.before for case in kept], [0.5, 0.9])
    off = max(case.off for case in kept)
    print(f"Told to stay: regret {median:.1%} in the median, a tenth {most:.1%} or more, lr off by {off:.3g}")
    if calibrated:
        means = (f"{name} {mean(row[name] for row in calibrated):.1%}" for name in calibrated[0])
        print(f"Where calibrate was asked, {len(calibrated)} grids: {', '.join(means)}.")
    print(f"{len(counted)} tasks: {', '.join(sorted(map(str, counted)))}.")
    print("\n".join(["Left out:", *left_out]) if left_out else "Left out: none.")


if __name__ == "__main__":
    main()
