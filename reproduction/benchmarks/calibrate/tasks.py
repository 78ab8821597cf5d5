"""Every task of the benchmark: those that constants may be chosen on, and those that judge them.

A task counts if the best of its grid beats a trivial predictor clearly and is no end of the grid; the report
says which do not. ``--part develop`` never opens a judged task.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from reproduction.benchmarks.calibrate.data import (
    Batch,
    Task,
    classify,
    digits,
    label_entropy,
    next_token,
    next_word,
    reconstruct,
    samples,
)
from reproduction.benchmarks.calibrate.judged import JUDGED, LARGE, bernoulli, matching, oscillation
from reproduction.benchmarks.calibrate.judged_ladder import JUDGED_LADDER, LADDER_TRIVIAL, LONG
from reproduction.benchmarks.calibrate.judged_sgd import (
    JUDGED_SGD,
    QUANTILES,
    huber,
    pinball,
    pinball_of,
    ranked,
)
from reproduction.benchmarks.calibrate.scheduled import BATCHES, SMALL, TRANSFORMERS, Recipe
from reproduction.benchmarks.calibrate.scripts import SCRIPTS, smoothed
from reproduction.benchmarks.calibrate.tiny import TASKS as TINY
from torch import Tensor

CLEARLY = 0.05  # of the trivial predictor's loss: below it by less, a task is dead


def _tiny(name: str, *kinds: str) -> Recipe:
    return Recipe(TINY[name], optimizers=kinds, weight_decay=0.0)


def _digits(batch: int) -> Recipe:
    plain = TINY["MLP, digits"]
    task = Task(f"MLP, digits, batch {batch}", plain.steps, plain.model, samples(digits, batch), classify)
    return Recipe(task, optimizers=("adamw", "momentum"), weight_decay=0.0)


MORE = (
    *(_tiny(name, "adamw", "momentum", "clipped") for name in ("deep ReLU MLP", "conv. autoencoder", "CNN")),
    *(_tiny(name, "adamw", "clipped") for name in ("GRU, words", "AWD-LSTM, dropout", "MLP-Mixer")),
    *(_tiny(name, "clipped") for name in ("char RNN", "10,000 words", "logistic regression", "regression")),
    _digits(8),
    _digits(128),
)

# Where the rule failed before comes first: a benchmark that is stopped early has said most.
FIRST = ("ViT", "ViT as DeiT", "recommender", "word_language_model, post-norm", "CNN, BatchNorm", "word GPT",
         "ResNet8, BatchNorm", "GRU, batches of 4", "char GPT, 4 layers")  # fmt: skip
DEVELOPMENT = sorted(
    (*SMALL, *TRANSFORMERS, *SCRIPTS, *MORE, *BATCHES), key=lambda recipe: recipe.task.name not in FIRST
)
RECIPES = {recipe.task.name: recipe for recipe in (*DEVELOPMENT, *JUDGED, *JUDGED_SGD, *JUDGED_LADDER, *LONG)}
FEW_PEAKS = (LARGE,)  # four peaks and one seed: it takes an hour


def num_parameters(recipe: Recipe) -> int:
    """Numbers that are trained."""
    return sum(p.numel() for p in recipe.task.start(0).parameters() if p.requires_grad)


def trivial_loss(recipe: Recipe, judges: list[Batch]) -> float:
    """The loss of predicting the same for every input, from the judges' own targets."""
    if recipe.task.loss in LADDER_TRIVIAL:
        return LADDER_TRIVIAL[recipe.task.loss](judges)
    x, y = (torch.cat([batch[i].flatten() for batch in judges]) for i in (0, 1))
    known: dict[Callable, Callable[[], float]] = {
        reconstruct: lambda: x.var().item(),
        matching: lambda: math.log(len(judges[0][0])),
        oscillation: lambda: 1.0,  # u = 0
        ranked: lambda: math.log(2),
        huber: lambda: F.smooth_l1_loss(y.mean().expand_as(y), y, beta=0.5).item(),
        pinball: lambda: pinball_of(y[:, None] - y.quantile(QUANTILES)).item(),
        bernoulli: lambda: _binary(torch.cat([batch[1] for batch in judges])),
        **dict.fromkeys((classify, next_token, next_word, smoothed), lambda: label_entropy(y)),
    }
    if recipe.task.loss in known:
        return known[recipe.task.loss]()
    if set(y.unique().tolist()) <= {0.0, 1.0}:
        return _binary(y[:, None])
    return y.var().item()


def _binary(bits: Tensor) -> float:
    shares = bits.double().mean(0).clamp(1e-6, 1 - 1e-6)
    return -(shares * shares.log() + (1 - shares) * (1 - shares).log()).mean().item()


def is_alive(best: float, trivial: float) -> bool:
    """Whether the best of a grid beats a trivial predictor clearly."""
    return best < trivial - CLEARLY * abs(trivial)
