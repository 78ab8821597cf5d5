"""The pictures and numbers of docs/trust.md: python docs/trust_figures.py [folder].

Without a folder they go where the page finds them, docs/images and docs/results/trust.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from curvestep import Trace, fit_smoothness
from curvestep.fit.fit import SmoothnessFit


def clipped_sgd_on_a_quadratic(
    *, curvature: np.ndarray, noise: float, uneven: float, spread: float, paired: bool = True, seed: int = 0
) -> Trace:
    """Steps of length 0.02 on a constant Hessian, with batches whose noise differs by ``uneven``."""
    rng = np.random.default_rng(seed)
    lr, cap = 0.05, 0.02
    x = spread * rng.standard_normal(len(curvature))
    level, trace = 0.0, Trace()
    fresh = noise * rng.standard_normal(len(x))
    for step in range(300):
        g = curvature * x + fresh
        size = min(lr, cap / np.linalg.norm(g))
        x = x - size * g
        level = 0.8 * level + 0.6 * rng.standard_normal()
        before, fresh = fresh, noise * np.exp(uneven * level) * rng.standard_normal(len(x))
        difference = np.linalg.norm(curvature * x + (before if paired else fresh) - g)
        length = size * np.linalg.norm(g)
        row = {"step": step, "grad_norm": np.linalg.norm(g), "smoothness": difference / length}
        trace.append({**row, "step_norm": length, "lr": lr})
    return trace


def saturated(*, length: float, seed: int = 0) -> Trace:
    """A run at the edge of stability under clipping: every step turns the gradient over by κ ≈ 1.6."""
    rng = np.random.default_rng(seed)
    trace, level = Trace(), 0.0
    for step in range(300):
        level = 0.8 * level + 0.6 * rng.standard_normal()
        g, kappa = np.exp(0.4 * level), 1.6 + 0.08 * rng.standard_normal()
        row = {"step": step, "grad_norm": g, "smoothness": kappa * g / length, "kappa": kappa}
        trace.append({**row, "step_norm": length, "lr": 10.0})
    return trace


def scatter(
    axes: plt.Axes, trace: Trace, title: str, color: str = "C0", label: str | None = None
) -> SmoothnessFit:
    """Points, quantile line and the numbers of one fit."""
    fit = fit_smoothness(trace)
    g = trace.column("grad_norm")
    axes.scatter(g, trace.column("smoothness"), s=6, color=color, alpha=0.6, label=label)
    x = np.array([0.0, g.max()])
    axes.plot(x, fit.L0 + fit.L1 * x, color=color)
    axes.set(title=title, xlabel="gradient norm", ylabel="smoothness", ylim=(0, None), xlim=(0, None))
    return fit


def unpaired_figure(path: Path) -> dict[str, float]:
    """Trap 1: two batches for one difference."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    run = {"curvature": np.ones(20), "noise": 0.5, "uneven": 0.5, "spread": 0.1}
    fit = scatter(left, clipped_sgd_on_a_quadratic(**run, paired=False), "two batches", "C3")
    left.text(0.03, 0.9, f"L1 = {fit.L1:.0f}, rank corr. {fit.spearman:.2f}", transform=left.transAxes)
    numbers = {"L1_of_two_batches": fit.L1}
    fit = scatter(right, clipped_sgd_on_a_quadratic(**run), "the same batch at both points")
    right.set_ylim(0, 2)
    right.text(0.03, 0.9, f"L1 = {fit.L1:.1g}", transform=right.transAxes)
    figure.suptitle("A quadratic with Hessian 1 everywhere: there is no L1 to find")
    figure.savefig(path, dpi=100)
    return {**numbers, "L1_of_the_same_batch": fit.L1}


def spectrum_figure(path: Path) -> dict[str, float]:
    """A spread spectrum makes the correlation; the control shows it."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    curvature = np.geomspace(0.1, 5, 20)
    fit = scatter(
        left,
        clipped_sgd_on_a_quadratic(curvature=curvature, noise=0.02, uneven=0.0, spread=1.0),
        "a constant Hessian, eigenvalues 0.1 to 5",
    )
    rng, level, trace = np.random.default_rng(1), 0.0, Trace()
    for step in range(300):
        level = 0.8 * level + 0.6 * rng.standard_normal()
        g = np.exp(0.5 * level)
        row = {
            "step": step,
            "grad_norm": g,
            "smoothness": (0.2 + 2 * g) * np.exp(0.15 * rng.standard_normal()),
        }
        trace.append({**row, "step_norm": 0.02, "lr": 1.0})
    other = scatter(right, trace, "smoothness that follows the gradient norm")
    numbers = {}
    for axes, found, name in ((left, fit, "constant_hessian"), (right, other, "following_smoothness")):
        assert found.control is not None
        low, high = found.control.spearman_interval
        words = (
            f"rank corr. {found.spearman:.2f}\ncontrol {found.control.spearman:.2f} [{low:.2f}, {high:.2f}]"
        )
        axes.text(0.03, 0.84, words, transform=axes.transAxes)
        numbers |= {f"spearman_of_{name}": found.spearman, f"highest_control_of_{name}": high}
    figure.savefig(path, dpi=100)
    return numbers


def kappa_figure(path: Path) -> dict[str, float]:
    """Trap 2: the slope is the step length's."""
    numbers = {}
    figure, axes = plt.subplots(figsize=(5.5, 3.6), layout="constrained")
    for color, length in (("C0", 0.1), ("C1", 0.05), ("C2", 0.025)):
        fit = scatter(axes, saturated(length=length), "κ saturated: halve the step, double L1", color)
        axes.plot([], [], color=color, label=f"step length {length:g}: L1 = {fit.L1:.0f}")
        numbers[f"L1_at_step_length_{length:g}"] = fit.L1
    axes.set_ylim(0, 60)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=100)
    return numbers


if __name__ == "__main__":
    docs = Path(__file__).parent
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else docs / "images"
    folder.mkdir(parents=True, exist_ok=True)
    numbers = {
        **unpaired_figure(folder / "trust-unpaired.png"),
        **spectrum_figure(folder / "trust-spectrum.png"),
        **kappa_figure(folder / "trust-kappa.png"),
    }
    kept = folder / "trust.json" if len(sys.argv) > 1 else docs / "results" / "trust.json"
    kept.write_text(json.dumps(numbers, indent=1) + "\n")
