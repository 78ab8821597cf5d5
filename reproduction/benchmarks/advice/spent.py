"""Six tasks of advise alone, which judged a fourth rule and belong to development since."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from reproduction.benchmarks.advice.noisy import fixed, stack, task
from reproduction.benchmarks.calibrate.data import Batch, digits
from torch import Tensor, nn

# Digits: nearer to another of the same kind than to one of another kind


class Triples(nn.Module):
    """Places of three digits each, by one network."""

    def __init__(self) -> None:
        super().__init__()
        self.place = stack(64, 52, 10, act=nn.Hardswish)

    def forward(self, x: Tensor) -> Tensor:
        """Shaped (batch, 30)."""
        return self.place(x).flatten(1)


def triples(generator: torch.Generator) -> Batch:
    """A digit, another of its kind, and one of another kind."""
    x, y = digits()
    first = torch.randint(len(x), (28,), generator=generator)
    others = torch.randint(len(x), (28, 200), generator=generator)
    same = (y[others] == y[first][:, None]).float()
    one, two = others.gather(1, same.argmax(1, True)), others.gather(1, same.argmin(1, True))
    return torch.stack([x[first], x[one[:, 0]], x[two[:, 0]]], 1), torch.zeros(28, 1)


def margin(outputs: Tensor, _: Tensor) -> Tensor:
    """By how much a digit is not nearer to its own kind, by a margin of 1."""
    one, two, three = outputs.unflatten(1, (3, -1)).unbind(1)
    near, far = ((one - other).square().sum(1) for other in (two, three))
    return F.relu(near - far + 1).mean()


# Directions


def directions(generator: torch.Generator) -> Batch:
    """Places, and which way a flow goes there, with noise."""
    x = torch.randn(18, 5, generator=generator)
    flow = (x @ fixed(5, 9, seed=61)).cos() @ fixed(9, 4, seed=62)
    return x, F.normalize(flow + torch.randn(18, 4, generator=generator), dim=1)


def angle(outputs: Tensor, y: Tensor) -> Tensor:
    """One minus the cosine."""
    return 1 - F.cosine_similarity(outputs, y).mean()


# Levels in an order


class Residual(nn.Module):
    """Two layers beside a short cut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.CELU())

    def forward(self, x: Tensor) -> Tensor:
        """Features of the layer."""
        return x + self.branch(x)


def levels(generator: torch.Generator) -> Batch:
    """Fourteen numbers, and which of five thresholds a noisy score of them passes."""
    x = torch.randn(36, 14, generator=generator)
    score = (x @ fixed(14, seed=71)) / 3 + x[:, 0] * x[:, 1] + 0.5 * torch.randn(36, generator=generator)
    return x, (score[:, None] > torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0])).float()


# Waiting times


class Waves(nn.Module):
    """Fixed random waves, then a small network."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 1.5 * fixed(3, 40, seed=81))
        self.layers = stack(80, 24, 1, act=nn.Tanhshrink)

    def forward(self, x: Tensor) -> Tensor:
        """The logarithm of the mean, shaped (batch, 1)."""
        waves = x @ self.get_buffer("frequencies")
        return self.layers(torch.cat([waves.sin(), waves.cos()], 1))


def waits(generator: torch.Generator) -> Batch:
    """Places, and times that are gamma distributed about a mean that depends on them."""
    x = torch.randn(64, 3, generator=generator)
    mean = torch.exp((2 * x[:, :1]).sin() + 0.5 * x[:, 1:2])
    uniform = torch.rand(64, 1, 3, generator=generator).clamp(min=1e-6)
    return x, -mean * uniform.log().mean(2)


def deviance(outputs: Tensor, y: Tensor) -> Tensor:
    """Of gamma distributed times, from the logarithm of their mean."""
    return (y * torch.exp(-outputs) + outputs).mean()


# Products


class Products(nn.Module):
    """Sums of products of two linear functions."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 26), nn.Linear(8, 26)
        self.out = nn.Linear(26, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Shaped (batch, 2)."""
        return self.out(self.one(x) * self.two(x))


def forms(generator: torch.Generator) -> Batch:
    """Points, and two quadratic forms of them."""
    x = torch.randn(90, 8, generator=generator)
    values = torch.einsum("bi,kij,bj->bk", x, fixed(2, 8, 8, seed=91) / 4, x)
    return x, values + 0.2 * torch.randn(90, 2, generator=generator)


def log_cosh(outputs: Tensor, y: Tensor) -> Tensor:
    """Squares near zero, absolute values far from it."""
    error = outputs - y
    return (error + F.softplus(-2 * error) - math.log(2)).mean()


# Intervals of a noisy line


def intervals(generator: torch.Generator) -> Batch:
    """A line of 32 points with noise, and where its bump is."""
    start = torch.randint(4, 18, (22, 1), generator=generator)
    length = torch.randint(5, 11, (22, 1), generator=generator)
    places = torch.arange(32)
    inside = ((places >= start) & (places < start + length)).float()
    return (1.5 * inside + torch.randn(22, 32, generator=generator))[:, None], inside


def overlap(outputs: Tensor, y: Tensor) -> Tensor:
    """One minus Dice's overlap."""
    found = outputs.sigmoid()
    return 1 - (2 * (found * y).sum(1) / (found.sum(1) + y.sum(1) + 1)).mean()


def _line() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(1, 10, 5, padding=2), nn.InstanceNorm1d(10, affine=True), nn.SiLU(),
        nn.Conv1d(10, 10, 5, padding=2), nn.SiLU(), nn.Conv1d(10, 1, 5, padding=2), nn.Flatten(),
    )  # fmt: skip


SPENT = (
    task("triples of digits", Triples, triples, margin),
    task("directions", lambda: stack(5, 34, 34, 4, act=nn.SELU), directions, angle),
    task("levels in order", lambda: nn.Sequential(nn.Linear(14, 30), *[Residual(30) for _ in range(3)],
         nn.Linear(30, 5)), levels, F.binary_cross_entropy_with_logits),
    task("waiting times", Waves, waits, deviance),
    task("quadratic forms", Products, forms, log_cosh),
    task("intervals, Dice", _line, intervals, overlap),
)  # fmt: skip
