"""What every test and doctest starts from: float64, fixed seeds, one thread."""

import os
import random
import signal
from collections import Counter
from importlib.util import find_spec

import hypothesis
import numpy as np
import pytest

hypothesis.settings.register_profile("default", deadline=None, derandomize=True)
hypothesis.settings.load_profile("default")

os.environ.setdefault("MPLBACKEND", "Agg")
# Threads that wait sleep: two busy workers of pytest with two threads each would spin on two cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell starts its background jobs deaf to Ctrl-C; tests send it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Doctests import every module: one whose extra is not installed is left out.
NEEDED = {
    "integrations/lightning": "lightning",
    "integrations/transformers": "transformers",
    "report/drawing": "matplotlib",
    "report/page": "plotly",
}
collect_ignore = [f"src/curvestep/{name}.py" for name, package in NEEDED.items() if not find_spec(package)]


@pytest.fixture(autouse=True)
def known_start():
    torch = pytest.importorskip("torch")
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.sparse.check_sparse_tensor_invariants.disable()  # said aloud, or torch warns
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(params=[1, 2])
def threads(request):
    """Torch's threads; the next test starts with one again."""
    torch = pytest.importorskip("torch")
    torch.set_num_threads(request.param)
    return request.param


# Roughly the seconds that a test with this marker takes; of several the first counts.
SECONDS = {"ray": 30, "distributed": 8, "browser": 4, "slow": 4}


def pytest_collection_modifyitems(items):
    """Files that take longest first, so that no process is left alone with one at the end."""
    of_file = Counter()
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        of_file[item.path] += next((seconds for name, seconds in SECONDS.items() if name in marks), 0)
    items.sort(key=lambda item: -of_file[item.path])
