"""Two processes measure what one does, agree when to measure, and one of them writes."""

from functools import partial
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import curvestep as cs
from curvestep.smoothness import probed_step
from curvestep.smoothness.probe import SmoothnessProbe
from curvestep.tensors.distributed import copies
from curvestep.trace.trace import Trace
from tests.models import mlp
from tests.processes import run_on_processes
from tests.smoothness.loops import assert_same_run, block_steps, measured_sgd, train

STEPS = 50
pytestmark = pytest.mark.filterwarnings("ignore:The model is in eval mode")  # without dropout and BatchNorm


def clipped(parameters):
    return cs.ClippedSGD(parameters, lr=0.5, max_norm=0.3), None


def ddp(model):
    return DistributedDataParallel(model.eval())  # without dropout: each rank draws its own masks


def fsdp2(model):
    model.eval()
    for layer in (model[0], model[3]):
        fully_shard(layer)
    return fully_shard(model)


def probes(path=None):
    estimators = {"local_smoothness": 5, "spectral_smoothness": 10, "layer_curvature": 5}
    return partial(SmoothnessProbe, every=5, estimators=estimators, layers=True, trace=path)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def measure(rank, folder):
    share = slice(rank * 3, rank * 3 + 3)
    results = {}
    for kind, wrap in (("ddp", ddp), ("fsdp2", fsdp2)):
        plain = train("mlp", clipped, steps=STEPS, wrap=wrap, share=share)
        make_probe = probes(f"{folder}/{kind}.jsonl")
        probed = train("mlp", clipped, steps=STEPS, wrap=wrap, share=share, make_probe=make_probe)
        for run in (plain, probed):
            run[1][:] = [whole(t) for t in run[1]]
        results[kind] = plain[:3], probed[:3], [dict(row) for row in probed[3].trace]
    make_probe = partial(SmoothnessProbe, every=1, fractions=(1.0,), max_overhead=0.3)
    *_, budget = train("mlp", clipped, steps=200, wrap=ddp, share=share, make_probe=make_probe)
    return results, budget.trace.column("step").tolist()


@pytest.mark.distributed
@pytest.mark.slow
def test_two_processes_measure_what_one_does_and_agree_when(tmp_path):
    alone = train("mlp", clipped, steps=STEPS, wrap=lambda m: m.eval(), make_probe=probes())[3].trace
    (first, steps), (second, other_steps) = run_on_processes(measure, str(tmp_path))
    for kind in ("ddp", "fsdp2"):
        for plain, probed, rows in (first[kind], second[kind]):
            assert_same_run(plain, probed)
            assert [row["step"] for row in rows] == [row["step"] for row in alone]
            for row, expected in zip(rows, alone, strict=True):
                assert row["status"] == "ok"
                assert row["batch_size"] == expected["batch_size"] == 6
                for name in ("loss", "grad_norm", "step_norm", "smoothness", "kappa", "lr", "coefficient",
                             "secants", "grad_norms", "curvature", "cosine"):  # fmt: skip
                    assert row[name] == pytest.approx(expected[name], rel=1e-6)
                for name in ("local_smoothness", "spectral_smoothness", "layer_curvature"):
                    if expected.get(name) is not None:
                        assert row[name] == pytest.approx(expected[name], rel=1e-6)
                for layer, values in expected["layers"].items():
                    for name in {"smoothness", "layer_curvature"} & values.keys():
                        assert row["layers"][layer][name] == pytest.approx(values[name], rel=1e-6)
        written = Trace.load(tmp_path / f"{kind}.jsonl")  # once: by rank 0
        assert len(written) == len(alone)
        assert written.header["world_size"] == 2
    assert steps == other_steps
    assert len(steps) >= 2
    assert torch.get_default_dtype() == torch.float64


def noise_of_halves(rank, bucket_view):
    """Rows of two ranks, each with halves of its own, or of one process with the same halves."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 20), torch.nn.Tanh(), torch.nn.Linear(20, 3))
    wrapped = model if rank is None else DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
    optimizer = cs.ClippedSGD(model.parameters(), lr=0.1, max_norm=1.0)
    probe = SmoothnessProbe(wrapped, every=2)
    samples = torch.arange(8) if rank is None else torch.arange(rank * 4, rank * 4 + 4)
    for _ in range(5):
        x, y = torch.randn(8, 5), torch.randn(8, 3)

        def loss_of(part, x=x, y=y):
            return lambda: (wrapped(x[part]) - y[part]).square().mean()

        loss_of(samples)().backward()
        with probe(loss_of(samples), halves=(loss_of(samples[::2]), loss_of(samples[1::2]))):
            optimizer.step()
        optimizer.zero_grad()
    return [dict(row) for row in probe.trace], [p.detach().clone() for p in model.parameters()]


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("bucket_view", [False, True])
def test_halves_give_two_ranks_the_noise_that_they_give_one_process(bucket_view):
    expected, weights = noise_of_halves(None, bucket_view)
    for rows, trained in run_on_processes(noise_of_halves, bucket_view):
        torch.testing.assert_close(trained, weights)
        for row, other in zip(rows, expected, strict=True):
            for name in ("noise", "grad_signal", "grad_variance"):
                assert row[name] == pytest.approx(other[name], rel=1e-9)


def full_memory_on_rank_one(rank):
    """Statuses of rows, and the weights, where one rank cannot keep the start of a step."""
    torch.manual_seed(0)
    model = DistributedDataParallel(mlp(6, 10, 3))
    optimizer, probe = measured_sgd(model)
    statuses = []
    for step in range(4):
        fails = step == 2 and rank == 1
        with mock.patch.object(probed_step, "copies", side_effect=MemoryError("full") if fails else copies):
            block_steps(probe, optimizer, lambda: model(torch.ones(4, 6)).square().mean())
        statuses.append(probe.trace[step]["status"])
    return statuses, [p.detach() for p in model.parameters()]


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:A smoothness measurement failed")
def test_a_rank_that_cannot_keep_the_start_leaves_no_other_waiting():
    (one, weights), (other, same) = run_on_processes(full_memory_on_rank_one)
    assert one[:2] + one[3:] == other[:2] + other[3:] == ["ok"] * 3
    assert one[2] == "failed: another rank could not measure the start of the step"
    assert other[2] == "failed: MemoryError: full"
    assert all(map(torch.equal, weights, same))
