"""What every torch optimizer promises, and what ours promise beyond that."""

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from curvestep import ClippedAdamW, ClippedSGD, NormalizedSGD
from curvestep.optim import update
from curvestep.tensors import kernel
from curvestep.tensors.kernel import native
from tests.optim.kinds import assert_same, copies, every_path, parameters, values
from tests.reference import ReferenceSGD

OPTIMIZERS = {
    "clipped": lambda params, **o: ClippedSGD(params, **({"lr": 0.1, "max_norm": 1.0} | o)),
    "normalized": lambda params, **o: NormalizedSGD(params, **({"lr": 0.1, "offset": 1.0} | o)),
    "adamw": lambda params, momentum=None, **o: ClippedAdamW(params, **({"lr": 0.1, "max_norm": 1.0} | o)),
}
MODES = {
    "default": {},
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "decay": {"momentum": 0.9, "weight_decay": 0.1},
    "nesterov decay": {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    "clip momentum": {"momentum": 0.9, "clip": "momentum"},
    "tensor scope": {"norm_scope": "tensor"},
    "maximize": {"maximize": True, "weight_decay": 0.1},
}
ADAMW_MODES = {
    **{name: MODES[name] for name in ("default", "loop", "foreach", "fused", "tensor scope", "maximize")},
    "amsgrad": {"amsgrad": True, "betas": (0.8, 0.99)},
}
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
every_optimizer_in_every_mode = pytest.mark.parametrize(
    ("make", "mode"),
    [
        pytest.param(make, mode, id=f"{name}-{named}")
        for name, make in OPTIMIZERS.items()
        for named, mode in (ADAMW_MODES if name == "adamw" else MODES).items()
    ],
)
every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


@every_optimizer_in_every_mode
def test_gradients_are_bit_identical_after_the_step(make, mode):
    params = parameters((3, 4), (5,), (1,))
    opt = make(params, **mode)
    for _ in range(3):
        before = [p.grad.clone() for p in params]
        opt.step()
        assert_same(before, [p.grad for p in params])


@every_optimizer
def test_parameters_without_gradient_stay_and_do_not_count(make):
    a, b = parameters((2,), (2,))
    b.grad = None
    before = b.detach().clone()
    opt = make([a, b], momentum=0.9)
    opt.step()
    assert torch.equal(b.detach(), before)
    assert b not in opt.state
    assert opt.clip_stats()["grad_norm"] == pytest.approx(a.grad.norm().item())


@every_optimizer_in_every_mode
@pytest.mark.parametrize("world", ["without_native", "on_device", "with_all"])
def test_a_graph_from_before_the_step_is_stale(make, mode, world, request):
    request.getfixturevalue(world)
    p = nn.Parameter(torch.ones(3))
    opt = make([p], **mode)
    for _ in range(2):
        p.grad = torch.ones(3)
        loss = (p**2).sum()
        opt.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# --- non-finite gradients -------------------------------------------------------------------------


@every_optimizer_in_every_mode
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_raise_names_the_parameter_and_changes_nothing(make, mode, bad):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    opt = make(net.named_parameters(), **mode)
    opt.step()
    before, state = values(net.parameters()), copy.deepcopy(opt.state_dict())
    net[1].bias.grad[0] = bad
    with pytest.raises(FloatingPointError, match=r"`1\.bias`.*Nothing was changed.*skip"):
        opt.step()
    assert_same(before, values(net.parameters()))
    torch.testing.assert_close(opt.state_dict()["state"], state["state"], rtol=0, atol=0)
    assert opt.clip_stats()["steps"] == 1


def test_raise_counts_unnamed_parameters():
    params = parameters((2,), (3,))
    params[1].grad[0] = math.nan
    with pytest.raises(FloatingPointError, match="`parameter 1 of group 0`"):
        ClippedSGD(params, lr=0.1, max_norm=1.0).step()


@every_optimizer_in_every_mode
def test_skip_changes_nothing_and_counts(make, mode):
    params = parameters((2, 2), (3,))
    opt = make(params, nonfinite="skip", **mode)
    opt.step()
    before, state = values(params), copy.deepcopy(opt.state_dict())
    params[0].grad[0, 0] = math.inf
    opt.step()
    assert_same(before, values(params))
    torch.testing.assert_close(opt.state_dict()["state"], state["state"], rtol=0, atol=0)
    stats = opt.clip_stats()
    assert (stats["steps"], stats["skipped"], stats["grad_norm"]) == (1, 1, math.inf)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@every_path
@pytest.mark.parametrize(
    ("make", "theirs", "options"),
    [
        (ClippedSGD, torch.optim.SGD, {}),
        (ClippedAdamW, torch.optim.AdamW, {}),
        (ClippedAdamW, torch.optim.AdamW, {"amsgrad": True}),
    ],
)
def test_propagate_does_what_torch_does(make, theirs, options, path, bad):
    p, q = (nn.Parameter(torch.ones(3)) for _ in range(2))
    ours = make([p], lr=0.1, max_norm=1.0, nonfinite="propagate", **options, **path)
    theirs = theirs([q], lr=0.1, **options, **path)
    for gradient in ([1.0, bad, 1.0], [1e7, 2e7, 0.0]):
        p.grad, q.grad = torch.tensor(gradient), torch.tensor(gradient)
        ours.step()
        torch.nn.utils.clip_grad_norm_([q], 1.0)
        theirs.step()
        torch.testing.assert_close(p.detach(), q.detach(), equal_nan=True)


# --- shapes, strides, dtypes ----------------------------------------------------------------------


def strided(kind, size=8):
    base = torch.randn(size, size)
    return {
        "contiguous": base,
        "transposed": base.T,
        "sliced": torch.randn(size, 2 * size)[:, ::2],
        "expanded": torch.randn(size, 1).expand(size, size),
    }[kind]


@every_mode
@pytest.mark.parametrize("param", ["contiguous", "transposed", "sliced"])
@pytest.mark.parametrize("grad", ["contiguous", "transposed", "sliced", "expanded"])
def test_strides_of_parameters_and_gradients_do_not_matter(param, grad, mode):
    storage = strided(param)
    p, q = nn.Parameter(storage), nn.Parameter(storage.contiguous().clone())
    g = strided(grad)
    p.grad, q.grad = g, g.contiguous().clone()
    neighbours = None if param != "sliced" else storage._base[:, 1::2].clone()
    ours = ClippedSGD([p], lr=0.1, max_norm=1.0, **mode)
    plain = {k: v for k, v in mode.items() if k not in ("foreach", "fused", "norm_scope")}
    theirs = ReferenceSGD([q], 0.1, coefficient=lambda n: min(1, 1 / n), **plain)
    for _ in range(3):
        ours.step()
        theirs.step()
    torch.testing.assert_close(p.detach(), q.detach())
    if neighbours is not None:
        assert torch.equal(storage._base[:, 1::2], neighbours)


@pytest.mark.parametrize("size", [*range(1, 35), 63, 64, 65, 1000, 70_000])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_every_element_of_every_size_is_updated(size, momentum):
    p = nn.Parameter(torch.zeros(size))
    p.grad = torch.full((size,), 2.0)
    opt = ClippedSGD([p], lr=1.0, max_norm=size**0.5, momentum=momentum)
    opt.step()
    torch.testing.assert_close(p.detach(), torch.full((size,), -1.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", [{}, {"momentum": 0.9}, {"fused": True}, {"weight_decay": 0.1}])
def test_half_precision_is_really_updated(dtype, mode):
    p = nn.Parameter(torch.ones(100, dtype=dtype))
    p.grad = torch.full((100,), 3.0, dtype=dtype)
    opt = ClippedSGD([p], lr=0.5, max_norm=1.0, **mode)
    opt.step()
    decay = mode.get("weight_decay", 0.0)
    torch.testing.assert_close(
        p.detach().double(), torch.full((100,), 1 - 0.5 * (0.1 + decay)), rtol=0, atol=4e-3
    )
    assert opt.clip_stats()["grad_norm"] == pytest.approx(30.0, rel=1e-6)


@pytest.mark.parametrize(
    "mode",
    [{}, {"foreach": True}, {"momentum": 0.9}, {"weight_decay": 0.1}, {"momentum": 0.9, "nesterov": True}],
)
def test_sparse_gradients_count_and_step_like_dense_ones(mode):
    ours, theirs = nn.Embedding(6, 2, sparse=True), nn.Embedding(6, 2)
    theirs.load_state_dict(ours.state_dict())
    a = ClippedSGD([*ours.parameters()], lr=0.5, max_norm=0.5, **mode)
    b = ClippedSGD([*theirs.parameters()], lr=0.5, max_norm=0.5, **mode)
    for _ in range(4):
        for net, opt in ((ours, a), (theirs, b)):
            opt.zero_grad()
            (net(torch.tensor([1, 1, 3])) ** 2).sum().backward()
            opt.step()
    assert ours.weight.grad.is_sparse
    torch.testing.assert_close(ours.weight.detach(), theirs.weight.detach())
    assert a.clip_stats()["grad_norm"] == pytest.approx(b.clip_stats()["grad_norm"])


def test_dense_sparse_and_half_parameters_in_one_group():
    dense, half = parameters((4,), (4,), scale=2.0)
    half = nn.Parameter(half.detach().bfloat16())
    half.grad = torch.ones(4, dtype=torch.bfloat16)
    embedding = nn.Embedding(3, 2, sparse=True)
    embedding(torch.tensor([0])).sum().backward()
    norm = math.sqrt(dense.grad.norm().item() ** 2 + 4 + 2)
    before = dense.detach().clone()
    opt = ClippedSGD([dense, half, embedding.weight], lr=1.0, max_norm=0.1)
    opt.step()
    torch.testing.assert_close(dense.detach(), before - 0.1 / norm * dense.grad)
    assert opt.clip_stats()["grad_norm"] == pytest.approx(norm)


@given(st.integers(-25, 25))
def test_steps_scale_with_the_gradient_until_clipped(exponent):
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([3.0, 4.0]) * 10.0**exponent
    ClippedSGD([p], lr=1.0, max_norm=1.0).step()
    length = p.detach().norm().item()
    assert length == pytest.approx(min(1.0, 5 * 10.0**exponent), rel=1e-12)


# --- torch's conventions --------------------------------------------------------------------------


@every_optimizer
def test_deepcopy_and_pickle_keep_settings_and_counters(make):
    params = parameters((3,))
    opt = make(params, norm_scope="tensor", nonfinite="skip", momentum=0.9)
    opt.step()
    for twin in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        assert twin.clip_stats() == opt.clip_stats()
        twin.step()
        assert twin.defaults == opt.defaults


def test_a_state_dict_of_torch_sgd_loads():
    params = parameters((3,), (2,))
    sgd = torch.optim.SGD(params, lr=0.3, momentum=0.9)
    sgd.step()
    opt = ClippedSGD(params, lr=0.1, max_norm=0.7, momentum=0.9)
    opt.load_state_dict(sgd.state_dict())
    assert opt.param_groups[0]["lr"] == 0.3
    assert opt.param_groups[0]["max_norm"] == 0.7
    assert torch.equal(opt.state[params[0]]["momentum_buffer"], sgd.state[params[0]]["momentum_buffer"])
    opt.step()


@every_optimizer
def test_profiler_sees_the_step(make):
    opt = make(parameters((2,)))
    opt.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        opt.step()
    names = [event.key for event in profile.key_averages()]
    assert f"Optimizer.step#{type(opt).__name__}.step" in names


def test_hooks_run_once_for_a_subclass_with_a_step_of_its_own():
    class Louder(ClippedSGD):
        def step(self, closure=None):
            return super().step(closure)

    seen = []
    opt = Louder(parameters((2,)), lr=0.1, max_norm=1.0)
    opt.register_step_post_hook(lambda *_: seen.append("post"))
    opt.step()
    assert seen == ["post"]


def test_lr_and_max_norm_can_be_scheduled():
    p = nn.Parameter(torch.zeros(1))
    opt = ClippedSGD([p], lr=1.0, max_norm=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
    lengths = []
    for k in range(3):
        p.grad = torch.tensor([10.0])
        opt.param_groups[0]["max_norm"] = 1.0 + k
        before = p.item()
        opt.step()
        schedule.step()
        lengths.append(before - p.item())
    assert lengths == pytest.approx([1.0, 0.5 * 2, 0.25 * 3])


# --- counters -------------------------------------------------------------------------------------


def test_clip_stats_over_all_steps_and_over_the_recent_window():
    p = nn.Parameter(torch.zeros(1))
    opt = ClippedSGD([p], lr=0.01, max_norm=1.0)
    for k in range(250):
        p.grad = torch.tensor([2.0 if k < 100 or k >= 200 else 0.5])
        opt.step()
    stats = opt.clip_stats()
    assert stats == {
        "grad_norm": 2.0,
        "coefficient": 0.5,
        "steps": 250,
        "clipped_fraction": 150 / 250,
        "recent_clipped_fraction": 50 / 100,
        "skipped": 0,
    }


def test_normalized_sgd_reports_its_step_relative_to_zero_gradient():
    p = nn.Parameter(torch.zeros(1))
    opt = NormalizedSGD([p], lr=0.01, offset=2.0)
    p.grad = torch.tensor([3.0])
    opt.step()
    assert opt.clip_stats()["coefficient"] == pytest.approx(0.4)
    assert opt.clip_stats()["clipped_fraction"] == 1.0


# --- without the kernel, and without torch's underscore functions ---------------------------------


@every_optimizer_in_every_mode
@pytest.mark.parametrize("world", ["without_native", "without_fused", "on_device"])
def test_every_world_gives_the_same_steps(world, make, mode, request, paths):
    params = parameters((4, 3), (5,))
    twins = copies(params)
    theirs = make(twins, **mode)
    for _ in range(3):
        theirs.step()
    stats = theirs.clip_stats()
    paths.clear()
    request.getfixturevalue(world)
    ours = make(params, **mode)
    for _ in range(3):
        ours.step()
    torch.testing.assert_close(params, twins, rtol=1e-7, atol=1e-7)
    assert ours.clip_stats() == pytest.approx(stats)
    assert world != "without_fused" or "fused" not in paths


def test_large_tensors_stream_unless_the_kernel_has_two_threads(paths, monkeypatch):
    for size in (update.LARGE, update.LARGE + 1):
        for threads in (1, 2):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            ClippedSGD(parameters((size,)), lr=0.1, max_norm=1.0).step()
    monkeypatch.setattr(kernel, "native", lambda: None)
    ClippedSGD(parameters((size,)), lr=0.1, max_norm=1.0).step()
    by_kernel = "kernel" if native() else "fused"
    assert paths == [by_kernel, by_kernel, "foreach", "kernel" if native() else "foreach", "foreach"]


# --- bad input ------------------------------------------------------------------------------------


@every_optimizer
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lr": -1.0}, ValueError, "Invalid learning rate: -1.0"),
        ({"lr": math.nan}, ValueError, "Invalid learning rate"),
        ({"lr": math.inf}, ValueError, "Invalid learning rate"),
        ({"lr": "fast"}, TypeError, "`lr` must be a number, got 'fast'"),
        ({"lr": torch.ones(2)}, ValueError, "Tensor lr must be 1-element"),
        ({"weight_decay": -0.1}, ValueError, "Invalid weight_decay value: -0.1"),
        ({"norm_scope": "layer"}, ValueError, "`norm_scope` must be one of"),
        ({"nonfinite": "ignore"}, ValueError, "`nonfinite` must be one of"),
        ({"capturable": True}, ValueError, '`capturable=True` cannot raise.*nonfinite="skip"'),
        ({"capturable": True, "nonfinite": "skip", "skip_above": 5.0}, ValueError, "a graph reads nothing"),
        ({"foreach": True, "fused": True}, RuntimeError, "cannot be `True` together"),
        ({"differentiable": True}, TypeError, "has no option `differentiable`"),
    ],
)
def test_wrong_arguments_are_named(make, options, error, message):
    with pytest.raises(error, match=message):
        make(parameters((2,)), **options)


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        ("clipped", {"max_norm": 0}, ValueError, "`max_norm` must be positive: a number, or inf .*, got 0"),
        ("clipped", {"max_norm": "1.0"}, TypeError, "`max_norm` must be positive: a number, or inf"),
        ("clipped", {"max_norm": -1.0}, ValueError, "`max_norm`.*got -1.0"),
        ("clipped", {"max_norm": math.nan}, ValueError, "`max_norm`.*got nan"),
        ("clipped", {"max_norm": None}, TypeError, "`max_norm`.*got None"),
        ("clipped", {"momentum": -0.1}, ValueError, "Invalid momentum value: -0.1"),
        ("clipped", {"dampening": math.nan}, ValueError, "Invalid dampening value: nan"),
        ("clipped", {"dampening": -math.inf}, ValueError, "Invalid dampening value: -inf"),
        ("clipped", {"nesterov": True}, ValueError, "Nesterov momentum requires a momentum and zero"),
        ("clipped", {"clip": "weights"}, ValueError, "`clip` must be one of 'gradient', 'momentum', got 'w"),
        ("normalized", {"offset": 0}, ValueError, "`offset` must be positive and finite, got 0"),
        ("adamw", {"betas": (1.0, 0.9)}, ValueError, "Invalid beta parameter at index 0: 1.0"),
        ("adamw", {"betas": (0.9, -0.1)}, ValueError, "Invalid beta parameter at index 1: -0.1"),
        ("adamw", {"betas": 0.9}, TypeError, "`betas` must be two numbers, got 0.9"),
        ("adamw", {"betas": ("a", 0.9)}, TypeError, "`betas` must be a number, got 'a'"),
        ("adamw", {"eps": -1e-8}, ValueError, "Invalid epsilon value: -1e-08"),
        ("adamw", {"eps": math.nan}, ValueError, "Invalid epsilon value: nan"),
        ("adamw", {"clip": "momentum"}, TypeError, "ClippedAdamW has no option `clip`"),
        ("adamw", {"update_rms": 0.0}, ValueError, "`update_rms` must be positive"),
    ],
)
def test_wrong_arguments_of_one_class_are_named(make, options, error, message):
    with pytest.raises(error, match=message):
        OPTIMIZERS[make](parameters((2,)), **options)


@every_optimizer
def test_a_wrong_group_is_refused_and_not_added(make):
    opt = make(parameters((2,)))
    with pytest.raises(ValueError, match=r"`(max_norm|offset)`"):
        opt.add_param_group({"params": parameters((3,)), opt.threshold: -2.0})
    with pytest.raises(ValueError, match="`norm_scope` holds for all groups"):
        opt.add_param_group({"params": parameters((3,)), "norm_scope": "tensor"})
    assert len(opt.param_groups) == 1
