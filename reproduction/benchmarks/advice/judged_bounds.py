"""Eight tasks that judge advise's bounds: two for each way of training, opened after the rule was frozen.

Their learning rates go from a hundredth to thirty times the best one.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import torch.nn.functional as F
from reproduction.benchmarks.advice.noisy import fixed, stack, task
from reproduction.benchmarks.calibrate.data import Batch, small_cifar
from torch import Tensor, nn

# AdamW under a schedule


@cache
def _patients() -> Batch:
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    x, y = torch.as_tensor(x).float(), torch.as_tensor(y).float()[:, None]
    return (x - x.mean(0)) / x.std(0), y


def tumours(generator: torch.Generator) -> Batch:
    """Thirty measures of a tumour's cells, seen with much noise, and whether it is benign."""
    x, y = _patients()
    chosen = torch.randint(len(y), (26,), generator=generator)
    return x[chosen] + 1.5 * torch.randn(26, 30, generator=generator), y[chosen]


def _doubtful() -> nn.Module:
    return nn.Sequential(
        nn.Linear(30, 48), nn.ReLU6(), nn.Dropout(0.3), nn.Linear(48, 48), nn.ReLU6(), nn.Linear(48, 1)
    )


class Unmixer(nn.Module):
    """A convolution over the bands, attention among them, and shares."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 20, 5, stride=2, padding=2)
        self.places = nn.Parameter(0.1 * torch.randn(20, 20))
        self.attention = nn.MultiheadAttention(20, 2, batch_first=True)
        self.out = nn.Linear(400, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Log-shares of the substances, before they are normalised."""
        h = F.gelu(self.first(x[:, None])).transpose(1, 2) + self.places
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.out(h.flatten(1))


def spectra(generator: torch.Generator) -> Batch:
    """Spectra of mixtures over 40 bands, with noise, and the shares of five substances."""
    shares = (1.5 * torch.randn(34, 5, generator=generator)).softmax(1)
    bands = torch.arange(40)
    middles = torch.tensor([[6.0, 25.0], [11.0, 33.0], [15.0, 20.0], [9.0, 29.0], [18.0, 36.0]])
    lines = torch.exp(-((bands - middles[..., None]) / 3).square()).sum(1)
    return 3 * shares @ lines + 0.3 * torch.randn(34, 40, generator=generator), shares


# AdamW at a constant rate


def turns(generator: torch.Generator) -> Batch:
    """Seven points of a plane, the same ones turned and blurred, and sine and cosine of the angle."""
    points = torch.randn(46, 7, 2, generator=generator)
    angle = 2 * math.pi * torch.rand(46, 1, generator=generator)
    sine, cosine = angle.sin(), angle.cos()
    x, y = points.unbind(2)
    turned = torch.stack([cosine * x - sine * y, sine * x + cosine * y], 2)
    turned = turned + 0.1 * torch.randn(turned.shape, generator=generator)
    return torch.cat([points, turned], 2).flatten(1), torch.cat([sine, cosine], 1)


class Bilinear(nn.Module):
    """Features of both clouds, multiplied pairwise, normed, and read."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Bilinear(28, 28, 32)
        self.read = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Sine and cosine."""
        return self.read(self.pairs(x, x))


def options(generator: torch.Generator) -> Batch:
    """Moneyness, time, volatility and interest, and what Black and Scholes pay for a call, in noise."""
    u = torch.rand(70, 4, generator=generator)
    moneyness = 0.6 + 0.8 * u[:, 0]
    time = 0.1 + 1.9 * u[:, 1]
    volatility = 0.1 + 0.5 * u[:, 2]
    interest = 0.1 * u[:, 3]
    spread = volatility * time.sqrt()
    d = (moneyness.log() + (interest + volatility.square() / 2) * time) / spread
    cut = torch.exp(-interest * time)
    price = moneyness * torch.special.ndtr(d) - cut * torch.special.ndtr(d - spread)
    return 4 * u - 2, (10 * price + 0.2 * torch.randn(70, generator=generator))[:, None]


# SGD with momentum, BatchNorm


def turned_pictures(generator: torch.Generator) -> Batch:
    """Pictures turned by quarters, and by how many."""
    x, _ = small_cifar()
    chosen = x[torch.randint(len(x), (40,), generator=generator)]
    quarters = torch.randint(4, (40,), generator=generator)
    each = torch.stack([torch.rot90(chosen, k, (2, 3)) for k in range(4)], 1)
    return each[torch.arange(40), quarters], quarters


def _compass() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, 2, 1, bias=False), nn.BatchNorm2d(12), nn.ReLU(),
        nn.Conv2d(12, 24, 3, 2, 1, bias=False), nn.BatchNorm2d(24), nn.ReLU(),
        nn.Flatten(), nn.Linear(384, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4),
    )  # fmt: skip


def outlines(generator: torch.Generator) -> Batch:
    """Small pictures, and how steeply their brightness changes at each place."""
    x, _ = small_cifar()
    small = F.avg_pool2d(x[torch.randint(len(x), (30,), generator=generator)], 2)
    light = F.pad(small.mean(1), (0, 1, 0, 1), "replicate")
    across = light[:, :-1, 1:] - light[:, :-1, :-1]
    down = light[:, 1:, :-1] - light[:, :-1, :-1]
    noisy = small + 0.1 * torch.randn(small.shape, generator=generator)
    return noisy, (across.square() + down.square()).sqrt().flatten(1)


def _tracer() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.PReLU(16),
        nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.PReLU(16),
        nn.Conv2d(16, 1, 1), nn.Flatten(),
    )  # fmt: skip


# Clipped SGD


def returns(generator: torch.Generator) -> Batch:
    """Twelve factors, and two returns that follow them with heavy tails."""
    x = torch.randn(44, 12, generator=generator)
    tails = torch.randn(44, 2, generator=generator) / (0.3 + torch.rand(44, 2, generator=generator))
    return x, (x @ fixed(12, 2, seed=141)).tanh() * 2 + x @ fixed(12, 2, seed=142) / 3 + 0.4 * tails


class Memory(nn.Module):
    """A plain recurrent network, and a number at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.out = nn.RNN(1, 36, batch_first=True), nn.Linear(36, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Shaped (batch, time)."""
        return self.out(self.memory(x[..., None])[0])[..., 0]


def leaky_sums(generator: torch.Generator) -> Batch:
    """Eighteen numbers, and what a leaky sum of them shows after each, were it cut off at both ends."""
    x = torch.randn(32, 18, generator=generator)
    level = torch.zeros(32)
    levels = []
    for value in x.unbind(1):
        level = (0.7 * level + value).clamp(-1.5, 1.5)
        levels.append(level)
    return x, torch.stack(levels, 1)


def absolute(outputs: Tensor, y: Tensor) -> Tensor:
    """Mean absolute error, smooth within a tenth."""
    return F.smooth_l1_loss(outputs, y, beta=0.1)


BOUNDS = (
    task("tumours in noise", _doubtful, tumours, F.binary_cross_entropy_with_logits),
    task("shares in a spectrum", Unmixer, spectra, F.cross_entropy),
    task("turn of a cloud", Bilinear, turns, F.mse_loss),
    task("option prices", lambda: stack(4, 40, 40, 40, 1, act=nn.LogSigmoid), options, absolute),
    task("turned pictures, BatchNorm", _compass, turned_pictures, F.cross_entropy),
    task("outlines, BatchNorm", _tracer, outlines, F.mse_loss),
    task("heavy-tailed returns", lambda: stack(12, 40, 40, 2, act=nn.GELU), returns, F.mse_loss),
    task("leaky sums, plain RNN", Memory, leaky_sums, absolute),
)
BOUNDS_KIND = dict(
    zip(
        (recipe.task.name for recipe in BOUNDS),
        (
            "adamw, schedule",
            "adamw, schedule",
            "adamw",
            "adamw",
            "momentum",
            "momentum",
            "clipped",
            "clipped",
        ),
        strict=True,
    )
)
