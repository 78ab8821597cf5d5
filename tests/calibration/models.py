"""Small models with batches to calibrate on."""

from collections import UserList

import torch
from torch import nn

from tests.models import batch_loss, mlp


def network(seed=0, count=48, size=32):
    """A perceptron that learns labels of a linear teacher; model, loss of a batch, batches."""
    torch.manual_seed(seed)
    model = mlp(6, 12, 3)
    inputs, teacher = [torch.randn(size, 6) for _ in range(count)], torch.randn(6, 3)
    batches = [(x, (x @ teacher).argmax(1)) for x in inputs]
    return model, batch_loss(model), batches


class Noisy(nn.Module):
    """A quadratic whose batches pull to targets of their own: noise around a common one."""

    def __init__(self, distance, size=12, curvature=1.0):
        super().__init__()
        self.curvature = curvature
        self.x = nn.Parameter(torch.full((size,), float(distance)))

    def forward(self, target):
        return 0.5 * self.curvature * (self.x - target).square().sum()


def targets(noise, count=48, size=12, seed=1):
    """What the batches of a :class:`Noisy` pull to."""
    torch.manual_seed(seed)
    return [noise * torch.randn(size) for _ in range(count)]


class Lion(torch.optim.Optimizer):
    """Signs of a mean of gradients: an optimizer that the package knows by its name alone."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    p.sub_(torch.sign(mean.mul_(0.9).add_(p.grad, alpha=0.1)), alpha=group["lr"])


def watched(loss):
    """The loss, with the batches that it is differentiated on and those that it only judges by."""
    stepped, judged = UserList(), UserList()  # what a loss adds to a list is taken back

    def of_batch(batch):
        (stepped if torch.is_grad_enabled() else judged).append(id(batch))
        return loss(batch)

    return of_batch, stepped, judged


def kinds(cal):
    """The kinds of a calibration's warnings."""
    return {note.kind for note in cal.warnings}
