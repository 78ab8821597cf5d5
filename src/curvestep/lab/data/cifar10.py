"""CIFAR-10: 50,000 training and 10,000 test images of 3 x 32 x 32 pixels in ten classes."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from curvestep.lab.data.cifar10_files import HASHES, SOURCES, given
from curvestep.lab.data.download import DataError, Unreachable, check_hash, data_folder, fetch, notice_once
from curvestep.lab.data.images import Images, channel_statistics, load_digits

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

# The laptop subset: the first images of each class, in the order of the release. All of them are among the
# first 10,711 training images, so two of the five training files are enough.
SUBSET_TRAIN, SUBSET_TEST = 1_000, 200
SUBSET_FILES = ("data_batch_1.bin", "data_batch_2.bin", "test_batch.bin")
SUBSET_SHA256 = "b74f311509fa20551f94a772917cfa845557cef0407ab3387af3203074ecf52e"


def load_cifar10(
    *, subset: bool = True, offline: bool = False, progress: bool = True, fallback: bool = True
) -> Images:
    """CIFAR-10, or its class-balanced laptop subset of 10,000 training and 2,000 test images.

    The subset is the first 1,000 training and the first 200 test images of each class, in the order of the
    release; it is the same tensors whether read from ``cifar10-subset.npz`` or cut from the whole set.

    Args:
        subset: The laptop subset; False for all 60,000 images.
        offline: Look only where no network is needed: ``CURVESTEP_DATA`` and the cache.
        progress: Show progress bars while fetching.
        fallback: Where CIFAR-10 cannot be had, say so and return `load_digits`. False makes that an error.

    Raises:
        DataError: a file is not what it should be, or ``fallback`` is off and nothing was found.
    """
    folder = data_folder()
    npz = folder / "cifar10-subset.npz" if folder else None
    if subset and npz and npz.is_file():
        return _images(_read_subset(npz), "CIFAR-10 subset from CURVESTEP_DATA", subset=True)
    only = SUBSET_FILES if subset else tuple(HASHES)
    try:
        found = given(folder, only) if folder else None
        if found is not None:
            files, source = found, "from CURVESTEP_DATA"
        else:
            files, source = fetch("cifar10", HASHES, SOURCES, offline=offline, progress=progress, only=only)
    except Unreachable:
        if not fallback:
            raise
        notice_once(
            "CIFAR-10 cannot be had here. Using scikit-learn's digits: these are not CIFAR-10 results."
        )
        return load_digits()
    arrays = _decode(files)
    title = "CIFAR-10 subset" if subset else "CIFAR-10"
    return _images(_select(arrays) if subset else arrays, f"{title} {source}", subset=subset)


def _images(arrays: tuple[Tensor, Tensor, Tensor, Tensor], source: str, *, subset: bool) -> Images:
    train_x, train_y, test_x, test_y = arrays
    mean, std = channel_statistics(train_x)
    return Images(
        name="cifar10-subset" if subset else "cifar10",
        train_x=train_x,
        train_y=train_y,
        test_x=test_x,
        test_y=test_y,
        mean=mean,
        std=std,
        classes=CLASSES,
        source=source,
    )


def _decode(files: Mapping[str, bytes]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The release's records: one byte of class, then 3,072 bytes of red, green and blue, row by row."""
    train = np.concatenate([_records(files[name]) for name in HASHES if name in files and "test" not in name])
    test = _records(files["test_batch.bin"])
    parts = []
    for records in (train, test):
        parts.append(torch.from_numpy(records[:, 1:].reshape(-1, 3, 32, 32).copy()))
        parts.append(torch.from_numpy(records[:, 0].astype(np.int64)))
    return parts[0], parts[1], parts[2], parts[3]


def _records(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype=np.uint8).reshape(-1, 3073)


def _first_of_each_class(y: Tensor, count: int) -> Tensor:
    """Positions of the first ``count`` members of each class, ascending."""
    one_hot = torch.nn.functional.one_hot(y, len(CLASSES))
    rank = (one_hot.cumsum(0) * one_hot).sum(1)
    return (rank <= count).nonzero().flatten()


def _select(arrays: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    train_x, train_y, test_x, test_y = arrays
    train, test = _first_of_each_class(train_y, SUBSET_TRAIN), _first_of_each_class(test_y, SUBSET_TEST)
    return train_x[train], train_y[train], test_x[test], test_y[test]


def _read_subset(path: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as data:
            raw = {key: data[key] for key in ("x_train", "y_train", "x_test", "y_test")}
    except (OSError, ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} is not the subset of CIFAR-10 ({error}). Delete or replace it.") from error
    # By content: the container's bytes depend on who compressed it.
    check_hash(path, b"".join(np.ascontiguousarray(array).tobytes() for array in raw.values()), SUBSET_SHA256)
    x = {key: torch.from_numpy(raw[key].transpose(0, 3, 1, 2).copy()) for key in ("x_train", "x_test")}
    y = {key: torch.from_numpy(raw[key].astype(np.int64)) for key in ("y_train", "y_test")}
    return x["x_train"], y["y_train"], x["x_test"], y["y_test"]
