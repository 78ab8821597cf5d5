"""Laws of smoothness: the right one is named, parameters are found, and doubt is said."""

import math

import numpy as np
import pytest

from curvestep.fit.fit import fit_smoothness
from curvestep.fit.laws import _CONSTANT_SHARES, _Family, compare_laws
from curvestep.fit.samples import usable_samples
from tests.fit.traces import autoregression, make_trace


def rows(rng, law, *, num=100, span=30.0, scatter=0.1):
    """Gradient norms, smoothness and losses of a law whose two terms are equal at the lower end."""
    one, other = (autoregression(rng, num, 0.7) for _ in range(2))
    width = math.log(span) / 3.3
    g, loss = np.exp(width * one), np.exp(width * (0.5 * one + 0.87 * other))
    x = {"affine": g, "root": np.sqrt(g), "square": g**2, "loss": loss}[law]
    return g, (0.2 + 2 * x) * np.exp(scatter * rng.standard_normal(num)), loss


def compared(rng, law, **settings):
    g, ell, loss = rows(rng, law, **settings)
    return compare_laws(usable_samples(make_trace(g, ell, loss=loss)))


@pytest.mark.parametrize(
    ("law", "name"), [("affine", "affine"), ("root", "power"), ("square", "power"), ("loss", "loss")]
)
def test_right_law_is_named(law, name):
    named = [compared(np.random.default_rng(seed), law).best for seed in range(10)]
    assert named.count(name) >= 9


def test_parameters_without_scatter_are_found():
    found = compared(np.random.default_rng(0), "affine", scatter=1e-3)
    assert found.laws["affine"].offset == pytest.approx(0.2, rel=0.2)
    assert found.laws["affine"].slope == pytest.approx(2, rel=0.05)
    assert compared(np.random.default_rng(0), "square", scatter=1e-3).laws["power"].exponent == pytest.approx(
        2, rel=0.05
    )
    assert found.exponent_interval[0] <= found.laws["power"].exponent <= found.exponent_interval[1]


def test_units_of_smoothness_do_not_matter():
    g, ell, loss = rows(np.random.default_rng(0), "affine")
    one, two = (
        compare_laws(usable_samples(make_trace(g, scale * ell, loss=loss))) for scale in (1.0, 1000.0)
    )
    assert two.best == one.best
    assert two.exponent_interval == one.exponent_interval
    assert two.laws["affine"].slope == pytest.approx(1000 * one.laws["affine"].slope)


def test_constant_smoothness_and_narrow_ranges_are_doubtful():
    rng = np.random.default_rng(0)
    g, _, loss = rows(rng, "affine")
    flat = compare_laws(usable_samples(make_trace(g, np.exp(0.1 * rng.standard_normal(100)), loss=loss)))
    assert flat.best == ""
    assert flat.doubt.kind == "laws-alike"
    assert compared(rng, "affine", span=1.3, scatter=0.3).doubt.kind == "laws-alike"


def test_fit_takes_a_law_and_refuses_what_it_cannot_fit():
    g, ell, loss = rows(np.random.default_rng(0), "square")
    trace = make_trace(g, ell, loss=loss)
    assert fit_smoothness(trace, control=False).laws is None
    assert fit_smoothness(trace, control=False, law="best").law == "power"
    assert fit_smoothness(trace, control=False, law="loss").laws.laws["loss"].slope > 0
    bare = make_trace(g, ell)
    assert fit_smoothness(bare, control=False, law="best").laws.doubt.kind == "no-losses"
    with pytest.raises(ValueError, match="Record losses"):
        fit_smoothness(bare, control=False, law="loss")
    one_missing = make_trace(g, ell, loss=np.where(np.arange(len(g)) == 7, math.nan, loss))
    assert fit_smoothness(one_missing, control=False, law="best").laws.doubt.kind == "no-losses"
    with pytest.raises(ValueError, match="least loss that can be reached"):
        fit_smoothness(trace, control=False, law="loss", loss_floor=100.0)
    with pytest.raises(ValueError, match="`law`"):
        fit_smoothness(trace, law="cubic")


def test_laws_of_too_few_rows_with_curvature_are_refused():
    g, ell, loss = rows(np.random.default_rng(0), "affine")
    trace = make_trace(g, np.where(np.arange(len(g)) < 9, ell, 0.0), loss=loss)
    with pytest.raises(ValueError, match="got 9"):
        fit_smoothness(trace, control=False, law="best")


def slow_errors(log_x, log_ell, exponents, shares):
    """Mean square errors of held-out blocks, each block fitted by hand from the others."""
    errors = []
    for block in np.array_split(np.arange(len(log_x)), 10):
        others = np.delete(np.arange(len(log_x)), block)
        fits = []
        for share in shares:
            for exponent in exponents:
                powers = np.exp(exponent * log_x)
                left = log_ell - np.log(share + (1 - share) * powers / powers.mean())
                fits.append((left[others].var(), np.mean((left[block] - left[others].mean()) ** 2)))
        errors.append(min(fits)[1])
    return np.array(errors)


@pytest.mark.parametrize("drift", [0.0, 8.0])
def test_errors_on_held_out_blocks_agree_with_a_slow_twin(drift):
    g, ell, _ = rows(np.random.default_rng(0), "square", num=57)
    ell = ell * np.exp(np.linspace(0, drift, 57))
    exponents = np.array([0.5, 1.0, 2.0, 3.0])
    fast = _Family(np.log(g), np.log(ell), exponents)
    slow = slow_errors(np.log(g), np.log(ell), exponents, _CONSTANT_SHARES)
    np.testing.assert_allclose(fast.errors, slow, rtol=1e-9)
