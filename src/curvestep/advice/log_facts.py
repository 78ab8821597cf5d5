"""What the log of a trainer shows by itself: facts about loss, gradient norm and learning rate.

Each fact needs a margin that no clean log of the tests reaches: noise is measured in the log itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from curvestep.advice.training_log import TrainingLog
from curvestep.trace.history import typical

NEIGHBOURS = 10  # logged values before one, whose median is usual
FEWEST = 4  # of them, without which nothing is usual
NORMAL_MAD = 1.4826  # standard deviation over the median distance, of normal noise
SPIKE_NOISE = 4.0  # standard deviations of the noise; more where there are more rows to be wrong about:
NOISE_PER_DECADE = 1.3  # for each ten times as many rows
SPIKE_RATIO = 4.0  # of a gradient norm, to what is usual
SPIKE_SHARE = 0.15  # of a loss above what is usual, in units of it
JUMP_RATIO = 1.4  # of lr, between logged steps
JUMP_NEIGHBOURS = 4.0  # times the change of lr at both neighbours
SAME_NORM = 1e-4  # relative difference below which two norms are one
PILE_SHARE = 0.2  # of the norms, at one value


@dataclass(frozen=True)
class LoggedSpike:
    """A logged value that stands out."""

    step: int
    value: float
    usual: float
    recovered_at: int | None  # the logged step at which it was usual again; None if it never was


@dataclass(frozen=True)
class Jump:
    """A sudden change of lr."""

    step: int
    before: float
    after: float


@dataclass(frozen=True, kw_only=True)
class LogFacts:
    """What the log shows; None or empty where it shows nothing of the kind."""

    num_steps: int
    nonfinite_at: int | None = None  # the first logged step with a loss or a norm that is not finite
    stays_nonfinite: bool = False
    loss_spike: LoggedSpike | None = None  # the largest
    norm_spike: LoggedSpike | None = None
    warmup_end: int | None = None
    peak_lr: float = math.nan
    jump: Jump | None = None  # the largest
    piled_norm: float = math.nan  # at which norms pile up
    piled_share: float = math.nan
    clipped: float = math.nan  # share of the norms above the given threshold
    max_norm: float = math.nan


def facts_of(log: TrainingLog, max_norm: float | None = None) -> LogFacts:
    """The facts of a log; with a threshold also how many of its steps were clipped."""
    bad = (log.written["loss"] & ~np.isfinite(log.loss)) | (
        log.written["grad_norm"] & ~np.isfinite(log.grad_norm)
    )
    nonfinite = np.flatnonzero(bad)
    rates = np.isfinite(log.lr)
    warmup = _warmup_end(log.lr[rates])
    norms = log.grad_norm[np.isfinite(log.grad_norm)]
    piled_norm, piled_share = _pile(norms)
    clipped = math.nan
    if max_norm is not None and len(norms):
        clipped = float(np.mean(norms > max_norm))
    end = log.step[rates][warmup] if warmup else None
    return LogFacts(
        num_steps=len(log.step),
        nonfinite_at=int(log.step[nonfinite[0]]) if len(nonfinite) else None,
        stays_nonfinite=bool(len(nonfinite) and bad[nonfinite[0] :][_has_value(log)[nonfinite[0] :]].all()),
        loss_spike=_largest_spike(log.step, log.loss),
        norm_spike=_largest_spike(log.step, log.grad_norm, ratio=SPIKE_RATIO),
        warmup_end=None if end is None else int(end),
        peak_lr=float(log.lr[rates][warmup]) if warmup else math.nan,
        jump=_largest_jump(log.step[rates], log.lr[rates], warmup),
        piled_norm=piled_norm,
        piled_share=piled_share,
        clipped=clipped,
        max_norm=math.nan if max_norm is None else max_norm,
    )


def _has_value(log: TrainingLog) -> np.ndarray:
    """Which steps have a loss or a norm."""
    return log.written["loss"] | log.written["grad_norm"]


def _largest_spike(step: np.ndarray, values: np.ndarray, *, ratio: float = math.nan) -> LoggedSpike | None:
    """The value that stands out most against those before it; of norms by a ``ratio``, on a log scale."""
    is_norm = not math.isnan(ratio)
    known = np.isfinite(values)
    if is_norm:
        known &= values > 0
    step = step[known]
    values = np.log(values[known]) if is_norm else values[known]
    if len(values) <= FEWEST:
        return None
    window = _before(values)
    usual = np.median(window, axis=1)
    excess = values[FEWEST:] - usual
    # From the lower half: a loss that stays up is no noise.
    middle = np.median(excess)
    noise = NORMAL_MAD * typical(middle - excess[excess <= middle])
    margin = SPIKE_NOISE + NOISE_PER_DECADE * math.log10(len(values))
    spread = np.max(window, axis=1) - np.min(window, axis=1)
    least = math.log(ratio) if is_norm else SPIKE_SHARE * np.abs(usual)
    height = excess - np.maximum(np.maximum(margin * noise, 2 * spread), least)
    place = int(np.argmax(height))
    if not height[place] > 0:
        return None
    later = np.flatnonzero(values[FEWEST + place + 1 :] <= usual[place] + max(2 * noise, excess[place] / 10))
    recovered = step[FEWEST + place + 1 :][later[:1]]
    scale = np.exp if is_norm else float
    return LoggedSpike(
        step=int(step[FEWEST + place]),
        value=float(scale(values[FEWEST + place])),
        usual=float(scale(usual[place])),
        recovered_at=int(recovered[0]) if len(recovered) else None,
    )


def _before(values: np.ndarray) -> np.ndarray:
    """For each value from the fifth on the ten before it; the first four again where there are fewer."""
    padded = np.concatenate([np.resize(values[:FEWEST], NEIGHBOURS - FEWEST), values[:-1]])
    return np.lib.stride_tricks.sliding_window_view(padded, NEIGHBOURS)


def _warmup_end(rates: np.ndarray) -> int:
    """Where lr ceases to rise, which it did from the start to twice its first value at least; else 0."""
    falls = np.flatnonzero(np.diff(rates) <= 1e-9 * rates[1:])
    end = int(falls[0]) if len(falls) else len(rates) - 1
    return end if end > 0 and rates[end] >= 2 * rates[0] else 0


def _largest_jump(step: np.ndarray, rates: np.ndarray, start: int) -> Jump | None:
    """The largest change of lr between logged steps that neither neighbour shares, after warm-up."""
    rates = rates[start:]
    step = step[start:]
    if len(rates) < 3:
        return None
    change = np.abs(np.diff(rates))
    beside = np.maximum(np.append(0.0, change[:-1]), np.append(change[1:], 0.0))
    larger = np.maximum(rates[1:], rates[:-1])
    smaller = np.minimum(rates[1:], rates[:-1])
    sudden = (larger >= JUMP_RATIO * smaller) & (change > JUMP_NEIGHBOURS * beside)
    if not sudden.any():
        return None
    place = int(np.argmax(np.where(sudden, change, -1.0)))
    return Jump(int(step[place + 1]), float(rates[place]), float(rates[place + 1]))


def _pile(norms: np.ndarray) -> tuple[float, float]:
    """The norm that many logged norms agree with, and their share; NaN where none does."""
    norms = np.sort(norms[norms > 0])
    if not len(norms):
        return math.nan, math.nan
    ends = np.searchsorted(norms, norms * (1 + SAME_NORM), side="right")
    counts = ends - np.arange(len(norms))
    place = int(np.argmax(counts))
    if counts[place] < max(FEWEST, PILE_SHARE * len(norms)):
        return math.nan, math.nan
    return float(np.median(norms[place : ends[place]])), float(counts[place] / len(norms))
