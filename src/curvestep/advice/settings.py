"""Several runs of one task: which of them can be compared, and the seeds of each setting together."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean
from typing import NamedTuple

import numpy as np

from curvestep.advice.decision import (
    CANNOT_TELL,
    DIVERGED,
    DOWN,
    LR_FACTOR,
    SAME,
    STABLE_SHARE,
    STUCK,
    Condition,
    decide,
)
from curvestep.advice.metric import Metric
from curvestep.advice.outcome import Outcome, outcome_of
from curvestep.trace.history import difference_of, end_of_run, ends_finite, header_number, task_facts
from curvestep.trace.run import RUNNING as RUN_GOES_ON, read_status
from curvestep.trace.trace import TRACE, Trace

# Share of the longest run's steps that a run must have taken. Runs at a constant rate are compared where the
# shorter ones ended; under a schedule the loss ends lower the further it went.
LEAST_SHARE = 0.5
LEAST_SHARE_OF_SCHEDULE = 0.9

CLEAR_SHARE = 0.8  # of the fall of the best: a setting that reaches less is clearly worse
SAME_THRESHOLD = 1.5  # factor between thresholds of one setting: measured ones differ from seed to seed
LEAST_BEYOND = 1.4  # times the largest lr that was tried: less is no new setting

# Why a run decides nothing.
DIFFERS = "differs"
RUNNING = "running"
ENDED_EARLY = "ended-early"
NO_LOSS = "no-loss"


@dataclass(frozen=True, kw_only=True)
class JudgedRun:
    """A run, and what it says alone."""

    name: str
    outcome: Outcome
    condition: Condition
    loss: float = math.nan  # at the end, or where the shorter runs ended; inf if it diverged
    num_averaged: float = 1.0  # losses that it is a mean of; NaN where a metric has no known noise

    @property
    def next_lr(self) -> float | None:
        """What follows from this run alone."""
        return self.condition.next_lr(self.outcome)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Runs with the same lr, threshold and schedule: seeds of one setting."""

    runs: tuple[JudgedRun, ...]

    @property
    def outcome(self) -> Outcome:
        """The facts of the first run; those of the setting are the same in all."""
        return self.runs[0].outcome

    @property
    def losses(self) -> list[float]:
        """The final losses."""
        return [run.loss for run in self.runs]

    @property
    def loss(self) -> float:
        """Mean of the final losses; inf if a run diverged."""
        return float(np.mean(self.losses))

    @property
    def num_diverged(self) -> int:
        """How many runs diverged."""
        return sum(run.condition.action == DIVERGED for run in self.runs)

    @property
    def error(self) -> float:
        """Standard error of the mean, by the spread or, of a single run, by its noise."""
        if len(self.runs) == 1:
            return self.outcome.noise / math.sqrt(self.runs[0].num_averaged)
        with np.errstate(invalid="ignore"):  # where one diverged
            spread = float(np.std(self.losses, ddof=1))
        return spread / math.sqrt(len(self.runs))

    def ties_with(self, best: Setting) -> bool:
        """Whether it lies within two standard errors of another one, the best."""
        return self is not best and self.loss - best.loss <= 2 * math.hypot(best.error, self.error)

    @property
    def agreeing(self) -> tuple[JudgedRun, ...]:
        """The runs that make the verdict: those whose lr goes the way of most of them; empty if none is that.

        Runs that cannot tell have no voice where another one has. Where half of them diverged, those decide;
        where half of them keep their lr, those do.
        """
        voices = [run for run in self.runs if run.condition.action != CANNOT_TELL] or list(self.runs)
        counts = Counter(run.condition.direction for run in voices)
        majority = [way for way, count in counts.items() if 2 * count > len(voices)]
        if 2 * self.num_diverged >= len(voices):
            majority = [DOWN]
        elif not majority and 2 * counts[SAME] == len(voices):
            majority = [SAME]
        return tuple(run for run in voices if run.condition.direction in majority)

    @property
    def common_lr(self) -> float | None:
        """What follows from the runs of this setting alone: the geometric mean; None for no number."""
        rates = [run.next_lr for run in self.agreeing if run.next_lr]
        return geometric_mean(rates) if rates else None

    @property
    def got_nowhere(self) -> bool:
        """Whether most of its runs diverged or never moved."""
        nowhere = [run for run in self.runs if run.condition.action in (DIVERGED, STUCK)]
        return 2 * len(nowhere) > len(self.runs)


class LeftOut(NamedTuple):
    """A run that decides nothing, and why."""

    run: JudgedRun
    kind: str
    fact: str  # in what it differs from the others, or how many steps it has taken
    planned: Outcome  # with the peak of its schedule, which it may not have reached


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Several runs, as far as they can be compared."""

    settings: tuple[Setting, ...]  # by ascending lr and threshold; empty if no run can be compared
    left_out: tuple[LeftOut, ...]
    difference: str = ""  # in what runs differ, where no kind of run has the majority


def compare(traces: Sequence[Trace], metric: Metric | None = None, *, progress: bool = True) -> Comparison:
    """The settings of these runs, and the runs that cannot be compared with the others.

    They are ranked by the training loss, or by a ``metric`` of one's own.
    """
    facts = [task_facts(trace) for trace in traces]
    alike = _largest_group(facts)
    if not alike:
        differences = [difference_of(facts[0], other) for other in facts]
        return Comparison(settings=(), left_out=(), difference=next(text for text in differences if text))
    runs = [_judged(trace, place, progress=progress) for place, trace in enumerate(traces, 1)]
    longest = max((_reach(traces[k]) for k in alike if ends_finite(traces[k])), default=0.0)
    left_out: list[LeftOut] = []
    complete: list[int] = []
    for k, run in enumerate(runs):
        kind = ""
        if k not in alike:
            kind = DIFFERS
        elif run.condition.action != DIVERGED:
            kind = _why_incomplete(traces[k], run.outcome, longest)
        if not kind:
            complete.append(k)
        elif kind == DIFFERS:
            left_out.append(LeftOut(run, kind, difference_of(facts[alike[0]], facts[k]), run.outcome))
        else:
            planned = _as_planned(run.outcome, traces[k])
            left_out.append(LeftOut(run, kind, _steps_taken(traces[k]), planned))
    horizon = min(
        (traces[k].column("step")[-1] for k in complete if ends_finite(traces[k])), default=math.inf
    )
    comparable: list[JudgedRun] = []
    for k in complete:
        run = _with_loss(runs[k], traces[k], horizon)
        if metric is not None and run.condition.action != DIVERGED:
            run = replace(run, loss=metric.sign * metric.values[k], num_averaged=math.nan)
        if math.isnan(run.loss):
            left_out.append(LeftOut(run, NO_LOSS, _steps_taken(traces[k]), run.outcome))
        else:
            comparable.append(run)
    settings = [Setting(runs=tuple(same)) for same in _seeds_of_settings(comparable)]
    settings.sort(key=lambda setting: (setting.outcome.lr, setting.outcome.max_norm))
    return Comparison(settings=tuple(settings), left_out=tuple(left_out))


def _seeds_of_settings(runs: Sequence[JudgedRun]) -> list[list[JudgedRun]]:
    """The runs by their lr and schedule, and by thresholds that lie close together."""
    same_lr: dict[tuple[str, bool], list[JudgedRun]] = defaultdict(list)
    for run in runs:
        same_lr[f"{run.outcome.lr:.3g}", run.outcome.scheduled].append(run)
    settings = []
    for alike in same_lr.values():
        widest = -math.inf
        for run in sorted(alike, key=lambda run: run.outcome.max_norm):
            max_norm = run.outcome.max_norm
            if not max_norm <= widest:  # not where it is not known, either
                settings.append([])
                widest = SAME_THRESHOLD * max_norm
            settings[-1].append(run)
    return settings


def _judged(trace: Trace, place: int, *, progress: bool) -> JudgedRun:
    """A run and what it says alone; a trace in memory is named by its place."""
    name = f"run {place}"
    if trace.path is not None:
        is_in_folder = trace.path.name == TRACE
        name = trace.path.resolve().parent.name if is_in_folder else trace.path.name
    outcome = outcome_of(trace)
    return JudgedRun(
        name=name or f"run {place}", outcome=outcome, condition=decide(outcome, progress=progress)
    )


def _largest_group(facts: Sequence[dict[str, str]]) -> list[int]:
    """Places of the runs that agree with most others; empty where two groups are equally large."""
    groups = [[k for k, other in enumerate(facts) if not difference_of(one, other)] for one in facts]
    largest = max(groups, key=len)
    rivals = [group for group in groups if len(group) == len(largest) and largest[0] not in group]
    return [] if rivals else largest


def _why_incomplete(trace: Trace, outcome: Outcome, longest: float) -> str:
    """Why a run that did not diverge cannot be compared; empty if it can."""
    if _is_running(trace):
        return RUNNING
    planned = header_number(trace.header, "num_steps", missing=0.0)
    if outcome.scheduled and _reach(trace) < LEAST_SHARE_OF_SCHEDULE * max(planned, longest):
        return ENDED_EARLY
    if _reach(trace) < LEAST_SHARE * longest:
        return ENDED_EARLY
    return "" if outcome.num_losses >= 2 else NO_LOSS


def _is_running(trace: Trace) -> bool:
    """Whether the folder of the run says that it goes on."""
    if trace.path is None or trace.path.name != TRACE:
        return False
    try:
        return read_status(trace.path.parent, {}).get("status") == RUN_GOES_ON
    except ValueError:  # a damaged file says nothing
        return False


def _as_planned(outcome: Outcome, trace: Trace) -> Outcome:
    """The facts with the peak of the schedule."""
    peak = header_number(trace.header, "peak_lr", missing=outcome.lr)
    return replace(outcome, lr=max(peak, outcome.lr))


def _reach(trace: Trace) -> float:
    """The step at which the next row would have come."""
    step = trace.column("step")
    return float(step[-1] + np.diff(step[-2:], prepend=-1)[-1])


def _steps_taken(trace: Trace) -> str:
    return f"{trace.column('step')[-1] + 1:.0f}"


def _with_loss(run: JudgedRun, trace: Trace, horizon: float) -> JudgedRun:
    """The run with its loss at the common step."""
    if run.condition.action == DIVERGED:
        return replace(run, loss=math.inf)
    loss, num_averaged = end_of_run(trace, horizon)
    return replace(run, loss=loss, num_averaged=max(1.0, num_averaged))


def next_lr(best: Setting, settings: Sequence[Setting], *, by_loss: bool = True) -> float | None:
    """What no run tried: the middle of a wide gap beside the best, or what lies beyond the last setting.

    Beyond an end, the runs of the best say how far to go. If they do not, lr moves by a factor of three
    where the setting beside it is clearly worse. Nothing goes beyond the stability that their rows show.
    """
    lr = best.outcome.lr
    rates = sorted({setting.outcome.lr for setting in settings if setting.outcome.lr > 0})
    if lr not in rates:
        return None
    place = rates.index(lr)
    beside = [rates[max(place - 1, 0)], rates[min(place + 1, len(rates) - 1)]]
    far = max(beside, key=lambda rate: abs(math.log(rate / lr)))
    if not LR_FACTOR**-3 < far / lr < LR_FACTOR**3:
        return math.sqrt(lr * far)
    if 0 < place < len(rates) - 1 or len(rates) == 1 or best.got_nowhere:
        return None
    is_low = place == 0
    alone = best.common_lr
    further = lr if alone is None else alone
    if not (further < 0.99 * lr if is_low else further > 1.01 * lr):
        if not by_loss or not _clearly_worse(beside[1 if is_low else 0], best, settings):
            return None
        further = lr / LR_FACTOR if is_low else lr * LR_FACTOR
    limit = min(STABLE_SHARE * run.outcome.stable_lr for run in best.runs)
    if limit < further:  # not where it is not known
        further = limit
    return further if is_low or further > LEAST_BEYOND * lr else None


def _clearly_worse(rate: float, best: Setting, settings: Sequence[Setting]) -> bool:
    """Whether the settings with this lr miss a good part of the fall of the best."""
    first = best.outcome.first_loss
    losses = [setting.loss for setting in settings if setting.outcome.lr == rate]
    return not first - min(losses) >= CLEAR_SHARE * (first - best.loss)
