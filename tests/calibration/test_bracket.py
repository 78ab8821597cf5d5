"""The search for the last working step, with plain numbers."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

from curvestep.calibration.bracket import (
    LARGEST,
    PER_OCTAVE,
    SMALLEST,
    START,
    Point,
    crossing,
    find_bracket,
    largest_step,
    step_along_gradient,
)


def ends_at(end):
    """Points of which those up to ``end`` work, and the list of indices that were measured."""
    measured = []

    def measure(k):
        measured.append(k)
        step = 2.0 ** (k / PER_OCTAVE)
        return Point(step, kappa=1.0 if k <= end else 2.0, loss=0.0, limit=0.0)

    return measure, measured


inside = st.integers(SMALLEST + 1, LARGEST - 1)


@given(end=inside, start=inside, stride=st.integers(1, 8))
def test_bracket_is_the_end_of_the_working_steps_wherever_the_search_begins(end, start, stride):
    measure, measured = ends_at(end)
    low, high = find_bracket(measure, start, stride)
    assert low.step == 2.0 ** (end / PER_OCTAVE)
    assert low.works
    assert not high.works
    assert math.isclose(high.step / low.step, 2 ** (1 / PER_OCTAVE))
    assert len(set(measured)) == len(measured)  # nothing is measured twice


@given(end=st.integers(SMALLEST + 4, 10 * PER_OCTAVE), shift=st.integers(-1, 2))
def test_first_search_takes_at_most_thirteen_points_and_a_neighbour_three(end, shift):
    measure, measured = ends_at(end)
    find_bracket(measure, START, 8)
    assert len(measured) <= 13
    measured.clear()
    find_bracket(measure, end + shift, 2)
    assert len(measured) <= 3


@pytest.mark.parametrize(
    ("end", "words"),
    [(LARGEST, r"No step up to 1.07e\+09 is too long"), (SMALLEST - 1, "No step works, down to 3.81e-06")],
)
def test_lattice_without_an_end_is_refused(end, words):
    measure, _ = ends_at(end)
    with pytest.raises(ValueError, match=words):
        find_bracket(measure, 0, 8)


@pytest.mark.parametrize("guess", [None, 1e-3, 40.0])
def test_largest_step_does_not_depend_on_unit_or_guess(guess):
    at = lambda step: Point(step, kappa=step / 3, loss=0.0, limit=1.0)  # noqa: E731
    for unit in (1.0, 7.0):
        assert math.isclose(largest_step(at, unit=unit, guess=guess), 3.0)


@pytest.mark.parametrize(
    ("kappa", "loss", "works"),
    [
        (1.0, 0.0, True),
        (1.01, 0.0, False),
        (0.5, 0.01, False),
        (0.5, -math.inf, False),
        (math.nan, 0.0, False),
    ],
)
def test_step_works_if_gradient_and_loss_keep_their_limits(kappa, loss, works):
    assert Point(1.0, kappa, loss, limit=0.0).works == works


@given(end=st.floats(1.0, 1.5))
def test_crossing_is_exact_where_the_change_is_proportional_to_the_step(end):
    low, high = (Point(step, step / end, loss=-1.0, limit=0.0) for step in (1.0, 1.6))
    assert math.isclose(crossing(low, high), end, rel_tol=1e-12)


@pytest.mark.parametrize(
    ("low", "high", "step"),
    [
        ((0.5, -1.0, 0.0), (1.1, 3.0, 0.0), 1.25),  # of the loss, if it comes first
        ((0.5, -1.0, -0.75), (1.0, -1.0, -1.5), 4 / 3),  # of a limit that falls: -1 = -0.75 h
        ((0.5, 0.0, 0.0), (math.inf, math.inf, 0.0), 1.0),  # the lower end where the upper is not finite
        ((0.5, 0.0, 0.0), (math.nan, math.nan, 0.0), 1.0),
    ],
)
def test_crossing_of_the_loss(low, high, step):
    assert math.isclose(crossing(Point(1.0, *low), Point(2.0, *high)), step)


@pytest.mark.parametrize(("above", "works"), [(0.05, True), (0.08, False)])
def test_loss_that_rounding_cannot_tell_from_its_limit_keeps_it(above, works):
    parameters = [torch.ones(1, dtype=torch.bfloat16)]  # precise to 1/128: 0.0625 at a loss of -2, four times

    def gradient_at(direction, fraction):
        if fraction == 0:
            return -2.0, [torch.ones(1)]
        fall = -0.1 * fraction  # a tenth of what the slope promises
        return -2.0 - fall + (above if fraction >= -1.0 else 1.0), [torch.ones(1)]

    if works:
        assert step_along_gradient(gradient_at, parameters, [1.0])[0] == pytest.approx(1.0, rel=0.2)
    else:
        with pytest.raises(ValueError, match="No step works"):
            step_along_gradient(gradient_at, parameters, [1.0])
