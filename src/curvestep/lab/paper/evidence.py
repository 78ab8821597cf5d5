"""What the runs of a reproduction show, claim by claim: words with intervals, and a verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from curvestep.fit.fit import fit_smoothness
from curvestep.lab.calibration import read_calibration
from curvestep.lab.paper import agreement, compare
from curvestep.lab.paper.plan import (
    BY_HAND,
    CALIBRATED,
    CLIPPED,
    IMAGE_SWEEP,
    SHARES,
    UNCLIPPED,
    Plan,
    compared_steps,
)
from curvestep.lab.paper.synthetic import SyntheticResult, load_synthetic
from curvestep.lab.run.folder import CONFIG, DIVERGED, FINISHED, STATUS, Run
from curvestep.smoothness.trace import Trace

SUPPORTED, NOT_SUPPORTED, NOT_TESTABLE = "supported", "not supported", "not testable at this scale"
WINDOW = 25  # steps in the running mean of a training loss
CONFIDENCE = 0.9
MISSED = 0.05  # share of the way down that a calibrated run may miss

Evidence = tuple[str, str]  # what was measured, and the verdict


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean over seeds with its 90 % interval (Student's t), and the values."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return sum(self.values) / len(self.values)

    @property
    def interval(self) -> tuple[float, float]:
        """Student's t interval of the mean; unbounded for a single seed.

        Example:
            >>> low, high = Spread(values=(1.0, 2.0, 3.0)).interval
            >>> round(low, 3), round(high, 3)
            (0.314, 3.686)
        """
        count = len(self.values)
        if count < 2:
            return -math.inf, math.inf
        if not all(map(math.isfinite, self.values)):
            return math.nan, math.nan
        half = stats.t.ppf(0.5 + CONFIDENCE / 2, count - 1) * np.std(self.values, ddof=1) / math.sqrt(count)
        return self.mean - float(half), self.mean + float(half)

    def __str__(self) -> str:
        if len(self.values) == 1:
            return f"{self.mean:.3g} (one seed)"
        low, high = self.interval
        return f"{self.mean:.3g} [{low:.3g}, {high:.3g}]"


class Results:
    """The runs of a plan, by setting and seed, as far as the comparisons go."""

    def __init__(self, plan: Plan, folder: Path, *, synthetic: Path | None = None) -> None:
        self.plan = plan
        self.synthetic = synthetic
        self._runs: dict[str, list[Run]] = {}
        for planned in sorted(plan.runs, key=lambda run: run.recipe.seed):
            path = folder / planned.path
            if (path / CONFIG).exists() and (path / STATUS).exists():
                self._runs.setdefault(planned.setting, []).append(Run.load(path))

    def of(self, setting: str) -> list[Run]:
        """Runs of a setting by seed: all of them or an error that names the setting."""
        runs = [run for run in self._runs.get(setting, []) if run.status["status"] in (FINISHED, DIVERGED)]
        if len(runs) < len(self.plan.of(setting)) or not runs:
            raise MissingRuns(f"{setting} has not been trained")
        return runs

    def all_finished(self, setting: str) -> list[Run]:
        """Runs of a setting by seed; an error if one of them diverged."""
        runs = self.of(setting)
        lost = sum(run.status["status"] == DIVERGED for run in runs)
        if lost:
            raise MissingRuns(f"{lost} of {len(runs)} runs with {runs[0].recipe.label} diverged")
        return runs

    def finished(self, setting: str) -> bool:
        """Whether no seed of the setting diverged."""
        return all(run.status["status"] == FINISHED for run in self.of(setting))


class MissingRuns(ValueError):
    """A claim needs runs that are not there."""


def losses(run: Run) -> np.ndarray:
    """Running mean of the training loss over 25 steps, over the steps that are compared."""
    _, values = run.column("loss")
    values = values[: compared_steps(run.recipe) or None]
    window = min(WINDOW, len(values))
    return np.convolve(values, np.ones(window), mode="valid") / window


def final_loss(run: Run) -> float:
    """Mean training loss over the last 25 compared steps; infinity for a run that diverged."""
    return float(losses(run)[-1]) if run.status["status"] == FINISHED else math.inf


def held_out(run: Run, split: str) -> dict[str, float]:
    """The last evaluation within the compared steps."""
    last = compared_steps(run.recipe) or math.inf
    return [row for row in run.rows(split) if row["step"] <= last][-1]


def steps_to(run: Run, loss: float) -> float:
    """First step at which the running mean is at or below ``loss``; NaN if it never is."""
    below = np.flatnonzero(losses(run) <= loss)
    return float(below[0] + WINDOW) if len(below) else math.nan


def correlation(run: Run) -> float:
    """Rank correlation of smoothness and gradient norm over the compared steps."""
    whole = Trace.load(run.trace_path)
    last = compared_steps(run.recipe) or math.inf
    trace = Trace()
    for row in whole:
        if row["step"] <= last:
            trace.append({key: value for key, value in row.items() if value is not None})
    return fit_smoothness(trace, control=False).spearman


def _verdict(holds: bool, *spreads: Spread) -> str:
    """What follows if the claim ``holds`` for these means; one seed alone says nothing about a mean."""
    if any(len(spread.values) < 2 for spread in spreads):
        return NOT_TESTABLE
    return SUPPORTED if holds else NOT_SUPPORTED


def allows_large_lr(results: Results) -> Evidence:
    """Where runs diverge without clipping, and whether they do with it."""
    words, held = [], []
    for lr in ("10", "30"):
        plain, clipped = results.of(f"lm-lr{lr}"), results.of(f"lm-lr{lr}clip0.25")
        lost = [run.status["step"] for run in plain if run.status["status"] == DIVERGED]
        kept = sum(run.status["status"] == FINISHED for run in clipped)
        at = f" (at step {', '.join(map(str, lost))})" if lost else ""
        words.append(
            f"lr {lr}: {len(lost)} of {len(plain)} diverged without clipping{at}, "
            f"{len(clipped) - kept} of {len(clipped)} with it"
        )
        held.append(len(lost) == len(plain) and kept == len(clipped))
    return "; ".join(words), SUPPORTED if all(held) else NOT_SUPPORTED


def _best(results: Results, settings: Sequence[str], *, score: Callable[[Run], float] = final_loss) -> str:
    """The setting with the lowest mean score among those that no seed lost."""
    kept = [setting for setting in settings if results.finished(setting)]
    if not kept:
        raise MissingRuns("every setting diverged")
    return min(kept, key=lambda setting: np.mean([score(run) for run in results.of(setting)]))


def accelerates(results: Results) -> Evidence:
    """Steps that the best clipped setting needs to the best unclipped one's final training loss."""
    plain, clipped = _best(results, UNCLIPPED), _best(results, CLIPPED)
    ratios, ends = [], []
    for one, other in zip(results.of(plain), results.of(clipped), strict=True):
        total = len(losses(one)) + WINDOW - 1
        ratios.append(total / steps_to(other, final_loss(one)))
        ends.append(final_loss(one) - final_loss(other))
    ratio, gain = Spread(values=tuple(ratios)), Spread(values=tuple(ends))
    words = (
        f"best without clipping {_label(results, plain)}, best with {_label(results, clipped)}: the clipped "
        f"run needs {ratio} times fewer steps to the other's final loss, and ends {gain} below it"
    )
    return words, _verdict(ratio.interval[0] > 1 and gain.interval[0] > 0, ratio, gain)


def validation(results: Results) -> Evidence:
    """Validation loss of the best clipped setting against the best unclipped one, both by validation loss."""

    def loss(run: Run) -> float:
        return held_out(run, "valid")["loss"]

    plain, clipped = (_best(results, settings, score=loss) for settings in (UNCLIPPED, CLIPPED))
    ends = [[loss(run) for run in results.of(setting)] for setting in (plain, clipped)]
    gain = Spread(values=tuple(one - other for one, other in zip(*ends, strict=True)))
    words = f"validation loss of {_label(results, clipped)} is {gain} below that of {_label(results, plain)}"
    return words, _verdict(gain.interval[0] > 0, gain)


def calibrated(results: Results) -> Evidence:
    """Training with numbers measured before it, against the paper's, from the same start and batches."""
    (mine,) = results.of(CALIBRATED)
    by_hand = next(run for run in results.all_finished(BY_HAND) if run.recipe.seed == mine.recipe.seed)
    found = read_calibration(mine.folder)
    source = f"from {found.num_gradients} gradients before training" if found else "before training"
    words = f"lr {mine.recipe.lr:.3g} and max_norm {mine.recipe.max_norm:.3g} {source}"
    if mine.status["status"] == DIVERGED:
        return f"{words}: diverged at step {mine.status['step']}", NOT_SUPPORTED
    first, ends = by_hand.column("loss")[1][0], (final_loss(mine), final_loss(by_hand))
    missed = (ends[0] - ends[1]) / (first - ends[1])
    words += (
        f": final training loss {ends[0]:.3f}, with {by_hand.recipe.label} {ends[1]:.3f}, from {first:.3f} "
        f"at the start; {missed:.1%} of the way down is missed (one seed; up to {MISSED:.0%} counts as "
        "the same)"
    )
    return words, SUPPORTED if missed <= MISSED else NOT_SUPPORTED


def correlations(results: Results, large: str, small: str) -> Evidence:
    """Rank correlation of smoothness and gradient norm in two settings, seed by seed."""

    def spread(setting: str) -> Spread:
        return Spread(values=tuple(correlation(run) for run in results.all_finished(setting)))

    one, other = spread(large), spread(small)
    gain = Spread(values=tuple(a - b for a, b in zip(one.values, other.values, strict=True)))
    words = (
        f"rank correlation {one} with {_label(results, large)}, {other} with {_label(results, small)}: "
        f"{gain} higher"
    )
    return words, _verdict(gain.interval[0] > 0 and one.interval[0] > 0, gain, one)


def shares(results: Results) -> Evidence:
    """How well a tenth of the data agrees with all of it."""
    part, whole = (results.of(setting)[0] for setting in SHARES)
    gradient, smoothness = agreement(part, whole)
    words = (
        f"correlation of the two estimates over {len(gradient.steps)} iterates: gradient norm "
        f"{gradient.correlation:.3f} (median ratio {gradient.ratio:.2f}), smoothness "
        f"{smoothness.correlation:.3f} (median ratio {smoothness.ratio:.2f}); trained and measured on "
        f"{whole.status['data']}"
    )
    agree = min(gradient.correlation, smoothness.correlation) > 0.95
    return words, SUPPORTED if agree else NOT_SUPPORTED


def images_loss(results: Results) -> Evidence:
    """Final training loss of clipped descent against SGD with momentum."""
    one, other = (results.all_finished(name) for name in ("cifar-momentum", "cifar-lr5clip0.25"))
    ends = [Spread(values=tuple(final_loss(run) for run in runs)) for runs in (one, other)]
    gain = Spread(values=tuple(a - b for a, b in zip(ends[0].values, ends[1].values, strict=True)))
    words = (
        f"final training loss {ends[1]} with {other[0].recipe.label}, {ends[0]} with {one[0].recipe.label}: "
        f"{gain} lower with clipping{_sweep_in_words(results)}"
    )
    return words, _verdict(gain.interval[0] > 0, gain)


def _sweep_in_words(results: Results) -> str:
    """The best points of the sweep on images, with clipping and without; for the reader, not the verdict."""
    best = []
    for clipped in (True, False):
        points = [name for name, (_, norm) in IMAGE_SWEEP.items() if (norm < math.inf) == clipped]
        try:
            runs = [run for name in points for run in results.of(name)]
        except MissingRuns:
            return ""
        lowest = min(runs, key=final_loss)
        best.append(f"{final_loss(lowest):.3g} with {lowest.recipe.label}")
    return f"; best of a short sweep without momentum: {best[0]}, {best[1]}"


def images_accuracy(results: Results) -> Evidence:
    """Test accuracy of clipped descent against SGD with momentum."""
    one, other = (results.all_finished(name) for name in ("cifar-momentum", "cifar-lr5clip0.25"))
    ends = [Spread(values=tuple(run.rows("test")[-1]["accuracy"] for run in runs)) for runs in (one, other)]
    gain = Spread(values=tuple(b - a for a, b in zip(ends[0].values, ends[1].values, strict=True)))
    words = (
        f"test accuracy {ends[1]} % with {other[0].recipe.label}, {ends[0]} % with {one[0].recipe.label}: "
        f"{gain} points higher with clipping"
    )
    return words, _verdict(gain.interval[1] >= 0, gain)


def synthetic(results: Results) -> Evidence:
    """Final gradients on x⁴."""
    found = _numbers(results)
    low, high = found.jittered_range
    words = (
        f"|f'| after {found.config.num_steps} steps: {found.gd_grad_norm:.2g} for gradient descent, "
        f"{found.clipped_grad_norm:.2g} with clipping, a ratio of {found.ratio:.2g}; over "
        f"{found.config.num_starts} jittered starts the median is {found.jittered_ratio:.2g}, "
        f"from {low:.2g} to {high:.2g}"
    )
    return words, SUPPORTED if low > 1 else NOT_SUPPORTED


def synthetic_theory(results: Results) -> Evidence:
    """What theory predicts on x⁴, as printed and corrected."""
    found = _numbers(results)
    (row,) = (row for row in found.table if "by the bounds" in row.quantity)
    words = f"with the square root of the theorems' bounds {row.corrected}; measured {row.measured}"
    claimed, predicted = float(row.printed), float(row.corrected.rpartition(" ")[2])
    return words, SUPPORTED if claimed / 2 < predicted < claimed * 2 else NOT_SUPPORTED


def _numbers(results: Results) -> SyntheticResult:
    if results.synthetic is None or not results.synthetic.exists():
        raise MissingRuns("the synthetic experiment has not been run")
    return load_synthetic(results.synthetic)[0]


def gradients_stay(results: Results) -> Evidence:
    """Loss and gradient norm along gradient descent."""
    ratios, falls = [], []
    for run in results.all_finished(results.plan.descent[0]):
        _, norms = run.column("grad_norm")
        quarter = len(norms) // 4
        ratios.append(float(np.mean(norms[-quarter:]) / np.mean(norms[quarter : 2 * quarter])))
        falls.append(float(losses(run)[0] - losses(run)[-1]))
    ratio, fall = Spread(values=tuple(ratios)), Spread(values=tuple(falls))
    words = (
        f"with lr 2 the loss falls by {fall}; the mean gradient norm of the last quarter is {ratio} times "
        "that of the second"
    )
    return words, _verdict(fall.interval[0] > 0 and ratio.interval[1] >= 1, fall, ratio)


def ratio(results: Results) -> Evidence:
    """Gradient norms of GD over those of clipped GD, measured and predicted."""
    found = [
        compare(gd, clipped)
        for gd, clipped in zip(*map(results.all_finished, results.plan.descent), strict=True)
    ]
    measured = Spread(values=tuple(c.measured for c in found))
    corrected = Spread(values=tuple(c.corrected for c in found))
    printed = Spread(values=tuple(c.printed for c in found))
    words = (
        f"gradients of GD are {measured} times those of clipped GD; predicted {printed} as printed and "
        f"{corrected} with the square root that the theorems have"
    )
    return words, _verdict(measured.interval[0] > 1, measured)


def _label(results: Results, setting: str) -> str:
    return results.of(setting)[0].recipe.label
