"""The tasks of the calibration benchmark: small enough for hundreds of runs, different in kind.

A task is a model, an endless stream of batches and a loss. The seed fixes the start and the batches and
leaves the optimizer out, so that every method sees the same ones.

``DEVELOPMENT`` are the tasks on which every choice of the method was made, ``HELD_OUT`` those on which it was
only checked.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.lab.data import Images, load_cifar10, load_digits, load_ptb, normalise
from clipwise.lab.models import LSTMModel, ResNet20

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """What is trained, and for how many gradient evaluations.

    Args:
        name: As in the table.
        steps: Budget in gradient evaluations.
        model: Makes the model, from torch's global generator.
        batches: Draws batches from the generator it is given, without end.
        loss: Of a model on a batch.
        lowest_lr: The grid has six learning rates from here on, a factor of about three apart.
    """

    name: str
    steps: int
    model: Callable[[], nn.Module]
    batches: Callable[[torch.Generator], Iterator[Batch]]
    loss: Callable[[nn.Module, Batch], Tensor]
    lowest_lr: float = 0.03

    def start(self, seed: int) -> nn.Module:
        """The model of this seed, the same for every method."""
        torch.manual_seed(_key(f"{self.name}/{seed}/model"))
        return self.model()

    def stream(self, seed: int, purpose: str) -> Iterator[Batch]:
        """The batches of this seed for one purpose (training, measuring), the same for every method."""
        return self.batches(torch.Generator().manual_seed(_key(f"{self.name}/{seed}/{purpose}")))


def _key(words: str) -> int:
    return zlib.crc32(words.encode())


# Text


@cache
def _characters() -> tuple[Tensor, int]:
    """The first 600,000 characters of PTB (or of the text that stands in for it) as numbers."""
    corpus = load_ptb(progress=False)
    text = " ".join(corpus.vocabulary[i] for i in corpus.train[:150_000].tolist())[:600_000]
    alphabet = sorted(set(text))
    places = {character: i for i, character in enumerate(alphabet)}
    return torch.tensor([places[character] for character in text]), len(alphabet)


@cache
def _words(vocabulary: int) -> Tensor:
    """PTB's training words; those beyond the ``vocabulary`` commonest become one."""
    return load_ptb(progress=False).train.clamp(max=vocabulary - 1)


def _windows(tokens: Tensor, batch: int, length: int) -> Callable[[torch.Generator], Iterator[Batch]]:
    """Pieces of text from random places; batch first."""

    def draw(generator: torch.Generator) -> Iterator[Batch]:
        while True:
            starts = torch.randint(len(tokens) - length - 1, (batch, 1), generator=generator)
            piece = tokens[starts + torch.arange(length + 1)]
            yield piece[:, :-1], piece[:, 1:]

    return draw


class CharacterModel(nn.Module):
    """Embedding, a recurrent layer, scores of the next character."""

    def __init__(self, kind: type[nn.RNNBase], characters: int, *, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, 32)
        self.recurrent = kind(32, width, batch_first=True)
        self.out = nn.Linear(width, characters)

    def forward(self, x: Tensor) -> Tensor:
        """Scores shaped (batch, time, characters)."""
        return self.out(self.recurrent(self.embedding(x))[0])


class CharacterTransformer(nn.Module):
    """Two causal layers of attention, layer norm first, learned places."""

    def __init__(self, characters: int, *, width: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        for p in self.layers.parameters():  # the copies that torch makes of the layer start alike
            if p.dim() > 1:
                nn.init.xavier_uniform_(p)
        self.out = nn.Linear(width, characters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, x: Tensor) -> Tensor:
        """Scores shaped (batch, time, characters)."""
        return self.out(self.layers(self.embedding(x) + self.places, mask=self.mask, is_causal=True))


def _next_token(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def _next_word(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    logits, _ = model(x.t())
    return F.cross_entropy(logits.flatten(0, 1), y.t().flatten())


# Images


@cache
def _small_cifar() -> Batch:
    """CIFAR-10's subset, normalised, averaged down to 16 x 16 pixels."""
    return _normalised(load_cifar10(progress=False), 2)


@cache
def _digits() -> Batch:
    """scikit-learn's digits, normalised, at their true 8 x 8 pixels and one channel, as vectors."""
    x, y = _normalised(load_digits(), 4)
    return x[:, 0].flatten(1), y


def _normalised(images: Images, pool: int) -> Batch:
    x = normalise(images, images.train_x).float()
    return F.avg_pool2d(x, pool), images.train_y


def _samples(data: Callable[[], Batch], batch: int) -> Callable[[torch.Generator], Iterator[Batch]]:
    """Random members of a labelled set."""

    def draw(generator: torch.Generator) -> Iterator[Batch]:
        x, y = data()
        while True:
            chosen = torch.randint(len(y), (batch,), generator=generator)
            yield x[chosen], y[chosen]

    return draw


def _classify(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _reconstruct(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[0])


def _cnn(normalised: bool) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 8), (8, 16), (16, 32)):
        layers.append(nn.Conv2d(before, after, 3, padding=1, bias=not normalised))
        layers += [nn.BatchNorm2d(after)] if normalised else []
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 4, 10))


def _deep_mlp() -> nn.Module:
    """Eight tanh layers whose weights are two and a half times too large."""
    widths = [64] * 8
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        linear = nn.Linear(before, after)
        nn.init.normal_(linear.weight, std=2.5 / before**0.5)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def _autoencoder() -> nn.Module:
    sizes = (64, 48, 12, 48, 64)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*[part for layer in layers for part in (layer, nn.Tanh())][:-1])


def _logistic() -> nn.Module:
    model = nn.Linear(64, 10)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


LENGTH = 32


def _text(draw_from: Callable[[], Tensor], batch: int) -> Callable[[torch.Generator], Iterator[Batch]]:
    return lambda generator: _windows(draw_from(), batch, LENGTH)(generator)


def _character_task(name: str, model: Callable[[int], nn.Module], *, lowest_lr: float) -> Task:
    batches = _text(lambda: _characters()[0], 16)
    return Task(name, 400, lambda: model(_characters()[1]), batches, _next_token, lowest_lr)


def _word_lstm() -> nn.Module:
    return LSTMModel(1000, embedding=48, hidden=64)


DEVELOPMENT = (
    _character_task("char LSTM", lambda n: CharacterModel(nn.LSTM, n, width=64), lowest_lr=0.1),
    _character_task("char RNN", lambda n: CharacterModel(nn.RNN, n, width=64), lowest_lr=0.1),
    _character_task(
        "char transformer", lambda n: CharacterTransformer(n, width=32, length=LENGTH), lowest_lr=0.03
    ),
    Task("CNN", 400, lambda: _cnn(False), _samples(_small_cifar, 32), _classify),
    Task("CNN, BatchNorm", 400, lambda: _cnn(True), _samples(_small_cifar, 32), _classify, 0.01),
)

HELD_OUT = (
    Task("PTB word LSTM", 400, _word_lstm, _text(lambda: _words(1000), 8), _next_word, 0.1),
    Task("ResNet20", 200, ResNet20, _samples(_small_cifar, 16), _classify, 0.01),
    Task("MLP, digits", 400, _mlp, _samples(_digits, 32), _classify),
    Task("logistic regression", 400, _logistic, _samples(_digits, 32), _classify),
    Task("deep MLP, poor start", 400, _deep_mlp, _samples(_digits, 32), _classify, 0.01),
    Task("autoencoder", 400, _autoencoder, _samples(_digits, 32), _reconstruct),
)

TASKS = {task.name: task for task in (*DEVELOPMENT, *HELD_OUT)}
