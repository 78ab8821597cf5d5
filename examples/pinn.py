"""A physics-informed network: -u'' = f on (0, 1), u(0) = u(1) = 0, clipped at a percentile of its own norms.

The residual holds second derivatives, so gradient norms fall by orders of magnitude while training goes on. A
fixed threshold suits one phase at most; a percentile of the last norms follows them.

python examples/pinn.py [steps]
"""

import math
import sys

import torch
from torch import nn

import curvestep as cs

num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
rule = cs.clip_rules.percentile(50)
optimizer = cs.ClippedAdamW(net.parameters(), lr=3e-3, weight_decay=0.0, max_norm=rule)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)


def solution(x: torch.Tensor) -> torch.Tensor:
    """The solution that f = (3 pi)^2 sin(3 pi x) belongs to."""
    return torch.sin(3 * math.pi * x)


def residual(x: torch.Tensor) -> torch.Tensor:
    """By how much the equation is missed; the boundary values are built in."""
    x = x.requires_grad_()
    u = x * (1 - x) * net(x)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
    return -curvature - (3 * math.pi) ** 2 * solution(x)


norms: list[float] = []
for _ in range(num_steps):
    optimizer.zero_grad()
    residual(torch.rand(128, 1)).square().mean().backward()
    optimizer.step()
    schedule.step()
    norms.append(optimizer.clip_stats()["grad_norm"])

x = torch.linspace(0, 1, 201)[:, None]
with torch.no_grad():
    error = (x * (1 - x) * net(x) - solution(x)).abs().max()
stats = optimizer.clip_stats()
print(f"largest error {error:.1e} after {num_steps} steps")
print(f"gradient norms {max(norms):.0f} to {min(norms):.2g}; {stats['clipped_fraction']:.0%} clipped")
