"""Muon for the hidden matrices, AdamW for the rest, and a clip for AdamW alone.

Muon makes the gradient orthogonal, so a step has the same length however long the gradient is. Clipping its
gradient changes nothing. DeepSpeed clips its *update* by default (DeepSpeed#8439). That divides every step by
a number that grows with the model. A norm over both would clip AdamW because of Muon's gradients.

python examples/muon_adamw.py [steps]
"""

import copy
import sys
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

import curvestep as cs

num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 300
LR = 0.02  # of Muon
torch.manual_seed(0)
width = 64
wide, narrow = nn.Linear(width, 256), nn.Linear(256, width)
model = nn.Sequential(nn.Embedding(64, width), wide, nn.GELU(), narrow, nn.Linear(width, 64))
hidden = [wide.weight, narrow.weight]
rest = [p for p in model.parameters() if all(p is not matrix for matrix in hidden)]
muon = torch.optim.Muon(hidden, lr=LR, weight_decay=0.0)
adamw = torch.optim.AdamW(rest, lr=3e-3)
clip = cs.clip(adamw, max_norm=0.1)  # Muon is left alone


def loss_of_batch() -> torch.Tensor:
    """Letters that count on by a number that the letter says."""
    letters = torch.randint(64, (128,))
    return F.cross_entropy(model(letters), (letters + letters // 8) % 64)


def length_of_step(factor: float) -> float:
    """How far Muon goes with the present gradient times a factor."""
    matrices = copy.deepcopy(hidden)
    for copied, matrix in zip(matrices, hidden, strict=True):
        assert matrix.grad is not None
        copied.grad = factor * matrix.grad
    before = [matrix.detach().clone() for matrix in matrices]
    torch.optim.Muon(matrices, lr=LR, weight_decay=0.0).step()
    return cs.clip_grad_norm_(differences(matrices, before), max_norm=float("inf")).item()


def differences(new: Sequence[torch.Tensor], old: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors whose gradient is the difference."""
    found = [torch.zeros_like(matrix, requires_grad=True) for matrix in old]
    for empty, a, b in zip(found, new, old, strict=True):
        empty.grad = (a - b).detach()
    return found


last_loss = float("nan")
for step in range(num_steps):
    for optimizer in (muon, adamw):
        optimizer.zero_grad()
    loss = loss_of_batch()
    loss.backward()
    if step == 0:
        length, of_little = length_of_step(1.0), length_of_step(0.01)
        print(f"a step of Muon: {length:.3f}; of 1 % of the gradient: {of_little:.3f}")
        print(f"with its update clipped at 1, each step would be {max(1.0, length / LR):.0f} times shorter")
        alone = cs.clip_grad_norm_(rest, max_norm=float("inf"))
        together = cs.clip_grad_norm_([*hidden, *rest], max_norm=float("inf"))
        print(f"gradient norm of AdamW's parameters {alone:.3f}, of all {together:.3f}")
    for optimizer in (muon, adamw):
        optimizer.step()
    last_loss = loss.item()
stats = clip.clip_stats()
print(f"loss {last_loss:.3f}; AdamW clipped in {stats['clipped_fraction']:.0%} of {stats['steps']} steps")
