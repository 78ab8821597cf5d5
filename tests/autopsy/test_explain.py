"""What a recorder names: planted causes, and the step that it takes by itself."""

import pytest
import torch

import curvestep as cs
from curvestep.autopsy.cause import CANNOT_TELL
from tests.autopsy.runs import (
    Overflowing,
    Run,
    adamw,
    clipped_adamw,
    clipped_sgd,
    scaled_block,
    scaled_lr,
    scaled_moment,
    scaled_targets,
    sgd,
)
from tests.models import mlp


@pytest.mark.parametrize(
    ("make", "spoil", "cause"),
    [
        (sgd, scaled_lr, "length"),
        (adamw, scaled_lr, "length"),
        (sgd, scaled_targets, "batch"),
        (clipped_sgd, scaled_moment("momentum_buffer", 1000), "momentum"),
        (sgd, scaled_moment("momentum_buffer", 200), "momentum"),
        (clipped_adamw, scaled_moment("exp_avg", 100), "momentum"),
        (adamw, scaled_moment("exp_avg_sq", 1e-6), "second moment"),
        (sgd, scaled_block, "block 4"),
    ],
)
def test_planted_cause_is_named(make, spoil, cause):
    run = Run(make).steps()
    assert run.explain_last().cause == CANNOT_TELL
    spoil(run)
    explanation = run.explain_last()
    assert explanation.cause == cause
    assert explanation.is_spike
    assert run.spikes.explain().step == explanation.step == explanation.largest


def test_overflow_of_a_lower_precision_is_named():
    torch.set_default_dtype(torch.float32)
    run = Overflowing(sgd, bfloat16=True).steps()
    assert run.explain_last().cause == CANNOT_TELL
    run.overflow()
    explanation = run.explain_last()
    assert explanation.cause == "precision"
    assert explanation.rise == float("inf")


def test_step_explained_by_default_is_the_spike_and_not_its_echo():
    # Momentum carries on: the step after the spike raises the loss by more than the spike itself.
    torch.manual_seed(0)
    model = mlp(6, 16, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    spikes = cs.Autopsy(model, lambda batch: (model(batch[0]) - batch[1]).square().mean()).watch(optimizer)
    for step in range(42):
        x = torch.randn(16, 6)
        factor = 50 if step == 40 else 1
        optimizer.zero_grad()
        spikes.record((factor * x, factor * x[:, :3].sin())).backward()
        optimizer.step()
    assert spikes.explain(41).rise > spikes.explain(40).rise
    explanation = spikes.explain()
    assert (explanation.step, explanation.largest, explanation.cause) == (40, 40, "batch")
