"""Two processes that share each batch find the numbers of one."""

import math

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from curvestep import calibrate
from tests.models import batch_loss, batches, mlp
from tests.processes import run_on_processes


def model_and_batches():
    torch.manual_seed(1)
    return mlp(6, 16, 16, 3), batches(11)


def found(model, batches, optimizer):
    cal = calibrate(model, batch_loss(model), batches, optimizer=optimizer)
    sure = cal.confidence == "high"
    return [
        cal.lr,
        cal.max_norm,
        cal.loss,
        cal.grad_norm,
        cal.num_gradients,
        sure,
        *(trial.gain for trial in cal.trials),
    ]


def on_a_rank(rank, kind):
    model, batches = model_and_batches()
    if kind == "ddp":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        for layer in (model[0], model[2], model):
            fully_shard(layer)
    shares = [(x[rank::2], y[rank::2]) for x, y in batches]
    # The second rank has one batch more, which no rank may use alone.
    shares = shares[: 10 + rank]
    before = [p.detach().clone() for p in model.parameters()]
    numbers = {optimizer: found(model, shares, optimizer) for optimizer in ("ClippedSGD", "AdamW")}
    same = all(
        torch.equal(*(t.to_local() if kind == "fsdp" else t for t in pair))
        for pair in zip(before, model.parameters(), strict=True)
    )
    return numbers, same


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_give_the_numbers_of_one(kind):
    model, batches = model_and_batches()
    expected = {optimizer: found(model, batches[:10], optimizer) for optimizer in ("ClippedSGD", "AdamW")}
    for numbers, same in run_on_processes(on_a_rank, kind):
        assert same
        for optimizer, values in expected.items():
            for a, b in zip(numbers[optimizer], values, strict=True):
                assert math.isclose(a, b, rel_tol=1e-3)  # long trials amplify rounding
