"""A corpus: words as numbers in three splits, and contiguous streams of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from curvestep.lab.data.download import DataError

EOS = "<eos>"
UNKNOWN = "<unk>"
SPLITS = ("train", "valid", "test")
# A tag such as <unk>, a word with its inner apostrophes and hyphens, or one punctuation mark.
_WORD = re.compile(r"<\w+>|\w+(?:['’-]\w+)*|[^\w\s]")


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """Three splits of a text as token ids."""

    name: str  # short name, for file names and titles
    train: Tensor  # token ids of the training split, 1-D int64
    valid: Tensor  # token ids of the validation split, 1-D int64
    test: Tensor  # token ids of the test split, 1-D int64
    vocabulary: tuple[str, ...]  # the word of each id
    source: str  # where the text came from, in words for the report


def batchify(tokens: Tensor, batch_size: int) -> Tensor:
    """The token stream cut into ``batch_size`` contiguous streams, side by side.

    Column :math:`b` is the piece of the text from :math:`bT` to :math:`(b+1)T`, so the hidden state of a
    recurrent model carries over from one window of rows to the next. The remainder is dropped.

    Example:
        >>> batchify(torch.arange(7), 2)
        tensor([[0, 3],
                [1, 4],
                [2, 5]])
    """
    rows = len(tokens) // batch_size
    return tokens[: rows * batch_size].view(batch_size, rows).t().contiguous()


def load_corpus(path: str | Path, *, max_vocabulary: int = 10_000) -> Corpus:
    """A plain-text file as a corpus; :class:`DataError` if there is none or it is no text.

    It is lower-cased, punctuation becomes words of its own, and lines go to train, valid and test in the
    order of the text, 90 : 5 : 5. ``<eos>`` ends each line that is not empty; words other than the commonest
    become ``<unk>``.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"The corpus {path} does not exist or is no file. Give a text file.")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not readable UTF-8 text ({error}). Convert or replace it.") from error
    return from_text(path.name, text, source=f"the text in {path.name}", max_vocabulary=max_vocabulary)


def load_topics(*, max_vocabulary: int = 10_000) -> Corpus:
    """The stand-in for PTB that is always there: the language reference inside the standard library."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[key] for key in sorted(topics))
    source = "stand-in for PTB: pydoc_data.topics of the standard library"
    return from_text("topics", text, source=source, max_vocabulary=max_vocabulary)


def from_text(name: str, text: str, *, source: str, max_vocabulary: int = 10_000) -> Corpus:
    """A corpus from running text, split by lines in their order."""
    lines = [words for line in text.lower().splitlines() if (words := _WORD.findall(line))]
    held_out = len(lines) // 20
    if held_out == 0:
        raise DataError(
            f"{name} has {len(lines)} lines with words; at least 20 are needed to split it into train, "
            "valid and test."
        )
    train, valid, test = lines[: -2 * held_out], lines[-2 * held_out : -held_out], lines[-held_out:]
    splits = {"train": train, "valid": valid, "test": test}
    return encode(name, splits, source=source, max_vocabulary=max_vocabulary)


def encode(
    name: str, splits: Mapping[str, Sequence[Sequence[str]]], *, source: str, max_vocabulary: int
) -> Corpus:
    """A corpus from lines of words; ids go by frequency in the training split, ties by first appearance."""
    words = {split: _words_of(splits[split]) for split in SPLITS}
    for split, found in words.items():
        if not found:
            raise DataError(f"The {split} split of {name} is empty.")
    counted = list(dict(Counter(words["train"]).most_common()))
    unseen = {*words["valid"], *words["test"]}.difference(counted)
    if unseen and UNKNOWN not in counted:
        counted.insert(0, UNKNOWN)
    if len(counted) > max_vocabulary:
        kept = [word for word in counted if word not in (EOS, UNKNOWN)][: max_vocabulary - 2]
        counted = [UNKNOWN, EOS, *kept]
    ids = {word: i for i, word in enumerate(counted)}
    unknown = ids.get(UNKNOWN, -1)
    tokens = {split: torch.tensor([ids.get(word, unknown) for word in words[split]]) for split in SPLITS}
    return Corpus(name=name, **tokens, vocabulary=tuple(counted), source=source)


def _words_of(lines: Iterable[Sequence[str]]) -> list[str]:
    """The words of all lines, each line with its end."""
    return list(chain.from_iterable((*line, EOS) for line in filter(None, lines)))
