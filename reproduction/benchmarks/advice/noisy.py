"""Ten tasks of advise alone, which judged a third rule and belong to development since.

Losses, layers and batch sizes that no other task has. Each has a fixed truth, from which batches are drawn
without end, and takes a second of training or less. Most are noisier than calibrate's tasks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from reproduction.benchmarks.calibrate.data import Batch, Task, digits
from reproduction.benchmarks.calibrate.judged import endless
from reproduction.benchmarks.calibrate.scheduled import Recipe
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

Criterion = Callable[[Tensor, Tensor], Tensor]  # of outputs and targets


def fixed(*shape: int, seed: int) -> Tensor:
    """Normal numbers that belong to a task."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stack(*widths: int, act: Callable[[], nn.Module]) -> nn.Sequential:
    """Linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), act()]
    return nn.Sequential(*layers[:-1])


# Pairs of items, of which one is better


class Ranking(nn.Module):
    """The difference of two scores."""

    def __init__(self) -> None:
        super().__init__()
        self.score = stack(20, 80, 40, 1, act=nn.ELU)

    def forward(self, x: Tensor) -> Tensor:
        """Log-odds that the first of a pair is better, shaped (batch, 1)."""
        return self.score(x[:, 0]) - self.score(x[:, 1])


def pairs(generator: torch.Generator) -> Batch:
    """Pairs, and 1 where the first is better, by a hidden score of two directions."""
    x = torch.randn(40, 2, 20, generator=generator)
    u, v = x @ fixed(20, seed=21), x @ fixed(20, seed=22)
    score = (u + u.sin() * v) / 3
    better = torch.sigmoid(score[:, :1] - score[:, 1:])
    return x, torch.bernoulli(better, generator=generator)


# Quantiles of a noise that grows


def noisy_line(generator: torch.Generator) -> Batch:
    """Six numbers, and a target whose noise depends on them."""
    x = torch.rand(100, 6, generator=generator) * 2 - 1
    noise = torch.randn(100, 1, generator=generator)
    return x, 2 * (3 * x[:, :1]).sin() + x[:, 1:2] * x[:, 2:3] + (0.2 + x[:, 3:4].square()) * noise


def pinball(outputs: Tensor, y: Tensor) -> Tensor:
    """Loss of the quantiles at 10, 50 and 90 %."""
    shares = torch.tensor([0.1, 0.5, 0.9])
    error = y - outputs
    return torch.maximum(shares * error, (shares - 1) * error).mean()


# A picture as a function of places


class Sine(nn.Module):
    """A layer of sines, started as SIREN's."""

    def __init__(self, before: int, after: int, frequency: float) -> None:
        super().__init__()
        self.linear, self.frequency = nn.Linear(before, after), frequency
        bound = 1 / before if frequency > 5 else math.sqrt(6 / before)
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Features of the layer."""
        return torch.sin(self.frequency * self.linear(x))


def places(generator: torch.Generator) -> Batch:
    """Places of a square, and the picture there: rings and stripes."""
    x = torch.rand(200, 2, generator=generator) * 2 - 1
    rings = (12 * x.norm(dim=1, keepdim=True)).sin()
    return x, rings + (x[:, :1] + 0.5 * x[:, 1:] > 0).float()


# Counts


def counts(generator: torch.Generator) -> Batch:
    """Visits of places in weeks, by hidden effects."""
    chosen = torch.stack([torch.randint(n, (48,), generator=generator) for n in (50, 24)], 1)
    place, hour = fixed(50, seed=31), fixed(24, seed=32)
    rate = torch.exp(0.7 * place[chosen[:, 0]] + 0.7 * hour[chosen[:, 1]])[:, None]
    return chosen, torch.poisson(rate, generator=generator)


class Effects(nn.Module):
    """Embeddings of both categories, multiplied and added, to a log rate."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(50, 8), nn.Embedding(24, 8)])
        self.out = nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The logarithm of the rate, shaped (batch, 1)."""
        one, two = (table(x[:, i]) for i, table in enumerate(self.tables))
        return self.out(torch.cat([one, two, one * two], 1))


# A series


class Dilated(nn.Module):
    """Causal convolutions of growing reach with weight norm and gates, as WaveNet's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = (1, width, width, width)
        self.layers = nn.ModuleList(
            [weight_norm(nn.Conv1d(w, 2 * width, 2, dilation=2**i)) for i, w in enumerate(widths)]
        )
        self.out = nn.Conv1d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The next value at each place, shaped (batch, time)."""
        h = x[:, None]
        for i, layer in enumerate(self.layers):
            value, gate = layer(F.pad(h, (2**i, 0))).chunk(2, 1)
            h = value.tanh() * gate.sigmoid()
        return self.out(h)[:, 0]


def series(generator: torch.Generator) -> Batch:
    """Noisy logistic maps of several growth rates, with outliers."""
    growth = 3.6 + 0.3 * torch.rand(10, generator=generator)
    value = torch.rand(10, generator=generator)
    values = []
    for _ in range(41):
        value = growth * value * (1 - value)
        values.append(value)
    x = torch.stack(values, 1) * 4 - 2
    x = x + 0.05 * torch.randn(x.shape, generator=generator)
    return x[:, :-1], x[:, 1:]


# Classes by margins


class Maxout(nn.Module):
    """The largest of three linear functions for each unit."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.linear = nn.Linear(before, 3 * after)

    def forward(self, x: Tensor) -> Tensor:
        """Features of the layer."""
        return self.linear(x).unflatten(1, (-1, 3)).amax(2)


def rings(generator: torch.Generator) -> Batch:
    """Points of a space of seven, and which of five shells they lie in."""
    x = torch.randn(24, 7, generator=generator)
    return x, torch.bucketize(x.norm(dim=1), torch.tensor([1.9, 2.3, 2.7, 3.2]))


def hinge(outputs: Tensor, y: Tensor) -> Tensor:
    """Squared margins between the class and each other."""
    return F.multi_margin_loss(outputs, y, p=2)


# A density


def arcs(generator: torch.Generator) -> Batch:
    """A place, and a height that has two branches."""
    t = torch.rand(80, 1, generator=generator) * 4 - 2
    side = torch.randint(2, (80, 1), generator=generator) * 2.0 - 1
    return t, side * (1 + 0.5 * (2 * t).sin()) + 0.1 * torch.randn(80, 1, generator=generator)


def mixture(outputs: Tensor, y: Tensor) -> Tensor:
    """Negative log density of a mixture of four Gaussians."""
    weights, means, scales = outputs.chunk(3, 1)
    deviation = F.softplus(scales) + 0.02
    each = -0.5 * ((y - means) / deviation).square() - deviation.log() - 0.5 * math.log(2 * math.pi)
    return -torch.logsumexp(weights.log_softmax(1) + each, 1).mean()


# Digits from few numbers with noise


class Variational(nn.Module):
    """Digits through eight normal numbers; ``divergence`` is that of the last batch from the prior."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = stack(64, 56, 16, act=nn.Softplus)
        self.decoder = stack(8, 56, 64, act=nn.Softplus)
        self.divergence = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        """The digits again."""
        mean, log_variance = self.encoder(x).chunk(2, 1)
        self.divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean()
        return self.decoder(mean + (0.5 * log_variance).exp() * torch.randn_like(mean))


def same_digits(generator: torch.Generator) -> Batch:
    """Digits twice."""
    x, _ = digits()
    chosen = x[torch.randint(len(x), (60,), generator=generator)]
    return chosen, chosen


def squares(outputs: Tensor, y: Tensor) -> Tensor:
    """Sum of squared errors, half of it."""
    return 0.5 * (outputs - y).square().sum(1).mean()


# Answers of a teacher


def taught(generator: torch.Generator) -> Batch:
    """Inputs, and the twelve probabilities that a random network gives."""
    x = torch.randn(56, 30, generator=generator)
    hidden = (x @ fixed(30, 40, seed=41) / 4).tanh()
    return x, (hidden @ fixed(40, 12, seed=42) / 2).softmax(1)


def divergence(outputs: Tensor, y: Tensor) -> Tensor:
    """Of the teacher's answers from ours."""
    return F.kl_div(outputs.log_softmax(1), y, reduction="batchmean")


class Highway(nn.Module):
    """A layer whose gate lets its input pass."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)
        nn.init.constant_(self.linear.bias[width:], -1.0)

    def forward(self, x: Tensor) -> Tensor:
        """Features of the layer."""
        value, gate = self.linear(x).chunk(2, 1)
        gate = gate.sigmoid()
        return gate * value.relu() + (1 - gate) * x


# Several labels of a bag of words


def bags(generator: torch.Generator) -> Batch:
    """Twelve words of 400, and which of six themes they touch."""
    themes = (fixed(400, 6, seed=51) > 1.2).float()
    words = torch.randint(400, (72, 12), generator=generator)
    return words, (themes[words].sum(1) >= 2).float()


def focal(outputs: Tensor, y: Tensor) -> Tensor:
    """Binary cross-entropy with less weight on what is known."""
    each = F.binary_cross_entropy_with_logits(outputs, y, reduction="none")
    return ((1 - torch.exp(-each)).square() * each).mean()


def task(
    name: str, model: Callable[[], nn.Module], draw: Callable[[torch.Generator], Batch], criterion: Criterion
) -> Recipe:
    """A task whose loss is a criterion of outputs and targets, and of a variational model its divergence."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        value = criterion(model(batch[0]), batch[1])
        return value + model.divergence if isinstance(model, Variational) else value

    CRITERIA[name] = criterion
    return Recipe(Task(name, 150, model, endless(draw), loss), weight_decay=0.01)


CRITERIA: dict[str, Criterion] = {}
TRIVIAL = {"triples of digits": 1.0}  # where one place for all digits is the constant
NOISY = (
    task("better of a pair", Ranking, pairs, F.binary_cross_entropy_with_logits),
    task("three quantiles", lambda: stack(6, 72, 72, 3, act=nn.LeakyReLU), noisy_line, pinball),
    task("picture by sines", lambda: nn.Sequential(Sine(2, 48, 10.0), Sine(48, 48, 1.0), nn.Linear(48, 1)),
          places, F.l1_loss),
    task("counts", Effects, counts, F.poisson_nll_loss),
    task("series, dilated convolutions", lambda: Dilated(12), series, F.smooth_l1_loss),
    task("shells, maxout", lambda: nn.Sequential(Maxout(7, 40), Maxout(40, 40), nn.Linear(40, 5)), rings,
          hinge),
    task("mixture density", lambda: stack(1, 44, 44, 12, act=nn.Softsign), arcs, mixture),
    task("variational digits", Variational, same_digits, squares),
    task("teacher, highway", lambda: nn.Sequential(nn.Linear(30, 36), *[Highway(36) for _ in range(4)],
          nn.Linear(36, 12)), taught, divergence),
    task("bags of words", lambda: nn.Sequential(nn.EmbeddingBag(400, 32, mode="mean"), nn.Mish(),
          nn.Linear(32, 6)), bags, focal),
)  # fmt: skip


def constant_loss(recipe: Recipe, judges: list[Batch]) -> float:
    """The loss of the best constant output, found by descent: what a task's model must beat."""
    if recipe.task.name in TRIVIAL:
        return TRIVIAL[recipe.task.name]
    with torch.random.fork_rng():
        width = recipe.task.start(0)(judges[0][0]).shape[1]
    targets, criterion = torch.cat([y for _, y in judges]), CRITERIA[recipe.task.name]
    output = 0.1 * torch.randn(width, generator=torch.Generator().manual_seed(0))
    output.requires_grad_()
    optimizer = torch.optim.LBFGS([output], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = criterion(output.expand(len(targets), width), targets)
        value.backward()
        return value

    optimizer.step(closure)
    return closure().item()
