"""What is kept of a step: copies of batches, norms, memory that is bounded."""

import pytest
import torch

from curvestep.autopsy.cause import FEWEST_STEPS
from curvestep.autopsy.kept_step import norms_of, num_bytes
from tests.autopsy.runs import NUM_STEPS, Run, adamw, sgd


def test_memory_is_what_the_class_says():
    run = Run(adamw, keep=5)
    for _ in range(40):
        run.step()
        model, moments, batch = run.num_bytes()
        assert run.spikes.nbytes <= 2 * (model + moments) + 10 * batch
    assert run.spikes.nbytes >= model + moments + 5 * batch


def test_writes_between_steps_cost_a_bounded_number_of_copies():
    run = Run(adamw, keep=5)
    for _ in range(12):
        run.step()
        with torch.no_grad():
            run.model[0].weight.clamp_(-1.0, 1.0)
    assert run.spikes.nbytes <= FEWEST_STEPS * sum(run.num_bytes())
    with pytest.raises(RuntimeError, match="too few"):
        run.spikes.explain()


def test_norm_and_memory_of_a_sparse_gradient():
    rows = torch.sparse_coo_tensor([[0, 0]], [3.0, 4.0], (2,), check_invariants=True)
    sparse, none, dense = norms_of([rows, None, torch.ones(4)])
    assert (sparse.item(), none, dense.item()) == (7.0, None, 2.0)
    assert num_bytes([rows, torch.ones(4)]) == 4 * 8 + 4 * 8  # two indices and two values, four numbers


def test_batch_is_kept_as_it_was():
    run = Run(sgd)
    x, y = run.batch()
    for _ in range(NUM_STEPS):  # a loop that fills one buffer again and again
        x.copy_(torch.randn(16, 6))
        y.copy_(x[:, :3].sin())
        run.step((x, y))
    run.spikes.explain()
