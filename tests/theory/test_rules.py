"""Step rules for many points against the formulas for one."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from curvestep import steps
from curvestep.theory.problems.polynomials import Quartic
from curvestep.theory.rules import (
    ClippedStep,
    FixedStep,
    Iterate,
    LogarithmicStep,
    NormalizedStep,
    ShiftedClippedStep,
    SmoothClippedStep,
)
from curvestep.theory.theorems.clipped_gd import taylor_decrease

positive = st.floats(1e-6, 1e6)


# Row 9.
@given(g=positive, a=positive, b=positive)
def test_rules_are_those_of_steps(g, a, b):
    assert FixedStep(lr=a).at_norm(g) == steps.fixed_step(g, lr=a)
    assert ClippedStep(lr=a, max_norm=b).at_norm(g) == steps.clipped_step(g, lr=a, max_norm=b)
    assert NormalizedStep(lr=a, offset=b).at_norm(g) == steps.normalized_step(g, lr=a, offset=b)
    assert SmoothClippedStep(L0=a, L1=b).at_norm(g) == steps.smooth_clipped_step(g, L0=a, L1=b)


@given(
    g=st.lists(st.one_of(st.just(0.0), positive), min_size=3, max_size=3),
    a=st.lists(positive, min_size=3, max_size=3),
    b=positive,
    c=positive,
)
def test_stepping_many_points_is_the_formula_one_by_one(g, a, b, c):
    norms, many = np.array(g), np.array(a)
    for rule in (
        FixedStep(lr=many),
        ClippedStep(lr=many, max_norm=b),
        ClippedStep(lr=b, max_norm=many),
        ClippedStep(lr=many, max_norm=np.inf),
        NormalizedStep(lr=many, offset=b),
        SmoothClippedStep(L0=many, L1=b),
        LogarithmicStep(L0=many, L1=b),
        ShiftedClippedStep(lr=many, cap=b, shift=c),
    ):
        points = zip(norms, *np.broadcast_arrays(*rule.parameters.values(), norms)[:-1], strict=True)
        one_by_one = [
            float(rule.function(float(norm), **dict(zip(rule.parameters, map(float, values), strict=True))))
            for norm, *values in points
        ]
        point = Iterate(norms, norms, norms.copy(), Quartic())
        np.testing.assert_allclose(rule.stepper(norms.shape)(point), one_by_one, rtol=1e-12)
        np.testing.assert_allclose(rule(point), one_by_one, rtol=1e-12)
        np.testing.assert_allclose(rule.at_norm(norms), one_by_one, rtol=1e-12)


def test_shifted_clipping_is_its_formula_and_infinity_never_clips():
    g = np.array([0.0, 1.0, 9.0, 1e300, np.inf])
    h = ShiftedClippedStep(lr=0.5, cap=1.0, shift=1.0).at_norm(g)
    np.testing.assert_allclose(h, np.minimum(0.5, 1.0 / (g + 1.0)), rtol=1e-15)
    assert ShiftedClippedStep(lr=0.5, cap=1.0, shift=0.0).at_norm(0.0) == 0.5
    thresholds = np.array([1.0, np.inf])
    huge = np.array([1e308, 1e308])
    for rule in (ClippedStep(lr=0.5, max_norm=thresholds), ShiftedClippedStep(0.5, thresholds, 0.0)):
        assert rule.at_norm(np.array([1e308, 1e308]))[1] == 0.5
        assert rule.stepper((2,))(Iterate(huge, huge, huge, Quartic()))[1] == 0.5


@given(g=positive, L0=positive, L1=positive, factor=st.floats(0.5, 2.0))
def test_logarithmic_step_has_the_largest_decrease_by_taylor(g, L0, L1, factor):
    h = LogarithmicStep(L0=L0, L1=L1).at_norm(g)
    best = taylor_decrease(h, g, L0=L0, L1=L1)
    assert taylor_decrease(factor * h, g, L0=L0, L1=L1) <= best * (1 + 1e-9)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FixedStep(lr=0.0), "`lr` must be positive"),
        (lambda: ClippedStep(lr=np.array([1.0, np.nan]), max_norm=1.0), "`lr` must be positive"),
        (lambda: ClippedStep(lr=1.0, max_norm=-1.0), "`max_norm` must be positive"),
        (lambda: NormalizedStep(lr=1.0, offset=0.0), "`offset` must be positive"),
        (lambda: ShiftedClippedStep(lr=1.0, cap=1.0, shift=-1.0), "`shift` must be zero or more"),
        (lambda: SmoothClippedStep(L0=np.inf, L1=1.0), "`L0` must be zero or more"),
    ],
)
def test_bad_hyperparameters_are_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()
