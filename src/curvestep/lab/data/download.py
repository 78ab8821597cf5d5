"""Bring the files of a data set into the cache: one at a time, verified, replaced atomically."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pooch
from filelock import FileLock, Timeout
from rich.console import Console
from rich.text import Text

from curvestep.lab.files import write_atomically


class DataError(ValueError):
    """A data set that is missing, broken or not what it claims to be; the message is one clear line."""


class Unreachable(DataError):
    """A source that did not answer; the next one may."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the files of a data set can come from.

    Args:
        title: Words for the report, for example "the official archive".
        read: Called with ``progress``; yields the name and the bytes of each file. Raises `Unreachable`
            where the next source should be tried.
    """

    title: str
    read: Callable[[bool], Iterable[tuple[str, bytes]]]


def data_folder() -> Path | None:
    """The folder in the environment variable ``CURVESTEP_DATA``, or None where it is not set."""
    value = os.environ.get("CURVESTEP_DATA")
    if not value:
        return None
    folder = Path(value)
    if not folder.is_dir():
        raise DataError(f"`CURVESTEP_DATA` must name a folder, got {value!r}. Unset it to use the cache.")
    return folder


def cache_folder() -> Path:
    """Where fetched data sets are kept: ``CURVESTEP_CACHE``, or the platform's cache folder."""
    return Path(os.environ.get("CURVESTEP_CACHE") or pooch.os_cache("curvestep"))


def notice(text: str) -> None:
    """Tell the user one line, on standard error."""
    Console(stderr=True, soft_wrap=True).print(Text.assemble(("curvestep data: ", "dim"), text))


@cache
def notice_once(text: str) -> None:
    """Tell the user one line, however many of this process's runs have reason to."""
    notice(text)


def sha256(data: bytes) -> str:
    """SHA-256 of ``data``, in hexadecimal.

    Example:
        >>> sha256(b"")[:16]
        'e3b0c44298fc1c14'
    """
    return hashlib.sha256(data).hexdigest()


def check_hash(file: str | Path, data: bytes, expected: str) -> bytes:
    """``data`` if its SHA-256 is ``expected``; the error names file, expected and found."""
    found = sha256(data)
    if found != expected:
        raise DataError(
            f"{file} is not the file it should be: expected sha256 {expected}, found {found}. "
            "Delete or replace it."
        )
    return data


def read_verified(folder: Path, hashes: Mapping[str, str]) -> dict[str, bytes] | None:
    """The files in ``folder`` by name, all of them and all verified; None where one is not there."""
    paths = {name: folder / name for name in hashes}
    if not all(path.is_file() for path in paths.values()):
        return None
    return {name: check_hash(path, read(path), hashes[name]) for name, path in paths.items()}


def read(path: Path) -> bytes:
    """The bytes of a file that is there."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror or error}.") from error


def fetch(
    name: str,
    hashes: Mapping[str, str],
    sources: Iterable[Source],
    *,
    offline: bool = False,
    progress: bool = True,
    only: Iterable[str] | None = None,
) -> tuple[dict[str, bytes], str]:
    """Files of the data set ``name`` from the cache, filled from the first source that answers.

    One process fetches at a time (file lock); the others wait and then read what it left. A broken file in
    the cache is fetched again. Files appear in the cache whole and verified or not at all.

    Args:
        name: Folder inside the cache.
        hashes: SHA-256 of each file of the data set, by file name.
        sources: Tried in order; a source that raises `Unreachable` passes to the next with one line.
        offline: Use the cache alone.
        progress: Show progress bars.
        only: File names to return; all of them by default.

    Returns:
        The bytes by file name, and words that say where they came from.

    Raises:
        Unreachable: no source answered.
        DataError: a file has the wrong hash, or the cache cannot be written.
    """
    wanted = {key: hashes[key] for key in (only or hashes)}
    folder = cache_folder() / name
    found = _cached(folder, wanted)
    if found is None and offline:
        raise Unreachable(f"{name} is not in the cache {folder}, and the network is not to be used.")
    if found is None:
        with _locked(folder):
            found = _cached(folder, wanted) or _fill(name, folder, hashes, wanted, sources, progress)
    return found, _origin(folder)


def _cached(folder: Path, hashes: Mapping[str, str]) -> dict[str, bytes] | None:
    try:
        return read_verified(folder, hashes)
    except DataError as error:
        notice(f"{error} Fetching it again.")
        return None


def _fill(
    name: str,
    folder: Path,
    hashes: Mapping[str, str],
    wanted: Mapping[str, str],
    sources: Iterable[Source],
    progress: bool,
) -> dict[str, bytes]:
    reasons = []
    for source in sources:
        try:
            with writing(folder):
                _clear(folder)
                for file, data in source.read(progress):
                    write_atomically(
                        folder / file, check_hash(f"{file} from the {source.title}", data, hashes[file])
                    )
                write_atomically(folder / "origin.txt", source.title.encode())
        except Unreachable as error:
            reasons.append(str(error))
            notice(f"{name}: {error}")
            continue
        notice(f"{name}: fetched from the {source.title} into {folder}")
        found = read_verified(folder, wanted)
        assert found is not None, f"{source.title} left out a file of {name}"
        return found
    raise Unreachable(f"{name} could not be fetched. {' '.join(reasons)}")


def _clear(folder: Path) -> None:
    """Remove what a killed process left. Only the holder of the lock writes here."""
    for path in folder.glob(".*.part"):
        path.unlink()
    shutil.rmtree(download_folder(folder.name), ignore_errors=True)


def download_folder(name: str) -> Path:
    """Where the archives of a data set are while they are fetched."""
    return cache_folder() / name / "download"


def _origin(folder: Path) -> str:
    file = folder / "origin.txt"
    return f"from the {file.read_text()}" if file.is_file() else "from the cache"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock")
        try:
            lock.acquire(timeout=1)
        except Timeout:
            notice(f"another process is fetching into {folder}; waiting for it")
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn a disk that is full or not writable into one clear line."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"Cannot write to the cache {folder}: {error.strerror or error}. "
            "Set CURVESTEP_CACHE to a folder with space that can be written."
        ) from error
