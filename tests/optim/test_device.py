"""The optimizers on a device that is strict: the steps of the CPU, and as many waits as the docs say."""

import math
from itertools import product

import pytest
import torch
from torch import nn

from curvestep import ClippedAdamW, ClippedSGD, NormalizedSGD, clip
from tests.optim.kinds import set_gradients
from tests.support.strict import strict_device, waits


@pytest.fixture(autouse=True)
def device():
    torch.set_default_dtype(torch.float32)
    with strict_device() as device:
        yield device


SGD = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "decay": {"weight_decay": 0.1},
    "maximize": {"maximize": True},
    "nesterov decay": {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    "dampening": {"momentum": 0.9, "dampening": 0.5},
    "foreach": {"foreach": True, "momentum": 0.9, "weight_decay": 0.1},
    "loop": {"foreach": False, "momentum": 0.9, "weight_decay": 0.1},
    "fused": {"fused": True, "momentum": 0.9},
    "of momentum": {"momentum": 0.9, "clip": "momentum"},
    "of nesterov": {"momentum": 0.9, "clip": "momentum", "nesterov": True, "foreach": True},
    "by tensor": {"norm_scope": "tensor", "momentum": 0.9},
    "by group": {"norm_scope": "group"},
}
ADAMW = {
    "plain": {},
    "amsgrad": {"amsgrad": True},
    "maximize": {"maximize": True},
    "foreach": {"foreach": True},
    "foreach amsgrad": {"foreach": True, "amsgrad": True},
    "loop": {"foreach": False, "amsgrad": True},
    "fused": {"fused": True},
    "no decay": {"weight_decay": 0.0},
    "capped": {"update_rms": 0.5},
    "capped loop": {"update_rms": 0.5, "foreach": False},
    "by tensor": {"norm_scope": "tensor"},
    "by group": {"norm_scope": "group"},
}
CASES = [
    *(pytest.param(ClippedSGD, options, id=f"ClippedSGD {name}") for name, options in SGD.items()),
    *(pytest.param(NormalizedSGD, options, id=f"NormalizedSGD {name}") for name, options in SGD.items()),
    *(pytest.param(ClippedAdamW, options, id=f"ClippedAdamW {name}") for name, options in ADAMW.items()),
]  # fmt: skip
SHAPES = [(4, 3), (), (5,), (0,), (1,)]
POLICIES = {"propagate": 0, "skip": 0, "raise": 1}  # waits of a step
LRS = {
    "number": lambda device: 0.05,
    "host tensor": lambda device: torch.tensor(0.05),
    "host vector": lambda device: torch.tensor([0.05]),
    "device tensor": lambda device: torch.tensor(0.05, device=device),
}


def parameters(places):
    """The same two groups of parameters in each place; the last is not contiguous."""
    tensors = [torch.randn(shape) for shape in SHAPES] + [torch.randn(3, 4).t()]
    models = [[nn.Parameter(t.to(place, copy=True)) for t in tensors] for place in places]
    return models, [[{"params": params[:2]}, {"params": params[2:]}] for params in models]


def assert_equal_to_rounding(ours, theirs):
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.detach().cpu(), q.detach(), rtol=2e-6, atol=1e-6)


def everything(params, optimizer):
    """Parameters and state."""
    return [p.detach() for p in params] + [t for p in params for t in optimizer.state[p].values()]


@pytest.mark.parametrize(
    ("lr", "policy"),
    [
        *product(["number"], POLICIES),
        ("device tensor", "skip"),
        ("host tensor", "skip"),
        ("host vector", "propagate"),
    ],
)
@pytest.mark.parametrize(("make", "options"), CASES)
def test_steps_are_those_of_the_cpu_and_waits_as_documented(make, options, policy, lr, device):
    (away, here), (groups_away, groups_here) = parameters([device, "cpu"])
    ours = make(groups_away, LRS[lr](device), 1.0, nonfinite=policy, **options)
    theirs = make(groups_here, 0.05, 1.0, **options)
    for k in range(4):
        set_gradients(k, away, here)
        # From the first step on, which creates the state. What the first does decides how the second damps.
        damps_later = k == 0 and policy == "skip" and "dampening" in options
        # The average is measured after the gradient.
        measures_twice = policy == "raise" and options.get("clip") == "momentum"
        with waits(POLICIES[policy] + damps_later + measures_twice):
            ours.step()
        theirs.step()
    assert_equal_to_rounding(away, here)
    is_counted_there = policy != "raise"
    with waits(is_counted_there):
        stats = ours.clip_stats()
    assert stats == pytest.approx(theirs.clip_stats(), rel=1e-6)
    with waits(is_counted_there):
        ours.state_dict()


@pytest.mark.parametrize(("make", "options"), CASES)
def test_a_gradient_that_is_not_finite_changes_nothing_without_a_wait(make, options, device):
    (away,), (groups,) = parameters([device])
    optimizer = make(groups, 0.05, 1.0, nonfinite="skip", **options)
    set_gradients(0, away)
    optimizer.step()
    kept = [t.cpu() for t in everything(away, optimizer)]
    away[0].grad[0, 0] = math.nan
    with waits(0):
        optimizer.step()
    assert all(torch.equal(t.cpu(), old) for t, old in zip(everything(away, optimizer), kept, strict=True))
    assert (optimizer.clip_stats()["steps"], optimizer.clip_stats()["skipped"]) == (1, 1)


def test_a_skipped_first_step_leaves_the_second_undamped(device):
    # As torch: the first gradient that a buffer sees is not damped, and a skipped one is not seen.
    (away, here), (groups_away, groups_here) = parameters([device, "cpu"])
    options = {"momentum": 0.9, "dampening": 0.5, "nonfinite": "skip"}
    ours, theirs = (ClippedSGD(groups, 0.05, 1.0, **options) for groups in (groups_away, groups_here))
    for k in range(3):
        set_gradients(k, away, here)
        if k == 0:
            away[0].grad[0, 0] = here[0].grad[0, 0] = math.inf
        ours.step()
        theirs.step()
    assert_equal_to_rounding(away, here)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scope", ["global", "group", "tensor"])
@pytest.mark.parametrize("make", [ClippedSGD, NormalizedSGD, ClippedAdamW])
@pytest.mark.parametrize("first", ["strict", "cpu"])
def test_parameters_on_the_device_and_on_cpu_in_one_optimizer(make, scope, policy, first, device):
    (mixed, here), _ = parameters(["cpu", "cpu"])
    second = {"strict": "cpu", "cpu": "strict"}[first]
    mixed = [nn.Parameter(p.detach().to(first if i % 2 else second)) for i, p in enumerate(mixed)]
    ours = make([{"params": mixed[:2]}, {"params": mixed[2:]}], 0.05, 1.0, nonfinite=policy, norm_scope=scope)
    theirs = make([{"params": here[:2]}, {"params": here[2:]}], 0.05, 1.0, nonfinite=policy, norm_scope=scope)
    for k in range(3):
        set_gradients(k, mixed, here)
        if k == 1 and policy == "skip":
            for params in (mixed, here):
                params[0].grad[0, 0] = math.nan
        ours.step()
        theirs.step()
    assert_equal_to_rounding(mixed, here)
    assert ours.clip_stats() == pytest.approx(theirs.clip_stats(), rel=1e-6)


@pytest.mark.parametrize(("make", "name"), [(ClippedSGD, "_fused_sgd_"), (ClippedAdamW, "_fused_adamw_")])
def test_fused_kernels_get_a_tensor_lr_in_single_precision(make, name, device, monkeypatch):
    (params,), _ = parameters([device])
    set_gradients(0, params)
    given = []
    monkeypatch.setattr(torch, name, lambda *_, lr, **__: given.append(lr.dtype))
    make(params, torch.tensor(0.1, dtype=torch.float64, device=device), 1.0, fused=True).step()
    assert set(given) == {torch.float32}


def test_counters_go_on_after_a_checkpoint_and_on_another_device(device):
    (away, here), _ = parameters([device, "cpu"])
    first, second = (ClippedSGD(params, 0.05, 1.0, nonfinite="skip") for params in (away, here))
    for k in range(130):
        set_gradients(k, away, here)
        if k % 7 == 0:
            away[0].grad[0, 0] = here[0].grad[0, 0] = math.nan
        if k == 60:
            first.load_state_dict(first.state_dict())
        first.step()
        second.step()
    assert first.clip_stats() == pytest.approx(second.clip_stats(), rel=1e-6)
    assert first.state_dict()["param_groups"][0]["clip_stats"]["recent"] == pytest.approx(
        second.state_dict()["param_groups"][0]["clip_stats"]["recent"]
    )
    third = ClippedSGD(here, 0.05, 1.0)
    third.load_state_dict(first.state_dict())
    assert third.clip_stats() == first.clip_stats()
    third.step()
    assert third.clip_stats()["steps"] == first.clip_stats()["steps"] + 1


# --- torch.amp.GradScaler ---------------------------------------------------------------------------


SCALED = [
    pytest.param(make, options, id=f"{make.__name__} {' '.join(options)}")
    for make in (ClippedSGD, NormalizedSGD)
    for options in ({}, {"momentum": 0.9, "weight_decay": 0.1}, {"momentum": 0.9, "clip": "momentum"})
] + [pytest.param(ClippedAdamW, {"amsgrad": True}, id="ClippedAdamW")]


@pytest.mark.parametrize("place", ["strict", "cpu"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("make", "options"), SCALED)
def test_a_scaler_unscales_inside_the_fused_step(make, options, policy, place, device):
    (ours, theirs), (groups, other_groups) = parameters([place, "cpu"])
    scaled = make(groups, 0.05, 1.0, nonfinite=policy, fused=True, **options)
    plain = make(other_groups, 0.05, 1.0, nonfinite="skip", **options)
    scaler = torch.amp.GradScaler(place, init_scale=1024.0, growth_interval=2)
    scale = 1024.0
    scaler.scale(torch.ones((), device=place))
    for k in range(5):
        set_gradients(k, ours, theirs)
        for p in ours:
            p.grad.mul_(scale)
        if k == 2:
            ours[0].grad[0, 0] = theirs[0].grad[0, 0] = math.inf
        given = [p.grad.clone() for p in ours]
        measures_twice = policy == "raise" and k != 2 and options.get("clip") == "momentum"
        with waits(POLICIES[policy] + measures_twice if place == "strict" else None):
            scaler.step(scaled)
            scaler.update()
        assert all(torch.equal(p.grad, g) for p, g in zip(ours, given, strict=True))
        plain.step()
        scale = scaler.get_scale()
    assert scale == 1024.0 * 2 / 2 * 2
    assert_equal_to_rounding(ours, theirs)
    assert scaled.clip_stats() == pytest.approx(plain.clip_stats(), rel=1e-5)
    assert scaled.clip_stats()["skipped"] == 1


# --- clipping in the steps of torch's optimizers ------------------------------------------------------


@pytest.mark.parametrize("scope", ["global", "group", "tensor"])
@pytest.mark.parametrize(
    "options", [{"nonfinite": "propagate"}, {}, {"skip_above": "10x", "nonfinite": "skip"}]
)
def test_clip_takes_the_steps_of_the_cpu_and_waits_as_documented(options, scope, device):
    (away, here), (groups_away, groups_here) = parameters([device, "cpu"])
    ours, theirs = (torch.optim.SGD(groups, lr=0.05, momentum=0.9) for groups in (groups_away, groups_here))
    for optimizer in (ours, theirs):
        clip(optimizer, 1.0, norm_scope=scope, **options)
    for k in range(14):
        set_gradients(k, away, here)
        if k == 12 and options.get("nonfinite") == "skip":
            away[0].grad[0, 0] = here[0].grad[0, 0] = math.nan
        with waits(0 if options == {"nonfinite": "propagate"} else 1):
            ours.step()
        theirs.step()
    assert_equal_to_rounding(away, here)
    assert ours.clip_stats() == pytest.approx(theirs.clip_stats(), rel=1e-6)
    assert ours.clip_stats()["skipped"] == (options.get("nonfinite") == "skip")


def test_clip_leaves_a_scaled_step_on_the_device_and_out_where_it_should(device):
    away, here = (params[:-1] for params in parameters([device, "cpu"])[0])  # torch's fused: contiguous ones
    ours = torch.optim.SGD(away, lr=0.05, fused=True)
    theirs = torch.optim.SGD(here, lr=0.05)
    clip(ours, 1.0, skip_above=1e3)
    clip(theirs, 1.0, nonfinite="skip", skip_above=1e3)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    scaler.scale(torch.ones((), device=device))
    for k in range(5):
        set_gradients(k, away, here)
        for p in [*away, *here]:
            p.grad.mul_(1e6 if k == 3 else 1.0)
        for p in away:
            p.grad.mul_(scaler.get_scale())
        if k == 2:
            away[0].grad[0, 0] = here[0].grad[0, 0] = math.inf
        with waits(1):
            scaler.step(ours)
            scaler.update()
        theirs.step()
    assert ours.clip_stats() == pytest.approx(theirs.clip_stats())
    assert ours.clip_stats()["skipped"] == 2
    assert_equal_to_rounding(away, here)
