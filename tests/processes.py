"""Processes of tests: forks of one server that has imported what they need, so that each starts at once."""

import multiprocessing
import os
import resource
import runpy
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROOT = Path(__file__).parents[1]
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


def run_in_fork(act, *given):
    """How ``act(*given)`` ends in a process of its own, and what it prints, as `subprocess.run` would say."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("stdout", "stderr")]
        process = CONTEXT.Process(target=_with_output, args=(paths, act, given))
        process.start()
        process.join()
        return subprocess.CompletedProcess(given, process.exitcode, *(path.read_text() for path in paths))


def _with_output(paths, act, given):
    for number, path in enumerate(paths, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    act(*given)


def run_command(*words, largest_file=None):
    """``curvestep`` with these words, without a terminal.

    With ``largest_file``, writing beyond so many bytes of a file fails as on a full disk.
    """
    return run_in_fork(_command, words, largest_file)


def _command(words, largest_file):
    from curvestep.cli import main

    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    sys.exit(main(words))


def run_script(script, *arguments):
    """What a script of this repository prints; a warning for its user is an error."""
    done = run_in_fork(_script, ROOT / script, arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _script(script, arguments):
    warnings.simplefilter("error", UserWarning)
    torch.set_num_threads(1)
    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script), *map(str, arguments)]
    runpy.run_path(str(script), run_name="__main__")


def run_pytest(folder, *arguments):
    """Pytest on another copy of the repository, as in a fresh process there, without the kernel."""
    return run_in_fork(_pytest, folder, arguments)


def _pytest(folder, arguments):
    import pytest

    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    paths = [str(folder / "src"), str(folder / "reproduction" / "src")]
    sys.path[:0] = paths
    os.environ.update(PYTHONPATH=os.pathsep.join(paths), CURVESTEP_KERNEL="0")
    os.chdir(folder)
    known = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # of plugins that are imported already
    sys.exit(int(pytest.main(["-q", "-p", "no:cacheprovider", *known, *arguments])))
