r"""How many iterations descent takes: many runs at once, and the first time the gradient is small."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import binom

from curvestep.checks import check_count, check_inside, check_positive
from curvestep.theory.problems.base import Array, Noise, Problem
from curvestep.theory.rules import Iterate, Step, StepRule

# Iterates looked at together: few numpy calls for each iteration, little memory.
LARGEST_BLOCK = 1024
FIRST_BLOCK = LARGEST_BLOCK // 16


def first_hit(grad_norms: ArrayLike, eps: float) -> Array:
    r"""Iteration complexity of runs: the first iteration with a small enough gradient.

    .. math::
        T_\varepsilon = \inf\{t : \lVert\nabla f(x_t)\rVert \le \varepsilon\}

    Args:
        grad_norms: Gradient norms, iterations along the first axis, starting with that of x0.
        eps: :math:`\varepsilon > 0`.

    Returns:
        The first iteration of each run; ``inf`` for a run that never gets there. NaN is never a hit.

    Example:
        >>> first_hit([[4.0, 9.0], [2.0, 8.0], [1.0, 7.0], [2.0, 6.0]], eps=1.5)
        array([ 2., inf])
    """
    check_positive("eps", eps)
    hit = np.asarray(grad_norms, dtype=np.float64) <= eps
    return np.where(hit.any(axis=0), hit.argmax(axis=0), math.inf)


@dataclass(frozen=True, kw_only=True)
class HittingTime:
    """Iteration complexity of a random process, from many runs."""

    median: float  # the first iteration by which at least half of the runs have hit; inf if fewer ever did
    low: float  # lower end of the interval for it
    high: float  # upper end of the interval for it; inf if too few runs hit to know one


def hitting_time(hits: ArrayLike, *, confidence: float = 0.95) -> HittingTime:
    r"""The paper's stochastic complexity :math:`\inf\{t : P(\text{no hit by } t) \le \tfrac12\}`, estimated.

    It is the median of the first hits, runs that never hit counted as infinite. The interval is made of order
    statistics, so it assumes nothing about the law; ends are infinite where censoring hides them.

    Args:
        hits: First hits of independent runs, ``inf`` where a run never hit.
        confidence: The interval holds the true median with at least this probability.

    Example:
        >>> t = hitting_time([3, 5, 6, 8, 9, 11, 12, 20, float("inf"), float("inf")])
        >>> t.median, (t.low, t.high)
        (9.0, (5.0, inf))
    """
    times = np.sort(np.ravel(np.asarray(hits, dtype=np.float64)))
    n = times.size
    if n == 0:
        raise ValueError("`hits` must have one entry for each run, got none.")
    if np.isnan(times).any():
        raise ValueError("`hits` must not be NaN. A run that never hits counts as inf.")
    check_inside("confidence", confidence, 0, 1)
    # The true median lies below the k-th smallest with probability P(Binomial(n, ½) < k).
    below = int(binom.ppf((1 - confidence) / 2, n, 0.5))
    low = 0.0
    high = math.inf
    if below > 0:
        low = float(times[below - 1])
        high = float(times[n - below])
    return HittingTime(median=float(times[math.ceil(n / 2) - 1]), low=low, high=high)


@dataclass(frozen=True, kw_only=True)
class Descent:
    """Many runs of descent, side by side."""

    points: Array  # iterates, iterations along the first axis, starting with x0
    grad_norms: Array  # gradient norms at these; a run that diverges ends in inf or NaN


def descend(
    problem: Problem,
    step: Step,
    x0: ArrayLike,
    num_steps: int,
    *,
    noise: Noise | None = None,
    seed: int = 0,
) -> Descent:
    r"""Run :math:`x_{k+1} = x_k - h_k\,g_k`, for many step sizes and starts at once.

    The parameters of a step rule and the starts ``x0`` are broadcast against each other.

    Args:
        problem: The function.
        step: The step rule, whose hyperparameters may be arrays, or any function of a point.
        x0: Starts; one point, or many.
        num_steps: Number of iterations.
        noise: Noise to add to every gradient; direction and norm both see it.
        seed: Seed of the noise.

    Example:
        Three step sizes on x⁴ from 30; the largest diverges:

        >>> from curvestep.theory.problems.polynomials import Quartic
        >>> from curvestep.theory.rules import FixedStep
        >>> runs = descend(Quartic(), FixedStep(lr=np.array([1e-4, 3e-4, 6e-4])), 30.0, 2000)
        >>> first_hit(runs.grad_norms, eps=1.0), np.isfinite(runs.grad_norms[-1])
        (array([ inf, 977.,  inf]), array([ True,  True, False]))
    """
    blocks = walk(problem, step, x0, num_steps, noise=noise, seed=seed)
    points = np.concatenate([block.copy() for _, block in blocks])
    with np.errstate(over="ignore", invalid="ignore"):
        return Descent(points=points, grad_norms=problem.grad_norm(points))


def descend_with_momentum(
    problem: Problem,
    x0: ArrayLike,
    *,
    lrs: Array,
    betas: Array,
    noise: Noise | None = None,
    seed: int = 0,
) -> Descent:
    r"""Run normalized descent with momentum, for one start or many.

    .. math::
        m_t = \beta_tm_{t-1} + (1 - \beta_t)g_t, \qquad x_{t+1} = x_t - \eta_tm_t/\lVert m_t\rVert

    Args:
        problem: The function.
        x0: Starts; one point, or many.
        lrs: The length of each step.
        betas: What stays of the momentum in each step.
        noise: Noise to add to every gradient.
        seed: Seed of the noise.

    Example:
        >>> from curvestep.theory.problems.polynomials import Quadratic
        >>> lrs = np.array([1.0, 0.5, 0.25])
        >>> descend_with_momentum(Quadratic([3.0]), [2.0], lrs=lrs, betas=np.zeros(3)).points[:, 0]
        array([2.  , 1.  , 0.5 , 0.25])
    """
    x = problem.check_start(x0)
    batch = x.shape[: x.ndim - len(problem.event_shape)]
    rng = np.random.default_rng(seed)
    momentum = np.zeros(x.shape)
    points = [x]
    for lr, beta in zip(lrs, betas, strict=True):
        g = problem.gradient(x)
        if noise is not None:
            g = g + noise.draw(rng, batch, problem)
        momentum = beta * momentum + (1 - beta) * g
        norm = problem.norm(momentum)
        x = x - problem.scale(np.asarray(lr / np.where(norm > 0, norm, 1.0)), momentum)
        points.append(x)
    path = np.array(points)
    return Descent(points=path, grad_norms=problem.grad_norm(path))


def first_hits(
    problem: Problem,
    step: Step,
    x0: ArrayLike,
    eps: float,
    num_steps: int,
    *,
    noise: Noise | None = None,
    seed: int = 0,
) -> Array:
    """The first hit of each run of at most so many steps; it ends soon after the last of them."""
    hits = np.array(math.inf)
    for start, block in walk(problem, step, x0, num_steps, noise=noise, seed=seed):
        with np.errstate(over="ignore", invalid="ignore"):
            hits = np.minimum(hits, start + first_hit(problem.grad_norm(block), eps))
        if np.isfinite(hits).all():
            break
    return hits


def walk(
    problem: Problem,
    step: Step,
    x0: ArrayLike,
    num_steps: int,
    *,
    noise: Noise | None = None,
    seed: int = 0,
) -> Iterator[tuple[int, Array]]:
    """The iterates in blocks: the number of the first in a block, and the block, iterations first.

    Together the blocks hold every iterate from 0 to ``num_steps`` once. They grow, so that whoever stops
    early has lost little; each is overwritten by the next.
    """
    check_count("num_steps", num_steps, least=0)
    event = problem.event_shape
    starts = problem.check_start(x0)
    batch = starts.shape[: starts.ndim - len(event)]
    if isinstance(step, StepRule):
        batch = np.broadcast_shapes(batch, *[np.shape(value) for value in step.parameters.values()])
    if not batch:  # numpy turns a lone number into a scalar, which cannot be written to
        for done, block in walk(problem, step, starts[None], num_steps, noise=noise, seed=seed):
            yield done, block[:, 0]
        return
    if isinstance(step, StepRule):
        step = step.stepper(batch)
    rng = np.random.default_rng(seed)
    buffer = np.empty((min(LARGEST_BLOCK, num_steps + 1), *batch, *event))
    # Views made once: indexing costs as much as arithmetic on few points.
    rows = [buffer[i, ...] for i in range(len(buffer))]
    norm = problem.norm if event else np.absolute
    scale = problem.scale if event else np.multiply
    x = rows[0]
    x[...] = starts
    begin = 1
    done = 0
    size = FIRST_BLOCK
    # A run that diverges overflows; it must neither warn nor stop the others.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        while done <= num_steps:
            num = min(size, len(rows), num_steps + 1 - done)
            drawn = noise.draw(rng, (num, *batch), problem) if noise is not None else [0.0] * num
            for row, z in zip(rows[begin:num], drawn[begin:], strict=True):
                g = problem.gradient(x)
                if noise is not None:
                    g = g + z
                h = step(Iterate(x, g, norm(g), problem))
                x = np.subtract(x, scale(h, g), row)
            yield done, buffer[:num]
            begin = 0
            done += num
            size *= 2


def worst_case_complexity(
    rules: Iterable[StepRule],
    starts: Iterable[tuple[Problem, ArrayLike]],
    *,
    gap: float,
    eps: float,
    max_steps: int = 100_000,
) -> float:
    r"""Complexity of a family of step rules on a family of functions, equation 9 of the paper.

    .. math::
        \mathcal N(\mathcal A, \mathcal F, \varepsilon)
        = \inf_{\theta} \sup_{x_0, f \in \mathcal F} T_\varepsilon(\mathcal A_\theta[f, x_0], f)

    over the rules and the functions with their starts that are given. It bounds the complexity of a class
    from neither side: more rules can lower it, more functions raise it (row 32). The paper's class leaves
    :math:`f(x_0) - f^*` unbounded, so that it is infinite for every algorithm; here the class carries a
    budget ``gap``.

    Args:
        rules: The algorithm at each of its settings θ.
        starts: Functions, each with a start.
        gap: Largest :math:`f(x_0) - f^*` in the class.
        eps: :math:`\varepsilon > 0`.
        max_steps: A run that takes more counts as infinite.

    Example:
        >>> from curvestep.theory.problems.polynomials import Quadratic
        >>> from curvestep.theory.rules import FixedStep
        >>> rules = [FixedStep(lr=lr) for lr in (0.1, 1.0, 1.9)]
        >>> worst_case_complexity(rules, [(Quadratic([a]), [1.0]) for a in (1.0, 0.5)], gap=1.0, eps=0.01)
        6.0
    """
    family = list(starts)
    for problem, x0 in family:
        _check_gap(problem, x0, gap)

    def slowest(rule: StepRule) -> float:
        return max(float(first_hits(problem, rule, x0, eps, max_steps)) for problem, x0 in family)

    return min(slowest(rule) for rule in rules)


@dataclass(frozen=True, kw_only=True)
class NoisyComplexity:
    """Complexity of a family of step rules on a family of functions with noise, from finitely many runs."""

    estimate: float  # of the medians that were seen, the best rule's largest
    low: float  # lower limit for the true value; more than `max_steps` where the runs were stopped too early
    high: float  # upper limit for it; inf if too few runs hit to know one
    confidence: float  # probability with which both limits hold
    max_steps: int  # at which a run was stopped
    num_runs: int  # of each rule on each function


def noisy_complexity(
    rules: Iterable[StepRule],
    oracles: Iterable[tuple[Problem, ArrayLike, Noise]],
    *,
    gap: float,
    eps: float,
    num_runs: int = 41,
    max_steps: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> NoisyComplexity:
    r"""Equation 9 with noise: the best rule's largest median of the hitting time (row 32).

    .. math::
        N' = \min_{\theta} \max_{(f, x_0, \mathcal O)}\
        \inf\{t : P(\lVert\nabla f(x_k)\rVert > \varepsilon \ \ \forall k \le t) \le \tfrac12\}

    over the rules and functions that are given, with limits that hold at once. A rule is chosen before the
    function is. N' is about *these* rules and functions and bounds no class: more rules can lower it, more
    functions raise it.

    Args:
        rules: The algorithm at each of its settings θ.
        oracles: Functions, each with a start and the law of its noise.
        gap: Largest :math:`f(x_0) - f^*` in the class.
        eps: :math:`\varepsilon > 0`.
        num_runs: Runs of each rule on each function.
        max_steps: When to stop a run.
        confidence: Probability with which both limits hold.
        seed: Seed of the noise, which is the same for every rule and function.

    Example:
        >>> from curvestep.theory.problems.base import BoundedNoise
        >>> from curvestep.theory.problems.polynomials import Quadratic
        >>> from curvestep.theory.rules import ClippedStep
        >>> rules = [ClippedStep(lr=lr, max_norm=1.0) for lr in (0.05, 0.5)]
        >>> oracles = [(Quadratic([a]), [2.0], BoundedNoise(0.2)) for a in (1.0, 0.5)]
        >>> found = noisy_complexity(rules, oracles, gap=2.0, eps=0.1)
        >>> found.estimate, (found.low, found.high)
        (9.0, (7.0, 10.0))
    """
    settings = list(rules)
    family = list(oracles)
    check_count("num_runs", num_runs)
    for problem, x0, _ in family:
        _check_gap(problem, x0, gap)
    hits = np.empty((len(settings), len(family), num_runs))
    for i, rule in enumerate(settings):
        for j, (problem, x0, noise) in enumerate(family):
            starts = np.broadcast_to(problem.check_start(x0), (num_runs, *problem.event_shape))
            hits[i, j] = first_hits(problem, rule, starts, eps, max_steps, noise=noise, seed=seed)
    return complexity_limits(hits, max_steps=max_steps, confidence=confidence)


def complexity_limits(hits: ArrayLike, *, max_steps: int, confidence: float = 0.95) -> NoisyComplexity:
    r"""Limits for the smallest over rules of the largest over functions of medians, from censored samples.

    Each limit is of order statistics. The lower one is corrected for the number of functions, of which any
    may look slower than it is; the upper one for the number of rules, of which any may look faster. Samples
    of different rules and functions need not be independent (row 32).

    Args:
        hits: First hits, shape (rules, functions, runs); ``inf`` where a run had not hit when it was stopped.
        max_steps: When runs were stopped.
        confidence: Probability with which both limits hold.

    Example:
        >>> complexity_limits(np.full((2, 3, 30), 7.0), max_steps=100).low
        7.0
    """
    times = np.sort(np.asarray(hits, dtype=np.float64), axis=-1)
    if times.ndim != 3 or times.size == 0 or np.isnan(times).any():
        raise ValueError(f"`hits` must have the shape (rules, functions, runs), none NaN, got {times.shape}.")
    check_inside("confidence", confidence, 0, 1)
    num_rules, num_functions, n = times.shape
    times = np.where(times > max_steps, math.inf, times)
    # The k-th smallest exceeds the median if fewer than k hit by then; the j-th is below it if j hit before.
    side = (1 - confidence) / 2
    ranks = np.arange(1, n + 1)
    too_high = binom.cdf(ranks - 1, n, 0.5) <= side / num_functions
    too_low = binom.sf(ranks - 1, n, 0.5) <= side / num_rules
    low = 0.0
    high = math.inf
    if too_high.any():
        lower = np.minimum(times[..., too_high.sum() - 1], max_steps + 1)
        low = float(lower.max(axis=-1).min())
    if too_low.any():
        high = float(times[..., np.argmax(too_low)].max(axis=-1).min())
    return NoisyComplexity(
        estimate=float(times[..., math.ceil(n / 2) - 1].max(axis=-1).min()),
        low=low,
        high=high,
        confidence=confidence,
        max_steps=max_steps,
        num_runs=n,
    )


def _check_gap(problem: Problem, x0: ArrayLike, gap: float) -> None:
    check_positive("gap", gap)
    if not problem.gap(problem.check_start(x0)) <= gap:
        raise ValueError(f"{problem!r} starts more than `gap` = {gap:g} above its minimum.")
