"""Processes that these tests start do without torchmetrics: Fabric imports it only for its version."""

import os
import sys

import pytest


@pytest.fixture(scope="module", autouse=True)
def _without_torchmetrics(tmp_path_factory):
    folder = tmp_path_factory.mktemp("path")
    (folder / "torchmetrics.py").write_text("raise ImportError\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(folder), *sys.path])  # for processes of multiprocessing
        patch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")  # for commands
        yield
