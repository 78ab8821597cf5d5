"""How a run went, as facts: its setting, its loss curve, what its steps did, how far the start let it go."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
    """How a run went; NaN where a fact is not known.

    Attributes:
        optimizer: Class of the optimizer, empty where nobody wrote it down.
        family: How it steps.
        lr: The largest learning rate.
        scheduled: Whether lr changed by more than a tenth.
        max_norm: Norm at which steps were clipped, of NormalizedSGD the offset; inf if none was.
        clipped: Share of the measured steps that were clipped.
        in_eval_mode: Whether the model was in eval mode.
        num_rows: Measured rows.
        num_losses: Rows with a finite loss.
        failure: Why the first measurement failed that did; empty if none did.
        first_loss: Of the first row.
        last_loss: Mean of the last tenth, five rows at least.
        end_loss: Of the last row's batch after its step: a run may have been ended because of it.
        highest_loss: Of all finite ones.
        fell: Whether the last losses lie below as many first ones, by two standard errors.
        should_have_fallen: Whether they would, had the steps lowered other batches as they did their own.
        spread: Standard error of the last loss.
        lost_at: First step, counted from one, whose loss or gradient is not finite; None if all are.
        kappa: Change of the gradient over a step relative to its norm, median of the later half of
            the steps with the larger lr.
        efficiency: What a step took off the loss of its own batch over what the slope promised, likewise.
        start_factor: Largest working step at the start over the step that the peak lr takes there.
        floor: Gradient norm below which clipping keeps noisy steps from getting, at worst.
    """

    optimizer: str
    family: Family
    lr: float
    scheduled: bool
    max_norm: float
    clipped: float
    in_eval_mode: bool
    num_rows: int
    num_losses: int
    failure: str
    first_loss: float
    last_loss: float
    end_loss: float
    highest_loss: float
    fell: bool
    should_have_fallen: bool
    spread: float
    lost_at: int | None
    kappa: float
    efficiency: float
    start_factor: float
    floor: float


def outcome_of(history: History) -> Outcome:
    """How the run with these rows went."""
    with np.errstate(all="ignore"):  # a lost run's numbers overflow
        setting, steps = _setting(history), _steps(history)
        return Outcome(**setting, **_loss_curve(history), **steps, start_factor=_start_factor(history))


def peak(rates: np.ndarray) -> tuple[float, bool]:
    """The largest learning rate of a run, and whether it changed by more than a tenth; NaN if none is known.

    Example:
        >>> peak(np.array([0.1, 0.3, 0.2])), peak(np.array([0.3, 0.3]))
        ((0.3, True), (0.3, False))
    """
    known = rates[np.isfinite(rates)]
    if not len(known):
        return math.nan, False
    return float(known.max()), bool(known.min() < 0.9 * known.max())


def _setting(history: History) -> dict[str, Any]:
    header, rows = history.header, history.columns
    lr, scheduled = peak(history.lr)
    name = header.get("optimizer") or next((word for word in rows["optimizer"] if word is not None), "")
    word = header.get("optimizer_family")
    family = Family(word) if word in list(Family) else family_of(name)
    clip = history.clip_norm[history.ok]
    known = clip[~np.isnan(clip)]
    max_norm, clipped = typical_clip_norm(clip), _mean(np.isfinite(known))
    if family is Family.NORMALIZED:  # it shortens every step, by a rule without an edge
        max_norm, clipped = _number(header, "offset", max_norm), 0.0
    noise = _median(rows["noise"])
    floor = math.nan
    if clipped > 0 and noise >= 0:
        floor = clipping_floor(noise, max_norm)
    return {
        "optimizer": str(name),
        "family": family,
        "lr": lr,
        "scheduled": scheduled,
        "max_norm": max_norm,
        "clipped": clipped,
        "in_eval_mode": header.get("training_mode") is False,
        "floor": floor,
    }


def _loss_curve(history: History) -> dict[str, Any]:
    loss = history.loss
    losses = loss[np.isfinite(loss)]
    failed = np.array(list(map(_is_failure, history.columns["status"])), dtype=bool)  # these have no loss
    lost = (~np.isfinite(loss) & ~failed) | (history.columns["status"] == NONFINITE)
    if not len(losses) and not (history.columns["status"] == NONFINITE).any():
        lost = np.zeros(len(loss), dtype=bool)  # nobody recorded the loss
    part = max(FEW_ROWS, len(losses) // 10)
    start, last = losses[:part], losses[-part:]
    clear = 2 * math.hypot(_error(start), _error(last))
    own_falls = (loss - history.columns["loss_after"])[history.ok]
    steps = float(np.ptp(history.step)) if len(loss) else 0.0
    return {
        "num_losses": len(losses),
        "first_loss": float(losses[0]) if len(losses) else math.nan,
        "last_loss": _mean(last),
        "end_loss": float(history.columns["loss_after"][-1]) if len(loss) else math.nan,
        "highest_loss": float(losses.max(initial=-math.inf)),
        "fell": _mean(start) - _mean(last) > clear,
        "should_have_fallen": _mean(own_falls[np.isfinite(own_falls)]) * steps > clear,
        "spread": _error(last),
        "lost_at": int(history.step[np.argmax(lost)]) + 1 if lost.any() else None,
    }


def _steps(history: History) -> dict[str, Any]:
    """Effect of the steps in the later half of those with the larger lr."""
    rows, kappa = history.columns, _kappa(history)
    measured = history.ok & np.isfinite(kappa)
    share = _share_of_peak(history.lr)
    middle = _median(share)  # of a schedule, what lies above it is the half around its peak
    near = np.flatnonzero(measured & (share >= middle))
    late = _later_half(near, history.step)
    length = rows["step_norm"][late]
    cosine = np.where(np.isfinite(rows["cosine"]), rows["cosine"], 1.0)[late]  # 1 along the gradient
    promise = cosine * rows["grad_norm"][late] * length
    fall = (rows["loss"] - rows["loss_after"])[late]
    # Without training's own loss the row holds that after the step, twice. Then the gradients at both ends
    # of the step have to do, by the trapezoidal rule.
    if not np.nanmax(np.abs(fall), initial=0.0) > 0:
        fall = promise - rows["curvature"][late] * length**2 / 2
    return {
        "num_rows": int(measured.sum()),
        "failure": next((str(word)[len(FAILED) :] for word in rows["status"] if _is_failure(word)), ""),
        "kappa": _median(kappa[late]),
        "efficiency": _median(fall) / _median(promise),
    }


def _is_failure(status: object) -> bool:
    return isinstance(status, str) and status.startswith(FAILED)


def _kappa(history: History) -> np.ndarray:
    rows = history.columns
    return np.where(
        np.isfinite(rows["kappa"]), rows["kappa"], rows["smoothness"] * rows["step_norm"] / rows["grad_norm"]
    )


def _start_factor(history: History) -> float:
    """Median over the first rows, up to the first step that does not work: beyond it the run is elsewhere."""
    rows, kappa, share = history.columns, _kappa(history), _share_of_peak(history.lr)
    if not len(kappa) or rows["step"][0] > 0:
        return math.nan
    momentum = _number(history.header, "momentum", 0.0)  # of SGD: Adam corrects for its own
    factors = []
    for row in np.flatnonzero(np.isfinite(kappa))[:FEW_ROWS]:
        at, values = _kappa_along(history, row)
        if not len(at):
            at, values = np.ones(1), kappa[row : row + 1]
        built_up = 1 - momentum ** (rows["step"][row] + 1)  # of the length that momentum gives to steps
        factors.append(share[row] * built_up * working_fraction(at.tolist(), values.tolist()))
        if kappa[row] > 1:
            break
    return _median(np.array(factors))


def _share_of_peak(rates: np.ndarray) -> np.ndarray:
    """The learning rate of each row, as a share of the largest; 1 where it is not known."""
    share = rates / peak(rates)[0]
    return np.where(np.isfinite(share), share, 1.0)


def _later_half(rows: np.ndarray, steps: np.ndarray) -> np.ndarray:
    if not len(rows):
        return rows
    return rows[steps[rows] >= (steps[rows[0]] + steps[rows[-1]]) / 2]


def _kappa_along(history: History, row: int) -> tuple[np.ndarray, np.ndarray]:
    """Fractions of a step, of its row or of the header, and κ there; both empty where that is unknown."""
    rows, secants = history.columns, history.columns["secants"][row]
    fractions = np.asarray(rows.get("fractions", np.empty((row + 1, 0)))[row])
    given = history.header.get("fractions")
    if not np.isfinite(fractions).any() and isinstance(given, (list, tuple)):
        fractions = np.array([value if isinstance(value, (int, float)) else math.nan for value in given])
    if len(fractions) != len(secants):
        return np.empty(0), np.empty(0)
    known = np.isfinite(fractions) & np.isfinite(secants)
    at = fractions[known]
    return at, secants[known] * at * rows["step_norm"][row] / rows["grad_norm"][row]


def _number(header: Mapping[str, Any], name: str, missing: float) -> float:
    value = header.get(name)
    return float(value) if isinstance(value, (int, float)) else missing


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else math.nan


def _error(values: np.ndarray) -> float:
    """Standard error of the mean."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def _median(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else math.nan
