"""What a probe sees of other people's loops: calls of the model, losses, clipping, lr, precision."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import curvestep as cs
from curvestep.smoothness.observer import StepObserver
from curvestep.smoothness.oracle import GradientOracle
from curvestep.smoothness.probe import SmoothnessProbe
from tests.models import classifier, labelled, mlp
from tests.smoothness.loops import block_steps, measured_sgd


class Halved(nn.Module):
    """Enters autocast in its own forward pass, as Accelerate and Fabric let a model do."""

    def __init__(self):
        super().__init__()
        self.inner = mlp().float()

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.inner(x).float()


@pytest.mark.parametrize("through", ["the model", "a part of it", "a closure that runs backward"])
def test_precision_is_that_of_autocast_wherever_it_is_entered(through):
    model, x, y = Halved(), torch.randn(8, 6).float(), torch.randint(3, (8,))
    optimizer, probe = measured_sgd(model)

    def loss_fn():
        if through == "a part of it":  # the probe's hook on the model sees nothing
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return F.cross_entropy(model.inner(x), y)
        loss = F.cross_entropy(model(x), y)
        if through == "a closure that runs backward":
            loss.backward()
            return loss.item()
        return loss

    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_fn()
        if through != "a closure that runs backward":
            loss.backward()
        with probe(loss_fn):
            optimizer.step()
    assert probe.trace.column("eps").tolist() == [2.0**-7] * 2


@pytest.mark.parametrize("first", ["clip", "watch"])
def test_clipping_by_a_hook_is_counted_once(first):
    model, x, y = nn.Linear(6, 3), 10 * torch.randn(8, 6), torch.randint(3, (8,))
    optimizer, probe = measured_sgd(model, on_error="raise")
    for hook in ("clip", "watch") if first == "clip" else ("watch", "clip"):
        probe.watch(optimizer) if hook == "watch" else cs.clip(optimizer, 0.1, skip_above=1e3)
    for step in range(3):
        optimizer.zero_grad()
        factor = 1e6 if step == 1 else 1.0  # a gradient that is left out
        probe.record(lambda factor=factor: factor * F.cross_entropy(model(x), y)).backward()
        optimizer.step()
    for row in (probe.trace[0], probe.trace[2]):
        assert row["coefficient"] == pytest.approx(0.1 / row["grad_norm"], rel=1e-4)
        assert row["step_norm"] == pytest.approx(0.01, rel=1e-4)
    assert probe.trace[1]["status"] == "zero-step"
    assert probe.trace[1]["grad_norm"] > 1e3


def test_coefficient_of_an_optimizer_of_a_part_is_that_of_the_part():
    model, x, y = mlp(), *labelled(8)
    optimizer = cs.ClippedSGD(model[2].parameters(), lr=0.1, max_norm=0.01)
    probe = SmoothnessProbe(model, every=1, layers=True)
    block_steps(probe, optimizer, lambda: F.cross_entropy(model(x), y), 1)
    row = probe.trace[0]
    assert row["coefficient"] == pytest.approx(0.01 / row["layers"]["2"]["grad_norm"])


def test_lr_is_that_of_the_step_though_a_scheduler_steps_in_the_block():
    model, x = nn.Linear(6, 3), torch.randn(8, 6)
    optimizer, probe = measured_sgd(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def loss_fn():
        return model(x).square().mean()

    for _ in range(2):
        optimizer.zero_grad()
        loss_fn().backward()
        with probe(loss_fn):
            optimizer.step()
            schedule.step()
    assert probe.trace.column("lr").tolist() == [0.1, 0.05]
    assert probe.trace[0]["stability_margin"] == pytest.approx(0.1 * probe.trace[0]["smoothness"] / 2)


def test_gradient_that_the_optimizer_itself_unscales_counts_unscaled():
    p = nn.Parameter(torch.ones(4))
    p.grad = torch.full((4,), 8.0)
    optimizer = torch.optim.SGD([p], lr=0.1)
    optimizer.grad_scale = torch.tensor(8.0)  # as a GradScaler leaves it to a fused step
    steps = StepObserver([p])
    steps.stop()
    steps(optimizer)
    assert steps.coefficient(None, 2.0) == 1.0


def test_replays_of_others_do_not_count_as_samples():
    model, x = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5)), torch.randn(8, 6)
    optimizer, probe = measured_sgd(model)

    def loss_fn():
        return model(x).square().mean()

    def replayed():
        with cs.Replay(model, loss_fn) as replay:
            replay.gradient()

    block_steps(probe, optimizer, loss_fn, 3, before=replayed)
    assert probe.trace.ok.all()
    assert probe.trace.column("batch_size").tolist() == [8, 8, 8]


def test_step_that_a_scaler_skips_in_the_block_is_marked():
    model, x = nn.Linear(6, 3).float(), torch.randn(8, 6).float()
    optimizer, probe = measured_sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for factor in (1.0, math.inf, 1.0):

        def loss_fn(factor=factor):
            return factor * model(x).square().mean()

        optimizer.zero_grad()
        scaler.scale(loss_fn()).backward()
        scaler.unscale_(optimizer)
        with probe(loss_fn):
            scaler.step(optimizer)
            scaler.update()
    assert list(probe.trace.column("status")) == ["ok", "nonfinite", "ok"]
    assert probe.trace.column("lr")[[0, 2]].tolist() == [0.1, 0.1]


@pytest.mark.parametrize("max_norm", [0.01, 1e6])
@pytest.mark.parametrize("by", ["loop", "optimizer", "hook"])
def test_a_row_says_whether_its_step_was_clipped_by_whoever_clips(by, max_norm):
    model, x, y = nn.Linear(6, 3), torch.randn(8, 6), torch.randint(3, (8,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if by == "optimizer":
        optimizer = cs.ClippedSGD(model.parameters(), lr=0.1, max_norm=max_norm)
    if by == "hook":
        cs.clip(optimizer, max_norm=max_norm)
    probe = SmoothnessProbe(model, every=1, on_error="raise").watch(optimizer)
    probe.record(lambda: F.cross_entropy(model(x), y)).backward()
    if by == "loop":
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    assert probe.trace[0]["clipped"] is (max_norm < 1)
    assert math.isfinite(probe.trace.clip_norm[0]) is (max_norm < 1)


def test_autocast_that_begins_later_is_in_the_precision_of_its_rows():
    model = mlp(6, 10, 3).float()
    x, y = torch.randn(8, 6).float(), torch.randint(3, (8,))
    optimizer, probe = measured_sgd(model)
    for step in range(4):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=step == 3):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        with probe(lambda: F.cross_entropy(model(x), y)):
            optimizer.step()
    assert probe.trace.column("eps")[2] == torch.finfo(torch.float32).eps
    assert probe.trace.column("eps")[3] == torch.finfo(torch.bfloat16).eps


def test_validation_between_steps_does_not_disturb_the_masks():
    model, loss_fn = classifier(dropout=0.5)
    optimizer, probe = measured_sgd(model)
    for _ in range(3):
        with torch.no_grad():
            model(torch.randn(9, 6))
        block_steps(probe, optimizer, loss_fn)  # the first one tests itself against `.grad`
    assert probe.trace.ok.all()
    assert probe.trace.column("batch_size").tolist() == [5, 5, 5]


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_stray_pass_before_training_marks_the_rows_that_it_spoils(mode):
    model, loss_fn = classifier(dropout=0.5)
    optimizer, probe = measured_sgd(model)
    block_steps(probe, optimizer, loss_fn)
    model.train(mode == "train")
    model(torch.randn(9, 6))  # without no_grad
    model.train()
    with pytest.warns(UserWarning, match=r"2 times.* 1 before.*no_grad"):
        block_steps(probe, optimizer, loss_fn)
    block_steps(probe, optimizer, loss_fn)
    assert probe.trace.ok.tolist() == [True, False, True]


def test_snapshot_after_a_stray_pass_makes_the_row_good():
    model, loss_fn = classifier(dropout=0.5)
    optimizer, probe = measured_sgd(model)
    for _ in range(3):
        model(torch.randn(9, 6))
        block_steps(probe, optimizer, loss_fn, before=probe.snapshot)
    assert probe.trace.ok.all()
    assert probe.trace.column("batch_size").tolist() == [5, 5, 5]


def test_stray_pass_that_spoils_nothing_does_not_count_as_samples():
    model, loss_fn = classifier()
    optimizer, probe = measured_sgd(model)
    for step in range(4):
        if step % 2:
            model(torch.randn(9, 6))
        block_steps(probe, optimizer, loss_fn)
    assert probe.trace.ok.all()
    assert probe.trace.column("batch_size").tolist() == [5, 5, 5, 5]


def test_optimizer_that_calls_the_model_itself_does_not_count_as_samples():
    model, loss_fn = classifier(dropout=0.5)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    probe = SmoothnessProbe(model, every=1)

    def again():
        optimizer.zero_grad()
        loss = loss_fn()
        loss.backward()
        return loss

    for _ in range(3):
        again()
        with probe(loss_fn):
            optimizer.step(again)
    assert probe.trace.ok.all()
    assert probe.trace.column("batch_size").tolist() == [5, 5, 5]


class Constant(nn.Module):
    """A loss that training cannot change, so that its mean is known."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, value):
        return value + 0 * self.weight.square().sum()


def record_steps(probe, opt, steps, dtype=torch.float64):
    for step in steps:
        for share in (1.0, 3.0):  # two micro-batches
            value = torch.tensor(step + share)
            probe.record(lambda value=value: probe.model(value).to(dtype), share).backward()
        opt.step()
        opt.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_a_row_has_the_mean_of_the_losses_since_the_row_before(dtype):
    model = Constant()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SmoothnessProbe(model, every=400).watch(opt)
    record_steps(probe, opt, range(300), dtype)
    saved = probe.state_dict()
    probe.close()
    resumed = SmoothnessProbe(model, every=400)
    resumed.load_state_dict(saved)
    record_steps(resumed.watch(opt), opt, range(300, 401), dtype)
    means = [*probe.trace.column("recent_loss"), *resumed.trace.column("recent_loss")]
    assert means == pytest.approx([2.5, 200.5 + 2.5], rel=1e-6)  # float16 knows no 81200
    assert [*probe.trace.column("recent_steps"), *resumed.trace.column("recent_steps")] == [1, 400]


def test_what_is_no_number_is_not_averaged():
    model = Constant()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SmoothnessProbe(model, every=2).watch(opt)
    record_steps(probe, opt, range(1))
    probe.record(lambda: (torch.ones(2), "no loss"))
    opt.step()
    record_steps(probe, opt, range(2, 3))
    assert probe.trace.column("recent_loss").tolist() == [2.5, 4.5]
    assert probe.trace.column("recent_steps").tolist() == [1, 1]


def test_training_losses_are_not_averaged_beside_those_of_an_oracle():
    model = Constant()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SmoothnessProbe(model, every=2, oracle=GradientOracle(model, [torch.tensor(5.0)])).watch(opt)
    record_steps(probe, opt, range(3))
    assert np.isnan(probe.trace.column("recent_loss")).all()
