"""Calibration finds the step known by hand, follows the problem's scales, and changes nothing."""

import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from curvestep import ClippedAdamW, ClippedSGD, NormalizedSGD, calibrate
from curvestep.calibration.search import ADAM_CLIP_AT, ADAM_SHARE, CLIP_AT, SCHEDULED, SLOPE_SHARE
from curvestep.vectors import global_norm


class Vector(nn.Module):
    """Parameters that are just a point."""

    def __init__(self, x):
        super().__init__()
        self.x = nn.Parameter(torch.as_tensor(x, dtype=torch.get_default_dtype()).clone())


FAR = 1000.0  # added to a loss: then one step takes no large share of it, and no trials compare steps


def mlp(width=12):
    model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))
    inputs, teacher = [torch.randn(64, 6) for _ in range(4)], torch.randn(6, 3)
    batches = [(x, (x @ teacher).argmax(1)) for x in inputs]  # labels that one batch learns from another
    return model, lambda batch: F.cross_entropy(model(batch[0]), batch[1]), batches


# Cases solved by hand


@pytest.mark.parametrize("curvature", [1e-6, 0.3, 4.0, 1e5])
@pytest.mark.parametrize("kappa", [0.5, 1.0, 1.7])
def test_learning_rate_of_an_isotropic_quadratic_is_kappa_over_its_curvature(curvature, kappa):
    model = Vector([3.0, -4.0])
    loss = lambda b: 0.5 * curvature * (model.x.square().sum() + FAR)  # noqa: E731
    cal = calibrate(model, loss, [0] * 4, max_kappa=kappa)
    assert math.isclose(cal.lr, kappa / curvature, rel_tol=1e-9)
    assert math.isclose(cal.grad_norm, 5 * curvature)
    assert math.isclose(cal.max_norm, CLIP_AT[1] * 5 * curvature)
    assert math.isclose(cal.step_cap, cal.lr * cal.max_norm)


def test_loss_that_falls_too_little_ends_the_safe_steps_where_the_gradient_does_not():
    # A gradient that is constant up to a wall: f = -x before 1 and rises after it, x starts at 0.25.
    model = Vector([0.25])

    def loss(batch):
        return torch.where(model.x < 1.0, -model.x, -1.0 + 0.5 * (model.x - 1.0)).sum()

    cal = calibrate(model, loss, [0], max_kappa=1.6)
    # |change| = 1.5 < 1.6 beyond the wall; there -1 + (h - 0.75)/2 = -0.25 - h/10 at h = 1.875.
    assert math.isclose(cal.lr, 1.875, rel_tol=1e-9)


def test_loss_that_reaches_its_floor_ends_the_safe_steps():
    # f = exp(-x): from x = 0 the gradient changes by 1 - exp(-h), never more than itself.
    model = Vector([0.0])
    cal = calibrate(model, lambda b: torch.exp(-model.x).sum(), [0])
    # 1 - exp(-h) = h/10 at 9.9995...; the loss is taken to be linear between neighbours of the lattice.
    assert math.isclose(cal.lr, 9.99954, rel_tol=1e-4)


@pytest.mark.parametrize("optimizer", ["ClippedSGD", "AdamW"])
@pytest.mark.parametrize("size", [4, 16, 64])
def test_batches_that_one_step_fits_give_a_bounded_answer_and_a_warning(optimizer, size):
    # More features than samples: a step can end at a loss of zero, where the gradient ends, too.
    model = nn.Linear(256, 10)
    batches = [(torch.randn(size, 256), torch.randint(10, (size,)))]  # others would speak of noise

    def found(kappa):
        return calibrate(
            model, lambda b: F.cross_entropy(model(b[0]), b[1]), batches, optimizer=optimizer, max_kappa=kappa
        )

    half, whole = found(0.5), found(1.0)
    assert half.lr < whole.lr < 15 * half.lr
    assert any("one step fits" in words for words in whole.warnings)
    assert not any("one step fits" in words for words in half.warnings)


def test_median_over_the_batches_is_taken():
    model = Vector([1.0, 1.0])
    loss = lambda L: 0.5 * L * (model.x.square().sum() + FAR)  # noqa: E731
    cal = calibrate(model, loss, [1.0, 2.0, 4.0], num_batches=3)
    assert math.isclose(cal.lr, 0.5, rel_tol=1e-9)
    assert math.isclose(cal.grad_norm, 2 * math.sqrt(2))
    low, high = cal.lr_interval
    assert low < 0.5 < high
    assert [round(batch.safe_step, 9) for batch in cal.curve] == [1.0, 0.5, 0.25]


def test_curve_holds_every_measured_step():
    model = Vector([3.0, -4.0])
    cal = calibrate(model, lambda L: 0.5 * L * (model.x.square().sum() + FAR), [2.0] * 4)
    for batch in cal.curve:
        steps = [p.step for p in batch.points]
        assert steps == sorted(steps)
        for p in batch.points:
            assert math.isclose(p.kappa, 2.0 * p.step)
            assert math.isclose(p.loss, 25.0 * (1 - 2.0 * p.step) ** 2 + FAR)
            assert p.safe == (p.step <= 0.5)
    # One gradient a batch at the start, one more to see that it repeats itself, one a point.
    assert cal.num_gradients == 1 + len(cal.curve) + sum(len(batch.points) for batch in cal.curve)


def test_start_at_the_origin_is_measured():
    model = Vector([0.0, 0.0])
    cal = calibrate(model, lambda b: 0.5 * 3.0 * (model.x - torch.tensor([1.0, 2.0])).square().sum(), [0] * 4)
    assert math.isclose(cal.lr, 1 / 3, rel_tol=1e-9)


@pytest.mark.parametrize("std", [1e-6, 1e-4, 1e-2])
@pytest.mark.parametrize("optimizer", ["ClippedSGD", "AdamW"])
def test_small_start_gives_the_answer_of_a_start_at_the_origin(std, optimizer):
    model, batches = nn.Linear(6, 3), mlp()[2]

    def rate(std):
        nn.init.normal_(model.weight, std=std)
        nn.init.zeros_(model.bias)
        loss = lambda b: F.cross_entropy(model(b[0]), b[1]) + FAR  # noqa: E731
        return calibrate(model, loss, batches, optimizer=optimizer, num_batches=1).lr

    assert math.isclose(rate(std), rate(0.0), rel_tol=0.05)


def test_length_of_a_parameter_that_is_not_used_does_not_matter():
    model, loss, batches = mlp()
    expected = calibrate(model, loss, batches)
    model.unused = nn.Parameter(torch.tensor([1e12]))
    found = calibrate(model, lambda b: F.cross_entropy(model[:3](b[0]), b[1]), batches)
    assert found == expected


# For other optimizers


def test_momentum_divides_by_its_effective_step():
    model, loss, batches = mlp()
    plain, heavy = calibrate(model, loss, batches), calibrate(model, loss, batches, momentum=0.9)
    assert math.isclose(heavy.lr, 0.1 * plain.lr, rel_tol=1e-12)
    assert math.isclose(heavy.step_cap, plain.step_cap, rel_tol=1e-12)
    assert heavy.max_norm == plain.max_norm


def test_normalized_sgd_takes_the_same_step_at_small_gradients():
    model, loss, batches = mlp()
    plain = calibrate(model, loss, batches)
    normal = calibrate(model, loss, batches, optimizer=NormalizedSGD)
    assert math.isclose(normal.lr / normal.offset, plain.lr, rel_tol=1e-12)
    assert math.isclose(normal.step_cap, plain.step_cap, rel_tol=1e-12)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adam, ClippedAdamW, "AdamW"])
def test_adam_goes_along_the_signs_to_where_the_slope_ends(optimizer):
    # f = 1/2 sum L_i x_i^2 along sign(x): the slope ends at h = sum |L_i x_i| / sum L_i.
    model, L = Vector([3.0, -4.0]), torch.tensor([1.0, 2.0])
    cal = calibrate(model, lambda b: 0.5 * (L * model.x.square()).sum(), [0] * 4, optimizer=optimizer)
    assert math.isclose(cal.lr, SLOPE_SHARE * (3.0 + 8.0) / 3.0, rel_tol=1e-9)


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW"])
def test_adam_gets_words_of_its_own_and_a_threshold_under_a_schedule(optimizer):
    model, loss, batches = mlp()
    constant = calibrate(model, loss, batches, optimizer=optimizer)
    assert constant.max_norm == constant.step_cap == math.inf
    assert "max_norm" not in str(constant)
    assert "the slope of a batch's loss along it" in str(constant)
    cal = calibrate(model, loss, batches, optimizer=optimizer, schedule="warmup-decay")
    assert math.isclose(cal.max_norm, ADAM_CLIP_AT[0] * cal.grad_norm)
    assert cal.step_cap == math.inf
    assert "step_cap" not in str(cal)
    assert "along the signs of the gradient" in str(cal)
    narrow = calibrate(model, loss, batches, optimizer=optimizer, clip_at=0.7)
    assert math.isclose(narrow.max_norm, 0.7 * cal.grad_norm)


def test_change_along_signs_counts_coordinates_that_the_slope_cannot_see():
    # Along sign(g) = (1, 1): L = (3, -1) makes the slope fall by 2h only, and the gradient change by 4h.
    model, L = Vector([1.0, -1.0]), torch.tensor([3.0, -1.0])
    loss = lambda b: 0.5 * (L * model.x.square()).sum()  # noqa: E731
    cal = calibrate(model, loss, [0] * 4, optimizer="AdamW", schedule="warmup-decay")
    assert math.isclose(cal.lr, SCHEDULED["signs"] * ADAM_SHARE * 4.0 / 4.0, rel_tol=1e-9)
    assert math.isclose(
        calibrate(model, loss, [0] * 4, optimizer="AdamW").lr, SLOPE_SHARE * 4.0 / 2.0, rel_tol=1e-9
    )


@pytest.mark.parametrize(("optimizer", "enters"), [("Adam", True), ("AdamW", False)])
def test_decay_of_adam_is_part_of_the_loss_and_that_of_adamw_is_not(optimizer, enters):
    model, L = Vector([3.0, -4.0]), torch.tensor([1.0, 2.0])

    def loss(decay):
        return 0.5 * ((L + decay) * model.x.square()).sum()

    cal = calibrate(model, lambda b: loss(0.0), [0] * 4, optimizer=optimizer, weight_decay=10.0)
    penalised = calibrate(model, lambda b: loss(10.0 if enters else 0.0), [0] * 4, optimizer=optimizer)
    assert math.isclose(cal.lr, penalised.lr, rel_tol=1e-9)


def test_weight_decay_belongs_to_the_loss():
    model = Vector([3.0, -4.0])
    penalised = calibrate(model, lambda b: (0.5 * 2.0 + 0.5 * 0.5) * model.x.square().sum(), [0] * 4)
    cal = calibrate(model, lambda b: 0.5 * 2.0 * model.x.square().sum(), [0] * 4, weight_decay=0.5)
    assert math.isclose(cal.lr, penalised.lr, rel_tol=1e-9)
    assert math.isclose(cal.lr, 1 / 2.5, rel_tol=1e-9)
    assert math.isclose(cal.grad_norm, 10.0)  # of the loss alone: the optimizer clips before it decays


def test_gradient_accumulation_gives_the_numbers_of_the_whole_batch():
    model, loss, batches = mlp()

    def accumulated(batch):
        total = 0.0
        for x, y in zip(batch[0].chunk(4), batch[1].chunk(4), strict=True):
            part = F.cross_entropy(model(x), y) / 4
            part.backward()
            total += part.item()
        return total

    whole, parts = calibrate(model, loss, batches), calibrate(model, accumulated, batches)
    assert math.isclose(whole.lr, parts.lr, rel_tol=1e-9)
    assert math.isclose(whole.max_norm, parts.max_norm, rel_tol=1e-9)


def test_sparse_frozen_and_unused_parameters_are_no_obstacle():
    class Words(nn.Module):
        def __init__(self, sparse):
            super().__init__()
            torch.manual_seed(3)
            self.rows = nn.Embedding(9, 4, sparse=sparse)
            self.out = nn.Linear(4, 9)
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.unused = nn.Linear(2, 2)

        def forward(self, x):
            return self.out(self.frozen(self.rows(x)))

    batches = [torch.randint(9, (2, 12)) for _ in range(4)]
    found = []
    for sparse in (False, True):
        model = Words(sparse)
        found.append(calibrate(model, lambda b, m=model: F.cross_entropy(m(b[0]), b[1]), batches))
    assert math.isclose(found[0].lr, found[1].lr, rel_tol=1e-12)


# The answer changes as the problem does


@pytest.mark.parametrize("scale", [2.0**-30, 1e-3, 7.0, 2.0**20])
@pytest.mark.parametrize("optimizer", ["ClippedSGD", "NormalizedSGD", "AdamW"])
def test_loss_times_s_changes_learning_rate_and_threshold_exactly(scale, optimizer):
    model, loss, batches = mlp()
    cal = calibrate(model, loss, batches, optimizer=optimizer)
    scaled = calibrate(model, lambda b: scale * loss(b), batches, optimizer=optimizer)
    # A step length and a change of the parameters do not know the scale of the loss.
    factor = 1 / scale if optimizer == "ClippedSGD" else 1.0
    exact = math.log2(scale).is_integer()
    assert math.isclose(scaled.lr, cal.lr * factor, rel_tol=1e-15 if exact else 1e-9)
    assert math.isclose(scaled.max_norm, cal.max_norm * scale, rel_tol=1e-15 if exact else 1e-9)
    assert scaled.num_gradients == cal.num_gradients


@pytest.mark.parametrize("scale", [2.0**-10, 0.01, 3.0, 2.0**10])
@pytest.mark.parametrize(("optimizer", "power"), [("ClippedSGD", 2), ("NormalizedSGD", 1), ("AdamW", 1)])
def test_parameters_times_s_change_the_learning_rate_exactly(scale, optimizer, power):
    model, loss, batches = mlp()
    cal = calibrate(model, loss, batches, optimizer=optimizer)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(scale)

    def same_loss(batch):
        values = {name: p / scale for name, p in model.named_parameters()}
        return F.cross_entropy(torch.func.functional_call(model, values, (batch[0],)), batch[1])

    scaled = calibrate(model, same_loss, batches, optimizer=optimizer)
    exact = math.log2(scale).is_integer()
    assert math.isclose(scaled.lr, cal.lr * scale**power, rel_tol=1e-15 if exact else 1e-9)
    assert math.isclose(scaled.max_norm, cal.max_norm / scale, rel_tol=1e-15 if exact else 1e-9)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("optimizer", ["ClippedSGD", "AdamW"])
def test_order_of_the_batches_does_not_matter(seed, optimizer):
    model, loss, batches = mlp()
    options = {"optimizer": optimizer, "num_batches": len(batches)}  # or the first ones may be enough
    cal = calibrate(model, loss, batches, **options)
    shuffled = random.Random(seed).sample(batches, len(batches))
    again = calibrate(model, loss, shuffled, **options)
    assert (again.lr, again.max_norm, again.step_cap) == (cal.lr, cal.max_norm, cal.step_cap)


@pytest.mark.parametrize("constant", [-1e3, 1e3])
def test_constant_added_to_the_loss_does_not_matter(constant):
    model, loss, batches = mlp()
    assert math.isclose(
        calibrate(model, lambda b: loss(b) + constant, batches).lr,
        calibrate(model, loss, batches).lr,
        rel_tol=1e-9,
    )


# The budget


def test_more_batches_are_asked_for_while_they_spread():
    model = Vector([1.0, 1.0])
    loss = lambda L: L * (model.x.square().sum() + FAR)  # noqa: E731
    close = calibrate(model, loss, [1.0] * 8)
    spread = calibrate(model, loss, [1.0, 2.0, 0.5, 4.0, 1.0, 2.0, 0.5, 4.0])
    assert len(close.curve) == 3
    assert len(spread.curve) > 3
    assert spread.lr_interval[1] / spread.lr_interval[0] > close.lr_interval[1] / close.lr_interval[0]


@pytest.mark.parametrize("scale", [1e-9, 1e-5, 1.0, 1e4])
def test_never_more_than_forty_gradients(scale):
    calls = 0
    model = Vector(torch.randn(5))

    def loss(L):
        nonlocal calls
        calls += torch.is_grad_enabled()
        return scale * L * model.x.square().sum()

    batches = [math.exp(random.Random(i).uniform(-1, 1)) for i in range(30)]
    cal = calibrate(model, loss, batches)
    assert cal.num_gradients == calls
    assert 20 < calls <= 40


def test_a_data_loader_is_read_only_as_far_as_needed():
    model, loss, batches = mlp()
    loader = iter(batches * 10)
    cal = calibrate(model, lambda b: loss(b) + FAR, loader)
    assert len(list(loader)) == 40 - len(cal.curve)


# Nothing is changed


class Carried(nn.Module):
    """LSTM that carries its state from batch to batch."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.lstm = nn.LSTM(5, 7, 2, dropout=0.3, batch_first=True)
        self.out = nn.Linear(7, 11)
        self.state = None

    def forward(self, x):
        out, state = self.lstm(self.embedding(x), self.state)
        self.state = tuple(s.detach() for s in state)
        return self.out(out).flatten(0, 1)


def dropout():
    return nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.4), nn.Tanh(), nn.Linear(12, 3)), (16, 6), None


def batchnorm():
    layers = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    return nn.Sequential(*layers), (16, 2, 6, 6), None


def lstm():
    return Carried(), (4, 9), 11


def transformer():
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=True)
    layers = nn.Embedding(11, 8), nn.TransformerEncoder(layer, 2), nn.Linear(8, 11), nn.Flatten(0, 1)
    return nn.Sequential(*layers), (4, 9), 11


@pytest.mark.parametrize("make", [dropout, batchnorm, lstm, transformer])
@pytest.mark.parametrize("with_gradients", [False, True])
def test_model_is_bit_identical_afterwards(make, with_gradients):
    model, shape, words = make()
    if words:
        batches = [
            (torch.randint(words, shape), torch.randint(words, (shape[0] * shape[1],))) for _ in range(4)
        ]
    else:
        batches = [(torch.randn(shape), torch.randint(3, shape[:1])) for _ in range(4)]

    def loss(batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    if with_gradients:
        loss(batches[0]).backward()
    values = [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
    grads = [(p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    attributes = {k: v for k, v in vars(model).items() if not k.startswith("_")}
    states = (
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state(legacy=False)["state"]["key"].tolist(),
    )
    cal = calibrate(model, loss, batches)
    assert cal.lr > 0
    for a, b in zip(values, (*model.parameters(), *model.buffers()), strict=True):
        assert torch.equal(a, b)
    for p, (grad, copy) in zip(model.parameters(), grads, strict=True):
        assert p.grad is grad
        assert copy is None or torch.equal(grad, copy)
    assert all(vars(model)[name] is value for name, value in attributes.items())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state(legacy=False)["state"]["key"].tolist() == states[2]


def test_loader_that_shuffles_leaves_the_random_state_alone():
    model, loss, _ = mlp()
    samples = torch.utils.data.TensorDataset(torch.randn(96, 6), torch.randint(3, (96,)))
    loader = torch.utils.data.DataLoader(samples, batch_size=16, shuffle=True)
    states = torch.get_rng_state(), random.getstate()
    calibrate(model, loss, loader)
    assert torch.equal(torch.get_rng_state(), states[0])

    def broken(batch):
        random.random()
        raise RuntimeError("no loss")

    with pytest.raises(RuntimeError, match="no loss"):
        calibrate(model, broken, loader)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_training_goes_as_if_it_had_not_been_calibrated():
    finals = []
    for first in (False, True):
        torch.manual_seed(0)
        model, loss, batches = mlp()
        cal = calibrate(model, loss, batches) if first else None
        opt = ClippedSGD(model.parameters(), lr=0.5, max_norm=1.0)
        for batch in batches:
            opt.zero_grad()
            loss(batch).backward()
            opt.step()
        finals.append((cal, [p.detach().clone() for p in model.parameters()]))
    assert all(torch.equal(a, b) for a, b in zip(finals[0][1], finals[1][1], strict=True))


def test_calibrated_pair_trains_and_the_words_name_it():
    model, loss, batches = mlp()
    cal = calibrate(model, loss, batches)
    opt = ClippedSGD(model.parameters(), lr=cal.lr, max_norm=cal.max_norm)
    first = sum(loss(b).item() for b in batches)
    for _ in range(50):
        for batch in batches:
            opt.zero_grad()
            loss(batch).backward()
            opt.step()
    assert sum(loss(b).item() for b in batches) < 0.5 * first
    assert f"lr {cal.lr:.3g}" in str(cal)
    assert "90 % interval" in str(cal)
    assert len(cal.reasons) == 2


def test_grad_norm_is_the_median_of_the_batches():
    model, loss, batches = mlp()
    cal = calibrate(model, loss, batches[:3])
    norms = []
    for batch in batches[:3]:
        model.zero_grad()
        loss(batch).backward()
        norms.append(global_norm([p.grad for p in model.parameters()]).item())
    assert math.isclose(cal.grad_norm, sorted(norms)[1], rel_tol=1e-12)
    assert [batch.grad_norm for batch in cal.curve] == norms


def test_methods_with_weaker_evidence_say_so_and_the_others_do_not():
    model = Vector([3.0, -4.0])
    for optimizer, weaker in (
        ("ClippedSGD", False),
        ("SGD", False),
        ("AdamW", True),
        ("NormalizedSGD", True),
    ):
        cal = calibrate(model, lambda b: model.x.square().sum(), [0] * 4, optimizer=optimizer)
        assert any("evidence is weaker" in words for words in cal.warnings) == weaker
        assert ("evidence is weaker" in str(cal)) == weaker
