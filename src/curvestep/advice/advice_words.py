"""The sentences of advise: verdicts, reasons and warnings, each made here from the facts."""

from __future__ import annotations

import math

from curvestep.advice.decision import CANNOT_TELL, DATA, DIVERGED, KEEP, LOWER, RAISE, STUCK, Condition
from curvestep.advice.outcome import Outcome
from curvestep.advice.settings import TriedSetting
from curvestep.notes import Note
from curvestep.trace.schema import LEAST_ROWS

MOST_LISTED = 10  # settings

# By the kind of a condition, else by its action.
VERDICTS = {
    KEEP: "KEEP {setting}: no sign that it is more than 10 times too high or too low.",
    RAISE: "RAISE {change}",
    LOWER: "LOWER {change}",
    DIVERGED: "DIVERGED: run calibrate, or lower {change}",
    "not-finite": "DIVERGED by step {run.lost_at}: run calibrate, or lower {change}",
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
}
_HOW_STEPS_WENT = {
    "inefficient": ". Steps are too long, or gradients add up: is `zero_grad` called?",
    "short-steps": ". Steps are short.",
}


def verdict_on(found: Condition, run: Outcome) -> str:
    """One line to act on: the answer in capitals, the old value and the new one."""
    rate, since = rate_name(run.scheduled), run.sound_until + 1
    template = VERDICTS.get(found.kind) or VERDICTS[found.action]
    lr = found.next_lr(run)
    return template.format(
        setting=setting_name(run),
        change=f"{rate} {run.lr:.3g} -> {lr:.3g}" if lr else rate,
        steps=f"step {since}" if since == run.lost_at else f"steps {since} to {run.lost_at}",
        least=LEAST_ROWS,
        run=run,
        failure=" ".join(run.failure.split()),  # whole: what to do stands at its end
    )


def reasons_for(found: Condition, run: Outcome) -> tuple[Note, ...]:
    """Reasons of the verdict, a line each: the loss, the steps, the start, clipping, what to do next."""
    if found.action == CANNOT_TELL:
        return ()
    texts = {}
    if run.num_losses:
        ends = f"{run.first_loss:.3g} -> {run.last_loss:.3g}"
        texts["loss"] = f"in training {ends}, highest {run.highest_loss:.3g}"
    if math.isfinite(run.kappa):
        gain = ""
        if run.efficiency >= 0:  # else it rose, or is not known
            gain = f"achieves {run.efficiency:.0%} of the predicted fall of the loss and "
        change = f"changes the gradient by {run.kappa:.2g} of its norm"
        texts["steps"] = f"a step {gain}{change}{_HOW_STEPS_WENT.get(found.kind, '')}"
    if run.start_factor > 0 and found.action != KEEP:
        texts["start"] = f"at first, steps work up to {run.start_factor:.2g} times their length"
    if run.clipped == 0:
        texts["clipping"] = "no step was clipped"
    elif run.clipped > 0:
        share = f"about {run.clipped:.0%} of the steps are clipped, at {run.max_norm:.3g}"
        effect = "for these only lr x max_norm counts"
        if run.family.is_adaptive:
            effect = "Adam rescales them, so max_norm does little"
        elif run.threshold != "max_norm":
            effect = f"this is the {run.threshold}, which shortens the others less"
        texts["clipping"] = f"{share}; {effect}"
    if found.action in (KEEP, RAISE, LOWER):
        texts["next"] = "one run says no more: run calibrate, or give two runs, advise(a, b)"
    return tuple(Note(kind, text) for kind, text in texts.items())


def warnings_about(run: Outcome) -> tuple[Note, ...]:
    """Doubts about the answer; of Adam none, for which a threshold does nothing."""
    if run.family.is_adaptive or not run.floor > run.max_norm / 2:
        return ()
    held = f"Noise is above max_norm {run.max_norm:.3g}: gradients may never fall below {run.floor:.2g}."
    return (Note("clipping-floor", f"{held} Raise max_norm or the batch size."),)


def verdict_on_settings(best: TriedSetting, settings: list[TriedSetting], following: float | None) -> str:
    """Which of several settings to take, and what to try before settling."""
    rank = f"best of {len(settings)} settings"
    if len(settings) == 1:
        rank = f"the only setting of {len(best.losses)} runs"
    further = f"; try {rate_name(best.run.scheduled)} {following:.3g} next" if following else ""
    return f"TAKE {setting_name(best.run)}: {rank}{further}."


def reasons_for_settings(best: TriedSetting, settings: list[TriedSetting]) -> tuple[Note, ...]:
    """The ties, and a line for each setting, the best ten of them."""
    ranked = sorted(settings, key=lambda setting: (not math.isfinite(setting.loss), setting.loss))
    lines = [f"{setting_name(setting.run)}: {_ending(setting)}" for setting in ranked[:MOST_LISTED]]
    if len(ranked) > MOST_LISTED:
        lines.append(f"{len(ranked) - MOST_LISTED} other settings are not listed.")
    found = [Note("setting", line) for line in lines]
    ties = [setting_name(setting.run) for setting in ranked if setting.ties_with(best)]
    if ties:
        found.insert(0, Note("tie", f"As good within noise (two standard errors): {'; '.join(ties[:3])}."))
    return tuple(found)


def rate_name(scheduled: bool) -> str:
    """Name of ``lr``: of a schedule its peak."""
    return "peak lr" if scheduled else "lr"


def setting_name(run: Outcome) -> str:
    """The setting as a person writes it."""
    clip = "" if math.isinf(run.max_norm) else f", {run.threshold} {run.max_norm:.3g}"
    return f"{rate_name(run.scheduled)} {run.lr:.3g}{clip}"


def _ending(setting: TriedSetting) -> str:
    lost, num_runs = sum(map(math.isinf, setting.losses)), len(setting.losses)
    if lost:
        return f"diverged in {lost} of {num_runs} runs".removesuffix(" in 1 of 1 runs")
    if math.isnan(setting.loss):
        return "cannot be compared: it ended early, or has no loss"
    return f"loss {setting.loss:.4g} ± {setting.error:.2g}, {num_runs} runs".removesuffix(", 1 runs")
