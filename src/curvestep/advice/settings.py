"""Several runs of one task: the seeds of a setting merged, the best with its ties, and what to try next.

Curvature adapts to the step: a run with a small step walks into sharp regions where only a small step is
stable. So curvature alone cannot say which setting is best; how far the loss fell can.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from curvestep.advice.decision import DIVERGED, NEXT, decide
from curvestep.advice.outcome import Outcome, outcome_of
from curvestep.fit.samples import History, final_loss
from curvestep.optimizer_family import torch_name

Key = TypeVar("Key")


@dataclass(frozen=True, kw_only=True)
class TriedSetting:
    """A setting, and how its runs went.

    Attributes:
        lr: The largest of a run: the peak of a schedule.
        max_norm: Norm at which steps were clipped; inf if none was.
        scheduled: Whether lr changed along the run.
        losses: Final loss of each run: inf if it was lost, NaN if it cannot be compared.
        error: Standard error of their mean, by their spread or, of a single run, by that of its last losses.
    """

    lr: float
    max_norm: float
    scheduled: bool
    losses: tuple[float, ...]
    error: float

    @property
    def loss(self) -> float:
        """Mean of the final losses."""
        return float(np.mean(self.losses))


def best_setting(scores: Mapping[Key, Sequence[float]]) -> Key:
    """Which of several settings won: the lowest mean score among those that lost no run.

    The one rule for "best" in the library: advice on several runs, sweeps and claims all use it.

    Args:
        scores: For each setting the score of each of its runs, lower is better: usually the final losses of
            its seeds. A setting with a score that is not finite lost a run and cannot win.

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
    for name, unit in (
        ("model", "model"),
        ("num_parameters", "number of parameters"),
        ("optimizer", "optimizer"),
        ("momentum", "momentum"),
        ("batch_size", "batch size"),
    ):
        found: list[Any] = []
        for history in histories:
            value = _typical(history, name)
            if name == "optimizer" and value is not None:  # ours is torch's with the clip inside
                value = torch_name(str(value))
            if value is not None and not any(_same(value, other) for other in found):
                found.append(value)
        if len(found) > 1:
            words = " against ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in found)
            raise ValueError(
                f"These runs differ in {unit} ({words}). Ask about one task and optimizer at a time."
            )


def settings_of(histories: Sequence[History]) -> list[TriedSetting]:
    """The settings of these runs, by ascending lr, compared at a step that most of them reached."""
    outcomes = [outcome_of(history) for history in histories]
    horizon = _common_step(histories)
    groups: dict[tuple[str, str], list[int]] = {}
    for index, run in enumerate(outcomes):
        groups.setdefault((f"{run.lr:.3g}", f"{run.max_norm:.2g}"), []).append(index)
    found = [
        _merged([outcomes[i] for i in group], [_loss_at(histories[i], outcomes[i], horizon) for i in group])
        for group in groups.values()
    ]
    return sorted(found, key=lambda setting: (setting.lr, setting.max_norm))


def best_of(settings: Sequence[TriedSetting]) -> TriedSetting:
    """The setting whose loss ended lowest.

    Raises:
        ValueError: If no run both kept its loss finite and recorded it.
    """
    if all(np.isnan(setting.losses).all() for setting in settings):
        raise ValueError(
            "No run recorded a loss that can be compared. Hand it to the probe: `probe.record(loss_fn)`."
        )
    scores = {index: setting.losses for index, setting in enumerate(settings)}
    return settings[best_setting(scores)]


def ties_of(best: TriedSetting, settings: Sequence[TriedSetting]) -> list[TriedSetting]:
    """The other settings within two standard errors of the best."""
    return [
        other
        for other in settings
        if other is not best and other.loss - best.loss <= 2 * math.hypot(best.error, other.error)
    ]


def next_lr(best: TriedSetting, settings: Sequence[TriedSetting]) -> float | None:
    """The learning rate to try next to the best: three times or a third of it; None if both sides were seen.

    Example:
        >>> runs = [TriedSetting(lr=lr, max_norm=1.0, scheduled=False, losses=(loss,), error=0.0)
        ...         for lr, loss in ((1.0, 3.0), (3.0, 2.0), (9.0, 2.5))]
        >>> next_lr(runs[1], runs) is None, next_lr(runs[0], runs[:2]), next_lr(runs[2], runs)
        (True, 0.3333333333333333, 27.0)
    """
    rates = {setting.lr for setting in settings}
    if not any(rate > best.lr for rate in rates):
        return best.lr * NEXT
    if not any(rate < best.lr for rate in rates):
        return best.lr / NEXT
    return None


def _merged(outcomes: Sequence[Outcome], losses: Sequence[float]) -> TriedSetting:
    error = outcomes[0].spread
    if len(losses) > 1:
        error = (
            float(np.std(losses, ddof=1) / math.sqrt(len(losses))) if np.isfinite(losses).all() else math.nan
        )
    first = outcomes[0]
    return TriedSetting(
        lr=first.lr, max_norm=first.max_norm, scheduled=first.scheduled, losses=tuple(losses), error=error
    )


def _common_step(histories: Sequence[History]) -> float:
    """The last step that all runs reached that got at least half as far as the longest."""
    last = [float(history.step[-1]) for history in histories if len(history.step) and history.ends_finite]
    return min((step for step in last if step >= max(last) / 2), default=math.inf)


def _loss_at(history: History, run: Outcome, horizon: float) -> float:
    if decide(run).action == DIVERGED:
        return math.inf
    if not len(history.step) or history.step[-1] < horizon:
        return math.nan
    kept = np.isfinite(history.loss) & (history.step <= horizon)
    return final_loss(history.step[kept], history.loss[kept])


def _typical(history: History, name: str) -> Any:
    """Entry of a run's header or rows: a word, a number, or None."""
    if name in history.header:
        value = history.header[name]
        return float(value) if isinstance(value, (int, float)) else value
    column = history.columns.get(name)
    if column is None:
        return None
    if column.dtype == object:
        return next((word for word in column if word is not None), None)
    known = column[np.isfinite(column)]
    return float(np.median(known)) if len(known) else None


def _same(one: Any, other: Any) -> bool:
    """Whether two facts agree; batches of text differ a little in length from seed to seed."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=0.1, abs_tol=1e-9)
    return one == other
