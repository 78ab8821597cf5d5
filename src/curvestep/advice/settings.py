"""Several runs of one task: seeds merged, the best by its loss, its ties, and what to try next."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import NamedTuple

import numpy as np

from curvestep.advice.decision import DIVERGED, NEXT, decide
from curvestep.advice.outcome import Outcome, outcome_of
from curvestep.trace.history import History, end_of_run


class TriedSetting(NamedTuple):
    """A setting, and how its runs went."""

    run: Outcome  # the first of them
    losses: tuple[float, ...]  # final ones: inf if a run was lost, NaN if it cannot be compared
    num_averaged: float = 1.0  # losses that the first run's is a mean of

    @property
    def loss(self) -> float:
        """Mean of the final losses."""
        return float(np.mean(self.losses))

    @property
    def error(self) -> float:
        """Standard error of the mean, by the spread or, of a single run, by its noise."""
        if len(self.losses) == 1:
            return self.run.noise / math.sqrt(max(1.0, self.num_averaged))
        with np.errstate(invalid="ignore"):  # of a lost one
            return float(np.std(self.losses, ddof=1)) / math.sqrt(len(self.losses))

    def ties_with(self, best: TriedSetting) -> bool:
        """Whether it lies within two standard errors of another one, the best."""
        return self is not best and self.loss - best.loss <= 2 * math.hypot(best.error, self.error)


def settings_of(histories: list[History]) -> list[TriedSetting]:
    """The settings of these runs, by ascending lr, compared at a step that most of them reached."""
    ends = [float(history.step[-1]) for history in histories if history.ends_finite]
    horizon = min((step for step in ends if step >= max(ends) / 2), default=math.inf)
    groups: dict[tuple[str, str, bool], list[tuple[Outcome, float, float]]] = defaultdict(list)
    for history in histories:
        run, (loss, count) = outcome_of(history), end_of_run(history, horizon)
        if history.step[-1] < horizon or run.num_losses < 2:
            loss = math.nan
        if decide(run).action == DIVERGED:
            loss = math.inf
        key = (f"{run.lr:.3g}", f"{run.max_norm:.2g}", run.scheduled)
        groups[key].append((run, loss, count))
    settings = [
        TriedSetting(runs[0][0], tuple(run[1] for run in runs), runs[0][2]) for runs in groups.values()
    ]
    return sorted(settings, key=lambda setting: (setting.run.lr, setting.run.max_norm))


def next_lr(best: TriedSetting, settings: list[TriedSetting]) -> float | None:
    """The middle of a wide gap beside the best; else, at an end of what was tried, three times or a third."""
    lr, rates = best.run.lr, sorted({setting.run.lr for setting in settings if setting.run.lr > 0})
    if lr not in rates:
        return None
    place = rates.index(lr)
    beside = [rates[max(place - 1, 0)], rates[min(place + 1, len(rates) - 1)]]
    far = max(beside, key=lambda rate: abs(math.log(rate / lr)))
    if not NEXT**-3 < far / lr < NEXT**3:
        return math.sqrt(lr * far)
    return {rates[0]: lr / NEXT, rates[-1]: lr * NEXT}.get(lr)
