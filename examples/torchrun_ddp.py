"""Several processes with DistributedDataParallel: the same two lines; rank 0 writes the file.

torchrun --standalone --nproc-per-node=2 examples/torchrun_ddp.py [folder]
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import curvestep as cs

folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 5)))
optimizer = cs.ClippedSGD(model.parameters(), lr=0.5, max_norm=0.2)
trace = folder / "trace.jsonl"
probe = cs.SmoothnessProbe(model, every=10, trace=trace, if_exists="overwrite").watch(optimizer)  # added
torch.manual_seed(1 + dist.get_rank())  # each process has its own part of every batch
for _ in range(40):
    x, y = torch.randn(16, 20), torch.randint(5, (16,))
    loss = probe.record(lambda x=x, y=y: F.cross_entropy(model(x), y))  # added: record(...)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

if dist.get_rank() == 0:
    print(
        f"{len(probe.trace)} rows of {probe.trace[0]['batch_size']} samples on {dist.get_world_size()} ranks"
    )
dist.destroy_process_group()
