"""The within-step test against closed forms, a slow twin, its invariances and its answers to bad input."""

import math
import re
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy import stats

from curvestep.fit import within
from curvestep.fit.fit import fit_smoothness
from curvestep.fit.within import BLOCK, LEAST_TESTED_ROWS, MOST_KAPPA, Within, within_steps
from curvestep.trace.trace import Trace
from tests.fit.traces import autoregression

EPS = 2.0**-52
HALVES = (0.5, 1.0)
DEFAULT = (0.05, 0.15, 0.5, 1.0)


def along(gradient, x, *, lr, fractions=DEFAULT, noise=None):
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


def of_two_kinds(one, two, take):
    """Rows of ``one`` where ``take`` is true, of ``two`` elsewhere, each with the fractions it has."""
    matrices = {
        name: np.where(take[:, None], one[name], two[name]) for name in ("secants", "grad_norms", "fractions")
    }
    columns = {name: np.where(take, one[name], two[name]) for name in ("grad_norm", "kappa")}
    return {**matrices, **columns, "eps": EPS}


def points(num=60, dim=1, *, low=0.5, high=3.0, seed=0):
    return np.random.default_rng(seed).uniform(low, high, (num, dim))


def drifting(rng, *, rows=80, kappa=0.3, drift=0.5, cosine=1.0, trend=0.0, fractions=DEFAULT):
    """Steps in the plane whose curvature changes by a random share of itself, whatever the gradient does."""
    size = kappa * np.exp(0.3 * rng.standard_normal(rows) + trend * np.linspace(-1, 1, rows))
    change = -0.5 + drift * rng.standard_normal(rows) - trend * np.linspace(-1, 1, rows)
    f = np.array(fractions)
    moved = size[:, None] * f * np.abs(1 + change[:, None] * f / 2)
    norms = np.sqrt(1 - 2 * cosine * moved + moved**2)
    return {
        "secants": moved / f,
        "grad_norm": np.ones(rows),
        "grad_norms": norms,
        "fractions": fractions,
        "kappa": moved[:, -1],
        "eps": EPS,
    }


def twin(rows, level=0.9):
    """Elasticity, interval and p-value against 0 from their definition, for two fractions."""
    s, m, (first, last) = rows["secants"], rows["grad_norms"], rows["fractions"]
    g = rows["grad_norm"]
    mean_first = (g + m[:, 0]) / 2
    mean_last = (first * mean_first + (last - first) * (m[:, 0] + m[:, 1]) / 2) / last
    series = []
    for values in (np.log(s[:, 1] / s[:, 0]), np.log(mean_last / mean_first)):
        values = np.clip(values, *np.quantile(values, [0.05, 0.95]))
        time = np.arange(len(values))
        series.append(values - np.polyval(np.polyfit(time, values, 1), time))
    u, v = series
    edges = [i * len(u) // (len(u) // BLOCK) for i in range(len(u) // BLOCK + 1)]
    uv = [sum(u[a:b] * v[a:b]) for a, b in pairwise(edges)]
    vv = [sum(v[a:b] ** 2) for a, b in pairwise(edges)]
    centre, num = sum(uv) / sum(vv), len(uv)
    error = math.sqrt(sum((a - centre * b) ** 2 for a, b in zip(uv, vv, strict=True)) * num / (num - 1))
    reach = stats.t.ppf(0.5 + level / 2, num - 1) * error / sum(vv)
    p_value = stats.ttest_1samp(uv, 0, alternative="greater").pvalue
    return centre, (centre - reach, centre + reach), max(p_value, 2.0**-num)


# Closed forms


@pytest.mark.parametrize("fractions", [DEFAULT, (0.1, 0.5, 1.0), HALVES])
@pytest.mark.parametrize("lr", [1e-3, 0.02])
def test_exponential_has_elasticity_one(lr, fractions):
    # Its Hessian is its gradient.
    found = within_steps(**along(np.exp, points(high=2.0), lr=lr, fractions=fractions))
    assert found.elasticity == pytest.approx(1, abs=0.02)
    assert found.answer == "grows"
    assert found.zero == pytest.approx(0, abs=0.2)


@pytest.mark.parametrize("power", [4, 6])
def test_power_has_the_elasticity_of_its_exponent(power):
    # f = xᵖ/p: the Hessian is (p − 1) times the gradient to the power (p − 2)/(p − 1).
    x = points()
    found = within_steps(**along(lambda p: np.sign(p) * np.abs(p) ** (power - 1), x, lr=1e-4))
    assert found.elasticity == pytest.approx((power - 2) / (power - 1), abs=1e-2)
    assert found.grows


def test_smoothness_that_falls_as_the_gradient_grows_is_negative():
    # f = |x|^1.5: the Hessian is 1/√x, the gradient √x.
    found = within_steps(**along(lambda p: 1.5 * np.sqrt(np.abs(p)) * np.sign(p), points(low=1), lr=1e-3))
    assert found.elasticity == pytest.approx(-1, abs=1e-2)
    assert found.answer == "does-not-grow"


@pytest.mark.parametrize("lr", [0.005, 0.02])
def test_elasticity_is_that_of_one_length_where_stretches_follow_the_run(lr):
    # The gradient norm of a stretch five times as long changes five times as much, its smoothness too.
    x, take = points(num=80, high=2.0), np.random.default_rng(1).random(80) < 0.5
    long, short = (along(np.exp, x, lr=lr, fractions=f) for f in ((0.05, 0.15), (0.01, 0.03)))
    found = within_steps(**of_two_kinds(long, short, take))
    assert found.elasticity == pytest.approx(1, abs=0.02)
    assert found.answer == "grows"


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
        assert found.elasticity == pytest.approx(0, abs=1e-2)


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
    for name in ("elasticity", "elasticity_interval", "zero", "p_value"):
        assert getattr(two, name) == pytest.approx(getattr(one, name), rel=1e-6, abs=1e-9, nan_ok=True)


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 2**32 - 1), drift=st.floats(0.1, 0.6), num=st.integers(LEAST_TESTED_ROWS, 90))
def test_agrees_with_its_slow_twin(seed, drift, num):
    rows = drifting(np.random.default_rng(seed), rows=num, kappa=0.2, drift=drift, fractions=HALVES)
    found = within_steps(**rows)
    centre, interval, p_value = twin(rows)
    assert found.elasticity == pytest.approx(centre, rel=1e-6)
    assert found.elasticity_interval == pytest.approx(interval, rel=1e-6)
    assert found.zero < 0  # before the overshoot a steeper stretch makes a smaller gradient
    assert found.p_value == pytest.approx(p_value, rel=1e-6)


@pytest.mark.parametrize(("kappa", "cosine"), [(0.3, 0.4), (1.0, 0.6), (1.0, 1.0), (2.0, 0.6)])
def test_hessian_that_drifts_at_random_shows_its_zero(kappa, cosine):
    found = [
        within_steps(**drifting(np.random.default_rng(seed), kappa=kappa, cosine=cosine))
        for seed in range(30)
    ]
    assert np.mean([fit.grows for fit in found]) <= 0.2
    apart = [fit.elasticity - fit.zero for fit in found]
    assert np.median(apart) == pytest.approx(0, abs=np.std(apart))


@pytest.mark.parametrize("trend", [-0.5, 0.5])
def test_trend_that_norm_and_curvature_share_is_no_growth(trend):
    found = [
        within_steps(**drifting(np.random.default_rng(seed), kappa=1.0, trend=trend)) for seed in range(30)
    ]
    assert np.mean([fit.grows for fit in found]) <= 0.2


@pytest.mark.slow
def test_level_holds_where_neighbours_resemble_each_other():
    rng = np.random.default_rng(7)
    for phi in (0.0, 0.5, 0.8):
        alarms = 0
        for _ in range(300):
            rows = drifting(rng, rows=200, kappa=1.0, drift=0.0)
            f = np.array(DEFAULT)
            size = np.exp(0.3 * autoregression(rng, 200, phi))[:, None]
            moved = size * f * (1 + (0.5 * autoregression(rng, 200, phi) - 0.5)[:, None] * f / 2)
            norms = np.sqrt(1 - 1.2 * moved + moved**2)
            rows |= {"secants": moved / f, "grad_norms": norms, "kappa": moved[:, -1]}
            alarms += within_steps(**rows).p_value <= 0.1
        assert alarms <= 300 * 0.16


def test_common_fall_of_the_secants_is_no_growth():
    # Kinks: every secant falls by a quarter along its step, while the gradient norm falls as well.
    rows = drifting(np.random.default_rng(0), kappa=0.2, drift=0.0, fractions=HALVES)
    found = within_steps(**(rows | {"secants": rows["secants"] * [1.0, 0.75]}))
    assert abs(found.elasticity) < 0.2
    assert not found.grows


def test_one_wild_row_moves_the_elasticity_little():
    rows = along(np.exp, points(high=2.0), lr=0.02)
    wild = rows["secants"].copy()
    wild[5, 1:] *= 50.0
    assert within_steps(**(rows | {"secants": wild})).elasticity == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("at_once", [1, 150, 10**6])
def test_shuffles_in_pieces_add_up_to_all_of_them(at_once, monkeypatch):
    rows = drifting(np.random.default_rng(0))
    whole = within_steps(**rows)
    monkeypatch.setattr(within, "ROWS_AT_ONCE", at_once)
    assert within_steps(**rows).zero == pytest.approx(whole.zero, rel=1e-12)


def test_memory_of_a_row_does_not_grow_with_the_shuffles():
    peaks = []
    for num in (5_000, 15_000):
        rows = drifting(np.random.default_rng(0), rows=num)
        tracemalloc.start()
        within_steps(**rows)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert (peaks[1] - peaks[0]) / 10_000 < 2_000  # 25,000 bytes if all of them are taken at once


def test_stretch_ends_before_the_overshoot():
    rng = np.random.default_rng(0)
    for kappa, last in ((0.2, 1.0), (0.5, 0.5), (1.5, 0.15)):
        found = within_steps(**drifting(rng, kappa=kappa, drift=0.1))
        assert found.stretch == (0.05, last)
        assert found.kappa * last <= MOST_KAPPA * 1.2


def test_step_across_the_gradient_does_not_deny_growth():
    rows = drifting(np.random.default_rng(0), kappa=0.2, drift=0.0, cosine=0.3)
    found = within_steps(**rows)
    assert found.along < 0.5
    assert found.answer == "not-shown"


def test_size_is_known_along_the_gradient_and_unknown_across_it():
    one = within_steps(**along(np.exp, points(high=2.0), lr=0.02))
    assert one.size_known
    assert one.size_error == pytest.approx(0, abs=0.02)
    many = within_steps(**along(np.exp, points(dim=6), lr=0.005))
    assert many.grows
    assert not many.size_known
    # Sums of exponentials: each direction follows its own part of the gradient.
    theta = math.acos(many.along)
    assert many.elasticity / (1 + 2 * math.tan(theta) ** 2) == pytest.approx(1, abs=0.05)
    assert within_steps(**along(lambda p: p * [1, 2, 8], points(dim=3), lr=0.02)).size_known  # 0 is 0


def test_size_is_unknown_where_the_elasticity_itself_changes():
    # cosh: L0 rules near the minimum, L1 far out; between steps the slope is above 1, inside them below.
    found = within_steps(**along(np.sinh, points(low=0.2, high=2.0), lr=0.02))
    assert found.grows
    assert found.elasticity > 1 > found.through_origin
    assert found.size_error >= found.elasticity - found.through_origin
    assert not found.size_known


def test_size_is_unknown_where_the_interval_is_wide():
    rng = np.random.default_rng(0)
    x = points(high=2.0)
    noisy = within_steps(**along(np.exp, x, lr=0.02, noise=0.5 * np.exp(x) * rng.standard_normal(x.shape)))
    assert noisy.along == pytest.approx(1)
    assert noisy.size_error >= noisy.elasticity_interval[1] - noisy.elasticity - 1e-12
    assert not noisy.size_known
    assert "size cannot be estimated" in str(noisy)
    assert not Within(level=0.9).size_known


def test_rounding_in_single_precision_is_no_evidence():
    rng = np.random.default_rng(1)
    for kappa in (1e-4, 1e-3, 1e-2, 0.1):
        # Rounding adds up in a secant: the shorter stretch looks sharper.
        rows = drifting(rng, rows=200, kappa=kappa, drift=0.0)
        error = 2.0**-23 / kappa
        noise = error * rng.standard_normal((200, 4)) / DEFAULT
        found = within_steps(**(rows | {"secants": rows["secants"] * np.sqrt(1 + noise**2), "eps": 2.0**-23}))
        assert not found.grows


# What is missing


def untested(kind, **changes) -> Within:
    found = within_steps(**(along(np.sinh, points(), lr=0.05) | changes))
    assert math.isnan(found.elasticity)
    assert math.isnan(found.p_value)
    assert math.isnan(found.zero)
    assert found.num_rows == 0
    assert found.answer == "cannot-tell"
    assert found.missing is not None
    assert found.missing.kind == kind
    assert str(found) == f"Within steps: cannot tell. {found.missing}"
    return found


def test_rows_without_numbers_are_left_out_and_counted():
    rows = along(np.sinh, points(100), lr=0.02)
    holes = rows["secants"].copy()
    holes[:20, 0] = np.nan
    holes[20:30, 1] = 0.0
    assert within_steps(**(rows | {"secants": holes})).num_rows == 70
    holes[8:] = np.nan
    holes[:8] = rows["secants"][:8]
    assert "8 of 100 were" in str(untested("few-rows", **(rows | {"secants": holes})).missing)
    untested("no-kappa", kappa=np.full(60, np.nan))


def test_steps_that_overshoot_are_told():
    for fractions in (HALVES, (0.1, 0.5, 1.0)):
        rows = drifting(np.random.default_rng(0), kappa=1.5, fractions=fractions)
        assert re.search(r"fractions=\(0.0\d+, 0.1\d, 1.0\)", str(untested("overshoot", **rows).missing))


def test_steps_too_short_for_their_precision_are_told():
    found = untested("alike", **(along(np.sinh, points(), lr=1e-4) | {"eps": 2.0**-23}))
    assert "in 60 of 60 rows" in str(found)
    assert found.kappa < 1e-3


def test_steps_that_are_all_alike_are_told():
    untested("alike", **drifting(np.random.default_rng(0), drift=0.0) | {"grad_norms": np.ones((80, 4))})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"level": 1.0}, "`level` must be between 0 and 1"),
        ({"grad_norms": np.ones((60, 3))}, r"must have the shape \(60, 4\), .* and \(60, 3\)"),
        ({"fractions": (0.5, 0.75, 1.0)}, r"must have the shape \(60, 3\), steps by fractions"),
        ({"fractions": (1.0, 0.5, 0.2, 0.1)}, "`fractions` must be positive and rise"),
        ({"fractions": (0.0, 0.2, 0.5, 1.0)}, "`fractions` must be positive and rise"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        within_steps(**(along(np.sinh, points(), lr=0.05) | change))


# Traces that lack something


def trace_of(rows, *, fractions_in_rows=False, drop=(), **header):
    """A trace of ``along``'s rows."""
    trace = Trace(header={"dtype": "float64", **header})
    fractions = list(rows["fractions"])
    for i, g in enumerate(rows["grad_norm"]):
        secants, norms = rows["secants"][i], rows["grad_norms"][i]
        row = {
            "step": i, "grad_norm": g, "smoothness": secants.max(), "secants": secants.tolist(),
            "grad_norms": norms.tolist(), "kappa": rows["kappa"][i], "cosine": rows.get("cosine", 1.0),
        }  # fmt: skip
        row |= {"fractions": fractions} if fractions_in_rows else {}
        trace.append({key: value for key, value in row.items() if key not in drop})
    return trace


EXPONENTIAL = along(np.exp, points(high=2.0), lr=0.02)


@pytest.mark.parametrize(("trace", "kind"), [
    (trace_of(EXPONENTIAL, drop=("secants",), fractions=DEFAULT), "no-secants"),
    (trace_of(EXPONENTIAL), "no-fractions"),
    (trace_of(EXPONENTIAL, drop=("kappa",), fractions=DEFAULT), "no-kappa"),
    (trace_of(along(np.exp, points(), lr=0.02, fractions=(1.0,)), fractions=(1.0,)), "one-fraction"),
    (trace_of(along(np.exp, points(20), lr=0.02), fractions=DEFAULT), "few-rows"),
])  # fmt: skip
def test_what_a_trace_lacks_is_named(trace, kind):
    found = fit_smoothness(trace, control=False).within
    assert found.answer == "cannot-tell"
    assert found.missing.kind == kind


def test_fractions_of_the_rows_are_used_where_the_header_has_none():
    rows = trace_of(EXPONENTIAL, fractions_in_rows=True)
    header = trace_of(EXPONENTIAL, fractions=DEFAULT)
    one, two = (fit_smoothness(trace, control=False).within for trace in (rows, header))
    assert one == two
    assert one.answer == "grows"


def test_steps_across_the_gradient_that_show_no_growth_say_nothing():
    rows = along(lambda p: p * [1, 2, 8], points(dim=3), lr=0.02)
    assert within_steps(**rows).answer == "does-not-grow"
    assert within_steps(**rows, cosine=0.6).answer == "does-not-grow"
    found = within_steps(**rows, cosine=0.3)
    assert found.missing is None
    assert found.doubt.kind == "across"
    assert found.answer == "cannot-tell"
    assert within_steps(**EXPONENTIAL, cosine=0.3).answer == "grows"  # what shows is shown


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_stretches_that_follow_the_run_do_not_pass_for_growth(seed):
    # Curvature falls along every step whatever the gradient does: longer stretches see more of it.
    rng = np.random.default_rng(seed)
    rows = [
        drifting(rng, kappa=k, drift=0.0, fractions=(f / 3, f, 1.0)) for k, f in ((0.4, 0.5), (1.6, 0.125))
    ]
    found = within_steps(**of_two_kinds(*rows, take=rng.random(80) < 0.5))
    assert found.elasticity <= 0.2
