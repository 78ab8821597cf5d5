"""What all tests of the integrations share."""

import gc

import pytest
import torch


@pytest.fixture(autouse=True)
def single_precision():
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module", autouse=True)
def frozen_imports():
    """A Hugging Face run ends with a garbage collection, which else goes through all that was imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
