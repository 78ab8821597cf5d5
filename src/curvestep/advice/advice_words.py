"""The sentences of advise: verdicts, reasons and warnings, each made here from the facts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from textwrap import shorten

from curvestep.advice.decision import (
    CANNOT_TELL,
    DATA,
    DIVERGED,
    KEEP,
    LOWER,
    RAISE,
    STUCK,
    Finding,
)
from curvestep.advice.outcome import Outcome
from curvestep.advice.settings import TriedSetting
from curvestep.fit.samples import LEAST_ROWS
from curvestep.notes import Note

MOST_LISTED = 10  # settings

_CANNOT_TELL = {
    "no-rows": "no step was measured. Let the probe see every step: `probe.watch(optimizer)`.",
    "no-loss": "no row has a loss. Hand it to the probe: `probe.record(loss_fn)`.",
    "eval-mode": "the model was in eval mode. Call `model.train()` before training.",
    "no-step": "the parameters did not move. Does the optimizer hold them, and is lr above 0?",
}
_HOW_STEPS_WENT = {
    "inefficient": "too long, or gradients add up (is `zero_grad` called?)",
    "short-steps": "short",
}


def verdict_on(decision: Finding, run: Outcome) -> str:
    """One line to act on: the answer in capitals, the old value and the new one."""
    rate = rate_name(run.scheduled)
    change = "" if decision.lr is None else f"{rate} {run.lr:.3g} -> {decision.lr:.3g}"
    if decision.action == KEEP:
        return f"KEEP {rate} {run.lr:.3g}{_clip_words(run)}: no sign that it is too high or too low."
    if decision.action in (RAISE, LOWER):
        return f"{decision.action.upper()} {change}"
    if decision.action == DIVERGED:
        where = "" if run.lost_at is None else f" at step {run.lost_at}"
        return f"DIVERGED{where}: run calibrate, or lower {change}"
    if decision.action == DATA:
        return f"DATA: look at the data and the loss of step {run.lost_at}. lr does not look like the cause."
    if decision.action == STUCK and decision.lr is not None:
        return f"STUCK: run calibrate, or lower {change}"
    if decision.action == STUCK:
        return "STUCK: the loss hardly fell, and not because of lr. Look at labels, inputs and model."
    assert decision.action == CANNOT_TELL
    if decision.kind == "failed-rows":
        return f"CANNOT TELL: measurements failed. {shorten(run.failure, 110, placeholder=' …')}"
    few = f"{run.num_rows} of at least {LEAST_ROWS} measured rows. Train longer, or probe more often."
    return f"CANNOT TELL: {_CANNOT_TELL.get(decision.kind, few)}"


def reasons_for(decision: Finding, run: Outcome) -> tuple[Note, ...]:
    """What the verdict rests on, a line each: the loss, the steps, the start, clipping, what to do next."""
    found = [_about_loss(run), _about_steps(decision, run), _about_start(run), _about_clipping(run)]
    return tuple(note for note in (*found, _about_next(decision)) if note.text)


def warnings_about(run: Outcome) -> tuple[Note, ...]:
    """What to doubt."""
    found = []
    if math.isfinite(run.floor) and run.floor > 0.5 * run.max_norm:
        text = (
            f"Clipping at {run.max_norm:.3g} can hold the gradient norm at {run.floor:.2g}: noise is larger."
        )
        found.append(Note("clipping-floor", f"{text} Raise max_norm or the batch size."))
    return tuple(found)


def verdict_on_settings(best: TriedSetting, settings: Sequence[TriedSetting], following: float | None) -> str:
    """Which of several settings to take, and what to try before settling."""
    verdict = f"TAKE {setting_name(best)}: best of {len(settings)} settings"
    if following is None:
        return f"{verdict}."
    return f"{verdict}; try {rate_name(best.scheduled)} {following:.3g} next."


def reasons_for_settings(
    best: TriedSetting, ties: Sequence[TriedSetting], settings: Sequence[TriedSetting]
) -> tuple[Note, ...]:
    """The ties, and a line for each setting, the best ten of them."""
    found = []
    if ties:
        names = ", ".join(f"{rate_name(other.scheduled)} {other.lr:.3g}" for other in ties[:3])
        found.append(Note("tie", f"Tied within two standard errors: {names}."))
    ranked = sorted(settings, key=lambda setting: (not math.isfinite(setting.loss), setting.loss))
    for setting in ranked[:MOST_LISTED]:
        found.append(Note("setting", f"{setting_name(setting)}: {_ending(setting)}"))
    if len(ranked) > MOST_LISTED:
        found.append(Note("setting", f"{len(ranked) - MOST_LISTED} more did worse."))
    return tuple(found)


def rate_name(scheduled: bool) -> str:
    """What ``lr`` is: of a schedule its peak."""
    return "peak lr" if scheduled else "lr"


def setting_name(setting: TriedSetting) -> str:
    """The setting as a person writes it."""
    clip = "no step clipped" if math.isinf(setting.max_norm) else f"max_norm {setting.max_norm:.3g}"
    return f"{rate_name(setting.scheduled)} {setting.lr:.3g}, {clip}"


def _ending(setting: TriedSetting) -> str:
    lost = sum(math.isinf(loss) for loss in setting.losses)
    seeds = f", {len(setting.losses)} runs" if len(setting.losses) > 1 else ""
    if lost:
        return f"diverged{f' in {lost} of {len(setting.losses)} runs' if seeds else ''}"
    if math.isnan(setting.loss):
        return "cannot be compared: it ended early, or has no loss"
    return f"loss {setting.loss:.4g} ± {setting.error:.2g}{seeds}"


def _clip_words(run: Outcome) -> str:
    return "" if math.isinf(run.max_norm) else f", max_norm {run.max_norm:.3g}"


def _about_loss(run: Outcome) -> Note:
    text = ""
    if run.num_losses:
        text = f"{run.first_loss:.3g} -> {run.last_loss:.3g}, highest {run.highest_loss:.3g}"
    if run.lost_at is not None:
        text += f"; not finite from step {run.lost_at} on"
    return Note("loss", text)


def _about_steps(decision: Finding, run: Outcome) -> Note:
    if not math.isfinite(run.kappa):
        return Note("steps", "")
    text = f"efficiency {run.efficiency:.0%}, gradient changes by {run.kappa:.2g} of its norm"
    how = _HOW_STEPS_WENT.get(decision.kind)
    return Note("steps", f"{text}: {how}" if how else text)


def _about_start(run: Outcome) -> Note:
    factor = run.start_factor
    if not math.isfinite(factor):
        return Note("start", "")
    times = f"{factor:.2g}x" if factor >= 1 else f"1/{1 / factor:.2g} of"
    return Note("start", f"the largest working step was {times} the step taken")


def _about_clipping(run: Outcome) -> Note:
    share = run.clipped
    if math.isnan(share):
        text = ""
    elif share == 0:
        text = "no step was clipped"
    elif run.family.is_adaptive:
        text = f"{share:.0%} of the steps, at {run.max_norm:.3g}; Adam divides by the norm again"
    else:
        text = f"{share:.0%} of the steps, at {run.max_norm:.3g}; for these only lr x max_norm counts"
    return Note("clipping", text)


def _about_next(decision: Finding) -> Note:
    text = {
        KEEP: "one run cannot rank lr within a factor of 3: give two runs to compare",
        RAISE: "run again and ask again, or give both runs to compare",
        LOWER: "run again and ask again, or give both runs to compare",
    }.get(decision.action, "")
    return Note("next", text)
