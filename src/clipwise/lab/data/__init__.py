"""The data sets: found or fetched, verified by content hash, kept in the platform's cache folder.

Looked at in this order: the folder in ``CLIPWISE_DATA``, the cache, the official source, the mirror in a
package registry, and last a stand-in that is always there (and says so).
"""

from clipwise.lab.data.cifar10 import load_cifar10 as load_cifar10
from clipwise.lab.data.corpus import (
    Corpus as Corpus,
    batchify as batchify,
    load_corpus as load_corpus,
    load_topics as load_topics,
)
from clipwise.lab.data.fetch import DataError as DataError, cache_folder as cache_folder
from clipwise.lab.data.get import get as get
from clipwise.lab.data.images import (
    Images as Images,
    augment as augment,
    load_digits as load_digits,
    normalise as normalise,
)
from clipwise.lab.data.ptb import load_ptb as load_ptb
