"""The tasks on which calibration is only checked: no constant and no rule was chosen by looking at them.

Other architectures than those of the development tasks, and for half of them other data.
"""

from __future__ import annotations

import torch
from reproduction.benchmarks.calibrate.data import (
    LENGTH,
    Task,
    classify,
    manual,
    next_token,
    next_word,
    reconstruct,
    samples,
    small_cifar,
    text,
    words,
)
from torch import Tensor, nn

from curvestep_reproduction.models import LSTMModel, ResNet20


class WordGRU(nn.Module):
    """Embedding, a gated recurrent unit, scores of the next word; nothing is tied."""

    def __init__(self, vocabulary: int, *, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """Scores shaped (batch, time, words)."""
        return self.out(self.recurrent(self.embedding(x))[0])


class WordTransformer(nn.Module):
    """One causal layer of attention, layer norm last as in the original, torch's own start."""

    def __init__(self, vocabulary: int, *, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, batch_first=True)
        self.out = nn.Linear(width, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        """Scores shaped (batch, time, words)."""
        return self.out(self.layer(self.embedding(x) + self.places, src_mask=self.mask, is_causal=True))


class Patches(nn.Module):
    """An image of 16 x 16 pixels as sixteen vectors, one for each patch of 4 x 4."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, width, 4, stride=4)

    def forward(self, x: Tensor) -> Tensor:
        """Vectors shaped (batch, 16, width)."""
        return self.convolution(x).flatten(2).transpose(1, 2)


class Mixing(nn.Module):
    """A residual two-layer perceptron over one axis: across the patches, or across the features of each."""

    def __init__(self, size: int, width: int, *, across: bool) -> None:
        super().__init__()
        self.norm, self.across = nn.LayerNorm(width), across
        self.layers = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))

    def forward(self, x: Tensor) -> Tensor:
        """Shaped as it came, (batch, patches, features)."""
        y = self.norm(x)
        return x + (self.layers(y.transpose(1, 2)).transpose(1, 2) if self.across else self.layers(y))


class Mixer(nn.Module):
    """MLP-Mixer: perceptrons across patches and across features, in turn."""

    def __init__(self, *, width: int = 32) -> None:
        super().__init__()
        blocks = [Mixing(*size, across=across) for _ in range(2) for size, across in (
            ((16, width), True), ((width, width), False))]  # fmt: skip
        self.layers = nn.Sequential(Patches(width), *blocks, nn.LayerNorm(width))
        self.out = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores shaped (batch, 10)."""
        return self.out(self.layers(x).mean(1))


def _deep_relu() -> nn.Module:
    """Ten layers of 64 rectified units on the raw pixels, He's start."""
    layers: list[nn.Module] = [nn.Flatten()]
    for before in (768, *[64] * 9):
        linear = nn.Linear(before, 64)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def _convolutional_autoencoder() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(12, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.ConvTranspose2d(16, 12, 4, stride=2, padding=1), nn.ReLU(),
        nn.ConvTranspose2d(12, 3, 4, stride=2, padding=1),
    )  # fmt: skip


def _word_transformer() -> nn.Module:
    return WordTransformer(1000, width=48)


def _awd() -> nn.Module:
    published = {"dropout": 0.4, "dropout_hidden": 0.25, "dropout_input": 0.4, "dropout_embedding": 0.1}
    return LSTMModel(1000, embedding=48, hidden=64, weight_drop=0.5, **published)


HELD_OUT = (
    Task("ResNet20", 100, ResNet20, samples(small_cifar, 16), classify, 0.01),
    Task("GRU, words", 300, lambda: WordGRU(1500, width=48), text(lambda: manual(1500), 8), next_token, 0.1),
    Task("AWD-LSTM, dropout", 300, _awd, text(lambda: words(1000), 8), next_word, 0.3),
    Task("word transformer", 300, _word_transformer, text(lambda: manual(1000), 8), next_token),
    Task("MLP-Mixer", 400, Mixer, samples(small_cifar, 32), classify, 0.01),
    Task("deep ReLU MLP", 400, _deep_relu, samples(small_cifar, 32), classify, 0.01),
    Task("conv. autoencoder", 400, _convolutional_autoencoder, samples(small_cifar, 32), reconstruct, 0.1),
)
