"""Checkpoints from which a run goes on bit for bit.

A checkpoint holds the parameters, buffers and optimizer, the states of the random generators, the recurrent
state, and the length that each row file had: on resume the files are cut there, so that no row is missing and
none is twice. It is tensors and plain numbers only, read with ``torch.load(weights_only=True)``, and replaced
atomically: a run that is killed while it writes keeps the one before.
"""

from __future__ import annotations

import os
import pickle
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from curvestep._files import replace_atomically
from curvestep.smoothness.snapshot import RandomState

VERSION = 1
_FORMAT = "curvestep-checkpoint"
_KINDS: dict[str, type | tuple[type, ...]] = {
    "version": int,
    "step": int,
    "data": str,
    "model": dict,
    "optimizer": dict,
    "random": dict,
    "state": object,
    "probe": (dict, type(None)),
    "averaging": (dict, type(None)),
    "first_loss": (float, type(None)),
    "lengths": dict,
}


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Replace the checkpoint at ``path`` by ``state``; the old one stays if the disk is full."""
    content = {"format": _FORMAT, "version": VERSION, **state}
    try:
        replace_atomically(path, lambda file: torch.save(content, file))
    except RuntimeError as error:  # torch's way to say that a write failed
        raise OSError(
            f"The checkpoint {path} could not be written ({error}); the one before is kept."
        ) from error


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The state in ``path``, on the CPU; an error in one line if it is damaged, foreign or newer."""
    try:
        _check_sums(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (FileNotFoundError, PermissionError):
        raise
    except (OSError, RuntimeError, EOFError, LookupError, ValueError, TypeError, pickle.UnpicklingError):
        raise _corrupt(path) from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError(f"{path} is not a checkpoint of curvestep. Delete it to start the run again.")
    version = content.get("version")
    if isinstance(version, int) and version > VERSION:
        raise ValueError(
            f"{path} has version {version}, this curvestep reads up to {VERSION}. Update curvestep."
        )
    if not all(name in content and isinstance(content[name], kind) for name, kind in _KINDS.items()):
        raise _corrupt(path)
    return content


def _check_sums(path: Path) -> None:
    """An error if a byte is not what was written: torch itself does not look at the archive's checksums."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise ValueError(str(error)) from None
    if damaged is not None:
        raise ValueError(damaged)


def _corrupt(path: Path) -> ValueError:
    return ValueError(f"{path} is corrupt or is no checkpoint. Delete it to start the run again.")


def random_state() -> dict[str, Tensor]:
    """States of torch's global generators: the CPU's, and each accelerator's."""
    now = RandomState.capture()
    devices = now.accelerator if isinstance(now.accelerator, list) else []
    return {"cpu": now.cpu} | {f"accelerator:{i}": state for i, state in enumerate(devices)}


def set_random_state(states: dict[str, Tensor]) -> None:
    """Go back to what :func:`random_state` returned; a device that it does not know keeps its state."""
    devices = [states.get(name, state) for name, state in random_state().items() if name != "cpu"]
    now = RandomState.capture()
    replace(now, cpu=states["cpu"], accelerator=devices or now.accelerator).restore()


def truncate_rows(path: Path, length: int) -> None:
    """Cut a row file to the length that a checkpoint recorded: what came later is written again."""
    size = path.stat().st_size if path.exists() else 0
    if size < length:
        raise ValueError(f"{path} has {size} bytes, its checkpoint was written at {length}: rows were lost.")
    if path.exists():
        os.truncate(path, length)
