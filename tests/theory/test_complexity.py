"""Iteration counts: against a loop written from the formula, by hand, and by the clock."""

import math

import numpy as np
import pytest

from curvestep import steps
from curvestep.theory.complexity import (
    FIRST_BLOCK,
    LARGEST_BLOCK,
    complexity_limits,
    descend,
    first_hit,
    first_hits,
    hitting_time,
    noisy_complexity,
    walk,
    worst_case_complexity,
)
from curvestep.theory.problems.base import BoundedNoise
from curvestep.theory.problems.polynomials import Quadratic, Quartic
from curvestep.theory.problems.walls import ExponentialWall, SlowValley
from curvestep.theory.rules import ClippedStep, FixedStep, NormalizedStep
from curvestep.theory.theorems.clipped_gd import theorem3
from tests.theory.draws import rotated_walls


# Row 11.
def test_first_hit_is_the_first_iteration_at_most_eps_and_inf_if_never():
    norms = np.array([[3.0, 3.0, 1.0, math.nan], [1.0, 2.0, 5.0, 1.5], [0.5, 1.1, 0.1, 1.0]])
    np.testing.assert_array_equal(first_hit(norms, 1.0), [1, math.inf, 0, 2])
    assert first_hit([5.0, 4.0], 1.0) == math.inf


def test_hitting_time_is_the_median_with_runs_that_never_hit_at_infinity():
    assert hitting_time([1.0, 2.0, 3.0]).median == 2
    assert hitting_time([4.0, 1.0, 2.0, 3.0]).median == 2  # by then at least half have hit
    assert hitting_time([1.0, math.inf, math.inf]).median == math.inf


def test_hitting_time_interval_covers_the_median_as_often_as_said():
    rng = np.random.default_rng(0)
    true = math.ceil(math.log(0.5) / math.log(1 - 0.03))  # first t with P(T > t) ≤ ½ for a geometric law
    covered = 0
    for _ in range(1000):
        hits = rng.geometric(0.03, size=41).astype(float)
        hits[hits > 60] = math.inf  # censored
        time_ = hitting_time(hits, confidence=0.95)
        covered += time_.low <= true <= time_.high
    assert covered >= 940


def test_few_runs_know_no_interval():
    few = hitting_time([5.0, 6.0, 7.0])
    assert (few.low, few.high) == (0.0, math.inf)


def slow_twin(problem, rule, x0, num_steps):
    """One run, one number at a time, straight from the formula."""
    x = np.array(x0, dtype=float)
    path = [x]
    for _ in range(num_steps):
        g = problem.gradient(x)
        norm = float(np.sqrt((np.asarray(g) ** 2).sum()))
        x = x - rule(norm) * g
        path.append(x)
    return np.array(path)


@pytest.mark.parametrize(
    "num_steps", [0, 1, FIRST_BLOCK - 1, FIRST_BLOCK, FIRST_BLOCK + 1, 3 * LARGEST_BLOCK + 5]
)
def test_descent_on_many_runs_is_each_run_by_itself(num_steps):
    lrs, starts = np.array([[1.0], [5.0]]), np.array([3.0, -2.0, 0.1])
    runs = descend(Quartic(), ClippedStep(lr=lrs, max_norm=0.01), starts, num_steps)
    hits = first_hits(Quartic(), ClippedStep(lr=lrs, max_norm=0.01), starts, 1e-3, num_steps)
    assert runs.points.shape == (num_steps + 1, 2, 3)
    for i, lr in enumerate(lrs[:, 0]):
        for j, start in enumerate(starts):

            def rule(g, lr=lr):
                return steps.clipped_step(g, lr=float(lr), max_norm=0.01)

            path = slow_twin(Quartic(), rule, start, num_steps)
            np.testing.assert_allclose(runs.points[:, i, j], path, rtol=1e-9, atol=1e-12)
            assert hits[i, j] == first_hit(np.abs(4 * path**3), 1e-3)


def test_descent_in_space_is_each_run_by_itself():
    f = rotated_walls(L0=1.0, L1=2.0)
    starts = np.random.default_rng(0).normal(size=(4, 3))
    runs = descend(f, NormalizedStep(lr=0.1, offset=np.array([0.1, 0.2, 0.5, 1.0])), starts, 200)
    for j, offset in enumerate([0.1, 0.2, 0.5, 1.0]):

        def rule(g, offset=offset):
            return steps.normalized_step(g, lr=0.1, offset=offset)

        np.testing.assert_allclose(
            runs.points[:, j], slow_twin(f, rule, starts[j], 200), rtol=1e-9, atol=1e-12
        )
    np.testing.assert_allclose(runs.grad_norms, f.grad_norm(runs.points))


def test_hits_are_those_of_the_whole_run_and_end_it():
    rule = ClippedStep(lr=np.array([1.0, 5.0]), max_norm=0.01)
    full = first_hit(descend(Quartic(), rule, 3.0, 2500).grad_norms, 1e-3)
    np.testing.assert_array_equal(first_hits(Quartic(), rule, 3.0, 1e-3, 10**9), full)
    np.testing.assert_array_equal(
        first_hits(Quartic(), rule, 3.0, 1e-3, int(full.min())), [math.inf, full.min()]
    )


def test_a_diverging_run_never_hits_and_stops_no_other():
    wall = ExponentialWall(L0=1.0, L1=1.0)
    rule = FixedStep(lr=np.array([0.1, 10.0]))
    np.testing.assert_array_equal(np.isfinite(descend(wall, rule, 3.0, 3000).grad_norms[-1]), [True, False])
    np.testing.assert_array_equal(np.isfinite(first_hits(wall, rule, 3.0, 1e-6, 3000)), [True, False])


def test_noise_enters_direction_and_norm_and_is_seeded():
    f, rule = Quadratic([1.0, 1.0]), ClippedStep(lr=0.5, max_norm=0.3)
    noise = BoundedNoise(0.2)
    runs = [descend(f, rule, np.ones((5, 2)), 100, noise=noise, seed=seed).points for seed in (0, 0, 1)]
    np.testing.assert_array_equal(runs[0], runs[1])
    assert (runs[0] != runs[2]).any()
    moves = np.linalg.norm(np.diff(runs[0], axis=0), axis=-1)
    assert moves.max() <= 0.5 * 0.3 + 1e-12  # the cap holds for the noisy gradient
    # Undo the step: where it was not clipped, move / lr − gradient is the noise, of length 0.2.
    g = f.gradient(runs[0][:-1])
    drawn = -np.diff(runs[0], axis=0) / 0.5 - g
    unclipped = moves < 0.5 * 0.3 - 1e-9
    np.testing.assert_allclose(np.linalg.norm(drawn, axis=-1)[unclipped], 0.2, rtol=1e-9)
    assert unclipped.sum() > 50


def test_every_noise_value_is_used_once_across_blocks():
    class Ones(BoundedNoise):
        def draw(self, rng, batch, problem):
            return np.ones(batch)

    num_steps = 2 * LARGEST_BLOCK + 3
    blocks = walk(Quadratic([1e-300]), FixedStep(lr=1.0), np.zeros((1, 1)), 0)
    assert [start for start, _ in blocks] == [0]
    flat = descend(Quartic(), FixedStep(lr=1e-12), np.zeros(2), num_steps, noise=Ones(1.0))
    np.testing.assert_allclose(flat.points[-1], -1e-12 * num_steps, rtol=1e-9)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: first_hit([1.0], 0.0), "`eps` must be positive"),
        (lambda: hitting_time([math.nan]), "`hits` must not be NaN"),
        (lambda: hitting_time([]), "`hits` must have one entry"),
        (lambda: hitting_time([1.0], confidence=1.0), "`confidence` must be between"),
        (lambda: descend(Quartic(), FixedStep(lr=0.1), math.nan, 10), "`x0` must be finite"),
        (lambda: descend(Quartic(), FixedStep(lr=0.1), 1.0, -1), "`num_steps` must be a whole number"),
        (lambda: first_hits(Quartic(), FixedStep(lr=0.1), 1.0, -1.0, 10), "`eps` must be positive"),
        (lambda: descend(Quadratic([1.0, 1.0]), FixedStep(lr=0.1), 1.0, 10), "`x0` must have 2 coordinates"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.slow
def test_complexity_lies_below_theorem_3_on_500_random_classes():
    rng = np.random.default_rng(0)
    for _ in range(500):
        L0, L1 = 10 ** rng.uniform(-1, 1, 2)
        wall = ExponentialWall(L0=L0, L1=L1)
        starts = rng.uniform(0.2, 3, 3) / L1
        gap = float(wall.gap(starts).max())
        eps = 10 ** rng.uniform(-1, -0.3) * float(wall.grad_norm(starts).min())
        upper = theorem3(L0=L0, L1=L1, gap=gap, eps=eps, version="sharp")
        family = [(wall, x0) for x0 in starts]
        worst = worst_case_complexity([upper.rule], family, gap=gap, eps=eps, max_steps=300)
        assert 0 < worst <= upper.bound
        # More settings can only lower it, more functions only raise it.
        rules = [upper.rule, FixedStep(lr=1 / L0)]
        assert worst_case_complexity(rules, family, gap=gap, eps=eps, max_steps=300) <= worst
        assert worst_case_complexity([upper.rule], family[:1], gap=gap, eps=eps, max_steps=300) <= worst


def test_complexity_of_clipping_is_below_that_of_fixed_steps():
    wall_of_ten = ExponentialWall(L0=1.0, L1=1.0)
    family = [(wall_of_ten, 6.0), (Quadratic([0.01]), [10.0])]
    gap = float(wall_of_ten.gap(np.array(6.0)))
    steps = [FixedStep(lr=lr) for lr in (0.01, 0.018, 0.03)]  # the smallest are too slow, the largest diverge
    fixed = worst_case_complexity(steps, family, gap=gap, eps=0.01, max_steps=20_000)
    rules = [ClippedStep(lr=lr, max_norm=1 / lr) for lr in (0.5, 1.0)]
    clipped = worst_case_complexity(rules, family, gap=gap, eps=0.01)
    assert 5 * clipped < fixed < math.inf
    with pytest.raises(ValueError, match="above its minimum"):
        worst_case_complexity([FixedStep(lr=1.0)], family, gap=1.0, eps=0.01)


# Row 32.
def heavy_tailed(rng, shape, *, median, censored):
    """Discrete times of a given lower median with heavy tails; ``inf`` beyond the censoring."""
    times = np.maximum(1, np.ceil(median * np.exp(1.5 * rng.normal(size=shape))))
    # As many above as below would leave the median between; a mass on it makes it the lower median.
    times = np.where(rng.random(shape) < 0.02, median, times)
    return np.where(times > censored, math.inf, times)


def misses(num_rules, num_functions, *, num_runs=31, repetitions=300, seed=0):
    """How often a limit is beyond the true value, 40, and what plug-in and uncorrected limits give."""
    rng = np.random.default_rng(seed)
    too_high = 0
    too_low = 0
    for _ in range(repetitions):
        hits = heavy_tailed(rng, (num_rules, num_functions, num_runs), median=40, censored=400)
        found = complexity_limits(hits, max_steps=400)
        too_high += found.low > 40
        too_low += found.high < 40
    return too_high / repetitions, too_low / repetitions


@pytest.mark.parametrize("shape", [(1, 40), (40, 1), (12, 8), (8, 6)])
def test_limits_of_the_complexity_hold_as_often_as_they_say(shape):
    too_high, too_low = misses(*shape)
    assert too_high <= 0.05
    assert too_low <= 0.05


def test_limits_are_order_statistics_by_hand():
    times = np.arange(1.0, 12.0)  # eleven runs: P(Bin(11, ½) < 2) = 0.006, < 3 = 0.033
    found = complexity_limits(times[None, None], max_steps=100, confidence=0.95)
    assert (found.low, found.estimate, found.high) == (2, 6, 10)
    two = complexity_limits(np.stack([times, times + 5])[None], max_steps=100, confidence=0.95)
    assert (two.low, two.estimate, two.high) == (7, 11, 15)
    late = complexity_limits(np.where(times > 1, math.inf, times)[None, None], max_steps=100)
    assert (late.low, late.estimate, late.high) == (101, math.inf, math.inf)
    few = complexity_limits(np.ones((1, 1, 3)), max_steps=100)
    assert (few.low, few.high) == (0, math.inf)


def test_noisy_complexity_of_clipping_is_below_that_of_fixed_steps():
    wall = ExponentialWall(L0=1.0, L1=1.0)
    valley = SlowValley(0.1)
    x0 = wall.start(M=20.0)
    gap = float(wall.gap(np.array(x0)))
    noise = BoundedNoise(0.05)
    oracles = [(wall, x0, noise), (valley, valley.start(gap=gap), noise)]
    options = dict(gap=gap * (1 + 1e-9), eps=0.1, max_steps=4000)
    rules = [FixedStep(lr=share * wall.largest_step(M=20.0)) for share in (0.5, 0.9, 1.3)]
    fixed = noisy_complexity(rules, oracles, **options)
    clipped = noisy_complexity([ClippedStep(lr=lr, max_norm=1.0) for lr in (0.5, 0.9)], oracles, **options)
    assert clipped.low <= clipped.estimate <= clipped.high
    assert 2 * clipped.high < fixed.low
    assert fixed.low <= fixed.estimate <= fixed.high < math.inf
    # Steps beyond the limit of the wall never arrive.
    assert noisy_complexity(rules[-1:], oracles, **options).low == 4001
    with pytest.raises(ValueError, match="above its minimum"):
        noisy_complexity(rules, oracles, gap=0.1, eps=0.1)


@pytest.mark.parametrize("hits", [np.ones((3, 4)), np.ones((0, 1, 3)), np.full((1, 1, 3), math.nan)])
def test_hits_of_another_shape_are_refused(hits):
    with pytest.raises(ValueError, match="must have the shape"):
        complexity_limits(hits, max_steps=10)
