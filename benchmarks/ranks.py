"""Odd modules under DDP, FSDP2 and `torch.compile` on several gloo ranks: does a measurement change the run?

    python benchmarks/ranks.py [--ranks 2 4] [--only NAME ...] [--wrappers ddp fsdp2 compiled]

Each module of `benchmarks/odd_modules.py` whose loss is the mean square of its output is wrapped and trained
alone, and again with the probe, `calibrate` and `Autopsy`, on every rank with batches of its own. The answer
is the worst of all ranks. An autopsy refuses here. Some modules cannot be trained wrapped, with or without a
measurement. The exit code is the number of different runs, at most 100.
"""

import argparse
import multiprocessing
import sys
import tempfile
import warnings
from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

try:
    from benchmarks import odd_modules
except ImportError:  # run as a script
    import odd_modules

MODES = ("watch", "with", "calibrate", "autopsy")
TIMEOUT = timedelta(minutes=5)  # the machine may be busy


def ddp(model):
    return DistributedDataParallel(model, find_unused_parameters=True)


def compiled(model):
    torch._dynamo.reset()
    return torch.compile(ddp(model), backend="aot_eager")


WRAPPERS = {"ddp": ddp, "fsdp2": fully_shard, "compiled": compiled}


def wrapped(wrapper, rank):
    """Function that wraps the model of a setting, whose batches are this rank's own."""

    def wrap(setting):
        model = WRAPPERS[wrapper](setting.model)
        batches = [*setting.batches[rank:], *setting.batches[:rank]]
        return odd_modules.Setting(model, odd_modules.square(model), batches, setting.elsewhere)

    return wrap


def answers(rank, names, wrappers):
    """The answer of this rank by module, wrapper and mode; an error where it cannot be trained alone."""
    found = {}
    make_optimizer = odd_modules.OPTIMIZERS["SGD"]
    for name in names:
        for wrapper in wrappers:
            wrap = wrapped(wrapper, rank)
            try:
                alone = odd_modules.run(name, make_optimizer, wrap=wrap)
                again = odd_modules.run(name, make_optimizer, wrap=wrap)
            except Exception as error:
                found[name, wrapper, "alone"] = f"not trained: {type(error).__name__}"
                continue
            if odd_modules.differences(alone.state, again.state):
                found[name, wrapper, "alone"] = "not trained twice with the same bits"
                continue
            for mode in MODES:
                found[name, wrapper, mode] = odd_modules.verdict(name, make_optimizer, mode, alone, wrap)
    return found


def on_rank(rank, world_size, folder, names, wrappers):
    """What each process does."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    torch.save(answers(rank, names, wrappers), Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def has_plain_loss(name):
    """Whether the loss of a setting is the mean square of what its model puts out."""
    return odd_modules.make(name).loss.__qualname__.startswith(odd_modules.square.__name__)


def play(world_size, names, wrappers=tuple(WRAPPERS)):
    """The worst answer of all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        given = (world_size, folder, names, wrappers)
        try:
            mp.start_processes(on_rank, given, nprocs=world_size, start_method="forkserver")
        except mp.ProcessExitedException as error:
            return {(*names, *wrappers, "alone"): f"DIFFERENT: {error}"}
        ranks = [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world_size)]
    return {key: min(found[key] for found in ranks) for key in ranks[0]}  # "DIFFERENT" comes first


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--only", nargs="+", default=list(odd_modules.MODULES), metavar="NAME")
    parser.add_argument("--wrappers", nargs="+", default=list(WRAPPERS), choices=WRAPPERS)
    args = parser.parse_args()
    names = [name for name in args.only if has_plain_loss(name)]
    multiprocessing.set_forkserver_preload(["curvestep", "torch._dynamo", "torch.distributed.fsdp"])
    different = 0
    for world_size in args.ranks:
        found = {}
        for name in names:
            of_module = play(world_size, [name], args.wrappers)
            for wrapper in args.wrappers:
                cells = [words for key, words in of_module.items() if key[1] == wrapper]
                words = " ".join(f"{c.partition(':')[0]:9}" for c in cells)
                print(f"{world_size} ranks {name:42} {wrapper:9} {words}", flush=True)
            found |= of_module
        for key, words in found.items():
            if "DIFFERENT" in words:
                print(*key, words[:300], sep=" \N{MIDDLE DOT} ")
        counts = Counter(words.partition(":")[0].split()[0] for words in found.values())
        different += counts["DIFFERENT"]
        modules = {name for name, _, mode in found if mode != "alone"}
        print(
            f"{world_size} ranks, {len(modules)} modules: {counts['same']} the same bits, "
            f"{counts['refused']} refused, {counts['DIFFERENT']} different, "
            f"{counts['not']} cannot be trained wrapped"
        )
    return min(different, 100)


if __name__ == "__main__":
    sys.exit(main())
