r"""Errors of the paper as a list of bug fixes: what it prints, a counterexample that runs, the correction.

Every erratum has two checks: the *counterexample* contradicts what is printed, the *certificate* holds for
the correction. Both compute their numbers when they are called. Rows are those of ``docs/theorems.md``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from curvestep.theory.certificates import certify, certify_lower_bound
from curvestep.theory.complexity import descend, first_hits
from curvestep.theory.problems.base import BoundedNoise
from curvestep.theory.problems.deep_linear import DeepLinear
from curvestep.theory.problems.polynomials import Quadratic, Quartic
from curvestep.theory.problems.walls import ExponentialWall, PrintedWall, SlowValley
from curvestep.theory.rules import FixedStep
from curvestep.theory.theorems.clipped_gd import theorem3
from curvestep.theory.theorems.clipped_sgd import theorem7, theorem8
from curvestep.theory.theorems.fixed_gd import gradient_bound, theorem4

NOISE_STEPS = 20_000  # iterations over which the mean of a noisy iterate is taken
NOISE_PATHS = 200  # at the same time, from one seed


@dataclass(frozen=True)
class Check:
    """What came out, and whether it is what the erratum needs."""

    holds: bool
    words: str  # with the numbers


@dataclass(frozen=True, kw_only=True)
class Erratum:
    """One error of the paper."""

    name: str
    source: str  # theorem, section or appendix
    printed: str  # what the paper prints
    counterexample: Callable[[], Check]  # contradicts it
    correction: str
    certificate: Callable[[], Check]  # holds for the correction


def _printed_step_jumps() -> Check:
    """Theorem 7's printed rule on a function of the class, without noise that would excuse it."""
    L1 = 5.0
    tau = 0.1
    T = 1e6
    eta = min(1 / 20, 1 / (128 * L1 * tau), 1 / math.sqrt(T))
    wall = ExponentialWall(L0=1.0, L1=L1)
    x = 2.0
    path = []
    for _ in range(20_000):
        g = float(wall.gradient(np.asarray(x)))
        x -= min(1 / (16 * eta * L1 * (abs(g) + tau)), eta) * g
        path.append(x)
    low, high = sorted(path[-2:])
    smallest = float(wall.grad_norm(np.array(path)).min())
    words = (
        f"from x = 2 it still jumps between {low:.1f} and {high:.1f} after 20,000 iterations, with |f'| at "
        f"least {smallest:.1g}"
    )
    return Check(smallest > 1e4, words)


def _corrected_step_arrives() -> Check:
    guarantee = theorem7(L0=1.0, L1=5.0, tau=0.1, gap=900.0, eps=0.5)
    found = certify(ExponentialWall(L0=1.0, L1=5.0), guarantee, 2.0, num_runs=16)
    words = f"median of 16 noisy runs: {found.measured:,.0f} iterations of {found.bound:,.0f} allowed"
    return Check(found.status == "holds", words)


def _printed_wall_is_outside() -> Check:
    wall = PrintedWall(L1=5.0)
    curvature = float(wall.hessian_norm(np.asarray(0.0)))
    slope = float(wall.grad_norm(np.asarray(0.0)))
    return Check(curvature > 1 + 5 * slope, f"with L1 = 5: f''(0) = {curvature:g} where f'(0) = {slope:g}")


def _valley_is_outside() -> Check:
    eps = 0.5
    curvature = float(SlowValley(eps).hessian_norm(np.asarray(0.0)))
    return Check(curvature > 1, f"with ε = {eps:g}: f''(0) = {curvature:g} where f'(0) = 0 and L0 = 1")


def _lower_bound_pair_holds() -> Check:
    guarantee = theorem4(L0=1.0, L1=5.0, M=50.0, gap=12.0, eps=0.1)
    status = certify_lower_bound(guarantee).status
    return Check(status == "holds", f"every fixed step needs {guarantee.bound:,.0f} iterations: {status}")


def _wall_bounds_its_gradients() -> Check:
    """No assumption on M, and yet the gradients below f(x0) have a bound, which the wall attains."""
    wall = ExponentialWall(L0=1.0, L1=5.0)
    start = wall.start(M=50.0)
    bound = gradient_bound(float(wall.gap(np.asarray(start))), L0=1.0, L1=5.0)
    return Check(math.isfinite(bound), f"L0, L1 and f(x0) − f* alone give M ≤ {bound:.4g} where M is 50")


def _gradient_bound_is_sharp() -> Check:
    wall = ExponentialWall(L0=1.0, L1=5.0)
    start = wall.start(M=50.0)
    bound = gradient_bound(float(wall.gap(np.asarray(start))), L0=1.0, L1=5.0)
    return Check(math.isclose(bound, 50.0, rel_tol=1e-9), f"the bound is attained: {bound:.6g} of 50")


def _quartic_leaves_its_bound() -> Check:
    quartic = Quartic()
    x = np.asarray(0.2)
    curvature = float(quartic.hessian_norm(x))
    allowed = 10 * float(quartic.grad_norm(x)) + 0.1
    return Check(curvature > allowed, f"at x = 0.2: f'' = {curvature:.3g} > 10|f'| + 0.1 = {allowed:.3g}")


def _quartics_frontier() -> Check:
    L0 = Quartic().frontier(10.0)
    return Check(math.isclose(L0, 0.16, rel_tol=1e-9), f"the least L0 at L1 = 10 is {L0:.4g} = 16/L1²")


def _average_hessian_is_too_small() -> Check:
    """x⁴ from 1 to 0: the integral of f'' along the segment is 4, without the weight 1 − t."""
    bound = 1 - 4 + 0.5 * 4
    return Check(0.0 > bound, f"x⁴ from 1 to 0: it says f(0) = 0 ≤ {bound:g}")


def _weighted_hessian_is_exact() -> Check:
    t = (np.arange(100_000) + 0.5) / 100_000
    integral = float(np.mean((1 - t) * 12 * (1 - t) ** 2))
    return Check(
        math.isclose(1 - 4 + integral, 0.0, abs_tol=1e-8),
        f"with the weight 1 − t it says f(0) ≤ {1 - 4 + integral:.2g}",
    )


def _decrease_case_fails() -> Check:
    """Theorem 3's step where clipping acts below L0/L1."""
    L0 = 1.0
    L1 = 0.01
    g = 50.0
    lr = 1 / (10 * L0)
    max_norm = min(10 * L0, L0 / L1)
    decrease = min(lr, lr * max_norm / g) * g**2 / 2
    claimed = g**2 / (20 * L0)
    return Check(decrease < claimed, f"L0 = 1, L1 = 0.01, g = 50: {decrease:g} < {claimed:g}")


def _theorem3_holds_there() -> Check:
    wall = ExponentialWall(L0=1.0, L1=0.01)
    start = np.asarray(wall.start(M=60.0))
    guarantee = theorem3(L0=1.0, L1=0.01, gap=float(wall.gap(start)), eps=1.0, version="printed")
    found = certify(wall, guarantee, start)
    words = f"the theorem stands: {found.measured:,.0f} iterations of {found.bound:,.0f} allowed"
    return Check(found.status == "holds", words)


def _mean_iterate(normalize: bool) -> float:
    """Mean of descent on x²/2 with noise of mean zero: −1 nine times in ten, else +9."""
    rng = np.random.default_rng(0)
    lr = 0.01
    threshold = 10.0
    x = np.zeros(NOISE_PATHS)
    total = 0.0
    for _ in range(NOISE_STEPS):
        g = x + np.where(rng.random(NOISE_PATHS) < 0.9, -1.0, 9.0)
        size = np.abs(g) + threshold if normalize else np.maximum(np.abs(g), threshold)
        x -= lr * threshold * g / size
        total += float(x.mean())
    return total / NOISE_STEPS


def _normalizing_is_biased() -> Check:
    mean = _mean_iterate(normalize=True)
    return Check(
        abs(mean) > 0.2, f"x²/2, threshold 10 above all noise: the mean iterate is {mean:.2f}, not 0"
    )


def _clipping_is_not_biased() -> Check:
    mean = _mean_iterate(normalize=False)
    return Check(abs(mean) < 0.05, f"clipped at the same threshold it is {mean:.3f}")


def _complexity_is_infinite() -> Check:
    steps = 10.0 ** -np.arange(1, 8)
    hits = first_hits(Quartic(), FixedStep(lr=steps), 10 / np.sqrt(steps), 1e-3, 1000)
    return Check(bool(np.isinf(hits).all()), "x⁴ from 10/√η: descent diverges for each of 7 step sizes η")


def _bounded_gap_is_finite() -> Check:
    gap = 1e6
    guarantee = theorem3(L0=1.0, L1=1.0, gap=gap, eps=1.0)
    return Check(
        math.isfinite(guarantee.bound), f"with f(x0) − f* ≤ 1e6 theorem 3 bounds it by {guarantee.bound:.2g}"
    )


def _noise_leaves_the_sublevel_set() -> Check:
    """Theorem 8's printed step: noise carries iterates to where f > f(x0) and the gradient exceeds M."""
    wall = ExponentialWall(L0=1.0, L1=1.0)
    start = wall.start(M=0.5)
    gap = float(wall.gap(np.asarray(start)))
    guarantee = theorem8(L0=1.0, L1=1.0, gap=gap, eps=0.45, M=0.5, tau=1.0, version="printed")
    assert isinstance(guarantee.rule, FixedStep)
    runs = descend(wall, guarantee.rule, np.full(64, start), 20_000, noise=BoundedNoise(1.0))
    largest = float(runs.grad_norms.max())
    return Check(largest > 0.5, f"where M = 0.5, 64 noisy runs meet gradients up to {largest:.2g}")


def _sgd_with_bounded_gradients() -> Check:
    valley = SlowValley(0.1)
    start = valley.start(gap=0.5)
    guarantee = theorem8(L0=0.3, L1=0.0, gap=0.5, eps=0.1, M=0.2, tau=0.1)
    found = certify(valley, guarantee, np.asarray(start), num_runs=16)
    words = f"with M everywhere: {found.measured:,.0f} iterations of {found.bound:,.0f} allowed"
    return Check(found.status == "holds", words)


def _printed_ratio() -> Check:
    condition = (4 * 30.0**3 * 10 + 0.1) / 0.1
    return Check(condition > 1e7, f"(M L1 + L0)/L0 is {condition:.3g} with the printed numbers")


def _square_root() -> Check:
    predicted = math.sqrt((4 * 30.0**3 * 10 + 0.1) / 0.1)
    measured = 0.36 / 1.3e-8
    return Check(
        measured > predicted, f"its root is {predicted:.0f}; the paper's own runs give {measured:.2g}"
    )


def _factor_two_is_missing() -> Check:
    """The gradient as printed against a central difference, along one random direction."""
    ratio = _slope_over_printed()
    return Check(abs(ratio - 2) < 1e-5, f"two layers: the loss's slope is {ratio:.6f} times the printed one")


def _gradient_is_right() -> Check:
    ratio = _slope_over_printed() / 2
    return Check(abs(ratio - 1) < 1e-5, f"over the corrected one it is {ratio:.6f}")


def _slope_over_printed() -> float:
    """Slope of ‖W2 W1 X − Y‖² along a random direction over that of the printed formula."""
    rng = np.random.default_rng(0)
    W1, D1 = rng.normal(size=(2, 2, 3))
    W2, D2 = rng.normal(size=(2, 3, 2))
    X, Y = rng.normal(size=(2, 3, 8))

    def loss(t: float) -> float:
        return float((((W2 + t * D2) @ (W1 + t * D1) @ X - Y) ** 2).sum())

    R = W2 @ W1 @ X - Y
    printed = (W2.T @ R @ X.T * D1).sum() + (R @ (W1 @ X).T * D2).sum()
    return (loss(1e-5) - loss(-1e-5)) / 2e-5 / float(printed)


def _network_is_outside() -> Check:
    network = DeepLinear([3, 2, 3])
    points = [network.rescaled(network.minimizer(), c) for c in (1.0, 100.0)]
    norms = [float(network.hessian_norm(x)) for x in points]
    slope = max(float(network.grad_norm(x)) for x in points)
    words = f"at two minima, gradient {slope:.0e}, the Hessian's norm is {norms[0]:.3g} and {norms[1]:.3g}"
    return Check(norms[1] > 1e3 * norms[0] and slope < 1e-8, words)


def _quadratic_is_inside() -> Check:
    largest = Quadratic([3.0, 1.0]).frontier(1.0)
    return Check(
        largest == 3.0, "say it of a trajectory, not of a network; a quadratic has L0 = 3 everywhere"
    )


ERRATA = (
    Erratum(
        name="theorem-7-step",
        source="Theorem 7",
        printed="h = min{1/(16 η L1 (‖g‖ + τ)), η}, and T with 128 L1/ε, 4Δ/ε⁴, (80 L0 + 512 L1 τ)/ε²",
        counterexample=_printed_step_jumps,
        correction="h = min{η, 1/(16 L1 (‖g‖ + τ))}, and T with 256 L1/ε, 64Δ/ε⁴, 160 L0/ε², 1024 L1 τ/ε²",
        certificate=_corrected_step_arrives,
    ),
    Erratum(
        name="theorem-4-wall",
        source="Theorem 4, first function",
        printed="The function with exponential sides has L0 = 1.",
        counterexample=_printed_wall_is_outside,
        correction="Take (L0/L1²)(exp(L1|x|) − L1|x| − 1), whose Hessian is L0 + L1‖∇f‖ everywhere.",
        certificate=_lower_bound_pair_holds,
    ),
    Erratum(
        name="theorem-4-valley",
        source="Theorem 4, second function",
        printed="The slow function has the same constants.",
        counterexample=_valley_is_outside,
        correction="Require ε ≤ min{L0/3, M/2}.",
        certificate=_lower_bound_pair_holds,
    ),
    Erratum(
        name="assumption-4",
        source="Assumption 4",
        printed="A bound M on the gradients below f(x0) is a further assumption.",
        counterexample=_wall_bounds_its_gradients,
        correction="It follows: M/L1 − (L0/L1²) ln(1 + L1 M/L0) ≤ f(x0) − f*.",
        certificate=_gradient_bound_is_sharp,
    ),
    Erratum(
        name="theorem-8-gradients",
        source="Theorem 8",
        printed="M bounds the gradients where f ≤ f(x0), and T = (Δ + V)²/ε⁴ with V = (5L0 + 4L1 M)(M + τ)².",
        counterexample=_noise_leaves_the_sublevel_set,
        correction="M must bound them everywhere, and Markov's inequality gives (2Δ + V)²/ε⁴.",
        certificate=_sgd_with_bounded_gradients,
    ),
    Erratum(
        name="theorem-3-taylor",
        source="Proof of Theorem 3",
        printed="f(x + d) ≤ f + ⟨∇f, d⟩ + ½‖d‖² ∫₀¹ ‖∇²f(x + td)‖ dt",
        counterexample=_average_hessian_is_too_small,
        correction="The integral needs the weight 1 − t instead of ½; the next line of the proof stands.",
        certificate=_weighted_hessian_is_exact,
    ),
    Erratum(
        name="theorem-3-case",
        source="Proof of Theorem 3",
        printed="For ε ≤ ‖∇f‖ ≤ L0/L1: h‖∇f‖²/2 ≥ ‖∇f‖²/(20 L0)",
        counterexample=_decrease_case_fails,
        correction="Below L1 = 1/10 clipping acts there, and the decrease is at least L0/20 instead.",
        certificate=_theorem3_holds_there,
    ),
    Erratum(
        name="normalized-noise",
        source="Section 3",
        printed="The rates of clipped descent apply to normalized descent.",
        counterexample=_normalizing_is_biased,
        correction="Without noise they do, at most doubled. With noise normalized steps are biased.",
        certificate=_clipping_is_not_biased,
    ),
    Erratum(
        name="complexity",
        source="Equation 9",
        printed="The complexity is a supremum over every start x0.",
        counterexample=_complexity_is_infinite,
        correction="The class needs a bound on f(x0) − f*.",
        certificate=_bounded_gap_is_finite,
    ),
    Erratum(
        name="deep-linear-factor",
        source="Section 2, deep linear network",
        printed="The gradient is (A ⊗ Bᵀ)ᵀ vec R.",
        counterexample=_factor_two_is_missing,
        correction="Twice that, in row-major order; the Hessian needs a commutation matrix, too.",
        certificate=_gradient_is_right,
    ),
    Erratum(
        name="deep-linear-class",
        source="Section 2, deep linear network",
        printed="It motivates (L0, L1)-smoothness.",
        counterexample=_network_is_outside,
        correction="It is not (L0, L1)-smooth for any constants. Constants hold along a trajectory.",
        certificate=_quadratic_is_inside,
    ),
    Erratum(
        name="quartic-constants",
        source="Section 5, synthetic experiment",
        printed="f'' ≤ 10 f' + 0.1 for f = x⁴",
        counterexample=_quartic_leaves_its_bound,
        correction="f'' ≤ 10 |f'| + 0.16; the constants trade along L0 = 16/L1².",
        certificate=_quartics_frontier,
    ),
    Erratum(
        name="quartic-prediction",
        source="Appendix I",
        printed="Theory predicts a ratio of gradients of L0/(M L1 + L0) ≈ 1e5.",
        counterexample=_printed_ratio,
        correction="The bounds go as √((M L1 + L0)Δ/T), so the ratio is the root of (M L1 + L0)/L0.",
        certificate=_square_root,
    ),
)
"""Every error that a computation shows, in the order of importance."""


def errata_list() -> str:
    """The list in Markdown, every number computed now."""
    parts = []
    for number, erratum in enumerate(ERRATA, 1):
        parts += [
            f"### {number}. {erratum.source}",
            "",
            f"- The paper prints: {erratum.printed}",
            f"- Counterexample: {erratum.counterexample().words}.",
            f"- Correction: {erratum.correction}",
            f"- Certificate: {erratum.certificate().words}.",
            "",
        ]
    return "\n".join(parts).rstrip()
