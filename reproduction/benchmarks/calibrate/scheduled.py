"""Development recipes of transformers and residual networks, small enough for a minute of one core.

A recipe is a task, batches that its training never sees, and the settings that the optimizers share.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from reproduction.benchmarks.calibrate.data import (
    Batch,
    Draw,
    Task,
    classify,
    next_token,
    samples,
    small_cifar,
    text,
)
from reproduction.benchmarks.calibrate.tiny import TASKS as TINY
from torch import Tensor, nn

from curvestep_reproduction.data.corpus import load_ptb, load_topics
from curvestep_reproduction.data.images import load_cifar10, normalise

STEPS = 1000


@dataclass(frozen=True)
class Recipe:
    """A task with what its training shares between methods.

    Args:
        task: Model, batches, loss and number of steps.
        valid: Batches of data that training never sees; default: fresh ones of the task's own.
        optimizers: Which ones it is trained with: ``"adamw"``, ``"momentum"``.
        weight_decay: Of matrices; vectors have none.
        betas: Of AdamW.
        sgd_max_norm: Threshold of SGD's grid; default: the median gradient norm at the start.
    """

    task: Task
    valid: Draw | None = None
    optimizers: tuple[str, ...] = ("adamw",)
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.999)
    sgd_max_norm: float | None = None

    def groups(self, model: nn.Module, decay: float) -> list[dict[str, Any]]:
        """Matrices with decay, vectors without, as transformers are trained."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        return [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": decay},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]

    def judging(self, count: int) -> list[Batch]:
        """Batches to judge by, the same for every seed and method."""
        draw = self.valid or self.task.batches
        return list(islice(draw(torch.Generator().manual_seed(7)), count))


# Data


@cache
def ptb_characters(split: str) -> tuple[Tensor, int]:
    """Penn Treebank's characters."""
    corpus = load_ptb(progress=False)
    words = getattr(corpus, split)[:200_000].tolist()
    letters = " ".join(corpus.vocabulary[i] for i in words)
    return _as_numbers(letters)


@cache
def manual_characters(split: str) -> tuple[Tensor, int]:
    """The characters of Python's language reference, in the alphabet of Penn Treebank."""
    corpus = load_topics()
    words = getattr(corpus, split).tolist()
    return _as_numbers(" ".join(corpus.vocabulary[i] for i in words).lower())


def _as_numbers(letters: str) -> tuple[Tensor, int]:
    alphabet = " abcdefghijklmnopqrstuvwxyz0123456789<>.'$&-#/_()*,:=\"[]{}"
    places = {letter: i for i, letter in enumerate(alphabet)}
    return torch.tensor([places.get(letter, len(alphabet)) for letter in letters]), len(alphabet) + 1


def ptb_words(split: str, vocabulary: int) -> Tensor:
    """Penn Treebank's words; those beyond the ``vocabulary`` commonest become one."""
    return getattr(load_ptb(progress=False), split).clamp(max=vocabulary - 1)


def images_not_trained_on() -> Batch:
    """CIFAR-10's test images as the training ones are: normalised, 16 x 16."""
    images = load_cifar10(progress=False)
    return F.avg_pool2d(normalise(images, images.test_x).float(), 2), images.test_y


# Models


class Block(nn.Module):
    """Attention and a perceptron, layer norm first."""

    def __init__(self, width: int, *, heads: int, causal: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        """Shaped as it came, (batch, time, width)."""
        batch, time, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def start_as_gpt_(model: nn.Module, layers: int) -> None:
    """GPT-2's start: N(0, 0.02), the last matrix of each branch divided by the root of their number."""
    for name, p in model.named_parameters():
        if p.dim() > 1:
            last = "proj" in name or "down" in name
            nn.init.normal_(p, std=0.02 / (math.sqrt(2 * layers) if last else 1.0))
        elif "bias" in name:
            nn.init.zeros_(p)


class GPT(nn.Module):
    """Learned places, blocks, a head tied to the embedding."""

    def __init__(self, vocabulary: int, *, width: int, layers: int, heads: int = 4, length: int = 32) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads=heads, causal=True) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        start_as_gpt_(self, layers)

    def forward(self, x: Tensor) -> Tensor:
        """Scores shaped (batch, time, vocabulary)."""
        h = self.tokens(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.norm(h) @ self.tokens.weight.t()


class ViT(nn.Module):
    """Patches of 4 x 4 pixels, learned places, blocks, the mean of all patches."""

    def __init__(self, *, width: int, layers: int, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.places = nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.ModuleList([Block(width, heads=heads, causal=False) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)
        start_as_gpt_(self, layers)

    def forward(self, x: Tensor) -> Tensor:
        """Scores shaped (batch, 10)."""
        h = self.patches(x).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h).mean(1))


class Residual(nn.Module):
    """Two convolutions with BatchNorm beside a short cut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip
        self.short: nn.Module = nn.Identity()
        if stride > 1 or before != after:
            self.short = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        """Features after the block."""
        return F.relu(self.branch(x) + self.short(x))


def resnet(depth: int, width: int = 8) -> nn.Module:
    """ResNet of 8 or 20 layers with BatchNorm: one or three residual blocks in each of three stages."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    for before, after, stride in ((1, 1, 1), (1, 2, 2), (2, 4, 2)):
        layers.append(Residual(before * width, after * width, stride))
        layers += [Residual(after * width, after * width, 1) for _ in range((depth - 2) // 6 - 1)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))
    for p in model.parameters():
        if p.dim() == 4:
            nn.init.kaiming_normal_(p, mode="fan_out", nonlinearity="relu")
    return model


@cache
def pretrained(seed: int, steps: int = 600) -> nn.Module:
    """A character GPT after training on Penn Treebank: the start of a fine-tuning."""
    torch.manual_seed(seed)
    model = GPT(ptb_characters("train")[1], width=48, layers=3)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    batches = text(lambda: ptb_characters("train")[0], 8)(torch.Generator().manual_seed(seed))
    for batch in islice(batches, steps):
        opt.zero_grad()
        next_token(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        decay.step()
    return model


def _fine_tuned() -> nn.Module:
    return copy.deepcopy(pretrained(int(torch.randint(2**31, ()))))


def _text(
    name: str,
    tokens: Callable[[str], Tensor],
    model: Callable[[], nn.Module],
    batch: int,
    steps: int = STEPS,
    **options: Any,
) -> Recipe:
    task = Task(name, steps, model, text(lambda: tokens("train"), batch), next_token)
    return Recipe(task, text(lambda: tokens("valid"), 64), **options)


def _images(
    name: str, model: Callable[[], nn.Module], batch: int, steps: int = STEPS, **options: Any
) -> Recipe:
    task = Task(name, steps, model, samples(small_cifar, batch), classify)
    return Recipe(task, samples(images_not_trained_on, 250), **options)


def _words(split: str) -> Tensor:
    return ptb_words(split, 1500)


def _letters(split: str) -> Tensor:
    return ptb_characters(split)[0]


def _tiny(name: str, *optimizers: str) -> Recipe:
    return Recipe(TINY[name], optimizers=optimizers, weight_decay=0.0)


SMALL = (
    *(_tiny(name, "adamw", "momentum", "plain") for name in ("MLP, digits", "char LSTM", "CNN, BatchNorm",
                                                             "autoencoder", "deep MLP, poor start")),
    _tiny("char transformer", "adamw"),
    _tiny("word transformer", "adamw"),
    _text("char GPT, 2 layers", _letters, lambda: GPT(ptb_characters("train")[1], width=64, layers=2), 8,
          steps=500, betas=(0.9, 0.95)),
)  # fmt: skip

TRANSFORMERS = (
    _text("char GPT, 4 layers", _letters, lambda: GPT(ptb_characters("train")[1], width=48, layers=4), 8,
          betas=(0.9, 0.95)),
    _text("word GPT", _words, lambda: GPT(1500, width=48, layers=2), 8),
    _images("ViT", lambda: ViT(width=64, layers=2), 16, weight_decay=0.05),
    _images("ResNet8, BatchNorm", lambda: resnet(8), 16, weight_decay=5e-4, optimizers=("adamw", "momentum")),
    _images("ResNet20, BatchNorm", lambda: resnet(20), 16, weight_decay=5e-4, optimizers=("momentum",)),
    _text("fine-tuned GPT", lambda split: manual_characters(split)[0], _fine_tuned, 8),
)  # fmt: skip

# What the best peak depends on: one model of each kind, in batches of other sizes.
BATCHES = (
    *(_text(f"char GPT, 3 layers, batch {batch}", lambda split: manual_characters(split)[0],
            lambda: GPT(manual_characters("train")[1], width=64, layers=3), batch, steps=500,
            betas=(0.9, 0.95)) for batch in (4, 16, 64)),
    *(_images(f"ViT, 3 layers, batch {batch}", lambda: ViT(width=48, layers=3), batch, steps=500,
              weight_decay=0.05) for batch in (8, 32, 128)),
)  # fmt: skip
