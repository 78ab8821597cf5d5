"""How a run went, as facts: its setting, its loss curve, what its steps did, how far the start let it go."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from curvestep.bracket import working_fraction
from curvestep.fit.samples import History, typical_clip_norm
from curvestep.optimizer_family import Family, family_of
from curvestep.smoothness.trace import FAILED, NONFINITE
from curvestep.theory.theorems.clipping_floor import clipping_floor

FEW_ROWS = 5  # that a mean is taken over at least, and that belong to the start at most


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run went; NaN where a fact is not known."""

    family: Family  # how its optimizer steps
    lr: float  # the largest, of a schedule the peak that was set
    scheduled: bool  # whether lr changed by more than a tenth
    max_norm: float  # at which steps were clipped, of NormalizedSGD the offset; inf if none was
    clipped: float  # share of the measured steps
    floor: float  # gradient norm below which clipping keeps noisy steps from getting, at worst
    in_eval_mode: bool
    num_losses: int  # rows with a finite loss
    first_loss: float  # of the first row
    last_loss: float  # mean of the last tenth, five rows if the later half has them
    end_loss: float  # of the last row's batch after its step: a run may have been ended because of it
    highest_loss: float  # of all finite ones
    fell: bool  # whether the last losses lie below the first ones, by two standard errors
    should_have_fallen: bool  # whether they would, had steps lowered other batches as they did their own
    noise: float  # standard deviation of a row's loss about its neighbours
    lost_at: int | None  # first measured step, counted from one, whose loss or gradient is not finite
    sound_until: int  # last measured step before it; 0 if there is none
    num_rows: int  # measured
    failure: str  # why the first measurement failed that did; empty if none did
    kappa: float  # change of the gradient over a step over its norm, median of late steps near the peak lr
    agreement: float  # cosine of late steps with their batch's descent: with momentum noise turns them away
    efficiency: float  # fall of the loss of a step's own batch over what the slope promised, likewise
    start_factor: float  # largest working step at the start over the step that the peak lr takes there


def lr_of_run(header: Mapping[str, object], rates: np.ndarray) -> float:
    """Its largest lr: the peak that its schedule was set to, where measured steps reach half of that."""
    largest = _of_known(np.max, rates)
    peak = _number(header.get("peak_lr"), largest)
    return peak if largest < peak <= 2 * largest else largest


def outcome_of(history: History) -> Outcome:
    """How the run with these rows went."""
    with np.errstate(all="ignore"):  # a lost run's numbers overflow
        return Outcome(**_setting(history), **_loss_curve(history), **_steps(history))


def _setting(history: History) -> dict[str, Any]:
    header, rows = history.header, history.columns
    lr = lr_of_run(header, history.lr)
    word = header.get("optimizer_family")
    if word not in list(Family):  # an older trace has the name
        word = family_of(header.get("optimizer") or next(filter(None, rows["optimizer"]), ""))
    family = Family(word)
    clip = history.clip_norm[history.ok]
    max_norm, clipped = typical_clip_norm(clip), _of_known(np.mean, np.isfinite(clip[~np.isnan(clip)]))
    if family is Family.NORMALIZED:  # it shortens every step, by a rule without an edge
        max_norm, clipped = _number(header.get("offset"), max_norm), 0.0
    noise = _of_known(np.median, rows["noise"])
    return {
        "family": family,
        "lr": lr,
        "scheduled": _of_known(np.min, history.lr) < 0.9 * lr,
        "max_norm": max_norm,
        "clipped": clipped,
        "floor": clipping_floor(noise, max_norm) if clipped > 0 and noise >= 0 else math.nan,
        "in_eval_mode": header.get("training_mode") is False,
    }


def _loss_curve(history: History) -> dict[str, Any]:
    loss, after, broken = history.loss, history.columns["loss_after"], history.columns["status"] == NONFINITE
    known = np.flatnonzero(np.isfinite(loss))
    lost = np.flatnonzero((~np.isfinite(loss) & ~_failed(history)) | broken)
    if not len(known) and not broken.any():
        lost = lost[:0]  # nobody recorded the loss
    sound = history.step[: np.min(lost, initial=len(loss))]
    part = max(FEW_ROWS, len(known) // 10)
    start, last = loss[known[:part]], loss[_later_half(known, history.step)[-part:]]
    # Of a row: the standard deviation, were it normal.
    noise = 1.05 * _of_known(np.median, np.abs(np.diff(loss[known])))
    clear = 2 * noise * math.sqrt(1 / max(1, len(start)) + 1 / max(1, len(last)))
    num_steps = float(np.max(history.step, initial=0) - np.min(history.step, initial=math.inf))
    own_fall = _of_known(np.mean, (loss - after)[history.ok])
    return {
        "num_losses": len(known),
        "first_loss": _of_known(np.mean, start[:1]),
        "last_loss": _of_known(np.mean, last),
        "end_loss": _of_known(np.mean, after[-1:]),
        "highest_loss": float(np.max(loss[known], initial=-math.inf)),
        "fell": _of_known(np.mean, start) - _of_known(np.mean, last) > clear,
        "should_have_fallen": own_fall * num_steps > clear,
        "noise": noise,
        "lost_at": int(history.step[lost[0]]) + 1 if len(lost) else None,
        "sound_until": int(np.max(sound, initial=-1)) + 1,
    }


def _steps(history: History) -> dict[str, Any]:
    """Effect of the steps in the later half of those with the larger lr, and of the first."""
    rows = history.columns
    length, norm = rows["step_norm"], rows["grad_norm"]
    kappa = np.where(np.isfinite(rows["kappa"]), rows["kappa"], rows["smoothness"] * length / norm)
    share = history.lr / _of_known(np.max, history.lr)
    share[~np.isfinite(share)] = 1.0
    measured = history.ok & np.isfinite(kappa)
    # Of a schedule, what lies above the median is the half around its peak.
    near = np.flatnonzero(measured & (share >= _of_known(np.median, share)))
    late = near[-max(FEW_ROWS, len(_later_half(near, history.step))) :]
    cosine = np.where(np.isfinite(rows["cosine"]), rows["cosine"], 1.0)
    promise = cosine * norm * length
    fall = rows["loss"] - rows["loss_after"]
    # Without training's own loss the row holds that after the step, twice. Then the gradients at both ends
    # of the step have to do, by the trapezoidal rule.
    if not np.nanmax(np.abs(fall[late]), initial=0.0) > 0:
        fall = promise - rows["curvature"] * length**2 / 2
    failures = rows["status"][_failed(history)]
    return {
        "num_rows": int(measured.sum()),
        "failure": failures[0].removeprefix(FAILED) if len(failures) else "",
        "kappa": _of_known(np.median, kappa[late]),
        "agreement": _of_known(np.median, cosine[late]),
        "efficiency": _of_known(np.median, fall[late]) / _of_known(np.median, promise[late]),
        "start_factor": _start_factor(history, kappa, fall / promise, share),
    }


def _start_factor(history: History, kappa: np.ndarray, efficiency: np.ndarray, share: np.ndarray) -> float:
    """Median over the first rows, up to the first step that does not work: beyond it the run is elsewhere."""
    momentum = _number(history.header.get("momentum"), 0.0)  # of SGD: Adam corrects for its own
    factors: list[float] = []
    for row, step in enumerate(history.step[:FEW_ROWS]):
        at, values = _kappa_along(history, row, kappa[row])
        if not math.isfinite(values[0]) or history.step[0] > 0:
            break
        works = working_fraction(at, values, efficiency[row])
        built_up = 1 - momentum ** (step + 1)  # of the length that momentum gives to steps
        factors.append(share[row] * built_up * works)
        if works < 1:
            break
    return _of_known(np.median, np.array(factors))


def _kappa_along(history: History, row: int, whole: float) -> tuple[list[float], list[float]]:
    """Fractions of a step and κ there; the whole step where none is known."""
    rows, secants = history.columns, history.columns["secants"][row]
    fractions = rows["fractions"][row]
    if len(fractions) == len(secants):
        along = secants * fractions * rows["step_norm"][row] / rows["grad_norm"][row]
        known = np.isfinite(along) & (along > 0)
        if known.any():
            return fractions[known].tolist(), along[known].tolist()
    return [1.0], [float(whole)]


def _failed(history: History) -> np.ndarray:
    """Which rows tell of a measurement that failed; they have no loss."""
    return np.array([str(word).startswith(FAILED) for word in history.columns["status"]], dtype=bool)


def _later_half(rows: np.ndarray, steps: np.ndarray) -> np.ndarray:
    return rows[steps[rows] >= (steps[rows[:1]] + steps[rows[-1:]]) / 2]


def _number(value: object, missing: float) -> float:
    return float(value) if isinstance(value, (int, float)) else missing


def _of_known(how: Callable[[np.ndarray], Any], values: np.ndarray) -> float:
    """A mean, median or end of the finite values; NaN if there is none."""
    known = values[np.isfinite(values)]
    return float(how(known)) if len(known) else math.nan
