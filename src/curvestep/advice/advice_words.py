"""The sentences of advise: verdicts, reasons and warnings, each made here from the facts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from curvestep.advice.decision import (
    CANNOT_TELL,
    DATA,
    DIVERGED,
    LOWER,
    MOSTLY_CLIPPED,
    NO_SIGN,
    RAISE,
    STUCK,
    Condition,
)
from curvestep.advice.outcome import Outcome
from curvestep.notes import Note
from curvestep.optimizer_family import Family
from curvestep.trace.schema import LEAST_ROWS

if TYPE_CHECKING:
    from curvestep.advice.metric import Metric
    from curvestep.advice.settings import LeftOut, Setting

MOST_LISTED = 10  # settings

# By the kind of a condition, else by its action.
VERDICTS = {
    NO_SIGN: "NO SIGN against {setting}. One run does not show whether another lr is better.",
    RAISE: "RAISE {change}",
    LOWER: "LOWER {change}",
    DIVERGED: "DIVERGED: lower {change}, or run calibrate",
    "not-finite": "DIVERGED by step {run.nonfinite_at}: lower {change}, or run calibrate",
    STUCK: "STUCK: lower {change}, or run calibrate",
    DATA: "DATA: look at the data and the loss of {steps}. Until then the loss was falling.",
    "no-progress": "STUCK: steps lower the loss of their own batches only. Check labels, inputs and model.",
    "no-rows": "CANNOT TELL: no step was measured. Call `probe.watch`, `probe.record` and `optimizer.step`.",
    "no-loss": "CANNOT TELL: no row has a loss. Hand it to the probe: `probe.record(loss_fn)`.",
    "no-lr": "CANNOT TELL: no row has lr. Let the probe see the optimizer: `probe.watch(optimizer)`.",
    "no-step": "CANNOT TELL: no parameter moved. Does the optimizer hold the parameters? Is lr above 0?",
    "failed-rows": "CANNOT TELL: measurements failed. {failure}",
    "few-rows": "CANNOT TELL: it needs {least} measured rows and has {run.num_rows}. Probe more: `every=1`.",
    "eval-mode": "CANNOT TELL: the model was in eval mode. Call `model.train()` before training.",
    "not-comparable": "CANNOT TELL: these runs differ in {difference}. Ask about one task and optimizer.",
    "seeds-disagree": "CANNOT TELL: runs of one setting say {answers}. Train another seed.",
}
# Without progress nothing is said about whether training goes well.
NO_PROGRESS_SIGN = "NO SIGN that {setting} is unstable. The loss was not taken for a measure of progress."
# Why a run of several decides nothing.
LEFT_OUT = {
    "differs": "It differs in {fact}",
    "running": "It still runs, with {fact} steps so far",
    "ended-early": "It ended early, after {fact} steps",
    "no-loss": "It has no value to compare",
}


def verdict_on(condition: Condition, run: Outcome, lr: float | None = None, *, progress: bool = True) -> str:
    """One line to act on: the answer in capitals, the old value and the new one, this run's own if none."""
    lr = lr or condition.next_lr(run)
    rate = rate_name(run.scheduled)
    change = f"{rate} {run.lr:.3g} -> {lr:.3g}" if lr else rate
    if condition.widens:
        change = f"max_norm {run.max_norm:.3g} -> {condition.next_max_norm(run):.3g}, at {rate} {run.lr:.3g}"
    first_bad = run.finite_until + 1
    steps = f"step {first_bad}"
    if first_bad != run.nonfinite_at:
        steps = f"steps {first_bad} to {run.nonfinite_at}"
    template = VERDICTS.get(condition.kind) or VERDICTS[condition.action]
    if condition.action == NO_SIGN and not progress:
        template = NO_PROGRESS_SIGN
    return template.format(
        setting=setting_name(run),
        change=change,
        steps=steps,
        least=LEAST_ROWS,
        run=run,
        failure=" ".join(run.failure.split()),  # whole: what to do stands at its end
    )


def reasons_for(condition: Condition, run: Outcome) -> tuple[Note, ...]:
    """Reasons of the verdict, a line each: the loss, the steps, their limit, clipping, what to do next."""
    if condition.action == CANNOT_TELL:
        return ()
    notes = []
    if run.num_losses:
        highest = "a value that is not finite" if math.isinf(run.highest_loss) else f"{run.highest_loss:.3g}"
        text = (
            f"training loss goes from {run.first_loss:.3g} to {run.last_loss:.3g}; the highest is {highest}"
        )
        notes.append(Note("loss", text))
    if math.isfinite(run.kappa):
        notes.append(Note("steps", _steps(run)))
    if condition.action in (LOWER, STUCK) and run.start_factor < 1:
        text = f"the first steps work up to {run.start_factor:.2g} of the length that this lr gives"
        notes.append(Note("start", text))
    if condition.action in (RAISE, NO_SIGN) and math.isfinite(run.stable_lr):
        text = f"the largest measured sharpness is stable up to lr {run.stable_lr:.3g}"
        notes.append(Note("stability", text))
    if run.clipped >= 0:
        notes.append(Note("clipping", _clipping(run)))
    if run.num_spikes:
        text = f"{run.num_spikes} gradient norms stand out, the largest at step {run.worst_spike}"
        notes.append(Note("spikes", text))
    if condition.action in (NO_SIGN, RAISE, LOWER):
        text = "run calibrate, or train a second lr and call advise(first, second)"
        if condition.action == RAISE:
            text = "train again and ask again; one answer raises by ten times at most"
        notes.append(Note("next", text))
    return tuple(notes)


def _steps(run: Outcome) -> str:
    """What a step of the run does to loss and gradient."""
    text = f"a step changes the gradient by {run.kappa:.2g} of its norm"
    if run.efficiency >= 0:  # else it rose, or is not known
        text += f". It lowers the loss of its batch by {run.efficiency:.0%} of what the slope predicts"
    return text


def _clipping(run: Outcome) -> str:
    """How many steps were clipped, and what that does."""
    if run.clipped == 0:
        return "no measured step was clipped"
    where = f" at {run.threshold} {run.max_norm:.3g}" if math.isfinite(run.max_norm) else ""
    text = f"about {run.clipped:.0%} of the steps were clipped{where}"
    if run.clipped >= MOSTLY_CLIPPED and run.family is Family.SGD and run.threshold == "max_norm":
        text += "; the length of these is lr x max_norm"
    return text


def warnings_about(run: Outcome) -> tuple[Note, ...]:
    """Doubts about the answer."""
    notes = []
    if run.idle_peak > 0:
        text = (
            f"The schedule has a peak of {run.idle_peak:.3g}, but lr never moved from {run.lr:.3g}. "
            "Is `scheduler.step()` called?"
        )
        notes.append(Note("idle-schedule", text))
    if run.num_rows and not run.from_start:
        text = (
            f"The rows begin at step {run.first_step}, so the sharpest directions may not show. "
            "Probe the next run from its start."
        )
        notes.append(Note("late-rows", text))
    # Under Adam a threshold does nothing.
    if not run.family.is_adaptive and run.floor > run.max_norm / 2:
        text = (
            f"Noise is above max_norm {run.max_norm:.3g}: gradients may never fall below {run.floor:.2g}. "
            "Raise max_norm or the batch size."
        )
        notes.append(Note("clipping-floor", text))
    return tuple(notes)


def note_on_metric(name: str, value: float) -> Note:
    """The metric of a run, which one run has nothing to compare with."""
    return Note("metric", f"{name} ends at {value:.4g}")


def verdict_on_settings(
    best: Setting, settings: Sequence[Setting], following: float | None, metric: Metric | None
) -> str:
    """Which of several settings to take, and what to try before settling."""
    further = ""
    if following:
        further = f"; try {rate_name(best.outcome.scheduled)} {following:.3g} next"
    rank = "" if metric is None else f" by the {metric.rank}"
    return f"TAKE {setting_name(best.outcome)}: best of {len(settings)} settings{rank}{further}."


def reasons_for_settings(
    best: Setting, settings: Sequence[Setting], metric: Metric | None
) -> tuple[Note, ...]:
    """The ties, and a line for each setting, the best ten of them."""
    ranked = sorted(settings, key=lambda setting: setting.loss)
    notes = []
    ties = [setting_name(setting.outcome) for setting in ranked if setting.ties_with(best)]
    if ties:
        notes.append(Note("tie", f"within two standard errors of it: {'; '.join(ties[:3])}."))
    for setting in ranked[:MOST_LISTED]:
        notes.append(Note("setting", f"{setting_name(setting.outcome)}: {_ending(setting, metric)}"))
    if len(ranked) > MOST_LISTED:
        notes.append(Note("setting", f"{len(ranked) - MOST_LISTED} other settings are not listed."))
    return tuple(notes)


def reasons_for_seeds(setting: Setting, metric: Metric | None) -> tuple[Note, ...]:
    """What each run of one setting says alone, and how far their losses lie apart."""
    answers = Counter(run.condition.action.upper() for run in setting.runs)
    counts = ", ".join(f"{answer} in {count}" for answer, count in answers.most_common())
    rates = sorted(run.next_lr for run in setting.agreeing if run.next_lr)
    between = ""
    if rates and rates[-1] > rates[0]:
        between = f", with lr {rates[0]:.3g} to {rates[-1]:.3g}"
    return (
        Note("seeds", f"{len(setting.runs)} runs of one setting: {counts}{between}"),
        Note("setting", f"{setting_name(setting.outcome)}: {_ending(setting, metric)}"),
    )


def notes_on_left_out(left_out: Iterable[LeftOut]) -> tuple[Note, ...]:
    """A note for each run that decides nothing."""
    notes = []
    for run, kind, fact, planned in left_out:
        reason = LEFT_OUT[kind].format(fact=fact)
        notes.append(Note(kind, f"{run.name} ({setting_name(planned)}) decides nothing. {reason}."))
    return tuple(notes)


def rate_name(scheduled: bool) -> str:
    """Name of ``lr``: of a schedule its peak."""
    return "peak lr" if scheduled else "lr"


def setting_name(run: Outcome) -> str:
    """The setting as a person writes it."""
    clip = "" if not math.isfinite(run.max_norm) else f", {run.threshold} {run.max_norm:.3g}"
    return f"{rate_name(run.scheduled)} {run.lr:.3g}{clip}"


def _ending(setting: Setting, metric: Metric | None) -> str:
    """How the runs of a setting ended."""
    num_runs = len(setting.runs)
    if setting.num_diverged:
        return "diverged" if num_runs == 1 else f"diverged in {setting.num_diverged} of {num_runs} runs"
    name = "loss" if metric is None else metric.name
    value = setting.loss if metric is None else metric.sign * setting.loss
    spread = f" ± {setting.error:.2g}" if math.isfinite(setting.error) else ""
    loss = f"{name} {value:.4g}{spread}"
    return loss if num_runs == 1 else f"{loss}, {num_runs} runs"
