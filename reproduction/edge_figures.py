"""Picture and numbers of docs/measure.md on AdamW: python reproduction/edge_figures.py [folder].

Trains three small networks at two peak learning rates each, 3.3 apart, under warm-up and cosine decay, and
measures smoothness in the optimizer's metric. Without a folder they go where the page finds them,
docs/images/edge.png and docs/results/edge.json. About four minutes on one core, less with `--steps 0.3`, a
share of the steps; runs that are in the file already are not trained again.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from curvestep import ClippedAdamW, ClippedSGD, SmoothnessProbe, Trace
from curvestep.report.drawing import COLOURS, panels, styled
from curvestep_reproduction.data.corpus import load_ptb
from curvestep_reproduction.data.images import load_digits, normalise
from curvestep_reproduction.models import LSTMModel

WARM_UP = 0.1
Step = Callable[[], Tensor]


class Attention(nn.Module):
    """Causal attention written out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.split, self.join = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """One output for each position, from those before it."""
        batch, length, width = x.shape
        q, k, v = self.split(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(width / self.heads)
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(later, -math.inf).softmax(-1) @ v
        return self.join(mixed.transpose(1, 2).reshape(batch, length, width))


class Layer(nn.Module):
    """A transformer's layer, normalised before each part."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape as ``x``."""
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class GPT(nn.Module):
    """A small transformer over tokens, with tied embeddings."""

    def __init__(self, vocabulary: int, *, length: int = 64, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(Layer(width, 4) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next token, shaped (batch, length, vocabulary)."""
        x = self.tokens(x) + self.places.weight[: x.shape[1]]
        return self.norm(self.layers(x)) @ self.tokens.weight.T


def windows(tokens: Tensor, size: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of random pieces of a text, and the same one token later."""
    while True:
        starts = torch.randint(len(tokens) - length - 1, (size,))
        pieces = torch.stack([tokens[s : s + length + 1] for s in starts.tolist()])
        yield pieces[:, :-1], pieces[:, 1:]


def characters_gpt() -> tuple[nn.Module, Iterator[Step]]:
    """A GPT of two layers over the characters of Penn Treebank."""
    corpus = load_ptb(offline=True)
    text = " ".join(corpus.vocabulary[i] for i in corpus.train[:200_000].tolist())
    letters = {letter: i for i, letter in enumerate(sorted(set(text)))}
    tokens = torch.tensor([letters[letter] for letter in text])
    model = GPT(len(letters))

    def steps() -> Iterator[Step]:
        for x, y in windows(tokens, 8, 64):
            yield lambda x=x, y=y: F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    return model, steps()


def words_lstm() -> tuple[nn.Module, Iterator[Step]]:
    """An LSTM over the 2,000 commonest words of Penn Treebank."""
    corpus = load_ptb(offline=True, max_vocabulary=2_000)
    model = LSTMModel(2_000, embedding=96, hidden=96, layers=1)

    def steps() -> Iterator[Step]:
        for x, y in windows(corpus.train, 8, 32):
            yield lambda x=x, y=y: F.cross_entropy(model(x.T)[0].flatten(0, 1), y.T.flatten())

    return model, steps()


def digits_cnn() -> tuple[nn.Module, Iterator[Step]]:
    """A small convolutional network on handwritten digits, with momentum."""
    images = load_digits()
    inputs = normalise(images, images.train_x)[:, :1, ::4, ::4]  # eight by eight pixels, as they were taken
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip

    def steps() -> Iterator[Step]:
        while True:
            batch = torch.randint(len(inputs), (32,))
            x, y = inputs[batch], images.train_y[batch]
            yield lambda x=x, y=y: F.cross_entropy(model(x), y)

    return model, steps()


def adamw(parameters: Any, lr: float) -> Optimizer:
    """AdamW as small language models are trained."""
    return ClippedAdamW(parameters, lr=lr, max_norm=1.0, betas=(0.9, 0.95), weight_decay=0.1)


def momentum(parameters: Any, lr: float) -> Optimizer:
    """Momentum as image networks are trained."""
    return ClippedSGD(parameters, lr=lr, max_norm=math.inf, momentum=0.9, weight_decay=5e-4)


TASKS: dict[str, Any] = {
    "characters, GPT, AdamW": (characters_gpt, adamw, (3e-3, 1e-2), 1000),
    "words, LSTM, AdamW": (words_lstm, adamw, (3e-3, 1e-2), 600),
    "digits, CNN, momentum": (digits_cnn, momentum, (0.03, 0.1), 600),
}


def measured(task: str, peak: float, *, share: float) -> Trace:
    """One run under warm-up and cosine decay, measured every tenth step."""
    make, make_optimizer, _, num_steps = TASKS[task]
    torch.manual_seed(0)
    model, batches = make()
    num_steps = round(num_steps * share)
    optimizer = make_optimizer(model.parameters(), peak)
    warm_up = max(1, round(WARM_UP * num_steps))

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (num_steps - warm_up)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    probe = SmoothnessProbe(model, every=10).watch(optimizer)
    for _ in range(num_steps):
        optimizer.zero_grad()
        probe.record(next(batches)).backward()
        optimizer.step()
        schedule.step()
    return probe.trace


def numbers(trace: Trace) -> dict[str, Any]:
    """The columns that the picture and the page show."""
    lr = trace.column("lr")
    columns = {
        "step": trace.column("step"),
        "lr": lr,
        "lr·L_P": lr * trace.column("optimizer_smoothness"),
        "loss": trace.column("loss"),
    }
    found = {
        name: [None if v != v else float(f"{v:.4g}") for v in values] for name, values in columns.items()
    }
    return {**found, "limit": trace[-1]["optimizer_limit"]}


def picture(found: dict[str, dict[str, Any]], path: Path) -> None:
    """One panel for each task."""
    with styled():
        figure, axes = panels(1, len(found), width=3.6, height=3.2)
        for panel, (task, runs) in zip(axes, found.items(), strict=True):
            for (peak, run), colour in zip(runs.items(), COLOURS, strict=False):
                panel.plot(run["step"], run["lr·L_P"], color=colour, label=f"peak lr {float(peak):g}")
            limit = next(iter(runs.values()))["limit"]
            panel.axhline(limit, color="black", linestyle=":", linewidth=1)
            panel.annotate(
                f"edge {limit:.3g}",
                (0.98, limit),
                xycoords=("axes fraction", "data"),
                ha="right",
                va="bottom",
            )
            panel.set_yscale("log")
            panel.set_ylim(bottom=0.02)
            panel.set_title(f"{task}\nlr · $L_P$ along the step", fontsize=9)
            panel.set_xlabel("step")
            panel.legend(fontsize=8, loc="best")
        figure.savefig(path, dpi=150)


def main() -> None:
    """Train, write the numbers, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--steps", type=float, default=1.0, help="share of the steps to train")
    options = parser.parse_args()
    docs = Path(__file__).parents[1] / "docs"
    results, images = (docs / "results", docs / "images") if options.folder is None else (options.folder,) * 2
    results.mkdir(parents=True, exist_ok=True)
    file = results / "edge.json"
    kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    runs: dict[str, dict[str, Any]] = kept["runs"] if kept.get("share") == options.steps else {}
    for task, (_, _, peaks, _) in reversed(TASKS.items()):  # the longest last
        for peak in peaks:
            if f"{peak:g}" not in runs.get(task, {}):
                runs.setdefault(task, {})[f"{peak:g}"] = numbers(measured(task, peak, share=options.steps))
                text = json.dumps({"share": options.steps, "runs": runs}, ensure_ascii=False)
                file.write_text(text + "\n", encoding="utf-8")
                print(task, peak, runs[task][f"{peak:g}"]["loss"][-1], flush=True)
    picture({task: runs[task] for task in TASKS}, images / "edge.png")


if __name__ == "__main__":
    main()
