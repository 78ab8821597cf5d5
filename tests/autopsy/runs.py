"""A small training run that a recorder watches, optimizers for it, and what can go wrong in it."""

import torch
from torch import nn
from torch.nn import functional as F

import curvestep as cs

NUM_STEPS = 14


class Run:
    """A small network with dropout and BatchNorm, watched or not."""

    def __init__(self, make, *, keep=8, watched=True, bfloat16=False):
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 3)
        )
        groups = [{"params": list(m.parameters())} for m in self.model if list(m.parameters())]
        self.optimizer = make(groups)
        self.autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16)
        self.spikes = cs.Autopsy(self.model, self.loss, keep=keep)
        self.record = self.spikes.watch(self.optimizer).record if watched else self.loss

    def loss(self, batch):
        with self.autocast:
            return F.mse_loss(self.model(batch[0]), batch[1])

    def batch(self):
        x = torch.randn(16, 6)
        return x, x[:, :3].sin()

    def step(self, batch=None, before=lambda: None):
        self.optimizer.zero_grad()
        self.record(batch or self.batch()).backward()
        before()
        self.optimizer.step()

    def steps(self, count=NUM_STEPS, before=lambda: None):
        for _ in range(count):
            self.step(before=before)
        return self

    def explain_last(self):
        return self.spikes.explain(self.spikes.step - 1)

    def state(self):
        moments = [v for state in self.optimizer.state.values() for v in state.values() if torch.is_tensor(v)]
        gradients = [p.grad for p in self.model.parameters()]
        return [*self.model.state_dict().values(), *moments, *gradients, torch.get_rng_state()]

    def num_bytes(self):
        """Of the parameters, of the moments, and of a batch."""
        model = sum(p.nbytes for p in self.model.parameters())
        moments = sum(v.nbytes for state in self.optimizer.state.values() for v in state.values())
        return model, moments, sum(part.nbytes for part in self.batch())


class Overflowing(Run):
    """A loss times one, computed by an exponential; that of six ones overflows in bfloat16 alone."""

    def loss(self, batch):
        with self.autocast:
            grown = F.linear(batch[0][:1], torch.full((1, 6), 14.785)).exp() + 1.0
            return F.mse_loss(self.model(batch[0]), batch[1]) * (grown / grown).squeeze()

    def overflow(self):
        x, y = self.batch()
        x[0] = 1.0
        self.step((x, y))


def sgd(groups):
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def adamw(groups):
    return torch.optim.AdamW(groups, lr=0.01)


def clipped_adamw(groups):
    return cs.ClippedAdamW(groups, lr=0.01, max_norm=0.5)


def clipped_sgd(groups):
    return cs.ClippedSGD(groups, lr=0.1, max_norm=0.2, momentum=0.9)


def hooked_sgd(groups):
    optimizer = sgd(groups)
    cs.clip(optimizer, max_norm=0.2)
    return optimizer


def scaled_lr(run):
    for group in run.optimizer.param_groups:
        group["lr"] *= 60
    run.step()


def scaled_targets(run):
    x, y = run.batch()
    run.step((x, -200 * y))


def scaled_moment(name, factor):
    def spoil(run):
        with torch.no_grad():
            for state in run.optimizer.state.values():
                state[name].mul_(factor)
        run.step()

    return spoil


def scaled_block(run):
    def spoil():
        for p in run.model[4].parameters():
            p.grad.mul_(1000)

    run.step(before=spoil)
