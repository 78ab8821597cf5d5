"""An optimizer says itself what it is; its learning rates follow the calibration wherever they are kept."""

import copy
import math
from statistics import median

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

from curvestep import ClippedAdamW, ClippedSGD, NormalizedSGD, calibrate, clip
from curvestep.calibration.method import method_of
from curvestep.calibration.search import ADAM_SHARE, SCHEDULED


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    inputs, teacher = [torch.randn(64, 6) for _ in range(4)], torch.randn(6, 3)
    batches = [(x, (x @ teacher).argmax(1)) for x in inputs]
    return model, lambda batch: F.cross_entropy(model(batch[0]), batch[1]), batches


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
        (lambda p: ClippedSGD(p, lr=3.0, max_norm=1.0), {}),
        (lambda p: torch.optim.SGD(p, lr=7.0), {"optimizer": "SGD"}),
        (
            lambda p: torch.optim.SGD(p, lr=1e-9, momentum=0.9, weight_decay=0.01),
            {"optimizer": "SGD", "momentum": 0.9, "weight_decay": 0.01},
        ),
        (lambda p: NormalizedSGD(p, lr=3.0, offset=1.0), {"optimizer": NormalizedSGD}),
        (lambda p: torch.optim.AdamW(p, lr=3.0, weight_decay=0.3), {"optimizer": "AdamW"}),
        (
            lambda p: torch.optim.Adam(p, weight_decay=0.3),
            {"optimizer": torch.optim.Adam, "weight_decay": 0.3},
        ),
        (lambda p: ClippedAdamW(p, lr=0.1, max_norm=1.0), {"optimizer": ClippedAdamW}),
    ],
)
def test_instance_gives_the_numbers_of_its_class_with_its_settings(make, options):
    model, loss, batches = network()
    assert calibrate(model, loss, batches, optimizer=make(model.parameters())) == calibrate(
        model, loss, batches, **options
    )


def test_decay_of_each_group_is_its_own():
    x, y = nn.Parameter(torch.tensor([2.0])), nn.Parameter(torch.tensor([1.0]))
    model = nn.ParameterList([x, y])
    opt = torch.optim.SGD([{"params": [x], "weight_decay": 3.0}, {"params": [y]}], lr=1.0)
    cal = calibrate(model, lambda b: 0.5 * (x.square() + y.square()).sum(), [0] * 3, optimizer=opt)
    penalised = calibrate(model, lambda b: 0.5 * (4.0 * x.square() + y.square()).sum(), [0] * 3)
    assert math.isclose(cal.lr, penalised.lr, rel_tol=1e-9)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("ratio", [0.25, 4.0])
def test_groups_of_unequal_rates_are_measured_as_parameters_of_another_scale(optimizer, ratio):
    # A learning rate r times as large is that of parameters in units sqrt(r) times (Adam: r times) longer.
    model, loss, batches = network()
    given, count = optimizer(groups(model, 1.0, ratio)), len(batches)
    unequal = calibrate(model, loss, batches, optimizer=given, num_batches=count)
    scale = ratio if optimizer is torch.optim.AdamW else math.sqrt(ratio)
    with torch.no_grad():
        for p in model[2].parameters():
            p.div_(scale)

    def same(batch):
        values = {name: p * scale if name.startswith("2") else p for name, p in model.named_parameters()}
        return F.cross_entropy(torch.func.functional_call(model, values, (batch[0],)), batch[1])

    given = optimizer(model.parameters(), lr=1.0)
    plain = calibrate(model, same, batches, optimizer=given, num_batches=count)
    # Given relative to the largest; the lattices differ, so crossings are interpolated at other places.
    assert math.isclose(unequal.lr, max(1.0, ratio) * plain.lr, rel_tol=0.02)
    assert unequal.num_gradients <= 40


def test_parameters_that_the_optimizer_leaves_out_do_not_move():
    model, loss, batches = network()
    half = torch.optim.SGD(model[2].parameters(), lr=1.0)
    found = calibrate(model, loss, batches, optimizer=half)
    model[0].requires_grad_(False)
    assert math.isclose(found.lr, calibrate(model, loss, batches).lr, rel_tol=1e-9)
    with pytest.raises(ValueError, match="trains no parameter that the loss depends on"):
        calibrate(model, loss, batches, optimizer=torch.optim.SGD(model[0].parameters(), lr=1.0))


def test_rates_are_read_from_the_peak_of_a_schedule_that_is_there_already():
    model, loss, batches = network()
    opt = torch.optim.AdamW(groups(model, 1.0, 0.1))
    plain = calibrate(model, loss, batches, optimizer=opt)
    lr_scheduler.LambdaLR(opt, lambda step: step / 10)  # zero at the start
    assert calibrate(model, loss, batches, optimizer=opt) == plain
    assert {group["lr"] for group in opt.param_groups} == {0.0}


def test_what_an_instance_cannot_say_is_refused():
    model, loss, batches = network()
    parameters = list(model.parameters())

    def refused(optimizer, match, **options):
        with pytest.raises(ValueError, match=match):
            calibrate(model, loss, batches, optimizer=optimizer, **options)

    refused(torch.optim.SGD(parameters, lr=0.0), "no learning rate above zero")
    refused(torch.optim.SGD(parameters, lr=1.0, maximize=True), "maximises")
    refused(torch.optim.RMSprop(parameters), "must be one of")
    refused(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), "1 parameters that are not in `model`")
    refused(torch.optim.SGD(parameters, lr=1.0), "`momentum` is read from the optimizer", momentum=0.9)
    refused(torch.optim.AdamW(parameters), "`weight_decay` is read", weight_decay=0.1)
    unequal = [{"params": parameters[:1], "momentum": 0.9}, {"params": parameters[1:]}]
    refused(torch.optim.SGD(unequal, lr=1.0), "unequal momentum")
    with pytest.raises(ValueError, match=r"must be one of.*instance"):
        calibrate(model, loss, batches, optimizer="Lion")


def test_optimizer_of_a_method_has_its_groups_and_options():
    model, _, _ = network()
    given = ClippedAdamW(groups(model, 0.1, 0.2, weight_decay=0.3), lr=1.0, max_norm=1.0, betas=(0.8, 0.95))
    built = method_of(given, model).build(list(model.parameters()), 1e-3)
    assert [group["lr"] for group in built.param_groups] == [0.5e-3, 1e-3]
    assert all(group["betas"] == (0.8, 0.95) for group in built.param_groups)
    assert all(group["weight_decay"] == 0.3 for group in built.param_groups)


# Schedules


@pytest.mark.parametrize(
    ("options", "kind"),
    [({}, "plain"), ({"momentum": 0.9}, "momentum")],
)
def test_peak_of_a_schedule_is_a_multiple_and_the_threshold_is_kept(options, kind):
    model, loss, batches = network()
    constant = calibrate(model, loss, batches, **options)
    peak = calibrate(model, loss, batches, schedule="warmup-decay", **options)
    assert math.isclose(peak.lr, SCHEDULED[kind] * constant.lr, rel_tol=1e-12)
    assert peak.max_norm == constant.max_norm
    assert (constant.schedule, peak.schedule) == ("constant", "warmup-decay")
    assert ("the peak of a warm-up and decay" in str(peak)) > ("peak" in str(constant))
    with pytest.raises(ValueError, match="`schedule` must be one of 'constant', 'warmup-decay'"):
        calibrate(model, loss, batches, schedule="cosine")


def test_words_for_adamw_under_a_schedule_speak_of_warm_up():
    model, loss, batches = network()
    cal = calibrate(model, loss, batches, optimizer="AdamW", schedule="warmup-decay")
    assert "Warm up over a tenth" in str(cal)
    step = median(batch.safe_step for batch in cal.curve)
    assert math.isclose(cal.lr, SCHEDULED["signs"] * ADAM_SHARE * step)


# apply


def schedule_of(opt, kind):
    if kind == "lambda":
        return lr_scheduler.LambdaLR(opt, lambda step: min(1.0, (step + 1) / 4))
    if kind == "cosine":
        return lr_scheduler.CosineAnnealingLR(opt, 10, eta_min=0.05 * opt.param_groups[0]["lr"])
    if kind == "restarts":
        return lr_scheduler.CosineAnnealingWarmRestarts(opt, 4)
    if kind == "one cycle":
        peaks = [group["lr"] for group in opt.param_groups]
        return lr_scheduler.OneCycleLR(opt, peaks, total_steps=12, cycle_momentum=False)
    if kind == "cyclic":
        peaks = [group["lr"] for group in opt.param_groups]
        return lr_scheduler.CyclicLR(opt, [lr / 4 for lr in peaks], peaks, 3, cycle_momentum=False)
    if kind == "plateau":
        floors = [0.2 * group["lr"] for group in opt.param_groups]
        return lr_scheduler.ReduceLROnPlateau(opt, patience=0, min_lr=floors)
    warmup, decay = lr_scheduler.LinearLR(opt, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(opt, 7)
    if kind == "chained":
        return lr_scheduler.ChainedScheduler([warmup, decay])
    return lr_scheduler.SequentialLR(opt, [warmup, decay], [3])


KINDS = ("lambda", "cosine", "restarts", "one cycle", "cyclic", "plateau", "chained", "sequential")


def rates_of_a_run(opt, scheduler, steps):
    rates = []
    for _ in range(steps):
        opt.step()
        scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
        rates.append([float(group["lr"]) for group in opt.param_groups])
    return torch.tensor(rates)


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step()`")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stepped", [0, 2, 5])
def test_schedule_keeps_its_shape_wherever_it_stands_and_groups_their_ratio(kind, stepped):
    model, loss, batches = network()
    cal = calibrate(model, loss, batches, optimizer=torch.optim.AdamW(groups(model, 8.0, 1.0)))
    rates = []
    for peak in (1.0, cal.lr):
        opt = ClippedAdamW(groups(model, peak, peak / 8), lr=1.0, max_norm=math.inf)
        scheduler = schedule_of(opt, kind)
        rates_of_a_run(opt, scheduler, stepped)
        if peak == 1.0:
            cal.apply(opt, scheduler)
            assert all(group["max_norm"] == cal.max_norm for group in opt.param_groups)
        rates.append(rates_of_a_run(opt, scheduler, 5))
    if kind == "plateau" and stepped:  # it keeps no peak: what it has come down to is the one that is set
        rates = [rate / rate[0, 0] for rate in rates]
    torch.testing.assert_close(rates[0], rates[1], rtol=1e-9, atol=1e-12)


def test_apply_sets_lr_and_threshold_and_nothing_else():
    model, loss, batches = network()
    opt = ClippedSGD(model.parameters(), lr=1.0, max_norm=math.inf, momentum=0.9)
    before = copy.deepcopy(opt.state_dict())
    cal = calibrate(model, loss, batches, optimizer=opt, schedule="warmup-decay")
    assert opt.state_dict() == before
    cal.apply(opt)
    (group,) = opt.param_groups
    assert math.isclose(group["lr"], cal.lr, rel_tol=1e-12)
    assert group["max_norm"] == cal.max_norm
    normal = NormalizedSGD(model.parameters(), lr=1.0, offset=1.0)
    cal = calibrate(model, loss, batches, optimizer=normal)
    cal.apply(normal)
    assert (normal.param_groups[0]["offset"], normal.param_groups[0]["lr"]) == (cal.offset, cal.lr)


def test_apply_sets_the_threshold_of_an_optimizer_that_clips_by_a_hook():
    model, loss, batches = network()
    opt = torch.optim.AdamW(model.parameters())
    clip(opt, max_norm=math.inf)
    cal = calibrate(model, loss, batches, optimizer=opt, schedule="warmup-decay")
    cal.apply(opt)
    assert opt.param_groups[0]["max_norm"] == cal.max_norm < math.inf
    plain = torch.optim.AdamW(model.parameters())
    with pytest.warns(UserWarning, match="this AdamW does not clip: call `curvestep.clip"):
        cal.apply(plain)
    assert "max_norm" not in plain.param_groups[0]


def test_learning_rate_that_is_a_tensor_stays_that_tensor():
    model, loss, batches = network()
    rate = torch.tensor(0.5)
    opt = torch.optim.AdamW(model.parameters(), lr=rate)
    cal = calibrate(model, loss, batches, optimizer=opt)
    cal.apply(opt)
    assert opt.param_groups[0]["lr"] is rate
    assert math.isclose(rate.item(), cal.lr, rel_tol=1e-6)


def test_apply_refuses_what_it_was_not_measured_for():
    model, loss, batches = network()
    cal = calibrate(model, loss, batches)

    def refused(optimizer, match, *schedulers):
        with pytest.raises(ValueError, match=match):
            cal.apply(optimizer, *schedulers)

    refused(torch.optim.AdamW(model.parameters()), "measured for ClippedSGD, got a AdamW")
    refused(torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9), r"momentum 0, got \[0.9\]")
    refused(
        ClippedSGD(model.parameters(), lr=1.0, max_norm=1.0, norm_scope="tensor"),
        "this optimizer clips each tensor",
    )
    opt, other = torch.optim.SGD(model.parameters(), lr=1.0), torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = lr_scheduler.LinearLR(opt, 0.1)
    refused(opt, r"has a scheduler.*Give it too")
    refused(other, "LinearLR belongs to another optimizer", scheduler)
    clip(opt, max_norm=1.0)
    cal.apply(opt, scheduler)
