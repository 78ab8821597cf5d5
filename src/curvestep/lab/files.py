"""Files that are whole at any moment."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import IO


def replace_atomically(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a new file beside ``path``, bring it to the disk, and put it in its place.

    A reader sees the old file or the new one, never a part; a write that fails leaves the old one.
    """
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        with beside.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, data: bytes) -> None:
    """Put ``data`` in the place of ``path``."""
    replace_atomically(path, lambda file: file.write(data))
