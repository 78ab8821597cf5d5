"""Small copies of public training scripts: widths, depths, vocabularies, starts and losses of their kind."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from reproduction.benchmarks.calibrate.data import Task, classify, next_token, regress, samples, small_cifar
from reproduction.benchmarks.calibrate.scheduled import (
    GPT,
    Block,
    Recipe,
    images_not_trained_on,
    manual_characters,
    pretrained,
    ptb_characters,
    ptb_words,
)
from torch import Tensor, nn


class Layers(nn.Module):
    """Blocks between an embedding, of words or patches, and a head that is not tied to it."""

    def __init__(self, embedding: nn.Module, width: int, length: int, blocks: nn.Module, out: int) -> None:
        super().__init__()
        self.embedding, self.blocks = embedding, blocks
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, out))

    def forward(self, x: Tensor) -> Tensor:
        """Scores of every place."""
        h = self.embedding(x)
        h = h.flatten(2).transpose(1, 2) if h.dim() == 4 else h
        return self.head(self.blocks(h + self.places))


class PostNorm(nn.Module):
    """PyTorch's word_language_model: TransformerEncoder with the norm last, uniform start, dropout."""

    def __init__(self, vocabulary: int, width: int, length: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 2, 200, 0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.embedding, self.decoder = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        angles = torch.arange(length)[:, None] * torch.exp(-math.log(1e4) * torch.arange(0, width, 2) / width)
        self.register_buffer("places", torch.stack([angles.sin(), angles.cos()], 2).flatten(1))
        for p in (self.embedding.weight, self.decoder.weight):
            nn.init.uniform_(p, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the next word."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        h = self.embedding(x) * math.sqrt(self.embedding.embedding_dim) + self.places
        return self.decoder(self.encoder(F.dropout(h, 0.2, self.training), mask=mask))


class Recurrent(nn.Module):
    """An embedding, a GRU and a head."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(vocabulary, 40), nn.GRU(40, 90, batch_first=True)
        self.head = nn.Linear(90, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the next token."""
        return self.head(self.cell(self.embedding(x))[0])


class LowRank(nn.Module):
    """LoRA: a frozen linear layer beside a product of rank 4 that starts at zero."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen
        self.a = nn.Parameter(torch.randn(4, frozen.in_features) / math.sqrt(3 * frozen.in_features))
        self.b = nn.Parameter(torch.zeros(frozen.out_features, 4))

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        return self.frozen(x) + 2 * x @ self.a.t() @ self.b.t()


def lora() -> nn.Module:
    """A GPT trained on Penn Treebank, all frozen but products of low rank."""
    with torch.random.fork_rng():  # trained or kept, it leaves the start of the products the same
        model = copy.deepcopy(pretrained(0)).requires_grad_(False)
    for block in model.blocks:  # type: ignore[union-attr]
        for name in ("qkv", "up", "down"):
            setattr(block, name, LowRank(getattr(block, name)))
    return model


class Factors(nn.Module):
    """Neural collaborative filtering: a row for each user and item, of which a batch sees few."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(3000, 24), nn.Embedding(2000, 24)
        self.deep = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.head = nn.Linear(56, 1)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.01)

    def forward(self, x: Tensor) -> Tensor:
        """Log-odds that the user likes the item."""
        u, i = self.users(x[:, 0]), self.items(x[:, 1])
        return self.head(torch.cat([self.deep(torch.cat([u, i], 1)), u * i], 1)).squeeze(1)


def likes(batch: int) -> Any:
    """Users, items by popularity, and whether they like them, by four hidden factors."""
    fixed = torch.Generator().manual_seed(5)
    users, items = torch.randn(3000, 4, generator=fixed), torch.randn(2000, 4, generator=fixed)
    popular, bias = torch.arange(1, 2001) ** -0.8, torch.randn(2000, generator=fixed)

    def draw(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            u = torch.randint(3000, (batch,), generator=generator)
            i = torch.multinomial(popular, batch, True, generator=generator)
            chance = torch.sigmoid((users[u] * items[i]).sum(1) + bias[i])
            yield torch.stack([u, i], 1), torch.bernoulli(chance, generator=generator)

    return draw


def noised(batch: int) -> Any:
    """Tiny diffusion: points of a spiral with noise, sines of their places and time; the noise to tell."""
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), 0)
    scales = torch.tensor([25.0, 25.0, 1.0])[:, None] * torch.exp(-math.log(1e4) / 31 * torch.arange(32))

    def draw(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            turn = 1.5 * math.pi * (1 + 2 * torch.rand(batch, 1, generator=generator))
            time = torch.randint(100, (batch, 1), generator=generator)
            noise = torch.randn(batch, 2, generator=generator)
            points = torch.cat([turn * turn.cos(), turn * turn.sin()], 1) / 8
            x = torch.cat([kept[time].sqrt() * points + (1 - kept[time]).sqrt() * noise, time], 1)
            angles = x[:, :, None] * scales
            yield torch.cat([angles.sin(), angles.cos()], 2).flatten(1), noise

    return draw


def pieces(tokens: Callable[[], Tensor], batch: int, length: int) -> Any:
    """Pieces of text from random places, and the text one token on."""

    def draw(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        stream = tokens()
        while True:
            starts = torch.randint(len(stream) - length - 1, (batch, 1), generator=generator)
            piece = stream[starts + torch.arange(length + 1)]
            yield piece[:, :-1], piece[:, 1:]

    return draw


def smoothed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy of the mean place's scores with smoothed labels."""
    return F.cross_entropy(model(batch[0]).mean(1), batch[1], label_smoothing=0.1)


def conv(before: int, after: int) -> list[nn.Module]:
    """A convolution with BatchNorm."""
    return [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]


def blocks(width: int, layers: int, heads: int, *, causal: bool) -> nn.Module:
    """Blocks of attention and a perceptron, started as PyTorch does."""
    return nn.Sequential(*[Block(width, heads=heads, causal=causal) for _ in range(layers)])


def vision() -> nn.Module:
    """A ViT as DeiT starts it, N(0, 0.02), with patches of 2 x 2 pixels."""
    model = Layers(nn.Conv2d(3, 48, 2, 2), 48, 64, blocks(48, 4, 3, causal=False), 10)
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.trunc_normal_(p, std=0.02)
    return model


def texts(
    name: str, steps: int, model: Callable[[], nn.Module], tokens: Any, *shape: int, **options: Any
) -> Recipe:
    """A script that predicts the next token of pieces of text, by batch and length."""
    train, valid = (pieces(partial(tokens, split), *shape) for split in ("train", "valid"))
    return Recipe(Task(name, steps, model, train, next_token), valid, **options)


def letters(split: str) -> Tensor:
    """Penn Treebank's characters."""
    return ptb_characters(split)[0]


def manual(split: str) -> Tensor:
    """The characters of Python's language reference."""
    return manual_characters(split)[0]


TEST = samples(images_not_trained_on, 250)
SCRIPTS = (
    texts("nanoGPT", 500, lambda: GPT(60, width=72, layers=3, heads=3, length=48), letters, 12, 48,
          betas=(0.9, 0.99)),
    texts("word_language_model, post-norm", 300, lambda: PostNorm(4000, 80, 35),
          partial(ptb_words, vocabulary=4000), 10, 35, weight_decay=0.01),
    texts("word GPT, 6 layers, untied", 300, lambda: Layers(nn.Embedding(3000, 40), 40, 24,
          blocks(40, 6, 2, causal=True), 3000), partial(ptb_words, vocabulary=3000), 24, 24,
          betas=(0.9, 0.95)),
    texts("GRU, batches of 4", 600, lambda: Recurrent(60), manual, 4, 30, weight_decay=0.01),
    texts("LoRA, rank 4", 400, lora, manual, 16, 32, weight_decay=0.0),
    Recipe(Task("ViT as DeiT", 400, vision, samples(small_cifar, 24), smoothed), TEST, weight_decay=0.05),
    Recipe(Task("conv net, BatchNorm, dropout", 300, lambda: nn.Sequential(*conv(3, 16), *conv(16, 16),
           nn.MaxPool2d(2), *conv(16, 32), nn.MaxPool2d(2), *conv(32, 48), nn.Flatten(), nn.Dropout(0.3),
           nn.Linear(768, 10)), samples(small_cifar, 128), classify), TEST, weight_decay=0.01),
    Recipe(Task("tiny diffusion", 800, lambda: nn.Sequential(nn.Linear(192, 128), nn.GELU(),
           nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 2)), noised(256),
           regress), noised(1000), weight_decay=0.01),
    Recipe(Task("recommender", 800, Factors, likes(512), lambda model, batch:
           F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])), likes(4000), weight_decay=0.01),
)  # fmt: skip
