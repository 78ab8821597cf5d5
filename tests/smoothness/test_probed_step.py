"""The row of one measured step holds what the formulas say."""

import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import curvestep as cs
from curvestep.smoothness.estimators import segment_smoothness
from curvestep.smoothness.probe import SmoothnessProbe
from tests.models import Mixed, classifier, mlp
from tests.smoothness.loops import block_steps, measured_sgd, recorded_steps, watched_sgd


def quadratic(H, x):
    """0.5 xᵀHx as a model without input."""
    model = nn.Module()
    model.x = nn.Parameter(x)
    return model, lambda: 0.5 * model.x @ H @ model.x


def test_row_of_a_quadratic_holds_the_numbers_computed_by_hand():
    H = torch.randn(4, 4)
    H, x = H + H.T, torch.randn(4)
    model, loss_fn = quadratic(H, x.clone())
    optimizer = cs.ClippedSGD(model.parameters(), lr=0.3, max_norm=0.5)
    probe = SmoothnessProbe(
        model, every=1, estimators=("smoothness", "local_smoothness", "spectral_smoothness")
    )
    loss = loss_fn()
    loss.backward()
    with probe(loss_fn, loss=loss, batch_size=7):
        optimizer.step()
    row, g = probe.trace[0], H @ x
    d = -0.3 * min(1.0, 0.5 / g.norm().item()) * g
    L = ((H @ d).norm() / d.norm()).item()
    assert row["step"] == 0
    assert row["status"] == "ok"
    assert row["loss"] == loss.item()
    assert row["loss_after"] == pytest.approx(0.5 * (x + d) @ H @ (x + d))
    assert row["grad_norm"] == pytest.approx(g.norm().item())
    assert row["step_norm"] == pytest.approx(d.norm().item())
    assert row["smoothness"] == pytest.approx(L, rel=1e-8)
    assert row["local_smoothness"] == pytest.approx(L, rel=1e-8)
    assert row["spectral_smoothness"] == pytest.approx(torch.linalg.matrix_norm(H, 2).item(), rel=1e-6)
    assert row["spectral_converged"]
    assert row["kappa"] == pytest.approx((H @ d).norm().item() / g.norm().item())
    assert row["lr"] == 0.3
    assert row["coefficient"] == pytest.approx(min(1.0, 0.5 / g.norm().item()))
    assert row["stability_margin"] == pytest.approx(0.15 * L)
    assert row["fractions"] == [0.5 / 3, 0.5, 1.0]
    assert row["secants"] == pytest.approx([L, L, L])
    assert row["grad_norms"] == pytest.approx([(H @ (x + f * d)).norm().item() for f in row["fractions"]])
    assert row["curvature"] == pytest.approx((d @ H @ d / (d @ d)).item())
    assert row["cosine"] == pytest.approx(1.0)
    assert row["local_converged"]
    assert row["local_error"] < 1e-6
    assert row["batch_size"] == 7


@pytest.mark.parametrize("fractions", [(1.0,), (0.5,), (0.5, 1.0), (0.2, 0.4, 0.6, 0.8, 1.0)])
def test_probe_agrees_with_the_estimator_written_from_the_formula(fractions):
    model, loss_fn = classifier()
    optimizer, probe = measured_sgd(model, lr=0.7, fractions=fractions, layers=True)
    start = [p.detach().clone() for p in model.parameters()]
    block_steps(probe, optimizer, loss_fn)
    end = [p.detach().clone() for p in model.parameters()]
    with cs.Replay(model, loss_fn) as replay:
        whole = segment_smoothness(replay, start, end, fractions=fractions)
        secants = [segment_smoothness(replay, start, end, fractions=(f,)).item() for f in fractions]
        here = torch.cat([g.flatten() for g in replay(start)])
        inner = [[a + f * (b - a) for a, b in zip(start, end, strict=True)] for f in fractions]
        there = [torch.cat([g.flatten() for g in replay(point)]) for point in inner]
    row, d = probe.trace[0], torch.cat([(b - a).flatten() for a, b in zip(start, end, strict=True)])
    assert row["secants"] == pytest.approx(secants, rel=1e-9)
    assert row["grad_norms"] == pytest.approx([g.norm().item() for g in there], rel=1e-9)
    assert row["smoothness"] == max(row["secants"])
    assert row["cosine"] == pytest.approx((-d @ here / d.norm() / here.norm()).item(), rel=1e-9)
    if 1.0 in fractions:
        assert row["curvature"] == pytest.approx((d @ (there[-1] - here) / (d @ d)).item(), rel=1e-6)
    else:
        assert row["curvature"] is None
    assert probe.trace.fractions == fractions
    assert probe.trace.column("secants").tolist() == [row["secants"]]
    assert row["smoothness"] == pytest.approx(whole.item(), rel=1e-9)
    first = sum(p.numel() for p in start[:2])  # numbers of the first layer, before those of the second
    for name, part in (("0", slice(first)), ("2", slice(first, None))):
        ratios = [
            (g - here)[part].norm() / (f * d[part].norm()) for g, f in zip(there, fractions, strict=True)
        ]
        assert row["layers"][name]["smoothness"] == pytest.approx(max(ratios).item(), rel=1e-9)


def test_gradients_zeroed_inside_the_block_stay_so():
    model, loss_fn = classifier()
    optimizer, probe = measured_sgd(model)
    loss_fn().backward()
    with probe(loss_fn):
        optimizer.step()
        optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert probe.trace[0]["status"] == "ok"


def test_accumulated_micro_batches_with_dropout_replay_exactly():
    model, _ = classifier(dropout=0.5)
    optimizer, probe = measured_sgd(model)
    parts = [(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(3)]

    def loss_fn():
        total = 0.0
        for x, y in parts:
            loss = F.cross_entropy(model(x), y) / len(parts)
            loss.backward()
            total += loss.item()
        return total

    for _ in range(3):
        optimizer.zero_grad()
        loss_fn()
        with probe(loss_fn):
            optimizer.step()
    assert probe.trace.ok.all()
    assert probe.trace[0]["self_test"] == 0.0
    assert probe.trace.column("batch_size").tolist() == [12, 12, 12]


def test_a_closure_in_torchs_style_is_measured_like_any_other():
    def smoothness(style):
        torch.manual_seed(0)
        model, loss_fn = classifier(dropout=0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def closure():
            optimizer.zero_grad()
            loss = loss_fn()
            loss.backward()
            return loss

        probe = SmoothnessProbe(model, every=1, estimators=("smoothness", "local_smoothness"))
        for _ in range(3):
            closure()
            with probe(closure if style == "torch" else loss_fn):
                optimizer.step()
        assert probe.trace.ok.all()
        return [probe.trace.column(name).tolist() for name in ("smoothness", "local_smoothness", "loss")]

    assert smoothness("torch") == smoothness("plain")


def test_tied_frozen_unused_and_sparse_ones_are_measured_like_dense_ones():
    def smoothness(sparse):
        torch.manual_seed(0)
        model = Mixed()
        model.rows.sparse = sparse
        x, y = torch.randint(11, (9,)), torch.randint(11, (9,))
        optimizer = cs.ClippedSGD([p for p in model.parameters() if p.requires_grad], lr=0.5, max_norm=0.1)
        probe = SmoothnessProbe(model, every=1, estimators=("smoothness", "local_smoothness"), layers=True)
        block_steps(probe, optimizer, lambda: F.cross_entropy(model(x), y), 4)
        assert probe.trace.ok.all()
        assert probe.trace[0]["layers"]["unused"]["step_norm"] == 0
        return [torch.from_numpy(probe.trace.column(n).copy()) for n in ("smoothness", "local_smoothness")]

    torch.testing.assert_close(smoothness(True), smoothness(False), rtol=1e-9, atol=0)


def test_noise_from_two_halves_is_that_of_the_batch_gradient():
    model = nn.Linear(1, 4, bias=False)  # f = ½‖w − b‖² for each sample b: its gradient has covariance I
    optimizer, probe = measured_sgd(model, lr=0.01)

    def loss_of(b):
        return lambda: 0.5 * (model(torch.ones(1, 1)) - b).square().sum(-1).mean()

    signals = []
    for _ in range(100):
        b = torch.randn(16, 4)
        optimizer.zero_grad()
        loss_of(b)().backward()
        signals.append(model.weight.detach().square().sum().item())
        with probe(loss_of(b), halves=(loss_of(b[:8]), loss_of(b[8:])), batch_size=16):
            optimizer.step()
    mean_square = (probe.trace.column("noise") ** 2).mean()
    assert mean_square == pytest.approx(4 / 16, rel=0.2)  # E‖g − ∇f‖² = 4 dimensions / 16 samples
    assert probe.trace.ok.all()
    variance, signal = probe.trace.column("grad_variance"), probe.trace.column("grad_signal")
    assert variance.mean() == pytest.approx(4.0, rel=0.2)  # tr Σ of one sample
    error = (signal - np.array(signals)).std() / 100**0.5
    assert signal.mean() == pytest.approx(np.mean(signals), abs=4 * error)  # ‖G‖², without the noise of 0.25
    assert error < 0.08


@pytest.mark.parametrize("carry", [False, True])
def test_oracle_measures_the_weighted_mean_over_its_batches(carry):
    model = nn.Linear(3, 1)
    parts = [torch.randn(2, 3), torch.randn(6, 3), torch.randn(4, 3)]

    def loss_of_batch(x, state=None):
        out = model(x).square().mean()
        return (out, state) if carry else out

    oracle = cs.GradientOracle(loss_of_batch, parts, carry_state=carry)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(5, 3)
    probe = SmoothnessProbe(model, every=1, oracle=oracle)
    start = [p.detach().clone() for p in model.parameters()]
    block_steps(probe, optimizer, lambda: model(x).square().mean())
    together = torch.cat(parts)
    end = [p.detach().clone() for p in model.parameters()]
    with cs.Replay(model, lambda: model(together).square().mean()) as replay:
        exact = segment_smoothness(replay, start, end)
        gradient = replay(start)
    row = probe.trace[0]
    assert row["smoothness"] == pytest.approx(exact.item(), rel=1e-9)
    assert row["grad_norm"] == pytest.approx(torch.cat([g.flatten() for g in gradient]).norm().item())


def test_rows_say_how_precise_their_gradients_are():
    model, _ = classifier()
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    generator = torch.Generator().manual_seed(0)

    def loss_fn():
        order = torch.randperm(8, generator=generator)  # the same sum in another order
        return F.cross_entropy(model(x[order]), y[order])

    optimizer, probe = measured_sgd(model)
    block_steps(probe, optimizer, loss_fn, 2)
    assert probe.trace.column("eps").tolist() == [2.0**-52] * 2
    first, second = probe.trace.column("self_test")
    assert 0 < first == second < 1e-12


@pytest.mark.parametrize("oracle", [False, True])
def test_a_measured_step_keeps_no_batch_alive(oracle):
    model = mlp()
    fixed = cs.GradientOracle(lambda batch: model(batch).square().mean(), [torch.randn(4, 6)])
    optimizer, probe = watched_sgd(model, oracle=fixed if oracle else None)
    x = torch.randn(8, 6)
    alive = weakref.ref(x)
    recorded_steps(probe, optimizer, lambda x=x: model(x).square().mean())
    optimizer.zero_grad()
    del x
    assert alive() is None
    assert probe.trace.ok.all()
