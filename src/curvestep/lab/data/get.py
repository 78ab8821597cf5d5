"""Fetch data sets by name: what ``curvestep data get`` calls."""

from __future__ import annotations

from collections.abc import Iterable

from curvestep._checks import check_choice
from curvestep.lab.data.cifar10 import load_cifar10
from curvestep.lab.data.ptb import load_ptb

NAMES = ("ptb", "cifar10")


def get(names: Iterable[str] = NAMES, *, offline: bool = False, progress: bool = True) -> dict[str, str]:
    """Make sure that the data sets are there, fetching what is missing.

    Args:
        names: ``"ptb"``, ``"cifar10"``.
        offline: Only check ``CURVESTEP_DATA`` and the cache.
        progress: Show progress bars.

    Returns:
        For each name, where it came from, in words.

    Raises:
        DataError: a data set cannot be had, or a file is not what it should be.
    """
    wanted = [check_choice("names", name, NAMES) for name in names]
    return {name: _load(name, offline=offline, progress=progress) for name in wanted}


def _load(name: str, *, offline: bool, progress: bool) -> str:
    if name == "ptb":
        return load_ptb(offline=offline, progress=progress, fallback=False).source
    return load_cifar10(subset=False, offline=offline, progress=progress, fallback=False).source
