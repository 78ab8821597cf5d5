"""Certificates: run a theorem's recipe and hold what happens against what it promises."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from curvestep.checks import check_count
from curvestep.notes import Note
from curvestep.theory.complexity import first_hit, first_hits, hitting_time, walk
from curvestep.theory.problems.base import Array, BoundedNoise, Noise, Problem
from curvestep.theory.rules import FixedStep
from curvestep.theory.theorems.fixed_gd import lower_bound_pair
from curvestep.theory.theorems.guarantee import TOLERANCE, Guarantee, Law

NUM_POINTS_OF_STEP = 9  # at which a law is asked for, along every step


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
    noise: Noise | None = None,
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
    reasons = _broken_checks(problem, starts, guarantee)
    if reasons:
        return _certificate(guarantee, math.inf, reasons)
    if guarantee.noisy:
        if starts.shape != problem.event_shape:
            raise ValueError(f"`x0` must be one start where there is noise, got shape {starts.shape}.")
        noise = _noise_within(noise, guarantee)
        starts = np.broadcast_to(starts, (check_count("num_runs", num_runs), *problem.event_shape))
    limit = min(max_steps, math.floor(guarantee.bound) + 1)
    return _run(problem, guarantee, starts, limit, noise, seed)


class _Run:
    """What is seen of a run: hits, steepest gradient, and how far its steps fell short of their promises."""

    def __init__(self, problem: Problem, guarantee: Guarantee, starts: Array) -> None:
        self.problem = problem
        self.guarantee = guarantee
        self.hits = np.array(math.inf)
        self.num_steps = 0
        self.steepest = 0.0
        self.excess = -math.inf  # of promised over measured decrease, relative; -inf where none is promised
        self.too_curved = False  # whether the law was broken
        # Noisy runs leave the sublevel set; only a global M says anything then.
        self.level = math.inf if guarantee.noisy else guarantee.gap * (1 + TOLERANCE)
        self.floor = max(1e-4 * (guarantee.gap + abs(problem.minimum)), np.finfo(float).tiny)  # of rounding
        self._last = starts[None, ...][:0]

    def add(self, start: int, block: Array) -> None:
        """Look at the iterates from number ``start`` on."""
        guarantee = self.guarantee
        with np.errstate(over="ignore", invalid="ignore"):
            joined = np.concatenate([self._last, block])
            norms = self.problem.grad_norm(joined)
            gaps = self.problem.gap(joined)
            if guarantee.decrease is not None:
                missing = np.diff(gaps, axis=0) + guarantee.decrease(norms[:-1])
                short = missing / (gaps[:-1] + self.floor)
                self.excess = max(self.excess, float(np.max(short, initial=-math.inf)))
            if guarantee.law is not None:
                self.too_curved |= _breaks_law(self.problem, guarantee.law, joined)
        self.steepest = max(self.steepest, float(np.max(norms[gaps <= self.level], initial=0.0)))
        self.hits = np.minimum(self.hits, start + first_hit(norms[len(joined) - len(block) :], guarantee.eps))
        self.num_steps = start + len(block) - 1
        self._last = block[-1:].copy()

    def broken_promises(self) -> list[Note]:
        """What was met that the guarantee excludes."""
        notes = []
        if self.too_curved:
            text = f"{self.problem.name} has a Hessian norm above the law on the way"
            notes.append(Note("outside-class", text))
        if self.guarantee.M is not None and self.steepest > self.guarantee.M * (1 + TOLERANCE):
            text = f"a gradient norm of {self.steepest:g} was met, and M = {self.guarantee.M:g} is claimed"
            notes.append(Note("gradient-norm", text))
        if self.excess > TOLERANCE:
            text = f"a step fell short of the promised decrease by {self.excess:.2g} of f − f*"
            notes.append(Note("decrease", text))
        return notes


def _run(
    problem: Problem, guarantee: Guarantee, starts: Array, limit: int, noise: Noise | None, seed: int
) -> Certificate:
    assert guarantee.rule is not None
    run = _Run(problem, guarantee, starts)
    enough = 0.75 if guarantee.noisy else 1 - 1e-9
    reasons: list[Note] = []
    for start, block in walk(problem, guarantee.rule, starts, limit, noise=noise, seed=seed):
        run.add(start, block)
        reasons = run.broken_promises()
        if reasons or np.isfinite(run.hits).mean() > enough:
            break
    measured = float(np.max(run.hits))
    late = measured
    which = "in all of them"
    if guarantee.noisy:
        time = hitting_time(run.hits, confidence=0.999)
        measured = time.median
        late = time.low
        which = "in most runs"
    if late > guarantee.bound and run.num_steps > guarantee.bound:
        text = f"gradient norm {guarantee.eps:g} took more than {guarantee.bound:.6g} iterations {which}"
        reasons.append(Note("slower", text))
    return _certificate(
        guarantee,
        measured,
        reasons,
        descent_excess=run.excess if math.isfinite(run.excess) else None,
        undecided=math.isinf(late) and run.num_steps <= guarantee.bound,
    )


def _breaks_law(problem: Problem, law: Law, points: Array) -> bool:
    """Whether the Hessian norm exceeds the law somewhere on the segments between these iterates."""
    for share in np.linspace(0, 1, NUM_POINTS_OF_STEP):
        between = points[:-1] + share * np.diff(points, axis=0)
        if np.any(problem.hessian_norm(between) > law(problem.grad_norm(between)) * (1 + TOLERANCE)):
            return True
    return False


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
    reasons = _broken_checks(pair.wall, np.array(pair.wall_start), guarantee)
    reasons += _broken_checks(pair.valley, np.array(pair.valley_start), guarantee)
    if reasons:
        return _certificate(guarantee, math.inf, reasons)
    steps = np.ravel(np.asarray(fractions, dtype=np.float64)) * pair.largest_step
    too_long = FixedStep(lr=pair.largest_step * 1.001)
    if math.isfinite(first_hits(pair.wall, too_long, np.array(pair.wall_start), guarantee.eps, 200).item()):
        reasons.append(Note("faster", "a step above the limit of the wall reached its minimum"))
    num_steps = min(10_000_000, math.ceil(guarantee.bound) * 4 + 100)
    hits = np.zeros(steps.shape)
    for p, start in ((pair.wall, pair.wall_start), (pair.valley, pair.valley_start)):
        starts = np.full(steps.shape, start)
        hits = np.maximum(hits, first_hits(p, FixedStep(lr=steps), starts, guarantee.eps, num_steps))
    measured = float(hits.min())
    if measured < guarantee.bound * (1 - TOLERANCE):
        text = f"a fixed step needed only {measured:g} iterations, fewer than {guarantee.bound:.6g}"
        reasons.append(Note("faster", text))
    return _certificate(guarantee, measured, reasons)


def _broken_checks(problem: Problem, starts: Array, guarantee: Guarantee) -> list[Note]:
    """Why a guarantee is not about this problem and these starts; empty if it is."""
    notes = [check(problem, starts) for check in guarantee.checks]
    return [note for note in notes if note is not None]


def _noise_within(noise: Noise | None, guarantee: Guarantee) -> Noise | None:
    """The noise to draw, if the guarantee covers it; the most that it covers if none is given."""
    radius = guarantee.sigma if guarantee.tau is None else guarantee.tau
    assert radius is not None
    if noise is None:
        return BoundedNoise(radius) if radius > 0 else None
    if guarantee.tau is not None and noise.tau > guarantee.tau * (1 + TOLERANCE):
        raise ValueError(
            f"`noise` must stay within the guarantee's radius {guarantee.tau:g}, got {noise.tau:g}."
        )
    if guarantee.sigma is not None and noise.sigma > guarantee.sigma * (1 + TOLERANCE):
        raise ValueError(
            f"`noise` must deviate by at most the guarantee's {guarantee.sigma:g}, got {noise.sigma:g}."
        )
    if guarantee.needs_symmetry and not noise.is_symmetric:
        raise ValueError("`noise` must be symmetric: the guarantee needs it.")
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
