"""When the probe measures and where on a step: counted in gradients, so that every number here is exact."""

import itertools
import statistics

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import curvestep as cs
from curvestep.smoothness.schedule import Schedule, short_fractions
from tests.smoothness.loops import block_steps


def measured(schedule, *, steps, cost=lambda row: 3):
    """Steps that are measured, where row i costs ``cost(i)`` gradients."""
    found = []
    for step in range(steps):
        gradients = cost(len(found)) if step == schedule.next else 0
        found += [step] * (step == schedule.next)
        schedule.finished(step, num_gradients=gradients)
    return found


def test_interval_alone_is_kept_whatever_rows_cost():
    assert measured(Schedule(every=7), steps=50, cost=lambda row: 100) == list(range(0, 50, 7))


def test_default_measures_ten_rows_soon_then_one_gradient_in_twenty():
    rows = measured(Schedule(), steps=2000)
    assert rows[:10] == list(range(0, 50, 5))
    assert {b - a for a, b in itertools.pairwise(rows[9:])} == {60}


def test_budget_is_never_more_often_than_the_interval():
    rows = measured(Schedule(every=100, max_overhead=0.5), steps=3000)
    assert {b - a for a, b in itertools.pairwise(rows)} == {100}


@given(
    costs=st.lists(st.integers(1, 200), min_size=30, max_size=30),
    share=st.floats(0.01, 1.0),
    every=st.integers(1, 20),
)
def test_after_ten_rows_every_row_is_paid_by_the_steps_that_follow_it(costs, share, every):
    schedule = Schedule(every=every, max_overhead=share)
    rows = measured(schedule, steps=3000, cost=lambda row: costs[row % 30])
    for row, (one, two) in enumerate(itertools.pairwise(rows)):
        if row >= 9:
            assert costs[row % 30] <= share * (two - one) * (1 + 1e-12)
    assert schedule.num_gradients == sum(costs[row % 30] for row in range(len(rows)))


def test_schedule_resumes_where_it_was():
    one = Schedule()
    measured(one, steps=70)
    two = Schedule()
    two.load_state_dict(one.state_dict())
    assert two.state_dict() == one.state_dict()
    two.load_state_dict({"next": 80, "train_seconds": 3.0, "train_steps": 5})  # of a checkpoint of before
    assert two.next == 80


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=5))
def test_short_fractions_stay_before_the_overshoot_of_the_median_step(rates):
    first, second = short_fractions(rates)
    assert first == second / 3
    middle = statistics.median(rates)
    assert second <= 0.5
    assert second * middle <= 0.25 * (1 + 1e-12)
    assert second == 0.5 or second * middle > 0.125  # and are not shorter than they must be


class Quadratic(nn.Module):
    """½ λ x², whose step of SGD changes the gradient by lr·λ times itself."""

    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.tensor([3.0, -1.0], dtype=torch.float64))
        self.scale = 1.0

    def forward(self):
        return 0.5 * self.scale * self.x.square().sum()


def probed(steps, *, scale_of=lambda step: 1.0, watch=False, **options):
    model = Quadratic()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    probe = cs.SmoothnessProbe(model, on_error="raise", **options)
    probe = probe.watch(optimizer) if watch else probe
    for step in range(steps):
        model.scale = scale_of(step)
        optimizer.zero_grad()
        if watch:
            probe.record(model).backward()
            optimizer.step()
            continue
        model().backward()
        with probe(model):
            optimizer.step()
        model.x.data.fill_(3.0)
    return probe


@pytest.mark.parametrize(("watch", "each"), [(False, 3), (True, 4)])  # a hook computes the gradient again
def test_default_row_takes_three_gradients_and_says_so(watch, each):
    probe = probed(60, scale_of=lambda step: 0.1, watch=watch)
    costs = probe.trace.column("num_gradients")
    assert probe.trace.column("step").tolist() == list(range(0, 50, 5))
    assert costs.tolist() == [each] * 10  # self-tests apart: a resumed run takes them again
    assert probe.trace.column("fractions").shape == (10, 3)
    assert repr(probe) == (
        f"<SmoothnessProbe: 10 rows in 60 steps, {costs.sum():.0f} extra gradients ({costs.sum() / 60:.0%})>"
    )


def test_oracle_counts_its_batches():
    model = Quadratic()
    oracle = cs.GradientOracle(lambda _: model(), [0, 1, 2], sizes=[1, 1, 1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = cs.SmoothnessProbe(model, every=1, fractions=(1.0,), oracle=oracle, on_error="raise")
    block_steps(probe, optimizer, model, 4)
    assert probe.trace.column("num_gradients")[-1] == 6  # at the start and at the end of the step


def test_fractions_follow_the_curvature_of_the_last_rows():
    probe = probed(40, every=1, scale_of=lambda step: 0.1 if step < 20 else 8.0)
    fractions = probe.trace.column("fractions")
    assert fractions[:20].tolist() == [[0.5 / 3, 0.5, 1.0]] * 20
    assert fractions[25:].tolist() == [[0.03125 / 3, 0.03125, 1.0]] * 15  # γκ at most a quarter: γ = 2⁻⁵
    changes = fractions[25:, 1] * probe.trace.column("secants")[25:, 1]
    assert changes == pytest.approx([0.25] * 15)


def test_resumed_probe_chooses_the_same_fractions(tmp_path):
    def run(probe, count):
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        block_steps(probe, optimizer, model, count, before=lambda: model.x.data.fill_(3.0))

    model = Quadratic()
    model.scale = 3.0
    whole, first, second = (cs.SmoothnessProbe(model, every=1) for _ in range(3))
    run(whole, 8)
    run(first, 4)
    second.load_state_dict(first.state_dict())
    run(second, 4)
    assert second.trace.column("fractions").tolist() == whole.trace.column("fractions")[4:].tolist()


def test_fit_and_advise_take_the_probe_itself():
    probe = probed(60, every=5, scale_of=lambda step: 0.1)
    assert str(cs.fit_smoothness(probe)) == str(cs.fit_smoothness(probe.trace))
    assert str(cs.advise(probe)) == str(cs.advise(probe.trace))


def test_a_gradient_that_does_not_change_chooses_no_fractions():
    model = nn.Linear(2, 1)
    probe = cs.SmoothnessProbe(model, every=1)
    block_steps(probe, torch.optim.SGD(model.parameters(), lr=0.1), lambda: model(torch.ones(1, 2)).sum(), 2)
    assert probe.trace.ok.all()
    assert probe.trace[1]["fractions"] == [*short_fractions([]), 1.0]
