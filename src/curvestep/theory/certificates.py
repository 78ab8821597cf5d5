"""Certificates: run a theorem's recipe and hold what happens against what it promises."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from curvestep.checks import check_count
from curvestep.notes import Note
from curvestep.theory.complexity import first_hit, first_hits, hitting_time, walk
from curvestep.theory.problems.base import Array, BoundedNoise, Problem
from curvestep.theory.rules import FixedStep
from curvestep.theory.theorems.fixed_gd import lower_bound_pair
from curvestep.theory.theorems.guarantee import TOLERANCE, Guarantee


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """A guarantee held against a run."""

    guarantee: Guarantee  # the guarantee that was tried
    status: str  # "holds", "violated", or "undecided" if the run was stopped before it could tell
    measured: float  # iterations to gradient norm eps; with noise the median over runs; inf if not reached
    bound: float  # iterations that the guarantee promises
    descent_excess: float | None  # by how much a step fell short of its decrease, relative; None: no promise
    reasons: tuple[Note, ...]  # outside-class, gap, gradient-norm, decrease, slower or faster than promised


def certify(
    problem: Problem,
    guarantee: Guarantee,
    x0: ArrayLike,
    *,
    max_steps: int = 1_000_000,
    noise: BoundedNoise | None = None,
    num_runs: int = 64,
    seed: int = 0,
) -> Certificate:
    """Run the recipe of an upper bound and hold it to its promise: class, gap, M, iterations, every decrease.

    The run goes to the first hit and no further, so that bounds of 10¹⁰ iterations can be certified. With
    noise, a violation is reported only if the whole interval for the median lies beyond the bound.

    Args:
        problem: A function; whether it belongs to the guarantee's class is checked by its frontier.
        guarantee: What a theorem returned.
        x0: One start; or, without noise, many.
        max_steps: When to give up.
        noise: For a guarantee with noise: the law, within its radius tau. Uniform on the sphere of that
            radius if not given.
        num_runs: For a guarantee with noise: how many runs.
        seed: Seed of the noise.

    Example:
        >>> from curvestep.theory.problems.polynomials import Quartic
        >>> from curvestep.theory.theorems.clipped_gd import theorem3
        >>> quartic = Quartic()
        >>> guarantee = theorem3(L0=0.16, L1=10.0, gap=30.0**4, eps=1e-4, version="sharp")
        >>> certificate = certify(quartic, guarantee, 30.0)
        >>> certificate.status, certificate.measured, f"{certificate.bound:.1e}"
        ('holds', 567.0, '3.5e+13')

        A false claim about the function is caught before anything runs:

        >>> certify(quartic, theorem3(L0=0.1, L1=10.0, gap=30.0**4, eps=1e-4), 30.0).reasons[0].text
        'quartic is not in the class: L1 = 10 needs L0 = 0.16, and L0 = 0.1 is claimed'
    """
    if guarantee.rule is None:
        raise ValueError(
            f"`guarantee` must be an upper bound, got {guarantee.theorem}. Use `certify_lower_bound`."
        )
    check_count("max_steps", max_steps)
    starts = problem.check_start(x0)
    reasons = _class_reasons(problem, starts, guarantee)
    if reasons:
        return _certificate(guarantee, math.inf, reasons)
    if guarantee.tau is not None:
        if starts.shape != problem.event_shape:
            raise ValueError(f"`x0` must be one start where there is noise, got shape {starts.shape}.")
        noise = _noise_within(noise, guarantee)
        starts = np.broadcast_to(starts, (check_count("num_runs", num_runs), *problem.event_shape))
    limit = min(max_steps, math.floor(guarantee.bound) + 1)
    return _run(problem, guarantee, starts, limit, noise, seed)


def _run(
    problem: Problem, guarantee: Guarantee, starts: Array, limit: int, noise: BoundedNoise | None, seed: int
) -> Certificate:
    assert guarantee.rule is not None
    hits, excess, steepest, num_steps = np.array(math.inf), -math.inf, 0.0, 0
    level, enough, many = guarantee.gap * (1 + TOLERANCE), 1 - 1e-9, "in all of them"
    if guarantee.tau is not None:  # noisy runs leave the sublevel set; only a global M says anything then
        level, enough, many = math.inf, 0.75, "in most runs"
    floor = max(1e-4 * (guarantee.gap + abs(problem.minimum)), np.finfo(float).tiny)  # where rounding rules
    last = starts[None, ...][:0]
    reasons: list[Note] = []
    for start, block in walk(problem, guarantee.rule, starts, limit, noise=noise, seed=seed):
        with np.errstate(over="ignore", invalid="ignore"):
            joined = np.concatenate([last, block])
            norms, gaps = problem.grad_norm(joined), problem.gap(joined)
            if guarantee.decrease is not None:
                short = (np.diff(gaps, axis=0) + guarantee.decrease(norms[:-1])) / (gaps[:-1] + floor)
                excess = max(excess, float(np.max(short, initial=-math.inf)))
        steepest = max(steepest, float(np.max(norms[gaps <= level], initial=0.0)))
        hits = np.minimum(hits, start + first_hit(norms[len(joined) - len(block) :], guarantee.eps))
        last, num_steps = block[-1:].copy(), start + len(block) - 1
        reasons = []
        if guarantee.M is not None and steepest > guarantee.M * (1 + TOLERANCE):
            text = f"a gradient norm of {steepest:g} was met, and M = {guarantee.M:g} is claimed"
            reasons.append(Note("gradient-norm", text))
        if excess > TOLERANCE:
            text = f"a step fell short of the promised decrease by {excess:.2g} of f − f*"
            reasons.append(Note("decrease", text))
        if reasons or np.isfinite(hits).mean() > enough:
            break
    measured, late = float(np.max(hits)), float(np.max(hits))
    if guarantee.tau is not None:
        time = hitting_time(hits, confidence=0.999)
        measured, late = time.median, time.low
    undecided = math.isinf(late) and num_steps <= guarantee.bound
    if late > guarantee.bound and num_steps > guarantee.bound:
        text = f"gradient norm {guarantee.eps:g} took more than {guarantee.bound:.6g} iterations {many}"
        reasons.append(Note("slower", text))
    descent = None
    if math.isfinite(excess):  # -inf where no decrease is promised
        descent = excess
    return _certificate(guarantee, measured, reasons, descent_excess=descent, undecided=undecided)


def certify_lower_bound(
    guarantee: Guarantee, *, fractions: ArrayLike = (0.5, 0.8, 0.9, 0.99, 0.999)
) -> Certificate:
    """Run fixed-step descent on the pair of functions behind a lower bound, for many step sizes.

    The wall must belong to the claimed class, steps above its limit must fail on it, and for steps below the
    limit the slower of the two functions must take at least the promised number of iterations.

    Args:
        guarantee: What ``theorem4`` returned.
        fractions: Step sizes to try, as fractions of the largest that the wall allows; below 1.

    Example:
        >>> from curvestep.theory.theorems.fixed_gd import theorem4
        >>> numbers = dict(L0=1.0, L1=5.0, M=50.0, gap=12.0, eps=0.1)
        >>> certify_lower_bound(theorem4(**numbers)).status
        'holds'
        >>> certify_lower_bound(theorem4(**numbers, version="printed")).reasons[0].text
        'exponential wall as printed is not in the class: L1 = 5 needs L0 = 5, and L0 = 1 is claimed'
    """
    if guarantee.rule is not None or guarantee.up_to_constant or guarantee.M is None:
        raise ValueError(f"`guarantee` must be what `theorem4` returns, got {guarantee.theorem}.")
    names = ("L0", "L1", "M", "gap", "eps", "version")
    pair = lower_bound_pair(**{name: getattr(guarantee, name) for name in names})
    reasons = _class_reasons(pair.wall, np.array(pair.wall_start), guarantee)
    reasons += _class_reasons(pair.valley, np.array(pair.valley_start), guarantee)
    if reasons:
        return _certificate(guarantee, math.inf, reasons)
    steps = np.ravel(np.asarray(fractions, dtype=np.float64)) * pair.largest_step
    too_long = FixedStep(lr=pair.largest_step * 1.001)
    if math.isfinite(first_hits(pair.wall, too_long, np.array(pair.wall_start), guarantee.eps, 1000).item()):
        reasons.append(Note("faster", "a step above the limit of the wall reached its minimum"))
    hits, num_steps = np.zeros(steps.shape), min(10_000_000, math.ceil(guarantee.bound) * 4 + 100)
    for p, start in ((pair.wall, pair.wall_start), (pair.valley, pair.valley_start)):
        starts = np.full(steps.shape, start)
        hits = np.maximum(hits, first_hits(p, FixedStep(lr=steps), starts, guarantee.eps, num_steps))
    measured = float(hits.min())
    if measured < guarantee.bound * (1 - TOLERANCE):
        text = f"a fixed step needed only {measured:g} iterations, fewer than {guarantee.bound:.6g}"
        reasons.append(Note("faster", text))
    return _certificate(guarantee, measured, reasons)


def _class_reasons(problem: Problem, starts: Array, guarantee: Guarantee) -> list[Note]:
    """Why a problem and its starts are not of the class that a guarantee is about; empty if they are."""
    reasons = []
    needed, gap = problem.frontier(guarantee.L1), float(np.max(problem.gap(starts)))
    if needed > guarantee.L0 * (1 + TOLERANCE):
        claim = f"L1 = {guarantee.L1:g} needs L0 = {needed:g}, and L0 = {guarantee.L0:g} is claimed"
        reasons.append(Note("outside-class", f"{problem.name} is not in the class: {claim}"))
    if gap > guarantee.gap * (1 + TOLERANCE):
        claim = f"more than the gap {guarantee.gap:g} claimed"
        reasons.append(Note("gap", f"{problem.name} starts {gap:g} above its minimum, {claim}"))
    return reasons


def _noise_within(noise: BoundedNoise | None, guarantee: Guarantee) -> BoundedNoise | None:
    assert guarantee.tau is not None
    if noise is None:
        return BoundedNoise(guarantee.tau) if guarantee.tau > 0 else None
    if noise.tau > guarantee.tau * (1 + TOLERANCE):
        raise ValueError(
            f"`noise` must stay within the guarantee's radius {guarantee.tau:g}, got {noise.tau:g}."
        )
    return noise


def _certificate(
    guarantee: Guarantee,
    measured: float,
    reasons: list[Note],
    *,
    descent_excess: float | None = None,
    undecided: bool = False,
) -> Certificate:
    status = "holds"
    if reasons:
        status = "violated"
    elif undecided:
        status = "undecided"
    return Certificate(
        guarantee=guarantee,
        status=status,
        measured=measured,
        bound=guarantee.bound,
        descent_excess=descent_excess,
        reasons=tuple(reasons),
    )
