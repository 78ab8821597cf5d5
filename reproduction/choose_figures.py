"""The two worked examples of the documentation: python reproduction/choose_figures.py [--seeds 3].

A small GPT with AdamW on Penn Treebank (docs/adamw.md), and a CNN with SGD on CIFAR-10 (docs/cnn.md).
Both are calibrated, then trained at the rates and thresholds named below. Numbers and printed results go to
docs/results/choose.json; ``python docs/tables.py`` copies them into the pages, and this script draws
docs/images/adamw.svg and cnn.svg. About ten minutes on one core.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import curvestep as cs
from curvestep.report.drawing import panels, save, styled
from curvestep_reproduction.data.corpus import load_ptb
from curvestep_reproduction.data.images import load_cifar10, normalise

DOCS = Path(__file__).parents[1] / "docs"
CONTEXT, WORDS = 32, 2000
Batch = tuple[Tensor, Tensor]


class GPT(nn.Module):
    """Two causal transformer layers over 2,000 words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 64), nn.Embedding(CONTEXT, 64)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, WORDS))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next word at each place."""
        mask = torch.full((x.shape[1], x.shape[1]), -math.inf).triu(1)
        hidden = self.words(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask)
        return self.head(hidden).flatten(0, 1)


def cnn() -> nn.Sequential:
    """Four convolutions with BatchNorm."""
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 64), (64, 64)):
        layers += [
            nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 10))


@dataclass(frozen=True)
class Task:
    """What is trained, on what, and with which settings besides calibrate's."""

    make: Callable[[], nn.Module]
    train: Batch
    held_out: Batch
    batch_size: int
    num_steps: int
    optimizer: Callable[..., torch.optim.Optimizer]
    factors: tuple[float, ...]  # of calibrate's lr, each with the clip of the task
    default: float  # a usual lr


def words_of(tokens: Tensor) -> Batch:
    """Every window of a text as one example, with the words that follow."""
    windows = tokens[: (len(tokens) - 1) // CONTEXT * CONTEXT + 1]
    return windows[:-1].view(-1, CONTEXT), windows[1:].view(-1, CONTEXT)


def tasks() -> dict[str, Task]:
    """The two examples."""
    corpus = load_ptb(max_vocabulary=WORDS)
    images = load_cifar10()
    train = normalise(images, images.train_x[:10_000]), images.train_y[:10_000]
    held_out = normalise(images, images.test_x[:2000]), images.test_y[:2000]
    return {
        "adamw": Task(
            GPT, words_of(corpus.train), words_of(corpus.valid[:20_000]), 16, 400,
            torch.optim.AdamW, (1 / 3, 1, 3), 1e-3,
        ),
        "cnn": Task(
            cnn, train, held_out, 64, 600, lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, nesterov=True),
            (1 / 3, 1, 3), 0.1,
        ),
    }  # fmt: skip


def loss_on(model: nn.Module, batch: Batch) -> Tensor:
    """The mean cross-entropy of a batch."""
    return F.cross_entropy(model(batch[0]), batch[1].flatten())


def batches_of(task: Task, seed: int) -> Iterator[Batch]:
    """Random batches without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(task.train[0]), generator=generator)
        for rows in order.split(task.batch_size)[: len(order) // task.batch_size]:
            yield task.train[0][rows], task.train[1][rows]


def schedule_for(optimizer: torch.optim.Optimizer, num_steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """A tenth of the run for warm-up, then a linear decay."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda k: min(1.0, 10 * (k + 1) / num_steps) * (1 - k / num_steps)
    )


def train(
    task: Task, lr: float, max_norm: float | None, seed: int
) -> tuple[cs.SmoothnessProbe, dict[str, Any]]:
    """One run: its probe, and its numbers."""
    torch.manual_seed(seed)
    model = task.make()
    optimizer = task.optimizer(model.parameters(), lr=lr)
    if max_norm is not None:
        cs.clip(optimizer, max_norm)
    schedule = schedule_for(optimizer, task.num_steps)
    probe = cs.SmoothnessProbe(model).watch(optimizer)
    for _, batch in zip(range(task.num_steps), batches_of(task, seed), strict=False):
        probe.record(lambda batch=batch: loss_on(model, batch)).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        parts = list(zip(task.held_out[0].split(200), task.held_out[1].split(200), strict=True))
        held_out = sum(loss_on(model, part).item() * len(part[0]) for part in parts) / len(task.held_out[0])
    stats = optimizer.clip_stats() if max_norm is not None else {"clipped_fraction": 0.0}
    clipped = float(stats["clipped_fraction"])
    return probe, {"lr": lr, "max_norm": max_norm, "seed": seed, "held_out": held_out, "clipped": clipped}


def rounded(value: float) -> float:
    """Three digits, as a reader would type them."""
    return float(f"{value:.3g}")


def example(name: str, task: Task, seeds: int) -> dict[str, Any]:
    """Calibrate, train every setting, ask for advice."""
    torch.manual_seed(0)
    model = task.make()
    optimizer = task.optimizer(model.parameters(), lr=task.default)
    if name == "adamw":
        cs.clip(optimizer, 1.0)
    batches = [batch for _, batch in zip(range(64), batches_of(task, 99), strict=False)]
    cal = cs.calibrate(
        model, lambda batch: loss_on(model, batch), batches,
        optimizer=optimizer, schedule="warmup-decay", num_steps=task.num_steps,
    )  # fmt: skip
    print(f"== {name}\n{cal}", flush=True)
    max_norm = None if math.isinf(cal.max_norm) else rounded(cal.max_norm)
    other = 1.0 if max_norm is None else None  # the pair that shows whether clipping helps
    settings = [(rounded(factor * cal.lr), max_norm) for factor in task.factors]
    settings += [(task.default, max_norm), (rounded(cal.lr), other)]
    runs, probes = [], []
    for lr, threshold in settings:
        for seed in range(seeds):
            probe, numbers = train(task, lr, threshold, seed)
            print(numbers, flush=True)
            runs.append(numbers)
            probes.append(probe)
    ours = next(probe for probe, run in zip(probes, runs, strict=True) if run["lr"] == rounded(cal.lr))
    said = {"calibrate": str(cal), "one": str(cs.advise(ours)), "all": str(cs.advise(*probes))}
    print(said["all"], flush=True)
    return {"lr": rounded(cal.lr), "max_norm": max_norm, "steps": task.num_steps, "runs": runs, "said": said}


def draw(name: str, found: dict[str, Any], default: float) -> None:
    """Held-out loss against lr, at the threshold of calibrate and at the other of the pair."""
    losses: dict[tuple[float, float | None], list[float]] = {}
    for run in found["runs"]:
        losses.setdefault((run["lr"], run["max_norm"]), []).append(run["held_out"])
    means = {setting: sum(values) / len(values) for setting, values in losses.items()}
    ours = found["max_norm"]
    with styled():
        figure, (panel,) = panels(1, 1, width=6.4, height=3.4)
        for is_ours, colour, face in ((True, "#0072B2", "#0072B2"), (False, "#D55E00", "white")):
            settings = sorted(setting for setting in means if (setting[1] == ours) == is_ours)
            look = {"color": colour, "markerfacecolor": face}
            for setting in settings:
                panel.plot([setting[0]] * len(losses[setting]), losses[setting], "o", alpha=0.5, **look)
            threshold = settings[0][1]
            label = "no clipping" if threshold is None else f"max_norm {threshold:g}"
            line = [means[setting] for setting in settings]
            panel.plot([lr for lr, _ in settings], line, "-" if is_ours else "s", label=label, **look)
        panel.set_xscale("log")
        rates = sorted({lr for lr, _ in means})
        panel.set_xticks(rates, [f"{lr:g}" for lr in rates], fontsize=8, rotation=30)
        panel.minorticks_off()
        panel.axvline(found["lr"], color="#777777", linestyle=":", zorder=0)
        place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "ha": "center", "va": "bottom"}
        panel.annotate("calibrate", (found["lr"], 1), fontsize=9, **place)
        panel.annotate(f"usual {default:g}", (default, 1), fontsize=9, **place)
        panel.set_xlabel("peak lr (log scale)")
        panel.set_ylabel("held-out loss (lower is better)")
        at_ours, at_default = (f"{means[lr, ours]:.2f}" for lr in (found["lr"], default))
        title = f"{at_ours} at the lr of calibrate, {at_default} at {default:g}"
        panel.set_title(title, pad=20, fontweight="bold")
        panel.legend()
        save(figure, DOCS / "images" / name)
    (DOCS / "images" / f"{name}.png").unlink()  # pages show the SVG


def main() -> None:
    """Train, keep the numbers, draw."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="names of examples; the others are kept")
    parser.add_argument("--draw", action="store_true", help="only draw what is kept")
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = DOCS / "results" / "choose.json"
    found = json.loads(path.read_text()) if options.draw or options.only else {}
    for name, task in tasks().items():
        if not options.draw and name in (options.only or name):
            found[name] = example(name, task, options.seeds)
            path.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
        draw(name, found[name], task.default)


if __name__ == "__main__":
    main()
