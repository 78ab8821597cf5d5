"""Trials are training, and the answer is the smallest rate that suffices: against a slow twin of the rule."""

import copy
import math
from collections import UserList
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import nn

from curvestep import ClippedAdamW, ClippedSGD, NormalizedSGD, calibrate, clip
from curvestep.calibration.calibration_words import confidence
from curvestep.calibration.method import method_of
from curvestep.calibration.pilots import DOUBLED, LONG, SHORT, Pilots, Trial, next_octave, read
from curvestep.notes import Note
from curvestep.optimizer_family import Family, momenta
from curvestep.smoothness.oracle import BatchReplay
from tests.calibration.models import Lion, Noisy, kinds, network, targets, watched
from tests.models import mlp

# A slow twin, written from the rule


def loss_of(model, batch):
    return model(batch) if isinstance(model, Noisy) else F.cross_entropy(model(batch[0]), batch[1])


def twin_arm(model, make, lr, train, judges, *, max_norm=1.0, schedule="warmup-decay"):
    """Gains of the judges after training a copy, as in a loop of one's own."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        before = np.array([loss_of(twin, batch).item() for batch in judges])
    opt, k = make(twin.parameters()), len(train)
    warm = max(1, round(k / 10))
    for i, batch in enumerate(train):
        multiple = (i + 1) / warm if i < warm else 0.5 * (1 + math.cos(math.pi * (i - warm) / (k - warm)))
        for group in opt.param_groups:
            group["lr"] = lr * (multiple if schedule == "warmup-decay" else 1.0)
        opt.zero_grad()
        loss_of(twin, batch).backward()
        norm = math.sqrt(sum(p.grad.square().sum().item() for p in twin.parameters()))
        for p in twin.parameters():
            p.grad *= min(1.0, max_norm / norm)
        opt.step()
    with torch.no_grad():
        return before - np.array([loss_of(twin, batch).item() for batch in judges])


def twin_search(gain_of, center, most=5):
    """The rule of the note, in its own words: peaks by their learning rate, neighbours by ratios."""
    gains = {lr: gain_of(lr) for lr in (center / 4, center, center * 4)}
    while len(gains) < most:
        rates, top = sorted(gains), max(gains.values())
        i = next(i for i, lr in enumerate(rates) if gains[lr] >= 0.96 * top)
        s, wide = rates[i], 2.1
        if i == 0:
            lr = s / 2
        elif i == len(rates) - 1:
            lr = s / 2 if s / rates[i - 1] > wide and gains[rates[i - 1]] > 0.9 * top else 2 * s
        elif s / rates[i - 1] > wide:
            lr = s / 2
        else:
            lr = 2 * s if rates[i + 1] / s > wide else None
        if lr is None:
            break
        gains[lr] = gain_of(lr)
    rates = sorted(gains)
    share = np.maximum.accumulate([gains[lr] for lr in rates]) / max(gains.values())
    return gains, math.exp(np.interp(0.96, share, np.log(rates)))


@pytest.mark.parametrize("seed", range(4))
def test_adamw_under_a_schedule_is_the_slow_twin_of_the_rule(seed):
    model, loss, batches = network(seed)
    make = partial(torch.optim.AdamW, lr=123.0, weight_decay=0.1)
    gain_of = lambda lr: twin_arm(model, make, lr, batches[8:24], batches[:8]).mean()  # noqa: E731
    gains, sufficient = twin_search(gain_of, 0.008)
    opt = make(model.parameters())
    cal = calibrate(model, loss, batches, optimizer=opt, schedule="warmup-decay")
    assert [trial.lr for trial in cal.trials] == pytest.approx(sorted(gains), rel=1e-12)
    assert [trial.gain for trial in cal.trials] == pytest.approx(
        [gains[lr] for lr in sorted(gains)], rel=1e-9
    )
    assert cal.lr == pytest.approx(1.1 * sufficient, rel=1e-9)
    assert cal.max_norm == 1.0
    assert cal.num_gradients == 2 + 16 * len(gains)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_at_a_constant_rate_is_tried_around_the_scale_of_its_first_step(momentum):
    # On a quadratic of curvature 4 the largest working step is 1/4.
    model, batches = Noisy(3.0, curvature=4.0), targets(0.1)
    cal = calibrate(model, model, batches, optimizer="SGD", momentum=momentum)
    scale, options = (1 - momentum) / 4, {"max_norm": cal.max_norm, "schedule": "constant"}
    make = partial(torch.optim.SGD, lr=1.0, momentum=momentum)
    gain_of = lambda lr: twin_arm(model, make, lr, batches[8:24], batches[:8], **options).mean()  # noqa: E731
    gains, sufficient = twin_search(gain_of, scale / 2)
    assert [trial.lr for trial in cal.trials] == pytest.approx(sorted(gains), rel=1e-6)
    assert [trial.gain for trial in cal.trials] == pytest.approx(
        [gains[lr] for lr in sorted(gains)], rel=1e-6
    )
    assert cal.lr == pytest.approx(math.sqrt(scale * sufficient), rel=1e-6)
    assert cal.momentum == momentum


def test_start_at_the_origin_has_the_scale_of_any_other():
    model, batches = Noisy(0.0, curvature=4.0), [3.0 + target for target in targets(0.1)]
    assert calibrate(model, model, batches, optimizer="SGD", budget=48).trials[1].lr == pytest.approx(1 / 8)


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.SGD(p, lr=1.0),
    lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9, nesterov=True, weight_decay=0.1),
    lambda p: ClippedSGD(p, lr=1.0, max_norm=math.inf, momentum=0.75, weight_decay=0.1),
])  # fmt: skip
def test_sgd_under_a_schedule_takes_a_share_of_the_best_of_long_plain_trials(make):
    model, loss, batches = network(count=56)
    opt = make(model.parameters())
    (momentum,), decay = momenta(opt), opt.param_groups[0]["weight_decay"]
    cal = calibrate(model, loss, batches, optimizer=opt, schedule="warmup-decay")
    constant = calibrate(model, loss, batches, optimizer=opt, budget=48)
    octaves = [
        math.log2(trial.lr / (4 * constant.trials[1].lr)) for trial in cal.trials
    ]  # from twice the scale
    assert octaves == pytest.approx(range(2 * round(octaves[0] / 2), 2 * round(octaves[-1] / 2) + 1, 2))
    best = max(range(len(octaves)), key=lambda i: cal.trials[i].gain)
    assert 0 < best < len(octaves) - 1 or len(octaves) == 5

    plain = partial(torch.optim.SGD, lr=1.0, weight_decay=decay)
    for trial in cal.trials[: best + 1]:  # beyond the best, steps are so long that rounding grows
        lr, parts = trial.lr / (1 - momentum), (batches[8:], batches[:8])
        expected = twin_arm(model, plain, lr, *parts, max_norm=cal.max_norm).mean()
        assert (trial.num_steps, trial.gain) == (48, pytest.approx(expected, rel=1e-4))
    assert cal.lr == pytest.approx(0.7 * cal.trials[best].lr)
    assert cal.confidence == "medium"


# The search and its reading, from gains alone


def searched(gain_of, rule=SHORT, most=5):
    gains = {octave: gain_of(octave) for octave in (-2, 0, 2)}
    while len(gains) < most and max(gains.values()) > 0:
        octave = next_octave(gains, rule)
        if octave is None:
            break
        assert octave not in gains
        gains[octave] = gain_of(octave)
    return gains


@given(best=st.floats(-4, 4), width=st.floats(0.5, 4), floor=st.floats(-1, 0.9), noise=st.integers(0, 2**30))
def test_search_agrees_with_its_twin_on_any_curve_of_gains(best, width, floor, noise):
    draws = np.random.default_rng(noise).normal(0, 0.01, 64)

    def gain_of(octave):
        return max(floor, 1 - ((octave - best) / width) ** 2) + draws[int(octave) + 32]

    gains = searched(gain_of)
    if max(gains[octave] for octave in (-2, 0, 2)) <= 0:
        return
    twin, sufficient = twin_search(lambda lr: gain_of(round(math.log2(lr))), 1.0)
    assert sorted(gains) == [round(math.log2(lr)) for lr in sorted(twin)]
    trials = [Trial(lr=2.0**o, num_steps=16, gain=gains[o], error=1e-9) for o in sorted(gains)]
    if min(gains.values()) > -max(gains.values()):
        assert read(trials, "warmup-decay", 1.0)[0] == pytest.approx(1.1 * sufficient)
        assert read(trials, "constant", 4.0)[0] == pytest.approx(math.sqrt(4.0 * sufficient))


@pytest.mark.parametrize(
    ("best", "octaves"), [(0, [-2, 0, 2]), (9, [-2, 0, 2, 4, 6]), (-3.5, [-6, -4, -2, 0, 2])]
)
def test_long_arms_stay_four_times_apart_and_bracket_the_best(best, octaves):
    assert sorted(searched(lambda octave: 100 - abs(octave - best), LONG)) == octaves


@pytest.mark.parametrize(
    ("gains", "error", "rule", "lr", "doubts"),
    [
        ((0.1, 1.0, 0.5), 0.01, SHORT, (2.0, 2.2), []),
        ((0.1, 1.0, 0.5), 0.01, DOUBLED, (1.3, 1.4), ["noise"]),  # 0.7 instead of 1.1 times 1.91
        ((0.1, 1.0, 0.5), 0.19, SHORT, (2.0, 2.2), []),
        ((0.1, 1.0, 0.5), 0.21, SHORT, (2.0, 2.2), ["noise"]),
        ((0.1, 1.0, 0.5), 0.49, SHORT, (2.0, 2.2), ["noise"]),
        ((0.1, 1.0, 0.5), 0.51, SHORT, (0.5, 0.5), ["unknown"]),  # half of the lowest
        ((-1.0, -2.0, -3.0), 0.01, SHORT, (0.5, 0.5), ["unknown"]),
        ((0.89, 1.0, 0.5), 0.01, SHORT, (1.6, 1.8), []),
        ((0.91, 1.0, 0.5), 0.01, SHORT, (1.5, 1.7), ["flat"]),  # half of it gains nearly as much
        ((0.97, 1.0, 0.5), 0.01, SHORT, (1.1, 1.1), ["edge", "flat"]),
        ((0.1, 0.5, 1.0), 0.01, SHORT, (4.1, 4.4), ["edge"]),
        ((0.1, 0.97, 1.0), 0.01, SHORT, (2.1, 2.2), []),
        ((-math.inf, 1.0, 0.5), 0.01, SHORT, (2.16, 2.18), []),  # trials that broke, on either side
        ((0.5, 1.0, -math.inf), 0.01, SHORT, (1.9, 2.2), []),
        ((0.99, 0.98, 1.0, 0.2), 0.01, LONG, (2.8, 2.8), []),  # of long trials 0.7 of the best, flat or not
        ((0.99, 1.0), 0.01, LONG, (1.4, 1.4), ["edge"]),
        ((0.99, 1.0, 0.5), 0.3, LONG, (1.4, 1.4), ["noise"]),
    ],
)
def test_arms_are_read(gains, error, rule, lr, doubts):
    steps = rule.num_steps
    trials = [Trial(lr=2.0**k, num_steps=steps, gain=gain, error=error) for k, gain in enumerate(gains)]
    found, said = read(trials, "warmup-decay", 1.0)
    assert lr[0] - 1e-9 <= found <= lr[1] + 1e-9
    assert said == doubts
    if doubts == ["unknown"] or rule is LONG:
        assert read(trials, "constant", 1.0)[0] == found


def test_confidence_is_high_only_for_adam_under_a_schedule_and_without_any_doubt():
    def said(*kinds, family=Family.ADAM, schedule="warmup-decay"):
        return confidence(family, schedule, [Note(kind, "") for kind in kinds])

    assert said() == said("iterator") == "high"
    assert said("unknown", "few-batches") == "cannot tell"
    doubts = (
        "noise",
        "edge",
        "flat",
        "few-batches",
        "eval-mode",
        "half-precision",
        "scaled-loss",
        "untrained",
    )
    assert {said(kind) for kind in doubts} == {"medium"}
    assert {said(family=family) for family in set(Family) - {Family.ADAM}} == {"medium"}
    assert said(schedule="constant") == "medium"


# Trials are training


@pytest.mark.parametrize("make", [
    lambda p: ClippedSGD(p, lr=1.0, max_norm=0.3, momentum=0.9),
    lambda p: ClippedAdamW(p, lr=1.0, max_norm=0.3, betas=(0.8, 0.9), weight_decay=0.2),
    lambda p: NormalizedSGD(p, lr=1.0, offset=0.3),
    lambda p: torch.optim.RMSprop(p, lr=1.0),
    lambda p: torch.optim.Adam(p, lr=1.0, amsgrad=True, weight_decay=0.1),
    lambda p: torch.optim.NAdam(p, lr=1.0),
    lambda p: Lion(p, lr=1.0),
])  # fmt: skip
def test_arm_is_a_loop_of_ones_own_with_that_optimizer(make):
    model, loss, batches = network()
    judges, train = batches[:3], batches[3:9]
    method = method_of(make(model.parameters()), model)
    passes = BatchReplay(model, loss)
    with passes:
        start = passes.losses_of(judges)
        trials = Pilots(passes, method, "warmup-decay", method.max_norm, 1.0, print)
        after = trials.losses_after(0.02, train, judges, SHORT)
    clips = math.inf if method.clips_itself else method.max_norm
    expected = twin_arm(model, make, 0.02, train, judges, max_norm=clips)
    assert start - after == pytest.approx(expected, rel=1e-7)


def test_groups_keep_their_ratios_and_frozen_parameters_do_not_move():
    model, loss, batches = network()
    model[0].bias.requires_grad_(False)
    model[0].bias.grad = torch.ones(12)
    first, second = ({"params": model[k].parameters(), "lr": lr} for k, lr in ((0, 1.0), (2, 0.25)))
    method, kept = method_of(torch.optim.SGD([first, second]), model), model[0].bias.detach().clone()
    passes = BatchReplay(model, loss)
    with passes:
        trials = Pilots(passes, method, "constant", math.inf, 1.0, print)
        seen = trials.losses_after(0.1, batches[:1], batches[1:2], SHORT)
        assert torch.equal(model[0].bias, kept)
    weights = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss(batches[0]), weights)
    with torch.no_grad():
        for p, g, lr in zip(weights, grads, (0.1, 0.025, 0.025), strict=True):
            p.sub_(g, alpha=lr)
        assert seen == pytest.approx([loss(batches[1]).item()], rel=1e-9)


def test_arm_whose_loss_is_not_finite_breaks_whatever_its_judges_say():
    model, batches = Noisy(0.2), targets(0.01)

    def loss(batch):
        is_far = torch.is_grad_enabled() and model.x.min() < 0.1
        return model(batch) + (math.inf if is_far else 0.0)

    cal = calibrate(model, loss, batches, optimizer="AdamW", schedule="warmup-decay", budget=48)
    assert [trial.gain > 0 for trial in cal.trials] == [True, True, False]
    assert cal.trials[2].gain == -math.inf
    assert "broke" in str(cal)


def test_every_step_of_an_arm_has_its_own_dropout_mask_and_arms_share_them():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 1, bias=False))
    masks = UserList()  # what a loss adds to a list is taken back

    def loss(x):
        out = model[0](x)
        if torch.is_grad_enabled():
            masks.append(tuple(out.tolist()))
        return (model[1](out) - 1.0).square().sum()

    calibrate(model, loss, [torch.ones(64)] * 24, optimizer="AdamW", schedule="warmup-decay", budget=48)
    one, two, three = masks[2:18], masks[18:34], masks[34:50]
    assert len(set(one)) == 16
    assert one == two == three


@pytest.mark.parametrize(("count", "num_judges"), [(3, 2), (6, 2), (12, 4), (23, 7), (24, 8), (48, 8)])
def test_judges_are_never_stepped_on_and_few_batches_are_split_and_said(count, num_judges):
    model, loss, batches = network(size=256)
    loss, stepped, judged = watched(loss)
    cal = calibrate(model, loss, batches[:count], optimizer="AdamW", schedule="warmup-decay", budget=80)
    assert not set(stepped) & set(judged)
    assert len(set(judged)) == num_judges
    assert len(set(stepped)) == min(16, count - num_judges)
    assert len(judged) == num_judges * (1 + len(cal.trials))
    assert ("few-batches" in kinds(cal)) == (num_judges < 8)


# Noise and budget


def test_noise_doubles_the_arms_and_their_judges():
    model, batches = Noisy(0.6), targets(3.0)
    loss, _, judged = watched(model)
    cal = calibrate(model, loss, batches, optimizer="AdamW", schedule="warmup-decay")
    lengths = [trial.num_steps for trial in cal.trials]
    assert lengths[:3] == [16] * 3
    assert set(lengths[3:]) == {32}
    assert len(set(judged)) == 16
    assert cal.num_gradients <= 2 + 208
    assert {"noise", "unknown"} & kinds(cal)
    assert cal.last_trials == cal.trials[3:]
    long = calibrate(model, model, batches, optimizer="SGD", schedule="warmup-decay")
    assert {trial.num_steps for trial in long.trials} == {48}  # long enough


def test_start_at_the_optimum_cannot_tell_and_gives_a_safe_value():
    model, batches = Noisy(0.0), targets(1.0)
    cal = calibrate(model, model, batches, optimizer="AdamW", schedule="warmup-decay")
    assert cal.confidence == "cannot tell"
    assert "unknown" in kinds(cal)
    assert cal.lr == cal.last_trials[0].lr / 2 == 0.001
    assert "cannot tell" in str(cal)


@pytest.mark.parametrize(
    ("options", "length", "most", "turns"),
    [
        ({"budget": 48}, 16, 3, 1),
        ({"budget": 64}, 16, 4, 1),
        ({"budget": 240}, 16, 5, 3),
        ({"budget": 0.1, "num_steps": 1600}, 16, 5, 2),
        ({"num_steps": 100}, 16, 5, 1),
        ({"num_steps": 4000}, 16, 5, 2),
        ({"optimizer": "SGD", "budget": 144}, 48, 3, 1),
        ({"optimizer": "SGD", "budget": 200}, 48, 4, 1),
        ({"optimizer": "SGD", "budget": 480}, 48, 5, 2),
        ({"optimizer": "SGD"}, 48, 5, 1),
    ],
)
def test_budget_buys_arms_and_then_repetitions_and_is_kept(options, length, most, turns):
    model, loss, batches = network(count=200, size=128)
    loss, stepped, _ = watched(loss)
    cal = calibrate(model, loss, batches, **{"optimizer": "AdamW", "schedule": "warmup-decay", **options})
    assert {trial.num_steps for trial in cal.trials} == {length}
    assert 3 <= len(cal.trials) <= most
    assert len(stepped) == cal.num_gradients
    of_start = cal.num_gradients - length * turns * len(cal.trials)
    assert of_start == 2 if length == 16 else 0 < of_start < 30  # SGD's has a scale to find


def test_budget_of_ones_own_is_not_doubled_where_noise_hides_the_gains():
    model, batches = Noisy(0.6), targets(3.0, count=60)
    cal = calibrate(model, model, batches, optimizer="AdamW", schedule="warmup-decay", budget=80)
    assert {trial.num_steps for trial in cal.trials} == {16}


def test_repetitions_are_the_mean_over_sets_of_batches():
    model, batches = Noisy(2.0), targets(0.5, count=60)
    cal = calibrate(model, model, batches, optimizer="AdamW", schedule="warmup-decay", budget=160)
    parts = [
        twin_arm(model, torch.optim.AdamW, 0.002, batches[i : i + 16], batches[:8]).mean() for i in (8, 24)
    ]
    assert cal.trials[0].gain == pytest.approx(np.mean(parts), rel=1e-9)


# Thresholds


def hooked(parameters):
    opt = torch.optim.AdamW(parameters, lr=1.0)
    clip(opt, max_norm=0.2)
    return opt


@pytest.mark.parametrize(
    ("make", "options", "expected"),
    [
        (lambda p: torch.optim.AdamW(p, lr=1.0), {}, 1.0),
        (lambda p: torch.optim.AdamW(p, lr=1.0), {"max_norm": 0.5}, 0.5),
        (lambda p: ClippedAdamW(p, lr=1.0, max_norm=math.inf), {}, 1.0),
        (lambda p: ClippedAdamW(p, lr=1.0, max_norm=0.3), {}, 0.3),
        (lambda p: ClippedSGD(p, lr=1.0, max_norm=0.3), {}, 0.3),
        (lambda p: NormalizedSGD(p, lr=1.0, offset=0.3), {}, 0.3),
        (lambda p: torch.optim.RMSprop(p, lr=1e-3), {}, math.inf),
        (hooked, {}, 0.2),
    ],
)
def test_threshold_is_the_optimizers_own_or_one_for_adam(make, options, expected):
    model, loss, batches = network()
    opt = make(model.parameters())
    assert calibrate(model, loss, batches, optimizer=opt, budget=48, **options).max_norm == expected


@pytest.mark.parametrize("noise", [0.0, 1.0, 30.0])
def test_threshold_of_sgd_is_measured_and_follows_the_agreement_of_batches(noise):
    model, batches = Noisy(1.0), targets(noise)
    gradients = torch.stack([1.0 - batch for batch in batches[8:11]])
    norms = gradients.norm(dim=1)
    cosines = (gradients @ gradients.T / torch.outer(norms, norms)).triu(1).sum() / 3
    weight = cosines.clamp(0, 1).item() ** 2
    expected = 0.6 ** (1 - weight) * 1.75**weight * norms.median().item()
    assert calibrate(model, model, batches, budget=48).max_norm == pytest.approx(expected, rel=1e-9)


def test_arms_of_a_hooked_optimizer_clip_at_its_threshold():
    model, loss, batches = network()
    plain = torch.optim.AdamW(model.parameters(), lr=1.0)
    clip(plain, max_norm=1e-3)
    own = ClippedAdamW(model.parameters(), lr=1.0, max_norm=1e-3)
    found = [calibrate(model, loss, batches, optimizer=opt, schedule="warmup-decay") for opt in (plain, own)]
    assert [trial.gain for trial in found[0].trials] == pytest.approx(
        [trial.gain for trial in found[1].trials], rel=1e-9
    )
    assert plain.clip_stats()["steps"] == 0


# Losses of other kinds


@pytest.mark.parametrize("optimizer", ["AdamW", "ClippedSGD"])
def test_gradient_accumulation_gives_the_numbers_of_the_whole_batch(optimizer):
    model, loss, batches = network()

    def accumulated(batch):
        total = 0.0
        for part in zip(batch[0].chunk(4), batch[1].chunk(4), strict=True):
            share = loss(part) / 4
            share.backward()
            total += share.item()
        return total

    whole, parts = (calibrate(model, of, batches, optimizer=optimizer) for of in (loss, accumulated))
    assert (parts.lr, parts.max_norm) == pytest.approx((whole.lr, whole.max_norm), rel=1e-9)


@pytest.mark.parametrize("optimizer", ["AdamW", "ClippedSGD"])
def test_loss_that_differentiates_inside_is_calibrated(optimizer):
    torch.manual_seed(0)
    net = mlp(1, 16, 1)

    def residual(x):  # u' = -u with u(0) = 1
        u = net(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return (slope + u).square().mean() + (net(torch.zeros(1, 1)) - 1).square().sum()

    batches = [torch.rand(32, 1).requires_grad_() for _ in range(24)]
    cal = calibrate(net, residual, batches, optimizer=optimizer, schedule="warmup-decay")
    assert cal.trials[0].gain > 0
    assert all(x.grad is None for x in batches)


@pytest.mark.parametrize("scale", [2.0**-12, 2.0**10])
def test_scale_of_the_loss_moves_sgd_and_leaves_adam_without_a_threshold_alone(scale):
    model, batches = Noisy(2.0), targets(0.2)
    cal, scaled = (
        calibrate(model, lambda b, s=s: s * model(b), batches, schedule="warmup-decay") for s in (1.0, scale)
    )
    assert scaled.lr == pytest.approx(cal.lr / scale, rel=1e-9)
    assert scaled.max_norm == pytest.approx(cal.max_norm * scale, rel=1e-9)


def test_progress_is_shown_where_it_is_asked_for(capsys):
    model, loss, batches = network()
    calibrate(model, loss, batches, optimizer="AdamW", progress=True)
    said = capsys.readouterr().err
    assert "about 80 gradients, up to 208 if noise hides the answer" in said
    assert said.count("16 steps at lr") >= 3
    calibrate(model, loss, batches, optimizer="AdamW")
    assert capsys.readouterr().err == ""


def test_answer_is_printed_in_at_most_eight_lines():
    model, loss, batches = network(count=9)
    opt = torch.optim.RMSprop(model.parameters(), lr=1e-2)
    cal = calibrate(model, lambda b: 1e4 * loss(b), batches, optimizer=opt)
    assert len(cal.warnings) >= 3
    assert len(str(cal).splitlines()) <= 8
    assert f"(and {len(cal.warnings) - 1} more)" in str(cal)
    assert all(note.text in cal.details() for note in cal.warnings)
    assert all(f"{trial.lr:<9.3g}" in cal.details() for trial in cal.trials)
