"""Tasks that judge SGD's second rule: made after the first was judged and failed, run once, after the freeze.

Other architectures, data and losses than those of every task before; three of five have BatchNorm.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from reproduction.benchmarks.calibrate.data import Batch, Task, classify, small_cifar
from reproduction.benchmarks.calibrate.judged import endless
from reproduction.benchmarks.calibrate.scheduled import Recipe
from torch import Tensor, nn

KINDS = ("momentum", "plain")
QUANTILES = torch.tensor([0.1, 0.5, 0.9])


def waves(generator: torch.Generator) -> Batch:
    """Sines, squares, saws, chirps, bursts and noise, of any frequency and phase, under noise."""
    kinds = torch.randint(6, (32,), generator=generator)
    frequency, phase = (torch.rand(32, 1, generator=generator) for _ in range(2))
    time = torch.linspace(0, 1, 64)[None]
    turns = (2 + 6 * frequency) * time + phase
    angle = 2 * torch.pi * turns
    burst = torch.exp(-60 * (time - 0.2 - 0.6 * phase).square())
    shapes = torch.stack(
        [angle.sin(), angle.sin().sign(), 2 * (turns % 1) - 1, (angle * (0.5 + time)).sin(),
         burst * angle.sin(), torch.randn(32, 64, generator=generator)], 1
    )  # fmt: skip
    signal = shapes[torch.arange(32), kinds]
    return (signal + 0.5 * torch.randn(32, 64, generator=generator))[:, None], kinds


def wave_net(width: int) -> nn.Module:
    """Convolutions in time with BatchNorm, and the mean over time."""
    layers: list[nn.Module] = []
    for before, after in ((1, width), (width, 2 * width), (2 * width, 2 * width)):
        layers += [nn.Conv1d(before, after, 7, stride=2, padding=3), nn.BatchNorm1d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(2 * width, 6))


def greys(generator: torch.Generator) -> Batch:
    """Pictures without their colours, and the colours."""
    x, _ = small_cifar()
    colours = F.avg_pool2d(x[torch.randint(len(x), (16,), generator=generator)], 2)
    return colours.mean(1, keepdim=True), colours


def painter(width: int) -> nn.Module:
    """Down and up again, with BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(1, width, 4, 2, 1), nn.BatchNorm2d(width), nn.LeakyReLU(0.1),
        nn.Conv2d(width, 2 * width, 4, 2, 1), nn.BatchNorm2d(2 * width), nn.LeakyReLU(0.1),
        nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.BatchNorm2d(width), nn.LeakyReLU(0.1),
        nn.ConvTranspose2d(width, 3, 4, 2, 1),
    )  # fmt: skip


def huber(model: nn.Module, batch: Batch) -> Tensor:
    """Huber's loss of the target."""
    return F.smooth_l1_loss(model(batch[0]), batch[1], beta=0.5)


class Adder(nn.Module):
    """A GRU reads ten digits; the last state says their sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table, self.memory = nn.Embedding(5, width), nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, 41)

    def forward(self, digits: Tensor) -> Tensor:
        """Shaped (batch, 41)."""
        return self.out(self.memory(self.table(digits))[0][:, -1])


def sums(generator: torch.Generator) -> Batch:
    """Ten digits below five, and their sum."""
    digits = torch.randint(5, (64, 10), generator=generator)
    return digits, digits.sum(1)


class Scorer(nn.Module):
    """A score of 20 features, by gated layers with LayerNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(20, width)
        self.middle = nn.ModuleList([nn.Linear(width, 2 * width) for _ in range(3)])
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(3)])
        self.last = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Shaped (..., 1)."""
        x = self.first(x)
        for layer, norm in zip(self.middle, self.norms, strict=True):
            x = x + F.glu(layer(norm(x)))
        return self.last(x)


def pairs(generator: torch.Generator) -> Batch:
    """Pairs of items, and which is better, by a hidden utility and noise."""
    x = torch.randn(48, 2, 20, generator=generator)
    utility = x[..., 0] * x[..., 1] + x[..., 2:6].sum(-1).sin() + 0.5 * x[..., 6].abs()
    noise = 0.3 * torch.randn(48, generator=generator)
    return x, (utility[:, 0] - utility[:, 1] + noise > 0).float()


def ranked(model: nn.Module, batch: Batch) -> Tensor:
    """RankNet's loss: the better item should have the larger score."""
    scores = model(batch[0]).squeeze(-1)
    return F.binary_cross_entropy_with_logits(scores[:, 0] - scores[:, 1], batch[1])


def uncertain(generator: torch.Generator) -> Batch:
    """Eight numbers, and a target whose spread they set."""
    x = torch.randn(64, 8, generator=generator)
    spread = 0.2 + F.softplus(x[:, 0] + x[:, 1])
    noise = torch.randn(64, generator=generator)
    return x, ((2 * x[:, 2]).sin() + x[:, 3] * x[:, 4] + spread * noise)[:, None]


def quantiles(width: int) -> nn.Module:
    """Three quantiles, by a deep perceptron with BatchNorm and SELU's rival, Mish."""
    layers: list[nn.Module] = []
    for before in (8, width, width):
        layers += [nn.Linear(before, width, bias=False), nn.BatchNorm1d(width), nn.Mish()]
    return nn.Sequential(*layers, nn.Linear(width, 3))


def pinball(model: nn.Module, batch: Batch) -> Tensor:
    """Koenker's loss of quantiles."""
    return pinball_of(batch[1] - model(batch[0]))


def pinball_of(above: Tensor) -> Tensor:
    """The loss by how far the target is above each quantile."""
    return torch.maximum(QUANTILES * above, (QUANTILES - 1) * above).mean()


JUDGED_SGD = (
    Recipe(Task("waves, 1-d convolutions, BatchNorm", 500, lambda: wave_net(16), endless(waves), classify),
           optimizers=KINDS, weight_decay=5e-4),
    Recipe(Task("colours from grey, BatchNorm", 400, lambda: painter(16), endless(greys), huber),
           optimizers=KINDS, weight_decay=5e-4),
    Recipe(Task("sums of digits, GRU", 800, lambda: Adder(48), endless(sums), classify), optimizers=KINDS,
           weight_decay=0.0),
    Recipe(Task("pairs in order, RankNet", 600, lambda: Scorer(48), endless(pairs), ranked), optimizers=KINDS,
           weight_decay=0.0),
    Recipe(Task("quantiles, BatchNorm", 700, lambda: quantiles(96), endless(uncertain), pinball),
           optimizers=KINDS, weight_decay=5e-4),
)  # fmt: skip
