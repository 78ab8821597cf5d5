"""Smoothness in the optimizer's own metric: against the formula, against quadratics, and at no cost."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import curvestep as cs
from curvestep.smoothness.geometry import FLOOR, geometry_of
from curvestep.smoothness.probe import SmoothnessProbe
from tests.smoothness.loops import block_steps


class Words(nn.Module):
    """An embedding of which most rows are never used, and a head."""

    def __init__(self):
        super().__init__()
        self.embedding, self.hidden, self.head = nn.Embedding(30, 4), nn.Linear(4, 8), nn.Linear(8, 5)

    def forward(self, x):
        return self.head(torch.tanh(self.hidden(self.embedding(x))))


def groups(model):
    return [{"params": model.embedding.parameters(), "lr": 0.003}, {"params": model.head.parameters()}]


OPTIMIZERS = {
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, betas=(0.8, 0.99)),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1),
    "amsgrad": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, amsgrad=True),
    "ClippedAdamW": lambda m: cs.ClippedAdamW(m.parameters(), lr=0.01, max_norm=0.1),
    "unequal lr": lambda m: torch.optim.AdamW(groups(m), lr=0.01),
    "lr of zero": lambda m: torch.optim.AdamW(
        [*groups(m), {"params": m.hidden.parameters(), "lr": 0.0}], lr=0.01
    ),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.3, momentum=0.9),
    "SGD, unequal lr": lambda m: torch.optim.SGD(groups(m), lr=0.3),
}


def metric(optimizer, model):
    """P of every parameter, as the formula says; infinite for one that does not move."""
    scales = {}
    top = max(group["lr"] for group in optimizer.param_groups)
    for group in optimizer.param_groups:
        for p in group["params"]:
            ratio = top / group["lr"] if group["lr"] else math.inf
            if "betas" not in group:
                scales[p] = torch.full_like(p, ratio)
                continue
            state = optimizer.state[p]
            v = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
            hat = (v / (1 - group["betas"][1] ** float(state["step"]))).sqrt()
            P = torch.maximum(hat + group["eps"], FLOOR * hat.square().mean().sqrt())
            scales[p] = P * ratio
    return [scales.get(p, torch.full_like(p, math.inf)).detach() for p in model.parameters()]


def gradient(model, x, y):
    with cs.Replay(model, lambda: F.cross_entropy(model(x), y)) as replay:
        return replay.gradient().gradients


@pytest.mark.parametrize("fractions", [(0.5, 1.0), (0.5,)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_smoothness_in_the_metric_is_that_of_the_formula(name, fractions):
    model = Words()
    optimizer = OPTIMIZERS[name](model)
    probe = SmoothnessProbe(model, every=1, fractions=fractions, on_error="raise")
    for _ in range(3):  # the first step too, where the state was empty before it
        x, y = torch.randint(8, (16,)), torch.randint(5, (16,))
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        old = [p.grad.clone() for p in model.parameters()]
        start = [p.detach().clone() for p in model.parameters()]
        with probe(lambda x=x, y=y: F.cross_entropy(model(x), y)):
            optimizer.step()
        end = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p, a, b in zip(model.parameters(), start, end, strict=True):
                p.copy_(a + fractions[-1] * (b - a))
        new = gradient(model, x, y)
        with torch.no_grad():
            for p, b in zip(model.parameters(), end, strict=True):
                p.copy_(b)
        P = metric(optimizer, model)
        change = sum(((n - o) ** 2 / s).sum() for n, o, s in zip(new, old, P, strict=True))
        moved = [
            torch.where(s < math.inf, s, 0.0) * (b - a) ** 2 for s, a, b in zip(P, start, end, strict=True)
        ]
        expected = math.sqrt(change) / (fractions[-1] * math.sqrt(sum(m.sum() for m in moved)))
        row = probe.trace[-1]
        assert row["optimizer_smoothness"] == pytest.approx(expected, rel=1e-6)
        assert row["optimizer"] == type(optimizer).__name__
        if name == "SGD":
            assert row["optimizer_smoothness"] == row["secants"][-1]


SETTINGS = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.5, "dampening": 0.5},
    {"momentum": 0.9, "dampening": 0.9},  # the average that Adam keeps: 38
    {"momentum": 0.9, "nesterov": True},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_quadratics_diverge_just_beyond_the_edge(settings):
    def final(share):
        x = nn.Parameter(torch.tensor([1.0]))
        optimizer = torch.optim.SGD([x], lr=1.0, **settings)
        limit = geometry_of([optimizer], [1.0], [x]).limit
        optimizer.param_groups[0]["lr"] = share * limit / 5.0
        for _ in range(2000):
            optimizer.zero_grad()
            (2.5 * x.square()).sum().backward()
            optimizer.step()
        return abs(x.item())

    assert final(0.99) < 1e-3
    assert final(1.01) > 1e3


def test_edge_of_adam_is_that_of_an_averaged_momentum():
    for make, beta, limit in (
        (lambda p: torch.optim.AdamW(p, lr=0.1), 0.9, 38.0),
        (lambda p: cs.ClippedAdamW(p, lr=0.1, max_norm=1.0, betas=(0.8, 0.99)), 0.8, 18.0),
        (lambda p: cs.ClippedSGD(p, lr=0.1, max_norm=1.0), 0.0, 2.0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.9), 0.9, 38.0),
    ):
        model = nn.Linear(2, 2)
        optimizer, probe = make(model.parameters()), SmoothnessProbe(model, every=1)
        block_steps(probe, optimizer, lambda model=model: model(torch.ones(1, 2)).square().sum())
        assert probe.trace[0]["momentum"] == beta
        assert probe.trace[0]["optimizer_limit"] == pytest.approx(limit)


def test_what_has_no_metric_says_why():
    def row(make):
        model = nn.Linear(2, 2)
        made = make(model)
        probe = SmoothnessProbe(model, every=1)
        model(torch.ones(1, 2)).square().sum().backward()
        with probe(lambda: model(torch.ones(1, 2)).square().sum()):
            for optimizer in made:
                optimizer.step()
        return probe.trace[0]

    unknown = row(lambda m: [torch.optim.RMSprop(m.parameters(), lr=0.1)])
    assert unknown["optimizer_missing"] == "how RMSprop steps is not known"
    assert unknown["optimizer"] == "RMSprop"
    assert unknown["optimizer_smoothness"] is None
    assert unknown["status"] == "ok"
    nadam = row(lambda m: [torch.optim.NAdam(m.parameters(), lr=0.1)])
    assert nadam["optimizer_missing"] == "how NAdam steps is not known"
    if hasattr(torch.optim, "Muon"):
        muon = row(lambda m: [torch.optim.Muon([m.weight], lr=0.1)])
        assert muon["optimizer_missing"] == "how Muon steps is not known"
        assert (muon["optimizer_smoothness"], muon["status"]) == (None, "ok")
        assert muon["smoothness"] > 0  # in the plain metric it is measured
    two = row(lambda m: [torch.optim.SGD([p], lr=0.1) for p in m.parameters()])
    assert two["optimizer_missing"] == "2 optimizers stepped"
    zero = row(lambda m: [torch.optim.SGD(m.parameters(), lr=0.0)])
    assert zero["optimizer_missing"] == "its lr is zero, or its state empty"
    betas = row(
        lambda m: [torch.optim.Adam([{"params": m.weight}, {"params": m.bias, "betas": (0.5, 0.9)}], lr=0.1)]
    )
    assert betas["optimizer_limit"] is None  # there is no one edge
    assert betas["optimizer_smoothness"] > 0
    model = nn.Linear(2, 2)
    empty = geometry_of([torch.optim.AdamW(model.parameters())], [0.1], list(model.parameters()))
    assert empty.missing == "its lr is zero, or its state empty"
