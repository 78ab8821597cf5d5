"""How a run went, as facts: its setting, its loss curve, what its steps did, how far the start let it go."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from curvestep.optimizer_family import Family
from curvestep.steps import LEAST_FALL
from curvestep.trace.columns import is_number
from curvestep.trace.history import (
    clipped_share,
    finite_max,
    finite_mean,
    finite_min,
    header_number,
    lr_of_run,
    optimizer_family,
    threshold_name,
    typical,
)
from curvestep.trace.schema import ESTIMATORS, FAILED, LEAST_ROWS, NONFINITE
from curvestep.trace.trace import Trace

LOST_RISE = 2.0  # of the loss above the first, in units of the first: to three times of it
FEW_ROWS = 5  # that a mean is taken over at least, and that belong to the start at most
NORMAL_SPREAD = 1.05  # standard deviation over the median distance of neighbours, of normal noise


@dataclass(frozen=True, kw_only=True)
class SettingFacts:
    """What a run was set to."""

    family: Family  # how its optimizer steps
    lr: float  # the largest, of a schedule the peak that was set
    scheduled: bool  # whether lr changed by more than a tenth
    max_norm: float  # the threshold of clipping; inf without one, NaN if it is not known
    threshold: str = "max_norm"  # what the optimizer calls it; by another name, its rule is no plain clip
    clipped: float  # share of the steps
    floor: float  # gradient norm below which clipping keeps noisy steps from getting, at worst
    in_eval_mode: bool
    idle_peak: float = math.nan  # the schedule's, where lr stayed at less than half of it and never changed
    first_step: int = 0  # of the rows
    num_spikes: int = 0  # of the gradient norm, as the optimizer logged them
    worst_spike: int = -1  # the step of the largest


@dataclass(frozen=True, kw_only=True)
class LossFacts:
    """How its loss went."""

    num_losses: int  # rows with a finite loss
    first_loss: float  # of the first row
    last_loss: float  # mean of the last tenth, five rows if the later half has them
    highest_loss: float  # also after the last step; inf if one was not finite
    rise: float  # of the last loss above the first, in units of the first
    end_rise: float  # likewise of the last row's batch after its step, for which a run may have been ended
    peak_rise: float  # likewise of the highest of the rows
    stood_still: bool  # no fall that noise does not explain, though steps lowered their own batches enough
    starts_below_zero: bool = False  # the first rows go below zero, as a policy's loss does: it has no scale
    noise: float  # standard deviation of a row's loss about its neighbours, were it normal
    nonfinite_at: int | None  # first measured step, counted from one, whose loss or gradient is not finite
    finite_until: int  # last measured step before it; 0 if there is none


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """What its steps did."""

    num_rows: int  # measured
    failure: str  # why the first measurement failed that did; empty if none did
    kappa: float  # change of the gradient over a step over its norm, median of late steps near the peak lr
    agreement: float  # cosine of late steps with their batch's descent: with momentum noise turns them away
    efficiency: float  # fall of a batch's loss in its step over what a straight line predicts, likewise
    start_factor: float  # largest working step at the start over the step that the peak lr takes there
    from_start: bool = True  # whether the rows begin with the run
    stable_lr: float = (
        math.nan
    )  # below the stability limit of every sharpness in the rows; NaN if none is known
    has_spectral: bool = False  # whether it counts directions that no step took


@dataclass(frozen=True, kw_only=True)
class Outcome(SettingFacts, LossFacts, StepFacts):
    """How a run went; NaN where a fact is not known."""


def outcome_of(trace: Trace) -> Outcome:
    """How the run with these rows went."""
    with np.errstate(all="ignore"):  # a diverged run's numbers overflow
        return Outcome(**vars(_setting(trace)), **vars(_loss_curve(trace)), **vars(_steps(trace)))


def _setting(trace: Trace) -> SettingFacts:
    header = trace.header
    rates = trace.column("lr")
    lr = lr_of_run(header, rates)
    clip = trace.clip_norm[trace.ok]
    clipped = clipped_share(trace.column("step")[trace.ok], clip)
    max_norm = typical(clip, missing=math.inf)
    threshold = threshold_name(trace)
    floor = math.nan
    if threshold != "max_norm":  # it shortens every step, by a rule without a corner
        older = header_number(header, "offset", missing=max_norm)
        max_norm = header_number(header, "max_norm", missing=older)
    elif header.get("clipping") == "norm":
        max_norm = header_number(header, "max_norm", missing=max_norm)
    elif _is_oracle(header) and clipped > 0:
        max_norm = math.nan  # these norms are not those that were clipped
    if threshold == "max_norm" and clipped > 0:
        floor = _floor_of_clipping(typical(trace.column("noise")), max_norm)
    return SettingFacts(
        family=optimizer_family(trace),
        lr=lr,
        scheduled=finite_min(rates) < 0.9 * lr,
        max_norm=max_norm,
        threshold=threshold,
        clipped=clipped,
        floor=floor,
        in_eval_mode=header.get("training_mode") is False,
        idle_peak=_idle_peak(trace),
        first_step=int(finite_min(trace.column("step")[:1])) if len(trace) and trace.ok.any() else 0,
        **_spike_facts(trace),
    )


def _spike_facts(trace: Trace) -> dict[str, int]:
    spikes = [spike for spike in trace.spikes if is_number(spike.get("grad_norm"))]
    if not spikes:
        return {}
    worst = max(spikes, key=lambda spike: spike["grad_norm"])
    return {"num_spikes": len(spikes), "worst_spike": int(worst["step"])}


def _is_oracle(header: Mapping[str, object]) -> bool:
    """Whether rows were measured on other batches than training's."""
    return header.get("measured_on") not in (None, "training batch")


def _idle_peak(trace: Trace) -> float:
    """The peak of a schedule that never moved lr, from below it; NaN if there is none or it moved."""
    rates = trace.column("lr")
    peak = header_number(trace.header, "peak_lr", missing=math.nan)
    if len(rates) >= LEAST_ROWS and finite_min(rates) == finite_max(rates) < peak / 2:
        return peak
    return math.nan


def _floor_of_clipping(noise: float, max_norm: float) -> float:
    """The gradient norm below which clipping keeps noisy steps from getting; NaN where noise is not known."""
    if not noise >= 0:
        return math.nan
    from curvestep.theory.theorems.clipped_sgd import clipping_floor

    return clipping_floor(noise, max_norm)


def _loss_curve(trace: Trace) -> LossFacts:
    step = trace.column("step")
    loss = trace.column("loss")
    known = np.flatnonzero(np.isfinite(loss))
    num_averaged = max(FEW_ROWS, len(known) // 10)
    start = loss[known[:num_averaged]]
    end = loss[_later_half(known, step)[-num_averaged:]]
    after = trace.column("loss_after")[-1:]
    first = finite_mean(start[:1])
    last = finite_mean(end)
    highest = float(np.max(loss[known], initial=-math.inf))
    nonfinite = _nonfinite_rows(trace)
    scale = max(abs(first), 1e-300)
    noise = NORMAL_SPREAD * typical(np.abs(np.diff(loss[known])))
    clear = 2 * noise * math.sqrt(1 / max(1, len(start)) + 1 / max(1, len(end)))
    fell = finite_mean(start) - last > clear
    sound = step[: np.min(nonfinite, initial=len(loss))]
    return LossFacts(
        num_losses=len(known),
        first_loss=first,
        last_loss=last,
        highest_loss=_highest_met(highest, after, loss[nonfinite]),
        rise=(last - first) / scale,
        end_rise=(finite_mean(after) - first) / scale,
        peak_rise=(highest - first) / scale,
        stood_still=_promised_fall(trace) > max(clear, scale / 2) and not fell,
        starts_below_zero=finite_min(loss[:LEAST_ROWS]) < 0,
        noise=noise,
        nonfinite_at=int(step[nonfinite[0]]) + 1 if len(nonfinite) else None,
        finite_until=int(np.max(sound, initial=-1)) + 1,
    )


def _highest_met(highest: float, after: np.ndarray, nonfinite: np.ndarray) -> float:
    """The highest loss of rows and after the last step; inf if that of a ``nonfinite`` row was not finite."""
    if not np.isfinite(nonfinite).all():
        return math.inf
    return float(np.fmax(highest, np.max(after[np.isfinite(after)], initial=-math.inf)))


def _nonfinite_rows(trace: Trace) -> np.ndarray:
    """Rows whose loss or gradient is not finite; none if nobody recorded the loss."""
    unknown = ~np.isfinite(trace.column("loss"))
    broken = trace.column("status") == NONFINITE
    if unknown.all() and not broken.any():
        return np.array([], dtype=int)
    return np.flatnonzero((unknown & ~trace.failed) | broken)


def _promised_fall(trace: Trace) -> float:
    """By how much the loss would have fallen if every step lowered it as it lowered that of its own batch."""
    step = trace.column("step")
    num_steps = float(np.max(step, initial=0) - np.min(step, initial=math.inf))
    return num_steps * finite_mean((trace.column("loss") - trace.column("loss_after"))[trace.ok])


def _steps(trace: Trace) -> StepFacts:
    length = trace.column("step_norm")
    norm = trace.column("grad_norm")
    kappa = trace.column("kappa")
    kappa = np.where(np.isfinite(kappa), kappa, trace.column("smoothness") * length / norm)
    rates = trace.column("lr")
    share = rates / finite_max(rates)
    share[~np.isfinite(share)] = 1.0
    measured = trace.ok & np.isfinite(kappa)
    # Of a schedule, what lies above the median is the half around its peak.
    near = np.flatnonzero(measured & (share >= typical(share)))
    late = near[-max(FEW_ROWS, len(_later_half(near, trace.column("step")))) :]
    cosine = trace.column("cosine")
    cosine = np.where(np.isfinite(cosine), cosine, 1.0)
    promise = cosine * norm * length
    fall = trace.column("loss") - trace.column("loss_after")
    # Without training's own loss the row holds that after the step, twice: then the trapezoidal rule.
    if not np.nanmax(np.abs(fall[late]), initial=0.0) > 0:
        fall = promise - trace.column("curvature") * length**2 / 2
    step = trace.column("step")
    return StepFacts(
        num_rows=int(measured.sum()),
        failure=next(iter(trace.column("status")[trace.failed]), "").removeprefix(FAILED),
        kappa=typical(kappa[late]),
        agreement=typical(cosine[late]),
        efficiency=_efficiency(typical(fall[late]), typical(promise[late])),
        start_factor=_start_factor(trace, kappa, fall / promise, share),
        from_start=bool(np.all(step[:1] == 0)),
        stable_lr=finite_min(_stable_rates(trace, kappa)[: _rows_near_start(trace)]),
        has_spectral=bool(np.isfinite(trace.column("spectral_smoothness")).any()),
    )


def _efficiency(fall: float, promise: float) -> float:
    """The share of the promise that was kept; NaN where steps go uphill, as with much momentum."""
    return fall / promise if promise > 0 else math.nan


def _stable_rates(trace: Trace, kappa: np.ndarray) -> np.ndarray:
    """The lr at which the sharpness of each row is at the limit of stability; NaN where it is not known."""
    family = optimizer_family(trace)
    limit = trace.column("optimizer_limit")
    sharpness = [trace.column("optimizer_smoothness")]
    if family.is_descent:
        beta = header_number(trace.header, "momentum", missing=0.0)
        limit = np.where(np.isfinite(limit), limit, 2 * (1 + beta))
        sharpness += [trace.column(name) for name in ESTIMATORS]
    if family is Family.SGD:
        sharpness.append(kappa / trace.column("lr"))  # of a row that has nothing else
    step_of_lr = 1.0
    if threshold_name(trace) != "max_norm":  # its lr is no factor on the gradient
        step_of_lr = trace.column("step_norm") / trace.column("grad_norm") / trace.column("lr")
    return limit / (np.fmax.reduce(sharpness) * step_of_lr)


def _rows_near_start(trace: Trace) -> int:
    """How many rows come before the loss has risen far: beyond, sharpness is that of another place."""
    loss = trace.column("loss")
    first = finite_mean(loss[np.isfinite(loss)][:1])
    far = np.flatnonzero(loss - first > (LOST_RISE * abs(first)))
    return int(np.min(far, initial=len(loss)))


def _start_factor(trace: Trace, kappa: np.ndarray, efficiency: np.ndarray, share: np.ndarray) -> float:
    """Median over the first rows, up to the first step that does not work: beyond it the run is elsewhere."""
    steps = trace.column("step")[:FEW_ROWS]
    if not len(steps) or steps[0] > 0:
        return math.nan  # the rows do not begin with the run
    momentum = header_number(trace.header, "momentum", missing=0.0)  # of SGD: Adam corrects for its own
    factors = []
    for row, step in enumerate(steps):
        fractions, values = _kappa_along(trace, row)
        if not fractions:
            fractions = [1.0]
            values = [float(kappa[row])]
        if not math.isfinite(values[0]):
            break
        works = working_fraction(fractions, values, efficiency[row])
        built_up = 1 - momentum ** (step + 1)  # of the length that momentum gives to steps
        factors.append(share[row] * built_up * works)
        if works < 1:
            break
    return typical(np.array(factors))


def _kappa_along(trace: Trace, row: int) -> tuple[list[float], list[float]]:
    """The fractions of a step at which κ is known, and κ there."""
    fractions = trace.column("fractions")[row]
    secants = trace.column("secants")[row]
    if fractions.shape != secants.shape:
        return [], []
    kappa = secants * fractions * trace.column("step_norm")[row] / trace.column("grad_norm")[row]
    known = np.isfinite(kappa) & (kappa > 0)
    return fractions[known].tolist(), kappa[known].tolist()


def working_fraction(fractions: Sequence[float], kappa: Sequence[float], efficiency: float) -> float:
    r"""How many times a step that was taken still works, from :math:`\kappa` at ascending fractions of it.

    A step works while :math:`\kappa \le 1` and the loss falls by a tenth of what its slope promises.
    Between the fractions :math:`\kappa` grows as a power of the step. Beyond the last it goes on in
    proportion; before the first as between the first two, or in proportion where it hardly grew. A loss that
    fell by less over the step fell early.

    Args:
        fractions: Where on the step :math:`\kappa` was measured.
        kappa: Change of the gradient up to there, relative to the gradient.
        efficiency: Fall of the loss over the whole step, over what the slope promises; NaN if unknown.

    Example:
        >>> working_fraction([0.5, 1.0], [0.1, 0.2], 0.9), working_fraction([0.5, 1.0], [0.1, 0.2], 0.05)
        (5.0, 0.5)
        >>> working_fraction([0.5, 1.0], [2.0, 3.0], 0.5), working_fraction([0.5, 1.0], [4.0, 16.0], 0.5)
        (0.25, 0.25)
        >>> round(working_fraction([0.5, 1.0], [0.5, 2.0], math.nan), 12)
        0.707106781187
    """
    beyond = next((place for place, change in enumerate(kappa) if not change <= 1), len(kappa))
    if beyond == len(kappa):
        fraction = fractions[-1] / max(kappa[-1], 1e-300)
    elif beyond == 0:
        growth = 1.0
        if len(kappa) > 1:
            growth = max(growth, math.log(kappa[1] / kappa[0]) / math.log(fractions[1] / fractions[0]))
        fraction = fractions[0] * kappa[0] ** (-1 / growth)
    else:
        low = fractions[beyond - 1]
        below = kappa[beyond - 1]
        above = kappa[beyond]
        share = 0.0
        if below > 0 and math.isfinite(above):
            share = math.log(1 / below) / math.log(above / below)
        fraction = low * (fractions[beyond] / low) ** share
    if 0 < efficiency < LEAST_FALL:
        return min(fraction, efficiency / LEAST_FALL)
    return fraction


def _later_half(rows: np.ndarray, steps: np.ndarray) -> np.ndarray:
    return rows[steps[rows] >= (steps[rows[:1]] + steps[rows[-1:]]) / 2]
