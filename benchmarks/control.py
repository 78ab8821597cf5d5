"""How often a run on a constant Hessian goes beyond its control: python benchmarks/control.py [runs].

Clipped and plain descent on quadratics with random spectra, noise, thresholds and lengths. Whatever
correlation they show, no (L0, L1) effect is behind it: an interval of the rank correlation that lies above
the control's is a false alarm.
"""

from __future__ import annotations

import sys

import numpy as np

from curvestep.fit.fit import SmoothnessFit, fit_smoothness
from curvestep.smoothness.trace import Trace


def constant_hessian_trace(rng: np.random.Generator) -> Trace:
    """Noisy descent on one random quadratic, measured at every step."""
    low, high = 10 ** rng.uniform(-3.0, -0.3), 10 ** rng.uniform(0.0, 1.2)
    curvature = np.geomspace(low, high, int(rng.integers(3, 100)))
    noise = 10 ** rng.uniform(-2.5, 0.0)
    max_norm = float(rng.choice([0.05, 0.2, 0.5, 2.0, np.inf]))
    lr = min(0.05, 1.5 / high)
    x, trace = 3 * rng.standard_normal(len(curvature)), Trace()
    for step in range(int(rng.integers(60, 300))):
        g = curvature * x + noise * rng.standard_normal(len(x))
        norm = float(np.linalg.norm(g))
        size = lr * min(1.0, max_norm / norm)
        smoothness = float(np.linalg.norm(curvature * g)) / norm
        row = {"step": step, "grad_norm": norm, "smoothness": smoothness, "step_norm": size * norm}
        trace.append({**row, "lr": lr})
        x = x - size * g
    return trace


def goes_beyond(fit: SmoothnessFit) -> bool:
    """Whether the run's interval lies above the control's."""
    return fit.control is not None and fit.spearman_interval[0] > fit.control.spearman_interval[1]


if __name__ == "__main__":
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    fits = [fit_smoothness(constant_hessian_trace(np.random.default_rng(seed))) for seed in range(runs)]
    beyond = [fit for fit in fits if goes_beyond(fit)]
    warned = [fit for fit in beyond if any("hardly varies" in warning for warning in fit.warnings)]
    slopes = [fit for fit in beyond if fit.control and fit.L1_interval[0] > fit.control.L1_interval[1]]
    print(f"{runs} runs on constant Hessians, {len(beyond)} beyond their control:")
    print(f"  {len(warned)} with the warning that the gradient norm hardly varies")
    print(f"  {len(slopes)} with a slope beyond the control's as well")
