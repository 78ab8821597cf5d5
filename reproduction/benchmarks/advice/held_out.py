"""Tasks that judge advise alone: made for this, asked about once, after its rule was frozen."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from reproduction.benchmarks.advice.noisy import fixed, stack, task
from reproduction.benchmarks.calibrate.data import Batch, digits
from torch import Tensor, nn

# Places of numbers in their order


class Sorter(nn.Module):
    """A transformer layer over six numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(1, 24), nn.Linear(24, 6)
        self.layer = nn.TransformerEncoderLayer(24, 3, 48, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of each number's place, shaped (batch, 36)."""
        return self.place(self.layer(self.embed(x[..., None]))).flatten(1)


def numbers(generator: torch.Generator) -> Batch:
    """Six numbers, and the place of each in their order."""
    x = torch.randn(32, 6, generator=generator)
    return x, x.argsort(1).argsort(1)


def places_of(outputs: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy, mean over the numbers."""
    return F.cross_entropy(outputs.unflatten(1, (6, 6)).transpose(1, 2), y)


# Which symbol a sequence repeats


class Reader(nn.Module):
    """A GRU and its mean over time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.reader = nn.Embedding(12, 16), nn.GRU(16, 32, batch_first=True)
        self.out = nn.Linear(32, 12)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the symbols."""
        return self.out(self.reader(self.embed(x))[0].mean(1))


def repeats(generator: torch.Generator) -> Batch:
    """Fourteen symbols, and the one that was put into four places."""
    x = torch.randint(12, (24, 14), generator=generator)
    y = torch.randint(12, (24,), generator=generator)
    where = torch.rand(24, 14, generator=generator).argsort(1)[:, :4]
    return x.scatter(1, where, y[:, None].expand(-1, 4)), y


# Digits with labels that are smoothed


def seen_digits(generator: torch.Generator) -> Batch:
    """Digits with noise, and what they are."""
    x, y = digits()
    chosen = torch.randint(len(x), (20,), generator=generator)
    return (x[chosen] + 0.3 * torch.randn(20, 64, generator=generator)).view(20, 1, 8, 8), y[chosen]


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.GELU(), nn.MaxPool2d(2), nn.Conv2d(12, 24, 3), nn.GELU(),
        nn.Flatten(), nn.Linear(96, 10),
    )  # fmt: skip


def smoothed(outputs: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy with a tenth of the label on all others."""
    return F.cross_entropy(outputs, y, label_smoothing=0.1)


# Half of a digit from the other


def half_digits(generator: torch.Generator) -> Batch:
    """The upper half of a digit, and the lower."""
    x, _ = digits()
    chosen = x[torch.randint(len(x), (64,), generator=generator)]
    return chosen[:, :32], chosen[:, 32:]


# A sum of experts


class Experts(nn.Module):
    """Four small networks, weighed by a fifth."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([stack(10, 16, 3, act=nn.Tanh) for _ in range(4)])
        self.gate = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Shaped (batch, 3)."""
        each = torch.stack([expert(x) for expert in self.experts], 1)
        return (self.gate(x).softmax(1)[..., None] * each).sum(1)


def pieces(generator: torch.Generator) -> Batch:
    """A linear map that depends on the corner, with noise."""
    x = torch.randn(50, 10, generator=generator)
    corner = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
    y = torch.einsum("bi,bij->bj", x, fixed(4, 10, 3, seed=101)[corner]) / 3
    return x, y + 0.3 * torch.randn(50, 3, generator=generator)


# Tags by attention


class Tagger(nn.Module):
    """Words, pooled by a query that is learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.query = nn.Embedding(300, 24), nn.Linear(24, 1, bias=False)
        self.out = stack(24, 24, 8, act=nn.ReLU)

    def forward(self, x: Tensor) -> Tensor:
        """Log-odds of eight tags."""
        words = self.embed(x)
        return self.out((self.query(words).softmax(1) * words).sum(1))


def tagged(generator: torch.Generator) -> Batch:
    """Ten words, and the tags that hidden features of them call for."""
    x = torch.randint(300, (60, 10), generator=generator)
    features = fixed(300, 8, seed=111)[x].mean(1) * 3
    return x, torch.bernoulli(torch.sigmoid(2 * features), generator=generator)


# The next state of a pendulum


class Moved(nn.Module):
    """A change of the state, by two layers with RMS norm."""

    def __init__(self) -> None:
        super().__init__()
        self.change = nn.Sequential(
            nn.Linear(4, 40), nn.RMSNorm(40), nn.SiLU(), nn.Linear(40, 40), nn.RMSNorm(40), nn.SiLU(),
            nn.Linear(40, 4),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """The next state."""
        return x + self.change(x)


def pendulums(generator: torch.Generator) -> Batch:
    """Angles and speeds of two coupled pendulums, and a moment later, seen with noise."""
    x = 1.5 * torch.randn(80, 4, generator=generator)
    angle, speed = x[:, :2], x[:, 2:]
    for _ in range(10):
        speed = speed - 0.1 * (angle.sin() + 0.5 * (angle - angle.flip(1)) + 0.1 * speed)
        angle = angle + 0.1 * speed
    return x, torch.cat([angle, speed], 1) + 0.05 * torch.randn(80, 4, generator=generator)


# Blood values: a class that is rare


def rare(generator: torch.Generator) -> Batch:
    """Nine skewed numbers, and three classes, of which one is rare."""
    x = torch.randn(30, 9, generator=generator).exp()
    logits = x.log() @ fixed(9, 3, seed=121) / 2 - torch.tensor([0.0, 0.5, 2.5])
    return x, torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]


HELD_OUT = (
    task("places of numbers", Sorter, numbers, places_of),
    task("repeated symbols", Reader, repeats, F.cross_entropy),
    task("noisy digits, smoothed labels", _convolutions, seen_digits, smoothed),
    task("half of a digit", lambda: stack(32, 60, 60, 32, act=nn.PReLU), half_digits, F.mse_loss),
    task("sum of experts", Experts, pieces, F.mse_loss),
    task("tags by attention", Tagger, tagged, F.binary_cross_entropy_with_logits),
    task("coupled pendulums", Moved, pendulums, F.huber_loss),
    task("rare class", lambda: nn.Sequential(nn.LayerNorm(9), *stack(9, 32, 3, act=nn.Softplus)), rare,
         F.cross_entropy),
)  # fmt: skip
