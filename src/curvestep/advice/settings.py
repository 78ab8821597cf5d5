"""Several runs of one task: the seeds of a setting merged, the best with its ties, and what to try next.

Curvature adapts to the step: a run with a small step walks into sharp regions where only a small step is
stable. So curvature alone cannot say which setting is best; how far the loss fell can.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from curvestep.advice.decision import DIVERGED, NEXT, decide
from curvestep.advice.outcome import Outcome, outcome_of
from curvestep.fit.samples import History, final_loss
from curvestep.optimizer_family import torch_name

Key = TypeVar("Key")

_ALIKE = ("model", "num_parameters", "optimizer", "momentum", "batch_size")  # facts of a task


@dataclass(frozen=True, kw_only=True)
class TriedSetting:
    """A setting, and how its runs went."""

    lr: float  # the largest of a run: the peak of a schedule
    max_norm: float  # norm at which steps were clipped; inf if none was
    scheduled: bool  # whether lr changed along the run
    losses: tuple[float, ...]  # final ones: inf if a run was lost, NaN if it cannot be compared
    error: float  # standard error of their mean, by their spread or, of a single run, by its noise

    @property
    def loss(self) -> float:
        """Mean of the final losses."""
        return float(np.mean(self.losses))


def best_setting(scores: Mapping[Key, Sequence[float]]) -> Key:
    """Which of several settings won: the lowest mean score among those that lost no run.

    The one rule for "best" in the library: advice on several runs, sweeps and claims all use it.

    Args:
        scores: Of each setting's runs, lower is better: usually final losses; not finite for a lost run.

    Raises:
        ValueError: If every setting lost a run.

    Example:
        >>> best_setting({"lr 1": [2.0, 2.2], "lr 3": [1.5, 1.7], "lr 9": [1.0, float("inf")]})
        'lr 3'
    """
    means = {key: float(np.mean(values)) for key, values in scores.items() if np.isfinite(values).all()}
    if not means:
        raise ValueError("No setting kept a finite score in all of its runs: there is no best one.")
    return min(means, key=lambda key: means[key])


def check_alike(histories: Sequence[History]) -> None:
    """Refuse runs that are not of one task, by what their headers and rows say of it.

    Raises:
        ValueError: It names what differs.
    """
    for name in _ALIKE:
        facts = [fact for history in histories if (fact := _typical(history, name))]
        for other in facts:
            if not _same(facts[0], other):
                words = f"These runs differ in {name.replace('_', ' ')} ({facts[0]} against {other})."
                raise ValueError(f"{words} Ask about one task and optimizer at a time.")


def settings_of(histories: Sequence[History]) -> list[TriedSetting]:
    """The settings of these runs, by ascending lr, compared at a step that most of them reached."""
    ends = [float(history.step[-1]) for history in histories if history.ends_finite]
    horizon = min((step for step in ends if step >= max(ends) / 2), default=math.inf)
    groups: dict[tuple[str, str, bool], list[tuple[Outcome, float]]] = defaultdict(list)
    for history in histories:
        run = outcome_of(history)
        key = (f"{run.lr:.3g}", f"{run.max_norm:.2g}", run.scheduled)
        groups[key].append((run, _loss_at(history, run, horizon)))
    return sorted(map(_merged, groups.values()), key=lambda setting: (setting.lr, setting.max_norm))


def ties_of(best: TriedSetting, settings: Sequence[TriedSetting]) -> list[TriedSetting]:
    """The other settings within two standard errors of the best."""
    near = [it for it in settings if it.loss - best.loss <= 2 * math.hypot(best.error, it.error)]
    return [setting for setting in near if setting is not best]


def next_lr(best: TriedSetting, settings: Sequence[TriedSetting]) -> float | None:
    """The lr to try next to the best: three times or a third of it; None if both sides were seen."""
    rates = [setting.lr for setting in settings]
    if best.lr == max(rates):
        return best.lr * NEXT
    if best.lr == min(rates):
        return best.lr / NEXT
    return None


def _merged(runs: Sequence[tuple[Outcome, float]]) -> TriedSetting:
    (run, *_), losses = zip(*runs, strict=True)
    error = run.noise / math.sqrt(max(1, run.num_losses // 20))  # rows that the final loss is of
    if len(losses) > 1:
        with np.errstate(invalid="ignore"):  # of a lost one
            error = float(np.std(losses, ddof=1)) / math.sqrt(len(losses))
    return TriedSetting(lr=run.lr, max_norm=run.max_norm, scheduled=run.scheduled, losses=losses, error=error)


def _loss_at(history: History, run: Outcome, horizon: float) -> float:
    if decide(run).action == DIVERGED:
        return math.inf
    if history.step[-1] < horizon:
        return math.nan
    kept = np.isfinite(history.loss) & (history.step <= horizon)
    return final_loss(history.step[kept], history.loss[kept])


def _typical(history: History, name: str) -> str:
    """Entry of a run's header or of its middle row, a word or a number, as it is printed; empty for none."""
    values = history.columns.get(name, ())
    if name in history.header:
        values = [history.header[name]]
    known = [value for value in values if value is not None and value == value]  # NaN is not itself
    middle = known[len(known) // 2] if known else ""
    if isinstance(middle, (int, float)):
        return f"{middle:g}"
    return torch_name(str(middle))  # ours is torch's with the clip inside


def _same(one: str, other: str) -> bool:
    """Whether two facts agree; batches of text differ a little in length from seed to seed."""
    try:
        return math.isclose(float(one), float(other), rel_tol=0.1, abs_tol=1e-9)
    except ValueError:
        return one == other
