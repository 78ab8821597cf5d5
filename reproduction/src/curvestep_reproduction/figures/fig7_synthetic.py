r"""Figure 7, the synthetic experiment, and two that the paper lacks: numbers in a folder, figures from them.

- :math:`f(x) = x^4` from :math:`x_0 = 30`, gradient descent and clipped descent, step sizes by halving.
- The same from many starts: a single one is as good as its luck with the lattice of its iterates.
- The lower-bound pair: iterations against the largest gradient norm M, for four step rules.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from curvestep.files import write_atomically
from curvestep.report.chart import BOLD, NUM_COLOURS, THIN, Axis, Chart, Series
from curvestep.steps import normalized_from_clipped
from curvestep.theory.complexity import descend, first_hits, walk
from curvestep.theory.problems.polynomials import Quartic
from curvestep.theory.rules import ClippedStep, FixedStep, NormalizedStep, SmoothClippedStep, StepRule
from curvestep.theory.theorems.clipped_gd import theorem3
from curvestep.theory.theorems.fixed_gd import lower_bound_pair, theorem4, theorem6, wall_height
from curvestep.trace.run import read_json, write_json
from curvestep_reproduction.claims.claims import MissingRuns
from curvestep_reproduction.figures.layout import SMALL_PANEL, Panel, figure_of_panels
from curvestep_reproduction.figures.plan import PaperFigure, Picture, Results
from curvestep_reproduction.progress import Progress

Array = NDArray[Any]
FOLDER = "synthetic"  # inside the reproduction's
CONFIG = "config.json"
NUMBERS = "numbers.npz"
RULES = ("best fixed step", "clipped", "normalized", "smooth-clipped")
METHODS = {"gd": "GD", "clipped": "clipped GD"}
# Step sizes tried for the best fixed one, as fractions of the largest that the wall allows.
NEAR_LARGEST = np.array([0.9, 0.99, 0.999])
NUM_LINES = 6  # step sizes shown in each of the six panels
# Colours in the palette.
GD = 0
CLIPPED = 1
# With these the paper compares theory and experiment on x⁴.
PAPERS_L0 = 0.1
PAPERS_L1 = 10.0


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """Everything that the numbers depend on."""

    x0: float = 30.0  # start on x⁴
    num_steps: int = 2000  # iterations T; the paper does not give it, 2000 reproduces its numbers
    gd_lr: float = 10.0  # largest step size of gradient descent, to be halved
    clipped_lr: float = 3e4  # largest step size of clipped descent, to be halved
    max_norm: float = 0.01  # threshold of clipped descent
    num_halvings: int = 24  # step sizes on each grid
    num_starts: int = 200  # starts in the jittered version
    jitter: float = 0.5  # they are drawn evenly within this distance of ``x0``
    seed: int = 0  # seed of the starts
    L0: float = 1.0  # L0 of the lower-bound pair
    L1: float = 1.0  # L1 of the lower-bound pair
    smallest_growth: float = 2.0  # smallest L1·M/L0
    num_decades: float = 3.0  # decades of M
    num_M: int = 13  # values of M


@dataclass(frozen=True)
class ComparisonRow:
    """One line of the quantitative comparison."""

    quantity: str  # what is compared
    printed: str  # as the paper has it
    corrected: str  # as its own formulas give it
    measured: str  # as it comes out


@dataclass(frozen=True, kw_only=True)
class SyntheticResult:
    """Summary of the experiment; the folder has all of its numbers."""

    config: SyntheticConfig  # what it was made with
    gd_best_lr: float  # the step size of gradient descent with the smallest final gradient
    gd_grad_norm: float  # its final gradient
    clipped_best_lr: float  # the step size of clipped descent with the smallest final gradient
    clipped_grad_norm: float  # its final gradient
    ratio: float  # the first gradient over the second
    printed_ratio: float  # what the corrected bounds predict for it with the paper's L0
    predicted_ratio: float  # likewise with the L0 that x⁴ has
    jittered_ratio: float  # median over the starts of that ratio, the best of each grid taken for each start
    jittered_range: tuple[float, float]  # smallest and largest
    # Smallest and largest ratio if both keep the step sizes that were best from x0.
    fixed_range: tuple[float, float]
    table: tuple[ComparisonRow, ...]  # the quantitative comparison


PAPERS_CONFIG = SyntheticConfig()


def run_synthetic(
    folder: Path, *, progress: bool = True, config: SyntheticConfig = PAPERS_CONFIG
) -> SyntheticResult:
    """Run the experiment and save what it was made with and its numbers: ``config.json``, ``numbers.npz``."""
    folder.mkdir(parents=True, exist_ok=True)
    stages = {"one start": grids, "many starts": jittered, "iterations against M": growth}
    numbers: dict[str, Array] = {}
    with Progress("synthetic experiment", len(stages), interval=0.0, shown=progress) as shown:
        for count, (name, stage) in enumerate(stages.items(), 1):
            numbers |= stage(config)
            shown.update(count, name)
    arrays = io.BytesIO()
    np.savez_compressed(arrays, **numbers)  # pyright: ignore[reportArgumentType]  # no key is allow_pickle
    write_atomically(folder / NUMBERS, arrays.getvalue())
    write_json(folder / CONFIG, asdict(config))
    return summarize(config, numbers)


def load_synthetic(folder: Path) -> tuple[SyntheticResult, dict[str, Array]]:
    """Results that :func:`run_synthetic` saved: the summary and the arrays."""
    with np.load(folder / NUMBERS, allow_pickle=False) as arrays:
        numbers = dict(arrays)
    return summarize(SyntheticConfig(**read_json(folder / CONFIG)), numbers), numbers


def grids(config: SyntheticConfig) -> dict[str, Array]:
    """Iterates from one start for every step size of both grids."""
    numbers: dict[str, Array] = {}
    for name, lrs, rule in _rules(config):
        runs = descend(Quartic(), rule(lrs), config.x0, config.num_steps)
        numbers |= {f"{name}_lrs": lrs, f"{name}_points": runs.points, f"{name}_final": runs.grad_norms[-1]}
    return numbers


def jittered(config: SyntheticConfig) -> dict[str, Array]:
    """Final gradient norms from many starts, shaped (step sizes, starts)."""
    rng = np.random.default_rng(config.seed)
    starts = config.x0 + rng.uniform(-config.jitter, config.jitter, size=config.num_starts)
    numbers: dict[str, Array] = {"starts": starts}
    for name, lrs, rule in _rules(config):
        *_, (_, last) = walk(Quartic(), rule(lrs[:, None]), starts, config.num_steps)
        with np.errstate(over="ignore", invalid="ignore"):
            numbers[f"{name}_jittered_final"] = Quartic().grad_norm(last[-1])
    return numbers


def _rules(config: SyntheticConfig) -> list[tuple[str, Array, Any]]:
    halvings = 2.0 ** -np.arange(config.num_halvings)
    return [
        ("gd", config.gd_lr * halvings, lambda lr: FixedStep(lr=lr)),
        ("clipped", config.clipped_lr * halvings, lambda lr: ClippedStep(lr=lr, max_norm=config.max_norm)),
    ]


def growth(config: SyntheticConfig) -> dict[str, Array]:
    """Iterations of four step rules on the lower-bound pair, the slower of the two, for growing M."""
    L0 = config.L0
    L1 = config.L1
    growths = config.smallest_growth * np.logspace(0, config.num_decades, config.num_M)
    Ms = growths * L0 / L1
    eps = min(L0 / 4, config.smallest_growth * L0 / L1 / 2)
    pairs = []
    lower = []
    fixed_upper = []
    guarantees = []
    for M in Ms:
        gap = max(wall_height(M, L0=L0, L1=L1), 1.25 * eps)
        numbers: dict[str, Any] = dict(L0=L0, L1=L1, gap=gap, eps=eps)
        pairs.append(lower_bound_pair(**numbers, M=M))
        lower.append(theorem4(**numbers, M=M).bound)
        fixed_upper.append(theorem6(**numbers, M=M, version="sharp").bound)
        guarantees.append(theorem3(**numbers, version="sharp"))
    clipped_upper = [guarantee.bound for guarantee in guarantees]
    lr, max_norm = (float(guarantees[0].hyperparameters[name]) for name in ("lr", "max_norm"))
    fixed = FixedStep(lr=NEAR_LARGEST[:, None] * [pair.largest_step for pair in pairs])
    rules: list[tuple[StepRule, float]] = [
        (fixed, 1.2 * max(lower)),
        (ClippedStep(lr=lr, max_norm=max_norm), max(clipped_upper)),
        (NormalizedStep(**normalized_from_clipped(lr=lr, max_norm=max_norm)), 2 * max(clipped_upper)),
        (SmoothClippedStep(L0=L0, L1=L1), max(clipped_upper)),
    ]
    walls = [pair.wall_start for pair in pairs], pairs[0].wall
    valleys = [pair.valley_start for pair in pairs], pairs[0].valley
    iterations = []
    for rule, most in rules:
        num = math.ceil(most)
        hits = [first_hits(problem, rule, starts, eps, num) for starts, problem in (walls, valleys)]
        slower = np.maximum(*hits)
        iterations.append(np.atleast_2d(slower).min(axis=0))  # of several fixed steps the best
    return {
        "M": Ms,
        "iterations": np.array(iterations),
        "fixed_lower": np.array(lower),
        "fixed_upper": np.array(fixed_upper),
        "clipped_upper": np.array(clipped_upper),
    }


def summarize(config: SyntheticConfig, numbers: dict[str, Array]) -> SyntheticResult:
    """The result from the arrays."""
    # The step sizes with the smallest final gradient norm; those that diverged are out.
    best = {name: int(np.nanargmin(numbers[f"{name}_final"])) for name in METHODS}
    finals = {name: numbers[f"{name}_jittered_final"] for name in METHODS}
    ratios = np.nanmin(finals["gd"], axis=0) / np.nanmin(finals["clipped"], axis=0)
    kept = finals["gd"][best["gd"]] / finals["clipped"][best["clipped"]]
    lrs = {name: float(numbers[f"{name}_lrs"][index]) for name, index in best.items()}
    norms = {name: float(numbers[f"{name}_final"][index]) for name, index in best.items()}
    result = SyntheticResult(
        config=config,
        gd_best_lr=lrs["gd"],
        gd_grad_norm=norms["gd"],
        clipped_best_lr=lrs["clipped"],
        clipped_grad_norm=norms["clipped"],
        ratio=norms["gd"] / norms["clipped"],
        printed_ratio=math.sqrt(_condition(config, PAPERS_L0)),
        predicted_ratio=math.sqrt(_condition(config, Quartic().frontier(PAPERS_L1))),
        jittered_ratio=float(np.median(ratios)),
        jittered_range=(float(ratios.min()), float(ratios.max())),
        fixed_range=(float(np.nanmin(kept)), float(np.nanmax(kept))),
        table=(),
    )
    return replace(result, table=_table(result, numbers["gd_points"][:, best["gd"]]))


def _condition(config: SyntheticConfig, L0: float) -> float:
    """(M L1 + L0) / L0 on x⁴ from the start, with the paper's L1."""
    return (4 * abs(config.x0) ** 3 * PAPERS_L1 + L0) / L0


def _table(result: SyntheticResult, path: Array) -> tuple[ComparisonRow, ...]:
    """The paper's quantitative comparison, with both values of L0; ``path`` is that of gradient descent."""
    config = result.config
    true_L0 = Quartic().frontier(PAPERS_L1)
    condition = _short(_condition(config, PAPERS_L0))
    late = np.arange(config.num_steps // 2, config.num_steps + 1)
    fall = _slope(late, np.abs(4 * path[late] ** 3))
    law = (result.clipped_best_lr / result.gd_best_lr) ** 1.5
    return (
        ComparisonRow("Gradient norm of GD after T steps", "(M L1 + L0) / √T", "√((M L1 + L0) Δ / T)",
                      f"∝ T^({fall:.2f}), tending to T^(−3/2)"),
        ComparisonRow("(M L1 + L0) / L0 on x⁴", "1e5, and inverted", condition,
                      f"{_short(_condition(config, true_L0))} with the true L0 = {true_L0:g}"),
        ComparisonRow("Gradient norms on x⁴, GD over clipped, by the bounds", "1e5",
                      f"√{condition} = {result.printed_ratio:.4g}",
                      f"{_short(result.ratio)}; {_short(result.jittered_ratio)} over jittered starts"),
        ComparisonRow("The same by the local law (η_clipped / η_GD)^(3/2)", "not in the paper", _short(law),
                      _short(result.ratio)),
        ComparisonRow("Gradient norms of the LSTM, GD over clipped", "25 / 5 = 5",
                      f"√(25 / 5) = {math.sqrt(5):.3g}", "≈ 3, in the paper"),
    )  # fmt: skip


def _short(value: float) -> str:
    return f"{value:.3g}".replace("e+0", "e")


def _slope(x: Array, y: Array) -> float:
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


# The pictures


def draw_trajectories(result: SyntheticResult, numbers: dict[str, Array]) -> Figure:
    """The six panels of the paper: distance, value and derivative, without and with clipping."""
    quantities = {"|x|": np.abs, "f(x) = x⁴": lambda x: x**4, "|f′(x)| = 4|x|³": lambda x: np.abs(4 * x**3)}
    papers = {"gd": "0.36", "clipped": "1.3e-8"}
    panels = []
    for name, method in METHODS.items():
        for label, quantity in quantities.items():
            with np.errstate(over="ignore", invalid="ignore"):
                values = quantity(numbers[f"{name}_points"])
            series = _step_sizes(numbers[f"{name}_lrs"], values, getattr(result, f"{name}_best_lr"))
            is_last = label.startswith("|f")
            if not is_last:  # the lines are named once a row
                series = tuple(replace(one, name="") for one in series)
            chart = Chart(name, f"{method}: {label}", Axis("iteration"), Axis(label, log=True), series)
            paper = papers[name] if is_last else ""
            panels.append(Panel(chart, letter="abcdef"[len(panels)], paper=paper))
    note = (
        f"x⁴ from {result.config.x0:g}, clipping threshold {result.config.max_norm:g}; lines are step sizes. "
        "Solid bands: the iterate oscillates and never converges. The paper gives no number of iterations."
    )
    title = (
        f"Figure 7: after {result.config.num_steps} iterations the best step sizes reach |f′| = "
        f"{result.gd_grad_norm:.2g} without clipping and {result.clipped_grad_norm:.2g} with it"
    )
    return figure_of_panels(panels, title=title, note=note, columns=3, size=SMALL_PANEL)


def _step_sizes(lrs: Array, values: Array, best_lr: float) -> tuple[Series, ...]:
    """A line a step size: two larger ones than the best, the best, and smaller ones."""
    best = int(np.argmin(np.abs(lrs - best_lr)))
    first = max(0, min(best - 2, len(lrs) - NUM_LINES))
    series = []
    for order, index in enumerate(range(first, min(len(lrs), first + NUM_LINES))):
        line = values[:, index]
        line = np.where((line > 0) & (line < 1e3 * line[0]), line, np.nan)
        name = f"η = {lrs[index]:.3g}"
        weight = THIN
        if index == best:
            name += ", best"
            weight = BOLD
        diverges = bool(np.isnan(line[-1]))
        if diverges:
            name += ", diverges"
        look = {"colour": order % NUM_COLOURS, "weight": BOLD if diverges else weight, "legend": ""}
        series.append(Series(name, np.arange(len(line)), line, **look))
    return tuple(series)


def draw_theorems(result: SyntheticResult, numbers: dict[str, Array]) -> Figure:
    """Iterations on the lower-bound pair against the largest gradient norm, and what fixed steps lose."""
    M = numbers["M"]
    iterations = numbers["iterations"]
    lower = numbers["fixed_lower"]
    upper = numbers["fixed_upper"]
    bounds = [
        Series("fixed: at least (Thm 4)", M, lower, colour=GD, dash="dot", band=(lower, upper), legend=""),
        Series("fixed: at most (Thm 6)", M, upper, colour=GD, dash="dash", legend=""),
        Series(
            "clipped: at most (Thm 3)", M, numbers["clipped_upper"], colour=CLIPPED, dash="dash", legend=""
        ),
    ]
    marks = ("circle", "square", "triangle", "circle")
    for number, (method, row) in enumerate(zip(RULES, iterations, strict=False)):
        bounds.append(Series(method, M, row, colour=number, mark=marks[number], weight=THIN, legend=""))
    kappas = M * result.config.L1 / result.config.L0
    ratio = iterations[0] / iterations[1]
    predicted = kappas / np.log1p(kappas)
    prediction = predicted * (ratio[-1] / predicted[-1])
    losses = (
        Series(f"measured, slope {_slope(M, ratio):.2f}", M, ratio, colour=2, mark="circle"),
        Series(f"κ / ln(1 + κ), slope {_slope(M, predicted):.2f}", M, prediction, colour="ink", dash="dash"),
    )
    largest = Axis("largest gradient norm M", log=True)
    panels = [
        Panel(
            Chart("iterations", "iterations on the harder function", largest,
                  Axis("iterations to ‖∇f‖ ≤ ε", log=True), tuple(bounds)),
            found="of the two functions of Theorem 4", reference=True,
        ),
        Panel(
            Chart("loses", "what a fixed step loses", largest, Axis("best fixed step over clipped", log=True),
                  losses),
            found="prediction scaled to the last point", reference=True,
        ),
    ]  # fmt: skip
    note = f"L0 = {result.config.L0:g}, L1 = {result.config.L1:g}, κ = L1·M/L0. Corrected and sharp bounds."
    title = (
        f"Theorems 3, 4 and 6: at M = {M[-1]:,.0f} the best fixed step takes {ratio[-1]:,.0f} times the "
        "iterations of clipping"
    )
    return figure_of_panels(panels, title=title, note=note, size=(5.0, 3.6))


def _drawn(draw: Callable[[SyntheticResult, dict[str, Array]], Figure]) -> Callable[[Results], Figure]:
    return lambda results: draw(*load_synthetic(results.folder / FOLDER))


def run_once(folder: Path, progress: bool) -> None:
    """Make the experiment unless it is there."""
    if not (folder / FOLDER / CONFIG).exists():
        run_synthetic(folder / FOLDER, progress=progress)


def summary_of(results: Results) -> SyntheticResult:
    """The numbers of the experiment."""
    try:
        return load_synthetic(results.folder / FOLDER)[0]
    except FileNotFoundError:
        raise MissingRuns("the synthetic experiment has not been run") from None


FIG7 = PaperFigure(
    name="fig7",
    runs=lambda scale: (),
    title="Figure 7: gradient descent and clipped gradient descent on x⁴",
    caption="A line is one step size from x = 30: its distance to the minimum, value or gradient.",
    draw=_drawn(draw_trajectories),
    beside=(
        Picture(
            name="theorems",
            title="Theorems 3, 4 and 6: iterations against the largest gradient norm",
            caption="The charts count iterations on the functions behind Theorem 4, with fixed steps and "
            "with clipping.",
            draw=_drawn(draw_theorems),
        ),
    ),
    experiment=run_once,
)
