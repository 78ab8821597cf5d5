"""A learning rate and a plain answer, from what was measured along runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

from curvestep.advice import advice_words as words
from curvestep.advice.decision import CANNOT_TELL, TAKE, Condition, decide
from curvestep.advice.outcome import Outcome, outcome_of
from curvestep.notes import Note
from curvestep.report.markup import html_table
from curvestep.trace.history import HasTrace, best_setting, check_trace
from curvestep.trace.trace import TRACE, Trace

if TYPE_CHECKING:
    from curvestep.advice.settings import Setting

MOST_LINES = 8


@dataclass(frozen=True, kw_only=True, repr=False)
class Advice:
    """Recommendation of :func:`advise`; ``print`` it for eight lines, ``print(advice.details())`` for all.

    ``action`` is ``"no sign"``, ``"raise"``, ``"lower"``, ``"diverged"``, ``"stuck"``, ``"data"`` (a batch or
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
        return html_table(self.verdict, table, [str(warning) for warning in self.warnings])


Source = Trace | HasTrace | str | Path


def advise(*runs: Source | Sequence[Source]) -> Advice:
    """Say what to run next: the same learning rate, a larger or a smaller one, and why.

    From one run, by a table of conditions (:mod:`~curvestep.advice.decision`): it shows steps that were far
    too long or too short, but cannot rank learning rates within a factor of ten. From several seeds of one
    setting: what most of them say. From several settings: the best, its ties, and the next learning rate to
    try. A run that ended early, still runs or was trained in another way is named and decides nothing.

    Args:
        runs: Probed runs, at least one: probes, traces, their files or run folders, fits, folders that hold
            several runs, or lists of these. Several must be of one task, with one kind of optimizer and one
            batch size.

    Returns:
        The advice: print it, or read ``action``, ``lr`` and ``max_norm``.

    Raises:
        ValueError: nothing was given, or a trace is damaged.
        FileNotFoundError: a path holds no trace.

    Example:
        >>> trace = Trace()
        >>> for step in range(20):
        ...     _ = trace.append({"step": step, "loss": 3 - step / 50, "lr": 0.02, "kappa": 0.05})
        >>> print(advise(trace).verdict)
        RAISE lr 0.02 -> 0.06
    """
    traces = [trace for run in runs for trace in _traces_of(run)]
    if not traces:
        raise ValueError("`runs` must be at least one probe, trace, fit or path, got none.")
    used = [trace for trace in traces if len(trace)] or traces[:1]
    if len(used) == 1:
        outcome = outcome_of(used[0])
        return _from_run(outcome, decide(outcome))
    return _from_several(used)


def _traces_of(run: Source | Sequence[Source]) -> list[Trace]:
    """The trace of a run, or those of several."""
    if isinstance(run, (list, tuple)):
        return [trace for one in run for trace in _traces_of(one)]
    if isinstance(run, (str, Path)) and Path(run).is_dir() and not (Path(run) / TRACE).exists():
        from curvestep.trace.sources import traces_by_task  # of use to folders of runs only

        return [trace for traces in traces_by_task([run]).values() for trace in traces]
    return [check_trace(run)]  # pyright: ignore[reportArgumentType]  # no sequence is left


def _from_run(run: Outcome, condition: Condition, lr: float | None = None) -> Advice:
    """What a run says alone; ``lr`` is that of several like it."""
    lr = lr or condition.next_lr(run)
    return Advice(
        action=condition.action,
        kind=condition.kind,
        lr=lr,
        max_norm=None if lr is None or math.isnan(run.max_norm) else condition.next_max_norm(run),
        verdict=words.verdict_on(condition, run, lr),
        reasons=words.reasons_for(condition, run),
        warnings=words.warnings_about(run),
        lr_is_peak=run.scheduled,
    )


def _from_several(traces: list[Trace]) -> Advice:
    """The best of several settings as it was run; where only one can be compared, what its runs say."""
    from curvestep.advice.settings import compare, next_lr  # of use to several runs only

    comparison = compare(traces)
    if comparison.difference:
        verdict = words.VERDICTS["not-comparable"].format(difference=comparison.difference)
        return Advice(action=CANNOT_TELL, kind="not-comparable", verdict=verdict)
    settings = comparison.settings
    left_out = words.notes_on_left_out(comparison.left_out)
    if not settings:
        first = min(comparison.left_out, key=lambda one: one.run.outcome.lr)
        advice = _from_run(first.run.outcome, first.run.condition)
        return replace(advice, warnings=(*advice.warnings, *left_out))
    if len(settings) == 1 or all(setting.got_nowhere for setting in settings):
        return _from_seeds(settings[0], left_out)
    best = settings[best_setting({place: setting.losses for place, setting in enumerate(settings)})]
    following = next_lr(best, settings)
    return Advice(
        action=TAKE,
        kind="best-setting",
        lr=best.outcome.lr,
        max_norm=None if math.isnan(best.outcome.max_norm) else best.outcome.max_norm,
        verdict=words.verdict_on_settings(best, settings, following),
        reasons=words.reasons_for_settings(best, settings),
        warnings=left_out,
        lr_is_peak=best.outcome.scheduled,
        next_lr=following,
    )


def _from_seeds(setting: Setting, left_out: tuple[Note, ...]) -> Advice:
    """What most runs of one setting say, each alone."""
    if len(setting.runs) == 1:
        advice = _from_run(setting.outcome, setting.runs[0].condition)
        return replace(advice, warnings=(*advice.warnings, *left_out))
    agreeing = setting.agreeing
    if not agreeing:
        answers = sorted({run.condition.action.upper() for run in setting.runs})
        verdict = words.VERDICTS["seeds-disagree"].format(answers=", ".join(answers))
        return Advice(
            action=CANNOT_TELL,
            kind="seeds-disagree",
            verdict=verdict,
            reasons=words.reasons_for_seeds(setting),
            warnings=left_out,
        )
    lr = setting.common_lr
    # The run whose own answer is nearest to the common one explains it.
    typical = min(agreeing, key=lambda run: abs(math.log((run.next_lr or 1.0) / (lr or 1.0))))
    advice = _from_run(typical.outcome, typical.condition, lr)
    return replace(
        advice,
        reasons=(*words.reasons_for_seeds(setting), *advice.reasons),
        warnings=(*advice.warnings, *left_out),
    )
