r"""The paper's synthetic experiment, and two that it lacks; numbers into a folder, figures from there.

- :math:`f(x) = x^4` from :math:`x_0 = 30`, gradient descent and clipped descent, step sizes by halving.
- The same from many starts: a single one is as good as its luck with the lattice of its iterates.
- The lower-bound pair: iterations against the largest gradient norm M, for four step rules.
"""

from __future__ import annotations

import io
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from curvestep._checks import check_count, check_positive
from curvestep._files import write_atomically
from curvestep.lab.progress import Progress
from curvestep.lab.run.folder import read_json, write_json
from curvestep.steps import normalized_from_clipped
from curvestep.theory.complexity import descend
from curvestep.theory.problems.polynomials import Quartic
from curvestep.theory.rules import ClippedStep, FixedStep, NormalizedStep, SmoothClippedStep, StepRule
from curvestep.theory.theorems.clipped_gd import theorem3
from curvestep.theory.theorems.fixed_gd import lower_bound_pair, theorem4, theorem6, wall_height

Array = NDArray[Any]

CONFIG, NUMBERS, SUMMARY = "config.json", "numbers.npz", "summary.json"
METHODS = ("best fixed step", "clipped", "normalized", "smooth-clipped")
# Step sizes tried for the best fixed one, as fractions of the largest that the wall allows.
FRACTIONS = np.array([0.9, 0.99, 0.999])


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """Everything that the numbers depend on.

    Args:
        x0: Start on x⁴.
        num_steps: Iterations T; the paper does not give it, 2000 reproduces its numbers.
        gd_lr: Largest step size of gradient descent, to be halved.
        clipped_lr: Largest step size of clipped descent, to be halved.
        max_norm: Threshold of clipped descent.
        num_halvings: Step sizes on each grid.
        num_starts: Starts in the jittered version.
        jitter: They are drawn evenly within this distance of ``x0``.
        seed: Seed of the starts.
        L0: L0 of the lower-bound pair.
        L1: L1 of the lower-bound pair.
        smallest_growth: Smallest L1·M/L0.
        num_decades: Decades of M.
        num_M: Values of M.
    """

    x0: float = 30.0
    num_steps: int = 2000
    gd_lr: float = 10.0
    clipped_lr: float = 3e4
    max_norm: float = 0.01
    num_halvings: int = 24
    num_starts: int = 200
    jitter: float = 0.5
    seed: int = 0
    L0: float = 1.0
    L1: float = 1.0
    smallest_growth: float = 2.0
    num_decades: float = 3.0
    num_M: int = 13

    def __post_init__(self) -> None:
        for name in (
            "gd_lr",
            "clipped_lr",
            "max_norm",
            "jitter",
            "L0",
            "L1",
            "smallest_growth",
            "num_decades",
        ):
            check_positive(name, getattr(self, name))
        for name, least in (("num_steps", 2), ("num_halvings", 1), ("num_starts", 1), ("num_M", 2)):
            check_count(name, getattr(self, name), least=least)
        Quartic().check_start(self.x0)


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """One line of the quantitative comparison.

    Attributes:
        quantity: What is compared.
        printed: As the paper has it.
        corrected: As its own formulas give it.
        measured: As it comes out.
    """

    quantity: str
    printed: str
    corrected: str
    measured: str


@dataclass(frozen=True, kw_only=True)
class SyntheticResult:
    """What the experiment found; the whole of it is in the folder.

    Attributes:
        config: What it was made with.
        gd_best_lr: The step size of gradient descent with the smallest final gradient.
        gd_grad_norm: Its final gradient.
        clipped_best_lr: The step size of clipped descent with the smallest final gradient.
        clipped_grad_norm: Its final gradient.
        ratio: The first over the second.
        jittered_ratio: Median over the starts of that ratio, the best of each grid taken for each start.
        jittered_range: Smallest and largest.
        fixed_range: Smallest and largest ratio if both keep the step sizes that were best from x0.
        slope: Slope of iterations of the best fixed step over those of clipping, against M, on log-log axes.
        slope_theory: What the corrected bounds predict for it.
        table: The quantitative comparison.
    """

    config: SyntheticConfig
    gd_best_lr: float
    gd_grad_norm: float
    clipped_best_lr: float
    clipped_grad_norm: float
    ratio: float
    jittered_ratio: float
    jittered_range: tuple[float, float]
    fixed_range: tuple[float, float]
    slope: float
    slope_theory: float
    table: tuple[ComparisonRow, ...]


def run_synthetic(
    folder: Path, *, progress: bool = True, config: SyntheticConfig | None = None
) -> SyntheticResult:
    """Run the experiment and save its numbers: ``config.json``, ``numbers.npz``, ``summary.json``.

    Args:
        folder: Where to; made if missing, and its three files replaced.
        progress: Show how far it is: a bar, or a line for each part without a terminal.
        config: What to run; the paper's settings if not given.
    """
    config = config or SyntheticConfig()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    stages = {"one start": grids, "many starts": jittered, "iterations against M": growth}
    numbers: dict[str, Array] = {}
    with Progress("synthetic experiment", len(stages), interval=0.0, shown=progress) as shown:
        for count, (name, stage) in enumerate(stages.items(), 1):
            numbers |= stage(config)
            shown.update(count, name)
    result = summarize(config, numbers)
    arrays = io.BytesIO()
    np.savez_compressed(arrays, **numbers)  # pyright: ignore[reportArgumentType]  # no key is allow_pickle
    write_json(folder / CONFIG, asdict(config))
    write_atomically(folder / NUMBERS, arrays.getvalue())
    write_json(folder / SUMMARY, asdict(result))
    return result


def load_synthetic(folder: Path) -> tuple[SyntheticResult, dict[str, Array]]:
    """What :func:`run_synthetic` saved: the summary and the arrays."""
    folder = Path(folder)
    missing = [name for name in (CONFIG, NUMBERS, SUMMARY) if not (folder / name).exists()]
    if missing:
        raise FileNotFoundError(
            f"`folder` {folder} lacks {', '.join(missing)}. Call `run_synthetic` on it first."
        )
    saved = read_json(folder / SUMMARY)
    saved["config"] = SyntheticConfig(**saved["config"])
    saved["table"] = tuple(ComparisonRow(**row) for row in saved["table"])
    for name in ("jittered_range", "fixed_range"):
        saved[name] = tuple(saved[name])
    with np.load(folder / NUMBERS, allow_pickle=False) as arrays:
        return SyntheticResult(**saved), dict(arrays)


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
        runs = descend(Quartic(), rule(lrs[:, None]), starts, config.num_steps, every=config.num_steps)
        numbers[f"{name}_jittered_final"] = runs.grad_norms[-1]
    return numbers


def _rules(config: SyntheticConfig) -> list[tuple[str, Array, Any]]:
    halvings = 2.0 ** -np.arange(config.num_halvings)
    return [
        ("gd", config.gd_lr * halvings, lambda lr: FixedStep(lr=lr)),
        ("clipped", config.clipped_lr * halvings, lambda lr: ClippedStep(lr=lr, max_norm=config.max_norm)),
    ]


def growth(config: SyntheticConfig) -> dict[str, Array]:
    """Iterations of four step rules on the lower-bound pair, the slower of the two, for growing M."""
    L0, L1 = config.L0, config.L1
    growths = config.smallest_growth * np.logspace(0, config.num_decades, config.num_M)
    Ms, eps = growths * L0 / L1, min(L0 / 4, config.smallest_growth * L0 / L1 / 2)
    gaps = [max(wall_height(M, L0=L0, L1=L1), 1.25 * eps) for M in Ms]
    numbers: list[dict[str, Any]] = [dict(L0=L0, L1=L1, gap=gap, eps=eps) for gap in gaps]
    pairs = [lower_bound_pair(**n, M=M) for n, M in zip(numbers, Ms, strict=True)]
    clipped = theorem3(**numbers[0], version="sharp").hyperparameters
    lr, max_norm = float(clipped["lr"]), float(clipped["max_norm"])
    lower = [theorem4(**n, M=M).bound for n, M in zip(numbers, Ms, strict=True)]
    fixed_upper = [theorem6(**n, M=M, version="sharp").bound for n, M in zip(numbers, Ms, strict=True)]
    clipped_upper = [theorem3(**n, version="sharp").bound for n in numbers]
    fixed = FixedStep(lr=FRACTIONS[:, None] * [pair.largest_step for pair in pairs])
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
        num, hits = math.ceil(most), []
        for starts, problem in (walls, valleys):
            runs = descend(problem, rule, np.array(starts), num, eps=eps, every=num, until_hit=True)
            hits.append(np.asarray(runs.hits))
        slower = np.maximum(*hits)
        iterations.append(slower.min(axis=0) if slower.ndim == 2 else slower)
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
    best = {name: int(np.nanargmin(numbers[f"{name}_final"])) for name in ("gd", "clipped")}
    finals = {name: numbers[f"{name}_jittered_final"] for name in best}
    ratios = np.nanmin(finals["gd"], axis=0) / np.nanmin(finals["clipped"], axis=0)
    kept = finals["gd"][best["gd"]] / finals["clipped"][best["clipped"]]
    fixed, clipped = numbers["iterations"][:2]
    lrs = {name: float(numbers[f"{name}_lrs"][index]) for name, index in best.items()}
    norms = {name: float(numbers[f"{name}_final"][index]) for name, index in best.items()}
    growths = numbers["M"] * config.L1 / config.L0
    return SyntheticResult(
        config=config,
        gd_best_lr=lrs["gd"],
        gd_grad_norm=norms["gd"],
        clipped_best_lr=lrs["clipped"],
        clipped_grad_norm=norms["clipped"],
        ratio=norms["gd"] / norms["clipped"],
        jittered_ratio=float(np.median(ratios)),
        jittered_range=(float(ratios.min()), float(ratios.max())),
        fixed_range=(float(np.nanmin(kept)), float(np.nanmax(kept))),
        slope=_slope(numbers["M"], fixed / clipped),
        slope_theory=_slope(numbers["M"], growths / np.log1p(growths)),
        table=_table(config, lrs, norms, float(np.median(ratios)), numbers["gd_points"][:, best["gd"]]),
    )


def _table(
    config: SyntheticConfig,
    lrs: dict[str, float],
    norms: dict[str, float],
    jittered_ratio: float,
    path: Array,
) -> tuple[ComparisonRow, ...]:
    """The paper's quantitative comparison, with its L1 = 10 and both values of L0."""
    M = 4 * abs(config.x0) ** 3
    L1, printed_L0, true_L0 = 10.0, 0.1, Quartic().frontier(10.0)
    conditions = [(M * L1 + L0) / L0 for L0 in (printed_L0, true_L0)]
    half = config.num_steps // 2
    late = np.arange(half, config.num_steps + 1)
    fall = _slope(late, np.abs(4 * path[late] ** 3))
    law = (lrs["clipped"] / lrs["gd"]) ** 1.5
    ratio = norms["gd"] / norms["clipped"]
    return (
        ComparisonRow(
            quantity="Gradient norm of GD after T steps",
            printed="(M L1 + L0) / √T",
            corrected="√((M L1 + L0) Δ / T)",
            measured=f"∝ T^({fall:.2f}), tending to T^(−3/2)",
        ),
        ComparisonRow(
            quantity="(M L1 + L0) / L0 on x⁴",
            printed="1e5, and inverted",
            corrected=_short(conditions[0]),
            measured=f"{_short(conditions[1])} with the true L0 = {true_L0:g}",
        ),
        ComparisonRow(
            quantity="Gradient norms on x⁴, GD over clipped, by the bounds",
            printed="1e5",
            corrected=f"√{_short(conditions[0])} = {math.sqrt(conditions[0]):.4g}",
            measured=f"{_short(ratio)}; {_short(jittered_ratio)} over jittered starts",
        ),
        ComparisonRow(
            quantity="The same by the local law (η_clipped / η_GD)^(3/2)",
            printed="not in the paper",
            corrected=_short(law),
            measured=_short(ratio),
        ),
        ComparisonRow(
            quantity="Gradient norms of the LSTM, GD over clipped",
            printed="25 / 5 = 5",
            corrected=f"√(25 / 5) = {math.sqrt(5):.3g}",
            measured="≈ 3, in the paper",
        ),
    )


def _short(value: float) -> str:
    return f"{value:.3g}".replace("e+0", "e")


def _slope(x: Array, y: Array) -> float:
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])
