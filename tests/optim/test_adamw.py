"""ClippedAdamW against torch.optim.AdamW on gradients that were clipped before."""

import copy
import math

import pytest
import torch
from torch import nn

from curvestep import ClippedAdamW
from curvestep.tensors.kernel import native
from tests.models import reloaded
from tests.optim import kinds
from tests.optim.kinds import set_gradients
from tests.reference import exact_clip_, reference_norm

STEPS = 10
SHAPES = [(6, 5), (7,), (), (0,), (1,), (2, 3, 4)]
OPTIONS = {
    "default": {},
    "betas": {"betas": (0.5, 0.9)},
    "no momentum": {"betas": (0.0, 0.99)},
    "eps": {"eps": 1e-2},
    "decay": {"weight_decay": 0.5},
    "no decay": {"weight_decay": 0.0},
    "amsgrad": {"amsgrad": True},
    "maximize": {"maximize": True},
    "amsgrad maximize": {"amsgrad": True, "maximize": True, "weight_decay": 0.1},
}
PATHS = {
    "default": {},
    "foreach": {"foreach": True},
    "loop": {"foreach": False},
    "fused": {"fused": True},
    "tensor lr": {},
    "not fused": {"fused": False},
    "fused, not foreach": {"fused": True, "foreach": False},
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
every_path = pytest.mark.parametrize("path", list(PATHS)[:5])  # the others choose among these
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@pytest.fixture(params=["kernel", "no kernel"])
def kernel(request):
    if request.param == "no kernel":
        request.getfixturevalue("without_native")
    return request.param


def twins(shapes, dtype=torch.float64, count=2):
    params = [nn.Parameter(torch.randn(s, dtype=dtype)) for s in shapes]
    return [params, *(copy.deepcopy(params) for _ in range(count - 1))]


def assert_close(params, others, tolerance):
    """Relative to all numbers together: a single one may be close to zero."""
    apart = reference_norm([p.detach() - q.detach() for p, q in zip(params, others, strict=True)])
    assert apart <= tolerance * reference_norm(others)


def lr_for(path):
    return torch.tensor(0.02) if path == "tensor lr" else 0.02


# --- the same numbers as torch and as the formula ---------------------------------------------------


@every_dtype
@every_path
@every_option
def test_steps_equal_those_of_adamw_on_clipped_gradients(options, path, dtype, kernel):
    ours, theirs = twins(SHAPES, dtype)
    opt = ClippedAdamW(ours, lr=lr_for(path), max_norm=50.0, **options, **PATHS[path])
    torch_opt = torch.optim.AdamW(theirs, lr=0.02, **options, **PATHS[path])
    for k in range(STEPS):
        set_gradients(k, ours, theirs)
        before = [p.grad.clone() for p in ours]
        opt.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(ours, before, strict=True))
        exact_clip_(theirs, 50.0)
        torch_opt.step()
    assert_close(ours, theirs, TOLERANCE[dtype])
    for p, q in zip(ours, theirs, strict=True):
        mine, other = opt.state[p], torch_opt.state[q]
        assert mine.keys() == other.keys()
        assert mine["step"].item() == other["step"].item() == STEPS
        names = mine.keys() - {"step"}
        assert_close([mine[n] for n in names], [other[n] for n in names], 10 * TOLERANCE[dtype])
    assert opt.clip_stats()["clipped_fraction"] == 0.5


@every_path
@pytest.mark.parametrize("scope", ["global", "group", "tensor"])
def test_norm_scopes_and_groups_with_values_of_their_own(scope, path, kernel):
    ours, theirs = twins(SHAPES)
    values = [
        {"lr": 0.05, "betas": (0.5, 0.9), "weight_decay": 0.3},
        {"lr": 0.01, "eps": 1e-3, "amsgrad": True},
        {},
    ]

    def groups(params):
        return [{"params": params[2 * i : 2 * i + 2]} | values[i] for i in range(3)]

    opt = ClippedAdamW(groups(ours), lr=lr_for(path), max_norm=30.0, norm_scope=scope, **PATHS[path])
    torch_opt = torch.optim.AdamW(groups(theirs), lr=0.02, **PATHS[path])
    decisions = {
        "global": [theirs],
        "group": [theirs[:2], theirs[2:4], theirs[4:]],
        "tensor": [[p] for p in theirs],
    }
    for k in range(STEPS):
        set_gradients(k, ours, theirs)
        opt.step()
        for params in decisions[scope]:
            exact_clip_(params, 30.0)
        torch_opt.step()
    assert_close(ours, theirs, 1e-12)
    assert 0 < opt.clip_stats()["clipped_fraction"] < 1


@every_dtype
@pytest.mark.parametrize("amsgrad", [False, True])
def test_tensors_of_several_blocks(amsgrad, dtype, threads, paths):
    ours, theirs = twins([(3, 50_001), (17,), (131_072,), (65_537,)], dtype)
    opt = ClippedAdamW(ours, lr=0.02, max_norm=1.0, amsgrad=amsgrad)
    torch_opt = torch.optim.AdamW(theirs, lr=0.02, amsgrad=amsgrad)
    for k in range(5):
        set_gradients(k, ours, theirs)
        opt.step()
        exact_clip_(theirs, 1.0)
        torch_opt.step()
    assert_close(ours, theirs, TOLERANCE[dtype])
    assert set(paths) == {"kernel" if native() else "fused"}


@every_path
def test_parameters_that_join_later_and_miss_steps_count_for_themselves(path, kernel):
    ours, theirs = twins([(4,), (5,), (2, 2)])
    opt = ClippedAdamW(ours, lr=lr_for(path), max_norm=3.0, **PATHS[path])
    torch_opt = torch.optim.AdamW(theirs, lr=0.02)
    for k in range(12):
        set_gradients(k, ours, theirs)
        absent = 1 if k < 4 else 2 if k % 3 == 0 else None
        if absent is not None:
            ours[absent].grad = theirs[absent].grad = None
        opt.step()
        exact_clip_(theirs, 3.0)
        torch_opt.step()
    assert_close(ours, theirs, 1e-12)
    assert [opt.state[p]["step"].item() for p in ours] == [12, 8, 10]


@every_path
def test_a_zero_gradient_only_decays(path, kernel):
    (ours,) = twins([(3,), ()], count=1)
    before = [p.detach().clone() for p in ours]
    opt = ClippedAdamW(ours, lr=lr_for(path), max_norm=1.0, weight_decay=0.5, **PATHS[path])
    for p in ours:
        p.grad = torch.zeros_like(p)
    opt.step()
    assert_close(ours, [0.99 * b for b in before], 1e-15 if path != "tensor lr" else 1e-8)


@pytest.mark.parametrize("path", ["default", "foreach", "loop", "fused"])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_strides_complex_and_channels_last(path, amsgrad, kernel):
    base = torch.randn(6, 8)
    images = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    tensors = [base.T, base.clone()[:, ::2], images, torch.randn(3, dtype=torch.complex128)]
    ours = [nn.Parameter(t.detach()) for t in tensors]
    theirs = [nn.Parameter(t.detach().clone(memory_format=torch.contiguous_format)) for t in tensors]
    opt = ClippedAdamW(ours, lr=0.02, max_norm=2.0, amsgrad=amsgrad, **PATHS[path])
    torch_opt = torch.optim.AdamW(theirs, lr=0.02, amsgrad=amsgrad, foreach=False)
    for k in range(5):
        torch.manual_seed(k)
        for p, q in zip(ours, theirs, strict=True):
            q.grad = torch.randn(q.shape, dtype=q.dtype)
            p.grad = q.grad.clone()
        opt.step()
        exact_clip_(theirs, 2.0)
        torch_opt.step()
    assert_close(ours, theirs, 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_follows_torch(dtype):
    ours, theirs = twins([(50,), (3, 4)], dtype)
    opt = ClippedAdamW(ours, lr=0.125, max_norm=8.0, eps=1e-3)
    torch_opt = torch.optim.AdamW(theirs, lr=0.125, eps=1e-3, foreach=True)
    for k in range(4):
        set_gradients(k, ours, theirs, scale=0.5)
        opt.step()
        exact_clip_(theirs, 8.0)
        torch_opt.step()
    assert_close(ours, theirs, 4 * torch.finfo(dtype).eps)


@every_dtype
def test_float32_steps_are_counted_as_well_as_float64_ones(dtype, paths):
    torch.set_default_dtype(dtype)
    ours, theirs = twins([(5,), (2, 3)], torch.float64)
    opt, torch_opt = ClippedAdamW(ours, lr=0.02, max_norm=1.0), torch.optim.AdamW(theirs, lr=0.02)
    for k in range(4):
        set_gradients(k, ours, theirs)
        opt.step()
        exact_clip_(theirs, 1.0)
        torch_opt.step()
    assert_close(ours, theirs, 1e-12)
    assert {opt.state[p]["step"].dtype for p in ours} == {dtype}
    assert set(paths) == {"kernel" if native() else "fused"}


# --- paths and worlds -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "with_kernel", "without"),
    [("default", "kernel", "fused"), ("foreach", "foreach", "foreach"), ("loop", "loop", "loop"),
     ("fused", "fused", "fused"), ("tensor lr", "kernel", "fused"), ("not fused", "foreach", "foreach"),
     ("fused, not foreach", "fused", "fused")],
)  # fmt: skip
def test_options_choose_the_path(path, with_kernel, without, kernel, paths):
    (params,) = twins([(3,), (2, 2), ()], count=1)
    opt = ClippedAdamW(params, lr=lr_for(path), max_norm=1.0, **PATHS[path])
    for k in range(3):
        set_gradients(k, params)
        opt.step()
    expected = with_kernel if kernel == "kernel" and native() is not None else without
    assert set(paths) == {expected}


# --- checkpoints ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["default", "foreach", "loop", "fused"])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("direction", ["from torch", "to torch"])
def test_state_dicts_are_exchanged_with_torch(direction, amsgrad, path):
    first, second = twins([(4, 3), (5,), ()])

    def ours(params):
        return ClippedAdamW(params, lr=0.02, max_norm=math.inf, amsgrad=amsgrad, **PATHS[path])

    def theirs(params):
        return torch.optim.AdamW(params, lr=0.02, amsgrad=amsgrad, **PATHS[path])

    make_a, make_b = (theirs, ours) if direction == "from torch" else (ours, theirs)
    a, b = make_a(first), make_b(second)
    for k in range(10):
        if k == 5:
            b.load_state_dict(reloaded(a.state_dict()))
            for p, q in zip(first, second, strict=True):
                q.data.copy_(p.data)
        set_gradients(k, first, second)
        a.step()
        if k >= 5:
            b.step()
    assert_close(first, second, 1e-13)
    assert all(b.state[q]["step"].item() == 10 for q in second)


@pytest.mark.parametrize("path", ["default", "foreach", "loop", "fused"])
def test_a_state_of_another_shape_is_refused(path):
    (params,) = twins([(4,)], count=1)
    opt = ClippedAdamW(params, lr=0.02, max_norm=1.0, **PATHS[path])
    set_gradients(0, params)
    opt.step()
    opt.state[params[0]]["exp_avg_sq"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"`exp_avg_sq`, \(3,\), does not have the shape .* \(4,\)"):
        opt.step()


def test_amsgrad_can_be_switched_on_later():
    ours, theirs = twins([(4,)])
    opt, torch_opt = ClippedAdamW(ours, lr=0.02, max_norm=math.inf), torch.optim.AdamW(theirs, lr=0.02)
    for k in range(6):
        set_gradients(k, ours, theirs)
        if k == 3:
            opt.param_groups[0]["amsgrad"] = torch_opt.param_groups[0]["amsgrad"] = True
            torch_opt.state[theirs[0]]["max_exp_avg_sq"] = torch.zeros_like(theirs[0])
        opt.step()
        torch_opt.step()
    assert_close(ours, theirs, 1e-13)


# --- what is refused --------------------------------------------------------------------------------


def test_sparse_gradients_are_refused_before_anything_changes():
    embedding, dense = nn.Embedding(4, 2, sparse=True), nn.Parameter(torch.ones(3))
    opt = ClippedAdamW([dense, embedding.weight], lr=0.1, max_norm=1.0)
    (embedding(torch.tensor([1])).sum() + dense.sum()).backward()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        opt.step()
    assert torch.equal(dense.detach(), torch.ones(3))
    assert not opt.state


class StableAdamW:
    """Wortsman et al. (2023), algorithm 2, with a cap d in place of 1."""

    def __init__(self, params, lr, betas, eps, decay, d):
        self.params, self.lr, self.betas, self.eps, self.decay, self.d = params, lr, betas, eps, decay, d
        self.v, self.u = [[torch.zeros_like(p) for p in params] for _ in range(2)]
        self.t = 0

    @torch.no_grad()
    def step(self):
        self.t += 1
        hats = [b * (1 - b ** (self.t - 1)) / (1 - b**self.t) for b in self.betas]
        for p, v, u in zip(self.params, self.v, self.u, strict=True):
            v.mul_(hats[0]).add_((1 - hats[0]) * p.grad)
            u.mul_(hats[1]).add_((1 - hats[1]) * p.grad**2)
            rms = (p.grad**2 / u.clamp(min=self.eps**2)).mean().sqrt()
            lr = self.lr / max(1.0, rms / self.d)
            p -= lr * self.decay * p + lr * v / (u.sqrt() + self.eps)


@pytest.mark.parametrize("path", kinds.PATHS.values(), ids=kinds.PATHS)
@pytest.mark.parametrize("cap", [1.0, 0.4])
def test_capped_updates_are_those_of_stable_adamw(path, cap):
    ours, theirs = twins([(40, 30), (7,), (1,), (70_001,)])
    opt = ClippedAdamW(
        ours, lr=0.1, max_norm=math.inf, betas=(0.9, 0.99), weight_decay=0.1, update_rms=cap, **path
    )
    reference = StableAdamW(theirs, 0.1, (0.9, 0.99), 1e-8, 0.1, cap)
    for step in range(20):
        torch.manual_seed(step)
        for p, q in zip(ours, theirs, strict=True):
            p.grad = (1 + 20 * (step % 10 == 9)) * torch.randn_like(p)
            q.grad = p.grad.clone()
        opt.step()
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
