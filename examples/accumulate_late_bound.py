"""Gradient accumulation under the probe: each micro-batch is bound to its own closure.

A measurement computes the losses of a step again, after the loop over the micro-batches. `lambda: loss(x, y)`
then sees the last `x` and `y` for all of them, since Python looks names up when a function is called.
`x=x, y=y` keeps those of each. The probe notices: the losses computed again give another gradient.

python examples/accumulate_late_bound.py [steps]
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import curvestep as cs

num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 40
PARTS = 4


def train(*, bound: bool) -> cs.SmoothnessProbe:
    """Train with four micro-batches a step; ``bound`` says whether each closure keeps its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))
    optimizer = cs.ClippedSGD(model.parameters(), lr=0.3, max_norm=0.5)
    probe = cs.SmoothnessProbe(model, every=5).watch(optimizer)
    for _ in range(num_steps):
        optimizer.zero_grad()
        inputs = torch.randn(64, 8)
        labels = inputs[:, :3].argmax(dim=1)
        for x, y in zip(inputs.chunk(PARTS), labels.chunk(PARTS), strict=True):
            if bound:
                loss = probe.record(lambda x=x, y=y: F.cross_entropy(model(x), y))
            else:
                loss = probe.record(lambda: F.cross_entropy(model(x), y))  # noqa: B023 (the mistake)
            (loss / PARTS).backward()
        optimizer.step()
    return probe


print(f"bound: {len(train(bound=True).trace)} rows")
try:
    train(bound=False)
except cs.NonDeterministicError as error:
    print(f"late-bound: {error}")
