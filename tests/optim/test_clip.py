"""Clipping inside any optimizer's step: what `clip_grad_norm_` before it gives, and what it does not."""

import copy
import gc
import math
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.nn.utils import clip_grad_norm_

import curvestep as cs
from curvestep.optim.clip_step import RECENT_STEPS
from tests.models import reloaded
from tests.optim.kinds import copies, parameters, set_gradients
from tests.reference import exact_clip_
from tests.support.strict import strict_device, waits

OPTIMIZERS = {
    "SGD": lambda params, **o: torch.optim.SGD(params, lr=0.1, momentum=0.9, **o),
    "AdamW": lambda params, **o: torch.optim.AdamW(params, lr=0.1, **o),
    "AdamW fused": lambda params, **o: torch.optim.AdamW(params, lr=0.1, fused=True, **o),
    "Adagrad": lambda params, **o: torch.optim.Adagrad(params, lr=0.1, **o),
    "RMSprop": lambda params, **o: torch.optim.RMSprop(params, lr=0.1, **o),
}
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def clipped_sgd(params, max_norm, lr=1.0, **options) -> Any:
    """torch's SGD with clipping in its steps."""
    return cs.clip(torch.optim.SGD(params, lr=lr), max_norm, **options).optimizer


@every_optimizer
def test_steps_are_those_of_a_gradient_clipped_before(make):
    ours = parameters((3, 4), (5,))
    theirs = copies(ours)
    opt, twin = make(ours), make(theirs)
    handle = cs.clip(opt, max_norm=4.0)
    norms = []
    for step in range(12):
        set_gradients(step, ours, theirs)
        norms.append(exact_clip_(theirs, 4.0))
        opt.step()
        twin.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    stats = opt.clip_stats()
    assert stats == handle.clip_stats()
    assert stats["grad_norm"] == pytest.approx(norms[-1])
    assert stats["coefficient"] == pytest.approx(min(1.0, 4.0 / norms[-1]))
    assert stats["clipped_fraction"] == sum(n > 4.0 for n in norms) / 12
    assert 0 < stats["clipped_fraction"] < 1
    assert (stats["steps"], stats["skipped"]) == (12, 0)


@given(scale=st.floats(1e-8, 1e8), max_norm=st.floats(1e-6, 1e6))
def test_the_step_of_sgd_is_never_longer_than_lr_times_max_norm(scale, max_norm):
    (w,) = parameters((7,))
    start = w.detach().clone()
    opt = clipped_sgd([w], max_norm)
    set_gradients(0, [w], scale=scale)
    norm = w.grad.norm().item()
    opt.step()
    length = (w.detach() - start).norm().item()
    assert length <= min(norm, max_norm) * (1 + 1e-9) + 1e-15 * start.norm().item() * 10


def test_below_the_threshold_gradients_keep_their_bits():
    params = parameters((3,), (4,))
    set_gradients(1, params)
    before = [p.grad.clone() for p in params]
    clipped_sgd(params, math.inf).step()
    assert all(torch.equal(p.grad, g) for p, g in zip(params, before, strict=True))
    assert [p.grad._version for p in params] == [0, 0]  # nothing was written


@pytest.mark.parametrize("scope", ["group", "tensor"])
def test_groups_and_tensors_have_norms_of_their_own(scope):
    a, b = parameters((2,), (2,))
    opt = clipped_sgd([{"params": [a], "max_norm": 1.0}, {"params": [b]}], 100.0, norm_scope=scope)
    a.grad, b.grad = torch.tensor([3.0, 4.0]), torch.tensor([6.0, 8.0])
    opt.step()
    torch.testing.assert_close(a.grad, torch.tensor([0.6, 0.8]))
    torch.testing.assert_close(b.grad, torch.tensor([6.0, 8.0]))
    stats = opt.clip_stats()
    assert stats["coefficient"] == pytest.approx(0.2)
    assert stats["clipped_fraction"] == 0.5
    assert stats["grad_norm"] == pytest.approx(math.hypot(5.0, 10.0))


@pytest.mark.parametrize("as_keyword", [True, False])
def test_what_a_closure_computes_is_clipped(as_keyword):
    (w,) = parameters((2,))
    with torch.no_grad():
        w.copy_(torch.tensor([3.0, 4.0]))
    opt = clipped_sgd([w], 1.0, lr=0.5)

    def closure():
        opt.zero_grad()
        loss = (0.5 * w**2).sum()
        loss.backward()
        return loss

    loss = opt.step(closure=closure) if as_keyword else opt.step(closure)
    assert loss.item() == 12.5
    torch.testing.assert_close(w.detach(), torch.tensor([2.7, 3.6]))
    assert opt.clip_stats()["grad_norm"] == 5.0


class Twice(torch.optim.Optimizer):
    """Calls its closure two times a step, as a line search does."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1.0})

    def step(self, closure):
        closure()
        return closure()


def test_hidden_gradients_are_back_when_the_closure_is_called_again():
    (w,) = parameters((2,))
    opt = cs.clip(Twice([w]), 100.0, nonfinite="skip").optimizer
    bad, good, seen = torch.tensor([math.nan, 4.0]), torch.tensor([3.0, 4.0]), []

    def closure():
        seen.append(w.grad)
        w.grad = good if seen[1:] else bad
        return torch.tensor(0.0)

    opt.step(closure)
    assert seen[1] is bad
    assert w.grad is good


# --- steps that are left out ----------------------------------------------------------------------


def state_of(opt):
    return copy.deepcopy(opt.state_dict()["state"])


@every_optimizer
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_is_not_finite_is_left_out_and_counted(make, bad):
    params = parameters((3,), (2, 2))
    opt = make(params)
    cs.clip(opt, max_norm=1.0, nonfinite="skip")
    set_gradients(0, params)
    opt.step()
    before, state = [p.detach().clone() for p in params], state_of(opt)
    set_gradients(1, params)
    params[1].grad[0, 0] = bad
    grads = [p.grad for p in params]
    opt.step()
    assert all(torch.equal(p.detach(), q) for p, q in zip(params, before, strict=True))
    torch.testing.assert_close(opt.state_dict()["state"], state, rtol=0, atol=0)
    assert all(p.grad is g for p, g in zip(params, grads, strict=True))
    stats = opt.clip_stats()
    assert (stats["steps"], stats["skipped"]) == (1, 1)
    assert not math.isfinite(stats["grad_norm"])


def test_raise_names_the_parameter_and_changes_nothing():
    net: Any = nn.Linear(2, 2)
    opt = clipped_sgd(net.named_parameters(), 1.0)
    before = [p.detach().clone() for p in net.parameters()]
    set_gradients(0, list(net.parameters()))
    net.bias.grad[0] = math.nan
    with pytest.raises(FloatingPointError, match=r"`bias`.*Nothing was changed.*skip"):
        opt.step()
    assert all(torch.equal(p.detach(), q) for p, q in zip(net.parameters(), before, strict=True))


def test_propagate_does_what_torch_does():
    (w,) = parameters((3,))
    opt = clipped_sgd([w], 1.0, nonfinite="propagate")
    w.grad = torch.full((3,), math.nan)
    opt.step()
    assert w.isnan().all()
    assert opt.clip_stats()["steps"] == 1


MAKE_WITH_SKIP = {
    "clip": lambda params, **o: clipped_sgd(params, 1e9, lr=0.1, **o),
    "ClippedSGD": lambda params, **o: cs.ClippedSGD(params, lr=0.1, max_norm=1e9, momentum=0.9, **o),
    "NormalizedSGD": lambda params, **o: cs.NormalizedSGD(params, lr=0.1, offset=1.0, **o),
    "ClippedAdamW": lambda params, **o: cs.ClippedAdamW(params, lr=0.1, max_norm=1e9, **o),
    "tensor scope": lambda params, **o: cs.ClippedSGD(params, lr=0.1, max_norm=1e9, norm_scope="tensor", **o),
}
with_skip = pytest.mark.parametrize("make", MAKE_WITH_SKIP.values(), ids=MAKE_WITH_SKIP)


def walk(make, norms, *, state=None, **options):
    """Steps with gradients of these norms; which of them moved the parameters, and the optimizer."""
    w, v = parameters((2,), (1,))
    opt = make([w, v], **options)
    if state is not None:
        opt.load_state_dict(state)
    moved = []
    for norm in norms:
        before = w.detach().clone()
        w.grad, v.grad = norm * torch.tensor([0.6, 0.0]), norm * torch.tensor([0.8])
        opt.step()
        moved.append(not torch.equal(w.detach(), before))
    return moved, opt


def left_out(moved):
    return [i for i, step in enumerate(moved) if not step]


@with_skip
def test_a_norm_above_the_bound_leaves_the_step_out(make):
    moved, opt = walk(make, [1.0, 5.0, 5.1, 1.0], skip_above=5.0)
    assert moved == [True, True, False, True]
    stats = opt.clip_stats()
    assert (stats["steps"], stats["skipped"]) == (3, 1)


def test_a_step_that_raises_while_it_clips_is_not_counted():
    w = nn.Parameter(torch.ones(3))
    opt = clipped_sgd([w], 1.0)
    w.grad = torch.full((3,), 4.0)
    opt.step()
    w.grad = torch._neg_view(torch.full((3,), 4.0))
    with pytest.raises(RuntimeError):
        opt.step()
    assert opt.clip_stats()["steps"] == 1


@pytest.mark.parametrize("make", [MAKE_WITH_SKIP["clip"], MAKE_WITH_SKIP["ClippedAdamW"]])
def test_a_multiple_of_the_running_median_leaves_out_spikes(make):
    norms = [1.0 + 0.01 * i for i in range(10)]
    moved, opt = walk(make, [*norms, 9.0, 11.0, 1.0, math.inf, 1.0], skip_above="10x", nonfinite="skip")
    assert moved == [True] * 11 + [False, True, False, True]
    assert opt.clip_stats()["skipped"] == 2


@pytest.mark.parametrize("make", [MAKE_WITH_SKIP["clip"], MAKE_WITH_SKIP["ClippedSGD"]])
def test_gradients_that_grow_for_good_are_taken_again(make):
    moved, opt = walk(make, [1.0] * RECENT_STEPS + [100.0] * 60, skip_above="10x")
    assert 0 < opt.clip_stats()["skipped"] <= RECENT_STEPS // 2 + 1
    assert moved[-1]


@pytest.mark.parametrize("make", [MAKE_WITH_SKIP["clip"], MAKE_WITH_SKIP["ClippedAdamW"]])
def test_a_resumed_run_leaves_out_the_same_steps(make):
    norms = [1.0] * 12 + [50.0, 1.0, 60.0]
    moved, whole = walk(make, norms, skip_above="10x")
    first, opt = walk(make, norms[:11], skip_above="10x")
    second, again = walk(make, norms[11:], skip_above="10x", state=reloaded(opt.state_dict()))
    assert first + second == moved
    assert again.clip_stats() == whole.clip_stats()


@pytest.mark.parametrize(("skip_above", "steps"), [(5.0, [11, 13]), ("10x", [13]), ("6sigma", [11])])
def test_on_a_device_the_same_steps_are_left_out_by_one_wait_each(skip_above, steps):
    norms = [*[1.0] * 11, 9.0, 1.0, 11.0]
    with strict_device() as device:
        w = nn.Parameter(torch.zeros(2, device=device))
        opt = cs.ClippedAdamW([w], lr=0.1, max_norm=1.0, skip_above=skip_above, nonfinite="propagate")
        opt.step()
        skipped = []
        for norm in norms:
            w.grad = torch.tensor([0.0, norm], device=device)
            num_spikes = len(opt.spikes())
            with waits() as waited:
                opt.step()
            assert waited.count == 1 + len(opt.spikes()) - num_spikes  # which layer a spike was is read, too
            skipped.append(opt.clip_stats()["skipped"])
    assert [k for k in range(len(norms)) if skipped[k] > [0, *skipped][k]] == steps


def noisy(step):
    """Norms about one, with one spike of fifty that follows clean ones."""
    return 50.0 if step == 40 else 1.0 + 0.1 * math.sin(7.0 * step)


@with_skip
def test_deviations_from_the_mean_leave_out_a_spike(make):
    moved, opt = walk(make, map(noisy, range(60)), skip_above="6sigma")
    assert left_out(moved) == [40]
    assert opt.clip_stats()["skipped"] == 1


@with_skip
def test_a_loss_that_stands_out_leaves_the_step_out(make):
    (w,) = parameters((2,))
    opt = make([w], skip_above="6sigma")
    moved = []
    for step in range(30):

        def closure(step=step):
            w.grad = torch.tensor([0.6, 0.8])
            return torch.tensor(90.0 if step == 25 else 2.0 + 0.1 * math.cos(5.0 * step))

        before = w.detach().clone()
        opt.step(closure)
        moved.append(not torch.equal(before, w))
    assert left_out(moved) == [25]


@with_skip
@pytest.mark.parametrize("skip_above", [None, "6sigma"])
def test_spikes_are_logged_with_the_layer_that_caused_them(make, skip_above):
    w, v = parameters((2,), (1,))
    opt = make([("first", w), ("second", v)], skip_above=skip_above)
    opt.param_groups[0]["max_norm"] = 5.0
    for step in range(60):
        w.grad, v.grad = torch.tensor([0.6, 0.8]), torch.tensor([noisy(step)])
        opt.step(lambda: torch.tensor(2.5))
    (spike,) = opt.spikes()
    norm = math.hypot(1.0, 50.0)
    assert (spike["step"], spike["layer"], spike["loss"]) == (40, "second", 2.5)
    assert type(spike["loss"]) is float  # a checkpoint keeps it
    assert spike["grad_norm"] == pytest.approx(norm)
    assert spike["share"] == pytest.approx(2500 / norm**2)
    assert (spike["clipped_norm"] == 0) == (skip_above is not None)
    assert spike["clipped_norm"] <= math.hypot(1.0, 5.0) + 1e-12
    again = make([("first", w), ("second", v)], skip_above=skip_above)
    again.load_state_dict(opt.state_dict())
    assert again.spikes() == opt.spikes()


@with_skip
def test_norms_of_layers_are_given_by_name_or_number(make):
    w, v = parameters((2,), (1,))
    opt = make([w, v])
    w.grad, v.grad = torch.tensor([3.0, 4.0]), None
    assert "layers" not in opt.clip_stats()
    assert opt.clip_stats(layers=True)["layers"] == {"parameter 0 of group 0": 5.0}
    named = make([("weight", w), ("bias", v)])
    assert named.clip_stats(layers=True)["layers"] == {"weight": 5.0}


@pytest.mark.parametrize("bad", ["x", "10", "0.5x", "1x", "infx", "ten x", "sigma", "-6sigma", "6 sigmas"])
def test_a_multiple_must_be_a_number_above_one(bad):
    for make in MAKE_WITH_SKIP.values():
        with pytest.raises(ValueError, match=r'`skip_above`.*"10x".*got'):
            make(parameters((2,)), skip_above=bad)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_bound_and_threshold_must_be_positive(bad):
    with pytest.raises(ValueError, match="`skip_above` must be positive"):
        clipped_sgd(parameters((2,)), 1.0, skip_above=bad)
    if bad != math.inf:
        with pytest.raises(ValueError, match="`max_norm`"):
            clipped_sgd(parameters((2,)), bad)


# --- the handle, the state dict, and others who clip ----------------------------------------------


@every_optimizer
def test_counters_and_thresholds_survive_a_checkpoint(make):
    params = parameters((3,))
    opt = make(params)
    cs.clip(opt, max_norm=0.5)
    opt.param_groups[0]["max_norm"] = 0.25
    for step in range(3):
        set_gradients(step, params)
        opt.step()
    saved = reloaded(opt.state_dict())
    again = make(parameters((3,)))
    cs.clip(again, max_norm=0.5)
    again.load_state_dict(saved)
    assert again.clip_stats() == opt.clip_stats()
    assert again.param_groups[0]["max_norm"] == 0.25
    plain = make(parameters((3,)))
    plain.load_state_dict(saved)  # without clipping it is ignored
    set_gradients(0, plain.param_groups[0]["params"])
    plain.step()


def test_states_with_and_without_clipping_are_exchanged():
    params = parameters((3,))
    opt: Any = torch.optim.AdamW(params, lr=0.1)
    without = opt.state_dict()
    cs.clip(opt, max_norm=0.5)
    set_gradients(0, params)
    opt.step()
    ours = cs.ClippedAdamW(parameters((3,)), lr=0.1, max_norm=9.0)
    ours.load_state_dict(opt.state_dict())
    assert ours.clip_stats() == opt.clip_stats()
    assert ours.param_groups[0]["max_norm"] == 0.5
    opt.load_state_dict(without)
    assert opt.clip_stats()["steps"] == 0
    assert opt.param_groups[0]["max_norm"] == 0.5


def test_removal_leaves_the_optimizer_as_it_was():
    params = parameters((2,))
    opt: Any = torch.optim.SGD(params, lr=1.0)
    before = {k: v for k, v in opt.state_dict()["param_groups"][0].items()}
    handle = cs.clip(opt, max_norm=1.0)
    handle.remove()
    handle.remove()
    assert opt.state_dict()["param_groups"][0] == before
    assert not hasattr(opt, "clip_stats")
    params[0].grad = torch.tensor([3.0, 4.0])
    opt.step()
    assert torch.equal(params[0].grad, torch.tensor([3.0, 4.0]))
    cs.clip(opt, max_norm=1.0)


def test_an_optimizer_that_clips_already_and_what_is_none_are_refused():
    for opt in (cs.ClippedSGD(parameters((2,)), lr=0.1, max_norm=1.0), clipped_sgd(parameters((2,)), 1.0)):
        with pytest.raises(ValueError, match=r"clips already.*max_norm.*remove"):
            cs.clip(opt, 1.0)
    model: Any = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"`optimizer` must be.*Linear"):
        cs.clip(model, 1.0)


def test_a_step_that_raises_does_not_lose_hidden_gradients():
    class Raises(torch.optim.SGD):
        def step(self, closure=None):
            raise KeyError("broken")

    params = parameters((2,))
    opt: Any = Raises(params, lr=0.1)
    cs.clip(opt, max_norm=1.0, skip_above=2.0)
    params[0].grad = grad = torch.tensor([3.0, 4.0])
    for _ in range(2):
        with pytest.raises(KeyError):
            opt.step()
    assert opt.clip_stats()["skipped"] == 2  # the second step saw the gradient again
    assert grad.tolist() == [3.0, 4.0]


def test_a_closure_that_is_called_again_sees_its_own_gradient():
    class Twice(torch.optim.SGD):
        def step(self, closure=None):
            closure()
            return super().step(closure)

    (w,), sizes = parameters((2,)), [10.0, 1.0]
    opt: Any = Twice([w], lr=1.0)
    cs.clip(opt, max_norm=0.5, skip_above=5.0)
    before = w.detach().clone()

    def closure():
        w.grad = sizes.pop(0) * torch.tensor([0.6, 0.8])

    opt.step(closure)
    torch.testing.assert_close(before - w.detach(), torch.tensor([0.3, 0.4]))
    torch.testing.assert_close(w.grad, torch.tensor([0.3, 0.4]))


def loop(opt, params, steps, before_step=lambda: None):
    for step in range(steps):
        set_gradients(step, params)
        before_step()
        opt.step()


CLIPPING: dict[str, Any] = {
    "clip": lambda params, lr: clipped_sgd(params, 1.0, lr=lr),
    "ClippedSGD": lambda params, lr: cs.ClippedSGD(params, lr=lr, max_norm=1.0),
    "ClippedAdamW by tensor": lambda params, lr: cs.ClippedAdamW(
        params, lr=lr, max_norm=1.0, norm_scope="tensor"
    ),
}
every_clipping = pytest.mark.parametrize("make", CLIPPING.values(), ids=CLIPPING)
CLIPPED_BEFORE = r"already clipped \(several had norm 2, none a larger.*max_grad_norm=0.*gradient_clip_val"


@every_clipping
def test_somebody_else_who_clips_now_and_then_is_noticed_once(make):
    params = parameters((40,), (5,))
    opt = make(params, 0.1)

    def clip_now_and_then():
        for p in params:
            p.grad *= 1.0 if p.grad.abs().max() > 2.5 else 0.1
        clip_grad_norm_(params, 2.0)

    loop(opt, params, 60, clip_now_and_then)
    last = opt.last_clip()  # without a word of it
    with pytest.warns(UserWarning, match=CLIPPED_BEFORE):
        opt.clip_stats()
    stats = opt.clip_stats()  # a second warning would be an error
    assert last == (stats["grad_norm"], stats["coefficient"])


@every_clipping
def test_equal_norms_of_gradients_along_one_line_are_nobody_clipping(make):
    params = parameters((40,))
    opt = make(params, 1e-9)
    for _ in range(10):  # the whole batch at a tiny lr
        params[0].grad = params[0].detach().clone()
        opt.step()
        opt.clip_stats()
    for _ in range(200):
        params[0].grad = torch.ones(40)
        opt.step()
    opt.clip_stats()
    loop(opt, params, 30)
    opt.clip_stats()


@every_clipping
@pytest.mark.parametrize("world", ["host", "on_device"])
def test_another_clipping_is_noticed_after_rising_norms_unless_turned_off(make, world, request):
    if world != "host":
        request.getfixturevalue(world)
    params = parameters((40,), (5,))
    quiet, opt = make(params, 1e-3), make(params, 1e-3)
    for step in range(30):
        for p in params:
            p.grad = torch.full_like(p, 1e-3 * (step + 1))
        opt.step()
    opt.clip_stats()
    for each in (quiet, opt):
        loop(each, params, 20, lambda: clip_grad_norm_(params, 2.0))
    quiet.stop_double_clip_check()
    quiet.clip_stats()
    with pytest.warns(UserWarning, match=CLIPPED_BEFORE):
        opt.clip_stats()


def test_sparse_and_half_precision_gradients_are_clipped():
    embedding = nn.Embedding(5, 3, sparse=True)
    opt = clipped_sgd(embedding.parameters(), 0.1)
    embedding(torch.tensor([1, 1, 4])).square().sum().backward()
    before = embedding.weight.detach().clone()
    opt.step()
    assert (embedding.weight.detach() - before).norm().item() == pytest.approx(0.1)
    w = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    half = clipped_sgd([w], 1.0)
    w.grad = torch.full_like(w, 2.0)
    half.step()
    assert w.grad.tolist() == [0.5] * 4
    assert half.clip_stats()["grad_norm"] == 4.0


class MuonAndAdamW(torch.optim.Optimizer):
    """One optimizer for both, as Muon's authors publish it: a group says whether Muon steps it."""

    def __init__(self, matrices, others):
        groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
        super().__init__(groups, {"lr": 0.01})
        self.parts = [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]

    def step(self, closure=None):
        for part in self.parts:
            part.step()


def muon_problem():
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(6, 5))], [nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(4))]


def set_muon_gradients(matrices, others, step):
    torch.manual_seed(10 + step)
    for p in matrices:
        p.grad = 1000.0 * torch.randn_like(p)
    for p in others:
        p.grad = (0.1 + step % 3) * torch.randn_like(p)


needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon is of torch 2.9")


@needs_muon
def test_adamw_beside_muon_trains_as_if_alone():
    (matrices, others), (alone_matrices, alone) = muon_problem(), muon_problem()
    both = MuonAndAdamW(matrices, others)
    with pytest.warns(UserWarning, match="Muon steps 1 of 2 parameter groups"):
        cs.clip(both, 0.5)
    adamw, muon = torch.optim.AdamW(alone, lr=0.01), torch.optim.Muon(alone_matrices, lr=0.01)
    cs.clip(adamw, 0.5)
    for step in range(8):
        set_muon_gradients(matrices, others, step)
        set_muon_gradients(alone_matrices, alone, step)
        both.step()
        adamw.step()
        muon.step()
    for a, b in zip([*others, *matrices], [*alone, *alone_matrices], strict=True):
        assert torch.equal(a, b)  # by the joint norm, a thousand times larger, AdamW's gradients would vanish
    assert both.clip_stats() == adamw.clip_stats()
    assert 0 < adamw.clip_stats()["clipped_fraction"] < 1


@needs_muon
def test_muon_alone_is_counted_and_not_clipped():
    matrices, _ = muon_problem()
    muon = torch.optim.Muon(matrices, lr=0.01)
    with pytest.warns(UserWarning, match="not clipped"):
        cs.clip(muon, 0.5)
    set_muon_gradients(matrices, [], 0)
    before = matrices[0].grad.clone()
    muon.step()
    assert torch.equal(before, matrices[0].grad)
    assert muon.clip_stats()["grad_norm"] == pytest.approx(before.norm().item())
    assert muon.clip_stats()["clipped_fraction"] == 0


def test_a_gradient_computed_after_a_step_that_raised_is_kept():
    def stop(*_):
        raise KeyboardInterrupt

    w = nn.Parameter(torch.ones(2))
    opt = clipped_sgd([w], 1.0, nonfinite="skip")
    later = opt.register_step_pre_hook(stop)
    for _ in range(2):
        w.grad = torch.full((2,), math.nan)
        with pytest.raises(KeyboardInterrupt):
            opt.step()
    later.remove()
    opt.step()  # the same gradient again, which is left out again
    assert torch.equal(w.detach(), torch.ones(2))
    assert w.grad.isnan().all()
    assert opt.clip_stats()["skipped"] == 3
    opt.register_step_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        opt.step()
    w.grad = torch.tensor([0.0, 0.5])
    with pytest.raises(KeyboardInterrupt):
        opt.step()
    assert torch.equal(w.grad, torch.tensor([0.0, 0.5]))


@pytest.mark.parametrize("make", [clipped_sgd, lambda p, bound: cs.ClippedAdamW(p, 0.1, bound)])
def test_state_of_parameters_that_are_gone_is_freed(make):
    kept, gone = parameters((3,), (4,))
    opt = make([kept, gone], 1.0)
    opt.param_groups[0].setdefault("momentum", 0.0)
    for p in (kept, gone):
        p.grad = torch.ones_like(p)
    opt.step()
    references = [weakref.ref(gone), *[weakref.ref(t) for t in opt.state.pop(gone, {}).values()]]
    opt.param_groups[0]["params"] = [kept]
    del gone, p
    opt.step()
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)


DAMAGE = {
    "counters are text": ("clip_stats", "text"),
    "a counter is text": ("clip_stats", {"steps": "seven"}),
    "norms are a number": ("clip_stats", {"norms": 2.0}),
    "rules are a list": ("clip_rules", [1, 2]),
    "a memory is a number": ("clip_rules", {"0.0": 3}),
    "a rule has another parameter": ("max_norm", {"rule": "zscore", "sigma": 3.0}),
    "a rule has no name": ("max_norm", {"z": 3.0}),
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("make", [clipped_sgd, lambda p, bound: cs.ClippedSGD(p, 0.1, bound)])
def test_a_damaged_checkpoint_gets_one_line(make, name):
    entry, value = DAMAGE[name]
    opt = make(parameters((3,)), cs.clip_rules.zscore())
    saved = opt.state_dict()
    saved["param_groups"][0][entry] = value
    with pytest.raises(ValueError, match=r"^[^\n]*checkpoint[^\n]*$"):
        opt.load_state_dict(saved)


def test_counters_and_rules_of_a_state_that_was_loaded_before_are_taken_up():
    ours = parameters((3, 4), (5,))
    first = cs.clip(torch.optim.SGD(ours, lr=0.1), cs.clip_rules.zscore()).optimizer
    for seed in range(5):
        set_gradients(seed, ours)
        first.step()
    resumed = torch.optim.SGD(copies(ours), lr=0.1)
    resumed.load_state_dict(copy.deepcopy(first.state_dict()))
    cs.clip(resumed, cs.clip_rules.zscore())
    assert resumed.clip_stats() == first.clip_stats()
    assert resumed.clip_stats()["steps"] == 5
    assert resumed.state_dict() == first.state_dict()


def test_a_rule_that_was_not_called_is_named():
    with pytest.raises(TypeError, match=r"Call it: `zscore\(\)`"):
        cs.clip(torch.optim.SGD(parameters((3,)), lr=0.1), cs.clip_rules.zscore)
    with pytest.raises(TypeError, match=r"Call it: `zscore\(\)`"):
        cs.ClippedSGD(parameters((3,)), lr=0.1, max_norm=cs.clip_rules.zscore)
