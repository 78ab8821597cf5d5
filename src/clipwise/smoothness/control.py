r"""The control: how much correlation the same procedure shows where the Hessian never changes.

On :math:`f(x) = \tfrac12 x^\top H x` there is no (L0, L1) effect: :math:`\lVert\nabla^2 f\rVert` is the same
at every gradient norm. If all eigenvalues are equal, a paired estimate is the same number at every step, and
the control would always print zero. If they differ, the estimate along a step,
:math:`\lVert H d\rVert/\lVert d\rVert`, falls as the sharp directions are worked off, and the gradient norm
falls with it: a rank correlation of up to 1 without any (L0, L1) effect. So the honest null is anisotropic,
and it is matched to the run: as many rows, the same learning rate, the same step lengths where steps were
clipped, a spectrum that reaches over the smoothness seen, a start with the run's own gradient norm and
smoothness, and gradient noise that brings both to the level where the run ended. What the run shows beyond
its control is not explained by a constant Hessian; what it shares with it may be.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import root_scalar

_DIMENSION = 48  # eigenvalues, evenly spaced on a logarithmic scale
_REPLICATES = 64
_MOST_ROWS = 1000
_MOST_STEPS = 4000


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the control takes from a measured run: one value a row, in the order of the steps."""

    grad_norm: np.ndarray
    smoothness: np.ndarray
    step_size: np.ndarray  # length of the step over the gradient norm, had it not been clipped: lr for SGD
    step_cap: np.ndarray  # length of the step where it was clipped, else inf
    stride: int  # training steps from one row to the next
    noise: float | None  # norm of the gradient noise, where it was measured


def constant_hessian_runs(run: Run, *, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Gradient norms and smoothness of runs like ``run`` on a quadratic, shape (replicates, rows) each.

    Args:
        run: What to imitate.
        rng: Signs of the start and the noise come from here.
    """
    run = _thinned(run)
    quadratic = _Quadratic.like(run)
    noise = quadratic.noise_level(run, rng) if run.noise is None else run.noise
    return quadratic.descend(run, noise=noise, replicates=_REPLICATES, rng=rng)


@dataclass(frozen=True)
class _Quadratic:
    curvature: np.ndarray  # eigenvalues of H
    start: np.ndarray  # size of each component of the first gradient
    noise_share: np.ndarray  # share of each direction in the squared gradient noise

    @classmethod
    def like(cls, run: Run) -> _Quadratic:
        """Spectrum, start and noise whose gradients have the smoothness of the run's first and last parts."""
        low, high = float(run.smoothness.min()), float(run.smoothness.max())
        plain = run.step_size[np.isinf(run.step_cap)]
        if len(plain):
            # Unclipped descent runs away where lr·λ > 2: the run's own quadratic must carry its own lr.
            high = min(high, 1.9 / float(np.median(plain)))
        curvature = np.geomspace(max(min(low, high), 1e-9 * high), high, _DIMENSION)
        part = max(1, len(run.smoothness) // 10)
        first = np.median(run.smoothness[:part])
        last = np.median(run.smoothness[len(run.smoothness) // 2 :])
        start = np.median(run.grad_norm[:part]) * np.sqrt(_shares(curvature, float(first)))
        return cls(curvature, start, _shares(curvature, float(last)))

    def noise_level(self, run: Run, rng: np.random.Generator) -> float:
        """Noise that makes the gradient norm of the second half as large as the run's."""
        half = len(run.grad_norm) // 2
        target = float(np.median(run.grad_norm[half:]))
        seed = int(rng.integers(2**31))
        low, high = 0.0, target
        for _ in range(6):
            noise = 0.5 * (low + high)
            grad_norm, _ = self.descend(run, noise=noise, replicates=8, rng=np.random.default_rng(seed))
            low, high = (noise, high) if np.median(grad_norm[:, half:]) < target else (low, noise)
        return 0.5 * (low + high)

    def descend(
        self, run: Run, *, noise: float, replicates: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Noisy descent with the run's own step rule; only every ``stride``-th step is recorded."""
        slope = self.start * rng.choice([-1.0, 1.0], size=(replicates, len(self.start)))
        spread = noise * np.sqrt(self.noise_share)
        rows = len(run.grad_norm)
        norms, smoothness = np.empty((2, replicates, rows))
        for row in range(rows):
            for inner in range(run.stride):
                gradient = slope + spread * rng.standard_normal(slope.shape)
                norm = np.linalg.norm(gradient, axis=1)
                if inner == 0:
                    norms[:, row] = norm
                    smoothness[:, row] = np.linalg.norm(self.curvature * gradient, axis=1) / norm
                size = np.minimum(run.step_size[row], run.step_cap[row] / np.maximum(norm, 1e-300))
                slope -= size[:, None] * self.curvature * gradient  # H x, moved with x
        return norms, smoothness


def _shares(curvature: np.ndarray, smoothness: float) -> np.ndarray:
    r"""Squared shares :math:`w \propto \lambda^p` with :math:`\sqrt{\sum w\lambda^2}` the ``smoothness``."""
    log = np.log(curvature / curvature[-1])

    def shares(power: float) -> np.ndarray:
        weight = np.exp(power * log - np.max(power * log))
        return weight / weight.sum()

    def excess(power: float) -> float:
        return float(np.sqrt(shares(power) @ curvature**2)) / smoothness - 1.0

    if curvature[-1] / curvature[0] < 1 + 1e-9 or excess(-30.0) >= 0:
        return shares(-30.0)
    return shares(30.0) if excess(30.0) <= 0 else shares(root_scalar(excess, bracket=(-30.0, 30.0)).root)


def _thinned(run: Run) -> Run:
    """The run with at most so many rows and steps that the control takes a second or so."""
    keep = slice(None, None, -(-len(run.grad_norm) // _MOST_ROWS))
    rows = len(run.grad_norm[keep])
    return Run(
        grad_norm=run.grad_norm[keep],
        smoothness=run.smoothness[keep],
        step_size=run.step_size[keep],
        step_cap=run.step_cap[keep],
        stride=max(1, min(run.stride, _MOST_STEPS // rows)),
        noise=run.noise,
    )
