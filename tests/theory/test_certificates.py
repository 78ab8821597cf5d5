"""Certificates: no true theorem is violated, and the false ones are caught by the same harness."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from curvestep.notes import Note
from curvestep.theory.certificates import certify, certify_lower_bound
from curvestep.theory.complexity import descend, first_hit
from curvestep.theory.problems.base import BoundedNoise
from curvestep.theory.problems.polynomials import Quadratic, Quartic
from curvestep.theory.problems.walls import ExponentialWall, SlowValley
from curvestep.theory.rules import ClippedStep, FixedStep, ShiftedClippedStep
from curvestep.theory.theorems.clipped_gd import theorem3
from curvestep.theory.theorems.clipped_sgd import theorem7, theorem8
from curvestep.theory.theorems.fixed_gd import remark5, theorem4, theorem6, wall_height
from curvestep.theory.theorems.guarantee import Assumption, Guarantee, in_class
from tests.theory.draws import (
    RareNoise,
    draw_deterministic,
    draw_stochastic,
    log_uniform,
    rotated_walls,
)


def kinds(certificate):
    return [reason.kind for reason in certificate.reasons]


@pytest.mark.slow
def test_no_deterministic_theorem_is_violated_over_4200_draws():
    rng = np.random.default_rng(0)
    seen, each, moved = Counter(), Counter(), 0
    for _ in range(4200):
        problem, x0, guarantee = draw_deterministic(rng)
        certificate = certify(problem, guarantee, x0)
        assert certificate.status == "holds", (problem, x0, certificate)
        assert certificate.measured <= certificate.bound
        assert certificate.descent_excess is None or certificate.descent_excess <= 1e-9
        seen[problem.name.split()[0], guarantee.theorem, guarantee.version] += 1
        each[guarantee.theorem] += 1
        moved += certificate.measured > 0
    assert moved > 4000  # hardly any draw was over before it began
    assert min(each["Theorem 3"], each["Theorem 6"], each["Theorem 3 for normalized descent"]) >= 500
    assert len(seen) >= 30  # every problem met nearly every theorem


@pytest.mark.slow
def test_no_stochastic_theorem_is_violated_over_3600_draws():
    rng = np.random.default_rng(1)
    seen, moved = Counter(), 0
    for seed in range(3600):
        problem, x0, guarantee = draw_stochastic(rng)
        noise = (BoundedNoise, RareNoise)[seed % 2](guarantee.tau)
        certificate = certify(problem, guarantee, x0, max_steps=100_001, noise=noise, num_runs=24, seed=seed)
        assert certificate.status == "holds", (problem, x0, certificate)
        seen[guarantee.theorem, guarantee.version] += 1
        moved += certificate.measured > 0
    assert moved > 3400
    for theorem in ("Theorem 7", "Theorem 8"):
        assert seen[theorem, "corrected"] + seen[theorem, "sharp"] >= 500
        assert min(seen[theorem, "corrected"], seen[theorem, "sharp"]) >= 100


@pytest.mark.slow
@pytest.mark.parametrize("version", ["corrected", "sharp"])
def test_no_lower_bound_is_violated_over_250_draws(version):
    rng = np.random.default_rng(2)
    tried = 0
    while tried < 250:
        L0, L1, growth = log_uniform(rng, 0.1, 10), log_uniform(rng, 0.1, 10), log_uniform(rng, 1, 100)
        M = growth * L0 / L1
        eps = min(L0 / 3, M / 2) * log_uniform(rng, 0.3, 1)
        gap = max(wall_height(M, L0=L0, L1=L1), 1.25 * eps) * log_uniform(rng, 1.001, 2)
        guarantee = theorem4(L0=L0, L1=L1, M=M, gap=gap, eps=eps, version=version)
        if guarantee.bound < 3000:
            certificate = certify_lower_bound(guarantee, fractions=[0.5, 0.9, 0.999])
            assert certificate.status == "holds", certificate
            tried += 1


def test_the_lower_bound_is_nearly_attained_on_its_own_pair():
    guarantee = theorem4(L0=1.0, L1=5.0, M=50.0, gap=12.0, eps=0.1, version="sharp")
    certificate = certify_lower_bound(guarantee, fractions=[0.99, 0.999])
    assert certificate.bound <= certificate.measured <= 1.02 * certificate.bound


def test_the_printed_lower_bound_is_caught_outside_its_class():
    certificate = certify_lower_bound(theorem4(L0=1.0, L1=5.0, M=50.0, gap=12.0, eps=0.1, version="printed"))
    assert certificate.status == "violated"
    assert kinds(certificate) == ["outside-class"]
    assert "L1 = 5 needs L0 = 5, and L0 = 1 is claimed" in certificate.reasons[0].text
    # ε above L0/3: the slow function is outside as well.
    both = certify_lower_bound(theorem4(L0=1.0, L1=5.0, M=50.0, gap=12.0, eps=0.5, version="printed"))
    assert kinds(both) == ["outside-class", "outside-class"]
    # With L0 = L1 the printed pair is where it should be.
    inside = theorem4(L0=5.0, L1=5.0, M=50.0, gap=12.0, eps=0.1, version="printed")
    assert certify_lower_bound(inside).status == "holds"


def test_the_printed_step_of_theorem_7_cycles_between_two_points():
    wall = ExponentialWall(L0=1.0, L1=5.0)
    T, tau, L1 = 10**6, 0.1, 5.0
    lr = min(1 / 20, 1 / (128 * L1 * tau), 1 / math.sqrt(T))
    rules = {c: ShiftedClippedStep(lr=lr, cap=c / (16 * L1), shift=tau) for c in (1 / lr, 1.0)}
    printed = descend(wall, rules[1 / lr], 2.0, 4000, noise=BoundedNoise(tau))
    assert first_hit(printed.grad_norms, 0.05) == math.inf
    assert np.ptp(printed.points[-400::2]) < 0.1
    assert np.abs(np.diff(printed.points[-400:])).min() > 10
    corrected = descend(wall, rules[1.0], 2.0, 4000, noise=BoundedNoise(tau))
    assert first_hit(corrected.grad_norms, 0.05) == pytest.approx(1706, rel=0.05)


def test_a_run_that_is_stopped_early_is_undecided():
    certificate = certify(Quartic(), theorem3(L0=0.16, L1=10.0, gap=30.0**4, eps=1e-4), 30.0, max_steps=100)
    assert certificate.status == "undecided"


def test_a_false_gap_or_pair_or_M_is_caught():
    numbers = dict(L0=0.16, L1=10.0, gap=30.0**4, eps=1e-2)
    assert kinds(certify(Quartic(), theorem3(**{**numbers, "gap": 1.0}), 30.0)) == ["gap"]
    assert kinds(certify(Quartic(), theorem3(**{**numbers, "L0": 0.1}), 30.0)) == ["outside-class"]
    assert kinds(certify(Quartic(), theorem6(**numbers, M=4 * 29.0**3), 30.0)) == ["gradient-norm"]


def test_a_rule_that_overshoots_breaks_the_descent_inequality():
    # A step three times as long as it may be, dressed up as a guarantee of half a step's decrease.
    wall = ExponentialWall(L0=1.0, L1=1.0)
    honest = theorem3(L0=1.0, L1=1.0, gap=10.0, eps=1e-6)
    rule = ClippedStep(lr=3.0, max_norm=1.0)
    false = replace(honest, rule=rule, decrease=lambda g: 0.5 * rule.at_norm(g) * g * g)
    certificate = certify(wall, false, 1.4)
    assert certificate.status == "violated"
    assert kinds(certificate) == ["decrease"]


def test_a_step_that_is_too_long_never_arrives():
    honest = theorem6(L0=1.0, L1=0.0, gap=8.0, eps=1e-3, M=4.0, version="sharp")
    false = replace(honest, rule=FixedStep(lr=2.0), decrease=None, bound=1000.0)
    certificate = certify(Quadratic([1.0]), false, [4.0])
    assert certificate.status == "violated"
    assert kinds(certificate) == ["slower"]


def test_many_starts_are_certified_together():
    starts = np.linspace(-30, 30, 11)
    certificate = certify(Quartic(), theorem3(L0=0.16, L1=10.0, gap=30.0**4, eps=1e-3), starts)
    assert certificate.status == "holds"
    singles = [certify(Quartic(), certificate.guarantee, x).measured for x in starts]
    assert certificate.measured == max(singles)


def test_noise_is_drawn_for_every_run():
    shapes = set()

    class Seen(BoundedNoise):
        def draw(self, rng, batch, problem):
            shapes.add(batch[1:])
            return super().draw(rng, batch, problem)

    valley = SlowValley(0.1)
    guarantee = theorem8(**CLASS, M=1.0, tau=0.1)
    certify(valley, guarantee, 2.0, noise=Seen(0.1), num_runs=7, max_steps=10)
    assert shapes == {(7,)}


CLASS = {"L0": 1.0, "L1": 5.0, "gap": 12.0, "eps": 0.1}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: certify(Quartic(), theorem4(**CLASS, M=50.0), 1.0), "certify_lower_bound"),
        (lambda: certify(Quartic(), theorem7(**CLASS, tau=0.1), [0.5, 0.6]), "`x0` must be one start"),
        (lambda: certify_lower_bound(theorem3(**CLASS)), "what `theorem4` returns"),
        (lambda: certify_lower_bound(theorem6(**CLASS, M=2.0)), "what `theorem4` returns"),
        (lambda: certify_lower_bound(remark5(**CLASS, M=2.0)), "what `theorem4` returns"),
        (lambda: certify(Quartic(), theorem3(**CLASS), math.nan), "`x0` must be finite"),
        (
            lambda: certify(SlowValley(0.1), theorem8(**CLASS, M=1.0, tau=0.1), 1.0, noise=BoundedNoise(0.2)),
            "within the guarantee's radius",
        ),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def polyak(*, L0, L1, radius, gap, eps):
    """A theorem of one's own: Polyak's step on a convex function, from within ``radius`` of its minimum at 0.

    ‖x⁺ − x*‖² ≤ ‖x − x*‖² − (f − f*)²/g², and g² ≤ 2(L0 + L1 g)(f − f*).
    """

    def step(point):
        return point.problem.gap(point.x) / point.norm**2

    def near(problem, starts):
        if np.max(problem.norm(starts)) > radius:
            return Note("distance", f"a start is further than {radius:g} from the minimum")
        return None

    return Guarantee(
        theorem="Polyak",
        version="sharp",
        bound=4 * radius**2 * (L0 / eps + L1) ** 2,
        rule=step,
        assumptions=(Assumption("f convex"),),
        checks=(*in_class(L0=L0, L1=L1, gap=gap), near),
        gap=gap,
        eps=eps,
    )


def test_a_rule_may_see_the_point_and_a_theorem_may_check_what_it_needs():
    rng = np.random.default_rng(0)
    problem = rotated_walls(L0=1.0, L1=2.0, dim=3)
    starts = rng.normal(size=(20, 3))
    numbers = dict(L0=1.0, L1=2.0, gap=float(problem.gap(starts).max()), eps=1e-3)
    radius = float(problem.norm(starts).max())
    certificate = certify(problem, polyak(**numbers, radius=radius), starts)
    assert certificate.status == "holds"
    assert certificate.measured > 3
    assert kinds(certify(problem, polyak(**numbers, radius=radius / 2), starts)) == ["distance"]
    assert "its own step" in str(polyak(**numbers, radius=radius))
