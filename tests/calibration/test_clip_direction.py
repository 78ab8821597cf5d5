"""What clipping does to the direction: closed forms, no turn from symmetric noise, coverage, same bits."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import curvestep as cs
from curvestep.calibration.clip_direction import bias_of

MEAN, LARGE, RARE = 1.0, 4.5, 0.1
SMALL = LARGE * RARE / (1 - RARE)


def skewed_gradients(rng, count):
    """(1, z) with z = 4.5 one time in ten and else -0.5: the mean is (1, 0)."""
    z = np.where(rng.random(count) < RARE, LARGE, -SMALL)
    return np.stack([np.full(count, MEAN), z], axis=1)


def clipped_mean(max_norm):
    """The mean of the clipped gradients, by hand."""
    mean = np.zeros(2)
    for z, probability in ((LARGE, RARE), (-SMALL, 1 - RARE)):
        mean += probability * np.array([MEAN, z]) * min(1.0, max_norm / math.hypot(MEAN, z))
    return mean


def bias_from(gradients, max_norm):
    norms = np.linalg.norm(gradients, axis=1)
    clipped = gradients * np.minimum(1.0, max_norm / norms)[:, None]
    return bias_of(norms, gradients @ gradients.sum(0), gradients @ clipped.sum(0), max_norm)


@pytest.mark.parametrize("max_norm", [0.5, 1.5])
def test_skewed_noise_turns_the_mean_by_the_angle_of_the_closed_form(max_norm):
    mean = clipped_mean(max_norm)
    bias = bias_from(skewed_gradients(np.random.default_rng(0), 20_000), max_norm)
    assert bias.angle == pytest.approx(math.degrees(math.atan2(-mean[1], mean[0])), rel=0.05)
    assert bias.length == pytest.approx(np.linalg.norm(mean), rel=0.02)
    assert bias.noise == pytest.approx(math.sqrt(LARGE * SMALL), rel=0.05)


def test_sums_over_pairs_equal_a_loop_over_them():
    gradients = np.random.default_rng(1).normal(size=(12, 5)) + 1.0
    norms = np.linalg.norm(gradients, axis=1)
    clipped = gradients * np.minimum(1.0, 2.0 / norms)[:, None]
    plain = mixed = both = 0.0
    for i in range(12):
        for j in range(12):
            if i != j:
                plain += gradients[i] @ gradients[j]
                mixed += clipped[i] @ gradients[j]
                both += clipped[i] @ clipped[j]
    bias = bias_from(gradients, 2.0)
    assert bias.grad_norm == pytest.approx(math.sqrt(plain / 132))
    # The printed numbers have their bias of order 1/m taken off: they stay within it.
    assert bias.length == pytest.approx(math.sqrt(both / plain), rel=0.1)
    assert math.cos(math.radians(bias.angle)) == pytest.approx(mixed / math.sqrt(plain * both), rel=0.1)


def test_nothing_clipped_turns_and_shortens_nothing():
    gradients = np.random.default_rng(2).normal(size=(20, 4)) * 0.3 + 1.0
    bias = bias_from(gradients, 1e3)
    assert bias.angle == pytest.approx(0.0, abs=1e-5)
    assert bias.length == pytest.approx(1.0)
    assert bias.clipped_fraction == 0.0


def test_equal_gradients_are_shortened_and_not_turned():
    bias = bias_from(np.tile([3.0, 4.0], (10, 1)), 1.0)
    assert bias.angle == pytest.approx(0.0, abs=1e-5)
    assert bias.length == pytest.approx(0.2)
    assert bias.noise == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("sigma", [0.3, 1.0])
def test_symmetric_noise_is_rarely_called_a_turn(sigma):
    turned = 0
    for seed in range(100):
        gradients = np.random.default_rng(seed).normal(size=(64, 10)) * sigma
        gradients[:, 0] += 1.0
        turned += bias_from(gradients, 0.5).angle_interval[0] > 0.5
    assert turned <= 5


def test_interpolation_is_rarely_called_a_turn():
    """Where one line fits all samples, a sample's gradient is (xᵀe) x: it vanishes with the error e."""
    turned = 0
    for seed in range(100):
        x = np.random.default_rng(seed).normal(size=(64, 6))
        bias = bias_from(x[:, :1] * x, 1.0)
        assert bias.is_known
        assert bias.clipped_fraction > 0.3
        assert bias.length < 0.8
        turned += bias.angle_interval[0] > 0.5
    assert turned <= 5


def test_intervals_hold_the_truth_of_skewed_noise():
    mean = clipped_mean(1.5)
    angle = math.degrees(math.atan2(-mean[1], mean[0]))
    held = {}
    for count in (64, 256):
        gradients = [skewed_gradients(np.random.default_rng([count, seed]), count) for seed in range(400)]
        intervals = [bias_from(sample, 1.5).angle_interval for sample in gradients]
        held[count] = np.mean([low <= angle <= high for low, high in intervals])
    assert 0.66 < held[64] < 0.80
    assert 0.81 < held[256] < 0.92


def test_noise_that_hides_the_mean_gradient_is_said():
    gradients = np.random.default_rng(3).normal(size=(10, 50))
    bias = bias_from(gradients, 1.0)
    assert not bias.is_known
    assert math.isnan(bias.angle)
    assert "cannot tell" in str(bias)


def model_and_batches(count=16):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1))
    return model, [torch.randn(6, 3) for _ in range(count)]


def test_model_gradients_and_random_states_are_put_back():
    model, batches = model_and_batches()
    model(batches[0]).sum().backward()
    before = copy.deepcopy(model.state_dict())
    gradients = [p.grad.clone() for p in model.parameters()]
    random = torch.get_rng_state()
    bias = cs.clipping_bias(model, lambda x: (model(x) - 1).square().mean(), batches, 0.1)
    assert bias.num_batches == 16
    assert bias.clipped_fraction > 0
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=0, atol=0)
    torch.testing.assert_close(torch.get_rng_state(), random)


def test_a_model_has_the_bias_of_its_batch_gradients():
    w = nn.Linear(2, 1, bias=False)
    rows = torch.tensor(skewed_gradients(np.random.default_rng(4), 40))
    bias = cs.clipping_bias(w, lambda row: w(row).sum(), [row[None] for row in rows], 1.5)
    assert bias == bias_from(rows.numpy(), 1.5)


def test_no_more_batches_are_read_than_asked_for():
    model, batches = model_and_batches(20)
    left = iter(batches)
    cs.clipping_bias(model, lambda x: (model(x) - 1).square().mean(), left, 0.1, num_batches=12)
    assert len(list(left)) == 8


def test_bad_input_is_one_clear_error():
    model, batches = model_and_batches(4)
    with pytest.raises(ValueError, match="at least 8 batches, got 4"):
        cs.clipping_bias(model, lambda x: model(x).mean(), batches, 1.0)
    with pytest.raises(ValueError, match="`max_norm` must be positive"):
        cs.clipping_bias(model, lambda x: model(x).mean(), batches, -1.0)
    line = nn.Linear(3, 1)
    many = [torch.randn(6, 3) for _ in range(10)]
    many[2][:] = math.inf
    with pytest.raises(ValueError, match="batch 2 is not finite"):
        cs.clipping_bias(line, lambda x: line(x).sum(), many, 1.0)
