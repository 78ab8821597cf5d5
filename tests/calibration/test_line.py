"""The mean cosine between gradients, and the threshold that follows from it."""

import itertools
import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.testing import assert_close

from curvestep.calibration.line import Agreement
from curvestep.calibration.search import CLIP_AT, calibrate, threshold_multiple


def pairwise(gradients):
    """The twin: every pair on its own."""
    flat = [torch.cat([g.flatten() for g in some if g is not None]) for some in gradients]
    cosines = [(a @ b / (a.norm() * b.norm())).item() for a, b in itertools.combinations(flat, 2)]
    return sum(cosines) / len(cosines)


def agreement(gradients):
    found = Agreement()
    for some in gradients:
        found.add(some)
    return found.cosine


@given(seed=st.integers(0, 10_000), count=st.integers(2, 6), scale=st.floats(1e-6, 1e6))
def test_mean_cosine_is_that_of_all_pairs_whatever_the_lengths(seed, count, scale):
    torch.manual_seed(seed)
    gradients = [[torch.randn(3, 2) * scale**i, torch.randn(5) * scale**i] for i in range(count)]
    expected = pairwise([[g / scale**i for g in some] for i, some in enumerate(gradients)])
    assert math.isclose(agreement(gradients), expected, abs_tol=1e-9)
    assert math.isclose(agreement(gradients[::-1]), expected, abs_tol=1e-9)


def test_parameters_without_a_gradient_count_as_zero():
    one, two = [torch.tensor([3.0]), None], [torch.tensor([1.0]), torch.tensor([1.0])]
    assert math.isclose(agreement([one, two]), 1 / math.sqrt(2))
    assert math.isclose(
        agreement([[torch.zeros(1), torch.ones(1)], [torch.ones(1), None]]), 0.0, abs_tol=1e-12
    )


def test_gradients_are_not_changed_and_half_precision_is_summed_in_float32():
    given_ = [torch.full((7,), 3.0, dtype=torch.bfloat16)]
    assert math.isclose(agreement([given_, given_, given_]), 1.0, rel_tol=1e-2)
    assert_close(given_[0], torch.full((7,), 3.0, dtype=torch.bfloat16), rtol=0, atol=0)


def test_one_batch_has_no_agreement():
    assert math.isnan(agreement([[torch.ones(2)]]))


@given(rho=st.floats(0, 1), low=st.floats(0.1, 3), high=st.floats(0.1, 3))
def test_threshold_lies_between_its_ends_and_moves_one_way(rho, low, high):
    found = threshold_multiple(rho, (low, high))
    assert min(low, high) * (1 - 1e-12) <= found <= max(low, high) * (1 + 1e-12)
    further = threshold_multiple(min(1.0, rho + 0.1), (low, high))
    assert (further - found) * (high - low) >= -1e-9


class Bowl(nn.Module):
    """A quadratic whose batches pull in directions of their own, at a given angle from the common one."""

    def __init__(self, size=8):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(size))

    def forward(self, target):
        return 0.5 * (self.x - target).square().sum()


@pytest.mark.parametrize(("common", "rho"), [(0.0, 0.0), (1.0, 0.5), (3.0, 0.9)])
def test_batches_that_agree_are_clipped_higher(common, rho):
    model, own = Bowl(), torch.eye(8)
    targets = [own[i] + common * own[7] for i in range(4)]  # cosine of two: common² / (1 + common²)
    cal = calibrate(model, model, targets, num_batches=4)
    assert math.isclose(cal.agreement, rho, abs_tol=1e-9)
    assert math.isclose(cal.max_norm / cal.grad_norm, threshold_multiple(rho, CLIP_AT))
    assert math.isclose(cal.clip_at, cal.max_norm / cal.grad_norm)
    assert f"{cal.agreement:.2f}" in str(cal)


def test_single_batch_gets_the_careful_threshold_and_one_number_needs_no_agreement():
    model = Bowl()
    assert math.isclose(calibrate(model, model, [torch.ones(8)]).clip_at, CLIP_AT[0])
    assert math.isclose(calibrate(model, model, [torch.ones(8)] * 3, clip_at=0.4).clip_at, 0.4)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, (0.7, 0.0), (math.inf, 1.0)])
def test_threshold_that_is_no_length_is_refused(wrong):
    model = Bowl()
    with pytest.raises(ValueError, match="`clip_at` must be positive and finite"):
        calibrate(model, model, [torch.ones(8)], clip_at=wrong)
