"""How often the intervals of fit_smoothness cover the truth: python benchmarks/coverage.py [runs].

Autocorrelated traces with known L0, L1 and rank correlation; nine in ten intervals should cover. Then traces
that break an assumption: the line of all rows, and the effect that it hides, beside how often the fit warns.
"""

from __future__ import annotations

import math
import sys

import numpy as np
from scipy import stats

from curvestep.fit.correlation import correlations_of
from curvestep.fit.fit import fit_smoothness
from curvestep.fit.frontier import quantile_lines
from curvestep.fit.intervals import slope_interval
from curvestep.trace.trace import Trace

# rows, correlation of neighbours, L0, L1, quantile of the line
SCENARIOS = [
    (100, 0.3, 1.0, 2.0, 0.95),
    (200, 0.7, 1.0, 2.0, 0.95),
    (300, 0.5, 1.0, 2.0, 0.95),
    (300, 0.8, 1.0, 2.0, 0.95),
    (300, 0.7, 0.0, 2.0, 0.95),
    (300, 0.7, 1.0, 0.0, 0.95),
    (300, 0.7, 1.0, 2.0, 0.75),
    (300, 0.9, 1.0, 2.0, 0.95),
    (1000, 0.9, 1.0, 2.0, 0.95),
]


def autoregression(rng: np.random.Generator, num: int, phi: float) -> np.ndarray:
    noise = rng.standard_normal(num + 200) * math.sqrt(1 - phi**2)
    values = np.zeros(num + 200)
    for t in range(1, num + 200):
        values[t] = phi * values[t - 1] + noise[t]
    return values[200:]


def smoothness(g: np.ndarray, noise: np.ndarray, L0: float, L1: float) -> np.ndarray:
    return (L0 + L1 * g) * np.exp(0.4 * noise)


def rank_correlation(L0: float, L1: float) -> float:
    z = np.random.default_rng(0).standard_normal((2, 2_000_000))
    g = np.exp(0.5 * z[0])
    return float(stats.spearmanr(g, smoothness(g, z[1], L0, L1)).statistic)


def coverage(num: int, phi: float, L0: float, L1: float, quantile: float, *, runs: int) -> dict[str, float]:
    factor, rank = math.exp(0.4 * stats.norm.ppf(quantile)), rank_correlation(L0, L1)
    covered = {"rank corr.": 0, "L0": 0, "L1": 0}
    for seed in range(runs):
        rng = np.random.default_rng([seed, num])
        g = np.exp(0.5 * autoregression(rng, num, phi))
        ell = smoothness(g, autoregression(rng, num, phi), L0, L1)
        line = quantile_lines(g[None], ell[None], quantile=quantile)[0]
        common = {"quantile": quantile, "level": 0.9}
        found = {
            "rank corr.": correlations_of(g, ell, level=0.9, resamples=200, rng=rng).spearman_interval,
            "L0": slope_interval(1 / g, ell / g, slope=float(line[0]), **common),
            "L1": slope_interval(g, ell, slope=float(line[1]), **common),
        }
        for name, truth in (("rank corr.", rank), ("L0", L0 * factor), ("L1", L1 * factor)):
            covered[name] += found[name][0] <= truth <= found[name][1]
    return {name: count / runs for name, count in covered.items()}


Rows = tuple[np.ndarray, np.ndarray]


def uneven_spread(rng: np.random.Generator, num: int) -> Rows:
    """The scatter grows with the gradient norm."""
    g = np.exp(0.5 * autoregression(rng, num, 0.7))
    return g, (1 + 2 * g) * np.exp(0.3 * g * autoregression(rng, num, 0.7))


def heavy_tails(rng: np.random.Generator, num: int) -> Rows:
    """Gradient norms of a Pareto law without a variance, scatter by Student's law."""
    g = 0.3 * stats.norm.sf(autoregression(rng, num, 0.5)) ** (-1 / 1.5)
    scatter = stats.t.ppf(stats.norm.cdf(autoregression(rng, num, 0.5)), 3)
    return g, (1 + 2 * g) * np.exp(0.2 * scatter)


def random_walk(rng: np.random.Generator, num: int) -> Rows:
    """A gradient norm whose neighbours correlate by 0.98."""
    g = np.exp(0.5 * autoregression(rng, num + 200, 0.98)[200:])
    return g, smoothness(g, autoregression(rng, num, 0.98), 1.0, 2.0)


def bad_batches(rng: np.random.Generator, num: int) -> Rows:
    """Three rows in a hundred are thirty times as large."""
    g = np.exp(0.5 * autoregression(rng, num, 0.7))
    scale = np.where(rng.uniform(size=num) < 0.03, 30.0, 1.0)
    return scale * g, scale * smoothness(g, autoregression(rng, num, 0.7), 1.0, 2.0)


def two_clusters(rng: np.random.Generator, num: int) -> Rows:
    """The gradient norm falls to a quarter half way, as when lr is decayed."""
    g = np.exp(0.2 * autoregression(rng, num, 0.7)) * np.where(np.arange(num) < num // 2, 2.0, 0.5)
    return g, smoothness(g, autoregression(rng, num, 0.7), 1.0, 2.0)


def time_confounds(rng: np.random.Generator, num: int) -> Rows:
    """L1 = 0 at every time, but L0 and the gradient norm fall together."""
    fall = np.exp(-1.5 * np.linspace(0, 1, num))
    g = fall * np.exp(0.3 * autoregression(rng, num, 0.7))
    return g, 3 * fall * np.exp(0.3 * autoregression(rng, num, 0.7))


def sharpening(rng: np.random.Generator, num: int) -> Rows:
    """L1 = 2 at every time, but L0 rises while the gradient norm falls."""
    time = np.linspace(0, 1, num)
    g = np.exp(0.3 * autoregression(rng, num, 0.7) - 1.5 * time)
    return g, (np.exp(2 * time) + 2 * g) * np.exp(0.2 * autoregression(rng, num, 0.7))


def batch_noise(rng: np.random.Generator, num: int) -> Rows:
    """L1 = 2 in the norm of the full gradient; measured is that of a batch with noise of norm 0.6."""
    full = np.exp(0.5 * autoregression(rng, num, 0.7))
    g = np.hypot(full + 0.6 / math.sqrt(20) * rng.standard_normal(num), 0.6)
    return g, smoothness(full, autoregression(rng, num, 0.7), 1.0, 2.0)


# Name, rows, law, slope of the 95 % line at every time and in the full gradient where the pooled one differs.
TRAPS = [
    ("scatter grows with g", 300, uneven_spread, None),
    ("heavy tails", 300, heavy_tails, None),
    ("g nearly a random walk", 300, random_walk, None),
    ("the same, 60 rows", 60, random_walk, None),
    ("3 % of rows times 30", 300, bad_batches, None),
    ("two clusters", 300, two_clusters, None),
    ("40 rows", 40, two_clusters, None),
    ("time confounds", 300, time_confounds, 0.0),
    ("sharpening", 300, sharpening, 2 * math.exp(0.2 * stats.norm.ppf(0.95))),
    ("batch noise in g", 300, batch_noise, 2 * math.exp(0.4 * stats.norm.ppf(0.95))),
]


def print_traps(runs: int) -> None:
    """Coverage of the pooled line's truth, and of the effect itself, beside how often the fit warns."""
    print(f"\nWhere assumptions fail, {runs} traces, 95 % line; warnings that name the trouble")
    print(
        "| scenario | rank corr. covered | L0 covered | L1 covered | the effect itself | warns |\n|"
        + " --- |" * 6
    )
    for name, num, law, effect in TRAPS:
        pooled = [law(np.random.default_rng([seed, 1]), num) for seed in range(2000)]
        g, ell = (np.concatenate(part) for part in zip(*pooled, strict=True))
        L0, L1 = quantile_lines(g[None], ell[None], quantile=0.95)[0]
        truth = {"spearman": float(stats.spearmanr(g, ell).statistic), "L0": float(L0), "L1": float(L1)}
        covered, itself, warned = dict.fromkeys(truth, 0), 0, 0
        for seed in range(runs):
            rows = law(np.random.default_rng([seed, num, 2]), num)
            trace = Trace()
            for step, (norm, value) in enumerate(zip(*rows, strict=True)):
                noise = {"noise": 0.6} if law is batch_noise else {}
                trace.append({"step": step, "grad_norm": norm, "smoothness": value, **noise})
            fit = fit_smoothness(trace, control=False)
            for key, value in truth.items():
                low, high = getattr(fit, f"{key}_interval")
                covered[key] += low <= value <= high
            itself += effect is not None and fit.L1_interval[0] <= effect <= fit.L1_interval[1]
            warned += any(warning.kind != "inside-steps" for warning in fit.warnings)
        cells = [name, *(f"{count / runs:.0%}" for count in covered.values())]
        cells += ["" if effect is None else f"{itself / runs:.0%}", f"{warned / runs:.0%}"]
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    print(f"Share of {runs} traces whose 90 % interval covers the truth")
    print(
        "| rows | neighbours | true L0 | true L1 | line | rank corr. covered | L0 covered | L1 covered |\n|"
        + " --- |" * 8
    )
    for num, phi, L0, L1, quantile in SCENARIOS:
        share = coverage(num, phi, L0, L1, quantile, runs=runs)
        cells = [num, phi, f"{L0:g}", f"{L1:g}", quantile, *(f"{value:.1%}" for value in share.values())]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    print_traps(runs)
