"""Accelerate: gradient accumulation and mixed precision, with two added lines that measure.

accelerate launch examples/accelerate_loop.py [folder]
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F

import curvestep as cs

folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
torch.manual_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16")
model = nn.Sequential(nn.Linear(20, 64), nn.Dropout(0.1), nn.Tanh(), nn.Linear(64, 5))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.utils.data.TensorDataset(torch.randn(512, 20), torch.randint(5, (512,)))
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

cs.clip(optimizer, max_norm=0.7)  # instead of accelerator.clip_grad_norm_: nothing to order, and it counts
trace = folder / "trace.jsonl"
probe = cs.SmoothnessProbe(model, every=4, trace=trace, if_exists="overwrite").watch(optimizer)  # added
for x, y in loader:
    with accelerator.accumulate(model):

        def loss_fn(x=x, y=y):
            with accelerator.autocast():
                return F.cross_entropy(model(x), y)

        loss = probe.record(loss_fn)  # added: instead of loss = loss_fn()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

print(f"{len(probe.trace)} rows; {optimizer.optimizer.clip_stats()['clipped_fraction']:.0%} of steps clipped")
