"""Lightning Fabric in bf16: backward is Fabric's, which the probe is told.

python examples/fabric_loop.py [folder]
"""

import sys
from pathlib import Path

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.nn import functional as F

import curvestep as cs

folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
fabric.seed_everything(0, verbose=False)
model = nn.Sequential(nn.Linear(20, 64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, 5))
optimizer = cs.ClippedAdamW(model.parameters(), lr=1e-2, max_norm=0.7)
model, optimizer = fabric.setup(model, optimizer)

trace = folder / "trace.jsonl"
probe = cs.SmoothnessProbe(model, every=10, trace=trace, if_exists="overwrite", backward=fabric.backward)
probe.watch(optimizer)  # added
for _ in range(40):
    x, y = torch.randn(32, 20), torch.randint(5, (32,))
    loss = probe.record(lambda x=x, y=y: F.cross_entropy(model(x), y))  # added: record(...)
    optimizer.zero_grad()
    fabric.backward(loss)
    optimizer.step()

print(f"{len(probe.trace)} rows; {optimizer.optimizer.clip_stats()['clipped_fraction']:.0%} of steps clipped")
