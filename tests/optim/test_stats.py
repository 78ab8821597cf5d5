"""The answers of ``clip_stats()``: what it prints, and whether somebody clips before."""

import pytest

from curvestep.optim.stats import is_clipped_before


def test_three_equal_norms_are_not_yet_somebody_else_who_clips():
    norms = [1.0 - 1e-7, 0.3, 1.0, 0.5, 1.0 - 2e-7]  # neither rising nor falling
    assert not is_clipped_before(norms)
    assert is_clipped_before([*norms, 1.0 - 1.5e-7])


@pytest.mark.parametrize("norms", [[], [1.0] * 20, [0.5 + 1e-7 * k for k in range(20)]])
def test_norms_that_are_equal_or_rise_are_nobody_else_who_clips(norms):
    assert not is_clipped_before(norms)
