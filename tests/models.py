"""Tiny networks, batches and losses that tests share; seed before the call."""

import io
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn


def mlp(*sizes, dropout=0.0, batchnorm=False):
    """A perceptron with tanh; BatchNorm and dropout before each tanh. Without sizes: 6, 8, 3."""
    sizes = sizes or (6, 8, 3)
    layers = []
    for inputs, width in pairwise(sizes[:-1]):
        layers.append(nn.Linear(inputs, width))
        if batchnorm:
            layers.append(nn.BatchNorm1d(width))
        if dropout:
            layers.append(nn.Dropout(dropout))
        layers.append(nn.Tanh())
    return nn.Sequential(*layers, nn.Linear(*sizes[-2:]))


def convnet():
    """A convolution with BatchNorm for images of shape (2, 6, 6) in three classes."""
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def transformer(words=11, *, layers=1, dropout=0.1):
    """An encoder over tokens of shape (batch, time); logits of shape (batch, time, words)."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True)
    return nn.Sequential(
        nn.Embedding(words, 8),
        nn.TransformerEncoder(layer, layers, enable_nested_tensor=False),
        nn.Linear(8, words),
    )


class Language(nn.Module):
    """Two LSTM layers with dropout between them and tied weights; the caller carries the hidden state."""

    def __init__(self, words=13):
        super().__init__()
        self.embedding = nn.Embedding(words, 6)
        self.lstm = nn.LSTM(6, 6, num_layers=2, dropout=0.3)
        self.decoder = nn.Linear(6, words)
        self.decoder.weight = self.embedding.weight

    def forward(self, x, hidden=None):
        out, hidden = self.lstm(self.embedding(x), hidden)
        return self.decoder(out), hidden


class CarriedLanguage(Language):
    """Keeps its hidden state between batches itself, as an attribute."""

    def __init__(self, words=11):
        super().__init__(words)
        self.hidden = None

    def forward(self, x):
        out, hidden = super().forward(x, self.hidden)
        self.hidden = tuple(h.detach() for h in hidden)
        return out


class Quadratic(nn.Module):
    """Half of zᵀHz, with z in two parameters beside an empty and an unused one."""

    def __init__(self):
        super().__init__()
        H = torch.randn(7, 7)
        self.H = H + H.T
        self.x, self.y = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(4))
        self.nothing, self.unused = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.ones(2))

    @property
    def z(self):
        return torch.cat([self.x, self.y, self.nothing])

    def forward(self):
        return 0.5 * self.z @ self.H @ self.z


class Mixed(nn.Module):
    """Tied, frozen, unused and sparse-gradient parameters; tokens below 11 to logits."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.rows = nn.Embedding(11, 4, sparse=True)
        self.decoder = nn.Linear(4, 11, bias=False)
        self.decoder.weight = self.embedding.weight
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.decoder(torch.tanh(self.frozen(self.embedding(x) * self.rows(x))))


def reloaded(state):
    """What a checkpoint of the state gives back to a careful reader."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def labelled(size=5, inputs=6, classes=3):
    """One batch of random vectors with random labels."""
    return torch.randn(size, inputs), torch.randint(classes, (size,))


def batches(count, size=16, inputs=6, classes=3):
    """So many batches of :func:`labelled`."""
    return [labelled(size, inputs, classes) for _ in range(count)]


def batch_loss(model):
    """The cross entropy of a batch, as ``calibrate`` asks for it."""
    return lambda batch: F.cross_entropy(model(batch[0]), batch[1])


def classifier(model=None, *, size=5, dropout=0.0):
    """A model, by default :func:`mlp`, and a closure of its loss on one fixed batch."""
    model = model or mlp(dropout=dropout)
    x, y = labelled(size)
    return model, lambda: F.cross_entropy(model(x), y)
