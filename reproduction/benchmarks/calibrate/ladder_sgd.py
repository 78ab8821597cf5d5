"""Judged tasks of the ladder that SGD trains with momentum 0.9, four of them without momentum, too.

Six are of images with BatchNorm or GroupNorm, two of language. The grid does not clip.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from reproduction.benchmarks.calibrate.data import (
    Batch,
    Task,
    classify,
    digits,
    next_token,
    samples,
    small_cifar,
)
from reproduction.benchmarks.calibrate.judged import endless, fitted
from reproduction.benchmarks.calibrate.scheduled import (
    Recipe,
    images_not_trained_on,
    manual_characters,
    ptb_words,
)
from reproduction.benchmarks.calibrate.scripts import pieces
from torch import Tensor, nn

from curvestep_reproduction.data.images import augment, load_cifar10, normalise

Norm = Callable[[int], nn.Module]


def groups_of_four(channels: int) -> nn.Module:
    """GroupNorm with four groups."""
    return nn.GroupNorm(4, channels)


# Pictures


class Preactivated(nn.Module):
    """Norm, rectifier and convolution, twice, beside a short cut (He et al.'s second network)."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(before)
        self.one = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.two = nn.Sequential(
            nn.BatchNorm2d(after), nn.ReLU(), nn.Conv2d(after, after, 3, padding=1, bias=False)
        )
        self.short = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Features after the block."""
        h = F.relu(self.norm(x))
        return self.two(self.one(h)) + self.short(h)


def wide_residual(width: int) -> nn.Module:
    """Three wide blocks with the norm first, dropout before the head."""
    blocks = [Preactivated(12, width, 1), Preactivated(width, 2 * width, 2)]
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, 2, 1, bias=False), *blocks, nn.BatchNorm2d(2 * width), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(2 * width, 10),
    )  # fmt: skip


class Dense(nn.Module):
    """A convolution whose output is put beside its input (DenseNet)."""

    def __init__(self, before: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm2d(before), nn.ReLU(), nn.Conv2d(before, growth, 3, padding=1, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """More features than came."""
        return torch.cat([x, self.layers(x)], 1)


def dense(growth: int) -> nn.Module:
    """Two dense blocks of three convolutions with a transition between them."""
    one = 16 + 3 * growth
    two = one // 2 + 3 * growth
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1, bias=False), *[Dense(16 + i * growth, growth) for i in range(3)],
        nn.BatchNorm2d(one), nn.ReLU(), nn.Conv2d(one, one // 2, 1, bias=False), nn.AvgPool2d(2),
        *[Dense(one // 2 + i * growth, growth) for i in range(3)],
        nn.BatchNorm2d(two), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(two, 10),
    )  # fmt: skip


class Squeezed(nn.Module):
    """A residual convolution whose channels are weighed by what the picture has (squeeze and excitation)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), groups_of_four(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), groups_of_four(width),
        )  # fmt: skip
        self.weights = nn.Sequential(
            nn.Linear(width, width // 4), nn.ReLU(), nn.Linear(width // 4, width), nn.Sigmoid()
        )

    def forward(self, x: Tensor) -> Tensor:
        """Shaped as it came."""
        h = self.branch(x)
        return F.relu(x + self.weights(h.mean((2, 3)))[:, :, None, None] * h)


def squeezed(width: int) -> nn.Module:
    """Two such blocks, a strided convolution between them."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 2, 1), Squeezed(width), nn.Conv2d(width, 2 * width, 3, 2, 1),
        Squeezed(2 * width), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10),
    )  # fmt: skip


class Mixed(nn.Module):
    """ConvMixer's layer: a residual depthwise convolution, one of 1 x 1, BatchNorm after each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depth = nn.Conv2d(width, width, 5, padding=2, groups=width)
        self.point = nn.Conv2d(width, width, 1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)])

    def forward(self, x: Tensor) -> Tensor:
        """Shaped as it came."""
        x = x + self.norms[0](F.gelu(self.depth(x)))
        return self.norms[1](F.gelu(self.point(x)))


def mixed(width: int, layers: int) -> nn.Module:
    """Patches of 2 x 2 pixels, layers, the mean."""
    return nn.Sequential(
        nn.Conv2d(3, width, 2, 2), nn.GELU(), nn.BatchNorm2d(width), *[Mixed(width) for _ in range(layers)],
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10),
    )  # fmt: skip


def _convolution(before: int, after: int) -> list[nn.Module]:
    return [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]


def vgg(width: int) -> nn.Module:
    """Convolutions, pooled three times, and two dense layers, for pictures in full size."""
    return nn.Sequential(
        *_convolution(3, width), nn.MaxPool2d(2), *_convolution(width, 2 * width), nn.MaxPool2d(2),
        *_convolution(2 * width, 3 * width), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(48 * width, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


@cache
def _full_size(part: str) -> tuple[Tensor, Tensor]:
    images = load_cifar10(progress=False)
    return normalise(images, getattr(images, f"{part}_x")).float(), getattr(images, f"{part}_y")


def shifted_pictures(generator: torch.Generator) -> Batch:
    """Pictures in full size, shifted and mirrored."""
    x, y = _full_size("train")
    chosen = torch.randint(len(x), (32,), generator=generator)
    return augment(x[chosen], generator), y[chosen]


class Capsules(nn.Module):
    """Vectors of features vote for vectors of classes, three rounds of agreement (Sabour et al.)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, width, 3), groups_of_four(width), nn.ReLU(),
            nn.Conv2d(width, 24, 3, 2), groups_of_four(24),
        )  # fmt: skip
        self.votes = nn.Parameter(0.2 * torch.randn(16, 10, 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        """Lengths of the classes' vectors, from 0 to 1."""
        low = _squashed(self.features(x).flatten(2).unflatten(1, (4, 6)).transpose(2, 3).flatten(1, 2))
        votes = torch.einsum("bid,icde->bice", low, self.votes)
        agreement = torch.zeros(votes.shape[:3])
        high = _squashed((agreement.softmax(2)[..., None] * votes).sum(1))
        for _ in range(2):
            agreement = agreement + (votes * high[:, None]).sum(3)
            high = _squashed((agreement.softmax(2)[..., None] * votes).sum(1))
        return (high.square().sum(2) + 1e-9).sqrt()


def _squashed(x: Tensor) -> Tensor:
    square = x.square().sum(-1, keepdim=True)
    return square / (1 + square) * x / (square + 1e-9).sqrt()


def _margins(lengths: Tensor, labels: Tensor) -> Tensor:
    is_class = F.one_hot(labels, 10)
    present = is_class * F.relu(0.9 - lengths).square()
    absent = 0.5 * (1 - is_class) * F.relu(lengths - 0.1).square()
    return (present + absent).sum(1).mean()


def margins(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of capsules: the class's vector at least 0.9 long, the others at most 0.1."""
    return _margins(model(batch[0]), batch[1])


def best_constant_margins(judges: list[Batch]) -> float:
    """The loss of one length for all classes and digits, at its best."""
    labels = torch.cat([y for _, y in judges])
    lengths = torch.linspace(0.1, 0.9, 81)
    return min(_margins(length.expand(len(labels), 10), labels).item() for length in lengths)


def blurred_digits(generator: torch.Generator) -> Batch:
    """Digits under noise."""
    x, y = digits()
    chosen = torch.randint(len(x), (24,), generator=generator)
    return x[chosen] + 0.5 * torch.randn(24, 64, generator=generator), y[chosen]


# Language


class GatedConvolution(nn.Module):
    """A causal convolution with a gate beside a short cut (Dauphin et al.)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(width, 2 * width, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Shaped as it came, (batch, width, time)."""
        return x + F.glu(self.convolution(F.pad(x, (3, 0))), 1)


class ConvolutionalText(nn.Module):
    """Embedding, gated convolutions, a head."""

    def __init__(self, characters: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.layers = nn.Sequential(*[GatedConvolution(width) for _ in range(layers)])
        self.head = nn.Linear(width, characters)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the next character."""
        return self.head(self.layers(self.embedding(x).transpose(1, 2)).transpose(1, 2))


class SixBefore(nn.Module):
    """Bengio's model: the next word from the six before it, side by side, by one hidden layer."""

    def __init__(self, vocabulary: int, width: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.hidden = nn.Linear(6 * width, hidden)
        self.out = nn.Linear(hidden, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the next word at every place; before the start there are zeros."""
        before = F.pad(self.embedding(x), (0, 0, 5, 0)).unfold(1, 6, 1)
        return self.out(self.hidden(before.flatten(2)).tanh())


# Graphs, and tables


class GraphAttention(nn.Module):
    """Each node attends to its neighbours (GAT's second version)."""

    def __init__(self, before: int, heads: int, width: int) -> None:
        super().__init__()
        self.source = nn.Linear(before, heads * width)
        self.target = nn.Linear(before, heads * width)
        self.score = nn.Parameter(torch.randn(heads, width) / width**0.5)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Features shaped (graphs, nodes, heads * width)."""
        heads, width = self.score.shape
        source = self.source(x).unflatten(2, (heads, width))
        target = self.target(x).unflatten(2, (heads, width))
        pairs = F.leaky_relu(source[:, None] + target[:, :, None], 0.2)
        scores = (pairs * self.score).sum(-1).masked_fill(edges[..., None] == 0, -1e9)
        return torch.einsum("gijh,gjhw->gihw", scores.softmax(2), source).flatten(2)


class Loudest(nn.Module):
    """Two layers of attention over a graph's edges and a head for each node."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one = GraphAttention(6, 3, width)
        self.two = GraphAttention(3 * width + 6, 3, width)
        self.out = nn.Linear(3 * width + 6, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of five colours, shaped (graphs * nodes, 5)."""
        features = x[..., :6]
        edges = x[..., 6:]
        h = torch.cat([F.elu(self.one(features, edges)), features], 2)
        h = torch.cat([F.elu(self.two(h, edges)), features], 2)
        return self.out(h).flatten(0, 1)


def loud_neighbours(generator: torch.Generator) -> Batch:
    """Graphs of 14 nodes with a colour and a loudness each, and the colour of the loudest neighbour."""
    colours = torch.randint(5, (10, 14), generator=generator)
    loudness = torch.randn(10, 14, generator=generator)
    upper = (torch.rand(10, 14, 14, generator=generator) < 0.25).float().triu(1)
    edges = upper + upper.transpose(1, 2) + torch.eye(14)
    heard = loudness[:, None].masked_fill(edges == 0, -math.inf).argmax(2)
    features = torch.cat([F.one_hot(colours, 5).float(), loudness[..., None]], 2)
    return torch.cat([features, edges], 2), colours.gather(1, heard).flatten()


class TableBlock(nn.Module):
    """BatchNorm, a wider layer with dropout, and back, beside a short cut (Gorishniy et al.)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.BatchNorm1d(width), nn.Linear(width, 2 * width), nn.ReLU(), nn.Dropout(0.1),
            nn.Linear(2 * width, width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Shaped as it came."""
        return x + self.branch(x)


def table_resnet(width: int) -> nn.Module:
    """A ResNet for rows of a table."""
    blocks = [TableBlock(width) for _ in range(3)]
    return nn.Sequential(nn.Linear(16, width), *blocks, nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 1))


@cache
def _forest() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(221)
    columns = torch.randint(16, (40, 3), generator=generator)
    thresholds = 0.7 * torch.randn(40, 3, generator=generator)
    return columns, thresholds, torch.randn(40, 8, generator=generator)


def grown(generator: torch.Generator) -> Batch:
    """Sixteen numbers, some of them skewed, and the sum of forty trees of depth three, with noise."""
    columns, thresholds, leaves = _forest()
    x = torch.randn(64, 16, generator=generator)
    is_above = (x[:, columns] > thresholds).long()
    places = (is_above * torch.tensor([4, 2, 1])).sum(2)
    target = leaves[torch.arange(40), places].sum(1) / 40**0.5
    skewed = torch.cat([x[:, :8], x[:, 8:].exp() - 1.5], 1)
    return skewed, (target + 0.2 * torch.randn(64, generator=generator))[:, None]


def _sgd(task: Task, valid: Callable | None = None, *, plain: bool = False, decay: float = 5e-4) -> Recipe:
    kinds = ("momentum", "plain") if plain else ("momentum",)
    return Recipe(task, valid, optimizers=kinds, weight_decay=decay, sgd_max_norm=math.inf)


TEST = samples(images_not_trained_on, 250)
LETTERS, VALID_LETTERS = (
    pieces(lambda s=split: manual_characters(s)[0], 16, 40) for split in ("train", "valid")
)
WORDS, VALID_WORDS = (pieces(lambda s=split: ptb_words(s, 1000), 16, 20) for split in ("train", "valid"))

SGD = (
    _sgd(Task("wide residual net, norm first, BatchNorm", 1000, lambda: wide_residual(24),
              samples(small_cifar, 32), classify), TEST, plain=True),
    _sgd(Task("dense net, BatchNorm", 1000, lambda: dense(12), samples(small_cifar, 24), classify), TEST),
    _sgd(Task("squeeze and excitation, GroupNorm", 1000, lambda: squeezed(20), samples(small_cifar, 32),
              classify), TEST, plain=True),
    _sgd(Task("ConvMixer, BatchNorm", 500, lambda: mixed(40, 3), samples(small_cifar, 32), classify), TEST),
    _sgd(Task("pictures in full size, VGG, BatchNorm", 400, lambda: vgg(14), endless(shifted_pictures),
              classify), samples(lambda: _full_size("test"), 250)),
    _sgd(Task("capsules, blurred digits, GroupNorm", 2000, lambda: Capsules(16), endless(blurred_digits),
              margins)),
    _sgd(Task("characters of the manual, gated convolutions", 800, lambda: ConvolutionalText(
              manual_characters("train")[1], 56, 4), LETTERS, next_token), VALID_LETTERS, decay=0.0),
    _sgd(Task("words, six before", 1500, lambda: SixBefore(1000, 40, 80), WORDS, next_token), VALID_WORDS,
         plain=True, decay=0.0),
    _sgd(Task("loudest neighbour, graph attention", 2000, lambda: Loudest(12), endless(loud_neighbours),
              classify), decay=0.0),
    _sgd(Task("sum of trees, table ResNet, BatchNorm", 2000, lambda: table_resnet(64), endless(grown),
              fitted), plain=True),
)  # fmt: skip

TRIVIAL = {margins: best_constant_margins}
