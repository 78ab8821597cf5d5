"""What cannot be calibrated is refused in one line that names the argument; what is unusual is said."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from curvestep import calibrate
from curvestep.calibration.loaders import Readable
from tests.calibration.models import kinds, network
from tests.models import batch_loss, mlp


def setting(dtype=torch.float64):
    model = mlp(4, 8, 3).to(dtype)
    batches = [(torch.randn(8, 4, dtype=dtype), torch.randint(3, (8,))) for _ in range(6)]
    return model, batch_loss(model), batches


def used_up(batches):
    iterator = iter(batches)
    list(iterator)
    return iterator


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda m, f, b: (m, b, f), TypeError, r"`loss_of_batch` must be a function.*got a list.*The order"),
        (lambda m, f, b: (m, f(b[0]), b), TypeError, r"`loss_of_batch` must be a function.*got a Tensor"),
        (lambda m, f, b: (list(m), f, b), TypeError, "`model` must be a torch module, got a list"),
        (lambda m, f, b: (nn.LazyLinear(3), f, b), ValueError, "Run one forward pass first"),
        *((lambda m, f, b, w=w: (m, f, w), TypeError, "`batches` must be a sequence.*Give a list")
          for w in ({"x": 1}, None, "batches", torch.ones(3))),
        (lambda m, f, b: (m, f, b[0]), TypeError, "`batches` must be a sequence.*got one batch"),
        (lambda m, f, b: (m, f, list(b[0])), TypeError, "`batches` must be a sequence"),
        (lambda m, f, b: (m, f, torch.utils.data.DataLoader(x for x in b)), TypeError,
         r"`batches` is a DataLoader over a generator.*Make a list of it"),
        (lambda m, f, b: (m, f, []), ValueError, r"at least three batches.*got 0"),
        (lambda m, f, b: (m, f, used_up(b)), ValueError, "used-up iterator"),
        (lambda m, f, b: (m, f, iter(b[:1])), ValueError, "two others to judge by, got 1"),
        (lambda m, f, b: (m, f, b[:2]), ValueError, "two others to judge by, got 2"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("optimizer", ["AdamW", "ClippedSGD"])
def test_arguments_of_another_kind_are_named(change, error, words, optimizer):
    with pytest.raises(error, match=words):
        calibrate(*change(*setting()), optimizer=optimizer)


OTHER = nn.Linear(4, 3, dtype=torch.float64)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda m, f: lambda b: f(b).item(), ValueError, "`loss_of_batch` gives no gradient.*not `.item"),
        (lambda m, f: lambda b: b[0].square().mean(), ValueError, "`loss_of_batch` gives no gradient"),
        (lambda m, f: lambda b: OTHER(b[0]).sum(), ValueError, "`loss_of_batch` gives no gradient of"),
        (lambda m, f: lambda b: F.cross_entropy(m(b[0]), b[1], reduction="none"), ValueError,
         r"`loss_of_batch` must return a scalar.*\(8,\).*\.mean\(\)"),
        (lambda m, f: lambda b: (f(b), 1), TypeError, "the loss alone, got a tuple"),
        (lambda m, f: lambda b: f(b) + math.nan, ValueError, r"loss at the start is nan.*initialisation"),
        (lambda m, f: lambda b: f(b) + math.inf, ValueError, "loss at the start is inf"),
        (lambda m, f: lambda b: f(b) + (0.0 * m[0].weight).sum().sqrt(), ValueError, "not finite although"),
        (lambda m, f: lambda b: 0.0 * f(b) + 1.0, ValueError, "gradient at the start is zero"),
        (lambda m, f: lambda b: f((b[0] + torch.randn(8, 4, generator=DRAW), b[1])), ValueError,
         r"`loss_of_batch` gave two different gradients.*Draw the batch before"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("optimizer", ["AdamW", "ClippedSGD"])
def test_losses_that_cannot_be_trained_are_refused_and_nothing_changes(change, error, words, optimizer):
    model, loss, batches = setting()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(error, match=words):
        calibrate(model, change(model, loss), batches, optimizer=optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in (*model.parameters(), *OTHER.parameters()))


DRAW = torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"momentum": 1.0}, r"`momentum` must be in \[0, 1\)"),
        ({"optimizer": "AdamW", "momentum": 0.9}, "`momentum` is SGD's, and AdamW is another"),
        ({"weight_decay": -1.0}, "`weight_decay`"),
        ({"max_norm": 0.0}, "`max_norm`"),
        ({"budget": 3}, "`budget` must be at least 48 gradients, three trials, got 3"),
        ({"budget": -1}, "`budget`"),
        ({"budget": 0.05}, "`budget` must be at least 48.*got 0.*share of `num_steps`: give both"),
        ({"budget": 0.01, "num_steps": 100}, "at least 48 gradients.*got 1"),
        ({"num_steps": 0}, "`num_steps`"),
        ({"schedule": "cosine"}, "must be 'constant' or 'warmup-decay', got 'cosine'.* is 'warmup-decay'"),
    ],
)
def test_wrong_options_are_named(options, words):
    model, loss, batches = setting()
    with pytest.raises(ValueError, match=words):
        calibrate(model, loss, batches, **options)
    with pytest.raises(TypeError, match="`momentum`"):
        calibrate(model, loss, batches, momentum="0.9")


def test_loss_as_a_number_of_numpy_is_a_number():
    model, loss, batches = setting()

    def backward(batch):
        loss(batch).backward()
        return np.float32(loss(batch).item())

    found = [calibrate(model, given, batches).lr for given in (backward, loss)]
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_loss_of_a_later_batch_that_is_not_finite_is_refused_by_sgd():
    model, loss, batches = setting()
    batches[3] = (math.nan * batches[3][0], batches[3][1])
    with pytest.raises(ValueError, match="loss at the start is nan"):
        calibrate(model, loss, batches)


def test_gradient_so_small_that_no_step_fits_the_precision():
    model, loss, batches = setting(torch.float32)
    with pytest.raises(ValueError, match=r"beyond the parameters' precision.*Multiply the loss"):
        calibrate(model, lambda b: 1e-38 * loss(b), batches)


def test_step_that_is_never_too_long_or_never_works():
    model, _, batches = setting()
    start = model[0].weight.detach().clone()

    def falling(batch):
        return model[0].weight.sum()

    def jumping(batch):
        return model[0].weight.sum() + (0.0 if torch.equal(model[0].weight, start) else 10.0)

    with pytest.raises(ValueError, match=r"No step up to .* is too long: the loss falls without end"):
        calibrate(model, falling, batches)
    with pytest.raises(ValueError, match=r"No step works.*may jump.*drown"):
        calibrate(model, jumping, batches)
    # Adam has no scale to find: what the trials gain says it.
    assert calibrate(model, falling, batches, optimizer="AdamW").confidence != "high"
    assert calibrate(model, jumping, batches, optimizer="AdamW").confidence != "high"


def test_half_precision_is_measured_with_a_warning():
    torch.manual_seed(0)
    half = mlp(4, 8, 3).to(torch.bfloat16)
    _, _, batches = setting(torch.float32)
    cal = calibrate(half, lambda b: F.cross_entropy(half(b[0].bfloat16()).float(), b[1]), batches)
    assert "half-precision" in kinds(cal)


@pytest.mark.parametrize("mode", [True, False])
def test_layers_in_eval_mode_are_said(mode):
    model, loss, batches = network(count=80)
    model.append(nn.Dropout(1e-12))
    cal = calibrate(model.train(mode), loss, batches, optimizer="AdamW", schedule="warmup-decay")
    assert (kinds(cal), cal.confidence) == ((set(), "high") if mode else ({"eval-mode"}, "medium"))


def test_batches_that_an_iterator_loses_are_said_and_a_loader_loses_none():
    model, loss, batches = network(count=90)
    asked = {"optimizer": "AdamW", "schedule": "warmup-decay"}
    for given, lost in ((batches, 0), (Readable(lambda: iter(batches)), 0), (iter(batches), 80)):
        cal = calibrate(model, loss, given, **asked)
        said = [note.text for note in cal.warnings if note.kind == "iterator"]
        assert len(said) == (lost > 0)
        assert all(f"lost {lost} batches" in text for text in said)
        assert cal.confidence == "high"
        if lost:
            assert len(list(given)) == len(batches) - lost


def test_criterion_in_place_of_a_loss_is_refused_with_the_way_out():
    model, _, batches = setting()
    for given in (nn.CrossEntropyLoss(), F.cross_entropy, lambda output, target: output):
        with pytest.raises(TypeError, match=r"called with one batch.*criterion\(model\(batch\[0\]\)"):
            calibrate(model, given, batches)
    with pytest.raises(TypeError, match="`metric` must be a function"):
        calibrate(model, model, batches, metric=3.0)


@pytest.mark.parametrize("name", ["loss_of_batch", "metric"])
def test_what_the_users_function_raises_says_whose_it_is(name):
    model, loss, batches = setting()

    def broken(batch):
        return batch["labels"]

    asked = {"loss_of_batch": loss, name: broken}
    with pytest.raises(TypeError) as caught:
        calibrate(model, batches=batches, optimizer="AdamW", **asked)
    assert any(f"Raised inside your `{name}`" in note for note in caught.value.__notes__)


def test_loss_below_zero_is_said():
    model, loss, batches = setting()
    cal = calibrate(model, lambda batch: -loss(batch).clamp(max=3.0), batches, optimizer="AdamW", budget=48)
    assert "negative-loss" in kinds(cal)


def test_one_sample_a_batch_is_said():
    model, loss, batches = setting()
    data = torch.utils.data.TensorDataset(torch.randn(30, 4), torch.randint(3, (30,)))
    singles = [(x[:1], y[:1]) for x, y in batches]
    for given in (data, torch.utils.data.DataLoader(data, 1), singles):
        cal = calibrate(model, loss, given, optimizer="AdamW", budget=48)
        assert "one-sample" in kinds(cal)
    for given in (torch.utils.data.DataLoader(data, 2), batches):
        assert "one-sample" not in kinds(calibrate(model, loss, given, optimizer="AdamW", budget=48))


@pytest.mark.parametrize(
    ("schedule", "options", "attached", "kind"),
    [
        (None, {}, True, "scheduler-left-out"),
        (None, {"num_steps": 500}, False, "schedule-left-out"),
        ("constant", {"num_steps": 500}, True, None),
        ("warmup-decay", {"num_steps": 500}, True, "no-warmup"),
        ("warmup-decay", {"num_steps": 500}, False, None),
    ],
)
def test_schedule_that_does_not_fit_what_was_asked_is_said(schedule, options, attached, kind):
    model, loss, batches = setting()
    opt = torch.optim.AdamW(model.parameters())
    if attached:
        torch.optim.lr_scheduler.CosineAnnealingLR(opt, 500)
    cal = calibrate(model, loss, batches, optimizer=opt, schedule=schedule, budget=48, **options)
    assert kinds(cal) & {"scheduler-left-out", "schedule-left-out", "no-warmup"} == (
        {kind} if kind else set()
    )
    assert cal.confidence != "high"


@pytest.mark.parametrize("num_steps", [2, 10])
def test_run_shorter_than_a_trial_is_answered_for_its_length(num_steps):
    model, loss, batches = network()
    cal = calibrate(model, loss, batches, optimizer="AdamW", schedule="warmup-decay", num_steps=num_steps)
    assert cal.lengths == [num_steps]
    assert "one-length" in kinds(cal)


@pytest.mark.parametrize(("scale", "warned"), [(1e-4, True), (1.0, False), (1e4, True)])
def test_loss_that_is_a_sum_or_scaled_is_said(scale, warned):
    model, loss, batches = setting()
    cal = calibrate(model, lambda b: scale * loss(b), batches, optimizer="AdamW", budget=48)
    assert ("scaled-loss" in kinds(cal)) == warned


def test_what_another_optimizer_trains_is_said_and_keeps_its_gradients():
    torch.manual_seed(0)
    generator, critic = nn.Linear(3, 10), nn.Linear(10, 1)
    both = nn.ModuleList([generator, critic])
    batches = list(torch.randn(8, 16, 3))

    def game(z):
        return F.softplus(-critic(generator(z))).mean()

    critic.weight.grad = kept = torch.randn(1, 10)
    before = kept.clone()
    doubted = calibrate(generator, game, batches)
    assert critic.weight.grad is kept
    assert torch.equal(kept, before)
    assert critic.bias.grad is None
    part = calibrate(both, game, batches, optimizer=torch.optim.SGD(generator.parameters(), lr=1.0))
    for cal, where in ((doubted, "are not in `model`"), (part, "the optimizer does not train")):
        (said,) = [note.text for note in cal.warnings if note.kind == "untrained"]
        assert f"2 trainable tensors that {where}" in said
    critic.requires_grad_(False)
    frozen = calibrate(generator, game, batches)
    assert frozen.lr == doubted.lr
    assert "untrained" not in kinds(frozen)
