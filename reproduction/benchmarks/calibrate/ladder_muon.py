"""Judged tasks of the ladder that Muon trains, with AdamW for all that is no matrix inside of ``blocks``."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from reproduction.benchmarks.calibrate.data import (
    Batch,
    Draw,
    Task,
    classify,
    digits,
    label_entropy,
    next_token,
    small_cifar,
)
from reproduction.benchmarks.calibrate.judged import endless
from reproduction.benchmarks.calibrate.scheduled import (
    Recipe,
    images_not_trained_on,
    ptb_characters,
    ptb_words,
)
from reproduction.benchmarks.calibrate.scripts import pieces
from torch import Tensor, nn


class Turned(nn.Module):
    """A layer as fast GPTs have it: places by rotation, norms of queries and keys, squared rectifiers."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.heads, self.causal = heads, causal
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Shaped as it came, (batch, time, width)."""
        batch, time, width = x.shape
        size = width // self.heads
        parts = self.qkv(F.rms_norm(x, (width,))).view(batch, time, 3, self.heads, size)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        q, k = (_turned(F.rms_norm(part, (size,))) for part in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.relu(self.up(F.rms_norm(x, (width,)))).square())


def _turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    speeds = 100.0 ** (-torch.arange(half) / half)
    angles = torch.arange(x.shape[-2])[:, None] * speeds
    one, two = x.chunk(2, -1)
    return torch.cat([one * angles.cos() - two * angles.sin(), one * angles.sin() + two * angles.cos()], -1)


class TurnedText(nn.Module):
    """Embedding, layers, a head that starts at zero."""

    def __init__(self, vocabulary: int, width: int, layers: int, *, causal: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*[Turned(width, 4, causal=causal) for _ in range(layers)])
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of every place."""
        return self.head(self.norm(self.blocks(self.embedding(x))))


# Letters that were covered

COVERED = 0.2  # share of the letters
NOTHING = -100  # no label


def covered(split: str, batch: int, length: int) -> Draw:
    """Text in which a fifth of the letters is one that is no letter, and these letters."""

    def draw(generator: torch.Generator) -> Iterator[Batch]:
        letters, cover = ptb_characters(split)
        for x, _ in pieces(lambda: letters, batch, length)(generator):
            is_covered = torch.rand(x.shape, generator=generator) < COVERED
            yield x.masked_fill(is_covered, cover), x.masked_fill(~is_covered, NOTHING)

    return draw


def uncovered(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of the letters that were covered."""
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=NOTHING)


def entropy_of_covered(judges: list[Batch]) -> float:
    """The loss of the same scores for every covered letter."""
    labels = torch.cat([y.flatten() for _, y in judges])
    return label_entropy(labels[labels != NOTHING])


# Patches that were covered


class Patched(nn.Module):
    """A masked autoencoder: all patches, half of them blank, to the pixels of each."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.inner = nn.Linear(48, width)
        self.blank = nn.Parameter(0.02 * torch.randn(width))
        self.places = nn.Parameter(0.1 * torch.randn(16, width))
        layer = [
            nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        ]
        self.blocks = nn.Sequential(*layer)
        self.out = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 48))

    def forward(self, x: Tensor) -> Tensor:
        """Pixels of all patches; the last number of each patch that came says whether it is blank."""
        is_blank = x[..., 48:]
        h = torch.where(is_blank > 0, self.blank, self.inner(x[..., :48]))
        return self.out(self.blocks(h + self.places))


def _covered_patches(x: Tensor, generator: torch.Generator) -> Batch:
    patches = F.unfold(x, 4, stride=4).transpose(1, 2)
    order = torch.rand(len(x), 16, generator=generator).argsort(1)
    is_blank = (order < 8).float()[..., None]
    return torch.cat([patches * (1 - is_blank), is_blank], 2), patches


def covered_patches(generator: torch.Generator) -> Batch:
    """Patches of pictures, half of them blank, and what they were."""
    x, _ = small_cifar()
    return _covered_patches(x[torch.randint(len(x), (24,), generator=generator)], generator)


def other_covered_patches(generator: torch.Generator) -> Batch:
    """The same of pictures that are not trained on."""
    x, _ = images_not_trained_on()
    return _covered_patches(x[torch.randint(len(x), (96,), generator=generator)], generator)


def filled(model: nn.Module, batch: Batch) -> Tensor:
    """Squared error of the patches that were blank."""
    is_blank = batch[0][..., 48:]
    error = (model(batch[0]) - batch[1]).square() * is_blank
    return error.sum() / (48 * is_blank.sum())


def variance_of_blank(judges: list[Batch]) -> float:
    """The loss of one grey for every blank patch."""
    return torch.cat([y[x[..., 48] > 0] for x, y in judges]).var().item()


# Digits somewhere in clutter


class Lifted(nn.Module):
    """A residual perceptron with a gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Shaped as it came."""
        return x + self.down(F.glu(self.up(self.norm(x))))


class Perceptron(nn.Module):
    """Pixels, residual layers, classes."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.inner = nn.Linear(144, width)
        self.blocks = nn.Sequential(*[Lifted(width) for _ in range(layers)])
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the digits."""
        return self.head(self.blocks(self.inner(x)))


def cluttered_digits(generator: torch.Generator) -> Batch:
    """Digits anywhere on 12 x 12 pixels of noise."""
    x, y = digits()
    chosen = torch.randint(len(x), (48,), generator=generator)
    canvas = 0.5 * torch.randn(48, 12, 12, generator=generator)
    corners = torch.randint(5, (48, 2), generator=generator).tolist()
    for picture, digit, (top, left) in zip(canvas, x[chosen].view(-1, 8, 8), corners, strict=True):
        picture[top : top + 8, left : left + 8] += digit
    return canvas.flatten(1), y[chosen]


# Clusters


class Pooled(nn.Module):
    """Set Transformer: a set's members attend to each other, four seeds to them."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.inner = nn.Linear(2, width)
        layer = [
            nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        ]
        self.blocks = nn.Sequential(*layer)
        self.seeds = nn.Parameter(torch.randn(4, width))
        self.pool = nn.MultiheadAttention(width, 4, batch_first=True)
        self.out = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Log weight, mean and log deviations of four clusters."""
        members = self.blocks(self.inner(x))
        seeds = self.seeds.expand(len(x), -1, -1)
        return self.out(seeds + self.pool(seeds, members, members, need_weights=False)[0])


def clusters(generator: torch.Generator) -> Batch:
    """Forty points of four clusters, twice."""
    middles = 2.5 * torch.randn(24, 4, 2, generator=generator)
    which = torch.randint(4, (24, 40), generator=generator)
    points = middles.gather(1, which[..., None].expand(-1, -1, 2))
    points = points + 0.4 * torch.randn(points.shape, generator=generator)
    return points, points


def unlikeliness(model: nn.Module, batch: Batch) -> Tensor:
    """Negative log density of the points under the clusters that were found."""
    weight, mean, scale = model(batch[0]).split((1, 2, 2), 2)
    deviation = F.softplus(scale) + 0.1
    z = (batch[1][:, :, None] - mean[:, None]) / deviation[:, None]
    each = -0.5 * z.square().sum(3) - deviation.log().sum(2)[:, None] - math.log(2 * math.pi)
    return -torch.logsumexp(each + weight.squeeze(2).log_softmax(1)[:, None], 2).mean()


def one_cluster(judges: list[Batch]) -> float:
    """The loss of one normal distribution for all sets."""
    points = torch.cat([y for _, y in judges]).flatten(0, 1)
    return (1 + math.log(2 * math.pi)) + points.std(0).log().sum().item()


def _muon(task: Task, valid: Draw | None = None, *, decay: float = 0.05) -> Recipe:
    return Recipe(task, valid, optimizers=("muon",), weight_decay=decay, betas=(0.9, 0.95))


WORDS, VALID_WORDS = (pieces(lambda s=split: ptb_words(s, 800), 8, 24) for split in ("train", "valid"))

MUON = (
    _muon(Task("words, rotary places, squared rectifiers", 800, lambda: TurnedText(800, 48, 2, causal=True),
               WORDS, next_token), VALID_WORDS),
    _muon(Task("covered letters", 500, lambda: TurnedText(ptb_characters("train")[1] + 1, 48, 3,
               causal=False), covered("train", 12, 40), uncovered), covered("valid", 48, 40)),
    _muon(Task("covered patches", 500, lambda: Patched(48, 3), endless(covered_patches), filled),
          endless(other_covered_patches)),
    _muon(Task("digits in clutter", 800, lambda: Perceptron(64, 3), endless(cluttered_digits), classify)),
    _muon(Task("clusters of a set", 500, lambda: Pooled(40, 2), endless(clusters), unlikeliness)),
)  # fmt: skip

TRIVIAL = {uncovered: entropy_of_covered, filled: variance_of_blank, unlikeliness: one_cluster}
