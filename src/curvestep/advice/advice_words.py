"""The sentences of advise: verdicts, reasons and warnings, each made here from the facts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from textwrap import shorten

from curvestep.advice.decision import DATA, DIVERGED, KEEP, LOWER, RAISE, STUCK, Answer
from curvestep.advice.outcome import Outcome
from curvestep.advice.settings import TriedSetting
from curvestep.fit.samples import LEAST_ROWS
from curvestep.notes import Note

MOST_LISTED = 10  # settings

# By the kind of a condition, else by its action.
_VERDICTS = {
    KEEP: "KEEP {setting}: no sign that it is too high or too low.",
    RAISE: "RAISE {change}",
    LOWER: "LOWER {change}",
    DIVERGED: "DIVERGED: run calibrate, or lower {change}",
    "not-finite": "DIVERGED by step {run.lost_at}: run calibrate, or lower {change}",
    STUCK: "STUCK: run calibrate, or lower {change}",
    DATA: "DATA: look at the data of {steps}, and at the loss. lr does not look like the cause.",
    "no-progress": "STUCK: the loss hardly fell, and not because of lr. Look at labels, inputs and model.",
    "no-rows": "CANNOT TELL: no step was measured. Let the probe see each step: `probe.watch(optimizer)`.",
    "no-loss": "CANNOT TELL: no row has a loss. Hand it to the probe: `probe.record(loss_fn)`.",
    "no-lr": "CANNOT TELL: no row has lr. Let the probe see the optimizer: `probe.watch(optimizer)`.",
    "no-step": "CANNOT TELL: the parameters did not move. Does the optimizer hold them, is lr above 0?",
    "failed-rows": "CANNOT TELL: measurements failed. {failure}",
    "few-rows": "CANNOT TELL: it needs {least} measured rows and has {run.num_rows}. Train or probe more.",
    "eval-mode": "CANNOT TELL: the model was in eval mode. Call `model.train()` before training.",
}
_HOW_STEPS_WENT = {
    "inefficient": ". Steps are too long, or gradients add up: is `zero_grad` called?",
    "short-steps": ". Steps are short.",
}
_NEXT = {
    KEEP: "one run cannot rank lr within a factor of 3: give two runs to compare",
    RAISE: "run again and ask again, or give both runs to compare",
    LOWER: "run again and ask again, or give both runs to compare",
}


def verdict_on(decision: Answer, run: Outcome) -> str:
    """One line to act on: the answer in capitals, the old value and the new one."""
    rate = rate_name(run.scheduled)
    steps = f"steps {run.sound_until + 1} to {run.lost_at}"
    if run.lost_at == run.sound_until + 1:
        steps = f"step {run.lost_at}"
    template = _VERDICTS.get(decision.kind) or _VERDICTS[decision.action]
    return template.format(
        setting=setting_name(run).removesuffix(", no step clipped"),
        change=f"{rate} {run.lr:.3g} -> {decision.lr:.3g}" if decision.lr else rate,
        steps=steps,
        least=LEAST_ROWS,
        run=run,
        failure=shorten(run.failure, 110, placeholder=" …"),
    )


def reasons_for(decision: Answer, run: Outcome) -> tuple[Note, ...]:
    """Reasons of the verdict, a line each: the loss, the steps, the start, clipping, what to do next."""
    found = {}
    if run.num_losses:
        found["loss"] = f"{run.first_loss:.3g} -> {run.last_loss:.3g}, highest {run.highest_loss:.3g}"
    if math.isfinite(run.kappa):
        gain = f"a step gains {run.efficiency:.0%} of what its slope promises"
        text = f"{gain} and changes the gradient by {run.kappa:.2g} of its norm"
        found["steps"] = text + _HOW_STEPS_WENT.get(decision.kind, "")
    if run.start_factor > 0:
        found["start"] = f"the largest working step was {run.start_factor:.2g}x the step taken"
    if run.clipped == 0:
        found["clipping"] = "no step was clipped"
    elif run.clipped > 0:
        effect = "Adam rescales them, so max_norm does little"
        if not run.family.is_adaptive:
            effect = "for these only lr x max_norm counts"
        found["clipping"] = f"{run.clipped:.0%} of the steps are clipped, at {run.max_norm:.3g}; {effect}"
    if decision.action in _NEXT:
        found["next"] = _NEXT[decision.action]
    return tuple(Note(kind, text) for kind, text in found.items())


def warnings_about(run: Outcome) -> tuple[Note, ...]:
    """Doubts about the answer; of Adam none, for which a threshold does nothing."""
    if run.family.is_adaptive or not run.floor > run.max_norm / 2:
        return ()
    held = f"Clipping at {run.max_norm:.3g} can keep gradient norms at {run.floor:.2g}: noise is larger."
    return (Note("clipping-floor", f"{held} Raise max_norm or the batch size."),)


def verdict_on_settings(best: TriedSetting, settings: Sequence[TriedSetting], following: float | None) -> str:
    """Which of several settings to take, and what to try before settling."""
    rank = f"best of {len(settings)} settings"
    if len(settings) == 1:
        rank = f"the only setting of {counted_runs(len(best.losses))}"
    verdict = f"TAKE {setting_name(best)}: {rank}"
    if following is None:
        return f"{verdict}."
    return f"{verdict}; try {rate_name(best.scheduled)} {following:.3g} next."


def reasons_for_settings(ties: Sequence[TriedSetting], settings: Sequence[TriedSetting]) -> tuple[Note, ...]:
    """The ties, and a line for each setting, the best ten of them."""
    found = []
    if ties:
        names = "; ".join(map(setting_name, ties[:3]))
        found.append(Note("tie", f"Tied within two standard errors: {names}."))
    ranked = sorted(settings, key=lambda setting: (not math.isfinite(setting.loss), setting.loss))
    for setting in ranked[:MOST_LISTED]:
        found.append(Note("setting", f"{setting_name(setting)}: {_ending(setting)}"))
    if len(ranked) > MOST_LISTED:
        found.append(Note("setting", f"{len(ranked) - MOST_LISTED} other settings did worse."))
    return tuple(found)


def counted_runs(count: int) -> str:
    """The number with its noun."""
    return {1: "1 run"}.get(count, f"{count} runs")


def rate_name(scheduled: bool) -> str:
    """Name of ``lr``: of a schedule its peak."""
    return "peak lr" if scheduled else "lr"


def setting_name(setting: TriedSetting | Outcome) -> str:
    """The setting as a person writes it."""
    clip = "no step clipped" if math.isinf(setting.max_norm) else f"max_norm {setting.max_norm:.3g}"
    return f"{rate_name(setting.scheduled)} {setting.lr:.3g}, {clip}"


def _ending(setting: TriedSetting) -> str:
    lost, num_runs = sum(map(math.isinf, setting.losses)), len(setting.losses)
    if lost:
        ending = f"diverged in {lost} of {num_runs} runs"
    elif math.isnan(setting.loss):
        ending = "cannot be compared: it ended early, or has no loss"
    else:
        ending = f"loss {setting.loss:.4g} ± {setting.error:.2g}, {counted_runs(num_runs)}"
    return ending.removesuffix(" in 1 of 1 runs").removesuffix(", 1 run")
