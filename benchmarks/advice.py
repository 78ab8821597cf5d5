"""Advice judged by following it: train, ask, train again with the answer.

    python -m benchmarks.advice [--set development|held-out] [--optimizer ClippedSGD|SGD|AdamW]
        [--tasks …] [--seeds 1 2 3] [--starts diverged …] [--rivals advice calibrate]
        [--out docs/results/advice.md]

Every task is trained from four settings: a tenth of the calibrated learning rate without clipping ("too
small"), the calibrated setting ("good"), ten times its learning rate at its threshold ("too large"), and the
smallest of 3, 10, 30, … times its learning rate, without clipping, that loses the run ("diverged"). Each run
is probed at every fourth step, ``advise`` is asked about its trace alone, and the answer is trained from the
same start on the same batches. Beside it: the calibrated setting, a third of the learning rate, three times
the learning rate. ``SGD`` is torch's with momentum 0.9.

Every choice in ``curvestep.advice`` was made on the development tasks. Each finished run is a line of the
results file; a run that is there is not repeated, so the benchmark may be stopped and started again.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.calibrate.data import Batch
from benchmarks.calibrate.tiny import TASKS
from torch import nn

import curvestep as cs
from curvestep.advice.advice import Advice, advise
from curvestep.smoothness.trace import Trace

SETS = {
    "development": (
        "char RNN", "char transformer", "CNN", "MLP, digits", "logistic regression", "deep MLP, poor start",
        "autoencoder", "regression",
    ),
    "held-out": (
        "char LSTM", "PTB word LSTM", "GRU, words", "word transformer", "CNN, BatchNorm", "MLP-Mixer",
        "deep ReLU MLP", "conv. autoencoder",
    ),
}  # fmt: skip
SEEDS = (1, 2, 3)
STEPS, EVERY, WINDOW = 200, 4, 20
STARTS = ("too small", "good", "too large", "diverged")
RIVALS = ("advice", "calibrate", "lr / 3", "lr x 3")
MOMENTUM = {"ClippedSGD": 0.0, "SGD": 0.9, "AdamW": 0.0}
EQUAL = 0.01  # of the loss
RESCUED = 0.05  # of calibrate's progress, below which a lost start counts as rescued

Setting = dict[str, Any]


class Bench:
    """Trains settings of a task, each once, and remembers how they ended."""

    def __init__(self, folder: Path, optimizer: str) -> None:
        self.folder, self.optimizer = folder, optimizer
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / f"{optimizer}.jsonl"
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        self.known: dict[str, Setting] = {}
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:  # torn
                continue
            self.known[row["key"]] = row

    def calibrated(self, task: str, seed: int) -> Setting:
        """What ``calibrate`` measures at the start."""
        key = json.dumps([task, seed, "calibrate"])
        if key not in self.known:
            made = TASKS[task]
            model = made.start(seed).train()
            batches = islice(made.stream(seed, "measuring"), 48)
            found = cs.calibrate(
                model,
                lambda batch: made.loss(model, batch),
                batches,
                optimizer=self.optimizer,
                momentum=MOMENTUM[self.optimizer],
            )
            self.keep(key, {"lr": found.lr, "max_norm": found.max_norm})
        row = self.known[key]
        return {"lr": row["lr"], "max_norm": _norm(row["max_norm"])}

    def run(self, task: str, seed: int, setting: Setting, *, probed: bool = False) -> Setting:
        """First and final loss of a setting; final is inf for a run that was lost."""
        key = json.dumps([task, seed, setting["lr"], _text(setting["max_norm"])])
        path = self.trace_of(task, seed, setting) if probed else None
        if key not in self.known or (path is not None and not path.exists()):
            self.keep(key, train(task, seed, setting, self.optimizer, path))
        row = self.known[key]
        return {**setting, "first": row["first"], "loss": math.inf if row["loss"] is None else row["loss"]}

    def trace_of(self, task: str, seed: int, setting: Setting) -> Path:
        """Where the trace of a probed run is kept."""
        name = f"{task}-{seed}-{setting['lr']:.6g}-{setting['max_norm']:.6g}".replace(" ", "_")
        return self.folder / self.optimizer / f"{name.replace(',', '')}.jsonl"

    def keep(self, key: str, row: Setting) -> None:
        """Write a finished run."""
        self.known[key] = {"key": key, **{k: _text(v) for k, v in row.items()}}
        with self.file.open("a") as file:
            file.write(json.dumps(self.known[key]) + "\n")

    def starts(self, task: str, seed: int) -> dict[str, Setting]:
        """The four settings that advice is asked about."""
        found = self.calibrated(task, seed)
        lr, norm = found["lr"], found["max_norm"]
        starts = {
            "too small": {"lr": lr / 10, "max_norm": math.inf},
            "good": {"lr": lr, "max_norm": norm},
            "too large": {"lr": lr * 10, "max_norm": norm},
        }
        for times in (3, 10, 30, 100, 300, 1000, 3000, 10000):
            setting = {"lr": lr * times, "max_norm": math.inf}
            if not math.isfinite(self.run(task, seed, setting)["loss"]):
                return {**starts, "diverged": setting}
        return starts


def _norm(value: float | str | None) -> float:
    return math.inf if value is None else float(value)


def _text(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def make_optimizer(name: str, model: nn.Module, setting: Setting) -> torch.optim.Optimizer:
    """The optimizer of a setting."""
    options = {**setting, "nonfinite": "propagate"}  # as torch's do: a lost run goes on with NaN
    if name == "AdamW":
        return cs.ClippedAdamW(model.parameters(), **options)
    return cs.ClippedSGD(model.parameters(), momentum=MOMENTUM[name], **options)


def train(task: str, seed: int, setting: Setting, optimizer: str, path: Path | None) -> Setting:
    """One run; with ``path`` probed. Its loss is the mean over fresh batches after each of the last steps."""
    torch.set_num_threads(1)
    made = TASKS[task]
    model = made.start(seed).train()
    opt = make_optimizer(optimizer, model, setting)
    fresh = list(islice(made.stream(seed, "fresh"), WINDOW))
    with torch.no_grad():
        first = float(np.mean([made.loss(model, batch).item() for batch in fresh]))
    probe = None
    if path is not None:
        # Under its own name only when whole: a run that was killed is begun again.
        part = path.with_suffix(".part")
        probe = cs.SmoothnessProbe(model, every=EVERY, trace=part, if_exists="overwrite")
    losses = list(_losses(made, model, opt, made.stream(seed, "training"), fresh, probe))
    if probe is not None and path is not None:
        probe.close()
        path.with_suffix(".part").replace(path)
    loss = float(np.mean(losses)) if len(losses) == WINDOW else math.inf
    return {"first": first, "loss": loss if loss < first else math.inf}


def _losses(
    made: Any,
    model: nn.Module,
    opt: torch.optim.Optimizer,
    stream: Iterator[Batch],
    fresh: list[Batch],
    probe: cs.SmoothnessProbe | None,
) -> Iterator[float]:
    lost = 0
    for step, batch in enumerate(islice(stream, STEPS)):
        opt.zero_grad()
        loss = made.loss(model, batch)
        loss.backward()
        lost += not torch.isfinite(loss)
        if lost > 2 * EVERY:  # long enough for the probe to see it
            return
        if probe is None:
            opt.step()
        else:
            with probe(lambda batch=batch: made.loss(model, batch), loss=loss):
                opt.step()
        if step >= STEPS - WINDOW:
            with torch.no_grad():
                yield made.loss(model, fresh[step - STEPS + WINDOW]).item()


def follow(advice: Advice, start: Setting) -> Setting:
    """The setting that somebody would run who reads the first line of an advice."""
    if advice.lr is None or advice.max_norm is None or advice.action == "keep":
        return start
    return {"lr": float(f"{advice.lr:.6g}"), "max_norm": float(f"{advice.max_norm:.6g}")}


def cases(
    bench: Bench,
    tasks: tuple[str, ...],
    seeds: tuple[int, ...],
    rivals: tuple[str, ...],
    kinds: tuple[str, ...] = STARTS,
) -> Iterator[Setting]:
    """Each start with what came of it, of the advice, and of the rivals.

    Where ``calibrate`` refuses there is no setting to start from, and none to compare with.
    """
    for task in tasks:
        for seed in seeds:
            try:
                calibrated = bench.run(task, seed, bench.calibrated(task, seed))
            except ValueError as refusal:
                print(f"{task} {seed}: left out. {refusal}", flush=True)
                continue
            for name, setting in bench.starts(task, seed).items():
                if name not in kinds:
                    continue
                ran = bench.run(task, seed, setting, probed=True)
                advice = advise(Trace.load(bench.trace_of(task, seed, setting)))
                lr, norm = setting["lr"], setting["max_norm"]
                tried = {
                    "advice": follow(advice, setting),
                    "lr / 3": {"lr": lr / 3, "max_norm": norm},
                    "lr x 3": {"lr": lr * 3, "max_norm": norm},
                }
                yield {
                    "task": task,
                    "seed": seed,
                    "start": name,
                    "ran": ran,
                    "said": advice.verdict,
                    "calibrate": calibrated,
                    **{rival: bench.run(task, seed, tried[rival]) for rival in rivals if rival in tried},
                }


def outcome(case: Setting, rival: str) -> str:
    """How a rival did against the run that it starts from."""
    before, after = case["ran"]["loss"], case[rival]["loss"]
    if not math.isfinite(after):
        return "diverged"
    if not math.isfinite(before) or after < before * (1 - EQUAL):
        return "better"
    return "equal" if after <= before * (1 + EQUAL) else "worse"


def rescued(case: Setting, rival: str) -> bool:
    """Whether a lost start ends within 5 % of calibrate's progress."""
    target, first = case["calibrate"]["loss"], case["calibrate"]["first"]
    return case[rival]["loss"] <= target + RESCUED * (first - target)


def table(found: list[Setting], rivals: tuple[str, ...] = RIVALS) -> str:
    """Shares of outcomes for each kind of start and each rival."""
    lines = [
        "| start | cases | followed | better | equal | worse | diverged | rescued |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for start in (*STARTS, "all"):
        group = [case for case in found if start in (case["start"], "all")]
        if not group:
            continue
        for rival in rivals:
            count = Counter(outcome(case, rival) for case in group)
            shares = [f"{count[kind] / len(group):.0%}" for kind in OUTCOMES]
            lost = [case for case in group if case["start"] == "diverged"]
            saved = f"{sum(rescued(case, rival) for case in lost)} of {len(lost)}" if lost else ""
            lines.append(f"| {start} | {len(group)} | {rival} | {' | '.join(shares)} | {saved} |")
    return "\n".join(lines)


OUTCOMES = ("better", "equal", "worse", "diverged")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", choices=list(SETS), default="development")
    parser.add_argument("--optimizer", choices=list(MOMENTUM), default="ClippedSGD")
    parser.add_argument("--tasks", nargs="+")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=list(STARTS))
    parser.add_argument("--rivals", nargs="*", choices=RIVALS, default=list(RIVALS))
    parser.add_argument("--out", type=Path, help="write the table into this page, between its marks")
    parser.add_argument("--folder", type=Path, default=Path("runs/advice"))
    options = parser.parse_args()
    bench = Bench(options.folder, options.optimizer)
    found = []
    rivals = tuple(options.rivals)
    tasks, seeds = tuple(options.tasks or SETS[options.set]), tuple(options.seeds)
    for case in cases(bench, tasks, seeds, rivals, tuple(options.starts)):
        found.append(case)
        ends = "  ".join(f"{name} {case[name]['loss']:.4g}" for name in ("ran", *rivals))
        print(f"{case['task']} {case['seed']} {case['start']}: {outcome(case, 'advice')}  {ends}", flush=True)
        print(
            f"   lr {case['ran']['lr']:.3g}, max_norm {case['ran']['max_norm']:.3g} -> "
            f"{case['advice']['lr']:.3g}, {case['advice']['max_norm']:.3g}  {case['said'][:150]}",
            flush=True,
        )
    written = table(found, rivals)
    print(written)
    if options.out:
        begin, end = (f"<!-- {word} {options.optimizer} {options.set} -->" for word in ("begin", "end"))
        before, rest = options.out.read_text(encoding="utf-8").split(begin)
        after = rest.split(end)[1]
        options.out.write_text(f"{before}{begin}\n{written}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
