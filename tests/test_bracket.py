"""The search for the last safe step, with plain numbers."""

import math

import pytest
from hypothesis import given, strategies as st

from curvestep.bracket import (
    LARGEST,
    PER_OCTAVE,
    SMALLEST,
    Bracket,
    NoBracket,
    Point,
    crossing,
    find_bracket,
)


def ends_at(end):
    """Points of which those up to ``end`` are safe, and the list of indices that were measured."""
    measured = []

    def measure(k):
        measured.append(k)
        step = 2.0 ** (k / PER_OCTAVE)
        return Point(step=step, kappa=step, loss=0.0, safe=k <= end)

    return measure, measured


inside = st.integers(SMALLEST + 1, LARGEST - 1)


@given(end=inside, start=inside, stride=st.integers(1, 8))
def test_bracket_is_the_end_of_the_safe_steps_wherever_the_search_begins(end, start, stride):
    measure, measured = ends_at(end)
    bracket = find_bracket(measure, start=start, stride=stride)
    assert bracket.index == end
    assert bracket.low.safe
    assert not bracket.high.safe
    assert math.isclose(bracket.high.step / bracket.low.step, 2 ** (1 / PER_OCTAVE))
    assert len(set(measured)) == len(measured)  # nothing is measured twice


@given(end=st.integers(SMALLEST + 1, 10 * PER_OCTAVE))
def test_first_search_takes_at_most_thirteen_points(end):
    measure, measured = ends_at(end)
    find_bracket(measure, start=-5 * PER_OCTAVE, stride=8)
    assert len(measured) <= 13


@given(end=st.integers(SMALLEST + 4, LARGEST - 4), shift=st.integers(-1, 2))
def test_a_neighbour_costs_three_points(end, shift):
    measure, measured = ends_at(end)
    find_bracket(measure, start=end + shift, stride=2)
    assert len(measured) <= 3


@pytest.mark.parametrize(("end", "safe"), [(LARGEST, True), (SMALLEST - 1, False)])
def test_lattice_without_an_end_is_reported(end, safe):
    measure, _ = ends_at(end)
    with pytest.raises(NoBracket) as caught:
        find_bracket(measure, start=0, stride=8)
    assert caught.value.point.safe is safe


def point(step, kappa, loss, safe):
    return Point(step=step, kappa=kappa, loss=loss, safe=safe)


@given(end=st.floats(1.0, 1.5))
def test_crossing_is_exact_where_the_change_is_proportional_to_the_step(end):
    bracket = Bracket(0, point(1.0, 1 / end, -1.0, True), point(1.6, 1.6 / end, -1.0, False))
    assert math.isclose(crossing(bracket, max_kappa=1.0, loss=lambda step: 0.0), end, rel_tol=1e-12)


def test_crossing_of_the_loss_counts_if_it_comes_first():
    bracket = Bracket(0, point(1.0, 0.5, -1.0, True), point(2.0, 1.1, 3.0, False))
    assert math.isclose(crossing(bracket, max_kappa=1.0, loss=lambda step: 0.0), 1.25)


def test_crossing_of_a_limit_that_falls_with_the_step_counts_even_if_the_loss_does_not_rise():
    bracket = Bracket(0, point(1.0, 0.5, -1.0, True), point(2.0, 1.0, -1.0, False))
    # -1 = -0.75 h at h = 4/3
    assert math.isclose(crossing(bracket, max_kappa=1.0, loss=lambda step: -0.75 * step), 4 / 3)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_crossing_stays_at_the_safe_end_if_the_other_is_not_finite(bad):
    bracket = Bracket(0, point(1.0, 0.5, 0.0, True), point(2.0, bad, bad, False))
    assert crossing(bracket, max_kappa=1, loss=lambda step: 0.0) == 1.0
