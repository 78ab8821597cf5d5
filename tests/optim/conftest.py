"""Worlds in which the optimizers must give the same steps."""

import pytest

from curvestep.optim import _update, device, record, scaled
from curvestep.tensors import vectors
from curvestep.tensors.vectors import device_norm


@pytest.fixture
def without_native(monkeypatch):
    """As where the package was built without a C compiler."""
    monkeypatch.setattr(vectors, "native", lambda: None)


@pytest.fixture
def with_all():
    """As here."""


@pytest.fixture
def without_fused(monkeypatch, without_native):
    """As on a device for which torch has no fused kernels either."""
    monkeypatch.setattr(_update, "_get_fused_kernels_supported_devices", list)


@pytest.fixture
def on_device(monkeypatch, without_native):
    """As on an accelerator: numbers are tensors that are not read."""
    monkeypatch.setattr(scaled, "reads_numbers", lambda bundles: False)
    monkeypatch.setattr(device, "global_norm", device_norm)


@pytest.fixture
def paths(monkeypatch):
    """The paths that updates took."""
    taken, update = [], _update.update

    def spy(part, scale):
        taken.append(part.path)
        update(part, scale)

    monkeypatch.setattr(record, "update", spy)
    return taken
