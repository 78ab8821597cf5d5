"""Calibration where it is hard: noise near an optimum, tiny batches, plateaus, odd scales, many words.

    python -m benchmarks.calibrate_cases [--seeds 400 401 402] [--cases ...] [--methods calibrated grid]

The rule was developed on seeds 0 to 24, and looked at on 100 to 102, 200 to 202 and 300 to 302. Each
finished run is a line of the results file; a run that is there is not repeated, so the benchmark may be
stopped and started again. Delete a method's lines to run it again.

Each case trains a small model three ways: not at all, with the measured numbers, and with every setting of a
grid of learning rates and thresholds. Losses are means over a large sample that training does not see, after
each of the last ten steps. Regret = (loss - best of grid) / (loss at the start - best of grid); neither the
grid's search nor that of the calibration is counted. A case passes if the calibrated loss is below that of
the start up to half a per cent, and its regret at most a tenth unless the result says that it cannot tell.
"""

from __future__ import annotations

import argparse
import copy
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from benchmarks.calibrate_data import Batch, Draw, Task, classify, next_token, regress, text, words
from torch import Tensor, nn

from curvestep import ClippedSGD, calibrate
from curvestep._files import dump_json, load_json
from curvestep.vectors import global_norm

RAISED = 1.005  # times the loss at the start: less is the noise of the sample
WINDOW = 10  # steps over which the final loss is averaged
THRESHOLDS = (math.inf, 1.75, 0.6)  # times the gradient norm at the start
CLASSES, INPUTS = 5, 20


@dataclass(frozen=True)
class Case:
    """A task, the optimizer that trains it, and the batches that its loss is read from."""

    task: Task
    optimizer: str = "ClippedSGD"
    sample: Draw | None = None  # default: the task's own batches
    num_rates: int = 10


# Data


@cache
def centres() -> Tensor:
    """The middle of each class."""
    return 0.45 * torch.randn(CLASSES, INPUTS, generator=torch.Generator().manual_seed(12345))


def points(batch: int, *, labels: float = 0.0) -> Draw:
    """Points of overlapping classes, of which the share ``labels`` has a random label."""

    def draw(generator: torch.Generator) -> Iterator[Batch]:
        while True:
            y = torch.randint(CLASSES, (batch,), generator=generator)
            x = centres()[y] + torch.randn(batch, INPUTS, generator=generator)
            random = torch.randint(CLASSES, (batch,), generator=generator)
            yield x, torch.where(torch.rand(batch, generator=generator) < labels, random, y)

    return draw


def line_with_noise(batch: int, noise: float) -> Draw:
    """Points of a linear function whose coefficients are all one, with noise."""

    def draw(generator: torch.Generator) -> Iterator[Batch]:
        while True:
            x = torch.randn(batch, INPUTS, generator=generator)
            yield x, x.sum(1, keepdim=True) + noise * torch.randn(batch, 1, generator=generator)

    return draw


# Models


class Scaled(nn.Module):
    """A layer whose weights are used times ``scale``: their curvature is its square times as large."""

    def __init__(self, layer: nn.Linear, scale: float) -> None:
        super().__init__()
        self.layer, self.scale = layer, scale
        with torch.no_grad():
            layer.weight.div_(scale)
            layer.bias.div_(scale)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's values."""
        return self.scale * self.layer(x)


class ReZero(nn.Module):
    """A residual block whose branch starts at zero times itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.gain = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """The input and what the branch adds to it."""
        return x + self.gain * self.branch(x)


class LowRank(nn.Module):
    """A frozen layer and a trainable change of low rank that starts at zero (LoRA)."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's values and the change."""
        return self.layer(x) + self.up(self.down(x))


class WordLSTM(nn.Module):
    """Embedding, LSTM, scores of the next word, with tied weights or not."""

    def __init__(self, vocabulary: int, *, std: float, tied: bool, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=std)
        self.recurrent = nn.LSTM(width, width, batch_first=True)
        self.out = nn.Linear(width, vocabulary)
        if tied:
            self.out.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """Scores shaped (batch, time, words)."""
        return self.out(self.recurrent(self.embedding(x))[0])


def mlp(width: int = 64) -> nn.Sequential:
    """Two hidden layers of tanh."""
    layers = (
        nn.Linear(INPUTS, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, CLASSES),
    )
    return nn.Sequential(*layers)


def first_layer_scaled(scale: float) -> nn.Module:
    """The network with a first layer of another scale."""
    model = mlp()
    model[0] = Scaled(model[0], scale)  # type: ignore[arg-type]
    return model


def zero_head() -> nn.Module:
    """The network with a last layer of zeros."""
    model = mlp()
    nn.init.zeros_(model[-1].weight)  # type: ignore[arg-type]
    nn.init.zeros_(model[-1].bias)  # type: ignore[arg-type]
    return model


def rezero() -> nn.Module:
    """Twelve residual blocks that start as the identity."""
    return nn.Sequential(nn.Linear(INPUTS, 32), *[ReZero(32) for _ in range(12)], nn.Linear(32, CLASSES))


def low_rank() -> nn.Module:
    """The network with frozen layers and changes of rank eight."""
    return nn.Sequential(*[LowRank(m, 8) if isinstance(m, nn.Linear) else m for m in mlp()])


def deep_sigmoid() -> nn.Module:
    """Four hidden layers of sigmoids at torch's default start."""
    layers: list[nn.Module] = []
    for before in (INPUTS, 32, 32, 32):
        layers += [nn.Linear(before, 32), nn.Sigmoid()]
    return nn.Sequential(*layers, nn.Linear(32, CLASSES))


def saturated_tanh() -> nn.Module:
    """The network with weights of standard deviation three: nearly every unit is at its end."""
    model = mlp()
    for p in model.parameters():
        nn.init.normal_(p, std=3.0)
    return model


def trained(labels: float) -> nn.Module:
    """The network after a thousand steps of Adam: a start for fine-tuning."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    generator = torch.Generator().manual_seed(int(torch.randint(2**31, ())))
    for batch in islice(points(128, labels=labels)(generator), 1000):
        optimizer.zero_grad()
        classify(model, batch).backward()
        optimizer.step()
        scheduler.step()
    return model


def near_optimum() -> nn.Module:
    """The coefficients of the line, each a little off."""
    model = nn.Linear(INPUTS, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(1.0 + 0.13 * torch.randn(1, INPUTS))
    return model


def _points(
    name: str,
    model: Callable[[], nn.Module],
    *,
    batch: int = 64,
    labels: float = 0.0,
    lowest: float = 3e-3,
    steps: int = 200,
) -> Task:
    return Task(name, steps, model, points(batch, labels=labels), classify, lowest)


def _words(name: str, model: Callable[[], nn.Module]) -> Case:
    return Case(Task(name, 100, model, text(lambda: words(3000), 8), next_token, 1.0), num_rates=6)


def _line(name: str, batch: int, noise: float) -> Case:
    task = Task(name, 200, near_optimum, line_with_noise(batch, noise), regress, 1e-4)
    return Case(task, sample=line_with_noise(4096, noise))


def _fine(name: str, *, batch: int, labels: float = 0.0, optimizer: str = "ClippedSGD") -> Case:
    lowest = 1e-5 if optimizer == "AdamW" else 1e-4
    task = _points(name, lambda: trained(labels), batch=batch, labels=labels, lowest=lowest)
    return Case(task, optimizer, points(4096, labels=labels))


def _fresh(name: str, model: Callable[[], nn.Module] = mlp, *, batch: int = 64, **options: Any) -> Case:
    return Case(_points(name, model, batch=batch, **options), sample=points(4096))


CASES = {
    case.task.name: case
    for case in (
        _fresh("MLP, batch 64"),
        _fresh("first layer's curvature x100", lambda: first_layer_scaled(10.0)),
        _fresh("first layer's curvature x0.01", lambda: first_layer_scaled(0.1)),
        _fresh("head of zeros", zero_head),
        _fresh("ReZero, 12 blocks", rezero),
        _fresh("LoRA", low_rank),
        _words("3,000 words, untied, N(0, 1)", lambda: WordLSTM(3000, std=1.0, tied=False)),
        _words("3,000 words, tied, 0.02", lambda: WordLSTM(3000, std=0.02, tied=True)),
        _words("3,000 words, tied, N(0, 1)", lambda: WordLSTM(3000, std=1.0, tied=True)),
        _fresh("MLP, batch 4", batch=4),
        _fresh("MLP, batch 1", batch=1, lowest=1e-3),
        _fresh("deep sigmoid", deep_sigmoid, lowest=0.03, steps=400),
        _fresh("saturated tanh", saturated_tanh, lowest=1e-3),
        _fine("fine-tuning, batch 8", batch=8),
        _fine("fine-tuning, batch 8, noisy labels", batch=8, labels=0.3),
        _fine("fine-tuning, batch 8, AdamW", batch=8, optimizer="AdamW"),
        _fine("fine-tuning, batch 64", batch=64),
        _line("regression near its optimum, noise 1, batch 8", 8, 1.0),
        _line("regression near its optimum, noise 5, batch 8", 8, 5.0),
        _line("regression near its optimum, noise 5, batch 32", 32, 5.0),
    )
}


# Runs


@dataclass(frozen=True)
class Setting:
    """One run's numbers."""

    lr: float
    max_norm: float = math.inf


def mean_loss(task: Task, model: nn.Module, batches: list[Batch]) -> float:
    """The loss over the batches."""
    with torch.no_grad():
        return float(np.mean([task.loss(model, batch).item() for batch in batches]))


def train(case: Case, seed: int, start: nn.Module, setting: Setting, sample: list[Batch]) -> float:
    """The loss over the last steps of a run from ``start``; infinite if it diverged."""
    task, model, losses = case.task, copy.deepcopy(start), []
    if case.optimizer == "AdamW":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=setting.lr)
    else:
        optimizer = ClippedSGD(
            model.parameters(), lr=setting.lr, max_norm=setting.max_norm, nonfinite="propagate"
        )
    for step, batch in enumerate(islice(task.stream(seed, "training"), task.steps)):
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        if not torch.isfinite(loss):
            return math.inf
        loss.backward()
        optimizer.step()
        if step >= task.steps - WINDOW:
            losses.append(mean_loss(task, model, sample))
    return float(np.mean(losses)) if np.isfinite(losses).all() else math.inf


def gradient_norm(case: Case, seed: int, model: nn.Module) -> float:
    """Median gradient norm at the start."""
    norms = []
    for batch in islice(case.task.stream(seed, "measuring"), 4):
        model.zero_grad()
        case.task.loss(model, batch).backward()
        norms.append(global_norm([p.grad for p in model.parameters()]).item())
    model.zero_grad(set_to_none=True)
    return median(norms)


def grid(case: Case, seed: int, model: nn.Module) -> list[Setting]:
    """Learning rates half a decade apart, with three thresholds each; AdamW has none."""
    rates = [case.task.lowest_lr * 10 ** (k / 2) for k in range(case.num_rates)]
    if case.optimizer == "AdamW":
        return [Setting(lr) for lr in rates]
    norm = gradient_norm(case, seed, model)
    return [Setting(lr, relative * norm) for lr in rates for relative in THRESHOLDS]


def run(name: str, seed: int, method: str) -> dict[str, Any]:
    """One case and seed with the measured numbers, or with the best of the grid; its row of the results."""
    case = CASES[name]
    model = case.task.start(seed)
    draw = case.sample or case.task.batches
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{seed}/sample".encode()))
    sample = list(islice(draw(generator), 1 if case.sample else 8))
    row: dict[str, Any] = {"case": name, "seed": seed, "method": method}
    row["start"] = mean_loss(case.task, model, sample)
    if method == "grid":
        settings = grid(case, seed, model)
        losses = [train(case, seed, model, setting, sample) for setting in settings]
        best = int(np.argmin(losses))
        return {**row, "loss": losses[best], "lr": settings[best].lr, "max_norm": settings[best].max_norm}
    batches = list(islice(case.task.stream(seed, "measuring"), 32))
    try:
        cal = calibrate(model, lambda b: case.task.loss(model, b), batches, optimizer=case.optimizer)
    except ValueError as error:  # refused: the numbers are not known, and the loss stays
        return {**row, "loss": row["start"], "lr": 0.0, "limit": "refused", "words": str(error)}
    loss = train(case, seed, model, Setting(cal.lr, cal.max_norm), sample)
    words = " ".join(cal.warnings)
    return {
        **row, "loss": loss, "lr": cal.lr, "max_norm": cal.max_norm, "limit": cal.limit, "words": words,
        "num_gradients": cal.num_gradients,
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """The cases with their regrets, and whether they pass."""
    found = {(r["case"], r["seed"], r["method"]): r for r in rows}
    lines = [
        "| case | seed | start | calibrated | lr | best of grid | best lr | regret | limit | cannot tell |",
        10 * "|---" + "|",
    ]
    regrets, raised = [], []
    for name in CASES:
        for seed in sorted({r["seed"] for r in rows}):
            cal, best = found.get((name, seed, "calibrated")), found.get((name, seed, "grid"))
            if cal is None:
                continue
            unsure = cal["limit"] in ("unknown", "refused") or "cannot tell" in cal["words"]
            if cal["loss"] > RAISED * cal["start"]:
                raised.append(f"{name} ({seed})")
            grid_columns = "| | | "
            if best is not None:
                regret = (cal["loss"] - best["loss"]) / (best["start"] - best["loss"])
                regrets += [] if unsure else [regret]
                grid_columns = f"| {best['loss']:.3f} | {best['lr']:.3g} | {regret:.1%} "
            lines.append(
                f"| {name} | {seed} | {cal['start']:.3f} | {cal['loss']:.3f} | {cal['lr']:.3g} {grid_columns}"
                f"| {cal['limit']} | {'yes' if unsure else ''} |"
            )
    middle = f"{median(regrets):.1%}" if regrets else "not known"
    lines += [
        "",
        f"Median regret where the result does not say that it cannot tell: {middle} of {len(regrets)} runs. "
        f"The loss is more than half a per cent above that of the start in {len(raised)} of "
        f"{len(lines) - 2}: {', '.join(raised) or 'none'}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[400, 401, 402])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="CASE")
    parser.add_argument(
        "--methods", nargs="+", default=["calibrated", "grid"], choices=["calibrated", "grid"]
    )
    parser.add_argument("--results", type=Path, default=Path("runs/calibrate-cases.jsonl"))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    if options.results.exists():
        rows = [load_json(line) for line in options.results.read_text().splitlines()]
    done = {(r["case"], r["seed"], r["method"]) for r in rows}
    with options.results.open("a") as file:
        for seed in options.seeds:
            for name in options.cases:
                for method in options.methods:
                    if (name, seed, method) not in done:
                        rows.append(run(name, seed, method))
                        file.write(dump_json(rows[-1]) + "\n")
                        file.flush()
    text = f"`python -m benchmarks.calibrate_cases`\n\n{table(rows)}"
    (options.out / "calibrate-cases.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
