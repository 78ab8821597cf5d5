"""The rule that names a cause, with plain numbers."""

import math

import pytest

from curvestep.autopsy.cause import CANNOT_TELL, FEWEST_STEPS, SPIKE_RATIO, cause_of, largest_spike, share

CHANGED = {"half": 1.0, "clipped": 0.0, "batch": 9.0, "momentum": 8.0, "block a": 0.1}


@pytest.mark.parametrize(
    ("rise", "usual", "others", "longer", "cause"),
    [
        (10.0, 10.0 / SPIKE_RATIO, {}, {}, CANNOT_TELL),
        (10.0, 1.0, {}, {"block a": 9.0, "block b": 8.0}, "length"),
        (10.0, 1.0, {}, {"block a": 9.0, "block b": 1.0}, "block a"),
        (10.0, 1.0, {"momentum": -1.0}, {"block a": 9.0}, "momentum"),
        (math.inf, 1.0, {"batch": 8.0, "half": 7.0}, {"block a": 9.0}, "length"),
        (math.inf, 1.0, {"batch": 6.0, "half": 7.0}, {"block a": 9.0}, "batch"),
        (10.0, 1.0, {"momentum": -1.0, "batch": 0.2}, {}, "batch"),
        (10.0, 1.0, {"batch": 0.2, "precision": 0.5}, {}, "precision"),
    ],
)
def test_cause_is_a_change_that_takes_a_spike_away(rise, usual, others, longer, cause):
    assert cause_of(rise, usual, CHANGED | others, longer) == cause


def test_change_that_leaves_an_infinite_rise_takes_nothing_of_it():
    assert share(math.inf, math.inf) == 0.0


@pytest.mark.parametrize(
    ("rises", "place"),
    [
        ([0.1, -0.2, 0.1, 0.1, 0.3, 78.0, 110.0, -190.0], 5),  # of a spike and its echo the spike
        ([5.0, -5.0, 0.1, 0.1, 0.3, 2.0, 0.1], 5),  # no spike: the nearest to one
        ([0.1, 0.1, 0.1, 0.1, 0.2, math.inf, 0.0, math.inf], 5),
        ([0.1, math.inf, 0.0, 0.0, 0.0, 0.0], FEWEST_STEPS),
        ([0.0, 0.0, 0.0, 0.0, -1.0, 0.5], 5),
    ],
)
def test_largest_spike_is_against_the_steps_before_it(rises, place):
    assert largest_spike(rises) == place
