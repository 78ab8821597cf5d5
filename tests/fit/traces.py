"""Traces made by hand, and runs on functions whose (L0, L1) is known."""

import numpy as np

from curvestep.trace.schema import OK
from curvestep.trace.trace import Trace


def make_trace(grad_norm, smoothness, *, header=None, every=1, **columns):
    trace = Trace(header=header)
    for i, (g, ell) in enumerate(zip(grad_norm, smoothness, strict=True)):
        row = {"step": i * every, "grad_norm": float(g), "smoothness": float(ell), "status": OK}
        for name, values in columns.items():
            value = values if values is None or np.isscalar(values) else values[i]
            row[name] = value if value is None or isinstance(value, list) else float(value)
        trace.append(row)
    return trace


def autoregression(rng, num, phi):
    """Gaussian series of unit variance whose neighbours correlate by ``phi``."""
    noise = rng.standard_normal(num + 100) * np.sqrt(1 - phi**2)
    values = np.zeros(num + 100)
    for t in range(1, num + 100):
        values[t] = phi * values[t - 1] + noise[t]
    return values[100:]


def simulated(rng, *, num=300, phi=0.7, L0=1.0, L1=2.0, spread=0.5, noise=0.4):
    """Autocorrelated gradient norms, and a smoothness around L0 + L1 g with autocorrelated noise."""
    g = np.exp(spread * autoregression(rng, num, phi))
    return g, (L0 + L1 * g) * np.exp(noise * autoregression(rng, num, phi))


def quadratic_run(rng, *, curvature, lr, max_norm=np.inf, steps=300, noise=0.3, uneven=0.0, paired=True):
    """Clipped SGD on a constant Hessian: norms, smoothness and step lengths, paired or from two batches.

    ``uneven``: how much the noise of a batch differs from one batch to the next.
    """
    curvature = np.asarray(curvature, dtype=float)
    x = rng.standard_normal(len(curvature)) * (3 if uneven == 0 else 0.1)
    rows = []
    level = noise * np.exp(uneven * autoregression(rng, steps + 1, 0.8))
    xi = level[0] * rng.standard_normal(len(x))
    for t in range(steps):
        g = curvature * x + xi
        step = -min(lr, lr * max_norm / np.linalg.norm(g)) * g
        x = x + step
        fresh = level[t + 1] * rng.standard_normal(len(x))
        after = curvature * x + (xi if paired else fresh)
        length = np.linalg.norm(step)
        rows.append((np.linalg.norm(g), np.linalg.norm(after - g) / length, length))
        xi = fresh
    return np.array(rows).T


def inside_steps(g, ell, *, elasticity=0.8, kappa=0.3, every=1):
    """Columns of steps that shorten the gradient by ``kappa`` at most, inside which smoothness grows as told.

    No two steps are alike, and none overshoots: the within-step test compares them with each other.
    """
    kappa = kappa * (0.5 + 0.5 * (0.618 * np.arange(len(g)) % 1))
    half, full = 1 - kappa / 2, 1 - kappa
    ratio = ((1 + 2 * half + full) / 4 / ((1 + half) / 2)) ** elasticity
    return {
        "kappa": kappa[::every],
        "secants": np.column_stack([ell / ratio, ell])[::every].tolist(),
        "grad_norms": np.column_stack([g * half, g * full])[::every].tolist(),
        "header": {"fractions": [0.5, 1.0], "dtype": "float64"},
    }
