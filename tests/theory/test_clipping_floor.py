"""The clipping floor: the example attains it, for every noise and threshold, whatever the step."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from curvestep.theory.theorems.clipped_sgd import clipping_floor, floor_noise

positive = st.floats(1e-3, 1e3)


@settings(max_examples=500, deadline=None)
@given(sigma=positive, max_norm=positive)
def test_expected_clipped_gradient_vanishes_at_the_floor(sigma, max_norm):
    noise, floor = floor_noise(sigma, max_norm), clipping_floor(sigma, max_norm)
    values, probabilities = np.array(noise.values), np.array(noise.probabilities)
    assert probabilities.sum() == pytest.approx(1)
    assert values @ probabilities == pytest.approx(0, abs=1e-9 * np.abs(values).max())
    assert values**2 @ probabilities == pytest.approx(sigma**2)
    assert noise.clipped_mean(floor, max_norm) == pytest.approx(0, abs=1e-9 * max(sigma, max_norm))
    assert min(sigma, sigma**2 / max_norm) / 4 <= floor * (1 + 1e-12)
    assert floor <= min(sigma, sigma**2 / max_norm) * (1 + 1e-12)


@pytest.mark.parametrize(("sigma", "max_norm"), [(1.0, 0.75), (1.0, 2.0), (2.0, 5.0)])
def test_smaller_steps_do_not_lower_the_floor(sigma, max_norm):
    rng = np.random.default_rng(0)
    noise, floor = floor_noise(sigma, max_norm), clipping_floor(sigma, max_norm)
    for lr in (0.02, 0.005):
        x = np.full(400, floor)
        for _ in range(round(8 / lr)):
            drawn = rng.choice(noise.values, size=x.shape, p=noise.probabilities)
            x -= lr * np.clip(x + drawn, -max_norm, max_norm)
        assert x.mean() == pytest.approx(floor, rel=0.1)


def test_no_noise_has_no_floor():
    assert clipping_floor(0.0, 1.0) == 0
    with pytest.raises(ValueError, match="max_norm"):
        clipping_floor(1.0, 0.0)
