r"""Numbers of a run that the paper's claims are about: correlation, exponent, losses, steps to a loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from curvestep.report.results import running_mean
from curvestep.trace.history import best_setting
from curvestep.trace.run import FINISHED
from curvestep.trace.schema import LEAST_ROWS
from curvestep_reproduction.claims.claims import MissingRuns, Spread
from curvestep_reproduction.cost import steps_of
from curvestep_reproduction.figures.plan import Results
from curvestep_reproduction.training.run_folder import TrainedRun

# Steps in the running mean that reaches a loss: a twentieth of the run, from the first to the second.
LEAST_WINDOW = 1
MOST_WINDOW = 50
ROUNDING = 1e-9  # relative error of a mean of losses
MOST_CORRELATION = 1 - 1e-9  # Fisher's z of it is finite


def measured(run: TrainedRun, *, fraction: int | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps, gradient norms and smoothness of the rows that can stand on a logarithmic axis.

    Smoothness is the paper's, the largest over all fractions of the step; or that of one of them, by number.
    """
    if not run.trace_path.exists():
        return np.array([]), np.array([]), np.array([])
    trace = run.trace
    smoothness = trace.column("smoothness") if fraction is None else trace.column("secants")[:, fraction]
    rows = np.array([trace.column("step"), trace.column("grad_norm"), smoothness])
    usable = trace.ok & np.isfinite(rows).all(axis=0) & (rows[1:] > 0).all(axis=0)
    steps, norms, smoothness = rows[:, usable]
    return steps, norms, smoothness


def log_rows(
    run: TrainedRun, *, past: float = 0.0, fraction: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms of gradient norm and smoothness, each less its mean over its stretch of constant lr.

    Rows of the first part of the run (``past``, a share) are left out; ``fraction`` as in :func:`measured`.
    """
    steps, norms, smoothness = measured(run, fraction=fraction)
    finished = run.status["status"] == FINISHED
    total = run.status["step"] if finished else steps_of(run.recipe)
    kept = steps >= past * total
    if kept.sum() < LEAST_ROWS:
        raise MissingRuns(f"{run.folder.name} has {kept.sum()} usable rows, {LEAST_ROWS} are needed")
    stretch = np.searchsorted(total * np.array(run.recipe.lr_drops), steps[kept], side="right")
    return _centred(np.log(norms[kept]), stretch), _centred(np.log(smoothness[kept]), stretch)


def _centred(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Values less the mean of their group."""
    return values - (np.bincount(groups, values) / np.bincount(groups))[groups]


def correlation(run: TrainedRun, *, past: float = 0.0, fraction: int | None = None) -> float:
    r"""Pearson's correlation of :math:`\log\lVert g\rVert` and :math:`\log\hat L`.

    Within stretches of constant lr: between them all of it changes at once, whatever the landscape.
    """
    x, y = log_rows(run, past=past, fraction=fraction)
    return float(x @ y / math.sqrt((x @ x) * (y @ y)))


def fisher_z(r: float) -> float:
    r"""Fisher's :math:`z = \operatorname{artanh} r`, whose error hardly depends on :math:`r`."""
    return math.atanh(max(-MOST_CORRELATION, min(r, MOST_CORRELATION)))


def correlations(runs: Sequence[TrainedRun], *, past: float = 0.0, fraction: int | None = None) -> Spread:
    """Fisher's z of the correlation of logs over the seeds."""
    return spread(runs, lambda run: fisher_z(correlation(run, past=past, fraction=fraction)))


def as_correlation(z: Spread) -> str:
    """A spread of Fisher's z in words, as correlations: mean and interval.

    Example:
        >>> as_correlation(Spread(values=(0.5, 0.6, 0.7)))
        '0.54 [0.41, 0.65]'
        >>> as_correlation(Spread(values=(0.5,)))
        '0.46, one seed'
    """
    low, high = z.interval
    one = ", one seed" if len(z.values) == 1 else ""
    if math.isinf(high):
        return f"{math.tanh(z.mean):.2f}{one}"
    return f"{math.tanh(z.mean):.2f} [{math.tanh(low):.2f}, {math.tanh(high):.2f}]{one}"


def exponent(run: TrainedRun) -> float:
    r"""Slope of :math:`\log\hat L` on :math:`\log\lVert g\rVert`, within stretches of constant lr."""
    x, y = log_rows(run)
    return float(x @ y / (x @ x))


def variation(run: TrainedRun) -> float:
    """The 95 % quantile of smoothness along the run over the 5 % quantile."""
    low, high = np.quantile(measured(run)[2], [0.05, 0.95])
    return float(high / low)


def typical_smoothness(run: TrainedRun) -> float:
    """Median of smoothness along the run."""
    return float(np.median(measured(run)[2]))


def clipped_share(run: TrainedRun) -> float:
    """Share of the training steps that were clipped."""
    _, coefficients = run.column("coefficient")
    return float((coefficients < run.recipe.rule.bends_below * (1 - ROUNDING)).mean())


def control_exponents(runs: Sequence[TrainedRun]) -> Spread:
    """The exponents that constant Hessians show with the runs' own steps and noise, and their limits."""
    known = [run.fit.control for run in runs if run.fit.control is not None]
    if len(known) < len(runs):
        raise MissingRuns(f"of {len(runs) - len(known)} runs a step length is unknown: there is no control")
    exponents = np.array([control.exponent for control in known])
    ends = np.array([control.exponent_interval for control in known])
    below, above = np.abs(ends - exponents[:, None]).mean(axis=0)
    return Spread(values=tuple(exponents.tolist()), doubt=(float(below), float(above)))


def elasticity_beyond_zero(run: TrainedRun) -> float:
    """How smoothness follows the gradient norm inside single steps, less its shuffled zero."""
    within = run.fit.within
    if within.missing:
        raise MissingRuns(str(within.missing))
    return within.elasticity - within.zero


def spread(runs: Sequence[TrainedRun], statistic: Callable[[TrainedRun], float]) -> Spread:
    """A statistic over the seeds."""
    return Spread(values=tuple(statistic(run) for run in runs))


def log_spread(runs: Sequence[TrainedRun], statistic: Callable[[TrainedRun], float]) -> Spread:
    """The logarithm of a positive statistic over the seeds."""
    return Spread(values=tuple(math.log(statistic(run)) for run in runs))


def final_loss(run: TrainedRun) -> float:
    """The training loss at the end; infinity for a run that diverged."""
    return _if_finished(run, run.status["train_loss"])


def validation_loss(run: TrainedRun) -> float:
    """The last validation loss; infinity for a run that diverged."""
    return _if_finished(run, *(row["loss"] for row in run.rows("valid")[-1:]))


def _if_finished(run: TrainedRun, loss: float = math.inf) -> float:
    return float(loss) if run.status["status"] == FINISHED else math.inf


def accuracy(run: TrainedRun) -> float:
    """Test accuracy at the end, in per cent."""
    return float(run.rows("test")[-1]["accuracy"])


def late_over_early(run: TrainedRun) -> float:
    """Mean gradient norm of the last quarter of the run over that of the second."""
    steps, norms, _ = measured(run)
    total = run.status["step"]
    early = norms[(steps > total / 4) & (steps <= total / 2)]
    return float(norms[steps > 3 * total / 4].mean() / early.mean())


def steps_to(run: TrainedRun, loss: float) -> float:
    """First step at which the mean over as many steps as a final loss has is at most ``loss``; or NaN."""
    steps, losses = run.column("loss")
    window = round(min(max(steps[-1] / 20, LEAST_WINDOW), MOST_WINDOW))
    steps, means = running_mean(steps, losses, window)
    enough = loss + ROUNDING * abs(loss)  # a run reaches its own final loss
    reached = steps[(means <= enough) & (steps >= window)]
    return float(next(iter(reached), math.nan))


def speed_up(plain: TrainedRun, clipped: TrainedRun) -> float:
    """How many times fewer steps the clipped run needs to the other's final loss; below 1 if it is slower."""
    steps = steps_to(clipped, final_loss(plain))
    if math.isfinite(steps):
        return plain.status["step"] / steps
    return steps_to(plain, final_loss(clipped)) / clipped.status["step"]


def missed_share(run: TrainedRun, other: TrainedRun) -> float:
    """How much of the way down that one run went another one missed."""
    first = float(run.column("loss")[1][0])
    return (final_loss(other) - final_loss(run)) / (first - final_loss(run))


def best_of(
    results: Results, settings: Sequence[str], score: Callable[[TrainedRun], float] = final_loss
) -> str:
    """The setting with the lowest mean score among those of the plan that no seed lost."""
    planned = [setting for setting in settings if results.plan.of(setting)]
    return best_setting({setting: [score(run) for run in results.of(setting)] for setting in planned})
