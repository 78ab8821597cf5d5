"""Forward passes between steps: which of them a replay starts from, and which count as samples."""

import pytest
import torch

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
