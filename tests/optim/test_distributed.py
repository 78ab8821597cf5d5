"""Two gloo processes take the steps that one process takes."""

import copy
import io
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from curvestep import ClippedAdamW, ClippedSGD, NormalizedSGD, clip
from curvestep.clip_rules import ema, percentile, weight_ratio, zscore
from curvestep.tensors.vectors import global_norm
from tests.models import mlp
from tests.processes import run_on_processes

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.xdist_group("distributed")]

OPTIONS = [
    {},
    {"momentum": 0.9, "weight_decay": 0.01},
    {"momentum": 0.9, "nesterov": True, "foreach": True},
    {"momentum": 0.9, "clip": "momentum"},
    {"norm_scope": "tensor"},
    {"amsgrad": False},
    {"amsgrad": True, "foreach": True},
    {"amsgrad": False, "update_rms": 0.5},
    {"max_norm": percentile(40)},
    {"max_norm": zscore(1.0, warmup=3), "momentum": 0.9},
    {"max_norm": ema(0.9, warmup=3, max_norm=0.6), "amsgrad": False},
    {"max_norm": weight_ratio(0.02), "momentum": 0.9},
]


def problem():
    torch.manual_seed(4)
    net = mlp(6, 11, 7, 1)
    batches = [(torch.randn(8, 6) * (1 + k % 4), torch.randn(8, 1)) for k in range(10)]
    return net, batches


def optimizers(params, options):
    params = list(params)
    optimizer = ClippedAdamW if "amsgrad" in options else ClippedSGD
    return optimizer(params, **{"lr": 0.1, "max_norm": 0.6} | options)


def train(model, opt, batches, rows):
    for x, y in batches:
        opt.zero_grad()
        ((model(x[rows]) - y[rows]) ** 2).mean().backward()
        opt.step()
    return opt.clip_stats()


def single(options):
    net, batches = problem()
    stats = train(net, optimizers(net.parameters(), options), batches, slice(None))
    return [p.detach() for p in net.parameters()], stats


def train_ddp(rank, options):
    net, batches = problem()
    model = nn.parallel.DistributedDataParallel(net)
    stats = train(model, optimizers(model.parameters(), options), batches, slice(4 * rank, 4 * rank + 4))
    return [p.detach() for p in net.parameters()], stats


def shard(net):
    from torch.distributed.fsdp import fully_shard

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in net:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        return fully_shard(net, mesh=mesh)


def train_fsdp(rank, options):
    net, batches = problem()
    net = shard(net)
    opt = optimizers(net.parameters(), options)
    stats = train(net, opt, batches, slice(4 * rank, 4 * rank + 4))
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)  # sharded buffers and counters can be saved
    return [p.full_tensor().detach() for p in net.parameters()], stats


def sharded_norms(rank):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    torch.manual_seed(5)
    whole = [torch.randn(5, 3), torch.randn(1), torch.full((7,), 1e30, dtype=torch.float32)]
    norms = {}
    for name, placement in {"shard": Shard(0), "replicate": Replicate()}.items():
        sharded = [distribute_tensor(t, mesh, [placement]) for t in whole]
        norms[name] = [global_norm([t]).item() for t in sharded] + [
            global_norm([*sharded[:2], whole[0]]).item()
        ]
    norms["whole"] = [global_norm([t]).item() for t in whole] + [global_norm([*whole[:2], whole[0]]).item()]
    return norms


def test_norm_of_sharded_and_replicated_tensors_is_that_of_the_whole(on_two):
    for norms in on_two["norms"]:
        assert norms["shard"] == pytest.approx(norms["whole"], rel=1e-7)
        assert norms["replicate"] == pytest.approx(norms["whole"], rel=1e-7)


def skip_on_all_ranks(rank):
    net, batches = problem()
    net = shard(net)
    opt = NormalizedSGD(net.parameters(), lr=0.1, offset=0.5, nonfinite="skip")
    before = copy.deepcopy([p.full_tensor().detach() for p in net.parameters()])
    x, y = batches[0]
    ((net(x) - y) ** 2).mean().backward()
    if rank == 1:  # the bad number lies in the other rank's shard
        next(net.parameters()).grad.to_local()[0] = float("nan")
    opt.step()
    same = all(torch.equal(p.full_tensor(), q) for p, q in zip(net.parameters(), before, strict=True))
    return same, opt.clip_stats()["skipped"]


def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(on_two):
    assert on_two["skip"] == [(True, 1), (True, 1)]


def zero_redundancy(rank):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net, _ = problem()
    messages = []
    zero = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    for attempt in (
        lambda: ZeroRedundancyOptimizer(net.parameters(), optimizer_class=ClippedSGD, lr=0.1, max_norm=1.0),
        lambda: clip(zero.optim, 1.0),
        lambda: clip(zero, 1.0),
    ):
        try:
            attempt()
        except RuntimeError as error:
            messages.append(str(error))
    return messages


def test_an_optimizer_of_a_part_of_the_gradients_is_refused(on_two):
    for makes, clips in on_two["zero"]:
        assert "ZeroRedundancyOptimizer gives each rank a part of the gradients" in makes
        assert "Give `clip` the ZeroRedundancyOptimizer itself" in clips


def everything(rank):
    """All that runs on two processes, in one go: starting them is what takes time."""
    results = {"norms": sharded_norms(rank), "skip": skip_on_all_ranks(rank), "zero": zero_redundancy(rank)}
    for k, options in enumerate(OPTIONS):
        results["ddp", k] = train_ddp(rank, options)
        results["fsdp", k] = train_fsdp(rank, options)
    return results


@pytest.fixture(scope="module")
def on_two():
    by_rank = run_on_processes(everything)
    return {name: [results[name] for results in by_rank] for name in by_rank[0]}


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
@pytest.mark.parametrize("k", range(len(OPTIONS)), ids=map(str, OPTIONS))
def test_two_processes_give_the_single_process_result(on_two, wrapper, k):
    expected, expected_stats = single(OPTIONS[k])
    for params, stats in on_two[wrapper, k]:
        torch.testing.assert_close(params, expected, rtol=1e-9, atol=1e-12)
        assert stats == pytest.approx(expected_stats, rel=1e-9)
    assert 0 < expected_stats["clipped_fraction"] <= 1
