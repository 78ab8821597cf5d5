"""A learning rate and a plain answer, from what was measured along runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

from curvestep.advice import advice_words as words
from curvestep.advice.decision import CANNOT_TELL, TAKE, decide
from curvestep.advice.outcome import outcome_of
from curvestep.advice.settings import best_setting, check_alike, next_lr, settings_of, ties_of
from curvestep.display.markup import html_table
from curvestep.fit.fit import SmoothnessFit
from curvestep.fit.samples import History, check_trace
from curvestep.notes import Note
from curvestep.smoothness.trace import Trace

if TYPE_CHECKING:
    from curvestep.smoothness.probe import SmoothnessProbe

MOST_LINES = 8


@dataclass(frozen=True, kw_only=True, repr=False)
class Advice:
    """Recommendation of :func:`advise`; ``print`` it for eight lines, ``print(advice.details())`` for all.

    Attributes:
        action: ``"keep"``, ``"raise"``, ``"lower"``, ``"diverged"``, ``"stuck"``, ``"data"`` (a batch or the
            loss was not finite), ``"cannot tell"``, or ``"take"`` (one of several settings).
        kind: The condition that led to it, such as ``"short-steps"``.
        lr: What to run next, under a schedule its peak; None where no number would help.
        max_norm: The threshold that goes with it, of NormalizedSGD the offset; inf for none.
        verdict: One line to act on.
        reasons: What it rests on.
        warnings: What to doubt.
        lr_is_peak: Whether lr is the peak of a schedule: scale the schedule as a whole.
        next_lr: After several runs, an lr that is worth trying and was not tried.
        fit: The fit that was handed over, if any.
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
    fit: SmoothnessFit | None = field(default=None, repr=False, compare=False)

    @property
    def refused(self) -> bool:
        """Whether the runs could not support an answer; ``verdict`` says why."""
        return self.action == CANNOT_TELL

    def __str__(self) -> str:
        lines = self._lines()
        if len(lines) > MOST_LINES:
            lines = [*lines[: MOST_LINES - 1], "More: print(advice.details())"]
        return "\n".join(lines)

    def details(self) -> str:
        """All reasons and warnings, and the fit if there is one."""
        fit = [] if self.fit is None else ["", str(self.fit)]
        return "\n".join([*self._lines(), *fit])

    def __repr__(self) -> str:
        return f"<Advice: {shorten(self.verdict, 120, placeholder=' …')}>"

    def _repr_html_(self) -> str:
        table = [(note.kind, note.text) for note in self.reasons]
        return html_table(self.verdict, table, tuple(map(str, self.warnings)))

    def _lines(self) -> list[str]:
        cautions = [f"  caution   {warning}" for warning in self.warnings]
        return [self.verdict, *cautions, *(f"  {note.kind:<10}{note.text}" for note in self.reasons)]


def advise(*runs: Trace | SmoothnessFit | SmoothnessProbe | str | Path) -> Advice:
    """Say what to run next: the same learning rate, a larger or a smaller one, and why.

    From one run, by a table of conditions (:mod:`~curvestep.advice.decision`): how its loss went, what its
    steps did, how far the start allowed to go. One run shows steps that were far too long or too short; it
    cannot rank learning rates within a factor of three. From several runs of one task: the best, its ties,
    and the next learning rate to try.

    Args:
        runs: Probed runs, at least one: probes, traces, their files or run folders, or fits. Several must be
            of one task, with one kind of optimizer and one batch size.

    Returns:
        An :class:`Advice`; where the runs do not support one, its action is ``"cannot tell"``.

    Example:
        >>> trace = Trace()
        >>> for step in range(20):
        ...     _ = trace.append({"step": step, "loss": 3 - step / 50, "grad_norm": 1.0, "lr": 0.02,
        ...                       "kappa": 0.05, "step_norm": 0.02, "smoothness": 2.5})
        >>> print(advise(trace).verdict)
        RAISE lr 0.02 -> 0.12
    """
    if not runs:
        raise ValueError("`runs` must be at least one probe, trace, fit or path, got none.")
    pairs = [(_history_of(run), run) for run in runs]
    used = [pair for pair in pairs if len(pair[0].step)] or pairs[:1]
    if len(used) == 1:
        return _from_run(*used[0])
    try:
        return _from_settings([history for history, _ in used])
    except ValueError as error:
        return Advice(action=CANNOT_TELL, kind="not-comparable", verdict=f"CANNOT TELL: {error}")


def _history_of(run: Trace | SmoothnessFit | SmoothnessProbe | str | Path) -> History:
    if isinstance(run, SmoothnessFit):
        return run.samples.history
    return History.of(check_trace(run))


def _from_run(history: History, run: object = None) -> Advice:
    outcome = outcome_of(history)
    decision = decide(outcome)
    return Advice(
        action=decision.action,
        kind=decision.kind,
        lr=decision.lr,
        max_norm=None if decision.lr is None else outcome.max_norm,
        verdict=words.verdict_on(decision, outcome),
        reasons=words.reasons_for(decision, outcome),
        warnings=words.warnings_about(outcome),
        lr_is_peak=outcome.scheduled,
        fit=run if isinstance(run, SmoothnessFit) else None,
    )


def _from_settings(histories: list[History]) -> Advice:
    """The best setting as it was run; where no loss is left to compare, what follows from the smallest lr."""
    check_alike(histories)
    settings = settings_of(histories)
    if not any(math.isfinite(setting.loss) for setting in settings):
        return _from_run(min(histories, key=lambda history: outcome_of(history).lr))
    best = settings[best_setting({index: setting.losses for index, setting in enumerate(settings)})]
    following = next_lr(best, settings)
    return Advice(
        action=TAKE,
        kind="best-setting",
        lr=best.lr,
        max_norm=best.max_norm,
        verdict=words.verdict_on_settings(best, settings, following),
        reasons=words.reasons_for_settings(ties_of(best, settings), settings),
        lr_is_peak=best.scheduled,
        next_lr=following,
    )
