"""The tasks that judge: made for this, run once, after the constants were frozen.

Other architectures, data or losses than those of the development tasks; 300 to 3,000 steps; 20,000 parameters
to one model of six million.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import torch
import torch.nn.functional as F
from reproduction.benchmarks.calibrate.data import (
    Batch,
    Draw,
    Task,
    classify,
    digits,
    next_token,
    samples,
    small_cifar,
)
from reproduction.benchmarks.calibrate.scheduled import (
    GPT,
    Recipe,
    images_not_trained_on,
    manual_characters,
    ptb_words,
)
from reproduction.benchmarks.calibrate.scripts import pieces
from torch import Tensor, nn

EVERY = ("adamw", "momentum", "plain")


def endless(draw: Callable[[torch.Generator], Batch]) -> Draw:
    """Batches made by a function, without end."""

    def batches(generator: torch.Generator) -> Iterator[Batch]:
        while True:
            yield draw(generator)

    return batches


class Gated(nn.Module):
    """A decoder layer as LLaMA's: RMS norm, causal attention, a gated perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(2 * width, width, bias=False)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        """Shaped as it came, (batch, time, width)."""
        batch, time, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        gate, value = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


def gated_words(vocabulary: int, width: int, layers: int) -> nn.Module:
    """Embedding, gated layers, a head that is not tied."""
    middle = [Gated(width, 4) for _ in range(layers)]
    return nn.Sequential(
        nn.Embedding(vocabulary, width), *middle, nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
    )


class TwoLayerLSTM(nn.Module):
    """Characters by two recurrent layers with dropout."""

    def __init__(self, characters: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, 24)
        self.recurrent = nn.LSTM(24, width, 2, dropout=0.2, batch_first=True)
        self.out = nn.Linear(width, characters)

    def forward(self, x: Tensor) -> Tensor:
        """Scores shaped (batch, time, characters)."""
        return self.out(self.recurrent(self.embedding(x))[0])


def separable(width: int, norm: Callable[[int], nn.Module]) -> nn.Module:
    """Depthwise and pointwise convolutions, as MobileNet's."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), norm(width), nn.ReLU()]
    for before, after, stride in ((1, 2, 2), (2, 2, 1), (2, 4, 2)):
        inner = before * width
        layers += [nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False), norm(inner), nn.ReLU()]
        layers += [nn.Conv2d(inner, after * width, 1, bias=False), norm(after * width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


class SetModel(nn.Module):
    """Attention over the members of a set, their mean, a number."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(4, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True, norm_first=True)
        self.out = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Shaped (batch, 1)."""
        return self.out(self.layer(self.inner(x)).mean(1))


def spread_of_a_set(generator: torch.Generator) -> Batch:
    """Sixteen points, and the largest distance of one from their mean."""
    x = torch.randn(32, 16, 4, generator=generator) * (0.5 + torch.rand(32, 1, 1, generator=generator))
    return x, (x - x.mean(1, keepdim=True)).norm(dim=2).amax(1, keepdim=True)


class Graph(nn.Module):
    """Two rounds of messages between neighbours, then a class for each node."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, width), nn.Linear(width, width), nn.Linear(width, 4)])

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the nodes, shaped (batch * nodes, 4)."""
        features, edges = x[..., :8], x[..., 8:]
        mixing = edges / edges.sum(-1, keepdim=True).clamp(min=1)
        for layer in self.layers[:-1]:
            features = F.relu(mixing @ layer(features) + layer(features))
        return self.layers[-1](features).flatten(0, 1)


def communities(generator: torch.Generator) -> Batch:
    """Graphs of 24 nodes in four groups that prefer their own; few features give the group away."""
    groups = torch.randint(4, (8, 24), generator=generator)
    same = groups[:, :, None] == groups[:, None, :]
    chance = torch.where(same, 0.6, 0.1)
    upper = (torch.rand(8, 24, 24, generator=generator) < chance).float().triu(1)
    features = torch.randn(8, 24, 8, generator=generator)
    features[..., :4] += 0.7 * F.one_hot(groups, 4)
    return torch.cat([features, upper + upper.transpose(1, 2)], -1), groups.flatten()


class Table(nn.Module):
    """Embeddings of categories beside numbers, a perceptron with BatchNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(30, 6) for _ in range(4)])
        self.layers = nn.Sequential(
            nn.Linear(34, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width),
            nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Shaped (batch, 1)."""
        words = [table(x[:, i].long()) for i, table in enumerate(self.tables)]
        return self.layers(torch.cat([*words, x[:, 4:]], 1))


@cache
def _effects() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    return torch.randn(4, 30, generator=generator), torch.randn(10, generator=generator)


def prices(generator: torch.Generator) -> Batch:
    """Four categories and ten numbers; the target has effects, a product, and noise."""
    effects, slopes = _effects()
    categories = torch.randint(30, (64, 4), generator=generator)
    numbers = torch.randn(64, 10, generator=generator)
    sums = sum(effects[i][categories[:, i]] for i in range(4))
    noise = 0.3 * torch.randn(64, generator=generator)
    target = sums + numbers @ slopes + numbers[:, 0] * effects[0][categories[:, 0]] + noise
    return torch.cat([categories.float(), numbers], 1), (target / 4)[:, None]


def made(pixels: int, width: int) -> nn.Module:
    """Bernoulli logits of each pixel from those before it: masked layers."""

    class Masked(nn.Linear):
        def __init__(self, before: Tensor, after: Tensor, *, strict: bool) -> None:
            super().__init__(len(before), len(after))
            allowed = before[None] < after[:, None] if strict else before[None] <= after[:, None]
            self.register_buffer("mask", allowed.float())

        def forward(self, input: Tensor) -> Tensor:
            return F.linear(input, self.weight * self.get_buffer("mask"), self.bias)

    places, hidden = torch.arange(pixels), torch.arange(width) % (pixels - 1)
    return nn.Sequential(
        Masked(places, hidden, strict=False), nn.ReLU(), Masked(hidden, hidden, strict=False), nn.ReLU(),
        Masked(hidden, places, strict=True),
    )  # fmt: skip


def binary_digits(generator: torch.Generator) -> Batch:
    """Digits in black and white."""
    x, _ = digits()
    chosen = x[torch.randint(len(x), (32,), generator=generator)]
    bits = (chosen > 0).float()
    return bits, bits


def bernoulli(model: nn.Module, batch: Batch) -> Tensor:
    """Nats for a pixel."""
    return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])


def halves(generator: torch.Generator) -> Batch:
    """Upper and lower halves of digits."""
    x, _ = digits()
    chosen = x[torch.randint(len(x), (48,), generator=generator)]
    return chosen[:, :32], chosen[:, 32:]


class Towers(nn.Module):
    """One encoder for each half."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            [nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Linear(width, 24)) for _ in range(2)]
        )


def matching(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of finding the other half among all."""
    one, two = (F.normalize(tower(x), dim=1) for tower, x in zip(model.towers, batch, strict=True))  # type: ignore[arg-type]
    return F.cross_entropy(10.0 * one @ two.t(), torch.arange(len(one)))


def times(generator: torch.Generator) -> Batch:
    """Points of an interval, to differentiate by."""
    t = 6.0 * torch.rand(64, 1, generator=generator)
    return t, torch.zeros(1, 1)


def oscillation(model: nn.Module, batch: Batch) -> Tensor:
    """Residual of u'' + 0.2 u' + u = 0 with u(0) = 1 and u'(0) = 0; the loss differentiates inside."""
    with torch.enable_grad():
        t = batch[0].detach().requires_grad_()
        u = model(t)
        (slope,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        (bend,) = torch.autograd.grad(slope.sum(), t, create_graph=True)
        zero = batch[1].detach().requires_grad_()
        first = model(zero)
        (start,) = torch.autograd.grad(first.sum(), zero, create_graph=True)
        return (bend + 0.2 * slope + u).square().mean() + (first - 1).square().sum() + start.square().sum()


def fitted(model: nn.Module, batch: Batch) -> Tensor:
    """Squared error of the target."""
    return F.mse_loss(model(batch[0]), batch[1])


def denoised(generator: torch.Generator) -> Batch:
    """Small pictures under noise, and what they were."""
    x, _ = small_cifar()
    clean = F.avg_pool2d(x[torch.randint(len(x), (24,), generator=generator)], 2)
    return clean + 0.7 * torch.randn(clean.shape, generator=generator), clean


class UNet(nn.Module):
    """Down, up, and a short cut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.GroupNorm(4, width), nn.SiLU())
        self.down = nn.Sequential(nn.Conv2d(width, 2 * width, 4, 2, 1), nn.GroupNorm(4, 2 * width), nn.SiLU())
        self.up = nn.ConvTranspose2d(2 * width, width, 4, 2, 1)
        self.last = nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Shaped as it came."""
        first = self.first(x)
        return self.last(torch.cat([first, F.silu(self.up(self.down(first)))], 1))


class Residual(nn.Module):
    """Two convolutions with BatchNorm beside a short cut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        outer = [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)]
        self.layers = nn.Sequential(*inner, *outer)

    def forward(self, x: Tensor) -> Tensor:
        """Shaped as it came."""
        return F.relu(x + self.layers(x))


def residual_digits(width: int) -> nn.Module:
    """A small ResNet for pictures of 8 x 8 pixels, given as vectors."""
    first = [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    middle = [Residual(width), nn.MaxPool2d(2), Residual(width)]
    return nn.Sequential(*first, *middle, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def _groups(channels: int) -> nn.Module:
    return nn.GroupNorm(4, channels)


def _task(
    name: str, steps: int, model: Callable[[], nn.Module], draw: Draw, loss: Callable, **options: object
) -> Recipe:
    return Recipe(Task(name, steps, model, draw, loss), **options)  # type: ignore[arg-type]


def _words(vocabulary: int, batch: int, length: int) -> tuple[Draw, Draw]:
    parts = (pieces(lambda s=split: ptb_words(s, vocabulary), batch, length) for split in ("train", "valid"))
    return next(parts), next(parts)


def _large() -> nn.Module:
    return GPT(8000, width=256, layers=5, heads=8, length=48)


LARGE = "GPT of six million"
TRAIN, VALID = _words(2000, 8, 40)
WIDE_TRAIN, WIDE_VALID = _words(8000, 12, 48)
TEST = samples(images_not_trained_on, 250)

JUDGED = (
    _task("separable convolutions, BatchNorm", 1000, lambda: separable(32, nn.BatchNorm2d),
          samples(small_cifar, 32), classify, valid=TEST, optimizers=EVERY, weight_decay=5e-4),
    _task("words, LLaMA's layers", 3000, lambda: gated_words(2000, 48, 2), TRAIN, next_token, valid=VALID),
    _task("table, categories", 500, lambda: Table(128), endless(prices), fitted, optimizers=EVERY,
          weight_decay=0.01),
    _task("characters, two LSTM layers", 1500, lambda: TwoLayerLSTM(manual_characters("train")[1], 64),
          pieces(lambda: manual_characters("train")[0], 16, 40), next_token,
          valid=pieces(lambda: manual_characters("valid")[0], 64, 40), weight_decay=0.0),
    _task("separable convolutions, GroupNorm", 600, lambda: separable(32, _groups), samples(small_cifar, 16),
          classify, valid=TEST, weight_decay=0.05),
    _task("denoising U-Net", 800, lambda: UNet(24), endless(denoised), fitted, weight_decay=0.01),
    _task("spread of a set", 700, lambda: SetModel(64), endless(spread_of_a_set), fitted, weight_decay=0.01),
    _task("communities of graphs", 400, lambda: Graph(160), endless(communities), classify,
          optimizers=("adamw", "momentum"), weight_decay=0.01),
    _task("masked pixels, MADE", 600, lambda: made(64, 192), endless(binary_digits), bernoulli,
          optimizers=EVERY, weight_decay=0.0),
    _task("halves of digits", 500, lambda: Towers(192), endless(halves), matching, optimizers=EVERY,
          weight_decay=0.05),
    _task("ResNet for digits, BatchNorm", 600, lambda: residual_digits(24), samples(digits, 32), classify,
          optimizers=EVERY, weight_decay=5e-4),
    _task("oscillator, physics-informed", 1500, lambda: nn.Sequential(nn.Linear(1, 112), nn.Tanh(),
          nn.Linear(112, 112), nn.Tanh(), nn.Linear(112, 112), nn.Tanh(), nn.Linear(112, 1)), endless(times),
          oscillation, weight_decay=0.0),
    _task(LARGE, 300, _large, WIDE_TRAIN, next_token, valid=WIDE_VALID, betas=(0.9, 0.95)),
)  # fmt: skip
