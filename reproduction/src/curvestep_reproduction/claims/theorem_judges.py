"""Theorems and lemmas as printed, each held to its promise on random functions of its class.

A theorem holds on one of them if its certificate does. A corrected version is tried on the same functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from curvestep.theory.certificates import Certificate, certify, certify_lower_bound
from curvestep.theory.inequalities import check_smoothness
from curvestep.theory.problems.polynomials import Polynomial
from curvestep.theory.problems.walls import ExponentialWall
from curvestep.theory.theorems.clipped_gd import theorem3
from curvestep.theory.theorems.clipped_sgd import theorem7, theorem8
from curvestep.theory.theorems.fixed_gd import theorem4, theorem6, wall_height
from curvestep.theory.theorems.guarantee import Guarantee
from curvestep.theory.theorems.lemmas import lemma2
from curvestep_reproduction.claims.claims import NOT_REPRODUCED, REPRODUCED, Evidence
from curvestep_reproduction.figures.plan import Results

NUM_FUNCTIONS = 100  # of each theorem
MOST_ITERATIONS = 20_000  # that an upper bound may promise
MOST_SGD_ITERATIONS = 50_000  # likewise of Theorem 8, whose runs end long before
MOST_FIXED_STEPS = 50  # that a lower bound may ask for: as many are tried on each of two functions
NOISY_RUNS = 16  # whose median hitting time counts
VERSIONS = ("printed", "corrected")

# What contradicts the printed version, and the corrected one, on one random function; empty words where
# nothing does, None where it takes too long.
Draw = Callable[[np.random.Generator], tuple[str, ...] | None]


@dataclass(frozen=True)
class Theorem:
    """A theorem and the functions on which it is tried."""

    draw: Draw
    functions: str  # in words

    def __call__(self, results: Results) -> Evidence:
        """What its certificates show; it needs no runs."""
        return evidence(self)


@cache
def evidence(theorem: Theorem) -> Evidence:
    """What a theorem's certificates show."""
    rng = np.random.default_rng(0)
    outcomes: list[tuple[str, ...]] = []
    while len(outcomes) < NUM_FUNCTIONS:
        drawn = theorem.draw(rng)
        if drawn is not None:
            outcomes.append(drawn)
    by_version = dict(zip(VERSIONS, zip(*outcomes, strict=True), strict=False))
    counts = {version: f"{found.count('')} of {NUM_FUNCTIONS}" for version, found in by_version.items()}
    sentence = f"As printed it holds on {counts['printed']} {theorem.functions}"
    numbers = counts | {"more": "docs/theorems.md; thousands of random certificates in the tests"}
    broken = [words for words in by_version["printed"] if words]
    if broken:
        corrected = by_version["corrected"].count("")
        sentence += ", corrected on each" if corrected == NUM_FUNCTIONS else f", corrected on {corrected}"
        numbers["where it first fails"] = broken[0]
    return Evidence(
        verdict=NOT_REPRODUCED if broken else REPRODUCED,
        sentence=f"{sentence}.",
        numbers=numbers,
    )


def without_noise(rng: np.random.Generator, *, theorem: Callable[..., Guarantee]) -> tuple[str, ...] | None:
    """Iterations and decreases that an upper bound promises, on a random exponential wall."""
    wall, x0, numbers = _random_wall(rng, width=3.0, smallest_eps=0.01)
    guarantees = [theorem(**numbers, version=version) for version in VERSIONS]
    return _certified(wall, x0, guarantees, MOST_ITERATIONS)


def clipped_with_noise(rng: np.random.Generator) -> tuple[str, ...] | None:
    """Theorem 7 on a random exponential wall, some of them entered far up."""
    wall, x0, numbers = _random_wall(rng, width=10.0, smallest_eps=1e-4)
    tau = wall.L0 / wall.L1 * 10 ** rng.uniform(-2, 0)
    guarantees = [theorem7(**numbers, tau=tau, version=version) for version in VERSIONS]
    return _certified(wall, x0, guarantees, MOST_ITERATIONS)


def plain_with_noise(rng: np.random.Generator) -> tuple[str, ...] | None:
    """Theorem 8 on a random exponential wall.

    M bounds the gradients where f ≤ f(x0), as printed. Noise leaves that set, which is an error of the proof;
    what the theorem promises is the hitting time.
    """
    wall, x0, numbers = _random_wall(rng, width=1.0, smallest_eps=0.1)
    tau = wall.L0 / wall.L1 * 10 ** rng.uniform(-2, 0)
    M = float(wall.grad_norm(np.asarray(x0)))
    guarantees = [replace(theorem8(**numbers, M=M, tau=tau, version=version), M=None) for version in VERSIONS]
    return _certified(wall, x0, guarantees, MOST_SGD_ITERATIONS)


def lower_bound(rng: np.random.Generator) -> tuple[str, ...] | None:
    """Theorem 4 on the functions of its proof, with random constants that the corrected one allows."""
    L0, L1 = 10 ** rng.uniform(0, 1, size=2)
    M = 10 ** rng.uniform(0.05, 1.5)
    eps = min(L0 / 3, M / 2) * 10 ** rng.uniform(-1, 0)
    gap = max(M / L1, wall_height(M, L0=L0, L1=L1), 1.25 * eps) * rng.uniform(1.0001, 2)
    guarantees = [theorem4(L0=L0, L1=L1, M=M, gap=gap, eps=eps, version=version) for version in VERSIONS]
    if max(guarantee.bound for guarantee in guarantees) > MOST_FIXED_STEPS:
        return None
    return tuple(_what_contradicts(certify_lower_bound(guarantee)) for guarantee in guarantees)


def polynomials(rng: np.random.Generator) -> tuple[str, ...]:
    """Lemma 2 on a random polynomial: the law holds at many points, and the curvature has no bound."""
    degree = int(rng.integers(3, 8))
    coefficients = rng.normal(size=degree + 1)
    L1 = 10 ** rng.uniform(-1, 1)
    polynomial = Polynomial(list(coefficients))
    L0 = lemma2(list(coefficients), L1, version="printed")
    x = np.concatenate([np.linspace(-10, 10, 20_001), np.logspace(1, 4, 301), -np.logspace(1, 4, 301)])
    law = check_smoothness(polynomial.grad_norm(x), polynomial.hessian_norm(x), L0=L0, L1=L1)
    near, far = polynomial.hessian_norm(np.array([1e4, 1e6]))
    if not law.holds:
        return (f"the law is broken by {law.excess:g} at x = {x[law.index]:g}",)
    return ("" if far > 10 * near else f"the curvature is {near:g} at 1e4 and {far:g} at 1e6",)


def _random_wall(
    rng: np.random.Generator, *, width: float, smallest_eps: float
) -> tuple[ExponentialWall, float, dict[str, Any]]:
    """A wall, a start on it, and the constants of an upper bound; eps is a share of the first gradient."""
    L0, L1 = 10 ** rng.uniform(-1, 1, size=2)
    wall = ExponentialWall(L0=L0, L1=L1)
    x0 = rng.normal() * width / L1
    eps = float(wall.grad_norm(np.asarray(x0))) * 10 ** rng.uniform(np.log10(smallest_eps), -0.05)
    return wall, x0, {"L0": L0, "L1": L1, "gap": float(wall.gap(np.asarray(x0))), "eps": eps}


def _certified(
    wall: ExponentialWall, x0: float, guarantees: list[Guarantee], most: int
) -> tuple[str, ...] | None:
    """Which of the guarantees hold; None if one of them allows more iterations than ``most``."""
    if max(guarantee.bound for guarantee in guarantees) > most:
        return None
    return tuple(_what_contradicts(certify(wall, one, x0, num_runs=NOISY_RUNS)) for one in guarantees)


def _what_contradicts(certificate: Certificate) -> str:
    if certificate.status == "holds":
        return ""
    return "; ".join(reason.text for reason in certificate.reasons) or certificate.status


WALLS = "random exponential walls"
THEOREM_3 = Theorem(partial(without_noise, theorem=theorem3), WALLS)
THEOREM_4 = Theorem(lower_bound, "random pairs of functions")
THEOREM_6 = Theorem(partial(without_noise, theorem=theorem6), WALLS)
THEOREM_7 = Theorem(clipped_with_noise, WALLS)
THEOREM_8 = Theorem(plain_with_noise, WALLS)
LEMMA_2 = Theorem(polynomials, "random polynomials")
