"""A learning rate and a plain answer, from what was measured along runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Protocol

from curvestep.advice import advice_words as words
from curvestep.advice.decision import CANNOT_TELL, TAKE, decide
from curvestep.advice.outcome import outcome_of
from curvestep.advice.settings import next_lr, settings_of
from curvestep.display.markup import html_table
from curvestep.notes import Note
from curvestep.trace.history import HasTrace, History, best_setting, check_trace, difference_of
from curvestep.trace.trace import Trace

MOST_LINES = 8


@dataclass(frozen=True, kw_only=True, repr=False)
class Advice:
    """Recommendation of :func:`advise`; ``print`` it for eight lines, ``print(advice.details())`` for all.

    ``action`` is ``"keep"``, ``"raise"``, ``"lower"``, ``"diverged"``, ``"stuck"``, ``"data"`` (a batch or
    the loss was not finite), ``"cannot tell"``, or ``"take"`` (one of several settings); ``kind`` is the
    condition that led to it. ``lr`` is what to run next, the peak of a schedule if ``lr_is_peak``, None where
    no number would help; ``max_norm`` goes with it, of NormalizedSGD the offset, inf for none. ``verdict`` is
    to act on, ``reasons`` are what it rests on, ``warnings`` what to doubt, ``next_lr`` what no run tried.
    """

    action: str
    kind: str
    lr: float | None = None
    max_norm: float | None = None
    verdict: str
    reasons: tuple[Note, ...] = ()
    warnings: tuple[Note, ...] = ()
    lr_is_peak: bool = False
    next_lr: float | None = None

    def __str__(self) -> str:
        lines = self.details().splitlines()
        if len(lines) > MOST_LINES:
            lines = [*lines[: MOST_LINES - 1], "More: advice.details(), or curvestep advise --details"]
        return "\n".join(lines)

    def details(self) -> str:
        """The verdict, all warnings and all reasons."""
        cautions = [f"  caution   {warning}" for warning in self.warnings]
        reasons = [f"  {note.kind:<10}{note.text}" for note in self.reasons]
        return "\n".join([self.verdict, *cautions, *reasons])

    def __repr__(self) -> str:
        return f"<Advice: {shorten(self.verdict, 120, placeholder=' …')}>"

    def _repr_html_(self) -> str:
        table = [(note.kind, note.text) for note in self.reasons]
        return html_table(self.verdict, table, tuple(map(str, self.warnings)))


class HasHistory(Protocol):
    """What was read from a trace: a fit."""

    @property
    def history(self) -> History:
        """Every row of the trace."""
        ...


Source = Trace | HasTrace | HasHistory | str | Path


def advise(*runs: Source) -> Advice:
    """Say what to run next: the same learning rate, a larger or a smaller one, and why.

    From one run, by a table of conditions (:mod:`~curvestep.advice.decision`): it shows steps that were far
    too long or too short, but cannot rank learning rates within a factor of ten. From several runs of one
    task: the best, its ties, and the next learning rate to try.

    Args:
        runs: Probed runs, at least one: probes, traces, their files or run folders, or fits. Several must be
            of one task, with one kind of optimizer and one batch size.

    Example:
        >>> trace = Trace()
        >>> for step in range(20):
        ...     _ = trace.append({"step": step, "loss": 3 - step / 50, "lr": 0.02, "kappa": 0.05})
        >>> print(advise(trace).verdict)
        RAISE lr 0.02 -> 0.12
    """
    if not runs:
        raise ValueError("`runs` must be at least one probe, trace, fit or path, got none.")
    histories = list(map(_history_of, runs))
    used = [history for history in histories if len(history.step)] or histories[:1]
    if len(used) == 1:
        return _from_run(used[0])
    return _from_settings(used)


def _history_of(run: Source) -> History:
    history = getattr(run, "history", None)  # a fit has all rows of its trace
    if isinstance(history, History):
        return history
    return History.of(check_trace(run))


def _from_run(history: History) -> Advice:
    run = outcome_of(history)
    found = decide(run)
    lr = found.next_lr(run)
    return Advice(
        action=found.action,
        kind=found.kind,
        lr=lr,
        max_norm=None if lr is None else run.max_norm,
        verdict=words.verdict_on(found, run),
        reasons=words.reasons_for(found, run),
        warnings=words.warnings_about(run),
        lr_is_peak=run.scheduled,
    )


def _from_settings(histories: list[History]) -> Advice:
    """The best setting as it was run; where no loss is left to compare, what follows from the smallest lr."""
    if difference := difference_of(histories):
        verdict = words.VERDICTS["not-comparable"].format(difference=difference)
        return Advice(action=CANNOT_TELL, kind="not-comparable", verdict=verdict)
    settings = settings_of(histories)
    if not any(math.isfinite(setting.loss) for setting in settings):
        return _from_run(min(histories, key=lambda history: outcome_of(history).lr))
    best = settings[best_setting({index: setting.losses for index, setting in enumerate(settings)})]
    following = next_lr(best, settings)
    return Advice(
        action=TAKE,
        kind="best-setting",
        lr=best.run.lr,
        max_norm=best.run.max_norm,
        verdict=words.verdict_on_settings(best, settings, following),
        reasons=words.reasons_for_settings(best, settings),
        lr_is_peak=best.run.scheduled,
        next_lr=following,
    )
