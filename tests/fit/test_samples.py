import math

import numpy as np
import pytest

from curvestep.fit.samples import final_loss


def test_the_final_loss_is_the_mean_over_the_last_twentieth_of_the_steps():
    steps = np.arange(1, 401)
    assert final_loss(steps, steps) == np.arange(381, 401).mean()


def test_the_final_loss_takes_at_most_the_last_fifty_steps():
    steps = np.arange(10_000)
    assert final_loss(steps, steps) == np.arange(9950, 10_000).mean()


def test_the_final_loss_counts_steps_and_not_rows():
    """Every fifth step is written: the last twentieth of 400 steps is four rows."""
    steps = np.arange(0, 400, 5)
    assert final_loss(steps, steps) == np.mean([380, 385, 390, 395])


def test_the_final_loss_does_not_depend_on_the_order_of_the_rows():
    steps, rng = np.arange(200), np.random.default_rng(0)
    order = rng.permutation(200)
    assert final_loss(steps[order], steps[order]) == final_loss(steps, steps)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_run_that_ends_without_a_finite_loss_has_no_final_loss(bad):
    assert math.isnan(final_loss(range(40), [1.0] * 39 + [bad]))
    assert final_loss(range(40), [bad] + [1.0] * 39) == 1.0


def test_a_single_row_is_the_final_loss():
    assert final_loss([7], [2.5]) == 2.5


def test_steps_and_losses_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="equal length"):
        final_loss([1, 2], [1.0])
