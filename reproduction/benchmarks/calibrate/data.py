"""What a task of the calibration benchmark is, and the data that the tasks draw from.

A task is a model, an endless stream of batches and a loss. The seed fixes the start and the batches and
leaves the optimizer out, so that every method sees the same ones.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvestep_reproduction.data.corpus import load_ptb, load_topics
from curvestep_reproduction.data.images import Images, load_cifar10, load_digits, normalise

Batch = tuple[Tensor, Tensor]
Draw = Callable[[torch.Generator], Iterator[Batch]]
LENGTH = 32  # tokens in a piece of text


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
    batches: Draw
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
def characters() -> tuple[Tensor, int]:
    """The first 600,000 characters of PTB (or of the text that stands in for it) as numbers."""
    corpus = load_ptb(progress=False)
    text = " ".join(corpus.vocabulary[i] for i in corpus.train[:150_000].tolist())[:600_000]
    alphabet = sorted(set(text))
    places = {character: i for i, character in enumerate(alphabet)}
    return torch.tensor([places[character] for character in text]), len(alphabet)


@cache
def words(vocabulary: int) -> Tensor:
    """PTB's training words; those beyond the ``vocabulary`` commonest become one."""
    return load_ptb(progress=False).train.clamp(max=vocabulary - 1)


@cache
def manual(vocabulary: int) -> Tensor:
    """The words of Python's language reference; those beyond the ``vocabulary`` commonest become one."""
    return load_topics().train.clamp(max=vocabulary - 1)


def text(tokens: Callable[[], Tensor], batch: int) -> Draw:
    """Pieces of text from random places; batch first."""

    def draw(generator: torch.Generator) -> Iterator[Batch]:
        stream = tokens()
        while True:
            starts = torch.randint(len(stream) - LENGTH - 1, (batch, 1), generator=generator)
            piece = stream[starts + torch.arange(LENGTH + 1)]
            yield piece[:, :-1], piece[:, 1:]

    return draw


def next_token(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of a model that takes text batch first."""
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def next_word(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of curvestep's recurrent models, which take text time first and return a state."""
    x, y = batch
    logits = model(x.t())[0]
    return F.cross_entropy(logits.flatten(0, 1), y.t().flatten())


# Images, and tables


@cache
def small_cifar() -> Batch:
    """CIFAR-10's subset, normalised, averaged down to 16 x 16 pixels."""
    return _normalised(load_cifar10(progress=False), 2)


@cache
def digits() -> Batch:
    """scikit-learn's digits, normalised, at their true 8 x 8 pixels and one channel, as vectors."""
    x, y = _normalised(load_digits(), 4)
    return x[:, 0].flatten(1), y


@cache
def diabetes() -> Batch:
    """scikit-learn's 442 patients: ten numbers each, and the course of the disease, both standardised."""
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True)
    x, y = torch.as_tensor(x).float(), torch.as_tensor(y).float()[:, None]
    return (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()


def _normalised(images: Images, pool: int) -> Batch:
    x = normalise(images, images.train_x).float()
    return F.avg_pool2d(x, pool), images.train_y


def samples(data: Callable[[], Batch], batch: int) -> Draw:
    """Random members of a labelled set."""

    def draw(generator: torch.Generator) -> Iterator[Batch]:
        x, y = data()
        while True:
            chosen = torch.randint(len(y), (batch,), generator=generator)
            yield x[chosen], y[chosen]

    return draw


def classify(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of the labels."""
    return F.cross_entropy(model(batch[0]), batch[1])


def label_entropy(labels: Tensor) -> float:
    """The least cross-entropy of the same scores for all labels."""
    shares = labels.bincount().double() / len(labels)
    return -(shares * shares.clamp(min=1e-30).log()).sum().item()


def reconstruct(model: nn.Module, batch: Batch) -> Tensor:
    """Squared error of the input."""
    return F.mse_loss(model(batch[0]), batch[0])


def regress(model: nn.Module, batch: Batch) -> Tensor:
    """Squared error of the target."""
    return F.mse_loss(model(batch[0]), batch[1])
