"""Judged tasks of the ladder that AdamW trains under a schedule."""

from __future__ import annotations

import math
from functools import cache

import torch
import torch.nn.functional as F
from reproduction.benchmarks.calibrate.data import (
    Batch,
    Task,
    classify,
    label_entropy,
    next_token,
    small_cifar,
)
from reproduction.benchmarks.calibrate.judged import endless, fitted
from reproduction.benchmarks.calibrate.scheduled import Recipe, images_not_trained_on, ptb_characters
from reproduction.benchmarks.calibrate.scripts import pieces
from torch import Tensor, nn

from curvestep_reproduction.data.corpus import load_topics
from curvestep_reproduction.data.images import load_cifar10, normalise

# Characters by a state-space model


class StateSpace(nn.Module):
    """A diagonal linear recurrence for each feature (S4D), run as a long convolution, then a gate."""

    def __init__(self, width: int, states: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.log_step = nn.Parameter(math.log(0.01) + math.log(30) * torch.rand(width, 1))
        self.log_decay = nn.Parameter(torch.full((width, states), math.log(0.5)))
        self.frequency = nn.Parameter(math.pi * torch.arange(states).float().expand(width, states).clone())
        self.readout = nn.Parameter(torch.randn(width, states, 2) * 0.5**0.5)
        self.skip = nn.Parameter(torch.randn(width, 1))
        self.gate = nn.Linear(width, 2 * width)

    def kernel(self, length: int) -> Tensor:
        """Responses to an impulse, shaped (width, length)."""
        pole = torch.complex(-self.log_decay.exp(), self.frequency)
        step = pole * self.log_step.exp()
        weight = torch.view_as_complex(self.readout) * (step.exp() - 1) / pole
        powers = (step[..., None] * torch.arange(length)).exp()
        return 2 * (weight[..., None] * powers).sum(1).real

    def forward(self, x: Tensor) -> Tensor:
        """Shaped as it came, (batch, time, width)."""
        length = x.shape[1]
        h = self.norm(x).transpose(1, 2)
        spectrum = torch.fft.rfft(h, 2 * length) * torch.fft.rfft(self.kernel(length), 2 * length)
        y = torch.fft.irfft(spectrum, 2 * length)[..., :length] + self.skip * h
        return x + F.glu(self.gate(F.gelu(y.transpose(1, 2))), -1)


def state_space(characters: int, width: int, layers: int) -> nn.Module:
    """Embedding, recurrences, a head that is not tied."""
    middle = [StateSpace(width, 12) for _ in range(layers)]
    return nn.Sequential(
        nn.Embedding(characters, width), *middle, nn.LayerNorm(width), nn.Linear(width, characters)
    )


# Words by experts, of which each token uses one


def manual_words(split: str, vocabulary: int) -> Tensor:
    """The words of Python's language reference; those beyond the ``vocabulary`` commonest become one."""
    return getattr(load_topics(), split).clamp(max=vocabulary - 1)


class Switch(nn.Module):
    """A perceptron of several experts; the gate sends every token to one (Switch Transformer)."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
            for _ in range(experts)
        )
        self.balance = torch.zeros(())  # of the last batch; 1 if all experts are used alike

    def forward(self, x: Tensor) -> Tensor:
        """Shaped as it came, (batch, time, width)."""
        tokens = x.flatten(0, 1)
        shares = self.gate(tokens).softmax(1)
        share, chosen = shares.max(1)
        used = F.one_hot(chosen, len(self.experts)).float().mean(0)
        self.balance = len(self.experts) * (used * shares.mean(0)).sum()
        out = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            own = (chosen == i).nonzero()[:, 0]
            out = out.index_add(0, own, share[own, None] * expert(tokens[own]))
        return out.view_as(x)


class SwitchLayer(nn.Module):
    """Causal attention, then experts, layer norm first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = nn.MultiheadAttention(width, 3, batch_first=True)
        self.experts = Switch(width, 2 * width, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Shaped as it came, (batch, time, width)."""
        h = self.norms[0](x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = x + self.attention(h, h, h, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return x + self.experts(self.norms[1](x))


class SwitchModel(nn.Module):
    """Learned places, two layers of experts, a head."""

    def __init__(self, vocabulary: int, width: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        self.layers = nn.Sequential(SwitchLayer(width), SwitchLayer(width))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the next word."""
        return self.head(self.layers(self.words(x) + self.places))

    def balance(self) -> Tensor:
        """How unevenly the experts were used, mean over the layers."""
        layers = [module.balance for module in self.modules() if isinstance(module, Switch)]
        return torch.stack(layers).mean()


def balanced_next_token(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of the next word, and a hundredth of the experts' imbalance."""
    assert isinstance(model, SwitchModel)
    return next_token(model, batch) + 0.01 * model.balance()


# Sounds, of which only the order is labelled

NUM_SOUNDS, NUM_SPOKEN, FRAMES, BANDS = 6, 5, 56, 10


@cache
def _spectra() -> Tensor:
    return torch.randn(NUM_SOUNDS + 1, BANDS, generator=torch.Generator().manual_seed(201))


def utterances(generator: torch.Generator) -> Batch:
    """Frames of five sounds with pauses, each of its own length and loudness, and the sounds in order."""
    size = 24
    sounds = torch.randint(NUM_SOUNDS, (size, NUM_SPOKEN), generator=generator)
    lengths = torch.randint(2, 6, (size, 2 * NUM_SPOKEN), generator=generator)
    ends = lengths.cumsum(1)
    place = (torch.arange(FRAMES)[None, :, None] >= ends[:, None]).sum(2)
    is_sound = (place % 2 == 1) & (place < 2 * NUM_SPOKEN)
    which = sounds.gather(1, (place // 2).clamp(max=NUM_SPOKEN - 1))
    spectrum = _spectra()[torch.where(is_sound, which, NUM_SOUNDS)]
    loudness = 0.5 + torch.rand(size, 1, 1, generator=generator)
    noise = 0.6 * torch.randn(size, FRAMES, BANDS, generator=generator)
    return loudness * spectrum + noise, sounds + 1


class Listener(nn.Module):
    """A strided convolution and a GRU in both directions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(BANDS, width, 5, stride=2, padding=2)
        self.memory = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * width, NUM_SOUNDS + 1)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of blank and sounds, shaped (batch, frames / 2, sounds + 1)."""
        h = F.relu(self.first(x.transpose(1, 2))).transpose(1, 2)
        return self.out(self.memory(h)[0])


def _ctc(log_shares: Tensor, sounds: Tensor) -> Tensor:
    frames = torch.full((len(sounds),), log_shares.shape[1])
    spoken = torch.full((len(sounds),), sounds.shape[1])
    return F.ctc_loss(log_shares.transpose(0, 1), sounds, frames, spoken)


def ctc(model: nn.Module, batch: Batch) -> Tensor:
    """Connectionist temporal classification, per sound."""
    return _ctc(model(batch[0]).log_softmax(2), batch[1])


def best_constant_ctc(judges: list[Batch]) -> float:
    """The loss of the same shares in every frame, all sounds alike, at the best share of blanks."""
    sounds = torch.cat([y for _, y in judges])
    losses = []
    for blank in torch.linspace(0.05, 0.95, 37):
        shares = torch.full((NUM_SOUNDS + 1,), (1 - blank.item()) / NUM_SOUNDS)
        shares[0] = blank
        losses.append(_ctc(shares.log().expand(len(sounds), FRAMES // 2, -1), sounds).item())
    return min(losses)


# Dates in words, to be written in digits

LETTERS = " 0123456789abcdefghijklmnopqrstuvwxyz,./-^"
MONTHS = "jan feb mar apr may jun jul aug sep oct nov dec".split()


def _spelled(day: int, month: int, year: int, style: int) -> str:
    name = MONTHS[month - 1]
    styles = (
        f"{day} {name} {year}",
        f"{name} {day}, {year}",
        f"{month}/{day}/{year % 100:02}",
        f"{day}.{month}.{year}",
    )
    return styles[style]


def _letters(texts: list[str], length: int) -> Tensor:
    return torch.tensor([[LETTERS.index(letter) for letter in text.ljust(length)] for text in texts])


def dates(generator: torch.Generator) -> Batch:
    """Dates of a century in four styles, and as ISO 8601 writes them."""
    day, month, year, style = (
        torch.randint(low, high, (40,), generator=generator).tolist()
        for low, high in ((1, 29), (1, 13), (1950, 2050), (0, 4))
    )
    parts = list(zip(day, month, year, style, strict=True))
    written = [f"^{y}-{m:02}-{d:02}" for d, m, y, _ in parts]
    return _letters([_spelled(*part) for part in parts], 12), _letters(written, 11)


class Translator(nn.Module):
    """A GRU reads, another writes and attends to what the first has read (Bahdanau)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.read_letters = nn.Embedding(len(LETTERS), 24)
        self.write_letters = nn.Embedding(len(LETTERS), 24)
        self.reader = nn.GRU(24, width, batch_first=True, bidirectional=True)
        self.writer = nn.GRUCell(24 + 2 * width, width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(2 * width, width, bias=False)
        self.score = nn.Linear(width, 1, bias=False)
        self.out = nn.Linear(3 * width, len(LETTERS))

    def forward(self, source: Tensor, before: Tensor) -> Tensor:
        """Scores of each written letter, given the ones before it."""
        read = self.reader(self.read_letters(source))[0]
        keys = self.key(read)
        state = torch.zeros(len(source), self.query.in_features)
        scores = []
        for letter in self.write_letters(before).unbind(1):
            weights = self.score((keys + self.query(state)[:, None]).tanh()).softmax(1)
            context = (weights * read).sum(1)
            state = self.writer(torch.cat([letter, context], 1), state)
            scores.append(self.out(torch.cat([state, context], 1)))
        return torch.stack(scores, 1)


def translated(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of the letters, with the true ones before them given."""
    source, written = batch
    return F.cross_entropy(model(source, written[:, :-1]).flatten(0, 1), written[:, 1:].flatten())


# Solids as clouds of points


def clouds(generator: torch.Generator) -> Batch:
    """Forty points on one of six surfaces, stretched, turned and blurred; which surface it was."""
    size, points = 32, 40
    kinds = torch.randint(6, (size,), generator=generator)
    a, b = torch.rand(2, size, points, generator=generator).unbind(0)
    angle = 2 * math.pi * a
    height = 2 * b - 1
    ring = torch.stack([angle.cos(), angle.sin()], -1)
    flat = (1 - height.square()).sqrt()
    cube = torch.randn(size, points, 3, generator=generator)
    tube = 2 * math.pi * b
    surfaces = [
        torch.cat([flat[..., None] * ring, height[..., None]], -1),
        cube / cube.abs().amax(-1, keepdim=True),
        torch.cat([ring, height[..., None]], -1),
        torch.cat([(1 - b)[..., None] * ring, height[..., None]], -1),
        torch.cat([(1 + 0.4 * tube.cos())[..., None] * ring / 1.4, 0.4 * tube.sin()[..., None]], -1),
        torch.cat([b.sqrt()[..., None] * ring, 0.1 * height[..., None]], -1),
    ]
    cloud = torch.stack(surfaces, 1)[torch.arange(size), kinds]
    stretch = 0.6 + 0.8 * torch.rand(size, 1, 3, generator=generator)
    turn = torch.linalg.qr(torch.randn(size, 3, 3, generator=generator))[0]
    return (cloud * stretch) @ turn + 0.08 * torch.randn(cloud.shape, generator=generator), kinds


class PointNet(nn.Module):
    """The same perceptron for every point, the largest of each feature, another perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.points = nn.Sequential(
            nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 2 * width), nn.ReLU(),
            nn.Linear(2 * width, 4 * width),
        )  # fmt: skip
        self.cloud = nn.Sequential(
            nn.Linear(4 * width, 2 * width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(2 * width, 6)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the surfaces."""
        return self.cloud(self.points(x).amax(1))


# Predators and prey, by a differential equation that is learnt


def _runge_kutta(field: nn.Module, state: Tensor, step: float) -> Tensor:
    one = field(state)
    two = field(state + step / 2 * one)
    three = field(state + step / 2 * two)
    four = field(state + step * three)
    return state + step / 6 * (one + 2 * two + 2 * three + four)


class Predation(nn.Module):
    """Lotka and Volterra's equations, for the logarithms of both numbers."""

    def forward(self, state: Tensor) -> Tensor:
        """The derivative in time."""
        prey, predators = state.exp().unbind(1)
        return torch.stack([1.0 - 0.7 * predators, 0.5 * prey - 0.8], 1)


def populations(generator: torch.Generator) -> Batch:
    """Logarithms of the numbers at the start, and at eight later times with noise."""
    state = 0.6 * torch.randn(32, 2, generator=generator)
    start = state
    field = Predation()
    seen = []
    for _ in range(8):
        for _ in range(4):
            state = _runge_kutta(field, state, 0.15)
        seen.append(state)
    path = torch.stack(seen, 1)
    return start, path + 0.05 * torch.randn(path.shape, generator=generator)


class NeuralODE(nn.Module):
    """A vector field of two hidden layers, integrated by Runge and Kutta's method."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.field = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2)
        )

    def forward(self, state: Tensor) -> Tensor:
        """The states at eight times."""
        seen = []
        for _ in range(8):
            state = _runge_kutta(self.field, state, 0.6)
            seen.append(state)
        return torch.stack(seen, 1)


# Burgers' equation


def places_and_times(generator: torch.Generator) -> Batch:
    """Points of [-1, 1] x [0, 1] for the equation, and numbers of [-1, 1] for start and walls."""
    inside = torch.rand(80, 2, generator=generator) * torch.tensor([2.0, 1.0]) - torch.tensor([1.0, 0.0])
    return inside, 2 * torch.rand(32, 1, generator=generator) - 1


def burgers(model: nn.Module, batch: Batch) -> Tensor:
    """Residual of u_t + u u_x = 0.05 u_xx with u(x, 0) = -sin(pi x) and u = 0 at both walls."""
    with torch.enable_grad():
        point = batch[0].detach().requires_grad_()
        u = model(point)
        (slopes,) = torch.autograd.grad(u.sum(), point, create_graph=True)
        (bends,) = torch.autograd.grad(slopes[:, 0].sum(), point, create_graph=True)
        residual = slopes[:, 1:] + u * slopes[:, :1] - 0.05 * bends[:, :1]
        x = batch[1]
        start = model(torch.cat([x, torch.zeros_like(x)], 1)) + (math.pi * x).sin()
        walls = model(torch.cat([x.sign(), x.abs()], 1))
        return residual.square().mean() + start.square().mean() + walls.square().mean()


def loss_of_no_motion(judges: list[Batch]) -> float:
    """The loss of u = 0, which misses the start alone."""
    return (math.pi * torch.cat([x for _, x in judges])).sin().square().mean().item()


# Pictures from a code book


class CodeBook(nn.Module):
    """VQ-VAE: each place's direction becomes the nearest of 48 codes; ``distance`` is that of the batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1), nn.ReLU(), nn.Conv2d(width, 2 * width, 4, 2, 1), nn.ReLU(),
            nn.Conv2d(2 * width, 8, 1),
        )  # fmt: skip
        self.codes = nn.Parameter(torch.randn(48, 8))
        self.decoder = nn.Sequential(
            nn.Conv2d(8, 2 * width, 3, padding=1), nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(width, 3, 4, 2, 1),
        )  # fmt: skip
        self.distance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        """The picture again."""
        features = F.normalize(self.encoder(x).permute(0, 2, 3, 1), dim=3)
        codes = F.normalize(self.codes, dim=1)
        nearest = (features.flatten(0, 2) @ codes.t()).argmax(1)
        code = codes[nearest].view_as(features)
        to_codes = (code - features.detach()).square().mean()
        to_features = (code.detach() - features).square().mean()
        self.distance = to_codes + 0.25 * to_features
        passed = features + (code - features).detach()
        return self.decoder(passed.permute(0, 3, 1, 2))


def coded(model: nn.Module, batch: Batch) -> Tensor:
    """Squared error of the picture, and the distance between features and codes."""
    assert isinstance(model, CodeBook)
    return F.mse_loss(model(batch[0]), batch[1]) + model.distance


def pictures(generator: torch.Generator) -> Batch:
    """Pictures twice."""
    x, _ = small_cifar()
    chosen = x[torch.randint(len(x), (32,), generator=generator)]
    return chosen, chosen


def other_pictures(generator: torch.Generator) -> Batch:
    """Pictures that are not trained on, twice."""
    x, _ = images_not_trained_on()
    chosen = x[torch.randint(len(x), (128,), generator=generator)]
    return chosen, chosen


# Two views of the same picture


def _view(x: Tensor, generator: torch.Generator) -> Tensor:
    """A random part of each picture, perhaps mirrored, brighter or darker."""
    size = len(x)
    zoom = 0.5 + 0.4 * torch.rand(size, generator=generator)
    side = 2.0 * torch.randint(2, (size,), generator=generator) - 1
    shift = (2 * torch.rand(size, 2, generator=generator) - 1) * (1 - zoom)[:, None]
    part = torch.zeros(size, 2, 3)
    part[:, 0, 0] = zoom * side
    part[:, 1, 1] = zoom
    part[:, :, 2] = shift
    cut = F.grid_sample(x, F.affine_grid(part, list(x.shape), align_corners=False), align_corners=False)
    light = 1 + 0.4 * torch.randn(size, 3, 1, 1, generator=generator)
    return light * cut + 0.4 * torch.randn(size, 3, 1, 1, generator=generator)


def views(generator: torch.Generator) -> Batch:
    """Two views of each of 40 pictures."""
    x, _ = small_cifar()
    chosen = x[torch.randint(len(x), (40,), generator=generator)]
    return _view(chosen, generator), _view(chosen, generator)


def embedder(width: int) -> nn.Module:
    """Strided convolutions with GroupNorm, and a projection."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 2, 1), nn.GroupNorm(4, width), nn.SiLU(),
        nn.Conv2d(width, 2 * width, 3, 2, 1), nn.GroupNorm(4, 2 * width), nn.SiLU(), nn.Flatten(),
        nn.Linear(32 * width, 64), nn.ReLU(), nn.Linear(64, 32),
    )  # fmt: skip


def same_picture(model: nn.Module, batch: Batch) -> Tensor:
    """SimCLR's loss: of all other views, which is of the same picture."""
    one, two = batch
    places = F.normalize(model(torch.cat([one, two])), dim=1)
    size = len(one)
    scores = 5.0 * places @ places.t()
    scores = scores.masked_fill(torch.eye(2 * size, dtype=torch.bool), -1e9)
    return F.cross_entropy(scores, torch.arange(2 * size).roll(size))


# One picture as a function of its places


@cache
def _picture() -> Tensor:
    images = load_cifar10(progress=False)
    return normalise(images, images.train_x[12:13]).float()


def colours_of_places(generator: torch.Generator) -> Batch:
    """Places of a picture in full size, and the colours there."""
    places = 2 * torch.rand(384, 2, generator=generator) - 1
    colours = F.grid_sample(_picture(), places[None, None], align_corners=False, padding_mode="border")
    return places, colours[0, :, 0].t()


class FeatureGrids(nn.Module):
    """Features at the crossings of four grids, interpolated, then a perceptron (Instant NGP)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.grids = nn.ParameterList([1e-2 * torch.randn(1, 4, n, n) for n in (4, 8, 16, 32)])
        self.layers = nn.Sequential(
            nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)
        )

    def forward(self, places: Tensor) -> Tensor:
        """Colours."""
        found = [F.grid_sample(grid, places[None, None], align_corners=True)[0, :, 0] for grid in self.grids]
        return self.layers(torch.cat(found).t())


TRAIN, VALID = (pieces(lambda s=split: ptb_characters(s)[0], 12, 56) for split in ("train", "valid"))
WORDS, VALID_WORDS = (pieces(lambda s=split: manual_words(s, 1200), 12, 24) for split in ("train", "valid"))

ADAMW = (
    Recipe(Task("characters, state-space layers", 500, lambda: state_space(ptb_characters("train")[1], 56, 2),
                TRAIN, next_token), VALID, weight_decay=0.05),
    Recipe(Task("words of the manual, one expert each", 500, lambda: SwitchModel(1200, 48, 24), WORDS,
                balanced_next_token), VALID_WORDS),
    Recipe(Task("order of sounds, CTC", 600, lambda: Listener(40), endless(utterances), ctc),
           weight_decay=0.01),
    Recipe(Task("dates, sequence to sequence", 600, lambda: Translator(40), endless(dates), translated),
           weight_decay=0.01),
    Recipe(Task("surfaces of point clouds", 1500, lambda: PointNet(40), endless(clouds), classify),
           weight_decay=0.01),
    Recipe(Task("predators and prey, neural ODE", 700, lambda: NeuralODE(40), endless(populations), fitted),
           weight_decay=0.0),
    Recipe(Task("Burgers' equation, physics-informed", 2000, lambda: nn.Sequential(nn.Linear(2, 40),
                nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1)),
                endless(places_and_times), burgers), weight_decay=0.0),
    Recipe(Task("pictures from a code book", 900, lambda: CodeBook(24), endless(pictures), coded),
           endless(other_pictures), weight_decay=0.01),
    Recipe(Task("two views of a picture", 1200, lambda: embedder(20), endless(views), same_picture),
           weight_decay=0.01),
    Recipe(Task("one picture, grids of features", 2000, lambda: FeatureGrids(64), endless(colours_of_places),
                fitted), weight_decay=0.0),
)  # fmt: skip

TRIVIAL = {
    ctc: best_constant_ctc,
    burgers: loss_of_no_motion,
    same_picture: lambda judges: math.log(2 * len(judges[0][0]) - 1),
    balanced_next_token: lambda judges: label_entropy(torch.cat([y.flatten() for _, y in judges])),
    translated: lambda judges: label_entropy(torch.cat([y[:, 1:].flatten() for _, y in judges])),
    coded: lambda judges: torch.cat([y for _, y in judges]).var().item(),
}
