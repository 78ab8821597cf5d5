"""Forward passes between steps: which of them a replay starts from, and which count as samples."""

import numpy as np
import pytest
import torch
from torch import nn

from curvestep.smoothness.oracle import GradientOracle
from curvestep.smoothness.probe import SmoothnessProbe
from tests.models import classifier
from tests.smoothness.loops import block_steps, measured_sgd


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
    with pytest.warns(UserWarning, match=r"called 2 times since the last step, 1 before.*no_grad"):
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


def test_batches_of_training_are_not_averaged_beside_the_loss_of_an_oracle():
    model = Constant()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = SmoothnessProbe(model, every=2, oracle=GradientOracle(model, [torch.tensor(5.0)])).watch(opt)
    record_steps(probe, opt, range(3))
    assert np.isnan(probe.trace.column("recent_loss")).all()
