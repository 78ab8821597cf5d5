"""Run tests on a kernel that stops the process at the first fault of memory or arithmetic.

    python tests/support/sanitized.py tests/tensors/test_kernel.py [other arguments of pytest]

The kernel is compiled with the sanitizers of gcc, which have to be loaded before Python itself: this file
runs itself again, in a process where they are. ``--fault memory`` and ``--fault arithmetic`` make one on
purpose.
"""

import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
FLAGS = [
    "-g", "-O1", "-std=gnu11", "-fPIC", "-shared", "-w", "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
]  # fmt: skip
FAULT = "int fault(int x) { return x + 1; }\n"
LIBRARY = "CURVESTEP_SANITIZED"


def environment(folder):
    """Compile the kernel into ``folder``; variables of a process that can load it, or why not."""
    compiler, library = (os.environ.get("CC") or "cc").split(), Path(folder, "kernel.so")
    fault = Path(folder, "fault.c")
    fault.write_text(FAULT)
    source = ROOT / "src/curvestep/tensors/kernel/kernel.c"
    try:
        done = subprocess.run(
            [*compiler, *FLAGS, "-o", library, source, fault, "-lm"], capture_output=True, text=True
        )
        runtimes = [
            subprocess.run(
                [*compiler, f"-print-file-name={name}"], capture_output=True, text=True
            ).stdout.strip()
            for name in ("libasan.so", "libubsan.so")
        ]
    except OSError as error:
        return f"no C compiler: {error}"
    if done.returncode or not all(map(os.path.isabs, runtimes)):
        return f"the C compiler has no sanitizers: {done.stderr[-400:]}"
    # Python itself leaves memory to the end of the process.
    return os.environ | {
        LIBRARY: str(library), "LD_PRELOAD": " ".join(runtimes), "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }  # fmt: skip


def run(*arguments, **options):
    """Run this file with the sanitizers loaded; the finished process, or why that cannot be."""
    with tempfile.TemporaryDirectory() as folder:
        variables = environment(folder)
        if isinstance(variables, str):
            return variables
        return subprocess.run([sys.executable, __file__, *arguments], cwd=ROOT, env=variables, **options)


def make_fault(kind, library):
    import torch

    from curvestep.tensors.kernel import Kernel

    if kind == "arithmetic":
        ctypes.CDLL(library).fault(2**31 - 1)
    else:
        kernel = Kernel(Path(library))
        ten = torch.ones(10)
        view = kernel.view([ten])
        kernel.sum_of_squares(view._replace(sizes=(ctypes.c_int64 * 1)(11)))


def main():
    library, arguments = os.environ.get(LIBRARY), sys.argv[1:]
    if library is None:
        done = run(*arguments)
        raise SystemExit(done if isinstance(done, str) else done.returncode)
    if arguments[:1] == ["--fault"]:
        make_fault(arguments[1], library)
        return
    import pytest

    from curvestep.tensors import kernel

    kernel.LIBRARY = Path(library)
    if kernel.native() is None:
        raise SystemExit("The kernel with the sanitizers could not be loaded.")
    raise SystemExit(pytest.main(arguments))


if __name__ == "__main__":
    main()
