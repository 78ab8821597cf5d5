"""The counters of a step: what they remember, and which steps are above a limit."""

import math
from functools import partial

import numpy as np
import pytest
import torch

import curvestep as cs
from curvestep.optim.clip_step import FEWEST_NORMS, RECENT_STEPS, Counters, Limit


def counted(num_steps):
    """Steps with rising norms, every seventh left out for a norm that is not finite."""
    counters = Counters()
    for k in range(num_steps):
        if k % 7 == 6:
            counters.count_skipped(math.inf)
        else:
            counters.count(1.0 + k, 1 / (1.0 + k), float(k % 3 == 0))
    return counters


@pytest.mark.parametrize("num_steps", [0, 5, 7, RECENT_STEPS + 30])
def test_counters_keep_the_last_finite_norms_in_order(num_steps):
    counters = counted(num_steps)
    finite = [1.0 + k for k in range(num_steps) if k % 7 != 6]
    assert counters.norms == finite[-RECENT_STEPS:]
    assert counters.recent == [float((norm - 1) % 3 == 0) for norm in finite][-RECENT_STEPS:]
    assert (counters.steps, counters.skipped) == (len(finite), num_steps - len(finite))


@pytest.mark.parametrize("unit", ["x", "sigma"])
@pytest.mark.parametrize(("num_steps", "is_above"), [(FEWEST_NORMS, False), (FEWEST_NORMS + 1, True)])
def test_limits_need_ten_finite_norms(num_steps, is_above, unit):
    counters = counted(num_steps)  # the seventh is not finite
    assert counters.exceeds(Limit(10.0, unit), 1e6, None) == is_above


def test_spikes_are_the_last_and_above_what_the_last_tenth_step_says():
    assert counted(19).spike_bound == math.inf  # there were nine norms when it was last looked at
    for num_steps in (20, 23):
        counters = counted(num_steps)
        first = counters.norms[:18]  # of twenty steps, without the seventh and the fourteenth
        assert counters.spike_bound == pytest.approx(np.mean(first) + 6 * np.std(first))
    for step in range(RECENT_STEPS + 5):
        counters.keep_spike({"step": step})
    assert [spike["step"] for spike in counters.spikes] == list(range(5, RECENT_STEPS + 5))


@pytest.mark.parametrize("sigmas", [1.5, 3.0])
def test_deviations_are_those_of_numpy(sigmas):
    counters = counted(60)
    bound = np.mean(counters.norms) + sigmas * np.std(counters.norms)
    for norm in (bound * (1 - 1e-12), bound * (1 + 1e-12)):
        assert counters.exceeds(Limit(sigmas, "sigma"), norm, None) == (norm > bound)


@pytest.mark.parametrize("make", [
    partial(cs.ClippedSGD, momentum=0.9, weight_decay=0.1),
    partial(cs.ClippedSGD, max_norm=0.5),
    partial(cs.ClippedAdamW, nonfinite="skip"),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensors_clipped_in_one_call_go_as_with_an_optimizer_each(make, dtype):
    torch.manual_seed(0)
    shapes = [(3,), (300, 300), (), (0, 4), (70_000,), (5,)]
    together = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
    alone = [torch.nn.Parameter(p.detach().clone()) for p in together]
    options = {"lr": 0.1, "max_norm": 2.0} | make.keywords
    joint = make.func(together, **options, norm_scope="tensor")
    each = [make.func([p], **options) for p in alone]
    for step in range(4):
        for p, q in zip(together, alone, strict=True):
            p.grad = torch.randn_like(p) * 10.0 ** (step - 2)
            if step == 3 and p.dim() == 0:
                p.grad.fill_(1e-30)  # its square vanishes in float32
            q.grad = p.grad.clone()
        joint.step()
        for optimizer in each:
            optimizer.step()
        norms = [optimizer.clip_stats()["grad_norm"] for optimizer in each]
        assert joint.clip_stats()["grad_norm"] == math.hypot(*norms)
    assert all(torch.equal(p, q) for p, q in zip(together, alone, strict=True))
    clipped = [optimizer.clip_stats()["clipped_fraction"] for optimizer in each]
    assert 0 < joint.clip_stats()["clipped_fraction"] == pytest.approx(sum(clipped) / len(clipped))
    assert joint.clip_stats()["coefficient"] == min(o.clip_stats()["coefficient"] for o in each)
