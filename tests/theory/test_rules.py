"""Step rules for many points against the formulas for one."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from curvestep import steps
from curvestep.theory import (
    ClippedStep,
    FixedStep,
    LogarithmicStep,
    NormalizedStep,
    ShiftedClippedStep,
    SmoothClippedStep,
    guaranteed_decrease,
)

positive = st.floats(1e-6, 1e6)


# Row 9.
@given(g=positive, a=positive, b=positive)
def test_rules_are_those_of_steps(g, a, b):
    assert FixedStep(lr=a)(g) == steps.fixed_step(g, lr=a)
    assert ClippedStep(lr=a, max_norm=b)(g) == steps.clipped_step(g, lr=a, max_norm=b)
    assert NormalizedStep(lr=a, offset=b)(g) == steps.normalized_step(g, lr=a, offset=b)
    assert SmoothClippedStep(L0=a, L1=b)(g) == steps.smooth_clipped_step(g, L0=a, L1=b)


@given(
    g=st.lists(st.one_of(st.just(0.0), positive), min_size=3, max_size=3),
    a=st.lists(positive, min_size=3, max_size=3),
    b=positive,
    c=positive,
)
def test_stepping_in_place_is_the_formula_one_by_one(g, a, b, c):
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
        with np.errstate(divide="ignore"):
            in_place = rule.stepper(norms.shape)(norms.copy())
        np.testing.assert_allclose(in_place, rule(norms), rtol=1e-12)


@given(g=positive, L0=positive, L1=positive, factor=st.floats(0.5, 2.0))
def test_logarithmic_step_has_the_largest_guaranteed_decrease(g, L0, L1, factor):
    h = LogarithmicStep(L0=L0, L1=L1)(g)
    best = guaranteed_decrease(h, g, L0=L0, L1=L1)
    assert guaranteed_decrease(factor * h, g, L0=L0, L1=L1) <= best * (1 + 1e-9)


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
