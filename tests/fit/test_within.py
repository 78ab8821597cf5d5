"""The within-step test against closed forms, a slow twin, its invariances and its answers to bad input."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy import stats

from curvestep.fit.within import LEAST_ELASTICITY, Within, mean_norms, within_steps
from tests.fit.traces import autoregression

EPS = 2.0**-52
HALVES = (0.5, 1.0)


def along(gradient, x, *, lr, fractions=HALVES, noise=None):
    """Rows of plain steps from each row of ``x``: what the probe records where a batch adds ``noise``."""
    noise = np.zeros_like(x) if noise is None else noise
    start = gradient(x) + noise
    d = -lr * start
    ends = [gradient(x + fraction * d) + noise for fraction in fractions]
    length = np.linalg.norm(d, axis=1)
    secants = [
        np.linalg.norm(end - start, axis=1) / (f * length) for end, f in zip(ends, fractions, strict=True)
    ]
    norm = np.linalg.norm(start, axis=1)
    return {
        "secants": np.column_stack(secants),
        "grad_norm": norm,
        "grad_norms": np.column_stack([np.linalg.norm(end, axis=1) for end in ends]),
        "fractions": fractions,
        "kappa": secants[-1] * length * fractions[-1] / norm,
        "eps": EPS,
    }


def points(num=60, dim=1, *, low=0.5, high=3.0, seed=0):
    return np.random.default_rng(seed).uniform(low, high, (num, dim))


def made(u, v, *, kappa=1.0, eps=EPS):
    """Rows whose logarithmic changes are ``u`` and ``v``."""
    u, v = np.asarray(u, dtype=float), np.asarray(v, dtype=float)
    half = np.full_like(v, 0.9)
    ends = 4 * np.exp(v) * (1 + half) / 2 - 1 - 2 * half
    return {
        "secants": np.column_stack([np.ones_like(u), np.exp(u)]),
        "grad_norm": np.ones_like(v),
        "grad_norms": np.column_stack([half, ends]),
        "fractions": HALVES,
        "kappa": np.full_like(v, kappa),
        "eps": eps,
    }


def twin(u, v, level):
    """Centre, interval and p-value from their definition: every block by hand, centres on a grid."""
    weight, ratio = np.abs(v) / np.abs(v).sum(), u / v
    effective = 1 / (weight**2).sum()
    grid = np.linspace(-4, 4, 8001)
    inner = np.array([(ratio - c).clip(-1, 1) @ weight for c in grid])
    centre = grid[np.abs(inner).argmin()]
    score = weight * (ratio - centre).clip(-1, 1)
    repeat = max(0, sum(score[1:] * score[:-1]) / sum(score**2))
    fewer = max(5, math.ceil(0.5 * effective * (1 - repeat) / (1 + repeat)))
    blocks = min(16, math.ceil(effective), fewer)
    label = [int((weight[:i].sum() + weight[i] / 2) * blocks) for i in range(len(v))]
    names = sorted(set(label))
    share = [sum(w for w, own in zip(weight, label, strict=True) if own == name) for name in names]

    def t(centre):
        score = weight * np.minimum(1, np.maximum(-1, ratio - centre))
        sums = [sum(x for x, own in zip(score, label, strict=True) if own == name) for name in names]
        mean = sum(sums)
        away = sum((own - mean * part) ** 2 for own, part in zip(sums, share, strict=True))
        return float(mean) / max(1e-300, math.sqrt(away * len(names) / (len(names) - 1)))

    values = np.array([t(centre) for centre in grid[::20]])
    kept = grid[::20][np.abs(values) <= stats.t.ppf(0.5 + level / 2, len(names) - 1)]
    p_value = max(stats.t.sf(t(LEAST_ELASTICITY), len(names) - 1), 2.0 ** -len(names))
    return centre, (kept[0], kept[-1]) if len(kept) else (centre, centre), p_value


# Closed forms


@pytest.mark.parametrize("fractions", [(0.5, 1.0), (0.25, 0.5), (0.25, 0.5, 1.0)])
@pytest.mark.parametrize("lr", [1e-3, 0.05, 0.3])
def test_exponential_has_elasticity_one(lr, fractions):
    # Its Hessian is its gradient, and at fractions that double the trapezoid rule is exact for their ratio.
    found = within_steps(**along(np.exp, points(high=2.0), lr=lr, fractions=fractions))
    assert found.elasticity == pytest.approx(1, abs=lr / 3 if len(fractions) == 3 else 1e-6)
    assert found.grows
    assert found.p_value == 2.0**-16


@pytest.mark.parametrize("power", [2, 4, 6])
def test_power_has_the_elasticity_of_its_exponent(power):
    # f = xᵖ/p: the Hessian is (p − 1) times the gradient to the power (p − 2)/(p − 1).
    x = points()
    found = within_steps(**along(lambda p: np.sign(p) * np.abs(p) ** (power - 1), x, lr=1e-4))
    assert found.elasticity == pytest.approx((power - 2) / (power - 1), abs=1e-3)
    assert found.grows == (power > 2)


def test_cosh_has_the_squared_tangent_as_elasticity():
    x = np.linspace(0.78, 0.82, 40)[:, None]
    found = within_steps(**along(np.sinh, x, lr=1e-3))
    assert found.elasticity == pytest.approx(math.tanh(0.8) ** 2, abs=1e-3)


def test_smoothness_that_falls_where_the_gradient_grows_has_negative_elasticity():
    # f = |x|^1.5: the Hessian is 1/√x, the gradient √x.
    found = within_steps(**along(lambda p: 1.5 * np.sqrt(np.abs(p)) * np.sign(p), points(low=1), lr=1e-3))
    assert found.elasticity == pytest.approx(-1, abs=1e-2)
    assert not found.grows
    assert "does not grow" in str(found)


# Properties


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    dim=st.integers(1, 40),
    reach=st.floats(0.01, 20),
    noise=st.floats(0, 3),
    spread=st.floats(0, 4),
    scale=st.floats(-3, 3),
)
def test_constant_hessian_never_alarms(seed, dim, reach, noise, spread, scale):
    rng = np.random.default_rng(seed)
    curvature = 10 ** (scale + rng.uniform(-spread, 0, dim))
    x = rng.standard_normal((50, dim))
    xi = noise * curvature.max() * rng.standard_normal(x.shape)
    found = within_steps(**along(lambda p: curvature * p, x, lr=reach / curvature.max(), noise=xi))
    assert not found.grows
    if not found.missing:
        assert found.elasticity == pytest.approx(0, abs=1e-3)
        assert found.p_value > 0.5


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), curvature=st.floats(1e-6, 1e6), norm=st.floats(1e-6, 1e6))
def test_units_of_smoothness_and_gradient_do_not_matter(seed, curvature, norm):
    rng = np.random.default_rng(seed)
    rows = along(np.sinh, points(seed=seed), lr=0.05, noise=0.5 * rng.standard_normal((60, 1)))
    scaled = rows | {
        "secants": curvature * rows["secants"],
        "grad_norm": norm * rows["grad_norm"],
        "grad_norms": norm * rows["grad_norms"],
    }
    one, two = within_steps(**rows), within_steps(**scaled)
    assert two.elasticity == pytest.approx(one.elasticity, rel=1e-6, abs=1e-9)
    assert two.elasticity_interval == pytest.approx(one.elasticity_interval, rel=1e-6, abs=1e-9)
    assert two.p_value == pytest.approx(one.p_value, rel=1e-6)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32 - 1))
def test_order_inside_a_block_does_not_matter(seed):
    rng = np.random.default_rng(seed)
    v = np.tile([-0.1, -0.1, 0.1, 0.1], 16)  # 16 blocks of four rows of one weight, with a median of zero
    u = 0.05 * rng.standard_normal(64) + 0.5 * v
    order = (rng.permuted(np.tile(np.arange(4), (16, 1)), axis=1) + 4 * np.arange(16)[:, None]).ravel()
    one, two = within_steps(**made(u, v)), within_steps(**made(u[order], v[order]))
    assert two.elasticity_interval == pytest.approx(one.elasticity_interval, abs=1e-9)
    assert two.p_value == pytest.approx(one.p_value, rel=1e-9)


@settings(deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 2**32 - 1),
    slope=st.floats(-1, 1.5),
    noise=st.floats(0.02, 0.1),
    fall=st.sampled_from([0.0, 0.3]),
    num=st.integers(20, 60),
)
def test_agrees_with_its_slow_twin(seed, slope, noise, fall, num):
    rng = np.random.default_rng(seed)
    v = rng.uniform(-0.2, 0.1, num)
    u = slope * v + noise * rng.standard_normal(num) - fall
    found = within_steps(**made(u, v))
    between = twin(u - np.median(u), v - np.median(v), 0.9) if num % 2 == 0 else None
    if between is not None:  # with an odd number the median is a row, and its v less the median is zero
        assert found.p_value == pytest.approx(between[2], rel=0.02)
    centre, interval, _ = twin(u, v, 0.9) if not found.fall else between or (None, None, None)
    if centre is not None:
        assert found.elasticity == pytest.approx(centre, abs=0.005)
        assert found.elasticity_interval == pytest.approx(interval, abs=0.03)
    assert bool(found.fall) == (fall > 0) or abs(found.fall) < 0.1


def test_neighbours_that_repeat_each_other_are_not_counted_as_evidence():
    # Values that come eight times in a row say no more than once each, so that the interval is as wide.
    rng = np.random.default_rng(3)
    widths = {1: [], 8: []}
    for _ in range(20):
        u, v = 0.05 * rng.standard_normal(32), np.tile([-0.1, 0.1], 16)
        for times, kept in widths.items():
            found = within_steps(**made(np.repeat(u, times), np.repeat(v, times)))
            kept.append(np.ptp(found.elasticity_interval))
    assert np.mean(widths[8]) == pytest.approx(np.mean(widths[1]), rel=0.15)


@pytest.mark.slow
def test_level_holds_where_neighbours_resemble_each_other():
    # The truth is the elasticity that the test must exceed: one in ten alarms, whatever the correlation.
    rng = np.random.default_rng(7)
    for phi in (0.0, 0.5, 0.8):
        alarms = 0
        for _ in range(300):
            v = 0.05 * autoregression(rng, 200, phi) - 0.1
            u = LEAST_ELASTICITY * v + 0.03 * autoregression(rng, 200, phi)
            alarms += within_steps(**made(u, v)).p_value <= 0.1
        assert alarms <= 300 * 0.16


def test_common_fall_of_the_secants_is_no_growth():
    # Kinks: every secant falls by a quarter along its step, while the gradient norm falls as well.
    rng = np.random.default_rng(0)
    v = rng.uniform(-0.2, -0.05, 64)
    found = within_steps(**made(-0.3 + 0.02 * rng.standard_normal(64), v))
    assert found.fall == pytest.approx(0.3, abs=0.02)
    assert abs(found.elasticity) < 0.2
    assert not found.grows
    assert "Along all steps the secants fall by 25%" in str(found)
    both = within_steps(**made(0.8 * v - 0.3 + 0.02 * rng.standard_normal(64), v))
    assert both.fall == pytest.approx(0.3, abs=0.03)
    assert both.elasticity == pytest.approx(0.8, abs=0.15)
    assert both.grows


def test_steps_that_are_all_alike_cannot_be_compared_unless_nothing_changes():
    v = np.full(60, -0.1)
    assert "too much alike" in within_steps(**made(0.8 * v, v)).missing
    still = within_steps(**made(0 * v, v))
    assert still.elasticity == pytest.approx(0)
    assert still.p_value == 1
    assert "does not grow" in str(still)


def test_interval_and_p_value_are_one_test_where_the_secants_fall():
    rng = np.random.default_rng(0)
    for level in (0.5, 0.9, 0.98):
        v = rng.uniform(-0.2, 0.1, 64)
        found = within_steps(**made(0.3 * v - 0.3 + 0.03 * rng.standard_normal(64), v), level=level)
        assert found.fall > 0
        assert (found.elasticity_interval[0] > LEAST_ELASTICITY) == (found.p_value < (1 - level) / 2)
        assert found.elasticity_interval[0] < found.elasticity < found.elasticity_interval[1]


def test_one_wild_row_moves_the_elasticity_little():
    v = np.linspace(-0.2, 0.1, 60)
    u = 0.8 * v
    wild = u.copy()
    wild[5] = 50.0
    assert within_steps(**made(wild, v)).elasticity == pytest.approx(0.8, abs=0.05)
    calm = v.copy()
    calm[5] = -1e-6  # hardly any change of the norm: a ratio without meaning, and without weight
    assert within_steps(**made(wild, calm)).elasticity == pytest.approx(0.8, abs=1e-4)


def test_mean_norm_of_a_line_is_its_middle():
    norms = mean_norms(np.array([1.0]), np.array([[0.9, 0.5, 0.0]]), np.array([0.1, 0.5, 1.0]))
    np.testing.assert_allclose(norms, [[0.95, 0.75, 0.5]])


def test_rounding_of_single_precision_on_a_constant_hessian_is_no_evidence():
    rng = np.random.default_rng(1)
    rows = along(lambda p: p, rng.standard_normal((200, 5)), lr=0.3)
    for kappa in (1e-4, 1e-3, 1e-2, 0.1):
        # Rounding adds up in a secant: the shorter half looks sharper, as if smoothness fell with the norm.
        error = 2.0**-23 / kappa
        noisy = rows["secants"] * np.sqrt(1 + (error * rng.standard_normal((200, 2)) / HALVES) ** 2)
        shorter = rows["grad_norm"][:, None] * (1 - kappa * np.array(HALVES))
        found = within_steps(
            **(
                rows
                | {"secants": noisy, "grad_norms": shorter, "kappa": np.full(200, kappa), "eps": 2.0**-23}
            )
        )
        assert not found.grows


# Words, and what is missing


def test_words_of_growth_of_none_and_of_doubt():
    rng = np.random.default_rng(0)
    v = np.linspace(-0.2, 0.1, 65)[1:]
    words = "smoothness grows with the gradient norm (elasticity 0.90 [0.90, 0.90], 64 rows, p 2e-05)"
    assert str(within_steps(**made(0.9 * v, v))) == f"Within steps: {words}."
    none = str(within_steps(**made(0 * v, v)))
    assert "does not grow with the gradient norm (elasticity 0.00 [0.00, 0.00], 64 rows, p 1)" in none
    doubt = within_steps(**made(0.2 * rng.standard_normal(64), v))
    assert "no growth of smoothness with the gradient norm is shown" in str(doubt)
    assert "short" not in str(doubt)
    short = within_steps(**made(0.2 * rng.standard_normal(64), v, kappa=0.03))
    assert "Steps are short (median kappa 0.03)" in str(short)


def untested(**changes) -> Within:
    found = within_steps(**(along(np.sinh, points(), lr=0.05) | changes))
    assert math.isnan(found.elasticity)
    assert math.isnan(found.p_value)
    assert found.num_rows == 0
    assert not found.grows
    assert str(found) == f"Within steps: cannot tell. {found.missing}"
    return found


def test_missing_columns_are_named_with_the_way_to_get_them():
    assert "no secants and gradient norms" in untested(secants=None).missing
    assert "with the estimator `smoothness`" in untested(grad_norms=None, fractions=None).missing


def test_one_fraction_is_not_enough():
    rows = along(np.sinh, points(), lr=0.05, fractions=(1.0,))
    found = within_steps(**rows)
    assert "Only the fraction 1 " in found.missing
    assert "fractions=(0.5, 1.0)" in found.missing


def test_rows_without_numbers_are_left_out_and_counted():
    rows = along(np.sinh, points(), lr=0.05)
    holes = rows["secants"].copy()
    holes[:20, 0] = np.nan
    holes[20:30, 1] = 0.0
    assert within_steps(**(rows | {"secants": holes})).num_rows == 30
    holes[8:] = np.nan
    holes[:8] = rows["secants"][:8]
    assert untested(secants=holes).missing.startswith("8 of 60 rows hold positive, finite secants")
    assert untested(kappa=np.full(60, np.nan)).missing.startswith("0 of 60 rows")


def test_steps_too_short_for_their_precision_are_told():
    found = within_steps(**(along(np.sinh, points(), lr=1e-4) | {"eps": 2.0**-23}))
    assert found.missing.startswith("Too few of 60 steps can be compared")
    assert "kappa is above about 0.1" in found.missing
    assert found.kappa < 1e-3


def test_constant_norms_are_told():
    found = untested(grad_norm=np.ones(60), grad_norms=np.ones((60, 2)))
    assert "the gradient norm changes too little, or by the same factor" in found.missing


def test_weight_on_a_few_rows_is_told():
    v = np.full(60, -1e-6)
    v[:3] = -0.2
    assert "Too few of 60 steps" in within_steps(**made(v, v)).missing


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"level": 1.0}, "`level` must lie between 0 and 1"),
        ({"grad_norms": np.ones((60, 3))}, "one column a fraction"),
        ({"fractions": (0.5, 0.75, 1.0)}, "for 60 steps and 3 fractions"),
        ({"fractions": (1.0, 0.5)}, "`fractions` must be positive and rise"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        within_steps(**(along(np.sinh, points(), lr=0.05) | change))
