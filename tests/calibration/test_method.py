"""An optimizer says itself what it is; its learning rates follow the calibration wherever they are kept."""

import copy
import math
import warnings
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

from curvestep import ClippedAdamW, ClippedSGD, NormalizedSGD, calibrate, clip, clip_rules
from curvestep.calibration.lr_schedules import (
    peak_lr,
    shares_of_groups,
    shares_of_parameters,
    warmup_decay,
)
from curvestep.calibration.method import method_of
from tests.calibration.models import Lion, kinds, network


def groups(model, *rates, **options):
    """One group a layer, each with its learning rate."""
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    return [
        {"params": layer.parameters(), "lr": lr, **options} for layer, lr in zip(layers, rates, strict=True)
    ]


# What an instance says


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda p: ClippedSGD(p, lr=3.0, max_norm=math.inf), {}),
        (lambda p: torch.optim.SGD(p, lr=7.0), {"optimizer": "sgd"}),
        (lambda p: torch.optim.SGD(p, lr=1e-9, momentum=0.9, weight_decay=0.01),
         {"optimizer": "SGD", "momentum": 0.9, "weight_decay": 0.01}),
        (lambda p: torch.optim.AdamW(p, weight_decay=0.3), {"optimizer": "aDaMw", "weight_decay": 0.3}),
        (lambda p: torch.optim.Adam(p, lr=3.0), {"optimizer": torch.optim.Adam}),
        (lambda p: ClippedAdamW(p, lr=0.1, max_norm=math.inf), {"optimizer": ClippedAdamW}),
        (lambda p: torch.optim.RMSprop(p), {"optimizer": torch.optim.RMSprop}),
    ],
)  # fmt: skip
def test_instance_gives_the_numbers_of_its_class_with_its_settings(make, options):
    model, loss, batches = network()
    assert calibrate(model, loss, batches, optimizer=make(model.parameters()), budget=48) == calibrate(
        model, loss, batches, budget=48, **options
    )


def test_normalized_sgd_takes_the_same_step_at_small_gradients():
    model, loss, batches = network()
    normal = calibrate(model, loss, batches, optimizer=NormalizedSGD, budget=48)
    plain = calibrate(model, loss, batches, budget=48)
    assert (normal.threshold, plain.max_norm) == ("offset", math.inf)
    assert math.isclose(normal.trials[0].lr / normal.max_norm, plain.trials[0].lr, rel_tol=1e-9)


@pytest.mark.parametrize("ratio", [0.25, 4.0])
def test_scale_of_unequal_groups_is_that_of_parameters_of_another_unit(ratio):
    # A learning rate r times as large is that of parameters in units sqrt(r) times longer.
    model, loss, batches = network()
    unequal = calibrate(model, loss, batches, optimizer=torch.optim.SGD(groups(model, 1.0, ratio)), budget=48)
    scale = math.sqrt(ratio)
    with torch.no_grad():
        for p in model[2].parameters():
            p.div_(scale)

    def same(batch):
        values = {name: p * scale if name.startswith("2") else p for name, p in model.named_parameters()}
        return F.cross_entropy(torch.func.functional_call(model, values, (batch[0],)), batch[1])

    plain = calibrate(model, same, batches, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), budget=48)
    # Given relative to the largest; the lattices differ, so crossings are interpolated at other places.
    assert math.isclose(unequal.trials[0].lr, max(1.0, ratio) * plain.trials[0].lr, rel_tol=0.02)


OTHERS = [torch.optim.RMSprop, torch.optim.NAdam, torch.optim.Adagrad, torch.optim.Rprop, Lion]


def matrices(model):
    """The weights, which are all that Muon takes; the rest is frozen."""
    for p in model.parameters():
        p.requires_grad_(p.dim() == 2)
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("make", OTHERS)
def test_other_optimizers_are_tried_around_the_rate_that_they_were_made_with(make):
    model, loss, batches = network()
    trained = matrices(model)
    opt, before = make(trained, lr=0.01), [p.detach().clone() for p in trained]
    cal = calibrate(model, loss, batches, optimizer=opt, schedule="warmup-decay", budget=48)
    assert [round(trial.lr, 9) for trial in cal.trials] == [0.005, 0.02, 0.08]
    assert max(trial.gain for trial in cal.trials) > 0
    assert cal.confidence != "high"
    assert "less-tested" in kinds(cal)
    assert all(torch.equal(a, b) for a, b in zip(before, trained, strict=True))
    cal.apply(opt)
    assert math.isclose(opt.param_groups[0]["lr"], cal.lr)


needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon")


@needs_muon
@pytest.mark.parametrize(("matched", "center"), [("original", 0.04), ("match_rms_adamw", 0.008)])
def test_muon_is_tried_around_a_rate_of_its_own(matched, center):
    model, loss, batches = network()
    opt = torch.optim.Muon(matrices(model), lr=123.0, adjust_lr_fn=matched)
    cal = calibrate(model, loss, batches, optimizer=opt, schedule="warmup-decay", budget=48)
    assert cal.trials[1].lr == pytest.approx(center)
    assert cal.max_norm == math.inf
    assert "less-tested" in kinds(cal)


@needs_muon
def test_several_optimizers_train_together_and_keep_their_ratio():
    model, loss, batches = network()
    weights, rest = (
        [p for p in model.parameters() if (p.dim() == 2) == is_matrix] for is_matrix in (True, False)
    )
    muon, adamw = torch.optim.Muon(weights, lr=1.0), torch.optim.AdamW(rest, lr=0.25)
    schedulers = [lr_scheduler.CosineAnnealingLR(opt, 10) for opt in (muon, adamw)]
    asked = {"schedule": "warmup-decay", "budget": 48}
    cal = calibrate(model, loss, batches, optimizer=[muon, adamw], **asked)
    assert cal.optimizer == "Muon + AdamW"
    assert "untrained" not in kinds(cal)

    twin = copy.deepcopy(model)
    twins = [p for p in twin.parameters() if p.dim() == 2], [p for p in twin.parameters() if p.dim() < 2]
    opts = torch.optim.Muon(twins[0], lr=1.0), torch.optim.AdamW(twins[1], lr=0.25)
    trial = cal.trials[1]
    judges, steps = batches[:16], batches[16:32]
    with torch.no_grad():
        before = sum(F.cross_entropy(twin(x), y).item() for x, y in judges)
    for multiple, (x, y) in zip(warmup_decay(16), steps, strict=True):
        twin.zero_grad()
        F.cross_entropy(twin(x), y).backward()
        for opt, share in zip(opts, (1.0, 0.25), strict=True):
            opt.param_groups[0]["lr"] = trial.lr * multiple * share
            opt.step()
    with torch.no_grad():
        after = sum(F.cross_entropy(twin(x), y).item() for x, y in judges)
    assert trial.gain == pytest.approx((before - after) / 16, rel=1e-6)

    cal.apply(muon, adamw, *schedulers)
    assert [opt.param_groups[0]["lr"] for opt in (muon, adamw)] == pytest.approx([cal.lr, cal.lr / 4])
    assert [one.base_lrs[0] for one in schedulers] == pytest.approx([cal.lr, cal.lr / 4])
    with pytest.raises(ValueError, match=r"has a scheduler.*Give it too"):
        cal.apply(muon, adamw, schedulers[0])
    with pytest.raises(ValueError, match="measured for Muon \\+ AdamW, got Muon"):
        cal.apply(muon, *schedulers[:1])


def test_parameters_that_the_optimizer_leaves_out_do_not_move():
    model, loss, batches = network()
    half = torch.optim.SGD(model[2].parameters(), lr=1.0)
    found = calibrate(model, loss, batches, optimizer=half, budget=48)
    assert "untrained" in kinds(found)
    model[0].requires_grad_(False)
    frozen = calibrate(model, loss, batches, budget=48)
    assert [trial.lr for trial in found.trials] == pytest.approx(
        [trial.lr for trial in frozen.trials], rel=1e-9
    )
    with pytest.raises(ValueError, match="trains no parameter that the loss depends on"):
        calibrate(model, loss, batches, optimizer=torch.optim.SGD(model[0].parameters(), lr=1.0))


def test_rates_are_read_from_the_peak_of_a_schedule_that_is_there_already():
    model, loss, batches = network()
    opt = torch.optim.AdamW(groups(model, 1.0, 0.1))
    plain = calibrate(model, loss, batches, optimizer=opt)
    lr_scheduler.LambdaLR(opt, lambda step: step / 10)  # zero at the start
    scheduled = calibrate(model, loss, batches, optimizer=opt)
    assert (scheduled.lr, scheduled.trials) == (plain.lr, plain.trials)
    assert {group["lr"] for group in opt.param_groups} == {0.0}


@pytest.mark.parametrize(
    ("make", "words", "options"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.0), "no learning rate above zero", {}),
        (lambda p: torch.optim.SGD(p, lr=1.0, maximize=True), "maximises", {}),
        (lambda p: torch.optim.LBFGS(p), "searches for its step itself", {}),
        (lambda p: torch.optim.LBFGS, "searches for its step itself", {}),
        (lambda p: [torch.optim.SGD(p, lr=1.0)] * 2, "parameters that several of them train", {}),
        (lambda p: ["SGD", "AdamW"], "one optimizer, or a list of optimizers", {}),
        (lambda p: [], "one optimizer, or a list of optimizers", {}),
        (lambda p: [torch.optim.SGD(p, lr=1.0)], "`momentum` is read from the optimizers", {"momentum": 0.9}),
        (lambda p: torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), "1 parameters that are not", {}),
        (lambda p: torch.optim.SGD(p, lr=1.0), "`momentum` is read from the optimizer", {"momentum": 0.9}),
        (lambda p: torch.optim.AdamW(p), "`weight_decay` is read", {"weight_decay": 0.1}),
        (lambda p: torch.optim.SGD([{"params": p[:1], "momentum": 0.9}, {"params": p[1:]}], lr=1.0),
         "unequal momentum, 0 and 0.9", {}),
        (lambda p: torch.optim.SGD(p, lr=1.0, momentum=1.0), r"`momentum` must be in \[0, 1\)", {}),
        (lambda p: ClippedAdamW(p, lr=1.0, max_norm=clip_rules.percentile(10)),
         "clips by the rule percentile, and trials clip at a number", {}),
        (lambda p: "Liom", "a name such as 'AdamW', got 'Liom'", {}),
        (lambda p: nn.Linear, "a name such as 'AdamW', got <class", {}),
        (lambda p: Lion, "give the Lion that will train", {}),
    ],
)  # fmt: skip
def test_what_an_optimizer_cannot_say_is_refused(make, words, options):
    model, loss, batches = network()
    with pytest.raises(ValueError, match=words):
        calibrate(model, loss, batches, optimizer=make(list(model.parameters())), **options)


def test_copy_of_an_optimizer_has_its_groups_options_and_state_and_the_same_parameters():
    model, loss, batches = network()
    given = ClippedAdamW(groups(model, 0.1, 0.2, weight_decay=0.3), lr=1.0, max_norm=1.0, betas=(0.8, 0.95))
    loss(batches[0]).backward()
    given.step()
    (copied,) = method_of(given, model).copies(7.0)
    assert shares_of_groups([given]) == [0.5, 1.0]
    strange = torch.zeros(1)
    assert shares_of_parameters([given], [*model.parameters(), strange]) == [0.5, 0.5, 1.0, 1.0, 0.0]
    assert [p for group in copied.param_groups for p in group["params"]] == list(model.parameters())
    for group in copied.param_groups:
        assert (group["betas"], group["weight_decay"], group["max_norm"]) == ((0.8, 0.95), 0.3, 1.0)
    first = next(model.parameters())
    assert torch.equal(copied.state[first]["exp_avg"], given.state[first]["exp_avg"])
    assert copied.state[first]["exp_avg"] is not given.state[first]["exp_avg"]
    free = ClippedAdamW(model.parameters(), lr=1.0, max_norm=math.inf)
    assert method_of(free, model).copies(7.0)[0].param_groups[0]["max_norm"] == 7.0
    assert free.param_groups[0]["max_norm"] == math.inf


# apply


def peaks(opt):
    return [group["lr"] for group in opt.param_groups]


def warmup_and_decay(opt):
    return [lr_scheduler.LinearLR(opt, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(opt, 7)]


SCHEDULERS = {
    "lambda": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: min(1.0, (step + 1) / 4)),
    "cosine": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 10, eta_min=0.05 * peaks(opt)[0]),
    "restarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 4),
    "one cycle": lambda opt: lr_scheduler.OneCycleLR(opt, peaks(opt), total_steps=12, cycle_momentum=False),
    "cyclic": lambda opt: lr_scheduler.CyclicLR(
        opt, [lr / 4 for lr in peaks(opt)], peaks(opt), 3, cycle_momentum=False
    ),
    "plateau": lambda opt: lr_scheduler.ReduceLROnPlateau(
        opt, patience=0, min_lr=[0.2 * lr for lr in peaks(opt)]
    ),
    "chained": lambda opt: lr_scheduler.ChainedScheduler(warmup_and_decay(opt)),
    "sequential": lambda opt: lr_scheduler.SequentialLR(opt, warmup_and_decay(opt), [3]),
}


def rates_of_a_run(opt, scheduler, steps):
    rates = []
    for _ in range(steps):
        opt.step()
        scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
        rates.append([float(group["lr"]) for group in opt.param_groups])
    return torch.tensor(rates)


@pytest.fixture(scope="module")
def found():
    """A calibration of AdamW with two groups, one of plain ClippedSGD, and of NormalizedSGD."""
    torch.set_default_dtype(torch.float64)
    model, loss, batches = network()
    opt = torch.optim.AdamW(groups(model, 8.0, 1.0))
    scheduled = calibrate(model, loss, batches, optimizer=opt, schedule="warmup-decay", budget=48)
    plain = calibrate(model, loss, batches, optimizer="ClippedSGD", budget=48)
    normal = calibrate(model, loss, batches, optimizer=NormalizedSGD, budget=48)
    return [scheduled, replace(plain, max_norm=0.5), normal]


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step()`")
@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("stepped", [0, 2, 5])
def test_schedule_keeps_its_shape_wherever_it_stands_and_groups_their_ratio(found, kind, stepped):
    model, _, _ = network()
    cal, rates = found[0], []
    for peak in (1.0, cal.lr):
        opt = ClippedAdamW(groups(model, peak, peak / 8), lr=1.0, max_norm=math.inf)
        scheduler = SCHEDULERS[kind](opt)
        rates_of_a_run(opt, scheduler, stepped)
        if peak == 1.0:
            with pytest.warns(match="lowers lr when progress stops") if kind == "plateau" else nullcontext():
                cal.apply(opt, scheduler)
            assert all(group["max_norm"] == cal.max_norm for group in opt.param_groups)
        rates.append(rates_of_a_run(opt, scheduler, 5))
    if kind == "plateau" and stepped:  # it keeps no peak: what it has come down to is the one that is set
        rates = [rate / rate[0, 0] for rate in rates]
    torch.testing.assert_close(rates[0], rates[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "warned"), [("one cycle", 1), ("sequential", 1), ("plateau", 0), ("cosine", 0)]
)
def test_constant_rate_given_to_a_schedule_that_warms_up_is_said(found, kind, warned):
    model, _, _ = network()
    opt = ClippedSGD(model.parameters(), lr=1.0, max_norm=math.inf)
    scheduler = SCHEDULERS[kind](opt)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found[1].apply(opt, scheduler)
    assert len(said) == warned
    assert all("warmup-decay" in str(warning.message) for warning in said)
    assert peak_lr([opt], [scheduler]) == pytest.approx(found[1].lr)


def test_apply_sets_lr_and_nothing_else_but_a_threshold_that_is_infinite(found):
    model, _, _ = network()
    _, cal, normal = found
    opt = ClippedSGD(model.parameters(), lr=1.0, max_norm=math.inf)
    before = copy.deepcopy(opt.state_dict())
    cal.apply(opt)
    (group,) = opt.param_groups
    assert math.isclose(group["lr"], cal.lr, rel_tol=1e-12)
    assert group["max_norm"] == cal.max_norm
    group.update(lr=1.0, max_norm=math.inf)
    assert opt.state_dict() == before
    for threshold in (123.0, clip_rules.percentile(10)):
        own = ClippedSGD(model.parameters(), lr=1.0, max_norm=threshold)
        with pytest.warns(UserWarning, match="keeps its own, (123|percentile)"):
            cal.apply(own)
        assert own.param_groups[0]["max_norm"] == threshold
        assert own.param_groups[0]["lr"] == pytest.approx(cal.lr)
    own = NormalizedSGD(model.parameters(), lr=1.0, offset=normal.max_norm)
    normal.apply(own)
    assert (own.param_groups[0]["offset"], own.param_groups[0]["lr"]) == (normal.max_norm, normal.lr)


@pytest.mark.parametrize(("own", "outside"), [(0.01, 0.5), (0.5, 0.01), (math.inf, 0.01)])
def test_of_a_threshold_inside_and_one_outside_the_smaller_is_tried(own, outside):
    model, loss, batches = network()
    opt = ClippedAdamW(model.parameters(), lr=1.0, max_norm=own)
    both = calibrate(model, loss, batches, optimizer=opt, max_norm=outside, budget=48)
    alone = ClippedAdamW(model.parameters(), lr=1.0, max_norm=0.01)
    assert both == calibrate(model, loss, batches, optimizer=alone, budget=48)
    assert opt.param_groups[0]["max_norm"] == own


def test_apply_sets_the_threshold_of_an_optimizer_that_clips_by_a_hook():
    model, loss, batches = network()
    opt = torch.optim.AdamW(model.parameters())
    clip(opt, max_norm=math.inf)
    cal = calibrate(model, loss, batches, optimizer=opt, schedule="warmup-decay")
    cal.apply(opt)
    assert opt.param_groups[0]["max_norm"] == cal.max_norm < math.inf
    plain = torch.optim.AdamW(model.parameters())
    with pytest.warns(UserWarning, match="AdamW does not clip. Calibrate with max_norm=math.inf"):
        cal.apply(plain)
    assert "max_norm" not in plain.param_groups[0]
    calibrate(model, loss, batches, optimizer=plain, max_norm=1.0, budget=48).apply(plain)  # says nothing


def test_learning_rate_that_is_a_tensor_stays_that_tensor():
    model, loss, batches = network()
    rate = torch.tensor(0.5)
    opt = torch.optim.AdamW(model.parameters(), lr=rate)
    clip(opt, max_norm=1.0)
    cal = calibrate(model, loss, batches, optimizer=opt, budget=48)
    cal.apply(opt)
    assert opt.param_groups[0]["lr"] is rate
    assert math.isclose(rate.item(), cal.lr, rel_tol=1e-6)


def test_apply_refuses_what_it_was_not_measured_for(found):
    model, _, _ = network()
    cal, parameters = found[1], list(model.parameters())
    opt, other = torch.optim.SGD(parameters, lr=1.0), torch.optim.SGD(parameters, lr=1.0)
    scheduler = lr_scheduler.LinearLR(opt, 0.1)
    for given, words in (
        ((torch.optim.AdamW(parameters),), "measured for SGD with momentum 0, got Adam"),
        ((NormalizedSGD(parameters, lr=1.0, offset=1.0),), "SGD with momentum 0, got NormalizedSGD"),
        ((torch.optim.RMSprop(parameters),), "measured for SGD with momentum 0, got RMSprop"),
        ((torch.optim.SGD(parameters, lr=1.0, momentum=0.9),), "got SGD with momentum 0.9"),
        ((opt,), r"has a scheduler.*Give it too"),
        ((other, scheduler), "LinearLR.* is no scheduler that was made from this optimizer"),
        ((opt, lr_scheduler.LinearLR), "LinearLR.* is no scheduler"),
    ):
        with pytest.raises(ValueError, match=words):
            cal.apply(*given)
    with pytest.raises(TypeError, match="got a LinearLR"):
        cal.apply(scheduler)
    by_tensor = ClippedSGD(parameters, lr=1.0, max_norm=math.inf, norm_scope="tensor")
    with pytest.warns(UserWarning, match="keeps its own, inf"):
        cal.apply(by_tensor)
