"""``clip_grad_norm_`` is torch's, also on several device meshes, where torch's own raises."""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_ as clip_by_torch

import curvestep as cs
from curvestep.optim import grad_norm
from tests.processes import run_on_processes

ORDERS = (2.0, 1.0, 3.5, math.inf)
MAX_NORM = 0.3


def parameter(gradient):
    p = nn.Parameter(torch.zeros_like(gradient))
    p.grad = gradient.clone()
    return p


def gradients():
    torch.manual_seed(3)
    return [torch.randn(8, 6), torch.randn(5), torch.randn(3, 4) * 1e-3, torch.randn(())]


def test_the_call_is_that_of_torch():
    ours, theirs = (inspect.signature(f).parameters.values() for f in (cs.clip_grad_norm_, clip_by_torch))
    assert [(p.name, p.default, p.kind) for p in ours] == [(p.name, p.default, p.kind) for p in theirs]


@pytest.mark.parametrize("max_norm", [MAX_NORM, 1e4, 0.0])
@pytest.mark.parametrize("order", [*ORDERS, "inf"])
def test_plain_gradients_are_clipped_as_by_torch(order, max_norm):
    ours = [parameter(g) for g in gradients()]
    theirs = [parameter(g) for g in gradients()]
    norm = cs.clip_grad_norm_(iter(ours), max_norm, order)
    expected = clip_by_torch(theirs, max_norm, order)
    torch.testing.assert_close(norm, expected)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("order", ORDERS)
def test_sparse_complex_and_half_gradients_count_as_their_entries_do(order):
    indices = torch.tensor([[1, 4, 1]])
    repeated = torch.sparse_coo_tensor(indices, torch.randn(3, 2), (6, 2))
    sparse = nn.Parameter(torch.zeros(6, 2))
    sparse.grad = repeated.clone()
    half = parameter(torch.tensor([600.0, -2.0], dtype=torch.float16))
    number = parameter(torch.tensor([3.0 + 4.0j]))
    dense = torch.cat([repeated.to_dense().flatten(), torch.tensor([600.0, -2.0, 5.0])])
    norm = cs.clip_grad_norm_([sparse, half, number], 1.0, order)
    assert norm == pytest.approx(torch.linalg.vector_norm(dense, order).item(), rel=1e-6)
    torch.testing.assert_close(sparse.grad.to_dense(), repeated.to_dense() / norm)
    torch.testing.assert_close(number.grad, torch.tensor([3.0 + 4.0j]) / norm)


@pytest.mark.parametrize("order", ORDERS)
def test_the_norm_of_extreme_entries_neither_overflows_nor_vanishes(order):
    for size in (1e30, 1e-30):
        p = parameter(torch.full((4,), size, dtype=torch.float32))
        norm = cs.clip_grad_norm_(p, 1.0, order)
        assert norm == pytest.approx(size * 4 ** (1 / order), rel=1e-6)


def test_without_gradients_the_norm_is_zero():
    assert cs.clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0) == 0.0
    assert cs.clip_grad_norm_([], 1.0) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_scales_as_by_torch_or_raises(bad):
    start = torch.tensor([1.0, bad])
    p = parameter(start)
    with pytest.raises(RuntimeError, match="Nothing was changed"):
        cs.clip_grad_norm_(p, 1.0, error_if_nonfinite=True)
    torch.testing.assert_close(p.grad, start, rtol=0, atol=0, equal_nan=True)
    q = parameter(start)
    cs.clip_grad_norm_(p, 1.0)
    clip_by_torch(q, 1.0)
    torch.testing.assert_close(p.grad, q.grad, equal_nan=True)


@pytest.mark.parametrize(
    "arguments", [{"max_norm": -1.0}, {"max_norm": math.nan}, {"norm_type": 0}, {"norm_type": -2.0}]
)
def test_a_threshold_or_order_that_is_none_is_refused(arguments):
    p = parameter(torch.ones(3))
    with pytest.raises(ValueError, match=next(iter(arguments))):
        cs.clip_grad_norm_([p], **{"max_norm": 1.0} | arguments)
    assert torch.equal(p.grad, torch.ones(3))


def meshes():
    from torch.distributed.device_mesh import init_device_mesh

    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return init_device_mesh("cpu", (4,)), grid, grid["tp"]


def layouts():
    """Each gradient's mesh and placements by the name of the case; of a plain tensor its layout."""
    from torch.distributed.tensor import Replicate, Shard

    line, grid, part = meshes()
    one, two, three = (line, [Shard(0)]), (grid, [Shard(1), Shard(0)]), (part, [Shard(0)])
    whole = (line, [Replicate()])
    return {
        "one mesh": [one, one, one, whole],
        "two meshes": [one, (grid, [Replicate(), Shard(0)]), two, whole],
        "three meshes": [one, three, two, whole],
        "with plain": [one, three, two, torch.strided],
        "with sparse": [one, three, torch.sparse_coo, torch.strided],
    }


def spread(layout):
    from torch.distributed.tensor import distribute_tensor

    params = []
    for gradient, place in zip(gradients(), layout, strict=True):
        if isinstance(place, torch.layout):
            p = parameter(gradient)
            p.grad = p.grad.to_sparse() if place is torch.sparse_coo else p.grad
        else:
            p = parameter(distribute_tensor(gradient, *place))
        params.append(p)
    return params


def whole_gradients(params):
    gradients = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in params]
    return [gradient.to_dense() for gradient in gradients]


def clipped_on_meshes(rank):
    results = {}
    for name, layout in layouts().items():
        for order in ORDERS:
            params = spread(layout)
            norm = cs.clip_grad_norm_(params, MAX_NORM, order)
            results[name, order] = norm.item(), type(norm) is torch.Tensor, whole_gradients(params)
    return results


def raised_by_torch(rank):
    raised = {}
    for name, layout in layouts().items():
        try:
            clip_by_torch(spread(layout), MAX_NORM)
            raised[name] = None
        except RuntimeError as error:
            raised[name] = str(error)
    return raised


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(8, 6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 3)

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.rows(x))))


def tokens():
    torch.manual_seed(1)
    model, x = Tokens(), torch.arange(8)
    return model, lambda: F.cross_entropy(model(x), x % 3)


def fsdp_over_tensor_parallel(rank):
    """Shards of FSDP2 over tensor parallelism, whose placements are of a private kind."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    _, grid, _ = meshes()
    model, loss = tokens()
    parallelize_module(model, grid["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=grid["dp"])
    loss().backward()
    optimizer = cs.ClippedSGD(model.parameters(), lr=0.1, max_norm=MAX_NORM)
    optimizer.step()
    norm = cs.clip_grad_norm_(model.parameters(), MAX_NORM).item()
    kinds = {type(place).__name__ for p in model.parameters() for place in p.grad.placements}
    return norm, optimizer.clip_stats()["grad_norm"], kinds


def refused(rank, params, max_norm=MAX_NORM):
    before = [g.clone() for g in whole_gradients(params)]
    try:
        cs.clip_grad_norm_(params, max_norm)
        message = ""
    except RuntimeError as error:
        message = str(error)
    pairs = zip(whole_gradients(params), before, strict=True)
    return message, all(torch.allclose(g, h, rtol=0, atol=0, equal_nan=True) for g, h in pairs)


def ranks_that_disagree(rank):
    layout = layouts()["with plain"]
    other_plain = spread(layout)
    other_plain[3].grad += rank
    other_nan = spread(layout)
    if rank == 2:
        other_nan[3].grad += math.nan
    return {
        "plain": refused(rank, other_plain),
        "nan": refused(rank, other_nan),
        "max_norm": refused(rank, spread(layout), max_norm=1.0 + rank),
    }


def fewer_gradients(rank):
    params = spread(layouts()["one mesh"])
    if rank == 1:
        params[0].grad = None
    try:
        cs.clip_grad_norm_(params, MAX_NORM)
    except RuntimeError as error:
        return str(error)


def negative_norm(rank):
    """No reduction here is broken, so the sign is turned where it would come back."""
    true_norm, grad_norm.global_norm = grad_norm.global_norm, lambda tensors: -true_norm(tensors)
    try:
        return refused(rank, spread(layouts()["three meshes"]))
    finally:
        grad_norm.global_norm = true_norm


def everything(rank):
    return {
        "clipped": clipped_on_meshes(rank),
        "torch": raised_by_torch(rank),
        "fsdp": fsdp_over_tensor_parallel(rank),
        "disagree": ranks_that_disagree(rank),
        "fewer": fewer_gradients(rank),
        "negative": negative_norm(rank),
    }


@pytest.fixture(scope="module")
def on_four():
    return run_on_processes(everything, world_size=4)


distributed = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.xdist_group("distributed")]


def mark(test):
    for one in distributed:
        test = one(test)
    return test


CASES = ("one mesh", "two meshes", "three meshes", "with plain", "with sparse")


@mark
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case", CASES)
def test_gradients_on_meshes_are_clipped_as_in_one_process(on_four, case, order):
    alone = [parameter(g) for g in gradients()]
    expected = clip_by_torch(alone, MAX_NORM, order).item()
    norms = [results["clipped"][case, order][0] for results in on_four]
    assert norms == [norms[0]] * 4  # to the last bit
    assert norms[0] == pytest.approx(expected, rel=1e-6)
    for results in on_four:
        _, is_plain, clipped = results["clipped"][case, order]
        assert is_plain
        torch.testing.assert_close(clipped, [p.grad for p in alone], rtol=1e-5, atol=1e-12)


@mark
def test_torch_still_raises_on_several_meshes_and_on_a_mix(on_four):
    """When this fails, torch works too: then pytorch#180346 leaves docs/clip_questions.md."""
    for results in on_four:
        assert results["torch"]["one mesh"] is None
        for case in CASES[1:]:
            assert results["torch"][case]


@mark
def test_fsdp_over_tensor_parallelism_has_the_norm_of_one_process(on_four):
    model, loss = tokens()
    loss().backward()
    expected = clip_by_torch(model.parameters(), math.inf).item()
    for norm, of_optimizer, kinds in (results["fsdp"] for results in on_four):
        assert "_StridedShard" in kinds
        assert norm == pytest.approx(expected, rel=1e-9)
        assert of_optimizer == pytest.approx(expected, rel=1e-9)


@mark
def test_ranks_that_disagree_are_refused_and_nothing_is_changed(on_four):
    for results in on_four:
        for message, same in results["disagree"].values():
            assert "The ranks" in message
            assert same
        assert "gradients" in results["fewer"]


@mark
def test_a_negative_norm_is_refused_and_nothing_is_changed(on_four):
    for results in on_four:
        message, same = results["negative"]
        assert "negative" in message
        assert same


def test_an_iterator_that_has_ended_is_warned_of():
    parameters = nn.Linear(2, 1).parameters()
    list(parameters)
    with pytest.warns(UserWarning, match="iterator that has ended"):
        assert cs.clip_grad_norm_(parameters, 1.0) == 0
    assert cs.clip_grad_norm_([], 1.0) == 0
