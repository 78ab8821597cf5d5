"""Worlds in which the optimizers must give the same steps."""

import pytest

from curvestep.optim import clip_step, device, scaled, update
from curvestep.tensors import kernel
from curvestep.tensors.vectors import device_norm


@pytest.fixture
def without_native(monkeypatch):
    """As where the package was built without a C compiler."""
    monkeypatch.setattr(kernel, "native", lambda: None)


@pytest.fixture
def with_all():
    """As here."""


@pytest.fixture
def without_fused(monkeypatch, without_native):
    """As on a device for which torch has no fused kernels either."""
    monkeypatch.setattr(update, "_get_fused_kernels_supported_devices", list)


@pytest.fixture
def on_device(monkeypatch, without_native):
    """As on an accelerator: numbers are tensors that are not read, unless a rule needs them."""
    monkeypatch.setattr(clip_step, "all_on_host", lambda groups: False)
    monkeypatch.setattr(device, "global_norm", device_norm)
    monkeypatch.setattr(device, "is_on_host", lambda p: False)


@pytest.fixture
def paths(monkeypatch):
    """The paths that updates took."""
    taken = []

    def spy(part, scale, skip=None):
        taken.append(part.path)
        update.update(part, scale, skip)

    monkeypatch.setattr(scaled, "update", spy)
    return taken
