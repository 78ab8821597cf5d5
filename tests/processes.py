"""Run a function on several gloo processes of this machine and bring back what each returned."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_on_processes(function, *args, world_size=2):
    """Call ``function(rank, *args)`` on each of ``world_size`` ranks; return the results by rank.

    ``function`` must be importable (a module-level function); results travel through `torch.save`.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_main, (world_size, folder, function, args), nprocs=world_size, join=True)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _main(rank, world_size, folder, function, args):
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
