"""Kept steps lead where training was when they are taken again, or are refused."""

import pytest
import torch
from torch import nn

from tests.autopsy.runs import NUM_STEPS, Run, adamw, sgd


def test_clipping_between_backward_and_step_is_taken_again():
    run = Run(sgd)
    run.steps(before=lambda: nn.utils.clip_grad_norm_(run.model.parameters(), 0.05))
    run.spikes.explain()  # refused where the steps do not lead to the model


def test_micro_batches_and_changes_of_lr_are_taken_again():
    run = Run(adamw)
    schedule = torch.optim.lr_scheduler.LinearLR(run.optimizer, 0.1, 1.0, 10)
    for _ in range(NUM_STEPS):
        run.optimizer.zero_grad()
        for _ in range(2):
            (run.record(run.batch()) / 2).backward()
        run.optimizer.step()
        schedule.step()
    run.spikes.explain()


def test_loss_that_cannot_be_replayed_is_refused():
    run = Run(sgd)
    own = torch.Generator().manual_seed(0)
    run.spikes.loss_of_batch = lambda batch: run.loss(
        (batch[0] + torch.randn(16, 6, generator=own), batch[1])
    )
    run.steps()
    before = own.get_state()
    with pytest.raises(RuntimeError, match="does not lead to the same parameters"):
        run.spikes.explain()
    assert torch.equal(own.get_state(), before)
