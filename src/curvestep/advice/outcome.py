"""How a run went, as facts: its setting, its loss curve, what its steps did, how far the start let it go."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from curvestep.bracket import working_fraction
from curvestep.optimizer_family import Family
from curvestep.theory.theorems.clipped_sgd import clipping_floor
from curvestep.trace.history import (
    History,
    clipped_share,
    finite_max,
    finite_mean,
    finite_min,
    header_number,
    lr_of_run,
    typical,
)
from curvestep.trace.schema import FAILED, NONFINITE

FEW_ROWS = 5  # that a mean is taken over at least, and that belong to the start at most


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run went; NaN where a fact is not known."""

    family: Family  # how its optimizer steps
    lr: float  # the largest, of a schedule the peak that was set
    scheduled: bool  # whether lr changed by more than a tenth
    max_norm: float  # at which steps were clipped; inf if none was
    threshold: str = "max_norm"  # what the optimizer calls it; by another name, its rule is no plain clip
    clipped: float  # share of the steps
    floor: float  # gradient norm below which clipping keeps noisy steps from getting, at worst
    in_eval_mode: bool
    num_losses: int  # rows with a finite loss
    first_loss: float  # of the first row
    last_loss: float  # mean of the last tenth, five rows if the later half has them
    highest_loss: float  # of all finite ones
    rise: float  # of the last loss above the first, in units of the first
    end_rise: float  # likewise of the last row's batch after its step, for which a run may have been ended
    peak_rise: float  # likewise of the highest
    stood_still: bool  # no fall that noise does not explain, though steps lowered their own batches enough
    noise: float  # standard deviation of a row's loss about its neighbours, were it normal
    lost_at: int | None  # first measured step, counted from one, whose loss or gradient is not finite
    sound_until: int  # last measured step before it; 0 if there is none
    num_rows: int  # measured
    failure: str  # why the first measurement failed that did; empty if none did
    kappa: float  # change of the gradient over a step over its norm, median of late steps near the peak lr
    agreement: float  # cosine of late steps with their batch's descent: with momentum noise turns them away
    efficiency: float  # fall of a batch's loss in its step over what a straight line predicts, likewise
    start_factor: float  # largest working step at the start over the step that the peak lr takes there


def outcome_of(history: History) -> Outcome:
    """How the run with these rows went."""
    with np.errstate(all="ignore"):  # a lost run's numbers overflow
        return Outcome(**_setting(history), **_loss_curve(history), **_steps(history))


def _setting(history: History) -> dict[str, Any]:
    header, lr = history.header, lr_of_run(history.header, history.lr)
    clip = history.clip_norm[history.ok]
    max_norm, clipped = typical(clip, missing=math.inf), clipped_share(history.step[history.ok], clip)
    floor, noise = math.nan, typical(history.columns["noise"])
    if history.threshold != "max_norm":  # it shortens every step, by a rule without a corner
        older = header_number(header, "offset", missing=max_norm)
        max_norm = header_number(header, "max_norm", missing=older)
    elif clipped > 0 and noise >= 0:
        floor = clipping_floor(noise, max_norm)
    return {
        "family": history.family,
        "lr": lr,
        "scheduled": finite_min(history.lr) < 0.9 * lr,
        "max_norm": max_norm,
        "threshold": history.threshold,
        "clipped": clipped,
        "floor": floor,
        "in_eval_mode": header.get("training_mode") is False,
    }


def _loss_curve(history: History) -> dict[str, Any]:
    loss, after, broken = history.loss, history.columns["loss_after"], history.columns["status"] == NONFINITE
    known = np.flatnonzero(np.isfinite(loss))
    lost = np.flatnonzero((~np.isfinite(loss) & ~history.failed) | broken)
    if not len(known) and not broken.any():
        lost = lost[:0]  # nobody recorded the loss
    sound = history.step[: np.min(lost, initial=len(loss))]
    part = max(FEW_ROWS, len(known) // 10)
    start, last = loss[known[:part]], loss[_later_half(known, history.step)[-part:]]
    noise = 1.05 * typical(np.abs(np.diff(loss[known])))
    clear = 2 * noise * math.sqrt(1 / max(1, len(start)) + 1 / max(1, len(last)))
    num_steps = float(np.max(history.step, initial=0) - np.min(history.step, initial=math.inf))
    own_fall = finite_mean((loss - after)[history.ok])
    first, final = finite_mean(start[:1]), finite_mean(last)
    highest, scale = float(np.max(loss[known], initial=-math.inf)), max(abs(first), 1e-300)
    fell = finite_mean(start) - final > clear
    return {
        "num_losses": len(known),
        "first_loss": first,
        "last_loss": final,
        "highest_loss": highest,
        "rise": (final - first) / scale,
        "end_rise": (finite_mean(after[-1:]) - first) / scale,
        "peak_rise": (highest - first) / scale,
        "stood_still": own_fall * num_steps > clear and not fell,
        "noise": noise,
        "lost_at": int(history.step[lost[0]]) + 1 if len(lost) else None,
        "sound_until": int(np.max(sound, initial=-1)) + 1,
    }


def _steps(history: History) -> dict[str, Any]:
    rows = history.columns
    length, norm = rows["step_norm"], rows["grad_norm"]
    kappa = np.where(np.isfinite(rows["kappa"]), rows["kappa"], rows["smoothness"] * length / norm)
    share = history.lr / finite_max(history.lr)
    share[~np.isfinite(share)] = 1.0
    measured = history.ok & np.isfinite(kappa)
    # Of a schedule, what lies above the median is the half around its peak.
    near = np.flatnonzero(measured & (share >= typical(share)))
    late = near[-max(FEW_ROWS, len(_later_half(near, history.step))) :]
    cosine = np.where(np.isfinite(rows["cosine"]), rows["cosine"], 1.0)
    promise = cosine * norm * length
    fall = rows["loss"] - rows["loss_after"]
    # Without training's own loss the row holds that after the step, twice: then the trapezoidal rule.
    if not np.nanmax(np.abs(fall[late]), initial=0.0) > 0:
        fall = promise - rows["curvature"] * length**2 / 2
    return {
        "num_rows": int(measured.sum()),
        "failure": next(iter(rows["status"][history.failed]), "").removeprefix(FAILED),
        "kappa": typical(kappa[late]),
        "agreement": typical(cosine[late]),
        "efficiency": typical(fall[late]) / typical(promise[late]),
        "start_factor": _start_factor(history, kappa, fall / promise, share),
    }


def _start_factor(history: History, kappa: np.ndarray, efficiency: np.ndarray, share: np.ndarray) -> float:
    """Median over the first rows, up to the first step that does not work: beyond it the run is elsewhere."""
    rows, fractions = history.columns, history.columns["fractions"]
    along = np.full(fractions.shape, math.nan)  # κ at these fractions of each step
    if along.shape == rows["secants"].shape:
        along = rows["secants"] * fractions * rows["step_norm"][:, None] / rows["grad_norm"][:, None]
    momentum = header_number(history.header, "momentum", missing=0.0)  # of SGD: Adam corrects for its own
    factors: list[float] = []
    for row, step in enumerate(history.step[:FEW_ROWS]):
        at, values = [1.0], [float(kappa[row])]
        known = np.isfinite(along[row]) & (along[row] > 0)
        if known.any():
            at, values = fractions[row][known].tolist(), along[row][known].tolist()
        if not math.isfinite(values[0]) or history.step[0] > 0:
            break
        works = working_fraction(at, values, efficiency[row])
        built_up = 1 - momentum ** (step + 1)  # of the length that momentum gives to steps
        factors.append(share[row] * built_up * works)
        if works < 1:
            break
    return typical(np.array(factors))


def _later_half(rows: np.ndarray, steps: np.ndarray) -> np.ndarray:
    return rows[steps[rows] >= (steps[rows[:1]] + steps[rows[-1:]]) / 2]
