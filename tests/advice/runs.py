"""Runs for the tests of advise: facts, rows and small trainings."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from curvestep import SmoothnessProbe
from curvestep.advice.outcome import Outcome
from curvestep.optimizer_family import Family
from curvestep.trace.trace import Trace

GOOD = {
    "family": Family.SGD,
    "lr": 0.1,
    "scheduled": False,
    "max_norm": math.inf,
    "clipped": 0.0,
    "in_eval_mode": False,
    "num_rows": 30,
    "num_losses": 30,
    "failure": "",
    "first_loss": 2.3,
    "last_loss": 0.5,
    "highest_loss": 2.4,
    "stood_still": False,
    "noise": 0.01,
    "nonfinite_at": None,
    "finite_until": 30,
    "kappa": 0.5,
    "agreement": 1.0,
    "efficiency": 0.7,
    "start_factor": 2.0,
    "floor": math.nan,
    "stable_lr": 100.0,
}


def outcome(*, end_loss=0.4, **changes):
    """The facts of a run that went well, but for ``changes``; ``end_loss`` is that after the last step."""
    facts = {**GOOD, **changes}
    first = facts["first_loss"]
    losses = {"rise": facts["last_loss"], "end_rise": end_loss, "peak_rise": facts["highest_loss"]}
    rises = {name: (loss - first) / abs(first) for name, loss in losses.items()}
    return Outcome(**facts, **rises)


def trace_of(losses, *, path=None, header=None, every=5, **row):
    """A trace with these losses, rows otherwise alike: steps of κ 0.5 that do what they promise."""
    trace = Trace(path, header={"optimizer": "SGD", "optimizer_family": "sgd", **(header or {})})
    common = {"lr": 0.1, "grad_norm": 1.0, "step_norm": 0.1, "kappa": 0.5, "smoothness": 5.0, "cosine": 1.0}
    for index, loss in enumerate(losses):
        after = {"loss_after": loss - 0.07} if loss is not None else {}
        trace.append({"step": every * index, "loss": loss, **after, **common, **row})
    return trace


def falling(num=30, *, first=2.0, last=0.5):
    """Losses of a run that goes well."""
    return [first * (last / first) ** (k / (num - 1)) for k in range(num)]


def network():
    """A perceptron for :func:`points`."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def points(step, *, size=64):
    """A batch of four clusters that overlap, other points at every step."""
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(4, (size,), generator=generator)
    centres = torch.randn(4, 10, generator=torch.Generator().manual_seed(99))
    return centres[labels] + torch.randn(size, 10, generator=generator), labels


def train(model, optimizer, *, steps=80, every=4, batch=points, zero_grad=True):
    """The probe of a training."""
    probe = SmoothnessProbe(model, every=every)
    for step in range(steps):
        x, y = batch(step)

        def loss_fn(x=x, y=y):
            return F.cross_entropy(model(x), y)

        loss = loss_fn()
        loss.backward()
        with probe(loss_fn, loss=loss):
            optimizer.step()
        if zero_grad:
            model.zero_grad()
    return probe
