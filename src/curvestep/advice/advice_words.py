"""The sentences of advise: verdicts, reasons and warnings, each made here from the facts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from curvestep.advice.decision import CANNOT_TELL, DATA, DIVERGED, KEEP, LOWER, RAISE, STUCK, Condition
from curvestep.advice.outcome import Outcome
from curvestep.notes import Note
from curvestep.trace.schema import LEAST_ROWS

if TYPE_CHECKING:
    from curvestep.advice.settings import LeftOut, Setting

MOST_LISTED = 10  # settings

# By the kind of a condition, else by its action.
VERDICTS = {
    KEEP: "KEEP {setting}: no sign that it is more than 10 times too high or too low.",
    RAISE: "RAISE {change}",
    LOWER: "LOWER {change}",
    DIVERGED: "DIVERGED: run calibrate, or lower {change}",
    "not-finite": "DIVERGED by step {run.nonfinite_at}: run calibrate, or lower {change}",
    STUCK: "STUCK: run calibrate, or lower {change}",
    DATA: "DATA: look at the data of {steps}, and at the loss. lr does not look like the cause.",
    "no-progress": "STUCK: the loss hardly fell, and not because of lr. Look at labels, inputs and model.",
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
# Why a run of several decides nothing.
LEFT_OUT = {
    "differs": "It differs in {fact}",
    "running": "It still runs, with {fact} steps so far",
    "ended-early": "It ended early, after {fact} steps",
    "no-loss": "It has no loss to compare at its end",
}
# What follows from how steps went, by the kind of the condition.
STEPS_WENT = {
    "inefficient": "Steps are too long, or gradients add up: is `zero_grad` called?",
    "short-steps": "Steps are short.",
}


def verdict_on(condition: Condition, run: Outcome, lr: float | None = None) -> str:
    """One line to act on: the answer in capitals, the old value and the new one, this run's own if none."""
    lr = lr or condition.next_lr(run)
    rate = rate_name(run.scheduled)
    change = f"{rate} {run.lr:.3g} -> {lr:.3g}" if lr else rate
    first_bad = run.finite_until + 1
    steps = f"step {first_bad}"
    if first_bad != run.nonfinite_at:
        steps = f"steps {first_bad} to {run.nonfinite_at}"
    template = VERDICTS.get(condition.kind) or VERDICTS[condition.action]
    return template.format(
        setting=setting_name(run),
        change=change,
        steps=steps,
        least=LEAST_ROWS,
        run=run,
        failure=" ".join(run.failure.split()),  # whole: what to do stands at its end
    )


def reasons_for(condition: Condition, run: Outcome) -> tuple[Note, ...]:
    """Reasons of the verdict, a line each: the loss, the steps, the start, clipping, what to do next."""
    if condition.action == CANNOT_TELL:
        return ()
    notes = []
    if run.num_losses:
        ends = f"{run.first_loss:.3g} -> {run.last_loss:.3g}"
        highest = "not finite" if math.isinf(run.highest_loss) else f"{run.highest_loss:.3g}"
        notes.append(Note("loss", f"in training {ends}, highest {highest}"))
    if math.isfinite(run.kappa):
        notes.append(Note("steps", _steps(condition, run)))
    if run.start_factor > 0 and condition.action != KEEP:
        longest = f"{run.start_factor:.2g} times their length"
        notes.append(Note("start", f"at first, steps work up to {longest}"))
    if run.clipped >= 0:
        notes.append(Note("clipping", _clipping(run)))
    if condition.action in (KEEP, RAISE, LOWER):
        following = "one run says no more: run calibrate, or give two runs, advise(a, b)"
        notes.append(Note("next", following))
    return tuple(notes)


def _steps(condition: Condition, run: Outcome) -> str:
    """What a step of the run does to loss and gradient."""
    effects = []
    if run.efficiency >= 0:  # else it rose, or is not known
        effects.append(f"achieves {run.efficiency:.0%} of the predicted fall of the loss")
    effects.append(f"changes the gradient by {run.kappa:.2g} of its norm")
    effect = f"a step {' and '.join(effects)}"
    if condition.kind not in STEPS_WENT:
        return effect
    return f"{effect}. {STEPS_WENT[condition.kind]}"


def _clipping(run: Outcome) -> str:
    """How many steps were clipped, and what that does."""
    if run.clipped == 0:
        return "no step was clipped"
    if run.family.is_adaptive:
        effect = "Adam rescales them, so max_norm does little"
    elif run.threshold != "max_norm":
        effect = f"this is the {run.threshold}, which shortens the others less"
    else:
        effect = "for these only lr x max_norm counts"
    return f"about {run.clipped:.0%} of the steps are clipped, at {run.max_norm:.3g}; {effect}"


def warnings_about(run: Outcome) -> tuple[Note, ...]:
    """Doubts about the answer."""
    notes = []
    if run.idle_peak > 0:
        text = (
            f"The schedule has a peak of {run.idle_peak:.3g}, but lr never moved from {run.lr:.3g}. "
            "Is `scheduler.step()` called?"
        )
        notes.append(Note("idle-schedule", text))
    # Under Adam a threshold does nothing.
    if not run.family.is_adaptive and run.floor > run.max_norm / 2:
        text = (
            f"Noise is above max_norm {run.max_norm:.3g}: gradients may never fall below {run.floor:.2g}. "
            "Raise max_norm or the batch size."
        )
        notes.append(Note("clipping-floor", text))
    return tuple(notes)


def verdict_on_settings(best: Setting, settings: Sequence[Setting], following: float | None) -> str:
    """Which of several settings to take, and what to try before settling."""
    further = ""
    if following:
        further = f"; try {rate_name(best.outcome.scheduled)} {following:.3g} next"
    return f"TAKE {setting_name(best.outcome)}: best of {len(settings)} settings{further}."


def reasons_for_settings(best: Setting, settings: Sequence[Setting]) -> tuple[Note, ...]:
    """The ties, and a line for each setting, the best ten of them."""
    ranked = sorted(settings, key=lambda setting: setting.loss)
    notes = []
    ties = [setting_name(setting.outcome) for setting in ranked if setting.ties_with(best)]
    if ties:
        notes.append(Note("tie", f"As good within noise (two standard errors): {'; '.join(ties[:3])}."))
    for setting in ranked[:MOST_LISTED]:
        notes.append(Note("setting", f"{setting_name(setting.outcome)}: {_ending(setting)}"))
    if len(ranked) > MOST_LISTED:
        notes.append(Note("setting", f"{len(ranked) - MOST_LISTED} other settings are not listed."))
    return tuple(notes)


def reasons_for_seeds(setting: Setting) -> tuple[Note, ...]:
    """What each run of one setting says alone, and how far their losses lie apart."""
    answers = Counter(run.condition.action.upper() for run in setting.runs)
    counts = ", ".join(f"{answer} in {count}" for answer, count in answers.most_common())
    rates = sorted(run.next_lr for run in setting.agreeing if run.next_lr)
    between = ""
    if rates and rates[-1] > rates[0]:
        between = f", with lr {rates[0]:.3g} to {rates[-1]:.3g}"
    return (
        Note("seeds", f"{len(setting.runs)} runs of one setting: {counts}{between}"),
        Note("setting", f"{setting_name(setting.outcome)}: {_ending(setting)}"),
    )


def notes_on_left_out(left_out: Iterable[LeftOut]) -> tuple[Note, ...]:
    """A note for each run that decides nothing."""
    notes = []
    for run, kind, fact in left_out:
        reason = LEFT_OUT[kind].format(fact=fact)
        notes.append(Note(kind, f"{run.name} ({setting_name(run.outcome)}) decides nothing. {reason}."))
    return tuple(notes)


def rate_name(scheduled: bool) -> str:
    """Name of ``lr``: of a schedule its peak."""
    return "peak lr" if scheduled else "lr"


def setting_name(run: Outcome) -> str:
    """The setting as a person writes it."""
    clip = "" if math.isinf(run.max_norm) else f", {run.threshold} {run.max_norm:.3g}"
    return f"{rate_name(run.scheduled)} {run.lr:.3g}{clip}"


def _ending(setting: Setting) -> str:
    """How the runs of a setting ended."""
    num_runs = len(setting.runs)
    if setting.num_diverged:
        return "diverged" if num_runs == 1 else f"diverged in {setting.num_diverged} of {num_runs} runs"
    loss = f"loss {setting.loss:.4g} ± {setting.error:.2g}"
    return loss if num_runs == 1 else f"{loss}, {num_runs} runs"
