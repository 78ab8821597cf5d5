"""Processes of tests: forks of one server that has imported what they need, so that each starts at once."""

import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

OURS = {"curvestep", "curvestep_reproduction", "tests", "reproduction", "docs", "benchmarks", "conftest"}
CONTEXT = multiprocessing.get_context("forkserver")
# What is not installed is passed over. Torch's optimizers import its compiler when they are made.
CONTEXT.set_forkserver_preload(
    ["torch._dynamo", "torch.distributed.fsdp", "curvestep_reproduction.training.loop"]
)


def run_on_processes(function, *args, world_size=2):
    """Call ``function(rank, *args)`` on each of ``world_size`` gloo ranks; return the results by rank.

    ``function`` must be importable (a module-level function); results travel through `torch.save`.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = (world_size, folder, function, args)
        mp.start_processes(_rank, given, nprocs=world_size, start_method="forkserver")
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _rank(rank, world_size, folder, function, args):
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    try:
        result = function(rank, *args)
        torch.save(result, Path(folder) / f"{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_command(*words, largest_file=None):
    """``curvestep`` with these words in a process of its own, without a terminal, as `subprocess.run` would.

    With ``largest_file``, writing beyond so many bytes of a file fails as on a full disk.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("stdout", "stderr")]
        process = CONTEXT.Process(target=_command, args=(words, paths, largest_file))
        process.start()
        process.join()
        return subprocess.CompletedProcess(words, process.exitcode, *(path.read_text() for path in paths))


def run_pytest(folder, *arguments):
    """Pytest on another copy of the repository, as in a fresh process there, without the kernel."""
    with tempfile.TemporaryDirectory() as temporary:
        output = Path(temporary) / "output"
        process = CONTEXT.Process(target=_pytest, args=(folder, arguments, output))
        process.start()
        process.join()
        return subprocess.CompletedProcess(arguments, process.exitcode, output.read_text())


def _pytest(folder, arguments, output):
    import pytest

    for number in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    paths = [str(folder / "src"), str(folder / "reproduction" / "src")]
    sys.path[:0] = paths
    os.environ.update(PYTHONPATH=os.pathsep.join(paths), CURVESTEP_KERNEL="0")
    os.chdir(folder)
    known = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # of plugins that are imported already
    sys.exit(int(pytest.main(["-q", "-p", "no:cacheprovider", *known, *arguments])))


def _command(words, paths, largest_file):
    from curvestep.cli import main

    for number, path in enumerate(paths, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    sys.exit(main(words))
