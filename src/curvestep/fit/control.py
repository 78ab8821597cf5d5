r"""The control: how much correlation the same procedure shows where the Hessian never changes.

On :math:`f(x) = \tfrac12 x^\top H x` there is no (L0, L1) effect: :math:`\lVert\nabla^2 f\rVert` is the same
at every gradient norm. If all eigenvalues are equal, a paired estimate is the same number at every step, and
the control would always print zero. If they differ, the estimate along a step,
:math:`\lVert H d\rVert/\lVert d\rVert`, falls as the sharp directions are worked off, and the gradient norm
falls with it: a rank correlation of up to 1 without any (L0, L1) effect. So the honest null is anisotropic,
and it is matched to the run: as many rows, the same learning rate, the same step lengths where steps were
clipped, a start with the run's own gradient norm and smoothness, and gradient noise that brings both to the
level where the run ended. The spectrum of the run is not known, so many quadratics are drawn, with different
spectra, and the interval of the control spans them. What the run shows beyond its control is not explained
by a constant Hessian; what it shares with it may be.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import root_scalar

from curvestep.fit.correlation import slope, spearman
from curvestep.fit.frontier import quantile_lines
from curvestep.fit.intervals import Interval
from curvestep.fit.samples import MOST_ROWS, Samples, evenly_spaced, steps_between
from curvestep.trace.history import typical
from curvestep.trace.schema import LEAST_ROWS

_DIMENSION = 32  # eigenvalues, evenly spaced on a logarithmic scale
_REPLICATES = 64
_SHORTER = 4  # times fewer rows than bear the intervals, so that it takes about a second


@dataclass(frozen=True, kw_only=True)
class Control:
    """The same statistics on quadratics with the run's own steps and noise, where L1 is zero.

    Medians over the simulated runs; each interval holds the given share of them.
    """

    spearman: float
    spearman_interval: Interval
    exponent: float
    exponent_interval: Interval
    L1: float
    L1_interval: Interval


@np.errstate(over="ignore", invalid="ignore", divide="ignore")  # NaN where its steps make a quadratic diverge
def control_of(
    samples: Samples, *, quantile: float, level: float, rng: np.random.Generator
) -> Control | None:
    """The control of measured rows; None where hardly a step length is known or nothing curves."""
    known = np.isfinite(samples.step_norm) & (samples.step_norm > 0)
    if known.sum() < LEAST_ROWS or samples.smoothness[known].max() == 0:
        return None
    places = np.flatnonzero(known)
    kept = samples.rows(places[evenly_spaced(len(places), most=MOST_ROWS // _SHORTER)])
    run = _Run(
        grad_norm=kept.grad_norm,
        smoothness=kept.smoothness,
        step_size=np.where(kept.clipped & np.isfinite(kept.lr), kept.lr, kept.step_size),
        step_cap=np.where(kept.clipped, kept.step_norm, np.inf),
        stride=max(1, min(steps_between(samples.step[places]), MOST_ROWS // len(kept))),
    )
    quadratics = _Quadratics.like(run, rng)
    noise = typical(samples.noise[places])
    if np.isnan(noise):  # it was not measured
        noise_level = quadratics.noise_level(run, rng)
    else:
        noise_level = np.full(_REPLICATES, noise)
    g, ell = quadratics.descend(run, noise=noise_level, rng=rng)
    ranks = spearman(g, ell)
    exponents = slope(np.log(g), np.log(ell))
    slopes = quantile_lines(g, ell, quantile=quantile)[:, 1]
    return Control(
        spearman=float(np.median(ranks)),
        spearman_interval=_middle(ranks, level),
        exponent=float(np.median(exponents)),
        exponent_interval=_middle(exponents, level),
        L1=float(np.median(slopes)),
        L1_interval=_middle(slopes, level),
    )


def _middle(values: np.ndarray, level: float) -> Interval:
    """The interval that holds this share of the values."""
    low, high = np.quantile(values, [0.5 - level / 2, 0.5 + level / 2])
    return float(low), float(high)


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Columns of a measured run that the control takes: one value a row, in the order of the steps."""

    grad_norm: np.ndarray
    smoothness: np.ndarray
    step_size: np.ndarray  # length of the step over the gradient norm, had it not been clipped: lr for SGD
    step_cap: np.ndarray  # length of the step where it was clipped, else inf
    stride: int  # training steps from one row to the next


@dataclass(frozen=True)
class _Quadratics:
    """One quadratic a replicate, each as an array of shape (replicates, dimension)."""

    curvature: np.ndarray  # eigenvalues of H
    start: np.ndarray  # components of the first gradient
    noise: np.ndarray  # root mean square share of each direction in gradient noise of norm one

    @classmethod
    def like(cls, run: _Run, rng: np.random.Generator) -> _Quadratics:
        """Quadratics whose gradients have the smoothness of the run's first and last parts.

        The spectrum is not known from the run: the estimates bound it from inside. So each quadratic draws
        its own ends, up to three times beyond what was seen, and its own first gradient.
        """
        low = float(run.smoothness.min())
        high = float(run.smoothness.max())
        tops = high * np.exp(rng.uniform(0.0, np.log(3.0), _REPLICATES))
        plain = run.step_size[np.isinf(run.step_cap)]
        if len(plain):
            # Unclipped descent runs away where lr·λ > 2: a quadratic must be able to carry the run's own lr.
            tops = np.minimum(tops, 1.9 / float(np.median(plain)))
        bottoms = np.maximum(low, 1e-6 * high) * np.exp(-rng.uniform(0.0, np.log(3.0), _REPLICATES))
        bottoms = np.minimum(bottoms, 0.999 * tops)
        curvature = np.geomspace(bottoms, tops, _DIMENSION, axis=1)
        part = max(3, len(run.smoothness) // 30)
        first = float(np.median(run.smoothness[:part]))
        last = float(np.median(run.smoothness[len(run.smoothness) // 2 :]))
        start = np.array([np.sqrt(_shares(row, first, rng)) for row in curvature])
        noise = np.array([np.sqrt(_shares(row, last, rng)) for row in curvature])
        return cls(curvature, float(np.median(run.grad_norm[:part])) * start, noise)

    def noise_level(self, run: _Run, rng: np.random.Generator) -> np.ndarray:
        """Noise that makes the gradient norm of the second half as large as the run's, for each quadratic."""
        half = len(run.grad_norm) // 2
        target = float(np.median(run.grad_norm[half:]))
        seed = int(rng.integers(2**31))
        low = np.zeros(len(self.start))
        high = np.full(len(self.start), target)
        for _ in range(6):
            noise = 0.5 * (low + high)
            grad_norm, _ = self.descend(run, noise=noise, rng=np.random.default_rng(seed))
            quiet = np.median(grad_norm[:, half:], axis=1) < target
            low = np.where(quiet, noise, low)
            high = np.where(quiet, high, noise)
        return 0.5 * (low + high)

    def descend(
        self, run: _Run, *, noise: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Noisy descent with the run's own step rule; only every ``stride``-th step is recorded."""
        slope = self.start.copy()  # H x
        spread = noise[:, None] * self.noise
        rows = len(run.grad_norm)
        norms, smoothness = np.empty((2, len(slope), rows))
        for row in range(rows):
            for inner in range(run.stride):
                gradient = slope + spread * rng.standard_normal(slope.shape)
                norm = np.linalg.norm(gradient, axis=1)
                if inner == 0:
                    norms[:, row] = norm
                    smoothness[:, row] = np.linalg.norm(self.curvature * gradient, axis=1) / norm
                size = np.minimum(run.step_size[row], run.step_cap[row] / np.maximum(norm, 1e-300))
                slope -= size[:, None] * self.curvature * gradient
        return norms, smoothness


def _shares(curvature: np.ndarray, smoothness: float, rng: np.random.Generator) -> np.ndarray:
    r"""Random shares, tilted by :math:`\lambda^p` until :math:`\sqrt{\sum w\lambda^2}` is ``smoothness``."""
    log = np.log(curvature / curvature[-1])
    # A small shape concentrates the gradient on a few directions, a large one spreads it over all.
    shape = np.exp(rng.uniform(np.log(0.2), np.log(20.0)))
    drawn = np.log(np.maximum(rng.gamma(shape, size=len(curvature)), 1e-12))

    def shares(power: float) -> np.ndarray:
        weight = drawn + power * log
        weight = np.exp(weight - weight.max())
        return weight / weight.sum()

    def excess(power: float) -> float:
        return float(np.sqrt(shares(power) @ curvature**2)) - smoothness

    if excess(-40.0) >= 0:
        return shares(-40.0)
    return shares(40.0) if excess(40.0) <= 0 else shares(root_scalar(excess, bracket=(-40.0, 40.0)).root)
