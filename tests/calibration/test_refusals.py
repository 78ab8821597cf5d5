"""What cannot be calibrated is refused, in words that say what to do."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from curvestep import calibrate
from tests.models import batch_loss, mlp


def setting(dtype=torch.float64):
    model = mlp(4, 8, 3).to(dtype)
    batches = [(torch.randn(8, 4, dtype=dtype), torch.randint(3, (8,))) for _ in range(6)]
    return model, batch_loss(model), batches


def test_no_batches():
    model, loss, batches = setting()
    with pytest.raises(ValueError, match=r"at least three batches.*got 0"):
        calibrate(model, loss, [])
    used_up = iter(batches)
    list(used_up)
    with pytest.raises(ValueError, match="used-up iterator"):
        calibrate(model, loss, used_up)
    with pytest.raises(TypeError, match="Put a single batch in a list"):
        calibrate(model, loss, batches[0][0])


def test_arguments_of_another_kind_are_named():
    model, loss, batches = setting()
    with pytest.raises(TypeError, match=r"`loss_of_batch` must be a function.*got a list.*The order is"):
        calibrate(model, batches, loss)
    with pytest.raises(TypeError, match=r"`loss_of_batch` must be a function.*got a Tensor"):
        calibrate(model, loss(batches[0]), batches)
    with pytest.raises(TypeError, match="`model` must be a torch module, got a list"):
        calibrate(list(model.parameters()), loss, batches)
    for wrong in ({"x": 1}, None, "batches", batches[0], list(batches[0])):
        with pytest.raises(TypeError, match=r"`batches` must be a sequence.*Put a single batch in a list"):
            calibrate(model, loss, wrong)
    generator = torch.utils.data.DataLoader(batch for batch in batches)
    with pytest.raises(TypeError, match=r"`batches` is a DataLoader over a generator.*Make a list of it"):
        calibrate(model, loss, generator)
    with pytest.raises(TypeError, match="`momentum`"):
        calibrate(model, loss, batches, momentum="0.9")


def test_lazy_layer_is_sent_through_a_forward_pass_first():
    model, batches = nn.LazyLinear(3), setting()[2]
    with pytest.raises(ValueError, match="Run one forward pass first"):
        calibrate(model, lambda b: F.cross_entropy(model(b[0]), b[1]), batches)


def test_number_without_a_backward_pass():
    model, loss, batches = setting()
    with pytest.raises(ValueError, match=r"`loss_of_batch` gave no gradient.*without `\.item\(\)`"):
        calibrate(model, lambda b: loss(b).item(), batches)


def test_loss_as_a_number_of_numpy_is_a_number():
    model, loss, batches = setting()

    def backward(batch):
        loss(batch).backward()
        return np.float32(loss(batch).item())

    assert math.isclose(
        calibrate(model, backward, batches).lr, calibrate(model, loss, batches).lr, rel_tol=1e-5
    )


def test_gradient_so_small_that_no_step_fits_the_precision():
    model, loss, batches = setting(torch.float32)
    with pytest.raises(ValueError, match=r"more than the parameters' precision holds.*Multiply the loss"):
        calibrate(model, lambda b: 1e-38 * loss(b), batches)


@pytest.mark.parametrize("optimizer", ["AdamW", "ClippedSGD"])
@pytest.mark.parametrize("count", [1, 2])
def test_fewer_batches_than_trials_need(count, optimizer):
    model, loss, batches = setting()
    for given in (batches[:count], iter(batches[:count])):
        with pytest.raises(ValueError, match=f"one to step on and two others to judge by, got {count}"):
            calibrate(model, loss, given, optimizer=optimizer)


def test_loss_that_is_not_a_scalar():
    model, _, batches = setting()
    with pytest.raises(ValueError, match=r"`loss_of_batch` must return a scalar.*\(8,\).*\.mean\(\)"):
        calibrate(model, lambda b: F.cross_entropy(model(b[0]), b[1], reduction="none"), batches)
    with pytest.raises(TypeError, match="the loss alone, got a tuple"):
        calibrate(model, lambda b: (model(b[0]).sum(), 1), batches)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_loss_that_is_not_finite_at_the_start(value):
    model, loss, batches = setting()
    with pytest.raises(ValueError, match=r"loss at the start is (nan|inf).*initialisation"):
        calibrate(model, lambda b: loss(b) + value, batches)


def test_gradient_that_is_not_finite_at_the_start():
    model, loss, batches = setting()
    with pytest.raises(ValueError, match="not finite although the loss is"):
        calibrate(model, lambda b: loss(b) + (0.0 * model[0].weight).sum().sqrt(), batches)


def test_zero_gradient():
    model, loss, batches = setting()
    with pytest.raises(ValueError, match=r"gradient at the start is zero.*saddle"):
        calibrate(model, lambda b: 0.0 * loss(b) + 1.0, batches)


def test_loss_that_does_not_depend_on_the_parameters():
    model, _, batches = setting()
    with pytest.raises(ValueError, match="does not depend on any trainable parameter"):
        calibrate(model, lambda b: b[0].square().mean(), batches)


def test_step_that_is_never_too_long():
    model, _, batches = setting()
    with pytest.raises(ValueError, match=r"No step became too long.*falls on and on"):
        calibrate(model, lambda b: model[0].weight.sum(), batches)
    # Adam has no scale to find: the trials gain more and more, which is said.
    cal = calibrate(model, lambda b: model[0].weight.sum(), batches, optimizer="AdamW")
    assert "edge" in {note.kind for note in cal.warnings}
    assert cal.confidence == "medium"


def test_step_that_never_works():
    model, _, batches = setting()

    start = model[0].weight.detach().clone()

    def jumping(batch):
        return model[0].weight.sum() + (0.0 if torch.equal(model[0].weight, start) else 10.0)

    with pytest.raises(ValueError, match=r"No step works.*may jump.*drown"):
        calibrate(model, jumping, batches)
    cal = calibrate(model, jumping, batches, optimizer="AdamW")
    assert cal.confidence == "cannot tell"


def test_loss_that_does_not_repeat_itself():
    model, loss, batches = setting()
    draw = torch.Generator().manual_seed(0)
    with pytest.raises(
        ValueError,
        match=r"gave two different gradients.*Draw the batch before",
    ):
        calibrate(model, lambda b: loss((b[0] + torch.randn(8, 4, generator=draw), b[1])), batches)


def test_half_precision_is_measured_with_a_warning():
    torch.manual_seed(0)
    half = mlp(4, 8, 3).to(torch.bfloat16)
    _, _, batches = setting(torch.float32)
    cal = calibrate(half, lambda b: F.cross_entropy(half(b[0].bfloat16()).float(), b[1]), batches)
    assert "half-precision" in {note.kind for note in cal.warnings}


def test_layers_in_eval_mode_are_said():
    torch.manual_seed(0)
    model = mlp(4, 8, 3, batchnorm=True, dropout=0.2)
    _, _, batches = setting()
    loss = lambda b: F.cross_entropy(model(b[0]), b[1])  # noqa: E731
    for mode in (True, False):
        model.train(mode)
        cal = calibrate(model, loss, batches, optimizer="AdamW", budget=48)
        assert ("eval-mode" in {note.kind for note in cal.warnings}) == (not mode)


@pytest.mark.parametrize(("scale", "warned"), [(1e-4, True), (1.0, False), (1e4, True)])
def test_loss_that_is_a_sum_or_scaled_is_said(scale, warned):
    model, loss, batches = setting()
    cal = calibrate(model, lambda b: scale * loss(b), batches, optimizer="AdamW", budget=48)
    assert ("scaled-loss" in {note.kind for note in cal.warnings}) == warned


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, "1 parameters that are not in `model`"),
        ({"optimizer": "sdg"}, "`optimizer` must be the optimizer.*'sdg'"),
        ({"momentum": 1.0}, r"`momentum` must be in \[0, 1\)"),
        ({"optimizer": "AdamW", "momentum": 0.9}, "`momentum` is SGD's, and AdamW is another"),
        ({"weight_decay": -1.0}, "`weight_decay`"),
        ({"max_norm": 0.0}, "`max_norm`"),
        ({"budget": 3}, "`budget` must be at least 48 gradients, three trials of 16 steps, got 3"),
        ({"budget": -1}, "`budget`"),
        ({"budget": 0.05}, "`budget` 0.05 is a share of `num_steps`"),
        ({"budget": 0.01, "num_steps": 100}, "at least 48 gradients.*got 1"),
        ({"num_steps": 0}, "`num_steps`"),
    ],
)
def test_wrong_options_are_named(options, words):
    model, loss, batches = setting()
    with pytest.raises(ValueError, match=words):
        calibrate(model, loss, batches, **options)


def test_model_is_unchanged_after_a_refusal():
    model, _, batches = setting()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="No step became too long"):
        calibrate(model, lambda b: model[0].weight.sum(), batches)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


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
    (words,) = [note.text for note in doubted.warnings if note.kind == "untrained"]
    assert "2 trainable tensors that are not in `model`" in words
    part = calibrate(both, game, batches, optimizer=torch.optim.SGD(generator.parameters(), lr=1.0))
    assert any("2 trainable tensors that the optimizer does not train" in note.text for note in part.warnings)
    critic.requires_grad_(False)
    frozen = calibrate(generator, game, batches)
    assert frozen.lr == doubted.lr
    assert not any(note.kind == "untrained" for note in frozen.warnings)
