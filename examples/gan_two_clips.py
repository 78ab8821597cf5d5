"""A GAN: two optimizers, each with a clip and a count of its own.

python examples/gan_two_clips.py [steps]
"""

import math
import sys

import torch
from torch import nn
from torch.nn import functional as F

import curvestep as cs

num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1500
torch.manual_seed(0)


def ring(count: int) -> torch.Tensor:
    """Points near a circle of radius one."""
    angles = 2 * math.pi * torch.rand(count, 1)
    return torch.cat([angles.cos(), angles.sin()], dim=1) + 0.05 * torch.randn(count, 2)


generator = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
critic = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(), nn.Linear(64, 64), nn.LeakyReLU(), nn.Linear(64, 1))
for_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
for_critic = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))
# Two handles: the norm of one network says nothing about the other.
clips = {"generator": cs.clip(for_generator, max_norm=0.5), "critic": cs.clip(for_critic, max_norm=0.5)}

for _ in range(num_steps):
    real, fake = ring(128), generator(torch.randn(128, 4))
    for_critic.zero_grad()
    # detach: else this backward pass would also add to the gradient of the generator.
    (F.softplus(-critic(real)) + F.softplus(critic(fake.detach()))).mean().backward()
    for_critic.step()

    for_generator.zero_grad()
    # The critic gets gradients here too; its own zero_grad above clears them.
    F.softplus(-critic(fake)).mean().backward()
    for_generator.step()

with torch.no_grad():
    radii = generator(torch.randn(1000, 4)).norm(dim=1)
print(f"radius {radii.mean():.2f} +- {radii.std():.2f} after {num_steps} steps; that of the data is 1")
for name, handle in clips.items():
    stats = handle.clip_stats()
    print(f"{name}: {stats['clipped_fraction']:.0%} of {stats['steps']} steps clipped")
