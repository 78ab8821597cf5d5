"""False alarms, power and size of the within-step test: python benchmarks/within.py [--help].

Every run takes steps on a function whose smoothness is known to grow with the gradient norm, or known not to.
Rows hold what the probe records, at the fractions that it chooses as the run goes. Runs are simulated many at
once. Seeds below 10,000 were for choosing the constants of the test; the printed tables are of others.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from curvestep.fit.within import MOST_SIZE_ERROR, Within, within_steps
from curvestep.smoothness.schedule import FOLLOWED_ROWS, short_fractions

STEPS = 240  # of every run; a run of n rows at stride s keeps every s-th of the first n·s
BATCH = 100  # runs of one seed
DIM = 20  # of the drifting Hessians
KAPPAS, COSINES = (0.1, 0.3, 1.0, 2.0), (0.3, 0.6, 1.0)
NULL, GROWTH, SIZE, FAMILIES = range(4)  # first number of each table's seeds
Array = np.ndarray
Gradient = Callable[[Array, Array], Array]


@dataclass(frozen=True, kw_only=True)
class Descent:
    """How runs descend: arrays with one entry a run."""

    lr: Array
    max_norm: Array
    noise: Array  # root mean square of the gradient noise in each direction, shape (runs, dimension)
    rows: Array
    stride: Array
    decay: Array | bool = False  # whether lr falls along a cosine
    heavy: Array | bool = False  # whether the noise has the tails of Student's t, three degrees of freedom
    unequal: Array | float = 0.0  # standard deviation of the logarithm of a batch's scale


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run as the probe records it."""

    step_norm: Array
    grad_norm: Array
    secants: Array
    grad_norms: Array
    fractions: Array  # one list a row
    cosine: float = 1.0  # of step and −gradient

    def within(self) -> Within:
        """The test."""
        change = self.secants[:, -1] * self.fractions[:, -1] * self.step_norm
        return within_steps(
            secants=self.secants,
            grad_norm=self.grad_norm,
            grad_norms=self.grad_norms,
            fractions=self.fractions,
            kappa=change / self.grad_norm,
            eps=2.0**-52,
            cosine=self.cosine,
        )


def measured(
    start: Array, changes: Sequence[Array], length: Array, fractions: Array, cosine: float = 1.0
) -> list[Run]:
    """Runs from gradients of shape (runs, rows, dimension) and their changes up to each fraction."""
    sizes = np.stack([np.linalg.norm(change, axis=-1) for change in changes], axis=-1)
    secants = sizes / (fractions * length[..., None])
    norms = np.stack([np.linalg.norm(start + change, axis=-1) for change in changes], axis=-1)
    columns = zip(length, np.linalg.norm(start, axis=-1), secants, norms, fractions, strict=True)
    return [
        Run(step_norm=a, grad_norm=b, secants=c, grad_norms=d, fractions=e, cosine=cosine)
        for a, b, c, d, e in columns
    ]


def chosen(rates: Sequence[Array], fixed: Sequence[float] | None, runs: int) -> Array:
    """Fractions of the next row of each run, from the rates of those before it, or as fixed."""
    if fixed is not None:
        return np.tile(fixed, (runs, 1))
    last = np.array(rates[-FOLLOWED_ROWS:]).reshape(-1, runs).T
    return np.array([(*short_fractions([r for r in row if 0 < r < np.inf]), 1.0) for row in last])


def followed(rates: Array, fixed: Sequence[float] | None) -> Array:
    """Fractions of all rows, shape (runs, rows, fractions), from rates of shape (runs, rows)."""
    runs, rows = rates.shape
    columns = list(rates.T)
    return np.stack([chosen(columns[:row], fixed, runs) for row in range(rows)], axis=1)


def each_fraction(fractions: Array) -> list[Array]:
    """The fractions one by one, each of shape (runs, rows, 1)."""
    return [fractions[..., i, None] for i in range(fractions.shape[-1])]


# Cells: steps of a given kappa and a given cosine to the gradient that is measured, as on an oracle


def autoregression(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    """Gaussian series along the last axis, of unit variance, whose neighbours correlate by one half."""
    values = rng.standard_normal(shape)
    for t in range(1, shape[1]):
        values[:, t] = 0.5 * values[:, t - 1] + math.sqrt(0.75) * values[:, t]
    return values


def directions(rng: np.random.Generator, g: Array, cosine: float) -> Array:
    """Unit vectors whose cosine to −g is given, otherwise random."""
    g = g / np.linalg.norm(g, axis=-1, keepdims=True)
    if cosine == 1:
        return -g
    across = rng.standard_normal(g.shape)
    across -= (across * g).sum(axis=-1, keepdims=True) * g
    across /= np.linalg.norm(across, axis=-1, keepdims=True)
    return -cosine * g + math.sqrt(1 - cosine**2) * across


def drifting(
    rng: np.random.Generator,
    runs: int,
    rows: int,
    fixed: Sequence[float] | None,
    *,
    kappa: float,
    cosine: float,
    each: bool,
) -> list[Run]:
    """A Hessian that changes along each step by −0.5 ± 0.5 of itself, whatever the gradient does.

    ``each``: every direction by itself, without regard to the others; otherwise all alike.
    """
    curvature = rng.lognormal(size=(runs, 1, DIM))
    g = rng.standard_normal((runs, rows, DIM)) * rng.lognormal(0, 0.5, (runs, 1, DIM))
    g *= np.exp(0.4 * autoregression(rng, (runs, rows)))[..., None]
    change = curvature * directions(rng, g, cosine)
    size = kappa * np.exp(0.3 * autoregression(rng, (runs, rows)))
    length = size * np.linalg.norm(g, axis=-1) / np.linalg.norm(change, axis=-1)
    change *= length[..., None]
    drift = rng.standard_normal(g.shape) if each else autoregression(rng, (runs, rows))[..., None]
    fractions = followed(size, fixed)
    changes = [f * (1 + (0.5 * drift - 0.5) * f / 2) * change for f in each_fraction(fractions)]
    return measured(g, changes, length, fractions, cosine)


KINDS = ("exponential", "cosh", "quartic", "radial quartic", "deep linear")


def places(rng: np.random.Generator, kind: str, runs: int, rows: int, dim: int) -> tuple[Array, Callable]:
    """Points of a function whose smoothness grows with its gradient norm, and its gradient."""
    shape = (runs, rows, dim)
    a, b = 10 ** rng.uniform(-0.5, 0.5, (runs, 1, dim)), rng.uniform(0.7, 1.5, (runs, 1, dim))
    signs = rng.choice([-1, 1], (runs, 1, dim))

    def product(p: Array) -> Array:  # ½(x₁⋯x₆ − 1)²
        whole = p.prod(axis=-1, keepdims=True)
        return (whole - 1) * whole / p

    return {
        "constant": lambda: (rng.standard_normal(shape), lambda p: a * p),
        "one exponential": lambda: (rng.uniform(0, 3, shape), np.exp),
        "one quartic": lambda: (rng.uniform(1, 3, shape), lambda p: p**3),
        "exponential": lambda: (rng.uniform(1, 3, shape), lambda p: a * np.exp(b * p)),
        "cosh": lambda: (signs * rng.uniform(1, 3, shape), lambda p: a * np.sinh(b * p)),
        "quartic": lambda: (signs * rng.uniform(1, 3, shape), lambda p: 0.1 * a * p + p**3),
        "radial quartic": lambda: (
            rng.standard_normal(shape) * 4 / math.sqrt(dim),
            lambda p: 0.3 * p + p * (p * p).sum(axis=-1, keepdims=True),
        ),
        "deep linear": lambda: (rng.uniform(1.3, 2, shape), product),
    }[kind]()


def cells(
    rng: np.random.Generator,
    x: Array,
    gradient: Callable[[Array], Array],
    fixed: Sequence[float] | None,
    *,
    kappa: float,
    cosine: float = 1.0,
    noise: float = 0.0,
) -> list[Run]:
    """Steps from points of shape (runs, rows, dimension); noise is a share of the gradient norm there."""
    g = gradient(x)
    runs, rows, dim = x.shape
    spread = noise * np.linalg.norm(g, axis=-1, keepdims=True) / math.sqrt(dim)
    batch = g + spread * rng.standard_normal(g.shape)
    way = directions(rng, batch, cosine)
    short = 1e-5 * np.linalg.norm(x, axis=-1, keepdims=True)
    smoothness = np.linalg.norm(gradient(x + short * way) - g, axis=-1) / short[..., 0]
    size = kappa * np.exp(0.3 * autoregression(rng, (runs, rows)))
    length = size * np.linalg.norm(batch, axis=-1) / smoothness
    fractions = followed(size, fixed)
    changes = [gradient(x + f * length[..., None] * way) - g for f in each_fraction(fractions)]
    return measured(batch, changes, length, fractions, cosine)


def growing_cells(
    rng: np.random.Generator,
    runs: int,
    rows: int,
    fixed: Sequence[float] | None,
    *,
    kind: str,
    dim: int = 6,
    **settings: float,
) -> list[Run]:
    """:func:`cells` of a function whose smoothness grows with its gradient norm."""
    return cells(rng, *places(rng, kind, runs, rows, dim), fixed, **settings)


# Descent with noise, clipping and batches of unequal scale


def descend(gradient: Gradient, x: Array, how: Descent, rng: np.random.Generator) -> list[Run]:
    """SGD with gradient noise and batches of unequal scale, both the same all along a step.

    ``gradient`` takes positions and a standard normal draw that stands for the batch. Runs that diverge, end
    in a minimum to the last digit or meet a gradient that does not change are left out.
    """
    starts, changes, lengths, fractions, rates = [], [], [], [], []
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for t in range(STEPS):
            cosine = 0.505 + 0.495 * np.cos(np.pi * np.minimum(t / (how.rows * how.stride), 1))
            lr = np.where(how.decay, cosine, 1.0) * how.lr
            drawn, batch = rng.standard_normal((2, *x.shape))
            tails = np.where(how.heavy, np.sqrt(rng.chisquare(3, len(x)) / 3), 1.0)[:, None]
            scale = np.exp(how.unequal * rng.standard_normal(len(x)))[:, None]

            def at(point: Array, noise: Array = how.noise * drawn / tails, batch=batch, scale=scale) -> Array:
                return scale * (gradient(point, batch) + noise)

            g = at(x)
            d = -(lr * np.minimum(1.0, how.max_norm / np.linalg.norm(g, axis=1)))[:, None] * g
            starts.append(g)
            lengths.append(np.linalg.norm(d, axis=1))
            fractions.append(chosen(rates, None, len(x)))
            changes.append([at(x + f * d) - g for f in each_fraction(fractions[-1])])
            first = np.linalg.norm(changes[-1][0], axis=1) / fractions[-1][:, 0]
            rates.append(first / np.linalg.norm(g, axis=1))
            x = x + d
        each = [np.stack(kept, axis=1) for kept in zip(*changes, strict=True)]
        found = measured(
            np.stack(starts, axis=1), each, np.stack(lengths, axis=1), np.stack(fractions, axis=1)
        )
    kept = (
        shortened(run, rows, stride) for run, rows, stride in zip(found, how.rows, how.stride, strict=True)
    )
    return [run for run in kept if lives(run)]


def shortened(run: Run, rows: int, stride: int) -> Run:
    """The first ``rows`` rows at this stride."""
    part = slice(0, rows * stride, stride)
    return Run(
        step_norm=run.step_norm[part],
        grad_norm=run.grad_norm[part],
        secants=run.secants[part],
        grad_norms=run.grad_norms[part],
        fractions=run.fractions[part],
    )


def lives(run: Run) -> bool:
    """Whether a run neither diverges nor comes to rest."""
    g = run.grad_norm
    if not (np.isfinite(run.secants).all() and g.max() < 1e6 * g[0]):
        return False
    return bool(run.secants.min() > 0 and g.min() > 1e-9 * g.max())


# Functions whose smoothness does not follow the gradient norm


def spectrum(rng: np.random.Generator, dim: int, kind: str) -> Array:
    """Eigenvalues of a random Hessian."""
    values = {
        "geometric": lambda: np.geomspace(10 ** rng.uniform(-4, -0.2), 1, dim),
        "power": lambda: np.arange(1, dim + 1.0) ** -rng.uniform(0.5, 2.5),
        "spiked": lambda: (
            np.where(np.arange(dim) < max(1, dim // 20), 1, 10 ** rng.uniform(-3, -1))
            * rng.uniform(0.5, 1, dim)
        ),
        "uniform": lambda: rng.uniform(0.01, 1, dim),
        "two-level": lambda: np.where(rng.random(dim) < 0.5, 1.0, 10 ** rng.uniform(-3, -0.3)),
        "isotropic": lambda: rng.uniform(0.95, 1, dim),
    }[kind]()
    return 10 ** rng.uniform(-1, 1.5) * values / values.max()


SPECTRA = ("geometric", "power", "spiked", "uniform", "two-level", "isotropic")
NOISES = ("white", "sharp", "flat", "heavy")


def quadratics(
    rng: np.random.Generator, count: int, *, unequal: bool = False, ripple: str | None = None
) -> list[Run]:
    """Noisy descent on random quadratics, with batches of unequal scale or a :func:`ripple <rippled>`."""
    drawn = []
    for _ in range(count):
        dim = int(rng.choice([2, 3, 6, 12, 30, 100] if ripple is None else [3, 10, 30, 100]))
        kind, colour = str(rng.choice(SPECTRA)), str(rng.choice(NOISES))
        lam = spectrum(rng, dim, kind)
        x = rng.standard_normal(dim) * (3 if ripple else lam ** rng.uniform(-1, 0.5))
        noise = lam ** {"sharp": rng.uniform(0.5, 1), "flat": -0.5}.get(colour, 0.0)
        noise *= np.sqrt(rng.gamma(rng.choice([0.3, 1.0, 10.0]), size=dim))
        first = float(np.linalg.norm(lam * x))
        noise *= first * 10 ** rng.uniform(-4, 0.3) / (np.linalg.norm(noise) + 1e-300)
        height = rng.uniform(0.1, 0.6) * lam.mean() if ripple else 0.0
        clip = bool(rng.random() < 0.5)
        reach = rng.choice([0.02, 0.1, 0.5, 1.5, 5, 20] if clip else [0.02, 0.1, 0.3, 1, 1.6, 1.9, 1.98])
        cap = first * rng.choice([0.02, 0.1, 0.3, 1.0]) if clip else np.inf
        drawn.append((lam, x, noise, height, reach / (lam.max() + height), cap, colour == "heavy"))
    lams, starts, noises, heights, lrs, caps, heavy = zip(*drawn, strict=True)
    lam = padded(lams)
    extra = rippled(rng, ripple, np.array(heights), lam > 0) if ripple else None

    def gradient(x: Array, batch: Array) -> Array:
        return lam * x + (extra(x, batch) if extra else 0.0)

    how = Descent(
        lr=np.array(lrs),
        max_norm=np.array(caps),
        decay=rng.random(count) < 0.2,
        noise=padded(noises),
        heavy=np.array(heavy),
        unequal=rng.uniform(0.1, 0.5, count) if unequal else 0.0,
        rows=rng.integers(60, 120, count),
        stride=rng.choice([1, 2], count),
    )
    return descend(gradient, padded(starts), how, rng)


RIPPLES = ("sines", "batch sines", "kinks", "waves", "rough sines", "rough kinks")


def rippled(rng: np.random.Generator, kind: str, height: Array, active: Array) -> Gradient:
    """A gradient whose Hessian goes up and down by ``height`` along the way, without regard to the gradient.

    ``sines`` of each coordinate; the same with ``batch`` phases of its own for every batch; ``kinks``, where
    the curvature jumps; plane ``waves`` in eight random directions. ``rough`` ones are four times as high and
    up to a hundred radians a unit, so that a step crosses many.
    """
    if kind == "waves":
        waves = rng.standard_normal((len(active), 8, active.shape[1])) * active[:, None, :]
        length = 10 ** rng.uniform(-0.5, 0.5, (len(active), 8, 1))
        waves *= length / np.linalg.norm(waves, axis=2, keepdims=True)
        size, shift = height[:, None] / length[:, :, 0] ** 2, rng.uniform(0, 2 * np.pi, (len(active), 8))

        def plane(x: Array, batch: Array) -> Array:
            turn = np.einsum("rkd,rd->rk", waves, x) + shift
            return np.einsum("rkd,rk->rd", waves, size * np.sin(turn))

        return plane
    rough = kind.startswith("rough")
    omega = 10 ** rng.uniform(0.5 if rough else -0.5, 2.0 if rough else 0.7, active.shape)
    phase = rng.uniform(0, 2 * np.pi, active.shape)

    def along_axes(x: Array, batch: Array) -> Array:
        turn = omega * x + (20 * batch if kind == "batch sines" else phase)
        wave = np.arcsin(np.sin(turn)) if kind.endswith("kinks") else np.sin(turn)
        return np.where(active, (4 if rough else 1) * height[:, None] / omega * wave, 0.0)

    return along_axes


def padded(vectors: tuple[Array, ...]) -> Array:
    """Vectors of different lengths as the rows of one array, filled up with zeros."""
    out = np.zeros((len(vectors), max(len(vector) for vector in vectors)))
    for row, vector in zip(out, vectors, strict=True):
        row[: len(vector)] = vector
    return out


# Functions whose smoothness grows with the gradient norm


EFFECTS = ("cosh", "quartic", "sextic", "radial quartic", "exponential", "deep linear")


def growing(rng: np.random.Generator, kind: str, dims: Array) -> tuple[Array, Gradient]:
    """Starts and gradient of random functions of one kind, in so many directions each."""
    shape = (len(dims), int(dims.max()))
    active = np.arange(shape[1]) < dims[:, None]
    a, b = 10 ** rng.uniform(-0.5, 0.5, shape), rng.uniform(0.7, 1.5, shape)
    low, high = {"quartic": (1.5, 4), "sextic": (1.2, 2.5), "deep linear": (1.3, 2.4)}.get(kind, (2, 5))
    x = rng.uniform(low, high, shape)
    if kind in ("cosh", "quartic", "sextic"):
        x *= rng.choice([-1, 1], shape)
    elif kind == "radial quartic":
        x = rng.standard_normal(shape) * 4.5 / np.sqrt(dims)[:, None]

    def gradient(p: Array, batch: Array) -> Array:
        if kind == "cosh":
            g = a * np.sinh(b * p)
        elif kind == "quartic":
            g = 0.1 * a * p + p**3
        elif kind == "sextic":
            g = 0.1 * a * p + p**5
        elif kind == "radial quartic":
            g = 0.3 * p + p * (p * p).sum(axis=1, keepdims=True)
        elif kind == "exponential":
            g = a * (np.exp(b * p) - np.exp(-0.3 * b * p))
        else:  # ½(x₁⋯x₆ − 1)²
            product = p.prod(axis=1, keepdims=True)
            g = (product - 1) * product / np.where(np.abs(p) < 1e-12, 1e-12, p)
        return np.where(active, g, 0.0)

    return np.where(active, x, 0.0), gradient


def effects(rng: np.random.Generator, count: int, *, kind: str) -> list[Run]:
    """Noisy descent on functions whose smoothness grows with the gradient norm.

    Kept are runs in which the gradient norm varies by half and the smoothness by a third (between the 5 % and
    95 % quantiles of the rows): where both stand still there is nothing to find.
    """
    dims = np.full(count, 6) if kind == "deep linear" else rng.choice([2, 6, 30], count)
    x, gradient = growing(rng, kind, dims)
    first, clip = np.linalg.norm(gradient(x, x), axis=1), rng.random(count) < 0.6
    cap = np.where(clip, first * rng.choice([0.02, 0.1, 0.3], count), np.inf)
    reach = np.where(clip, rng.choice([0.1, 0.3, 0.7], count), rng.choice([0.05, 0.2, 0.7], count))
    how = Descent(
        lr=reach / start_smoothness(gradient, x) * np.where(clip, first / np.where(clip, cap, 1.0), 1.0),
        max_norm=cap,
        noise=(first * 10 ** rng.uniform(-2.5, -0.3, count) / np.sqrt(dims))[:, None] * (x != 0),
        rows=rng.integers(60, 120, count),
        stride=rng.choice([1, 2], count),
    )

    def spread(values: Array) -> float:
        low, high = np.quantile(values, [0.05, 0.95])
        return high / low

    runs = descend(gradient, x, how, rng)
    return [run for run in runs if spread(run.grad_norm) > 1.5 and spread(run.secants.max(axis=1)) > 1.3]


def start_smoothness(gradient: Gradient, x: Array) -> Array:
    """Smoothness along the line to the origin."""
    change = gradient(x * (1 + 1e-5), x) - gradient(x, x)
    return np.linalg.norm(change, axis=1) / (1e-5 * np.linalg.norm(x, axis=1))


# The tables


def counted(runs: list[Run]) -> tuple[Counter[str], list[Within]]:
    """How often each answer is given, and what was found where something could be tested."""
    found = [run.within() for run in runs]
    return Counter(fit.answer for fit in found), [fit for fit in found if fit.missing is None]


def shares(answers: Counter[str]) -> str:
    """Share of runs with each answer."""
    names = ("grows", "not-shown", "does-not-grow", "cannot-tell")
    return " | ".join(f"{answers[name] / answers.total():.0%}" for name in names)


def middles(found: list[Within]) -> str:
    """Median elasticity and zero."""
    if not found:
        return "unknown | "
    numbers = (np.median([getattr(fit, name) for fit in found]) for name in ("elasticity", "zero"))
    return " | ".join(f"{number + 0.0:.2f}" for number in numbers)


def line(runs: list[Run], *names: object) -> str:
    """A row of a table."""
    answers, found = counted(runs)
    return f"| {' | '.join(map(str, names))} | {answers.total()} | {shares(answers)} | {middles(found)} |"


def several(
    make: Callable[[np.random.Generator, int], list[Run]], seed: int, runs: int, family: int
) -> list[Run]:
    """The first ``runs`` runs of a family, 100 from each seed."""
    found: list[Run] = []
    while len(found) < runs:
        found += make(np.random.default_rng([seed, FAMILIES, family]), BATCH)
        seed += 1
    return found[:runs]


def heading(*names: str) -> str:
    """The first two lines of a table."""
    columns = (*names, "runs", "grows", "not shown", "does not grow", "cannot tell", "elasticity", "zero")
    return f"\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|"


TRUTHS = {"constant": 0.0, "one quartic": 2 / 3, "one exponential": 1.0}


def size_table(seed: int, num: int, rows: int, fixed: Sequence[float] | None) -> None:
    """How far the median elasticity is from the truth, and in which share of runs its size is told."""
    print("\n| size | truth | directions | noise | κ | size known | median where known | of all |")
    print("|---|---|---|---|---|---|---|---|")
    judged = Counter[str]()
    for k, (kind, truth) in enumerate(TRUTHS.items()):
        for (n, noise), (i, kappa), dim in itertools.product(
            enumerate((0.0, 0.1, 0.3)), enumerate((0.1, 0.3, 1.0)), (1, 6)
        ):
            rng = np.random.default_rng([seed, SIZE, k, n, i, dim])
            runs = growing_cells(rng, num, rows, fixed, kind=kind, kappa=kappa, noise=noise, dim=dim)
            found = [run.within() for run in runs]
            known = [fit.elasticity for fit in found if fit.size_known]
            middle = float(np.median(known)) if known else math.nan
            whole = np.median([fit.elasticity for fit in found])
            if len(known) < num / 2:
                judged["unknown"] += 1
            else:
                judged["right" if abs(middle - truth) <= MOST_SIZE_ERROR else "wrong"] += 1
            names = f"{kind} | {truth:.2f} | {dim} | {noise} | {kappa}"
            print(f"| {names} | {len(known) / num:.0%} | {middle:.2f} | {whole:.2f} |", flush=True)
    print(f"\nCells (unknown where fewer than half of the runs tell it): {dict(judged)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=10_000, help="the first seed")
    parser.add_argument("--runs", type=int, default=300, help="of each null cell and family")
    parser.add_argument("--power", type=int, default=100, help="runs of each cell for power and for size")
    parser.add_argument("--rows", type=int, default=100, help="of each run in a cell")
    parser.add_argument("--fractions", type=float, nargs="+", help="in a cell; default: the probe's choice")
    parser.add_argument("--cells", action="store_true", help="leave the families out")
    asked = parser.parse_args()
    settings = (asked.rows, asked.fractions)
    began = time.perf_counter()
    print(heading("Hessian drifts", "κ", "cosine"))
    for i, kappa in enumerate(KAPPAS):
        for j, cosine in enumerate(COSINES):
            for each in (False, True):
                rng = np.random.default_rng([asked.seed, NULL, i, j, each])
                runs = drifting(rng, asked.runs, *settings, kappa=kappa, cosine=cosine, each=each)
                print(line(runs, "each direction" if each else "as a whole", kappa, cosine), flush=True)
    print(heading("growth", "κ", "cosine"))
    for k, kind in enumerate(KINDS):
        for i, kappa in enumerate(KAPPAS):
            for j, cosine in enumerate(COSINES):
                rng = np.random.default_rng([asked.seed, GROWTH, k, i, j])
                runs = growing_cells(rng, asked.power, *settings, kind=kind, kappa=kappa, cosine=cosine)
                print(line(runs, kind, kappa, cosine), flush=True)
    size_table(asked.seed, asked.power, *settings)
    families: dict[str, Callable[[np.random.Generator, int], list[Run]]] = {
        "constant Hessians": quadratics,
        "batches of unequal scale": partial(quadratics, unequal=True),
        **{f"changing Hessian: {kind}": partial(quadratics, ripple=kind) for kind in RIPPLES},
        **{f"growing: {kind}": partial(effects, kind=kind) for kind in EFFECTS},
    }
    if not asked.cells:
        print(heading("SGD on"))
        for family, (name, make) in enumerate(families.items()):
            print(line(several(make, asked.seed, asked.runs, family), name), flush=True)
    print(f"\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
