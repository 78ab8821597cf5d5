"""The within-step elasticity of networks: python reproduction/benchmarks/within_real.py [--help].

Short runs of an LSTM and a small GPT on Penn Treebank (2,000 words) and of ResNet20 on CIFAR-10, by SGD in
float32, every fourth step measured at the fractions that the probe would choose. One line a run in the rows
file; a run that is there is not repeated. `benchmarks/laws.py` reads the same file.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import curvestep
from curvestep.fit.within import Within, within_steps
from curvestep.smoothness.schedule import FOLLOWED_ROWS, short_fractions
from curvestep.smoothness.snapshot import detach_state
from curvestep.tensors.vectors import difference, global_norm
from curvestep_reproduction.data.corpus import Corpus, batchify, load_ptb
from curvestep_reproduction.data.images import augment, load_cifar10, normalise
from curvestep_reproduction.models import LSTMModel, ResNet20

ROWS = Path(__file__).parents[1] / "docs/results/within.jsonl"
STEPS, EVERY = {"LSTM": 200, "GPT": 200, "ResNet20": 160}, 4
TOKENS = 350_000  # of the training text: about its first 16,000 lines
WORDS = 2_000  # the most frequent; all others are <unk>
# Of each model: learning rate and threshold.
SETTINGS = {
    "LSTM": ((3.0, np.inf), (3.0, 0.25), (10.0, 0.25), (20.0, 0.2)),
    "GPT": ((0.5, np.inf), (0.5, 0.25), (2.0, 0.25)),
    "ResNet20": ((0.1, np.inf), (0.1, 0.5), (0.5, 0.5)),
}
Closure = Callable[[], Tensor]


class Transformer(nn.Module):
    """A causal language model: two layers of width 64 with GELU, normalised before each part."""

    def __init__(self, vocab_size: int, *, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocab_size, 64), nn.Embedding(length, 64)
        for embedding in (self.words, self.places):
            nn.init.normal_(embedding.weight, std=0.02)
        layer = nn.TransformerEncoderLayer(
            64, 4, 256, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(64), enable_nested_tensor=False)
        self.mask = nn.Transformer.generate_square_subsequent_mask(length)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next word at every place."""
        hidden = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.layers(hidden, mask=self.mask, is_causal=True) @ self.words.weight.t()


def penn_treebank() -> Corpus:
    """The text, cut to its most frequent words. Ids go by frequency, so the rest are the largest."""
    corpus = load_ptb(progress=False)
    unknown = corpus.vocabulary.index("<unk>")
    train = torch.where(corpus.train < WORDS, corpus.train, unknown)
    return replace(corpus, train=train, vocabulary=corpus.vocabulary[:WORDS])


def lstm(corpus: Corpus, seed: int) -> tuple[nn.Module, Iterator[Closure]]:
    """Two layers, tied, 20 streams of 20 words; the state is carried from one batch to the next."""
    torch.manual_seed(seed)
    model = LSTMModel(len(corpus.vocabulary), embedding=64, hidden=100, layers=2)
    start = int(torch.randint(20_000, ()))
    text = batchify(corpus.train[start : start + TOKENS], 20)

    def closures() -> Iterator[Closure]:
        state = None
        for i in range(0, len(text) - 21, 20):
            x, y = text[i : i + 20], text[i + 1 : i + 21]

            def closure(state=state, x=x, y=y) -> Tensor:
                return F.cross_entropy(model(x, state)[0].flatten(0, 1), y.flatten())

            yield closure
            with torch.no_grad():
                state = detach_state(model(x, state)[1])

    return model, closures()


def transformer(corpus: Corpus, seed: int) -> tuple[nn.Module, Iterator[Closure]]:
    """16 windows of 32 words, drawn anew for each batch."""
    torch.manual_seed(seed)
    model = Transformer(len(corpus.vocabulary), length=32)
    text = corpus.train[:TOKENS]

    def closures() -> Iterator[Closure]:
        draws = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(len(text) - 33, (16,), generator=draws)
            windows = text[starts[:, None] + torch.arange(33)]
            yield lambda w=windows: F.cross_entropy(model(w[:, :-1]).flatten(0, 1), w[:, 1:].flatten())

    return model, closures()


def resnet20(seed: int) -> tuple[nn.Module, Iterator[Closure]]:
    """16 images a batch, shifted and flipped; batch norm sees the same batch at every fraction."""
    torch.manual_seed(seed)
    model, images = ResNet20(), load_cifar10(progress=False)

    def closures() -> Iterator[Closure]:
        draws = torch.Generator().manual_seed(seed)
        while True:
            chosen = torch.randint(len(images.train_x), (16,), generator=draws)
            x = normalise(images, augment(images.train_x[chosen], draws))
            yield lambda x=x, y=images.train_y[chosen]: F.cross_entropy(model(x), y)

    return model, closures()


def measured(
    model: nn.Module, closure: Closure, start: list[Tensor], loss: float, short: tuple[float, float]
) -> dict[str, Any]:
    """One row: secants and gradient norms along the step that ``model`` has just taken from ``start``."""
    fractions = (*short, 1.0)
    with curvestep.Replay(model, closure) as replay:
        d = [p.detach() - x for p, x in zip(replay.parameters, start, strict=True)]
        first = replay.gradient_at(d, 0.0, origin=start).gradients
        length, norm = float(global_norm(d)), float(global_norm(first))
        secants, norms = [], []
        for fraction in fractions:
            there = replay.gradient_at(d, fraction, origin=start).gradients
            norms.append(float(global_norm(there)))
            secants.append(float(global_norm(difference(there, first))) / (fraction * length))
    return {
        "loss": loss,
        "grad_norm": norm,
        "step_norm": length,
        "kappa": secants[-1] * length / norm,
        "secants": secants,
        "grad_norms": norms,
        "fractions": list(fractions),
    }


def train(name: str, lr: float, max_norm: float, seed: int) -> list[dict[str, Any]]:
    """Rows of one run."""
    make = {"LSTM": lstm, "GPT": transformer}.get(name)
    model, closures = make(penn_treebank(), seed) if make else resnet20(seed)
    optimizer = curvestep.ClippedSGD(model.parameters(), lr=lr, max_norm=max_norm)
    rows: list[dict[str, Any]] = []
    rates: list[float] = []  # by how much a whole step would change the gradient, as at its beginning
    for step in range(STEPS[name]):
        closure = next(closures)
        loss = closure()
        loss.backward()
        start = [p.detach().clone() for p in model.parameters()] if step % EVERY == 0 else None
        optimizer.step()
        optimizer.zero_grad()
        if start is not None:
            short = short_fractions(rates[-FOLLOWED_ROWS:])
            row = measured(model, closure, start, loss.item(), short)
            rates.append(row["secants"][0] * row["step_norm"] / row["grad_norm"])
            rows.append({"step": step, **row})
    return rows


def rounded(value: Any) -> Any:
    """The same with six digits, as much as float32 gives."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, list) else float(f"{value:.6g}")


def within(run: dict) -> Within:
    columns = {name: np.array([row[name] for row in run["rows"]]) for name in run["rows"][0]}
    return within_steps(
        secants=columns["secants"],
        grad_norm=columns["grad_norm"],
        grad_norms=columns["grad_norms"],
        fractions=columns["fractions"],
        kappa=columns["kappa"],
        eps=torch.finfo(torch.float32).eps,
    )


def report(runs: list[dict]) -> None:
    """Markdown: every setting over its seeds."""
    print("| model | lr | max_norm | seeds | last loss | κ | answers | elasticity | shuffled zero |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, settings in SETTINGS.items():
        for lr, cap in settings:
            own = [run for run in runs if (run["model"], run["lr"], run["max_norm"]) == (name, lr, str(cap))]
            fits = [within(run) for run in own]
            if not fits:
                continue
            loss = np.mean([row["loss"] for run in own for row in run["rows"][-10:]])
            answers = Counter(fit.doubt.kind if fit.doubt else fit.answer for fit in fits)
            said = ", ".join(f"{num} {answer}" for answer, num in answers.items())
            columns = [
                ", ".join(f"{getattr(fit, key):.2f}" for fit in fits) for key in ("elasticity", "zero")
            ]
            kappa = np.median([fit.kappa for fit in fits])
            threshold = str(cap).replace("inf", "none")
            print(
                f"| {name} | {lr:g} | {threshold} | {len(fits)} | {loss:.2f} | {kappa:.2f} | {said} "
                f"| {' | '.join(columns)} |"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--rows", type=Path, default=ROWS)
    asked = parser.parse_args()
    runs = [json.loads(line) for line in asked.rows.read_text().splitlines()] if asked.rows.exists() else []
    done = {(run["model"], run["lr"], run["max_norm"], run["seed"]) for run in runs}
    for seed in range(asked.seeds):
        for name in asked.models:
            for lr, cap in SETTINGS[name]:
                if (name, lr, str(cap), seed) in done:
                    continue
                run = {"model": name, "lr": lr, "max_norm": str(cap), "seed": seed}
                run["rows"] = [rounded(row) for row in train(name, lr, cap, seed)]
                with asked.rows.open("a") as file:
                    file.write(json.dumps(run) + "\n")
                print(name, lr, cap, seed, within(run), flush=True)
                runs.append(run)
    report(runs)
