"""Budgets of time, under a clock that only the test moves: every number here is exact arithmetic."""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from curvestep.smoothness.probe import SmoothnessProbe
from curvestep.smoothness.schedule import Schedule


class Clock:
    """A clock that stands still unless it is told how long something took."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def advance(self, seconds):
        self.now += seconds


def simulate(schedule, clock, *, steps, cost, step_time=lambda k: 1.0):
    """Steps of ``step_time(k)``, measurements of ``cost(i)``; what was measured when, and the total time."""
    measured, plain = [], 0.0
    for k in range(steps):
        clock.advance(step_time(k))
        plain += step_time(k)
        spent = 0.0
        if k == schedule.next:
            spent = cost(len(measured))
            clock.advance(spent)
            measured.append(k)
        schedule.finished(k, spent=spent, routine=len(measured) != 1)
        if schedule.needs_plan(k):
            schedule.plan(k)
    return measured, clock.now / plain


def test_without_budget_every_nth_step_is_measured():
    clock = Clock()
    schedule = Schedule(every=7, clock=clock)
    measured, _ = simulate(schedule, clock, steps=50, cost=lambda i: 100.0)
    assert measured == list(range(0, 50, 7))


@pytest.mark.parametrize("cost", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("budget", [0.02, 0.05, 0.5])
def test_budget_is_spent_whole_and_never_exceeded(cost, budget):
    clock = Clock()
    schedule = Schedule(every=2, max_overhead=budget, first_cost=cost, clock=clock)
    measured, ratio = simulate(schedule, clock, steps=2000, cost=lambda i: cost)
    assert ratio <= 1 + budget * (1 + 1e-9)
    gaps = [b - a for a, b in itertools.pairwise(measured[1:])]
    assert len(gaps) >= 5
    wanted = max(2, cost / budget)
    assert all(abs(gap - wanted) <= 1 for gap in gaps)


def test_first_long_measurement_is_paid_back_over_the_following_steps():
    clock = Clock()
    schedule = Schedule(every=1, max_overhead=0.1, first_cost=1.0, clock=clock)
    measured, ratio = simulate(schedule, clock, steps=400, cost=lambda i: 1.0 if i else 5.0)
    assert measured[1] >= 59  # 5 + 1 are a tenth of 60
    assert 1.08 <= ratio <= 1.1


def test_slower_step_after_a_measurement_is_counted():
    clock = Clock()
    schedule = Schedule(every=1, max_overhead=0.05, first_cost=1.0, clock=clock)
    previous = []

    def step_time(k):
        return 1.5 if previous and previous[-1] == k - 1 else 1.0

    measured, total = previous, 0.0
    for k in range(1000):
        clock.advance(step_time(k))
        spent = 0.0
        if k == schedule.next:
            spent = 1.0
            clock.advance(spent)
        schedule.finished(k, spent=spent)
        if spent:
            measured.append(k)
        if schedule.needs_plan(k):
            schedule.plan(k)
    total = clock.now / 1000
    assert 1.045 <= total <= 1.05
    assert schedule.probe_seconds == pytest.approx(1.5 * len(measured), abs=0.5)


def test_evaluation_after_a_measurement_is_not_taken_for_its_cost():
    clock = Clock()
    schedule = Schedule(every=1, max_overhead=0.05, first_cost=1.0, clock=clock)
    evaluations = range(20, 1000, 20)
    measured, _ = simulate(
        schedule,
        clock,
        steps=1000,
        cost=lambda i: 1.0,
        step_time=lambda k: 500.0 if k in evaluations else 1.0,
    )
    assert schedule.probe_seconds <= 3.0 * len(measured)  # itself, and once more for each of two steps
    assert len(measured) >= 20


def test_slow_first_steps_do_not_pass_for_usual_ones():
    clock = Clock()
    schedule = Schedule(every=1, max_overhead=0.05, first_cost=1.0, clock=clock)
    simulate(schedule, clock, steps=8, cost=lambda i: 1.0, step_time=lambda k: 100.0 if k < 3 else 1.0)
    assert schedule.step_seconds == 1.0


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    budget=st.floats(0.01, 0.5),
    cost=st.floats(0.2, 8.0),
    jitter=st.floats(0.0, 0.5),
)
def test_run_with_jittering_costs_ends_within_its_budget_and_one_surprise(seed, budget, cost, jitter):
    draw = random.Random(seed)
    clock = Clock()
    schedule = Schedule(every=1, max_overhead=budget, first_cost=cost, clock=clock)
    costs, times = [], []

    def jittered(value, log):
        log.append(value * draw.uniform(1 - jitter, 1 + jitter))
        return log[-1]

    for k in range(3000):
        clock.advance(jittered(1.0, times))
        spent = 0.0
        if k == schedule.next:
            spent = jittered(cost, costs)
            clock.advance(spent)
        schedule.finished(k, spent=spent)
        if schedule.needs_plan(k):
            schedule.plan(k)
    surprise = 2 * jitter * cost  # of the last measurement, beyond what the one before it cost
    # The mean time of a step is known from those between measurements: up to a few per cent.
    assert sum(costs) <= budget * sum(times) * (1 + 0.2 * jitter) + surprise + 1e-9


def test_schedule_resumes_where_it_was():
    clock = Clock()
    one = Schedule(every=2, max_overhead=0.1, clock=clock)
    simulate(one, clock, steps=70, cost=lambda i: 1.0)
    two = Schedule(every=2, max_overhead=0.1, clock=clock)
    two.load_state_dict(one.state_dict())
    assert two.state_dict() == one.state_dict()
    clock.advance(1e6)  # the time between two parts of a run is nobody's
    two.finished(70)
    assert two.state_dict() == one.state_dict()


class SlowModel(nn.Module):
    """One parameter; a forward pass takes as long as the clock is told."""

    def __init__(self, clock):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0))
        self._clock, self._durations = clock, itertools.repeat(1.0)

    def forward(self, x):
        self._clock.advance(next(self._durations))
        return self.weight * x


def probed_run(steps, *, pass_time, first_passes=1.0, hidden=0.0, plain_step=1.0, **options):
    """Time of a probed run over that of the same run without, and the rows.

    ``pass_time(i)`` is the cost of the i-th replayed pass, the first three (the self-test's) times
    ``first_passes``; ``hidden`` is what the step after a measurement takes longer.
    """
    clock = Clock()
    model = SlowModel(clock)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    probe = SmoothnessProbe(model, **options)
    probe.schedule.clock = clock
    replays = itertools.count()

    def replay_cost():
        for i in replays:
            yield pass_time(i) * (first_passes if i < 3 else 1.0)

    costs, rows = replay_cost(), 0
    for _ in range(steps):
        slower = hidden if len(probe.trace) > rows else 0.0
        rows = len(probe.trace)
        model._durations = iter([plain_step + slower])
        optimizer.zero_grad()
        model(torch.tensor(2.0)).square().backward()
        model._durations = costs
        with probe(lambda: model(torch.tensor(2.0)).square()):
            optimizer.step()
    return clock.now / (steps * plain_step), rows


@pytest.mark.parametrize("fractions", [(1.0,), (0.5, 1.0)])
def test_probed_run_stays_within_its_budget_of_time(fractions):
    jitter = random.Random(0)
    ratio, rows = probed_run(
        1000,
        pass_time=lambda i: jitter.uniform(0.7, 1.6),
        first_passes=2.0,
        hidden=0.3,
        every=1,
        fractions=fractions,
        max_overhead=0.05,
    )
    assert rows >= 10
    assert 1.04 <= ratio <= 1.0505


@pytest.mark.parametrize("steps", [60, 150, 300])
def test_short_run_with_an_expensive_first_measurement_stays_within_eight_per_cent(steps):
    ratio, _ = probed_run(
        steps,
        pass_time=lambda i: 1.2,
        first_passes=2.0,
        hidden=0.3,
        every=1,
        fractions=(1.0,),
        max_overhead=0.05,
    )
    assert ratio <= 1.08
