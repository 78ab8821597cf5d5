r"""The two tasks of the paper: what a model is, what a batch is, what its loss is.

A task answers the training loop's questions and keeps no state: batch :math:`k` is a function of the recipe
and of :math:`k`, so a resumed run needs no data position but its step.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from curvestep import representative_batches
from curvestep_reproduction.data.corpus import Corpus, batchify, load_corpus, load_ptb, load_topics
from curvestep_reproduction.data.download import Unreachable
from curvestep_reproduction.data.images import (
    Images,
    augment,
    first_of_each_class,
    load_cifar10,
    load_digits,
    normalise,
)
from curvestep_reproduction.models import (
    MODELS,
    GlobalBatchNorm2d,
    State,
    activation_penalty,
    random_bptt_length,
)
from curvestep_reproduction.progress import print_notice_once
from curvestep_reproduction.recipes import ImageRecipe, LanguageRecipe, Recipe

EVAL_STREAMS = 10  # streams of text, side by side, in an evaluation
EVAL_IMAGES = 500
PIECE_WORDS = 20  # of each stream in a short piece; reproduction/benchmarks/authors.py chose it


def seed_of(recipe: Recipe, purpose: str) -> int:
    """A seed for one purpose. The optimizer is left out: all of them see the same start and batches."""
    return zlib.crc32(f"{recipe.seed}/{recipe.problem}/{purpose}".encode())


def generator(recipe: Recipe, purpose: str) -> torch.Generator:
    """A generator for one purpose, from :func:`seed_of`."""
    return torch.Generator().manual_seed(seed_of(recipe, purpose))


def detach_state(state: State | None) -> State | None:
    """A recurrent state, cut off from its past."""
    if state is None:
        return None
    return tuple((hidden.detach(), cell.detach()) for hidden, cell in state)


def part_of_batch(recipe: Recipe, rank: int, world_size: int) -> slice:
    """The part of every batch that process ``rank`` of ``world_size`` takes."""
    if recipe.batch_size % world_size:
        raise ValueError(
            f"`batch_size` must be a multiple of the number of devices, {world_size}, "
            f"got {recipe.batch_size}."
        )
    share = recipe.batch_size // world_size
    return slice(rank * share, (rank + 1) * share)


def load_data(recipe: Recipe, *, offline: bool = False, progress: bool = True) -> Corpus | Images:
    """The data that a recipe names; a stand-in where they are not available, which is said once."""
    load: Any = {LanguageRecipe: _load_corpus, ImageRecipe: _load_images}[type(recipe)]
    return load(recipe, offline=offline, progress=progress)


def _load_images(recipe: ImageRecipe, **where: bool) -> Images:
    if recipe.images == "digits":
        return load_digits()
    try:
        return load_cifar10(subset=recipe.images == "cifar10-subset", **where)
    except Unreachable:
        print_notice_once(
            "CIFAR-10 is not available (no cache, no network). Using scikit-learn's digits: these are not "
            "CIFAR-10 results."
        )
        return load_digits()


def _load_corpus(recipe: LanguageRecipe, **where: bool) -> Corpus:
    name = recipe.corpus
    size = recipe.vocabulary or 10_000
    if name not in ("ptb", "topics"):
        return load_corpus(name, max_vocabulary=size)
    if name == "ptb":
        try:
            return load_ptb(max_vocabulary=size, **where)
        except Unreachable:
            print_notice_once(
                "Penn Treebank is not available (no cache, no network). Using the standard library's own "
                "text: these are not PTB results."
            )
    return load_topics(max_vocabulary=size)


class LanguageTask:
    """Next-word prediction over contiguous streams, with truncated backpropagation."""

    metric = "perplexity"  # the paper's unit
    splits = ("valid", "test")  # held-out data; the first is evaluated on the way, all at the end

    def __init__(self, recipe: LanguageRecipe, corpus: Corpus, *, rank: int = 0, world_size: int = 1) -> None:
        self.recipe = recipe
        self.corpus = corpus
        self.mine = part_of_batch(recipe, rank, world_size)
        self.data_name = corpus.name
        self.data_source = corpus.source
        words = corpus.train[: recipe.num_words or None]
        if len(words) < 2 * recipe.batch_size:
            raise ValueError(
                f"There are {len(words):,} words to train on: too few for `batch_size` {recipe.batch_size}."
            )
        self.streams = batchify(words, recipe.batch_size)
        for split in self.splits:
            count = len(self._held_out(split))
            if count < 2:
                raise ValueError(
                    f"The {split} part of the corpus, {corpus.source}, has {count} words to evaluate on: too "
                    "few. Use a longer text, or a larger `eval_size`."
                )
        self._epochs = _Epochs(self._pieces)

    def _held_out(self, split: str) -> Tensor:
        return getattr(self.corpus, split)[: self.recipe.eval_size or None]

    def build(self) -> nn.Module:
        """A new language model, from the recipe's seed."""
        make: Any = MODELS[self.recipe.model]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(self.recipe, "start"))
            return make(len(self.corpus.vocabulary), **self.recipe.options)

    def num_steps(self) -> int:
        """Steps of the whole run: given, or the pieces of all epochs."""
        return self.recipe.steps or sum(len(self._pieces(epoch)) for epoch in range(self.recipe.epochs))

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """This process's words of step ``step``, and those that follow them, shaped (time, streams)."""
        start, length = self._epochs.at(step)
        rows = self.streams[:, self.mine]
        return rows[start : start + length], rows[start + 1 : start + 1 + length]

    def starts_over(self, step: int) -> bool:
        """Whether the recurrent state begins anew: at the beginning of each pass over the text."""
        return self._epochs.at(step)[0] == 0

    def lr_factor(self, step: int) -> float:
        """Factor on lr: length of the piece over ``bptt`` where lengths vary: words weigh the same."""
        return self._epochs.at(step)[1] / self.recipe.bptt if self.recipe.variable_bptt else 1.0

    def loss(self, model: nn.Module, batch: tuple[Any, ...], state: Any = None) -> tuple[Tensor, Any]:
        """Mean cross-entropy, with the recipe's penalties, and the state, cut off from its past."""
        words, following = batch
        recipe = self.recipe
        weights = {"alpha": recipe.activation_penalty, "beta": recipe.temporal_penalty}
        logits, state, activations = model(words, state)
        loss = F.cross_entropy(logits.reshape(following.numel(), -1), following.reshape(-1))
        if any(weights.values()):
            loss = loss + activation_penalty(activations, **weights)
        return loss, detach_state(state)

    @torch.no_grad()
    def evaluate(
        self, model: nn.Module, split: str, device: torch.device, *, share: float = 1.0
    ) -> dict[str, float]:
        """Mean cross-entropy over the split, or its first ``eval_size`` words, and its exponential.

        A ``share`` below 1 takes that part of these words, the first.
        """
        tokens = self._held_out(split)
        tokens = tokens[: max(2, math.ceil(share * len(tokens)))]
        streams = batchify(tokens, min(EVAL_STREAMS, len(tokens) // 2)).to(device)
        total = 0.0
        state = None
        for start in range(0, len(streams) - 1, self.recipe.bptt):
            stop = min(start + self.recipe.bptt, len(streams) - 1)
            logits, state, _ = model(streams[start:stop], state)
            target = streams[start + 1 : stop + 1].reshape(-1)
            total += float(F.cross_entropy(logits.reshape(len(target), -1), target, reduction="sum"))
        loss = total / streams[1:].numel()
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}

    def oracle_batches(self, share: float) -> list[tuple[Tensor, Tensor]]:
        """The first ``share`` of every stream: so many places of the text as there are streams."""
        rows = self.streams[: max(2, math.ceil(share * len(self.streams))), self.mine]
        return [
            (rows[start : start + length], rows[start + 1 : start + 1 + length])
            for start, length in _fixed_pieces(len(rows), self.recipe.bptt)
        ]

    def stacked_pieces(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Short pieces that represent the text, side by side: words before each, its own, and the following.

        Each is shaped (time, pieces times streams).
        """
        rows = self.streams[:, self.mine]
        starts = range(PIECE_WORDS, len(rows) - PIECE_WORDS, PIECE_WORDS)
        pieces = [self.streams[start + 1 : start + 1 + PIECE_WORDS] for start in starts]
        chosen = [starts[i] for i in representative_batches(pieces, count, labels=lambda piece: piece)]

        def side_by_side(offset: int) -> Tensor:
            return torch.cat([rows[start + offset : start + offset + PIECE_WORDS] for start in chosen], dim=1)

        return side_by_side(-PIECE_WORDS), side_by_side(0), side_by_side(1)

    def loss_of_pieces(self, model: nn.Module, pieces: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Mean loss of :meth:`stacked_pieces`, from the state that the words before each leave."""
        before, words, following = pieces
        with torch.no_grad():
            state = model(before)[1]
        return self.loss(model, (words, following), detach_state(state))[0]

    def _pieces(self, epoch: int) -> list[tuple[int, int]]:
        """Start and length of every piece of one pass."""
        if not self.recipe.variable_bptt:
            return _fixed_pieces(len(self.streams), self.recipe.bptt)
        source = generator(self.recipe, f"pieces/{epoch}")
        return random_cuts(len(self.streams) - 1, self.recipe.bptt, source)


class ImageTask:
    """Classification of images, each epoch in a new order, with random crops and flips."""

    metric = "accuracy"
    splits = ("test",)

    def __init__(self, recipe: ImageRecipe, images: Images, *, rank: int = 0, world_size: int = 1) -> None:
        self.recipe = recipe
        self.images = images
        self.world_size = world_size
        self.mine = part_of_batch(recipe, rank, world_size)
        self.data_name = images.name
        self.data_source = images.source
        self.x, self.y = _balanced(images, recipe.num_images)
        if len(self.y) < recipe.batch_size:
            raise ValueError(
                f"`batch_size` must be at most the {len(self.y)} images, got {recipe.batch_size}."
            )
        self._epochs = _Epochs(self._order)
        # oneDNN has no float64 kernels, so there the layout brings nothing.
        self._layout = torch.contiguous_format if recipe.precision == "64-true" else torch.channels_last

    def build(self) -> nn.Module:
        """A new residual network, from the recipe's seed."""
        make: Any = MODELS[self.recipe.model]
        norm = GlobalBatchNorm2d if self.world_size > 1 else nn.BatchNorm2d
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(self.recipe, "start"))
            model = make(norm=norm, **self.recipe.options)
        return model.to(memory_format=self._layout)  # pyright: ignore[reportCallIssue] (torch's own overloads)

    def num_steps(self) -> int:
        """Steps of the whole run: given, or the whole batches of all epochs."""
        return self.recipe.steps or self.recipe.epochs * (len(self.y) // self.recipe.batch_size)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """This process's part of the normalised images of step ``step``, and their classes."""
        chosen = self._epochs.at(step)
        # The whole batch on every process, so that each image gets the same crop.
        x = augment(self.x[chosen], generator(self.recipe, f"augment/{step}"))
        return self._ready(x[self.mine]), self.y[chosen][self.mine]

    def starts_over(self, step: int) -> bool:
        """There is no recurrent state."""
        return False

    def lr_factor(self, step: int) -> float:
        """All batches are of one size."""
        return 1.0

    def loss(self, model: nn.Module, batch: tuple[Any, ...], state: Any = None) -> tuple[Tensor, Any]:
        """Mean cross-entropy."""
        x, y = batch
        return F.cross_entropy(model(x), y), None

    @torch.no_grad()
    def evaluate(
        self, model: nn.Module, split: str, device: torch.device, *, share: float = 1.0
    ) -> dict[str, float]:
        """Mean cross-entropy and accuracy in per cent on the test images, or the first ``share`` of them."""
        size = math.ceil(share * (self.recipe.eval_size or len(self.images.test_y)))
        images = self.images.test_x[:size]
        classes = self.images.test_y[:size]
        total = 0.0
        right = 0
        for some, y in zip(images.split(EVAL_IMAGES), classes.to(device).split(EVAL_IMAGES), strict=True):
            logits = model(self._ready(some).to(device))
            total += float(F.cross_entropy(logits, y, reduction="sum"))
            right += int((logits.argmax(1) == y).sum())
        return {"loss": total / len(classes), "accuracy": 100 * right / len(classes)}

    def oracle_batches(self, share: float) -> list[tuple[Tensor, Tensor]]:
        """The same share of every class, without augmentation, in batches; the last one may be smaller.

        Every process takes as many images of a batch: what does not divide by their number is left out.
        """
        x, y = _balanced(self.images, math.ceil(share * len(self.y)))
        size = self.recipe.batch_size
        rank = self.mine.start * self.world_size // size
        batches = []
        for images, classes in zip(x.split(size), y.split(size), strict=True):
            count = len(classes) // self.world_size
            mine = slice(rank * count, (rank + 1) * count)
            if count:
                batches.append((self._ready(images[mine]), classes[mine]))
        return batches

    def _ready(self, x: Tensor) -> Tensor:
        x = normalise(self.images, x)
        if self.recipe.pooling > 1:  # a mean over one pixel may round
            x = F.avg_pool2d(x, self.recipe.pooling)
        return x.contiguous(memory_format=self._layout)

    def _order(self, epoch: int) -> list[Tensor]:
        order = torch.randperm(len(self.y), generator=generator(self.recipe, f"order/{epoch}"))
        size = self.recipe.batch_size
        return [order[i : i + size] for i in range(0, len(order) - size + 1, size)]


Task = LanguageTask | ImageTask  # the training loop asks the same of both


def make_task(recipe: Recipe, *, rank: int = 0, world_size: int = 1, offline: bool = False) -> Task:
    """The task of ``recipe``, with its data."""
    make: Any = {LanguageRecipe: LanguageTask, ImageRecipe: ImageTask}[type(recipe)]
    return make(recipe, load_data(recipe, offline=offline), rank=rank, world_size=world_size)


class _Epochs:
    """The items of one epoch after another, found by step."""

    def __init__(self, items_of: Callable[[int], list[Any]]) -> None:
        self._items_of = items_of
        self._epoch = 0
        self._first = 0
        self._items = items_of(0)

    def at(self, step: int) -> Any:
        """The item of step ``step``."""
        if step < self._first:
            self._epoch = 0
            self._first = 0
            self._items = self._items_of(0)
        while step >= self._first + len(self._items):
            self._first += len(self._items)
            self._epoch += 1
            self._items = self._items_of(self._epoch)
        return self._items[step - self._first]


def random_cuts(num_rows: int, bptt: int, source: torch.Generator) -> list[tuple[int, int]]:
    """Start and length of pieces as AWD-LSTM draws them: 70 words give or take 5, now and then half of it."""
    pieces = []
    start = 0
    while start < num_rows:
        pieces.append((start, min(random_bptt_length(source, bptt), num_rows - start)))
        start = sum(pieces[-1])
    return pieces


def _fixed_pieces(num_rows: int, bptt: int) -> list[tuple[int, int]]:
    return [(start, min(bptt, num_rows - 1 - start)) for start in range(0, num_rows - 1, bptt)]


def _balanced(images: Images, count: int) -> tuple[Tensor, Tensor]:
    """The first images of each class, as many of each, at least ``count`` in all; all of them if 0."""
    if count == 0 or count >= len(images.train_y):
        return images.train_x, images.train_y
    kept = first_of_each_class(images.train_y, math.ceil(count / len(images.classes)))
    return images.train_x[kept], images.train_y[kept]
