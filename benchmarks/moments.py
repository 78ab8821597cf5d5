"""Memory of an optimizer's state, ours beside torch's, for seven ways to group the parameters.

    python benchmarks/moments.py

The growth of resident memory over the first step, in megabytes; each number in a process of its own.
"""

import multiprocessing

import psutil
import torch
from torch import nn

import curvestep as cs

MB = 262_144  # numbers of a megabyte in float32

# Name: sizes of the parameters, and how many of them each group has.
GROUPINGS = {
    "one parameter of 200 MB": ([200 * MB], 1),
    "200 of 1 MB in one group": ([MB] * 200, 200),
    "200 of 1.0002 MB, a group each": ([262_200] * 200, 1),
    "100 of 2.05 MB, a group each": ([537_395] * 100, 1),
    "2,000 of 100 KB, ten a group": ([25_600] * 2000, 10),
    "20,000 of 10 KB in one group": ([2_560] * 20_000, 20_000),
    "BERT-base's sizes, a group each": (
        [30522 * 768, 512 * 768, 2 * 768, 768, 768]
        + 12 * (4 * [768 * 768, 768] + [768, 768, 3072 * 768, 3072, 768 * 3072, 768, 768, 768])
        + [768 * 768, 768],
        1,
    ),
}
OPTIMIZERS = {
    "torch AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-3),
    "ClippedAdamW": lambda groups: cs.ClippedAdamW(groups, lr=1e-3, max_norm=1.0),
    "torch SGD": lambda groups: torch.optim.SGD(groups, lr=1e-3, momentum=0.9),
    "ClippedSGD": lambda groups: cs.ClippedSGD(groups, lr=1e-3, max_norm=1.0, momentum=0.9),
}


def resident():
    """Resident memory of this process in megabytes."""
    return psutil.Process().memory_info().rss / 2**20


def growth(grouping, name):
    """Megabytes that the first step adds, beside what a step of a tiny model takes once in a process."""
    sizes, share = GROUPINGS[grouping]
    tiny = nn.Parameter(torch.ones(3))
    tiny.grad = torch.ones(3)
    OPTIMIZERS[name]([{"params": [tiny]}]).step()
    parameters = [nn.Parameter(torch.ones(size)) for size in sizes]
    for p in parameters:
        p.grad = torch.ones_like(p)
    groups = [{"params": parameters[i : i + share]} for i in range(0, len(parameters), share)]
    optimizer = OPTIMIZERS[name](groups)
    before = resident()
    optimizer.step()
    return resident() - before


def main():
    torch.set_num_threads(1)
    print("| parameters |", " | ".join(OPTIMIZERS), "|\n| --- |", "--: | " * len(OPTIMIZERS))
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as processes:
        for grouping in GROUPINGS:
            numbers = [processes.apply(growth, (grouping, name)) for name in OPTIMIZERS]
            print(f"| {grouping} | " + " | ".join(f"{number:.0f}" for number in numbers) + " |", flush=True)


if __name__ == "__main__":
    main()
