import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from curvestep.steps import (
    clipped_from_normalized,
    clipped_step,
    fixed_step,
    normalized_from_clipped,
    normalized_from_smoothness,
    normalized_step,
    smooth_clipped_step,
    step_cap,
)

positive = st.floats(1e-6, 1e6)
RULES = {
    "fixed": lambda g: fixed_step(g, lr=0.3),
    "clipped": lambda g: clipped_step(g, lr=0.3, max_norm=2.0),
    "unclipped": lambda g: clipped_step(g, lr=0.3, max_norm=math.inf),
    "normalized": lambda g: normalized_step(g, lr=0.3, offset=2.0),
    "smooth": lambda g: smooth_clipped_step(g, L0=0.7, L1=3.0),
    "smooth, L1 = 0": lambda g: smooth_clipped_step(g, L0=0.7, L1=0.0),
    "smooth, L0 = 0": lambda g: smooth_clipped_step(g, L0=0.0, L1=3.0),
}
NORMS = [0.0, 1e-300, 0.5, 2.0, 7.0, 1e300, math.inf]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_floats_arrays_and_tensors_agree(rule):
    floats = [rule(g) for g in NORMS]
    array = rule(np.array(NORMS))
    tensor = rule(torch.tensor(NORMS))
    assert all(isinstance(h, float) for h in floats)
    np.testing.assert_array_equal(array, floats)
    torch.testing.assert_close(tensor, torch.tensor(floats), rtol=1e-15, atol=0)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_limits_are_never_nan_and_steps_never_grow_with_the_norm(rule):
    steps = np.array([rule(g) for g in NORMS])
    assert not np.isnan(steps).any()
    assert (np.diff(steps[np.isfinite(steps)]) <= 0).all()


@pytest.mark.parametrize("name", ["clipped", "normalized", "smooth", "smooth, L0 = 0"])
def test_infinite_norm_gives_step_zero_and_nan_stays_nan(name):
    assert RULES[name](math.inf) == 0.0
    for nan in (math.nan, np.array(math.nan), torch.tensor(math.nan)):
        assert math.isnan(RULES[name](nan))


def test_zero_norm_gives_the_largest_step():
    assert clipped_step(0.0, lr=0.3, max_norm=2.0) == 0.3
    assert normalized_step(0.0, lr=0.3, offset=2.0) == 0.15
    assert smooth_clipped_step(0.0, L0=4.0, L1=3.0) == 0.25
    assert smooth_clipped_step(0.0, L0=0.0, L1=3.0) == math.inf


def test_clipping_starts_exactly_at_max_norm_without_an_epsilon():
    assert clipped_step(2.0, lr=0.3, max_norm=2.0) == 0.3
    assert clipped_step(np.nextafter(2.0, 3.0), lr=0.3, max_norm=2.0) < 0.3
    assert clipped_step(1e-9, lr=1.0, max_norm=1e-10) == pytest.approx(0.1, rel=1e-15)


@given(g=positive, lr=positive, max_norm=positive)
def test_clipped_step_length_never_exceeds_the_cap(g, lr, max_norm):
    assert g * clipped_step(g, lr=lr, max_norm=max_norm) <= step_cap(lr=lr, max_norm=max_norm) * (1 + 1e-15)


@given(g=positive, lr=positive, max_norm=positive)
def test_clipped_and_normalized_steps_agree_up_to_two(g, lr, max_norm):
    clipped = clipped_step(g, lr=lr, max_norm=max_norm)
    normalized = normalized_step(g, **normalized_from_clipped(lr=lr, max_norm=max_norm))
    assert clipped / 2 <= normalized * (1 + 1e-14)
    assert normalized <= clipped * (1 + 1e-14)


@given(lr=positive, max_norm=positive)
def test_factor_two_is_reached_at_the_threshold(lr, max_norm):
    clipped = clipped_step(max_norm, lr=lr, max_norm=max_norm)
    normalized = normalized_step(max_norm, **normalized_from_clipped(lr=lr, max_norm=max_norm))
    assert normalized == pytest.approx(clipped / 2, rel=1e-14)


@given(lr=positive, max_norm=positive)
def test_conversions_are_inverse(lr, max_norm):
    back = clipped_from_normalized(**normalized_from_clipped(lr=lr, max_norm=max_norm))
    assert back["lr"] == pytest.approx(lr, rel=1e-14)
    assert back["max_norm"] == max_norm


@given(g=positive, L0=positive, L1=positive)
def test_smooth_clipped_step_is_a_normalized_step(g, L0, L1):
    expected = smooth_clipped_step(g, L0=L0, L1=L1)
    assert normalized_step(g, **normalized_from_smoothness(L0=L0, L1=L1)) == pytest.approx(
        expected, rel=1e-12
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: clipped_step(1.0, lr=0.0, max_norm=1.0), "`lr` must be positive"),
        (lambda: clipped_step(1.0, lr=1.0, max_norm=0.0), "`max_norm` must be positive"),
        (lambda: clipped_step(1.0, lr=1.0, max_norm=math.nan), "`max_norm`"),
        (lambda: clipped_step(-1.0, lr=1.0, max_norm=1.0), "`grad_norm` must be zero or more, got -1.0"),
        (lambda: clipped_step(np.array([1.0, -2.0]), lr=1.0, max_norm=1.0), "got .*-2.0"),
        (lambda: normalized_step(1.0, lr=1.0, offset=0.0), "`offset` must be positive"),
        (lambda: smooth_clipped_step(1.0, L0=-1.0, L1=1.0), "`L0` must be zero or more"),
        (lambda: smooth_clipped_step(1.0, L0=0.0, L1=0.0), "must not both be zero"),
        (lambda: fixed_step(1.0, lr=math.inf), "`lr` must be positive and finite, got inf"),
        (lambda: normalized_from_clipped(lr=1.0, max_norm=math.inf), "`max_norm`"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_word_is_not_a_number():
    with pytest.raises(TypeError, match="`lr` must be positive and finite, got 'fast'"):
        fixed_step(1.0, lr="fast")
