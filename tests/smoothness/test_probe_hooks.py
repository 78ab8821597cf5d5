"""`record` with `watch`, and callbacks: the same measurement in other people's loops, and the same bits."""

import itertools
import math
import random
import types
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import curvestep as cs
from curvestep.smoothness.determinism import NonDeterministicError
from curvestep.smoothness.probe import SmoothnessProbe
from curvestep.tensors.distributed import local
from curvestep.tensors.vectors import global_norm
from tests.models import mlp
from tests.processes import run_on_processes
from tests.smoothness.loops import assert_same_run, recorded_steps, tensors_of, watched_sgd

SGD, ADAMW, FUSED, CLIPPED, HOOKED = "SGD", "AdamW", "fused AdamW", "ClippedSGD", "SGD with cs.clip"

pytestmark = pytest.mark.filterwarnings("ignore:The model is in eval mode")  # without dropout and BatchNorm


def net():
    return mlp(6, 10, 3, batchnorm=True, dropout=0.3)


def make_optimizer(kind, model):
    if kind == SGD:
        return torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
    if kind in (ADAMW, FUSED):
        return torch.optim.AdamW(model.parameters(), lr=0.01, fused=kind == FUSED)
    if kind == HOOKED:
        return cs.clip(torch.optim.SGD(model.parameters(), lr=0.4), 0.3).optimizer
    return cs.ClippedSGD(model.parameters(), lr=0.4, max_norm=0.3)


def loop(
    watched=False, *, kind=SGD, accumulate=1, clip=None, dtype=None, scale=None, wrap=None, steps=7, **options
):
    """Train, ``watched`` or not: losses, tensors and random states at the end, and the probe."""
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    model = net() if dtype is None else net().float()
    model = model if wrap is None else wrap(model)
    number = next(model.parameters()).dtype
    optimizer = make_optimizer(kind, model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
    if scaler is not None:
        options["backward"] = lambda loss: scaler.scale(loss).backward()
    probe = None
    if watched:
        probe = SmoothnessProbe(model, every=2, on_error="raise", **options).watch(optimizer)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(accumulate):
            random.random(), np.random.rand()  # a loader that draws between micro-batches
            x, y = torch.randn(8, 6, dtype=number), torch.randint(3, (8,))

            def loss_fn(x=x, y=y):
                with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                    return F.cross_entropy(model(x), y)

            loss = loss_fn() if probe is None else probe.record(loss_fn)
            losses.append(loss.item())
            loss = loss / accumulate
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None and clip is not None:
            scaler.unscale_(optimizer)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        schedule.step()
    state = [*model.state_dict().values(), *tensors_of(optimizer.state_dict()["state"])]
    rng = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    return losses, [local(t.detach()).clone() for t in state], rng, probe


CASES = {
    "plain": {},
    "accumulation": {"accumulate": 3},
    "AdamW": {"kind": ADAMW},
    "ClippedSGD": {"kind": CLIPPED},
    "clipped before the step": {"clip": 0.2},
    "clipped twice, accumulated": {"kind": CLIPPED, "clip": 0.2, "accumulate": 2},
    "bfloat16": {"dtype": torch.bfloat16, "kind": ADAMW, "clip": 0.2},
    "float16, scaled": {"dtype": torch.float16, "scale": 1024.0, "accumulate": 2},
    "float16, scaled, clipped": {"dtype": torch.float16, "scale": 1024.0, "clip": 0.2, "kind": ADAMW},
    "float16, fused": {"dtype": torch.float16, "scale": 1024.0, "kind": FUSED},
    "float16, scaled inside the step": {"dtype": torch.float16, "scale": 1024.0, "kind": CLIPPED},
    "float16, scaled, clipped by a hook": {
        "dtype": torch.float16,
        "scale": 512.0,
        "kind": HOOKED,
        "accumulate": 3,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_watched_runs_are_those_without_and_rows_tell_of_their_steps(case):
    options = CASES[case]
    plain, watched = loop(**options), loop(watched=True, **options)
    assert_same_run(plain, watched)
    trace = watched[3].trace
    assert trace.column("step").tolist() == [0, 2, 4, 6]
    assert trace.ok.all(), list(trace.column("status"))
    if options.get("kind") == FUSED:  # a step that unscales itself
        np.testing.assert_allclose(trace.column("coefficient"), 1.0, rtol=0.02)
    if options.get("kind") in (ADAMW, FUSED):
        return
    for row in trace:
        assert row["lr"] == pytest.approx(0.4 * 0.9 ** row["step"])
        assert row["batch_size"] == 8 * options.get("accumulate", 1)
        eps = torch.finfo(options.get("dtype") or torch.float64).eps
        assert row["eps"] == eps
        bound = min(
            options.get("clip", math.inf), 0.3 if options.get("kind") in (CLIPPED, HOOKED) else math.inf
        )
        expected = min(1.0, bound / row["grad_norm"])
        assert row["coefficient"] == pytest.approx(expected, rel=1e-4 if eps < 1e-10 else 0.02)
    if options.get("kind") in (CLIPPED, HOOKED):  # no momentum: the step itself says it
        step = trace.column("lr") * trace.column("coefficient") * trace.column("grad_norm")
        np.testing.assert_allclose(step, trace.column("step_norm"), rtol=1e-6 if eps < 1e-10 else 0.02)


def test_weights_are_the_shares_of_micro_batches():
    model, x, y = net().eval(), torch.randn(8, 6), torch.randint(3, (8,))
    optimizer, probe = watched_sgd(model, lr=0.3, on_error="raise")
    for part in (slice(0, 2), slice(2, 8)):
        count = part.stop - part.start
        loss = probe.record(lambda part=part: F.cross_entropy(model(x[part]), y[part]), weight=count)
        (loss * count / 8).backward()
    whole = F.cross_entropy(model(x), y)
    expected = torch.autograd.grad(whole, list(model.parameters()))
    optimizer.step()
    row = probe.trace[0]
    assert row["loss"] == pytest.approx(whole.item())
    assert row["grad_norm"] == pytest.approx(global_norm(expected).item())
    assert row["self_test"] < 1e-12
    with pytest.raises(ValueError, match="`weight` must be positive"):
        probe.record(lambda: whole, weight=0.0)


def test_batch_size_given_to_record_stays():
    model, x = net(), torch.randn(8, 6)
    optimizer, probe = watched_sgd(model, on_error="raise")
    for step in range(4):
        optimizer.zero_grad()
        call = model.forward if step < 2 else model  # a framework may not call the module itself
        probe.record(lambda call=call: call(x).square().mean(), batch_size=5).backward()
        optimizer.step()
    assert probe.trace.column("batch_size").tolist() == [5, 5, 5, 5]


@pytest.mark.parametrize("order", ["zero_grad last", "zero_grad between forward and backward"])
def test_steps_that_a_scaler_skips_are_no_steps(order):
    model = net().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    probe = SmoothnessProbe(model, every=1, on_error="raise").watch(optimizer)
    for step in range(6):
        x, y = torch.randn(8, 6, dtype=torch.float32), torch.randint(3, (8,))
        factor = math.inf if step in (0, 1, 3) else 1.0
        loss = probe.record(lambda x=x, y=y, factor=factor: factor * F.cross_entropy(model(x), y))
        if order != "zero_grad last":
            optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if order == "zero_grad last":
            optimizer.zero_grad()
    assert probe.trace.column("step").tolist() == [0, 1, 2]
    assert probe.trace.ok.all()
    assert probe.trace.column("batch_size").tolist() == [8, 8, 8]


def test_gradient_clipped_by_value_is_allowed_and_a_foreign_one_is_not():
    model, x, y = net(), torch.randn(8, 6), torch.randint(3, (8,))
    optimizer, probe = watched_sgd(model)
    probe.record(lambda: F.cross_entropy(model(x), y)).backward()
    largest = max(p.grad.abs().max() for p in model.parameters())
    nn.utils.clip_grad_value_(model.parameters(), largest.item() / 2)
    optimizer.step()
    assert probe.trace.ok.all()
    assert probe.trace[0]["coefficient"] < 1
    optimizer.zero_grad()
    loss = probe.record(lambda: F.cross_entropy(model(x), y))
    (loss + sum(p.square().sum() for p in model.parameters())).backward()  # a penalty that was not recorded
    with pytest.warns(UserWarning, match="every loss"):
        optimizer.step()
    assert not probe.trace.ok[1]


def test_step_with_a_closure_is_measured_after_it():
    model, x, y = net(), torch.randn(8, 6), torch.randint(3, (8,))
    optimizer, probe = watched_sgd(model, on_error="raise")

    def closure():
        optimizer.zero_grad()
        loss = probe.record(lambda: F.cross_entropy(model(x), y))
        loss.backward()
        return loss

    for _ in range(3):
        assert optimizer.step(closure).item() > 0
    assert probe.trace.ok.all()
    assert probe.trace.column("lr").tolist() == [0.1] * 3
    assert probe.trace.column("coefficient").tolist() == pytest.approx([1.0] * 3)


def test_failing_probe_in_the_mode_off_warns_once_and_ends_nothing():
    model, x = net(), torch.randn(8, 6)
    optimizer, probe = watched_sgd(model, on_error="off")

    def loss_fn():  # another batch in every replay
        return model(x + torch.randn(8, 6, generator=generator)).square().mean()

    generator = torch.Generator()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recorded_steps(probe, optimizer, loss_fn, 4)
    messages = [str(w.message) for w in caught]
    assert len(messages) == 1
    assert "No more are taken" in messages[0]
    assert "the model's input changes from call to call" in messages[0]
    assert not probe.due
    assert not optimizer._optimizer_step_pre_hooks
    assert probe.trace[0]["status"].startswith("failed")
    strict = SmoothnessProbe(model, every=1).watch(optimizer)
    optimizer.zero_grad()
    strict.record(loss_fn).backward()
    with pytest.raises(NonDeterministicError):
        optimizer.step()


def test_listeners_get_every_row_and_may_fail():
    model, x = net(), torch.randn(8, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = []

    def broken(row):
        raise ConnectionError("no server")

    probe = SmoothnessProbe(model, every=2).watch(optimizer).listen(rows.append).listen(broken)

    def steps():
        recorded_steps(probe, optimizer, lambda: model(x).square().mean(), 5)

    with pytest.warns(UserWarning, match=r"listener.* step 0.*no server") as caught:
        steps()
    assert len(caught) == 1
    assert [row["step"] for row in rows] == [0, 2, 4]
    assert [row["smoothness"] for row in rows] == probe.trace.column("smoothness").tolist()


def test_only_due_steps_are_recorded_and_a_missing_record_is_named():
    model, x = net(), torch.randn(8, 6)
    optimizer, probe = watched_sgd(model, every=3)
    due = []
    for _ in range(4):
        optimizer.zero_grad()
        due.append(probe.due)
        (probe.record(lambda: model(x).square().mean()) if probe.step < 3 else model(x).mean()).backward()
        if probe.step == 3:
            with pytest.warns(UserWarning, match="no loss was recorded for this step"):
                optimizer.step()
        else:
            optimizer.step()
    assert due == [True, False, False, True]
    assert probe.trace.ok.tolist() == [True, False]


def test_what_cannot_be_watched_is_refused():
    model = net()
    probe = SmoothnessProbe(model)
    with pytest.raises(ValueError, match="trainable parameters"):
        probe.watch(torch.optim.SGD(net().parameters(), lr=0.1))
    with pytest.raises(TypeError, match="SimpleNamespace"):
        probe.watch(types.SimpleNamespace())
    wrapper = types.SimpleNamespace(optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert probe.watch(wrapper) is probe
    with pytest.raises(ValueError, match="watches an optimizer already"):
        probe.watch(torch.optim.SGD(model.parameters(), lr=0.1))


def measured_in_adams_metric(wrap, share):
    """Rows of AdamW on a fixed batch, of which each rank has a share."""
    torch.manual_seed(0)
    model = wrap(mlp(6, 10, 4))
    x, y = torch.randn(8, 6)[share], torch.randint(3, (8,))[share]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    probe = SmoothnessProbe(model, every=2, estimators={"spectral_smoothness": 2})
    probe.watch(optimizer)
    for _ in range(5):
        optimizer.zero_grad()
        probe.record(lambda: F.cross_entropy(model(x), y)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return [dict(row) for row in probe.trace]


def on_ranks(rank):
    wraps = (DistributedDataParallel, fully_shard)

    def results(watched, wrap, accumulate):
        *run, probe = loop(watched, wrap=lambda m: wrap(m.eval()), clip=0.2, accumulate=accumulate)
        return run, None if probe is None else [dict(row) for row in probe.trace]

    share = slice(4 * rank, 4 * rank + 4)
    metric = [measured_in_adams_metric(wrap, share) for wrap in wraps]
    cases = itertools.product(wraps, (1, 2))
    return [(n, [results(watched, wrap, n) for watched in (False, True)]) for wrap, n in cases], metric


@pytest.mark.distributed
@pytest.mark.slow
def test_two_ranks_are_watched_bit_for_bit():
    alone = measured_in_adams_metric(lambda m: m, slice(0, 8))
    for ranks, metric in run_on_processes(on_ranks):
        for accumulate, ((plain, _), (run, rows)) in ranks:
            assert_same_run(plain, run)
            assert [row["status"] for row in rows] == ["ok"] * 4
            assert [row["batch_size"] for row in rows] == [16 * accumulate] * 4
            for row in rows:
                assert row["coefficient"] == pytest.approx(min(1.0, 0.2 / row["grad_norm"]), rel=1e-4)
        for rows in metric:
            for row, expected in zip(rows, alone, strict=True):
                assert row.keys() == expected.keys()
                for name in ("status", "spectral_converged", "batch_size"):
                    assert row[name] == expected[name]
                for name in ("optimizer_smoothness", "spectral_smoothness", "coefficient", "smoothness"):
                    if expected[name] is not None:
                        assert row[name] == pytest.approx(expected[name], rel=1e-5), name
