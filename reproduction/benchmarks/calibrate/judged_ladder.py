"""Every judged task of the ladder: opened once, after its rule and its constants were frozen.

Ten tasks of AdamW, ten of SGD with momentum 0.9 of which four are trained without momentum, too, and five of
Muon beside AdamW; two long ones show how far short trials can be trusted. Other architectures, data or losses
than those of all tasks before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from reproduction.benchmarks.calibrate import ladder_adamw, ladder_muon, ladder_sgd
from reproduction.benchmarks.calibrate.data import Batch, Task, classify, next_token, samples
from reproduction.benchmarks.calibrate.scheduled import (
    GPT,
    Recipe,
    images_not_trained_on,
    ptb_characters,
)
from reproduction.benchmarks.calibrate.scripts import pieces
from torch import Tensor, nn

from curvestep_reproduction.data.images import augment, load_cifar10, normalise

LONG_STEPS = 5000


def long_gpt() -> nn.Module:
    """A GPT of characters."""
    return GPT(ptb_characters("train")[1], width=96, layers=4, length=64)


def long_cnn() -> nn.Module:
    """Six convolutions with BatchNorm."""
    layers: list[nn.Module] = []
    for before, after, stride in (
        (3, 16, 1),
        (16, 16, 1),
        (16, 32, 2),
        (32, 32, 1),
        (32, 64, 2),
        (64, 64, 1),
    ):
        layers += [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def shifted(generator: torch.Generator) -> Iterator[Batch]:
    """Pictures of 16 x 16 pixels, shifted and mirrored in full size."""
    images = load_cifar10(progress=False)
    x = normalise(images, images.train_x).float()
    while True:
        chosen = torch.randint(len(x), (64,), generator=generator)
        moved = augment(x[chosen], generator)
        yield nn.functional.avg_pool2d(moved, 2), images.train_y[chosen]


_TEXT, _VALID = (pieces(lambda s=split: ptb_characters(s)[0], 8, 64) for split in ("train", "valid"))

JUDGED_LADDER = (*ladder_adamw.ADAMW, *ladder_sgd.SGD, *ladder_muon.MUON)
LONG = (
    Recipe(Task("char GPT, 5,000 steps", LONG_STEPS, long_gpt, _TEXT, next_token), _VALID,
           betas=(0.9, 0.95)),
    Recipe(Task("CNN, BatchNorm, 5,000 steps", LONG_STEPS, long_cnn, shifted, classify),
           samples(images_not_trained_on, 250), optimizers=("momentum",), weight_decay=5e-4,
           sgd_max_norm=math.inf),
)  # fmt: skip
LADDER_TRIVIAL: dict[Callable[..., Tensor], Callable[[list[Batch]], float]] = {
    **ladder_adamw.TRIVIAL,
    **ladder_sgd.TRIVIAL,
    **ladder_muon.TRIVIAL,
}
