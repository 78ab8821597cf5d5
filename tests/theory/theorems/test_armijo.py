"""Backtracking: certificates without knowing the function's constants."""

import numpy as np
import pytest

from curvestep.theory.certificates import certify
from curvestep.theory.complexity import descend
from curvestep.theory.problems.polynomials import Quadratic, Quartic
from curvestep.theory.problems.walls import ExponentialWall
from curvestep.theory.theorems.armijo import ArmijoStep, armijo
from curvestep.theory.theorems.clipped_gd import theorem3
from tests.theory.draws import draw_class, log_uniform


def certificates(num, rng):
    while num > 0:
        problem, x0, numbers = draw_class(rng)
        eps = float(problem.grad_norm(np.asarray(x0))) * log_uniform(rng, 1e-2, 0.9)
        first = log_uniform(rng, 1e-2, 1e2) / numbers["L0"]
        guarantee = armijo(**numbers, eps=eps, first=first, factor=rng.choice([0.3, 0.5, 0.8]))
        if guarantee.bound < 20_000:
            num -= 1
            yield certify(problem, guarantee, x0)


def test_certificates_hold_for_every_first_trial():
    found = list(certificates(60, np.random.default_rng(0)))
    assert {certificate.status for certificate in found} == {"holds"}
    assert max(certificate.descent_excess for certificate in found) <= 1e-9
    assert sum(certificate.measured > 0 for certificate in found) > 50


@pytest.mark.slow
def test_certificates_hold_over_500_draws():
    found = list(certificates(500, np.random.default_rng(1)))
    assert {certificate.status for certificate in found} == {"holds"}


def test_steps_are_the_first_that_pass():
    problem = ExponentialWall(L0=1.0, L1=2.0)
    x = np.array([0.1, 1.0, 2.0])
    step = ArmijoStep(first=4.0, factor=0.5)
    run = descend(problem, step, x, 1)
    g = problem.gradient(x)
    h = (x - run.points[1]) / g
    for i in range(3):
        trial = 4.0
        while problem.value(x[i] - trial * g[i]) > problem.value(x[i]) - trial * g[i] ** 2 / 2:
            trial /= 2
        assert h[i] == pytest.approx(trial)
    assert (h >= 0.5 / (1.0 + 2.0 * np.abs(g))).all()


def test_bound_is_that_of_theorem_3_smooth_over_the_factor():
    numbers = dict(L0=1.0, L1=2.0, gap=3.0, eps=0.01)
    smooth = theorem3(**numbers, version="sharp", form="smooth").bound
    assert armijo(**numbers, first=100.0, factor=0.5).bound == pytest.approx(2 * smooth)
    assert armijo(**numbers, first=1e-3).bound == pytest.approx(2 * 3.0 / 1e-4 * 1e3)


def test_a_point_that_cannot_move_stays():
    run = descend(Quadratic([1.0]), ArmijoStep(), [0.0], 3)
    np.testing.assert_array_equal(run.points[:, 0], 0.0)
    assert np.isfinite(descend(Quartic(), ArmijoStep(first=1e6), 30.0, 200).grad_norms).all()


@pytest.mark.parametrize("options", [{"first": 0.0}, {"factor": 1.0}])
def test_bad_input_is_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        ArmijoStep(**options)
