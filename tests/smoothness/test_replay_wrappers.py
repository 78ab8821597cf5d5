"""Replay under torch.compile, and on two processes under DDP and FSDP2."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from curvestep.smoothness.replay import Replay
from curvestep.smoothness.snapshot import PassState
from curvestep.tensors.distributed import copies
from curvestep.tensors.vectors import global_norm
from tests.models import mlp
from tests.processes import run_on_processes


def data():
    torch.manual_seed(2)
    return torch.randn(12, 6), torch.randint(3, (12,))


def wrap(kind):
    torch.manual_seed(1)
    model = mlp(batchnorm=True).eval()  # in training mode BatchNorm would see half a batch on each rank
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "ddp-views":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    if kind == "fsdp2":
        for layer in (model[0], model[3]):
            fully_shard(layer)
        return fully_shard(model)
    return model


def measure(rank, kind, world_size=2):
    model, (x, y) = wrap(kind), data()
    share = slice(rank * 12 // world_size, (rank + 1) * 12 // world_size)

    def closure():
        return F.cross_entropy(model(x[share]), y[share])

    state = PassState(model)
    closure().backward()
    parameters = [p for p in model.parameters()]
    before = [(p.detach().clone(), p.grad.clone()) for p in parameters]
    start = copies(parameters)
    with torch.no_grad():
        for s, p in zip(start, parameters, strict=True):
            s.add_(p.grad, alpha=0.5)
    norms = []
    with Replay(model, closure, state=state) as replay:
        here = replay.gradient().gradients
        equal = all(whole(g).equal(whole(b[1])) for g, b in zip(here, before, strict=True))
        for _ in replay.along(start, (0.25, 0.5, 1.0)):
            difference = [a - b for a, b in zip(replay.gradient().gradients, here, strict=True)]
            norms.append(global_norm(difference).item())
            change = global_norm(part for part in replay.change(here).parts if part is not None)
            equal = equal and abs(change.item() - norms[-1]) <= 1e-12 * norms[-1]
        moved = replay.gradient_at([b[1] for b in before], -0.5).gradients
        norms.append(global_norm(moved).item())
    restored = all(
        whole(p.detach()).equal(whole(b[0])) and whole(p.grad).equal(whole(b[1]))
        for p, b in zip(parameters, before, strict=True)
    )
    return norms, equal, restored


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def fail_on_rank_one(rank):
    model = DistributedDataParallel(nn.Linear(6, 3))
    x, y = data()

    def closure():
        output = model(x)
        if rank == 1:
            raise KeyError("no such label")
        return F.cross_entropy(output, y)

    try:
        with Replay(model, closure) as replay:
            replay.gradient()
    except (KeyError, RuntimeError) as error:
        return str(error)


def all_of_it(rank):
    return {kind: measure(rank, kind) for kind in KINDS}, fail_on_rank_one(rank)


KINDS = ("ddp", "ddp-views", "fsdp2")


@pytest.mark.distributed
@pytest.mark.slow
def test_two_processes_agree_with_one_and_a_failing_rank_does_not_hang_the_other():
    alone, _, _ = measure(0, "plain", world_size=1)
    (one, other), (two, failed) = run_on_processes(all_of_it)
    for kind in KINDS:
        for norms, equal, restored in (one[kind], two[kind]):
            torch.testing.assert_close(torch.tensor(norms), torch.tensor(alone), rtol=1e-9, atol=1e-12)
            assert equal
            assert restored
    assert "another rank" in other
    assert "no such label" in failed
