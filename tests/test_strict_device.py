"""Probe and calibration on the strict device: the numbers of the CPU, and an unchanged run."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.strict import strict_device

ROOT = Path(__file__).parents[1]


def test_probe_and_calibration_on_the_device():
    with strict_device():
        pass  # skips where it cannot be built
    # In a process of its own: autograd counts the devices at its first backward pass, once.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/support/on_device.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.fail(done.stdout[-4000:] + done.stderr[-1000:])
