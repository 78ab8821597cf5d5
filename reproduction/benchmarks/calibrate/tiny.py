"""The tasks of the calibration benchmark: small enough for hundreds of runs, different in kind.

``DEVELOPMENT`` are the tasks on which every choice of the method was made, ``HELD_OUT`` those on which it was
only checked. The last six of the development tasks were held out once, were looked at when a rule was checked
on them, and served to choose the next; the held-out tasks of today are others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from reproduction.benchmarks.calibrate.data import (
    LENGTH,
    Task,
    characters,
    classify,
    diabetes,
    digits,
    next_token,
    next_word,
    reconstruct,
    regress,
    samples,
    small_cifar,
    text,
    words,
)
from reproduction.benchmarks.calibrate.other import HELD_OUT
from torch import Tensor, nn

from curvestep_reproduction.models import LSTMModel


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


def _regression() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 50), nn.SiLU(), nn.Linear(50, 50), nn.SiLU(), nn.Linear(50, 1))


def _logistic() -> nn.Module:
    model = nn.Linear(64, 10)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def _character_task(name: str, model: Callable[[int], nn.Module], *, lowest_lr: float) -> Task:
    batches = text(lambda: characters()[0], 16)
    return Task(name, 400, lambda: model(characters()[1]), batches, next_token, lowest_lr)


def _word_lstm(vocabulary: int) -> nn.Module:
    return LSTMModel(vocabulary, embedding=48, hidden=64)


DEVELOPMENT = (
    _character_task("char LSTM", lambda n: CharacterModel(nn.LSTM, n, width=64), lowest_lr=0.1),
    _character_task("char RNN", lambda n: CharacterModel(nn.RNN, n, width=64), lowest_lr=0.1),
    _character_task(
        "char transformer", lambda n: CharacterTransformer(n, width=32, length=LENGTH), lowest_lr=0.03
    ),
    Task("CNN", 400, lambda: _cnn(False), samples(small_cifar, 32), classify),
    Task("CNN, BatchNorm", 400, lambda: _cnn(True), samples(small_cifar, 32), classify, 0.01),
    Task("10,000 words", 250, lambda: _word_lstm(10_000), text(lambda: words(10_000), 5), next_word, 0.3),
    Task("PTB word LSTM", 400, lambda: _word_lstm(1000), text(lambda: words(1000), 8), next_word, 0.1),
    Task("MLP, digits", 400, _mlp, samples(digits, 32), classify),
    Task("logistic regression", 400, _logistic, samples(digits, 32), classify),
    Task("deep MLP, poor start", 400, _deep_mlp, samples(digits, 32), classify, 0.01),
    Task("autoencoder", 400, _autoencoder, samples(digits, 32), reconstruct),
    Task("regression", 400, _regression, samples(diabetes, 16), regress, 0.01),
)

TASKS = {task.name: task for task in (*DEVELOPMENT, *HELD_OUT)}
