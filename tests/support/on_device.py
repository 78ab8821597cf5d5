"""Probe and calibration on the strict device, run by `tests/test_strict_device.py` in its own process."""

import pytest
import torch
from torch import nn

import curvestep as cs
from tests.support.strict import strict_device, waits


@pytest.fixture(autouse=True)
def device():
    with strict_device() as device:
        yield device


def network(place, dropout=0.0):
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 8), nn.Linear(8, 1)
    )
    for p in model.parameters():
        p.data = 0.3 * torch.randn(p.shape, generator=generator)
    x = torch.randn(16, 3, generator=generator)
    return model.to(place), x.to(place), x.sum(1, keepdim=True).sin().to(place)


def train(place, *, probed=True, make=cs.ClippedSGD, dropout=0.0, steps=6, **options):
    model, x, y = network(place, dropout)
    torch.strict.manual_seed(1)
    optimizer = make(model.parameters(), 0.05, 0.5)
    probe = cs.SmoothnessProbe(model, every=2, **options)

    def loss_fn():
        return (model(x) - y).square().mean()

    for _ in range(steps):
        optimizer.zero_grad()
        loss_fn().backward()
        if probed:
            with probe(loss_fn):
                optimizer.step()
        else:
            optimizer.step()
    return probe.trace, [t.detach().cpu() for t in model.state_dict().values()]


def flat(row, prefix=""):
    """Every number of a row, by name."""
    pairs = row.items() if isinstance(row, dict) else enumerate(row)
    numbers = {}
    for name, value in pairs:
        if isinstance(value, (dict, list, tuple)):
            numbers |= flat(value, f"{prefix}{name}.")
        elif isinstance(value, float):
            numbers[f"{prefix}{name}"] = value
    return numbers


def same(rows, others):
    """Whether two traces have the same numbers, all but what is rounded to nothing."""
    for row, other in zip(rows, others, strict=True):
        assert row.keys() == other.keys()
        assert flat(row) == pytest.approx(flat(other), rel=1e-6, abs=1e-9, nan_ok=True)


@pytest.mark.parametrize("make", [cs.ClippedSGD, cs.NormalizedSGD, cs.ClippedAdamW])
@pytest.mark.parametrize(
    "options",
    [{}, {"layers": True}, {"estimators": ("smoothness", "local_smoothness", "spectral_smoothness")}],
)
def test_the_probe_measures_what_it_measures_on_cpu(make, options, device):
    away, _ = train(device, make=make, **options)
    here, _ = train("cpu", make=make, **options)
    same(list(away), list(here))
    assert len(away) == 3


def test_a_probed_run_is_the_run_without_the_probe(device):
    # Dropout on the device draws from the device's own generator, which has to be put back.
    _, probed = train(device, dropout=0.5)
    _, plain = train(device, dropout=0.5, probed=False)
    assert all(torch.equal(p, q) for p, q in zip(probed, plain, strict=True))


def test_calibrate_finds_what_it_finds_on_cpu(device):
    found = []
    for place in (device, "cpu"):
        model, x, y = network(place)
        batches = [(x[i : i + 4], y[i : i + 4]) for i in range(0, 16, 4)]
        found.append(
            cs.calibrate(model, lambda b, model=model: (model(b[0]) - b[1]).square().mean(), batches)
        )
    assert found[0].lr == pytest.approx(found[1].lr, rel=1e-6)
    assert found[0].max_norm == pytest.approx(found[1].max_norm, rel=1e-6)


def test_what_waits_is_counted_and_lists_of_two_devices_are_refused(device):
    with waits(0):
        t = torch.full((3,), 2.0, device=device)
        u = torch.zeros_like(t).add_(t)
        torch._foreach_add_([t, u], 1.0)
        torch.stack([t.sum(), u.norm()])
    for read in (
        lambda: t[0].item(), lambda: bool(t.sum() > 0), lambda: t.tolist(), lambda: t.cpu(), t.nonzero,
        lambda: torch.equal(t, u), lambda: torch.tensor(1.0, device=device),
    ):  # fmt: skip
        with waits(1):
            read()
    with pytest.raises(RuntimeError, match="tensors on several devices"):
        torch._foreach_add_([t, torch.zeros(3)], 1.0)
    with pytest.raises(RuntimeError, match="tensors on several devices"):
        torch._foreach_norm([t, torch.zeros(())])
    with pytest.raises(RuntimeError, match="on the same device"):
        t.add_(torch.zeros(3))


@pytest.mark.skipif(torch.__version__ < "2.7", reason="torch 2.6 does not ask the device whether it is there")
def test_other_tests_see_no_accelerator():
    with strict_device():
        pass
    assert not torch.accelerator.is_available()
