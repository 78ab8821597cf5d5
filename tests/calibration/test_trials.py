"""Trials are training: a loop of one's own with that optimizer, on the same batches, judged by others."""

import copy
import math
import re
from collections import UserList
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from curvestep import ClippedAdamW, ClippedSGD, NormalizedSGD, calibrate, clip
from curvestep.calibration.loaders import Supply
from curvestep.calibration.method import method_of
from curvestep.calibration.trials import Trials
from curvestep.smoothness.oracle import BatchReplay
from tests.calibration.models import Lion, Noisy, kinds, network, targets, watched
from tests.models import mlp

ONE_LENGTH = {"budget": 48}  # three trials of 16 steps

# A slow twin


def loss_of(model, batch):
    return model(batch) if isinstance(model, Noisy) else F.cross_entropy(model(batch[0]), batch[1])


def twin_trial(model, make, lr, train, judges, *, max_norm=1.0, schedule="warmup-decay"):
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


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("schedule", ["constant", "warmup-decay"])
def test_gains_of_adamw_are_those_of_a_loop_on_fresh_batches_for_each_length(seed, schedule):
    model, loss, batches = network(seed, count=96)
    make = partial(torch.optim.AdamW, lr=123.0, weight_decay=0.1)
    cal = calibrate(model, loss, batches, optimizer=make(model.parameters()), schedule=schedule, budget=320)
    assert cal.lengths == [16, 48]
    judges = batches[:16]
    parts = {16: batches[16:32], 48: batches[32:80]}
    for trial in (*cal.trials[:2], *cal.last_trials[:2]):
        expected = twin_trial(model, make, trial.lr, parts[trial.num_steps], judges, schedule=schedule)
        assert trial.falls == pytest.approx(expected, rel=1e-7)
        assert trial.gain == pytest.approx(expected.mean(), rel=1e-7)
        assert trial.error == pytest.approx(expected.std(ddof=1) / 4, rel=1e-6)
    assert cal.num_gradients == 2 + sum(trial.num_steps for trial in cal.trials)
    assert cal.trials[1].lr == pytest.approx(0.002 if schedule == "constant" else 0.008)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_tried_with_its_momentum_around_the_scale_of_its_first_step(momentum):
    # On a quadratic of curvature 4 the largest working step is 1/4.
    model, batches = Noisy(3.0, curvature=4.0), targets(0.1)
    cal = calibrate(model, model, batches, optimizer="SGD", momentum=momentum, **ONE_LENGTH)
    make = partial(torch.optim.SGD, lr=1.0, momentum=momentum)
    trial = cal.trials[1]
    assert trial.lr == pytest.approx((1 - momentum) / 8)
    expected = twin_trial(
        model, make, trial.lr, batches[16:32], batches[:16], max_norm=math.inf, schedule="constant"
    )
    assert trial.gain == pytest.approx(expected.mean(), rel=1e-6)
    assert cal.momentum == momentum


def test_start_at_the_origin_has_the_scale_of_any_other():
    model, batches = Noisy(0.0, curvature=4.0), [3.0 + target for target in targets(0.1)]
    assert calibrate(model, model, batches, optimizer="SGD", **ONE_LENGTH).trials[1].lr == pytest.approx(
        1 / 8
    )


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
def test_trial_is_a_loop_of_ones_own_with_that_optimizer(make):
    model, loss, batches = network()
    judges, train = batches[:3], batches[3:9]
    method = method_of(make(model.parameters()), model)
    passes = BatchReplay(model, lambda batch: loss(getattr(batch, "batch", batch)))
    with passes:
        supply = Supply(batches, model, 3, 6)
        trial = Trials(passes, method, "warmup-decay", supply, print).run(0.02, method.max_norm, 6, 0)
    clips = math.inf if method.clips_itself else method.max_norm
    expected = twin_trial(model, make, 0.02, train, judges, max_norm=clips)
    assert trial.falls == pytest.approx(expected, rel=1e-7)


def test_groups_keep_their_ratios_and_frozen_parameters_do_not_move():
    model, loss, batches = network()
    model[0].bias.requires_grad_(False)
    model[0].bias.grad = torch.ones(12)
    first, second = ({"params": model[k].parameters(), "lr": lr} for k, lr in ((0, 1.0), (2, 0.25)))
    method, kept = method_of(torch.optim.SGD([first, second]), model), model[0].bias.detach().clone()
    passes = BatchReplay(model, lambda batch: loss(getattr(batch, "batch", batch)))
    with passes:
        supply = Supply(batches, model, 2, 1)
        seen = Trials(passes, method, "constant", supply, print).losses_after(0.1, math.inf, batches[2:3])
        assert torch.equal(model[0].bias, kept)
    weights = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss(batches[2]), weights)
    with torch.no_grad():
        for p, g, lr in zip(weights, grads, (0.1, 0.025, 0.025), strict=True):
            p.sub_(g, alpha=lr)
        assert seen == pytest.approx([loss(batch).item() for batch in batches[:2]], rel=1e-9)


def test_trial_whose_loss_is_not_finite_breaks_whatever_its_judges_say():
    model, batches = Noisy(0.2), targets(0.01)

    def loss(batch):
        is_far = torch.is_grad_enabled() and model.x.min() < 0.1
        return model(batch) + (math.inf if is_far else 0.0)

    cal = calibrate(model, loss, batches, optimizer="AdamW", schedule="warmup-decay", budget=48)
    assert [trial.gain > 0 for trial in cal.trials] == [True, True, False]
    assert cal.trials[2].gain == -math.inf
    assert "broke" in str(cal)


def test_every_step_of_an_arm_has_its_own_dropout_mask_and_trials_share_them():
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


@pytest.mark.parametrize(("count", "num_judges"), [(3, 2), (6, 2), (12, 4), (23, 7), (24, 8), (60, 16)])
def test_judges_are_never_stepped_on_and_few_batches_are_split_and_said(count, num_judges):
    model, loss, batches = network(size=256, count=60)
    loss, stepped, judged = watched(loss)
    cal = calibrate(model, loss, batches[:count], optimizer="AdamW", schedule="warmup-decay", **ONE_LENGTH)
    assert not set(stepped) & set(judged)
    assert len(set(judged)) == num_judges
    assert len(set(stepped)) == min(16, count - num_judges)
    assert len(judged) == num_judges * (1 + len(cal.trials))
    assert ("few-batches" in kinds(cal)) == (count < 24)


def test_metric_judges_trials_and_the_loss_trains_them():
    model, loss, batches = network(count=60)
    asked = {"optimizer": "AdamW", "schedule": "warmup-decay", **ONE_LENGTH}

    def errors(batch):
        return (model(batch[0]).argmax(1) != batch[1]).double().mean().item()

    plain, judged = (
        calibrate(model, loss, batches, **asked),
        calibrate(model, loss, batches, metric=errors, **asked),
    )
    assert judged.loss == plain.loss
    assert judged.num_gradients == plain.num_gradients
    twin = copy.deepcopy(model)
    with torch.no_grad():
        before = np.mean([(twin(x).argmax(1) != y).double().mean().item() for x, y in batches[:16]])
    assert max(trial.gain for trial in judged.trials) <= before
    assert judged.trials[0].gain != plain.trials[0].gain


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
    gradients = torch.stack([1.0 - batch for batch in batches[16:19]])
    norms = gradients.norm(dim=1)
    cosines = (gradients @ gradients.T / torch.outer(norms, norms)).triu(1).sum() / 3
    weight = cosines.clamp(0, 1).item() ** 2
    expected = 0.6 ** (1 - weight) * 1.75**weight * norms.median().item()
    tried = {trial.max_norm for trial in calibrate(model, model, batches, budget=160).trials}
    assert sorted(tried) == pytest.approx([expected, math.inf], rel=1e-9)


def test_trials_of_a_hooked_optimizer_clip_at_its_threshold():
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
    assert "about 224 gradients, up to 480 if the answer is doubtful" in said
    assert re.search(r"48 steps at lr .*: gain .*, \d+ s", said)
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
