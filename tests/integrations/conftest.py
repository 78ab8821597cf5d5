"""What all tests of the integrations share."""

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def frozen_imports():
    """A Hugging Face run ends with a garbage collection, which else goes through all that was imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
