"""A learning rate and a plain answer, from what was measured along runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

from curvestep.advice import advice_words as words
from curvestep.advice.decision import CANNOT_TELL, FACTS, TAKE, Condition, decide
from curvestep.advice.outcome import Outcome, outcome_of
from curvestep.notes import Note
from curvestep.report.markup import html_table
from curvestep.trace.history import HasTrace, best_setting, check_trace
from curvestep.trace.trace import TRACE, Trace

if TYPE_CHECKING:
    from curvestep.advice.metric import Given, Metric
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


def advise(
    *runs: Source | Sequence[Source],
    metric: Given | None = None,
    mode: str | None = None,
    progress: bool = True,
    max_norm: float | None = None,
) -> Advice:
    """Say what to run next: the same learning rate, a larger or a smaller one, and why.

    From one run, by a table of conditions (:mod:`~curvestep.advice.decision`): it shows steps that were far
    too long or too short, but cannot rank learning rates within a factor of ten. From several seeds of one
    setting: what most of them say. From several settings: the best, its ties, and the next learning rate to
    try. A run that ended early, still runs or was trained in another way is named and decides nothing.

    Args:
        runs: Probed runs, at least one: probes, traces, their files or run folders, fits, folders that hold
            several runs, or lists of these. Several must be of one task, with one kind of optimizer and one
            batch size. Or one log of a trainer (``trainer_state.json``, ``metrics.csv``, an export of W&B, an
            event file of TensorBoard), which gives facts only.
        metric: Ranks several runs in place of the training loss: the name of a column of their rows or of
            the trainer's log beside them, or ``{"accuracy": [0.91, "b/metrics.csv"]}`` with a value or a log
            for each run.
        mode: ``"min"`` if a low metric is better, ``"max"`` if a high one is. Its name says so as a rule.
        progress: Whether a falling loss is progress. Pass False for policies and for the players of a GAN:
            then the answer is about stability, spikes and clipping only.
        max_norm: For a log: the threshold, to count the clipped steps.

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
    log = _log_among(runs)
    if log is not None:
        return _from_log(log, max_norm)
    if max_norm is not None:
        raise ValueError("`max_norm` is for a trainer's log: a trace knows its own.")
    traces = [trace for run in runs for trace in _traces_of(run)]
    if not traces:
        raise ValueError("`runs` must be at least one probe, trace, fit or path, got none.")
    ranked_by = None
    if metric is not None:
        from curvestep.advice.metric import metric_of

        ranked_by = metric_of(metric, mode, traces)
        progress = progress and ranked_by.is_loss
    used = [k for k, trace in enumerate(traces) if len(trace)] or [0]
    if len(used) == 1:
        outcome = outcome_of(traces[used[0]])
        advice = _from_run(outcome, decide(outcome, progress=progress), progress=progress)
        if ranked_by is None:
            return advice
        note = words.note_on_metric(ranked_by.name, ranked_by.values[used[0]])
        return replace(advice, reasons=(note, *advice.reasons))
    if ranked_by is not None:
        ranked_by = replace(ranked_by, values=tuple(ranked_by.values[k] for k in used))
    return _from_several([traces[k] for k in used], ranked_by, progress=progress)


def _log_among(runs: Sequence[Source | Sequence[Source]]) -> str | Path | None:
    """The log of a trainer, if one is given; a trace beside it in a folder goes first."""
    logs = [run for run in runs if isinstance(run, (str, Path)) and is_trainer_log(run)]
    if logs and len(runs) > 1:
        raise ValueError("Ask about one log at a time: logs cannot be compared. Give `metric=` with traces.")
    return logs[0] if logs else None


def is_trainer_log(place: str | Path) -> bool:
    """Whether a path is the log of a trainer, or a folder with one and without a trace."""
    from curvestep.advice.training_log import is_log  # of use to paths only

    path = Path(place)
    return is_log(path) and not (path.is_dir() and any(path.rglob(TRACE)))


def _from_log(path: str | Path, max_norm: float | None) -> Advice:
    """What the log of a trainer shows by itself."""
    from curvestep.advice.log_facts import facts_of
    from curvestep.advice.log_words import notes_on_log, verdict_on_log
    from curvestep.advice.training_log import read_log

    facts = facts_of(read_log(path), max_norm)
    return Advice(action=FACTS, kind="log", verdict=verdict_on_log(facts), reasons=notes_on_log(facts))


def _traces_of(run: Source | Sequence[Source]) -> list[Trace]:
    """The trace of a run, or those of several."""
    if isinstance(run, (list, tuple)):
        return [trace for one in run for trace in _traces_of(one)]
    if isinstance(run, (str, Path)) and Path(run).is_dir() and not (Path(run) / TRACE).exists():
        from curvestep.trace.sources import traces_by_task  # of use to folders of runs only

        return [trace for traces in traces_by_task([run]).values() for trace in traces]
    return [check_trace(run)]  # pyright: ignore[reportArgumentType]  # no sequence is left


def _from_run(
    run: Outcome, condition: Condition, lr: float | None = None, *, progress: bool = True
) -> Advice:
    """What a run says alone; ``lr`` is that of several like it."""
    lr = lr or condition.next_lr(run)
    return Advice(
        action=condition.action,
        kind=condition.kind,
        lr=lr,
        max_norm=None if lr is None or math.isnan(run.max_norm) else condition.next_max_norm(run),
        verdict=words.verdict_on(condition, run, lr, progress=progress),
        reasons=words.reasons_for(condition, run),
        warnings=words.warnings_about(run),
        lr_is_peak=run.scheduled,
    )


def _from_several(traces: list[Trace], metric: Metric | None, *, progress: bool) -> Advice:
    """The best of several settings as it was run; where only one can be compared, what its runs say."""
    from curvestep.advice.settings import compare, next_lr  # of use to several runs only

    comparison = compare(traces, metric, progress=progress)
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
        return _from_seeds(settings[0], left_out, metric)
    best = settings[best_setting({place: setting.losses for place, setting in enumerate(settings)})]
    following = next_lr(best, settings, by_loss=metric is None)
    return Advice(
        action=TAKE,
        kind="best-setting",
        lr=best.outcome.lr,
        max_norm=None if math.isnan(best.outcome.max_norm) else best.outcome.max_norm,
        verdict=words.verdict_on_settings(best, settings, following, metric),
        reasons=words.reasons_for_settings(best, settings, metric),
        warnings=left_out,
        lr_is_peak=best.outcome.scheduled,
        next_lr=following,
    )


def _from_seeds(setting: Setting, left_out: tuple[Note, ...], metric: Metric | None) -> Advice:
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
            reasons=words.reasons_for_seeds(setting, metric),
            warnings=left_out,
        )
    lr = setting.common_lr
    # The run whose own answer is nearest to the common one explains it.
    typical = min(agreeing, key=lambda run: abs(math.log((run.next_lr or 1.0) / (lr or 1.0))))
    advice = _from_run(typical.outcome, typical.condition, lr)
    return replace(
        advice,
        reasons=(*words.reasons_for_seeds(setting, metric), *advice.reasons),
        warnings=(*advice.warnings, *left_out),
    )
