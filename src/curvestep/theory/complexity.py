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


def first_hits(problem: Problem, step: Step, x0: ArrayLike, eps: float, num_steps: int) -> Array:
    """The first hit of each run of at most so many steps; it ends soon after the last of them."""
    hits = np.array(math.inf)
    for start, block in walk(problem, step, x0, num_steps):
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

    over the rules and the functions with their starts that are given: from below over rules, from above over
    functions. The paper's class leaves :math:`f(x_0) - f^*` unbounded, so that it is infinite for every
    algorithm; here the class carries a budget ``gap``.

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
    check_positive("gap", gap)
    family = list(starts)
    for problem, x0 in family:
        if not problem.gap(problem.check_start(x0)) <= gap:
            raise ValueError(f"{problem!r} starts more than `gap` = {gap:g} above its minimum.")

    def slowest(rule: StepRule) -> float:
        return max(float(first_hits(problem, rule, x0, eps, max_steps)) for problem, x0 in family)

    return min(slowest(rule) for rule in rules)
