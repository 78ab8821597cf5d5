"""The within-step test against closed forms, a slow twin, its invariances and its answers to bad input."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy import stats

from curvestep.fit.within import LEAST_ELASTICITY, Within, mean_norms, within_steps

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
    """The test from its definition: every block by hand, centres on a grid."""
    weight, ratio = np.abs(v) / np.abs(v).sum(), u / v
    blocks = min(16, math.ceil(1 / (weight**2).sum()))
    label = [int((weight[:i].sum() + weight[i] / 2) * blocks) for i in range(len(v))]
    names = sorted(set(label))
    share = [sum(w for w, own in zip(weight, label, strict=True) if own == name) for name in names]

    def t(centre):
        score = weight * np.minimum(1, np.maximum(-1, ratio - centre))
        sums = [sum(x for x, own in zip(score, label, strict=True) if own == name) for name in names]
        mean = sum(sums)
        away = sum((own - mean * part) ** 2 for own, part in zip(sums, share, strict=True))
        return float(mean) / max(1e-300, math.sqrt(away * len(names) / (len(names) - 1)))

    grid = np.linspace(-2.5, 2.5, 501)
    values = np.array([t(centre) for centre in grid])
    kept = grid[np.abs(values) <= stats.t.ppf(0.5 + level / 2, len(names) - 1)]
    p_value = max(stats.t.sf(t(0.1), len(names) - 1), 2.0 ** -len(names))
    return grid[np.abs(values).argmin()], (kept[0], kept[-1]), p_value


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
    x = np.full((40, 1), 0.8) + np.linspace(0, 1e-6, 40)[:, None]
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
    u, v = 0.1 * rng.standard_normal(64) - 0.05, np.full(64, -0.1)  # 16 blocks of four rows of one weight
    turned = rng.permuted(u.reshape(16, 4), axis=1).ravel()
    one, two = within_steps(**made(u, v)), within_steps(**made(turned, v))
    assert two.elasticity_interval == pytest.approx(one.elasticity_interval, abs=1e-9)
    assert two.p_value == pytest.approx(one.p_value, rel=1e-9)


@settings(deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 2**32 - 1),
    slope=st.floats(-1, 1.5),
    noise=st.floats(0.2, 1.0),
    num=st.integers(14, 60),
)
def test_agrees_with_its_slow_twin(seed, slope, noise, num):
    rng = np.random.default_rng(seed)
    v = -rng.uniform(0.02, 0.2, num)
    u = slope * v + noise * 0.1 * rng.standard_normal(num)
    found = within_steps(**made(u, v))
    centre, interval, p_value = twin(u, v, 0.9)
    assert found.elasticity == pytest.approx(centre, abs=0.011)
    assert found.elasticity_interval == pytest.approx(interval, abs=0.011)
    assert found.p_value == pytest.approx(p_value, rel=1e-6)


def test_neighbours_that_repeat_each_other_are_not_counted_as_evidence():
    # 16 independent values of u, each eight times in a row: an interval as wide as from the 16 alone.
    rng = np.random.default_rng(3)
    u = 0.1 * rng.standard_normal(16)
    one = within_steps(**made(u, np.full(16, -0.1)))
    many = within_steps(**made(np.repeat(u, 8), np.full(128, -0.1)))
    assert many.elasticity_interval == pytest.approx(one.elasticity_interval, abs=1e-6)
    assert many.p_value == pytest.approx(one.p_value, rel=1e-6)


def test_interval_and_p_value_are_one_test():
    rng = np.random.default_rng(0)
    for level in (0.5, 0.9, 0.98):
        u, v = 0.03 * rng.standard_normal(64) - 0.02, np.full(64, -0.1)
        found = within_steps(**made(u, v), level=level)
        assert (found.elasticity_interval[0] > LEAST_ELASTICITY) == (found.p_value < (1 - level) / 2)
        assert found.elasticity_interval[0] < found.elasticity < found.elasticity_interval[1]


def test_one_wild_row_moves_the_elasticity_little():
    v = np.full(60, -0.1)
    u = 0.8 * v
    wild = u.copy()
    wild[20] = 50.0
    assert within_steps(**made(wild, v)).elasticity == pytest.approx(0.8, abs=0.02)
    calm = v.copy()
    calm[20] = -1e-6  # hardly any change of the norm: a ratio without meaning, and without weight
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
    v = np.full(64, -0.1)
    grows = within_steps(**made(0.9 * v, v))
    words = "smoothness grows with the gradient norm (elasticity 0.90 [0.90, 0.90], 64 rows, p 2e-05)"
    assert str(grows) == f"Within steps: {words}."
    assert "does not grow with the gradient norm (elasticity 0.00 [0.00, 0.00]" in str(
        within_steps(**made(0 * v, v))
    )
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
    assert "segment estimator" in untested(grad_norms=None, fractions=None).missing


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
    assert found.missing.startswith(
        "The steps are too short: along 60 of 60 of them the gradient norm changes"
    )
    assert "kappa is above about 0.1" in found.missing
    assert found.kappa < 1e-3


def test_constant_norms_are_told():
    found = untested(grad_norm=np.ones(60), grad_norms=np.ones((60, 2)))
    assert "along 60 of 60 of them the gradient norm changes" in found.missing


def test_weight_on_a_few_rows_is_told():
    v = np.full(60, -1e-6)
    v[:3] = -0.2
    assert "a few hold nearly all the change" in within_steps(**made(v, v)).missing


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
