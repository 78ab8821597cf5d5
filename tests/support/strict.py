"""The device of ``strict.cpp``, built once for a source and a torch, and how tests use it."""

import fcntl
import getpass
import hashlib
import os
import subprocess
import tempfile
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.cpp_extension import include_paths

SOURCE = Path(__file__).with_name("strict.cpp")
NAME = "strict"


class Module:
    """What ``torch.strict`` is: the part of ``torch.cuda`` that torch and a probe ask for."""

    is_available = staticmethod(lambda: _available)
    is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    _is_in_bad_fork = staticmethod(lambda: False)
    manual_seed_all = staticmethod(lambda seed: torch.ops.strict.seed(seed))
    manual_seed = manual_seed_all
    get_rng_state = staticmethod(lambda device=0: torch.ops.strict.rng_state())
    set_rng_state = staticmethod(lambda state, device=0: torch.ops.strict.set_rng_state(state))
    get_amp_supported_dtype = staticmethod(lambda: [torch.float16, torch.bfloat16])


_available = False


@cache
def _registered() -> str:
    """Build and load the device; empty if that worked, else why not."""
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"curvestep-{getpass.getuser()}" / f"{NAME}-{key}.so"
    library.parent.mkdir(exist_ok=True)
    # One process builds, the others wait for it: the compiler takes a core for half a minute.
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists() and (reason := _build(library)):
            return reason
    torch.ops.load_library(library)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, Module())
    return ""


def _build(library: Path) -> str:
    """Compile the device; empty if that worked, else why not."""
    fresh, libraries = library.with_suffix(f".{os.getpid()}"), Path(torch.__file__).parent / "lib"
    command = [
        *os.environ.get("CXX", "c++").split(), "-O1", "-std=c++20", "-fPIC", "-shared", "-w",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{folder}" for folder in include_paths()),
        "-o", str(fresh), str(SOURCE), f"-L{libraries}", "-ltorch", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return f"no C++ compiler: {error}"
    if done.returncode:
        return f"the C++ compiler failed: {done.stderr[-400:]}"
    fresh.replace(library)
    return ""


@contextmanager
def strict_device():
    """The device for as long as the block lasts; at other times torch says that there is no accelerator."""
    global _available
    reason = _registered()
    if reason:
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    _available = True
    torch.ops.strict.set_available(True)
    torch.ops.strict.seed(0)
    try:
        yield torch.device(NAME, 0)
    finally:
        _available = False
        torch.ops.strict.set_available(False)


@contextmanager
def waits(expected: int | None = None):
    """Count how often the block waits for the device, in ``.count``; it must be ``expected``, if given."""
    torch.ops.strict.reset()
    counted = SimpleNamespace(count=0)
    yield counted
    counted.count = torch.ops.strict.waits()
    if expected is not None:
        assert counted.count == expected, f"{counted.count} waits, the last: {torch.ops.strict.last_wait()}"
