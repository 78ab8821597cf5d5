"""The rule alone, on gains that are given: which trials are run, what is read from them, what stays open."""

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from curvestep.calibration import ladder as rule
from curvestep.calibration.calibration_words import confidence
from curvestep.calibration.ladder import Budget, Ladder, Rung, Trial, answer, budget_of, doubts, next_octave
from curvestep.notes import Note


def trial(lr, gain, *, num_steps=16, error=1e-3, **options):
    return Trial(lr=lr, num_steps=num_steps, gain=gain, error=error, **options)


def rung(gains, *, base=0.0, **options):
    """Trials at 1, 2, 4 and so on."""
    return Rung([trial(2.0**k, gain, **options) for k, gain in enumerate(gains)], base)


def climbed(gain_of, *, most=480, uses_all=False, longest=math.inf, error=1e-3, **options):
    """A ladder over gains by octave, length and threshold, with every trial's first batch."""
    asked = []

    def run(lr, max_norm, num_steps, first):
        octave = round(math.log2(lr))
        asked.append((octave, num_steps, first))
        gain = gain_of(octave, num_steps, max_norm)
        falls = tuple(gain + error * x for x in np.linspace(-1, 1, 16))
        return Trial.of(np.array(falls), lr=lr, num_steps=num_steps, max_norm=max_norm)

    found = Ladder(run, Budget(most, uses_all=uses_all, longest=longest), 1.0, **options)
    found.climb()
    return found, asked


# Reading a rung


def twin_sufficient(trials, base):
    """The same range by looking at very many rates."""
    best = max(t.gain for t in trials)
    enough = 0.8 if 0 < base < best else 0.97
    base = base if 0 < base < best else 0.0
    logs = [math.log(t.lr) for t in trials]
    shares = [max((t.gain - base) / (best - base), -1.0) for t in trials]
    fine = np.union1d(np.linspace(logs[0], logs[-1], 4_001), logs)
    good = np.interp(fine, logs, shares) >= enough
    top = int(np.argmin(np.abs(fine - logs[int(np.argmax(shares))])))
    low, high = np.flatnonzero(good[: top + 1])[0], top + np.flatnonzero(good[top:])[-1]
    return math.exp(fine[low]), math.exp(fine[high])


@given(
    gains=st.lists(st.floats(0.01, 1.0) | st.just(-math.inf), min_size=3, max_size=7),
    base=st.floats(-0.5, 0.9),
)
def test_sufficient_rates_are_those_that_a_fine_grid_finds(gains, base):
    gains[len(gains) // 2] = 1.0
    given = rung(gains, base=base)
    assert given.sufficient() == pytest.approx(twin_sufficient(given.trials, base), rel=3e-3)


def test_plateau_that_shorter_trials_reach_already_does_not_count():
    gains = [0.9, 0.975, 0.98, 1.0, 0.9]
    first, next_one = rung(gains), rung(gains, base=0.95)
    assert first.sufficient()[0] < 4
    assert next_one.sufficient()[0] > 4


def test_trials_that_never_gained_point_to_the_least_harm():
    lost = rung([-1.0, -2.0, -3.0])
    assert lost.sufficient() == (1.0, 1.0)
    assert (answer([lost], None), doubts([lost])) == (0.5, ["unknown"])


# From the rungs to the run


@pytest.mark.parametrize(
    ("below", "last", "num_steps", "factor"),
    [
        (2.0, 2.0, 10**6, 1.0),  # stands still
        (1.0, 4.0, 10**6, 1.0),  # rises: left alone
        (2.0, 1.9, 432, 1.9 / 2.0),  # one rung further
        (2.0, 1.9, 432 * 3, (1.9 / 2.0) ** 2),
        (4.0, 2.0, 432, 0.5),
        (8.0, 1.0, 10**6, 0.5),  # at most two
        (8.0, 1.0, 144, 1.0),  # the trials are as long as the run
        (8.0, 1.0, 50, 1.0),
    ],
)
def test_answer_goes_on_falling_to_the_length_of_the_run(below, last, num_steps, factor):
    def at(lr, length):
        return Rung([trial(lr / 2, 0.1), trial(lr, 1.0, num_steps=length), trial(2 * lr, 0.1)], 0.0)

    rungs = [at(below, 48), at(last, 144)]
    rungs = [
        Rung([trial(t.lr, t.gain, num_steps=k) for t in r.trials])
        for r, k in zip(rungs, (48, 144), strict=True)
    ]
    assert answer(rungs, num_steps) == pytest.approx(factor * rungs[-1].answer)


@pytest.mark.parametrize(
    ("gains", "options", "below", "kinds"),
    [
        ([0.1, 0.5, 1.0, 0.5, 0.1], {}, 4.0, []),
        ([0.1, 0.5, 1.0, 0.5, 0.1], {}, 13.0, ["lengths"]),
        ([0.1, 0.5, 1.0, 0.5, 0.1], {}, None, ["one-length"]),
        ([0.1, 0.5, 1.0, 0.5, 0.1], {"error": 0.2}, 4.0, ["noise"]),
        ([0.1, 0.5, 1.0, 0.5, 0.1], {"error": 0.6}, 4.0, ["unknown"]),
        ([0.1, 0.5, 1.0], {}, 4.0, ["edge"]),
        ([1.0, 0.5, 0.1], {}, 1.0, ["edge"]),
        ([0.1, 0.99, 1.0, 1.0, 0.99, 1.0, 0.99, 0.1], {}, 12.0, ["flat"]),
    ],
)
def test_what_trials_leave_open_is_named_and_nothing_of_it_is_high(gains, options, below, kinds):
    rungs = [rung(gains, num_steps=48, **options)]
    if below is not None:
        rungs.insert(0, Rung([trial(below / 2, 0.1), trial(below, 1.0), trial(below * 2, 0.1)]))
    assert doubts(rungs) == kinds
    said = confidence([Note(kind, "") for kind in kinds])
    assert said == ("high" if not kinds else "cannot tell" if kinds == ["unknown"] else "medium")
    assert confidence([Note("iterator", "")]) == "high"


# Which trials are run


def peaked(best, width=2.0):
    """Gains with a peak; longer trials gain more."""
    return lambda octave, num_steps, _: math.log(num_steps) - 0.3 * ((octave - best) / width) ** 2


@pytest.mark.parametrize("best", [0, 1, -3, 5, -7])
def test_rungs_bracket_the_best_and_each_has_fresh_batches(best):
    found, asked = climbed(peaked(best))
    assert [r.num_steps for r in found.rungs] == [16, 48]
    assert not found.rungs[-1].is_at_an_end
    assert {(length, first) for _, length, first in asked} == {(16, 0), (48, 16)}
    assert answer(found.rungs, 48) == pytest.approx(2.0**best, rel=0.5)
    assert len(found.rungs[1].trials) >= 3


@pytest.mark.parametrize(
    ("most", "lengths"),
    [(48, [16]), (80, [16]), (160, [16]), (224, [16, 48]), (320, [16, 48]), (640, [16, 48, 138]),
     (2000, [16, 48, 144, 432])],
)  # fmt: skip
def test_budget_buys_longer_trials_and_is_kept(most, lengths):
    found, asked = climbed(peaked(0), most=most, uses_all=True)
    assert [r.num_steps for r in found.rungs] == lengths
    assert sum(length for _, length, _ in asked) <= most


def test_doubtful_answer_gets_longer_trials_by_itself():
    lengths = [r.num_steps for r in climbed(peaked(0), error=4.0)[0].rungs]
    assert lengths == [16, 48, 85]
    assert lengths[:2] == [r.num_steps for r in climbed(peaked(0))[0].rungs]


@pytest.mark.parametrize("longest", [3, 10, 16, 40, 100])
def test_no_trial_is_longer_than_the_run(longest):
    found, _ = climbed(peaked(0), most=10_000, uses_all=True, longest=longest)
    assert found.rungs[-1].num_steps <= longest
    assert found.rungs[0].num_steps == min(16, longest)


@pytest.mark.parametrize(
    ("budget", "num_steps", "most"),
    [(None, None, 480), (None, 2000, 480), (None, 20_000, 1000), (100, None, 100), (0.5, 1000, 500),
     (1.0, 1000, 1000), (1, 700, 700), (30, 10, 30)],
)  # fmt: skip
def test_budget_is_gradients_or_a_share_of_the_run(budget, num_steps, most):
    found = budget_of(budget, num_steps)
    assert (found.most, found.uses_all) == (most, budget is not None)


def test_next_octave_goes_beyond_an_end_or_between():
    assert next_octave({0: 1.0, 2: 0.5, 4: 0.1}) == -2
    assert next_octave({0: 0.1, 2: 1.0, 4: 0.5}) == 3
    assert next_octave({1: 0.1, 2: 1.0, 3: 0.5}) is None


# Thresholds


def jumping(octave, num_steps, max_norm):
    """Without the threshold, rates above one do harm; with it, they gain most."""
    reach = 2 if max_norm < math.inf else 0
    return math.log(num_steps) * (1.0 if octave <= reach else -1.0) - 0.2 * abs(octave - 2)


def test_threshold_is_earned_where_trials_with_it_gain_more():
    found, asked = climbed(jumping, most=640, to_earn=0.5)
    assert found.max_norm == 0.5
    assert answer(found.rungs, 48) == pytest.approx(4.0, rel=0.5)
    last = [(octave, first) for octave, length, first in asked if length == found.rungs[-1].num_steps]
    assert len({first for _, first in last}) == 1  # on the same batches


@pytest.mark.parametrize("better", [0.0, 0.001, -0.5])
def test_threshold_that_is_not_earned_is_left_out(better):
    def gain_of(octave, num_steps, max_norm):
        return peaked(0)(octave, num_steps, max_norm) + better * (max_norm < math.inf)

    found, _ = climbed(gain_of, most=640, to_earn=0.5)
    plain, _ = climbed(gain_of, most=640)
    assert found.max_norm == math.inf
    assert answer(found.rungs, 1000) == answer(plain.rungs, 1000)


def test_noise_earns_no_threshold():
    draws = np.random.default_rng(0)

    def run(lr, max_norm, num_steps, first):
        falls = math.log(num_steps) - abs(math.log(lr)) + 3 * draws.normal(size=16)
        return Trial.of(falls, lr=lr, num_steps=num_steps, max_norm=max_norm)

    earned = 0
    for _ in range(50):
        found = Ladder(run, Budget(640, uses_all=False), 1.0, to_earn=0.5)
        found.climb()
        earned += math.isfinite(found.max_norm)
    assert earned <= 5


def test_constants_are_those_that_were_judged():
    names = ("FIRST_STEPS", "GROWTH", "FIRST_SHARE", "SHARE", "MOST_DRIFT", "AGREE", "APART")
    assert [getattr(rule, name) for name in names] == [16, 3, 0.97, 0.8, 2.0, 3.0, 4.0]
