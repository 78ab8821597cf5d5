"""False alarms, power and coverage of the within-step test: python benchmarks/within.py [--help].

Every run is SGD on a function whose smoothness is known to grow with the gradient norm, or known not to. Rows
hold what the probe records. Runs are simulated many at once: arrays have shape (runs, dimension). Seeds below
10,000 were for choosing the constants of the test; the printed table is of others.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.nn import functional as F

from curvestep.fit.fit import fit_smoothness
from curvestep.fit.within import Within, within_steps
from curvestep.smoothness.trace import Trace

FRACTIONS = (0.5, 1.0)
STEPS = 900  # of every run; a run of n rows at stride s keeps every s-th of the first n·s
BATCH = 100  # runs of one seed
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
    heavy: Array | bool = (
        False  # whether the noise has the tails of Student's t with three degrees of freedom
    )
    unequal: Array | float = 0.0  # standard deviation of the logarithm of a batch's scale


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run as the probe records it."""

    kind: str
    clipped: bool
    eps: float
    lr: Array
    step_norm: Array
    grad_norm: Array
    secants: Array
    grad_norms: Array

    @property
    def smoothness(self) -> Array:
        """The largest secant of each row."""
        return self.secants.max(axis=1)

    def within(self) -> Within:
        """The test."""
        return within_steps(
            secants=self.secants,
            grad_norm=self.grad_norm,
            grad_norms=self.grad_norms,
            fractions=FRACTIONS,
            kappa=self.secants[:, -1] * self.step_norm / self.grad_norm,
            eps=self.eps,
        )

    def beyond_control(self) -> bool:
        """Whether the rank correlation lies above what simulated quadratics show, the other control."""
        trace = Trace()
        columns = zip(self.grad_norm, self.smoothness, self.step_norm, self.lr, strict=True)
        for step, values in enumerate(columns):
            names = ("grad_norm", "smoothness", "step_norm", "lr")
            trace.append({"step": step, **{k: float(v) for k, v in zip(names, values, strict=True)}})
        fit = fit_smoothness(trace)
        return fit.control is not None and fit.spearman_interval[0] > fit.control.spearman_interval[1]


def descend(
    gradient: Gradient, x: Array, how: Descent, kinds: list[str], rng: np.random.Generator
) -> list[Run]:
    """SGD with gradient noise and batches of unequal scale, both the same all along a step.

    ``gradient`` takes positions and a standard normal draw that stands for the batch. Runs that diverge, end
    in a minimum to the last digit or meet a gradient that does not change are left out.
    """
    names = ("lr", "step_norm", "grad_norm", "first", "second", "half", "end")
    columns = {name: np.empty((STEPS, len(x))) for name in names}
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
            norm = np.linalg.norm(g, axis=1)
            d = -(lr * np.minimum(1.0, how.max_norm / norm))[:, None] * g
            length, half, end = np.linalg.norm(d, axis=1), at(x + 0.5 * d), at(x + d)
            secants = (
                np.linalg.norm(half - g, axis=1) / (0.5 * length),
                np.linalg.norm(end - g, axis=1) / length,
            )
            norms = np.linalg.norm(half, axis=1), np.linalg.norm(end, axis=1)
            for name, values in zip(names, (lr, length, norm, *secants, *norms), strict=True):
                columns[name][t] = values
            x = x + d
    runs = []
    for i, kind in enumerate(kinds):
        c = {name: v[: how.rows[i] * how.stride[i] : how.stride[i], i] for name, v in columns.items()}
        alive = (
            all(np.isfinite(v).all() for v in c.values()) and c["grad_norm"].max() < 1e6 * c["grad_norm"][0]
        )
        if (
            alive
            and min(c["first"].min(), c["second"].min(), c["grad_norm"].min() - 1e-9 * c["grad_norm"].max())
            > 0
        ):
            runs.append(
                Run(
                    kind=kind,
                    clipped=bool(np.isfinite(how.max_norm[i])),
                    eps=2.0**-52,
                    lr=c["lr"],
                    step_norm=c["step_norm"],
                    grad_norm=c["grad_norm"],
                    secants=np.column_stack([c["first"], c["second"]]),
                    grad_norms=np.column_stack([c["half"], c["end"]]),
                )
            )
    return runs


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
        dim = int(rng.choice([2, 3, 6, 12, 30, 100, 300] if ripple is None else [3, 10, 30, 100]))
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
        label = f"{kind}, {colour} noise, {dim} directions, lr·λ {reach:g}{', clipped' if clip else ''}"
        drawn.append((lam, x, noise, height, reach / (lam.max() + height), cap, colour == "heavy", label))
    lams, starts, noises, heights, lrs, caps, heavy, labels = zip(*drawn, strict=True)
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
        rows=rng.integers(60, 180, count),
        stride=rng.choice([1, 1, 2, 5], count),
    )
    return descend(gradient, padded(starts), how, list(labels), rng)


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
        rows=rng.integers(80, 300, count),
        stride=rng.choice([1, 1, 2], count),
    )

    def spread(values: Array) -> float:
        low, high = np.quantile(values, [0.05, 0.95])
        return high / low

    runs = descend(gradient, x, how, [kind] * count, rng)
    return [run for run in runs if spread(run.grad_norm) > 1.5 and spread(run.smoothness) > 1.3]


def start_smoothness(gradient: Gradient, x: Array) -> Array:
    """Smoothness along the line to the origin."""
    change = gradient(x * (1 + 1e-5), x) - gradient(x, x)
    return np.linalg.norm(change, axis=1) / (1e-5 * np.linalg.norm(x, axis=1))


# How often the interval covers the elasticity


def coverage(
    rng: np.random.Generator, count: int, *, kind: str, noise: float, clip: float
) -> tuple[float, float]:
    """The elasticity of many runs on one function taken together, and how many of their intervals cover it.

    Args:
        rng: Draws the function and the noise.
        count: Number of runs.
        kind: One of ``EFFECTS``.
        noise: Norm of the gradient noise, as a share of the first gradient.
        clip: Threshold, likewise.
    """
    dims = np.full(count, 6)
    x, gradient = growing(rng, kind, dims[:1])
    first = float(np.linalg.norm(gradient(x, x)))
    lr = 0.2 / float(start_smoothness(gradient, x)[0]) / min(clip, 1.0)
    how = Descent(
        lr=np.full(count, lr),
        max_norm=np.full(count, clip * first),
        noise=np.full((count, 6), noise * first / math.sqrt(6)),
        rows=np.full(count, 150),
        stride=np.full(count, 1),
    )
    runs = descend(gradient, np.repeat(x, count, axis=0), how, [kind] * count, rng)
    together = Run(
        kind=kind,
        clipped=False,
        eps=runs[0].eps,
        **{
            name: np.concatenate([getattr(run, name) for run in runs])
            for name in ("lr", "step_norm", "grad_norm", "secants", "grad_norms")
        },
    )
    truth = together.within().elasticity
    found = [fit.elasticity_interval for run in runs if not (fit := run.within()).missing]
    return truth, float(np.mean([low - 1e-6 <= truth <= high + 1e-6 for low, high in found]))


# Single precision, with torch


def regression(seed: int, *, kappa: float, logistic: bool, rows: int = 60) -> Run:
    """Linear or logistic regression in float32, 32 of 256 points a batch, from a first step of this kappa."""
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(256, 10, generator=draws)
    y = x @ torch.randn(10, generator=draws) + torch.randn(256, generator=draws)
    y = (y > 0).float() if logistic else y
    w = torch.zeros(10)

    def gradient(at: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        at = at.clone().requires_grad_()
        out = x[chosen] @ at
        loss = F.binary_cross_entropy_with_logits(out, y[chosen]) if logistic else F.mse_loss(out, y[chosen])
        return torch.autograd.grad(loss, at)[0]

    everything = torch.arange(256)
    g = gradient(w, everything)
    lr = kappa * float(g.norm() / (gradient(w + 1e-2 * g / g.norm(), everything) - g).norm()) * 1e-2
    kept: dict[str, list] = {name: [] for name in ("lr", "step_norm", "grad_norm", "secants", "grad_norms")}
    for _ in range(rows):
        chosen = torch.randint(256, (32,), generator=draws)
        g, before = gradient(w, chosen), w
        w = w - lr * g
        d = w - before
        ends = [gradient(before + fraction * d, chosen) for fraction in FRACTIONS]
        kept["secants"].append(
            [float((e - g).norm() / (f * d.norm())) for e, f in zip(ends, FRACTIONS, strict=True)]
        )
        kept["grad_norms"].append([float(end.norm()) for end in ends])
        for name, value in (("lr", lr), ("step_norm", float(d.norm())), ("grad_norm", float(g.norm()))):
            kept[name].append(value)
    columns = {name: np.array(values) for name, values in kept.items()}
    return Run(kind="logistic" if logistic else "linear", clipped=False, eps=2.0**-23, **columns)


# The table


def several(
    make: Callable[[np.random.Generator, int], list[Run]], seed: int, runs: int, family: int
) -> list[Run]:
    """The first ``runs`` runs of a family, 100 from each seed."""
    found: list[Run] = []
    while len(found) < runs:
        found += make(np.random.default_rng([seed, family]), BATCH)
        seed += 1
    return found[:runs]


def line(name: str, runs: list[Run], compared: int) -> str:
    """A row of the table: share of runs with an alarm, clipped and plain apart, and the other control's."""
    alarms = np.array([run.within().grows for run in runs])
    clipped = np.array([run.clipped for run in runs])
    other = (
        f"{np.mean([run.beyond_control() for run in runs[:compared]]):.1%} of {compared}" if compared else ""
    )
    shares = f"{alarms.mean():.1%} | {alarms[clipped].mean():.1%} | {alarms[~clipped].mean():.1%}"
    return f"| {name} | {len(runs)} | {shares} | {other} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=10_000, help="the first seed")
    parser.add_argument("--runs", type=int, default=300, help="of each family")
    parser.add_argument(
        "--compared", type=int, default=0, help="runs of each family for the other control (slow)"
    )
    asked = parser.parse_args()
    families: dict[str, Callable[[np.random.Generator, int], list[Run]]] = {
        "constant Hessians": quadratics,
        "batches of unequal scale": partial(quadratics, unequal=True),
        **{f"changing Hessian: {kind}": partial(quadratics, ripple=kind) for kind in RIPPLES},
        **{f"growing: {kind}": partial(effects, kind=kind) for kind in EFFECTS},
    }
    began = time.perf_counter()
    print("| family | runs | alarms | clipped | plain | quadratics control |\n|---|---|---|---|---|---|")
    for family, (name, make) in enumerate(families.items()):
        found = several(make, asked.seed, asked.runs, family)
        print(line(name, found, asked.compared), flush=True)
    print("\n| intervals on | noise | max_norm | elasticity | covered |\n|---|---|---|---|---|")
    for i, kind in enumerate(EFFECTS):
        for j, (noise, clip) in enumerate(((0.0, np.inf), (0.03, np.inf), (0.3, np.inf), (0.03, 0.1))):
            rng = np.random.default_rng([asked.seed, 100, i, j])
            truth, covered = coverage(rng, asked.runs, kind=kind, noise=noise, clip=clip)
            print(f"| {kind} | {noise:g} | {clip:g} | {truth:.2f} | {covered:.1%} |", flush=True)
    print("\n| float32 | kappa | runs | alarms | not testable | elasticity |\n|---|---|---|---|---|---|")
    for logistic in (False, True):
        for kappa in (1.0, 0.3, 0.1, 0.03, 0.01, 0.001):
            seeds = range(asked.seed, asked.seed + 40)
            found = [regression(seed, kappa=kappa, logistic=logistic).within() for seed in seeds]
            shown = [fit.elasticity for fit in found if not fit.missing]
            name, missing = (
                "logistic" if logistic else "linear",
                np.mean([bool(fit.missing) for fit in found]),
            )
            elasticity = f"{np.median(shown):.2f}" if shown else ""
            alarms = np.mean([fit.grows for fit in found])
            print(f"| {name} | {kappa:g} | 40 | {alarms:.0%} | {missing:.0%} | {elasticity} |", flush=True)
    print(f"\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
