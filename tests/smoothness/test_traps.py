"""The traps of measuring smoothness: what careless procedures find where there is no (L0, L1) effect."""

import numpy as np
import pytest
import torch
from torch import nn

import curvestep as cs
from curvestep.fit.fit import fit_smoothness
from curvestep.smoothness.probe import SmoothnessProbe
from curvestep.trace.trace import Trace

SIZE, RADIUS = 50, 0.02


class Quadratic(nn.Module):
    """f_B(x) = ½ (x − b_B)ᵀ H (x − b_B): the Hessian is H everywhere and for every batch."""

    def __init__(self, eigenvalues):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(len(eigenvalues)))
        self.register_buffer("H", eigenvalues)

    def forward(self, b):
        return 0.5 * (self.H * (self.x - b).square()).sum(-1).mean()


def run_on_quadratic(
    eigenvalues, *, steps=300, noise=0.5, lr=0.05, max_norm=RADIUS / 0.05, fractions=(0.5, 1.0), estimators=()
):
    """Clipped SGD with a paired probe at every step, and the unpaired differences of consecutive batches."""
    torch.manual_seed(1)
    model = Quadratic(eigenvalues)
    optimizer = cs.ClippedSGD(model.parameters(), lr=lr, max_norm=max_norm)
    probe = SmoothnessProbe(model, every=1, fractions=fractions, estimators=estimators)
    unpaired, previous = Trace(), None
    for step in range(steps):
        swing = 1.5 + np.sin(2 * np.pi * step / 30)  # gradients grow and shrink, slowly
        b = noise * swing * torch.randn(4, len(eigenvalues))
        optimizer.zero_grad()
        model(b).backward()
        x, g = model.x.detach().clone(), model.x.grad.clone()
        if previous is not None:
            length = (x - previous[0]).norm()
            row = {"step": step, "grad_norm": g.norm(), "step_norm": length, "lr": lr}
            clipped = {"coefficient": min(1.0, max_norm / g.norm().item())}
            unpaired.append(row | clipped | {"smoothness": (g - previous[1]).norm() / length})
        previous = x, g
        with probe(lambda b=b: model(b)):
            optimizer.step()
    return probe.trace, unpaired


@pytest.mark.slow
def test_T1_unpaired_differences_fabricate_L1_and_paired_ones_do_not():
    trace, unpaired = run_on_quadratic(torch.ones(SIZE), estimators=("local_smoothness",))
    ours, theirs = fit_smoothness(trace, control=False), fit_smoothness(unpaired, control=False)
    assert theirs.spearman > 0.8
    # Two batches have nearly orthogonal gradients, so that the difference is √2 of one, over a fixed radius.
    assert 0.4 * np.sqrt(2) / RADIUS < theirs.L1 < 1.6 * np.sqrt(2) / RADIUS
    assert theirs.L1_interval[0] > 10
    np.testing.assert_allclose(trace.column("smoothness"), 1.0, rtol=1e-8)
    np.testing.assert_allclose(trace.column("local_smoothness"), 1.0, rtol=1e-8)
    low, high = ours.L1_interval
    assert low <= 0 <= high
    assert high < 1


@pytest.mark.slow
def test_T2_steps_at_the_edge_of_stability_raise_the_warning_about_kappa():
    # Every step jumps across the valley: the gradient turns round, whatever its size, and κ is about 2.
    torch.manual_seed(0)
    model = nn.Module()
    model.x = nn.Parameter(torch.tensor([1.0]))
    probe = SmoothnessProbe(model, every=1)
    trace = probe.trace
    for _ in range(100):
        # f = a·|x|-like valley whose steepness changes from step to step; clipped steps of fixed length.
        a = float(torch.rand(()).mul(3).exp())

        def loss_fn(a=a):
            return a * torch.sqrt(model.x.square() + 1e-4).sum()

        model.x.grad = None
        loss_fn().backward()
        with probe(loss_fn):
            cs.ClippedSGD(model.parameters(), lr=100.0, max_norm=2 * abs(model.x.item()) / 100.0).step()
    fit = fit_smoothness(trace, control=False)
    assert np.median(trace.column("kappa")) == pytest.approx(2.0, rel=0.05)
    assert "kappa-saturated" in {warning.kind for warning in fit.warnings}
