"""Automatic mixed precision with a GradScaler: unscaling, clipping and stepping as always, two added lines.

python examples/amp_loop.py [folder]
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import curvestep as cs

folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 5)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
scaler = torch.amp.GradScaler(device, init_scale=1024.0)

probe = cs.SmoothnessProbe(  # added
    model,
    every=10,
    trace=folder / "trace.jsonl",
    if_exists="overwrite",
    backward=lambda loss: scaler.scale(loss).backward(),
).watch(optimizer)
for _ in range(40):
    x, y = torch.randn(32, 20, device=device), torch.randint(5, (32,), device=device)

    def loss_fn(x=x, y=y):
        with torch.autocast(device, dtype=torch.float16):
            return F.cross_entropy(model(x), y)

    loss = probe.record(loss_fn)  # added: instead of loss = loss_fn()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()

for row in probe.trace:
    print(f"step {row['step']}: lr {row['lr']:.2g}, coefficient {row['coefficient']:.2f}, {row['status']}")
