"""The pictures and numbers of docs/trust.md: python docs/trust_figures.py [folder].

Without a folder they go where the page finds them, docs/images and docs/results/trust.json.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats
from torch import nn
from torch.nn import functional as F

from curvestep import SmoothnessProbe, Trace, fit_smoothness
from curvestep.fit.correlation import spearman
from curvestep.fit.fit import SmoothnessFit
from curvestep.fit.within import mean_norms
from curvestep.report.drawing import COLOURS, ITERATIONS, log_axes, panels, save, styled

FRACTIONS = (0.05, 0.15, 0.5, 1.0)
LINE, FRONTIER = COLOURS[1], COLOURS[6]
RATES = tuple(float(f"{rate:.0e}") for rate in np.geomspace(0.1, 3e-6, 7))
Numbers = dict[str, float | str]


# Runs


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


def sgd(
    gradient: Callable[[np.ndarray, np.ndarray], np.ndarray], *, dim: int, lr: float, unequal: float = 0.0
) -> Trace:
    """200 steps with all that the probe records.

    Args:
        gradient: Of positions and of a standard normal draw that stands for the batch.
        dim: Number of directions.
        lr: Learning rate.
        unequal: Standard deviation of the logarithm of a batch's scale.
    """
    rng, trace = np.random.default_rng(0), Trace(header={"fractions": list(FRACTIONS)})
    x = np.zeros(dim)
    for step in range(200):
        scale, batch = math.exp(unequal * rng.standard_normal()), rng.standard_normal(dim)
        g = scale * gradient(x, batch)
        d = -lr * g
        ends = [scale * gradient(x + fraction * d, batch) for fraction in FRACTIONS]
        length, norm = float(np.linalg.norm(d)), float(np.linalg.norm(g))
        secants = [
            float(np.linalg.norm(end - g)) / (fraction * length)
            for end, fraction in zip(ends, FRACTIONS, strict=True)
        ]
        trace.append(
            {
                "step": step,
                "grad_norm": norm,
                "smoothness": max(secants),
                "secants": secants,
                "grad_norms": [float(np.linalg.norm(end)) for end in ends],
                "step_norm": length,
                "kappa": secants[-1] * length / norm,
                "lr": lr,
                "eps": 2.0**-52,
            }
        )
        x = x + d
    return trace


def at_the_edge(*, length: float, seed: int = 0) -> Trace:
    """Steps of one length, over and over across the valley of a quadratic whose curvature wanders."""
    rng = np.random.default_rng(seed)
    trace, level = Trace(), 0.0
    x, shape = 0.3 * rng.standard_normal(20), np.geomspace(0.1, 10, 20)
    for step in range(1500):
        level = 0.8 * level + 0.6 * rng.standard_normal()
        curvature = shape * np.exp(0.4 * level)
        g = curvature * x + 0.1 * length * rng.standard_normal(20)
        norm = np.linalg.norm(g)
        d = -length * g / norm
        change = np.linalg.norm(curvature * d)
        x = x + d
        if step >= 1200:  # the valley's floor has been reached
            row = {"step": step, "grad_norm": norm, "smoothness": change / length, "kappa": change / norm}
            trace.append({**row, "step_norm": length, "lr": 10.0})
    return trace


def wandering(rng: np.random.Generator, neighbours: float = 0.7) -> np.ndarray:
    """300 standard normal values of which each correlates with the next."""
    values = [rng.standard_normal()]
    for fresh in math.sqrt(1 - neighbours**2) * rng.standard_normal(299):
        values.append(neighbours * values[-1] + fresh)
    return np.array(values)


def rows(grad_norm: np.ndarray, smoothness: np.ndarray, **others: float) -> Trace:
    """A trace of two columns, and of others that are the same in every row."""
    trace = Trace()
    for step, (g, ell) in enumerate(zip(grad_norm, smoothness, strict=True)):
        trace.append({"step": step, "grad_norm": g, "smoothness": ell, **others})
    return trace


def network(activation: Callable[[], nn.Module]) -> Trace:
    """A network of three hidden layers in float64, with seven learning rates from 0.1 to 3e-6 in turn."""
    torch.manual_seed(0)
    layers = [nn.Linear(10, 256), activation(), nn.Linear(256, 256), activation()]
    layers += [nn.Linear(256, 256), activation(), nn.Linear(256, 10)]
    model = nn.Sequential(*layers).double()
    x, y = torch.randn(1000, 10, dtype=torch.float64), torch.randint(10, (1000,))
    optimizer = torch.optim.SGD(model.parameters())
    probe = SmoothnessProbe(model, every=1, estimators=("smoothness", "local_smoothness"))
    for step in range(84):
        optimizer.param_groups[0]["lr"] = RATES[step % len(RATES)]
        chosen = torch.randint(1000, (16,))

        def loss_fn(chosen: torch.Tensor = chosen) -> torch.Tensor:
            return F.cross_entropy(model(x[chosen]), y[chosen])

        optimizer.zero_grad()
        loss_fn().backward()
        with probe(loss_fn):
            optimizer.step()
    probe.close()
    return probe.trace


# Drawing


def points(axes: Axes, trace: Trace, title: str, colour: str = COLOURS[0], line: str = "") -> SmoothnessFit:
    """Points and quantile line of one fit."""
    fit = fit_smoothness(trace)
    g = trace.column("grad_norm")
    axes.scatter(g, trace.column("smoothness"), s=7, color=colour, alpha=0.6, linewidths=0)
    x = np.array([0.0, g.max()])
    axes.plot(x, fit.L0 + fit.L1 * x, color=line or colour)
    axes.set(title=title, ylim=(0, None), xlim=(0, None))
    axes.set(xlabel="gradient norm (loss/x)", ylabel="sharpness (loss/x²)")
    return fit


def note(axes: Axes, text: str) -> None:
    """Words in the upper left corner, on white so that points do not disturb them."""
    box = {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 2}
    axes.text(0.04, 0.96, text, transform=axes.transAxes, bbox=box, fontsize=9.5, ha="left", va="top")


def changes(axes: Axes, trace: Trace, title: str, *, reach: float) -> None:
    """Draw u against v of every step, from its first fraction to the third, with the two laws."""
    norms = mean_norms(trace.column("grad_norm"), trace.column("grad_norms"), np.array(FRACTIONS))
    u, v = (np.log(values[:, 2] / values[:, 0]) for values in (trace.column("secants"), norms))
    ends = np.array([-reach, 0.1 * reach])
    axes.plot(ends, 0 * ends, color=FRONTIER, label="u = 0: constant Hessian")
    axes.plot(ends, ends, "--", color=LINE, label="u = v: sharpness L1‖g‖")
    axes.scatter(v, u, s=9, color=COLOURS[0], alpha=0.6, linewidths=0, zorder=3)
    axes.set(title=title, xlim=ends, ylim=(-reach, 0.25 * reach))
    axes.set(xlabel="v, change of log gradient norm (no unit)", ylabel="u, change of log sharpness (no unit)")
    axes.legend(loc="lower right" if reach > 0.2 else "center left")


def elasticity(fit: SmoothnessFit) -> str:
    """What the test within steps found; adding zero turns -0.0 into 0.0."""
    slope = f"slope {round(fit.within.elasticity, 2) + 0.0:.2f}"
    return f"{slope}: it grows" if fit.grows else f"{slope}: no growth"


def warning(fit: SmoothnessFit, start: str) -> str:
    """The one warning that begins so."""
    (found,) = (str(said) for said in fit.warnings if str(said).startswith(start))
    return found


def unpaired_figure() -> tuple[Figure, Numbers]:
    """Two batches for one difference."""
    figure, (left, right) = panels(1, 2, width=3.5, height=2.9)
    run = {"curvature": np.ones(20), "noise": 0.5, "uneven": 0.5, "spread": 0.1}
    fit = points(left, clipped_sgd_on_a_quadratic(**run, paired=False), "two batches", LINE)
    note(left, f"L1 = {fit.L1:.0f}, rank correlation {fit.spearman:.2f}")
    numbers: Numbers = {
        "L1_of_two_batches": fit.L1,
        "warning_of_two_batches": warning(fit, "Within steps"),
    }
    fit = points(right, clipped_sgd_on_a_quadratic(**run), "the same batch at both points")
    right.set_ylim(0, 2)
    note(right, f"L1 = {fit.L1:.1g}")
    figure.suptitle("Two batches invent an L1 where there is none (Hessian 1, 300 steps)")
    return figure, {**numbers, "L1_of_the_same_batch": fit.L1}


def spectrum_figure() -> tuple[Figure, Numbers]:
    """A spread spectrum makes the correlation; the control shows it."""
    figure, (left, right) = panels(1, 2, width=3.5, height=2.9)
    curvature = np.geomspace(0.1, 5, 20)
    descent = clipped_sgd_on_a_quadratic(curvature=curvature, noise=0.02, uneven=0.0, spread=1.0)
    fit = points(left, descent, "a constant Hessian", line=LINE)
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
    other = points(right, trace, "sharpness follows the norm", line=LINE)
    numbers: Numbers = {}
    figure.suptitle("A rank correlation is evidence only beyond the control (300 steps)")
    for axes, found, name in ((left, fit, "constant_hessian"), (right, other, "following_smoothness")):
        assert found.control is not None
        low, high = found.control.spearman_interval
        inside = "inside" if found.spearman_interval[0] <= high else "beyond"
        evidence = "no evidence" if inside == "inside" else "evidence"
        note(
            axes,
            f"rank correlation {found.spearman:.2f},\n{inside} the control [{low:.2f}, {high:.2f}]:\n"
            f"{evidence}",
        )
        numbers |= {f"spearman_of_{name}": found.spearman, f"highest_control_of_{name}": high}
    left.set_ylim(0, 1.6 * float(descent.column("smoothness").max()))
    right.set_ylim(0, 1.5 * float(trace.column("smoothness").max()))
    return figure, numbers


def within_figure() -> tuple[Figure, Numbers]:
    """Inside steps: a constant Hessian against a function whose smoothness grows with the gradient."""
    figure, (left, right) = panels(1, 2, width=3.5, height=3.1)
    curvature = np.geomspace(0.1, 5, 20)
    flat = sgd(lambda x, batch: curvature * (x - batch), dim=20, lr=0.2)
    steep = sgd(lambda x, batch: np.sinh(x - batch), dim=3, lr=0.15)
    figure.suptitle("Within steps a constant Hessian shows nothing, growth shows (200 steps)")
    changes(left, flat, "a constant Hessian", reach=0.4)
    changes(right, steep, "Σ cosh(x − batch), L0 = L1 = 1", reach=0.4)
    numbers: Numbers = {}
    for axes, trace, name in ((left, flat, "constant_hessian"), (right, steep, "cosh")):
        fit = fit_smoothness(trace)
        numbers |= {f"elasticity_of_{name}": fit.within.elasticity, f"within_of_{name}": str(fit.within)}
        note(axes, elasticity(fit))
    return figure, numbers


def kappa_figure() -> tuple[Figure, Numbers]:
    """At the edge of stability the slope is the step length's."""
    numbers: Numbers = {}
    figure, (axes,) = panels(1, 1, width=5, height=3.2)
    for colour, length in zip(COLOURS, (0.1, 0.05, 0.025), strict=False):
        trace = at_the_edge(length=length)
        fit = points(axes, trace, "κ saturated: halve the step, double L1", colour)
        axes.plot([], [], color=colour, label=f"step length {length:g} x: L1 = {fit.L1:.0f}")
        numbers[f"L1_at_step_length_{length:g}"] = fit.L1
        numbers[f"kappa_at_step_length_{length:g}"] = float(np.median(trace.column("kappa")))
        if length == 0.05:
            numbers["warning_of_kappa"] = warning(fit, "L1 is not reliable")
    axes.legend(loc="lower right")
    return figure, numbers


def time_figure() -> tuple[Figure, Numbers]:
    """Time as the common cause: the line of all rows has a slope that no part of the run has."""
    rng, fall = np.random.default_rng(3), np.exp(-1.5 * np.linspace(0, 1, 300))
    g = fall * np.exp(0.3 * wandering(rng))
    ell = 3 * fall * np.exp(0.3 * wandering(rng))
    fit = fit_smoothness(rows(g, ell))
    parts = np.array_split(np.arange(300), 8)
    inside = [float(spearman(g[None, part], ell[None, part])[0]) for part in parts]
    figure, (left, right) = panels(1, 2, width=3.5, height=2.9)
    shaded = left.scatter(g, ell, c=np.arange(300), cmap=ITERATIONS, s=9, linewidths=0)
    ends = np.array([0, g.max()])
    left.plot(ends, fit.L0 + fit.L1 * ends, color=LINE)
    left.set(title=f"all rows: L1 = {fit.L1:.1f}", xlim=(0, None), ylim=(0, None))
    left.set(xlabel="gradient norm (loss/x)", ylabel="sharpness (loss/x²)")
    figure.colorbar(shaded, ax=left, label="step", pad=0.02)
    right.axhline(fit.spearman, color=LINE, label="all rows")
    right.axhline(float(np.mean(inside)), color=COLOURS[0], linestyle="--", label="mean of the parts")
    right.plot(np.arange(1, 9), inside, "o-", color=COLOURS[0], linewidth=0.7, label="one part")
    figure.suptitle("Time makes the slope: parts of the run have none (300 rows)")
    right.set(title="the same run in 8 parts", ylim=(-1, 1))
    right.set(xlabel="part of the run (number)", ylabel="rank correlation (no unit)")
    right.legend(loc="lower left")
    return figure, {
        "L1_of_time": fit.L1,
        "spearman_of_time": fit.spearman,
        "spearman_of_its_parts": float(np.mean(inside)),
        "warning_of_time": warning(fit, "Time may be"),
    }


def kinks_figure() -> tuple[Figure, Numbers]:
    """Kinks: the shorter the step, the larger the smoothness of a ReLU network; of others it stays."""
    figure, (left, right) = panels(1, 2, width=3.5, height=3.1)
    numbers: Numbers = {}
    kinds = (
        ("ReLU", nn.ReLU, COLOURS[1], "o"),
        ("GELU", nn.GELU, COLOURS[0], "^"),
        ("tanh", nn.Tanh, COLOURS[2], "s"),
    )
    for name, activation, colour, mark in kinds:
        trace = network(activation)
        length, ell, lr = (trace.column(key) for key in ("step_norm", "smoothness", "lr"))
        look = {"marker": mark, "s": 12, "color": colour, "alpha": 0.7, "linewidths": 0, "label": name}
        left.scatter(length, ell, **look)
        right.scatter(length, ell * length, **look)
        middle = {rate: float(np.median(ell[lr == rate])) for rate in RATES}
        if name == "ReLU":
            numbers |= {f"smoothness_of_ReLU_at_lr_{rate:g}": middle[rate] for rate in RATES[:3]}
            numbers["largest_smoothness_of_ReLU"] = float(ell.max())
            local = trace.column("local_smoothness")[trace.column("local_converged") == 1]
            numbers["local_smoothness_of_ReLU"] = float(np.median(local))
            numbers["warning_of_kinks"] = warning(fit_smoothness(trace, control=False), "Kinks")
        else:
            numbers |= {
                f"least_smoothness_of_{name}": min(middle.values()),
                f"most_smoothness_of_{name}": max(middle.values()),
            }
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("step length (x)")
        axes.legend()
    figure.suptitle("A kink makes ReLU look sharper the shorter the step (12 steps a length)")
    left.set(title="sharpness", ylabel="sharpness (loss/x²)")
    right.set(title="sharpness times step length", ylabel="change of gradient (loss/x)")
    return figure, numbers


def noise_figure() -> tuple[Figure, Numbers]:
    """Noise in the gradient norm: another line against the batch's gradient than against the full one."""
    rng = np.random.default_rng(0)
    full = np.exp(0.5 * wandering(rng))
    measured = np.hypot(full + 0.8 / math.sqrt(20) * rng.standard_normal(300), 0.8)
    ell = (1 + 2 * full) * np.exp(0.1 * wandering(rng))
    figure, (left, right) = panels(1, 2, width=3.5, height=2.9)
    true = points(left, rows(full, ell), "against the full gradient", line=LINE)
    fit = points(right, rows(measured, ell, noise=0.8), "against the batch's gradient", line=LINE)
    figure.suptitle(f"The same run: noise in the norm lowers L0 from {true.L0:.2f} to {fit.L0:.2f}")
    for axes, found in ((left, true), (right, fit)):
        note(axes, f"L0 = {found.L0:.2f}, L1 = {found.L1:.2f}")
        axes.set(xlim=(0, 1.02 * float(measured.max())), ylim=(0, 1.5 * float(ell.max())))
    return figure, {
        "L0_of_full_gradients": true.L0,
        "L1_of_full_gradients": true.L1,
        "L0_of_noisy_gradients": fit.L0,
        "L1_of_noisy_gradients": fit.L1,
        "warning_of_noise": warning(fit, "Noise in"),
    }


def scatter_figure() -> tuple[Figure, Numbers]:
    """Scatter that grows with the gradient norm bends the upper line."""
    rng = np.random.default_rng(0)
    g = np.exp(0.5 * wandering(rng))
    ell = (1 + 2 * g) * np.exp(0.3 * g * wandering(rng))
    figure, (axes,) = panels(1, 1, width=5, height=3.2)
    fit = fit_smoothness(rows(g, ell))
    x = np.geomspace(g.min(), g.max(), 100)
    axes.scatter(g, ell, s=7, color=COLOURS[0], alpha=0.6, linewidths=0)
    axes.plot(x, fit.L0 + fit.L1 * x, color=LINE, label=f"fit: {fit.L0:.2f} + {fit.L1:.2f} g")
    bound = (1 + 2 * x) * np.exp(0.3 * x * stats.norm.ppf(0.95))
    axes.plot(x, bound, "--", color=FRONTIER, label="true line with 95 % of the points below")
    axes.plot(x, 1 + 2 * x, ":", color=FRONTIER, label="true middle, 1 + 2 g")
    log_axes(axes)
    axes.set(
        xlim=(0.9 * g.min(), 1.15 * g.max()),
        ylim=(1, None),
        title="Scatter that grows pulls L0 to 0 (300 rows)",
    )
    axes.set(xlabel="gradient norm g (loss/x)", ylabel="sharpness (loss/x²)")
    axes.legend(loc="upper left")
    return figure, {
        "L0_of_scatter": fit.L0,
        "L1_of_scatter": fit.L1,
        "warning_of_scatter": warning(fit, "The scatter"),
    }


def batches_figure() -> tuple[Figure, Numbers]:
    """Batches of unequal scale: a line across rows, nothing inside steps."""
    curvature = np.geomspace(0.1, 5, 20)
    trace = sgd(lambda x, batch: curvature * x + 0.3 * batch, dim=20, lr=0.1, unequal=0.4)
    figure, (left, right) = panels(1, 2, width=3.5, height=3.1)
    figure.suptitle("Unequal batches: growth across rows, none within steps (200 steps)")
    fit = points(left, trace, "across the rows", line=LINE)
    note(left, f"L1 = {fit.L1:.1f}, rank correlation {fit.spearman:.2f}")
    changes(right, trace, "within the steps", reach=0.16)
    right.set(ylim=(-0.08, 0.016))
    note(right, elasticity(fit))
    assert fit.control is not None
    return figure, {
        "L1_of_batches": fit.L1,
        "spearman_of_batches": fit.spearman,
        "lowest_spearman_of_batches": fit.spearman_interval[0],
        "highest_control_of_batches": fit.control.spearman_interval[1],
        "within_of_batches": str(fit.within),
    }


FIGURES = {
    "unpaired": unpaired_figure,
    "spectrum": spectrum_figure,
    "within": within_figure,
    "kappa": kappa_figure,
    "time": time_figure,
    "kinks": kinks_figure,
    "noise": noise_figure,
    "scatter": scatter_figure,
    "batches": batches_figure,
}


if __name__ == "__main__":
    docs = Path(__file__).parent
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else docs / "images"
    folder.mkdir(parents=True, exist_ok=True)
    numbers: Numbers = {}
    for name, draw in FIGURES.items():
        with styled():
            figure, found = draw()
            png, _ = save(figure, folder / f"trust-{name}")
            png.unlink()  # the page shows the SVG
        numbers |= found
    kept = folder / "trust.json" if len(sys.argv) > 1 else docs / "results" / "trust.json"
    kept.write_text(json.dumps(numbers, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
