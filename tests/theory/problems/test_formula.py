"""Functions of formulas, and the set S of the paper around their starts."""

import math

import numpy as np
import pytest

from curvestep.theory.certificates import certify
from curvestep.theory.problems.formula import FormulaProblem
from curvestep.theory.problems.walls import ExponentialWall
from curvestep.theory.theorems.clipped_gd import theorem3
from curvestep.theory.theorems.fixed_gd import theorem6
from tests.theory.draws import log_uniform


def exponential_of_square(**options):
    """exp(x²), of which |f''| over |f'| grows without limit: no pair (L0, L1) holds everywhere."""
    return FormulaProblem(
        lambda x: np.exp(x**2),
        lambda x: 2 * x * np.exp(x**2),
        lambda x: (2 + 4 * x**2) * np.exp(x**2),
        minimum=1.0,
        name="exp(x²)",
        **options,
    )


def fenced_wall(*, L0, L1, edge, curvature):
    """A wall up to ``edge``, and beyond it much more curvature than its law allows."""
    wall = ExponentialWall(L0=L0, L1=L1)

    def beyond(x):
        return np.maximum(np.abs(x) - edge, 0.0)

    def inside(x):
        return np.clip(x, -edge, edge)

    return FormulaProblem(
        lambda x: (
            wall.value(inside(x)) + wall.grad_norm(inside(x)) * beyond(x) + curvature * beyond(x) ** 2 / 2
        ),
        lambda x: wall.gradient(inside(x)) + curvature * np.sign(x) * beyond(x),
        lambda x: np.where(beyond(x) > 0, curvature, wall.curvature(x)),
        minimum=0.0,
        name="fenced wall",
        domain=(-2 * edge - 2, 2 * edge + 2),
    )


# Row 5.
def test_frontier_near_a_start_is_that_of_the_papers_set():
    f = exponential_of_square(domain=(-6.0, 6.0))
    for radius in (0.0, 0.3, 1.0):
        edge = 1.0 + radius  # {f ≤ f(1)} is [−1, 1]
        x = np.linspace(-edge, edge, 100_001)
        for L1 in (0.5, 2.0, 5.0):
            exact = np.max(f.hessian_norm(x) - L1 * f.grad_norm(x))
            assert f.frontier_near(np.array(1.0), L1, radius=radius) == pytest.approx(exact, rel=1e-3)


def test_a_set_that_leaves_the_domain_has_no_pair():
    cosine = FormulaProblem(
        lambda x: -np.log(np.cos(x)),
        np.tan,
        lambda x: np.cos(x) ** -2.0,
        minimum=0.0,
        domain=(-math.pi / 2, math.pi / 2),
    )
    assert cosine.frontier_near(np.array(1.0), 2.0, radius=0.1) < math.inf
    assert cosine.frontier_near(np.array(1.0), 2.0, radius=1.0) == math.inf


def test_without_a_domain_the_frontier_is_asked():
    f = exponential_of_square(frontier=lambda L1: 7.0)
    assert f.frontier_near(np.array(1.0), 1.0, radius=1.0) == 7.0
    with pytest.raises(ValueError, match="is not known"):
        exponential_of_square().frontier_near(np.array(1.0), 1.0, radius=1.0)


@pytest.mark.parametrize(
    ("theorem", "options", "radius"),
    [
        (theorem3, {"version": "printed"}, 1.0),
        (theorem3, {"radius": 0.3}, 0.3),
        (theorem3, {"version": "sharp", "form": "clipped"}, 0.0),
        (theorem3, {"version": "sharp", "form": "smooth"}, 0.0),
        (theorem3, {"version": "sharp", "form": "logarithmic"}, 0.0),
        (theorem6, {"version": "printed"}, 1.0),
        (theorem6, {"version": "sharp"}, 0.0),
    ],
)
def test_theorems_need_smoothness_on_their_set_only(theorem, options, radius):
    f = exponential_of_square(domain=(-6.0, 6.0))
    x0 = np.array(1.2)
    L1 = 4.0
    L0 = f.frontier_near(x0, L1, radius=radius)
    numbers = dict(L1=L1, gap=float(f.gap(x0)), eps=0.01)
    certificate = certify(f, theorem(L0=L0, **numbers, **options), x0)
    assert certificate.status == "holds"
    assert certificate.measured > 1
    false = certify(f, theorem(L0=0.9 * L0, **numbers, **options), x0)
    assert [reason.kind for reason in false.reasons] == ["outside-class"]


@pytest.mark.parametrize("form", ["clipped", "smooth", "logarithmic", "fixed"])
def test_sharp_steps_never_leave_the_sublevel_set(form):
    rng = np.random.default_rng(0)
    for _ in range(60):
        L0 = log_uniform(rng, 0.1, 10)
        L1 = log_uniform(rng, 0.1, 10)
        edge = log_uniform(rng, 0.1, 4) / L1
        problem = fenced_wall(L0=L0, L1=L1, edge=edge, curvature=1e6 * L0)
        starts = rng.uniform(-edge, edge, size=50)
        numbers = dict(L0=L0, L1=L1, gap=float(problem.gap(starts).max()), eps=1e-2 * L0 / L1)
        if form == "fixed":
            guarantee = theorem6(**numbers, version="sharp")
        else:
            guarantee = theorem3(**numbers, version="sharp", form=form)
        assert certify(problem, guarantee, starts, max_steps=300).status in ("holds", "undecided")
        # The paper's set reaches beyond the fence.
        printed = certify(problem, theorem3(**numbers, version="printed"), starts)
        assert [reason.kind for reason in printed.reasons] == ["outside-class"]
