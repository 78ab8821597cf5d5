"""Each rule takes the steps of its published form, remembers through a checkpoint and says no in one line."""

import copy
import math
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from curvestep import ClippedAdamW, ClippedSGD, NormalizedSGD, clip, clip_rules
from curvestep.clip_rules import ClipRule, Window, ema, percentile, weight_ratio, zscore
from curvestep.tensors.kernel import native
from tests.models import reloaded
from tests.support.strict import strict_device, waits

RULES = {
    "percentile": percentile(30),
    "short window": percentile(60, window=7),
    "zscore": zscore(1.5, warmup=8),
    "ema": ema(0.9, warmup=10, max_norm=3.0),
    "weight_ratio": weight_ratio(0.4),
}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def model():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 1))
    nn.init.zeros_(net[2].weight[1])  # a unit that starts at zero
    return net


def set_gradients(params, step):
    """Gradients whose sizes wander and now and then jump, the same whatever the parameters are."""
    generator = torch.Generator().manual_seed(step)
    size = 1.5 + math.sin(step / 9) + 8.0 * (step % 17 == 16)
    for i, p in enumerate(params):
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64, device="cpu")
        p.grad = (size * (0.1 + i) * (noise + 0.3)).to(p.device, p.dtype)


def run(opt, steps):
    """Step with the gradients of these steps; the parameters afterwards."""
    params = [p for group in opt.param_groups for p in group["params"]]
    for step in steps:
        set_gradients(params, step)
        opt.step()
    return params


def equal(params, others):
    return all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


def norms_of(params):
    return [p.grad.norm().item() for p in params]


class AutoClip:
    """Seetharaman et al. (2020): clip at the percentile of all norms so far, this one among them."""

    def __init__(self, p, window):
        self.p, self.window, self.history = p, window, []

    def scale(self, params):
        total = math.hypot(*norms_of(params))
        self.history.append(total)
        threshold = np.percentile(self.history[-self.window :], self.p)
        for p in params:
            p.grad *= min(1.0, threshold / total)


class ZClip:
    """Kumar et al. (2025), algorithm 1, with the reciprocal threshold: mean + z_thres²/z · std."""

    def __init__(self, z, decay, warmup):
        self.z, self.decay, self.warmup, self.buffer = z, decay, warmup, []

    def scale(self, params):
        total = math.hypot(*norms_of(params))
        if len(self.buffer) < self.warmup:
            self.buffer.append(total)
            self.mean, self.variance = np.mean(self.buffer), np.var(self.buffer)
            return
        score = (total - self.mean) / math.sqrt(self.variance)
        kept = total
        if score > self.z:
            kept = self.mean + self.z**2 / score * math.sqrt(self.variance)
        self.mean = self.decay * self.mean + (1 - self.decay) * kept
        self.variance = self.decay * self.variance + (1 - self.decay) * (kept - self.mean) ** 2
        for p in params:
            p.grad *= kept / total


class AdaGC:
    """Wang et al. (2025), algorithm 1."""

    def __init__(self, ratio, decay, warmup, max_norm):
        self.ratio, self.decay, self.warmup, self.max_norm = ratio, decay, warmup, max_norm
        self.t, self.gamma = 0, None

    def scale(self, params):
        self.t += 1
        norms = norms_of(params)
        if self.t < self.warmup:
            h = [min(self.max_norm / math.hypot(*norms), 1.0)] * len(params)
        else:
            h = [min(self.ratio * g / norm, 1.0) for g, norm in zip(self.gamma, norms, strict=True)]
        clipped = [a * b for a, b in zip(h, norms, strict=True)]
        if self.gamma is None:
            self.gamma = clipped
        elif self.t < self.warmup:
            self.gamma = [min(a, b) for a, b in zip(self.gamma, clipped, strict=True)]
        else:
            self.gamma = [
                self.decay * a + (1 - self.decay) * b for a, b in zip(self.gamma, clipped, strict=True)
            ]
        for p, factor in zip(params, h, strict=True):
            p.grad *= factor


class AGC:
    """Brock et al. (2021), equation 3: a unit is a row, a filter, or a vector."""

    def __init__(self, ratio, eps):
        self.ratio, self.eps = ratio, eps

    def scale(self, params):
        for p in params:
            rows = zip([p.data], [p.grad], strict=True) if p.dim() == 1 else zip(p.data, p.grad, strict=True)
            for weight, grad in rows:
                largest = self.ratio * max(weight.norm().item(), self.eps)
                if grad.norm() > largest:
                    grad *= largest / grad.norm()


PUBLISHED = {"percentile": AutoClip, "zscore": ZClip, "ema": AdaGC, "weight_ratio": AGC}
HOW = {
    "ClippedSGD": lambda params, rule: ClippedSGD(params, lr=0.05, max_norm=rule, momentum=0.5),
    "loop": lambda params, rule: ClippedSGD(params, lr=0.05, max_norm=rule, momentum=0.5, foreach=False),
    "plain": lambda params, rule: ClippedSGD(params, lr=0.05, max_norm=rule),
    "AdamW": lambda params, rule: ClippedAdamW(params, lr=0.01, max_norm=rule),
    "clip": lambda params, rule: clip(torch.optim.SGD(params, lr=0.05, momentum=0.5), rule).optimizer,
}
TORCH = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "plain": lambda params: torch.optim.SGD(params, lr=0.05),
}


@every_rule
def test_each_rule_is_found_by_its_published_name(rule):
    published = PUBLISHED[rule.name].__name__.lower()
    assert getattr(clip_rules, published)(**rule.parameters) == rule


@pytest.mark.parametrize("how", HOW)
@every_rule
def test_steps_are_those_of_the_published_form(rule, how):
    ours, theirs = list(model().parameters()), list(model().parameters())
    published = PUBLISHED[rule.name](**rule.parameters)
    opt = HOW[how](ours, rule)
    reference = TORCH.get(how, lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.5))(theirs)
    for step in range(200):
        run(opt, [step])
        set_gradients(theirs, step)
        published.scale(theirs)
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert 0 < opt.clip_stats()["clipped_fraction"] < 1
    assert opt.clip_stats()["steps"] == 200


@pytest.mark.parametrize("how", ["ClippedSGD", "AdamW", "clip"])
@every_rule
def test_resumed_run_is_the_run_bit_for_bit(rule, how):
    opt, first = (HOW[how](list(model().parameters()), rule) for _ in range(2))
    whole, resumed = run(opt, range(60)), run(first, range(25))
    second = HOW[how](resumed, rule)
    second.load_state_dict(reloaded(first.state_dict()))
    assert equal(run(second, range(25, 60)), whole)
    assert second.clip_stats() == opt.clip_stats()
    assert "clip_rules" not in second.param_groups[0]
    assert second.param_groups[0]["max_norm"] == rule


@every_rule
def test_copied_and_pickled_optimizers_go_on_alike(rule):
    opt = HOW["ClippedSGD"](list(model().parameters()), rule)
    run(opt, range(20))
    others = [copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))]
    params = run(opt, [20])
    for other in others:
        assert equal(run(other, [20]), params)
        assert other.param_groups[0]["max_norm"] == rule


@pytest.mark.parametrize("how", ["ClippedSGD", "AdamW", "clip"])
@every_rule
def test_device_takes_the_steps_of_the_host_and_waits_once(rule, how):
    torch.set_default_dtype(torch.float32)
    make = {
        "ClippedSGD": lambda p: ClippedSGD(p, lr=0.05, max_norm=rule, momentum=0.5, nonfinite="skip"),
        "AdamW": lambda p: ClippedAdamW(p, lr=0.01, max_norm=rule, nonfinite="skip"),
        "clip": lambda p: clip(torch.optim.SGD(p, lr=0.05), rule, nonfinite="propagate").optimizer,
    }[how]
    opt = make(list(model().parameters()))
    host = run(opt, range(40))
    with strict_device() as device:
        there = [nn.Parameter(p.detach().to(device)) for p in model().parameters()]
        opt_there = make(there)
        for step in range(40):
            set_gradients(there, step)
            num_spikes = len(opt_there.spikes())
            with waits() as waited:
                opt_there.step()
            assert waited.count == 1 + len(opt_there.spikes()) - num_spikes  # which layer it was is read, too
        found = [p.detach().cpu() for p in there]
        assert opt_there.clip_stats()["clipped_fraction"] == pytest.approx(
            opt.clip_stats()["clipped_fraction"], abs=0.03
        )
    for a, b in zip(host, found, strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=1e-4, atol=1e-5)


@every_rule
@pytest.mark.parametrize(
    ("factor", "place", "skipped"),
    [(math.nan, "cpu", 4), (0.0, "cpu", 0), (1e9, "strict", 4)],  # 1e9 is above what a step may have
)
def test_steps_left_out_and_empty_gradients_are_not_remembered(rule, factor, place, skipped):
    def parameters_after(*, interrupted):
        params = [nn.Parameter(p.detach().to(place)) for p in model().parameters()]
        opt = ClippedSGD(params, lr=0.05, max_norm=rule, nonfinite="skip", skip_above=1e6)
        for step in range(20):
            if interrupted and step % 5 == 2:
                set_gradients(params, step)
                for p in params:
                    p.grad.mul_(factor)
                opt.step()
            run(opt, [step])
        assert opt.clip_stats()["skipped"] == skipped * interrupted
        return [p.detach().cpu() for p in params]

    with strict_device():
        assert equal(parameters_after(interrupted=False), parameters_after(interrupted=True))


@pytest.mark.parametrize("kernel", ["kernel", "none"])
def test_tensor_without_gradients_at_first_still_learns(kernel, monkeypatch):
    if kernel == "none":
        monkeypatch.setattr("curvestep.tensors.kernel.native", lambda: None)
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    opt = ClippedSGD(params, lr=0.1, max_norm=ema(warmup=4))
    for step in range(12):
        params[0].grad = torch.zeros(2) if step % 2 else None
        params[1].grad = torch.full((3,), 1.0)
        with torch.device("meta"):  # where nothing of a step may be made
            opt.step()
    _, means = opt.state_dict()["param_groups"][0]["clip_rules"]["0.0"]["state"]
    assert means[0] == math.inf  # no norm of it was seen, and no other was taken for one
    assert means[1] < math.inf
    before = params[0].detach().clone()
    params[0].grad = torch.ones(2)
    opt.step()
    assert not torch.equal(before, params[0])


@pytest.mark.parametrize("rule", [ema(0.5, warmup=2), weight_ratio(0.01)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_kernel_gives_the_same_bits_on_two_threads_and_the_steps_of_torch(rule, dtype):
    def parameters_after(threads, **options):
        torch.manual_seed(0)
        params = [
            nn.Parameter(torch.randn(s, dtype=dtype)) for s in [(700, 100), (90, 1), (33, 2, 3, 3), (70_000,)]
        ]
        params[1].data = torch.randn(1, 90, dtype=dtype).repeat(7, 1).t()  # rows between each other
        params[2].data = params[2].data.contiguous(memory_format=torch.channels_last)
        opt = ClippedAdamW(params, lr=0.01, max_norm=rule, **options)
        torch.set_num_threads(threads)
        for step in range(4):
            set_gradients(params, step)
            params[1].grad = params[1].grad.t().contiguous().t()
            params[2].grad = params[2].grad.contiguous(memory_format=torch.channels_last)
            opt.step()
        return params

    one, two, slow = parameters_after(1), parameters_after(2), parameters_after(1, foreach=False)
    assert equal(one, two)
    torch.testing.assert_close(one, slow, rtol=1e-5, atol=1e-6)


def ratio_by_hand(ratio: float = 0.05, eps: float = 1e-3) -> ClipRule:
    """AGC again, of which our kernel does not know that it is."""

    def bound(seen, state):
        return ratio * np.maximum(seen.weight, eps), state

    return ClipRule(ratio_by_hand, {"ratio": ratio, "eps": eps}, bound, each="unit")


SHAPES = [(700, 100), (90, 1), (33, 2, 3, 3), (3, 2049), (3, 70_000), (70_000,), (5, 0), (1,)]


@pytest.mark.skipif(native() is None, reason="without the kernel both go the same way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "make",
    [
        partial(ClippedSGD, lr=0.1),
        partial(ClippedSGD, lr=0.1, momentum=0.5, maximize=True, weight_decay=0.1),
        partial(ClippedAdamW, lr=0.01),
        partial(ClippedAdamW, lr=0.01, update_rms=0.5),
    ],
)
def test_units_clipped_while_they_are_updated_go_as_those_clipped_before(make, dtype, threads):
    def clipped_by(rule, scale):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(s, dtype=dtype)) for s in SHAPES]
        params[0].data[3] = 0.0  # weights below the least norm
        opt = make(params, max_norm=rule, fused=scale != 1)
        for step in range(3):
            for p in params:
                torch.manual_seed(step)
                p.grad = scale * torch.randn_like(p) * torch.rand(len(p), *[1] * (p.dim() - 1), dtype=dtype)
            if scale != 1:
                opt.grad_scale, opt.found_inf = torch.tensor(scale), torch.tensor(0.0)
            opt.step()
        return params, opt.clip_stats()

    for scale in (1.0, 1024.0):
        (ours, stats), (by_hand, others) = (
            clipped_by(r, scale) for r in (weight_ratio(0.05), ratio_by_hand())
        )
        torch.testing.assert_close(ours, by_hand, rtol=1e-5, atol=1e-6)
        assert 0 < stats["clipped_fraction"] < 1
        assert stats == pytest.approx(others, rel=1e-5)


@pytest.mark.parametrize("rule", [ema(1.0, warmup=2), weight_ratio(0.3)], ids=["ema", "weight_ratio"])
def test_units_clipped_in_the_update_are_counted_as_those_before_it(rule):
    def stats_of(make):
        params = [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(0, 3))]
        opt = make(params)
        for size in (0.3, 0.35, 0.4):
            for number, p in enumerate(params):
                p.grad = torch.full_like(p, size - 0.1 * number)
            opt.step()
        return opt.clip_stats()

    def clipped_before(params):
        opt = torch.optim.SGD(params, lr=1e-3)
        clip(opt, rule)
        return opt

    stats = stats_of(lambda params: ClippedSGD(params, lr=1e-3, max_norm=rule))
    assert 0.5 < stats["coefficient"] < 1
    assert 0 < stats["clipped_fraction"] < 1
    assert stats == pytest.approx(stats_of(clipped_before), rel=1e-12)


@pytest.mark.parametrize("rule", [ema(1.0, warmup=2, max_norm=2.0), weight_ratio(1.0)], ids=str)
def test_gradients_whose_squares_overflow_are_clipped(rule):
    p = nn.Parameter(torch.ones(4, dtype=torch.float32))
    p.grad = torch.full_like(p, 1e25)
    ClippedSGD([p], lr=0.25, max_norm=rule).step()
    torch.testing.assert_close(p.detach(), torch.full_like(p, 0.75))


@pytest.mark.parametrize("kernel", ["kernel", "none"])
@pytest.mark.parametrize("rule", [ema(1.0, warmup=2, max_norm=2.0), weight_ratio(1.0)], ids=str)
def test_an_infinite_number_that_is_propagated_leaves_all_others_finite(rule, kernel, monkeypatch):
    if kernel == "none":
        monkeypatch.setattr("curvestep.tensors.kernel.native", lambda: None)
    bad, good = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    opt = ClippedSGD([bad, good], lr=0.25, max_norm=rule, nonfinite="propagate")
    for infinite in (1.0, 1.0, math.inf):
        bad.grad, good.grad = torch.tensor([infinite, 0.5]), torch.tensor([0.5, 0.5])
        opt.step()
    assert good.isfinite().all()
    assert bad[1].isfinite()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sparse_gradients_are_rounded_as_dense_ones_are(dtype):
    values = torch.randn(3, 8).to(dtype)
    sparse, dense = (nn.Parameter(torch.zeros(4, 8, dtype=dtype)) for _ in range(2))
    sparse.grad = torch.sparse_coo_tensor([[0, 1, 3]], values.clone(), (4, 8), is_coalesced=True)
    dense.grad = sparse.grad.to_dense()
    for p in (sparse, dense):
        clip(torch.optim.SGD([p], lr=0.1), ema(max_norm=0.7)).optimizer.step()
    assert torch.equal(sparse.grad.to_dense(), dense.grad)
    assert not torch.equal(sparse.grad._values(), values)


def test_a_spike_says_what_the_clipped_pieces_leave_of_it():
    p = nn.Parameter(torch.ones(4))  # a unit of norm 2
    opt = ClippedSGD([p], lr=1e-5, max_norm=weight_ratio(0.5))
    for step in range(40):
        p.grad = torch.full((4,), 50.0 if step == 30 else 0.05 + 0.001 * (step % 3))
        opt.step()
    (spike,) = opt.spikes()
    assert (spike["grad_norm"], spike["clipped_norm"]) == pytest.approx((100.0, 1.0), rel=1e-3)


def test_groups_may_have_rules_of_their_own():
    head, body = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    opt = ClippedSGD(
        [{"params": [body]}, {"params": [head], "max_norm": math.inf}], lr=0.1, max_norm=weight_ratio(0.01)
    )
    body.grad, head.grad = torch.ones(4), torch.ones(4)
    opt.step()
    assert (1 - body).norm().item() == pytest.approx(0.1 * 0.01 * 2)
    assert torch.allclose(head, torch.full((4,), 0.9))


def test_rule_that_is_set_later_starts_afresh():
    def threshold_after(*rules):
        p = nn.Parameter(torch.zeros(1))
        opt = ClippedSGD([p], lr=1.0, max_norm=rules[0])
        for size, rule in zip((1.0, 4.0), rules, strict=True):
            opt.param_groups[0]["max_norm"] = rule
            p.grad = torch.full((1,), size)
            opt.step()
        return opt.clip_stats()["coefficient"] * size

    assert threshold_after(percentile(50), percentile(50)) == pytest.approx(2.5)
    assert threshold_after(percentile(50), percentile(60)) == pytest.approx(4.0)


@pytest.mark.parametrize("place", ["cpu", "strict"])
def test_grad_scaler_leaves_the_same_steps(place):
    def parameters_after(scale):
        params = [nn.Parameter(p.detach().to(place)) for p in model().parameters()]
        opt = ClippedSGD(params, lr=0.05, max_norm=weight_ratio(0.4), fused=True)
        for step in range(10):
            set_gradients(params, step)
            if scale != 1:
                for p in params:
                    p.grad *= scale
                opt.grad_scale, opt.found_inf = torch.tensor([scale, 0.0], device=place).unbind()
            opt.step()
        return [p.detach().cpu() for p in params]

    with strict_device():
        torch.testing.assert_close(parameters_after(1.0), parameters_after(1024.0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("each", ["zscore", "percentile"])
def test_rules_of_the_norm_follow_its_scope(each):
    params = list(model().parameters())
    opt = ClippedSGD(params, lr=0.05, max_norm=RULES[each], norm_scope="tensor")
    alone = [ClippedSGD([copy.deepcopy(p)], lr=0.05, max_norm=RULES[each]) for p in params]
    for step in range(60):
        set_gradients(params, step)
        for p, other in zip(params, alone, strict=True):
            other.param_groups[0]["params"][0].grad = p.grad.clone()
            other.step()
        opt.step()
    assert equal(params, [other.param_groups[0]["params"][0] for other in alone])


def double_when(factor: float = 2.0) -> ClipRule:
    """Somebody's own rule: clip at a multiple of the last norm."""

    def bound(seen, state):
        (last,) = state
        return factor * last, (seen.norm,)

    return ClipRule(double_when, {"factor": factor}, bound, start=(math.inf,))


def test_own_rule_is_a_function_and_is_kept_by_checkpoints():
    p = nn.Parameter(torch.zeros(1))
    opt = ClippedSGD([p], lr=1.0, max_norm=double_when(3.0))
    for size in (1.0, 10.0):
        p.grad = torch.full((1,), size)
        opt.step()
    assert p.item() == -4.0
    again = ClippedSGD([p], lr=1.0, max_norm=double_when())
    again.load_state_dict(opt.state_dict())
    p.grad = torch.full((1,), 100.0)
    again.step()
    assert p.item() == -34.0
    hooked = clip(torch.optim.SGD([p], lr=1.0), double_when()).optimizer
    hooked.load_state_dict(opt.state_dict())
    assert hooked.param_groups[0]["max_norm"] == double_when(3.0)
    with pytest.raises(ValueError, match="Give it to the optimizer before you load"):
        ClippedSGD([p], lr=1.0, max_norm=1.0).load_state_dict(opt.state_dict())


def test_window_is_that_of_numpy():
    values = np.random.default_rng(0).lognormal(size=40).tolist()
    window = Window(15, [])
    for i, value in enumerate(values):
        window.push(value)
        kept = values[max(0, i - 14) : i + 1]
        assert window.values == kept
        assert window.percentile(37) == pytest.approx(np.percentile(kept, 37), rel=1e-14)


BAD = {
    "zero": (lambda: percentile(0), "`p` must be between 0 and 100, got 0"),
    "below": (lambda: percentile(-3), "`p` must be between 0 and 100, got -3"),
    "above": (lambda: percentile(100), "`p` must be between 0 and 100, got 100"),
    "no number": (lambda: percentile("10%"), "`p` must be between 0 and 100, got '10%'"),
    "NaN": (lambda: percentile(math.nan), "`p` must be between 0 and 100, got nan"),
    "no window": (lambda: percentile(10, window=0), "`window` must be a whole number"),
    "z": (lambda: zscore(0), "`z` must be positive"),
    "decay": (lambda: ema(decay=1.0), "`decay` must be between 0 and 1, got 1.0"),
    "ratio": (lambda: weight_ratio(math.inf), "`ratio` must be positive and finite"),
    "text": (lambda: make_sgd(max_norm="10%"), "`max_norm` must be"),
    "the rule itself": (lambda: make_sgd(max_norm=percentile), "`max_norm` must be"),
    "offset": (
        lambda: NormalizedSGD([nn.Parameter(torch.ones(1))], lr=1.0, offset=zscore()),
        "`offset` must be",
    ),
    "scope": (lambda: make_sgd(max_norm=ema(), norm_scope="group"), 'Leave `norm_scope` at "global"'),
    "momentum": (lambda: make_sgd(max_norm=ema(), momentum=0.9, clip="momentum"), 'Use clip="gradient"'),
}


def make_sgd(**options):
    return ClippedSGD([nn.Parameter(torch.ones(2))], lr=1.0, **options)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_line(name):
    make, words = BAD[name]
    with pytest.raises((ValueError, TypeError)) as caught:
        make()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rows_without_weights_are_refused_for_sparse_gradients():
    table = nn.Embedding(5, 2, sparse=True)
    opt = ClippedSGD(table.parameters(), lr=1.0, max_norm=weight_ratio())
    table(torch.tensor([1, 1])).sum().backward()
    with pytest.raises(ValueError, match="takes no sparse gradients"):
        opt.step()


def test_zscore_takes_norms_whose_square_overflows_and_clips_again():
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    opt = ClippedSGD([p], lr=1e-200, max_norm=zscore(2.0, decay=0.01, warmup=3), nonfinite="skip")
    coefficients = []
    for norm in (1.0, 1e160, 2.0, 1e300, *[1.0 + 0.1 * (k % 3) for k in range(300)], 50.0):
        p.grad = torch.full((1,), norm, dtype=torch.float64)
        opt.step()
        coefficients.append(opt.clip_stats()["coefficient"])
    assert opt.clip_stats()["skipped"] == 0
    assert coefficients[-1] < 0.1


def test_rows_of_empty_tensors_count_as_one_unit_on_every_path():
    def clipped_fraction(**options):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(shape)) for shape in ((4, 3), (2, 0), (0, 5), (3,))]
        opt = ClippedSGD(params, lr=0.1, max_norm=weight_ratio(0.05), **options)
        for p in params:
            p.grad = torch.ones_like(p)
        opt.step()
        return opt.clip_stats()["clipped_fraction"]

    assert [clipped_fraction(foreach=foreach) for foreach in (None, True, False)] == [5 / 7] * 3
