"""Recipes and data small enough that a test trains in a second."""

import os
import random
import signal
from unittest import mock

from curvestep_reproduction.recipes import get_recipe, with_fields
from curvestep_reproduction.training.loop import train


def write_text(path, *, words=40, lines=400, seed=0):
    """A text with some order in it: each word mostly decides the next."""
    draw = random.Random(seed)
    follows = {word: [draw.randrange(words) for _ in range(3)] for word in range(words)}
    rows = []
    for _ in range(lines):
        word = draw.randrange(words)
        row = []
        for _ in range(12):
            row.append(f"w{word}")
            word = draw.choice(follows[word])
        rows.append(" ".join(row))
    path.write_text("\n".join(rows) + "\n")
    return str(path)


def small_language(folder, **fields):
    """A two-layer LSTM of a few thousand parameters on such a text."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "text.txt"
    if not path.exists():
        write_text(path)
    small = {
        "corpus": str(path), "embedding": 8, "hidden": 10, "batch_size": 4, "bptt": 6, "steps": 20,
        "eval_size": 0, "lr": 1.0, "max_norm": 0.25, "probe_every": 5,
    }  # fmt: skip
    return with_fields(get_recipe("ptb-lstm", **small), **fields)


def small_images(**fields):
    """ResNet20 on scikit-learn's digits."""
    small = {
        "images": "digits",
        "batch_size": 8,
        "steps": 4,
        "eval_size": 40,
        "num_images": 80,
        "probe_every": 2,
    }
    return with_fields(get_recipe("cifar-resnet20", **small), **fields)


def interrupt_at(step, recipe, folder, kind=signal.SIGINT):
    """Train until the row of one step is written, then do as Ctrl-C does, or as `kill`."""

    def update(progress, now, **numbers):
        if now == step:
            os.kill(os.getpid(), kind)

    with mock.patch("curvestep_reproduction.progress.Progress.update", update):
        result = train(recipe, folder, resume=True, progress=False)
    assert (result.status, result.step) == ("interrupted", step)


def assert_same_rows(one, other):
    """Two run folders have the same metrics and measurements, byte for byte."""
    for name in ("metrics.jsonl", "trace.jsonl"):
        left, right = one / name, other / name
        assert left.exists() == right.exists()
        assert not left.exists() or left.read_bytes() == right.read_bytes(), name
