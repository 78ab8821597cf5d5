"""Odd modules under DDP, FSDP2 and `torch.compile` on several gloo ranks: does a measurement change the run?

    python benchmarks/ranks.py [--ranks 2 4] [--only NAME ...] [--wrappers ddp fsdp2 compiled]

Each module of `benchmarks/odd_modules.py` that can be wrapped is trained alone, and again with the probe,
`calibrate` and `Autopsy`, on every rank with batches of its own. The answer is the worst of all ranks. An
autopsy refuses here. The exit code is the number of different runs, at most 100.
"""

import argparse
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

# Their loss is the mean square of the output.
NAMES = (
    "momentum_encoder momentum_encoder_by_data ema_teacher target_network batchnorm spectral_norm "
    "weight_norm "
    "pruned lora_with_dropout tied checkpointing backward_hook queue_in_a_buffer codebook carried_lstm_state "
    "mixture_of_experts dropouts generator_of_torch counter ring_in_a_deque nested_containers kinds_of_dict "
    "numpy_array object_with_slots_that_shows_late global_number_that_shows_late iterator_that_shows_late"
).split()
MODES = ("watch", "with", "calibrate", "autopsy")
TIMEOUT = timedelta(seconds=60)


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
            except Exception as error:
                found[name, wrapper, "alone"] = f"not trained: {type(error).__name__}"
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


def play(world_size, names=NAMES, wrappers=tuple(WRAPPERS)):
    """The worst answer of all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(on_rank, (world_size, folder, names, wrappers), nprocs=world_size)
        ranks = [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world_size)]
    return {key: min(found[key] for found in ranks) for key in ranks[0]}  # "DIFFERENT" comes first


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--only", nargs="+", default=NAMES, metavar="NAME")
    parser.add_argument("--wrappers", nargs="+", default=list(WRAPPERS), choices=WRAPPERS)
    args = parser.parse_args()
    different = 0
    for world_size in args.ranks:
        found = play(world_size, args.only, args.wrappers)
        for name in args.only:
            for wrapper in args.wrappers:
                cells = [found[key] for key in found if key[:2] == (name, wrapper)]
                print(
                    f"{world_size} ranks {name:36} {wrapper:9}",
                    *(f"{c.partition(':')[0]:9}" for c in cells),
                )
        for key, words in found.items():
            if "DIFFERENT" in words:
                print(*key, words[:300], sep=" \N{MIDDLE DOT} ")
        counts = Counter(words.partition(":")[0].split()[0] for words in found.values())
        different += counts["DIFFERENT"]
        print(
            f"{world_size} ranks: {counts['same']} the same bits, {counts['refused']} refused, "
            f"{counts['DIFFERENT']} different, {counts['not']} cannot be trained wrapped"
        )
    return min(different, 100)


if __name__ == "__main__":
    sys.exit(main())
