"""Where one of the first steps overshoots, the probe measures how much of it was safe; elsewhere nothing."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import curvestep as cs
from curvestep.calibration.passes import Passes
from curvestep.calibration.scale import scale_of
from curvestep.smoothness.probe import SmoothnessProbe
from tests.processes import run_on_processes
from tests.smoothness.loops import assert_same_run, train


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 3))


def batches(num):
    torch.manual_seed(1)
    return [(torch.randn(16, 6), torch.randint(3, (16,))) for _ in range(num)]


def probed(make_optimizer, *, steps=1, with_loss=True, model=None, **options):
    """The trace of a few steps, and how often each called the loss."""
    model = net() if model is None else model
    optimizer, probe = make_optimizer(model.parameters()), SmoothnessProbe(model, every=1, **options)
    calls = []
    for x, y in batches(steps):

        def loss_fn(x=x, y=y):
            calls.append(probe.step)
            return F.cross_entropy(model(x), y)

        optimizer.zero_grad()
        loss = loss_fn()
        loss.backward()
        with probe(loss_fn, loss=loss if with_loss else None):
            optimizer.step()
    return probe.trace, [calls.count(step) for step in range(steps)]


def sgd(lr):
    return lambda parameters: torch.optim.SGD(parameters, lr=lr)


@pytest.mark.parametrize("times", [1.8, 40.0, 1e6])
def test_on_a_parabola_it_is_one_over_step_and_curvature_and_the_row_is_as_ever(times):
    model = nn.ParameterList([nn.Parameter(torch.tensor([3.0, -1.0]))])
    optimizer, probe = sgd(times / 2.5)(model.parameters()), SmoothnessProbe(model, fractions=(0.2, 0.6, 1.0))

    def loss_fn():
        return 1.25 * model[0].square().sum()

    loss = loss_fn()
    loss.backward()
    with probe(loss_fn, loss=loss):
        optimizer.step()
    row = probe.trace[0]
    assert row["safe_fraction"] == pytest.approx(1 / times, rel=1e-9)
    assert row["kappa"] == pytest.approx(times)
    assert row["secants"] == pytest.approx([2.5] * 3)
    assert row["loss_after"] == pytest.approx(loss.item() * (1 - times) ** 2)


def scales_of(num):
    """What calibrate measures on each of the batches, before any step."""
    model = net()
    with Passes(model, lambda b: F.cross_entropy(model(b[0]), b[1])) as passes:
        return [scale_of(passes, [batch], [1.0] * len(passes.parameters)) for batch in batches(num)]


@pytest.mark.parametrize("times", [3, 10, 300])
def test_it_is_calibrates_safe_step_on_the_same_batch(times):
    safe_step = scales_of(1)[0].step
    for with_loss in (True, False):
        trace, _ = probed(sgd(times * safe_step), with_loss=with_loss)
        assert trace[0]["lr"] * trace[0]["safe_fraction"] == pytest.approx(safe_step, rel=1e-9)


def test_after_it_the_next_batches_are_asked_at_the_start_and_say_what_calibrate_measures():
    steps, norms = ([getattr(scale, name) for scale in scales_of(3)[1:]] for name in ("step", "grad_norm"))
    trace, _ = probed(sgd(60.0), steps=3)
    assert trace.column("start_step").tolist() == pytest.approx([math.nan, *steps], rel=1e-6, nan_ok=True)
    assert trace.column("start_grad_norm").tolist() == pytest.approx([math.nan, *norms], nan_ok=True)


def test_the_start_is_asked_though_the_run_is_lost():
    trace, _ = probed(sgd(1e200), steps=3)
    assert trace.column("status").tolist()[1:] == ["nonfinite"] * 2
    expected = probed(sgd(60.0), steps=3)[0].column("start_step").tolist()
    assert trace.column("start_step").tolist() == pytest.approx(expected, rel=1e-6, nan_ok=True)


def test_a_closure_that_fails_at_the_start_spoils_no_later_row():
    model = net()
    optimizer = sgd(60.0)(model.parameters())
    probe, begun = SmoothnessProbe(model, every=1, on_error="mark"), model[0].weight.detach().clone()
    for x, y in batches(5):

        def loss_fn(x=x, y=y):
            if probe.step and torch.equal(model[0].weight, begun):
                raise RuntimeError("not here")
            return F.cross_entropy(model(x), y)

        optimizer.zero_grad()
        loss = loss_fn()
        loss.backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with probe(loss_fn, loss=loss):
                optimizer.step()
    words = ["ok", *["failed: RuntimeError: not here"] * 2, "ok", "ok"]
    assert probe.trace.column("status").tolist() == words


def test_of_adams_first_step_it_is_where_the_slope_along_signs_ends():
    # f = 1/2 sum L_i x_i^2 along sign(x): the slope ends at h = sum |L_i x_i| / sum L_i.
    model = nn.ParameterList([nn.Parameter(torch.tensor([3.0, -4.0]))])
    curvatures = torch.tensor([1.0, 2.0])
    optimizer = torch.optim.Adam(model.parameters(), lr=10 * 11.0 / 3.0, eps=1e-30)
    probe = SmoothnessProbe(model, every=1)

    def loss_fn():
        return 0.5 * (curvatures * model[0].square()).sum()

    loss = loss_fn()
    loss.backward()
    with probe(loss_fn, loss=loss):
        optimizer.step()
    row = probe.trace[0]
    assert row["cosine"] < 0.99
    assert row["lr"] * row["safe_fraction"] == pytest.approx(11.0 / 3.0, rel=0.05)


def test_a_step_that_ends_where_nothing_is_finite_has_one():
    model = nn.ParameterList([nn.Parameter(torch.tensor([2.0]))])
    optimizer, probe = sgd(100.0)(model.parameters()), SmoothnessProbe(model)

    def loss_fn():
        return model[0].square().exp().sum()

    loss = loss_fn()
    loss.backward()
    with probe(loss_fn, loss=loss):
        optimizer.step()
    row = probe.trace[0]
    assert row["status"] == "nonfinite"
    step = row["safe_fraction"] * row["step_norm"]
    assert step == pytest.approx(2)  # to the minimum at zero, where the gradient has changed by itself


def test_healthy_runs_pay_nothing_and_others_in_their_first_three_rows_only():
    trace, calls = probed(sgd(0.1), steps=6)
    assert calls == [6, 5, 4, 4, 4, 4]  # training's, three fractions, and the self-test of two steps
    assert trace.column("safe_fraction").tolist() == pytest.approx([math.nan] * 6, nan_ok=True)
    trace, calls = probed(sgd(60.0), steps=6)
    known = torch.isfinite(torch.tensor(trace.column("safe_fraction"))).tolist()
    assert known[0]
    assert not any(known[3:])
    assert calls[3:] == [4] * 3
    assert 6 + 3 <= calls[0] <= 6 + 16


def test_a_loss_that_is_given_in_another_unit_makes_no_step_too_long():
    model = net()
    optimizer, probe = sgd(0.1)(model.parameters()), SmoothnessProbe(model)
    for x, y in batches(1):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with probe(lambda x=x, y=y: F.cross_entropy(model(x), y), loss=loss / 128):
            optimizer.step()
    assert probe.trace[0]["safe_fraction"] is None


@pytest.mark.parametrize("name", ["mlp", "batchnorm", "lstm"])
def test_a_run_that_is_looked_at_closer_is_the_run_without_a_probe(name):
    def make(parameters):
        return cs.ClippedSGD(parameters, lr=100.0, max_norm=math.inf), None

    plain = train(name, make, steps=8)
    found = train(name, make, steps=8, make_probe=lambda m: SmoothnessProbe(m, every=2, layers=True))
    assert_same_run(plain, found)
    assert found[3].trace[0]["safe_fraction"] > 0


def on_two_ranks(rank, wrap):
    model = net()
    wrapped = wrap(model)
    optimizer, probe = sgd(60.0)(model.parameters()), SmoothnessProbe(wrapped, every=1)
    for x, y in batches(3):
        part = slice(rank * 8, rank * 8 + 8)

        def loss_fn(x=x[part], y=y[part]):
            return F.cross_entropy(wrapped(x), y)

        optimizer.zero_grad()
        loss = loss_fn()
        loss.backward()
        with probe(loss_fn, loss=loss):
            optimizer.step()
    return [probe.trace.column(name).tolist() for name in ("safe_fraction", "start_step")]


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard])
def test_two_ranks_agree_when_to_look_closer_and_find_what_one_does(wrap):
    alone, _ = probed(sgd(60.0), steps=3)
    expected = [alone.column(name).tolist() for name in ("safe_fraction", "start_step")]
    for found in run_on_processes(on_two_ranks, wrap):
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=1e-6, nan_ok=True)
