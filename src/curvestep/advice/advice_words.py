"""The sentences of advise: verdicts, reasons and warnings, each made here from the facts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from textwrap import shorten

from curvestep.advice.decision import (
    DATA,
    DIVERGED,
    KEEP,
    LOWER,
    RAISE,
    STUCK,
    Answer,
)
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
    DIVERGED: "DIVERGED{where}: run calibrate, or lower {change}",
    STUCK: "STUCK: run calibrate, or lower {change}",
    DATA: "DATA: look at the data of step {lost_at}, and at its loss. lr does not look like the cause.",
    "no-progress": "STUCK: the loss hardly fell, and not because of lr. Look at labels, inputs and model.",
    "no-rows": "CANNOT TELL: no step was measured. Let the probe see each step: `probe.watch(optimizer)`.",
    "no-loss": "CANNOT TELL: no row has a loss. Hand it to the probe: `probe.record(loss_fn)`.",
    "no-lr": "CANNOT TELL: no row has lr. Let the probe see the optimizer: `probe.watch(optimizer)`.",
    "no-step": "CANNOT TELL: the parameters did not move. Does the optimizer hold them, is lr above 0?",
    "failed-rows": "CANNOT TELL: measurements failed. {failure}",
    "few-rows": "CANNOT TELL: {num_rows} rows of at least {least}. Train longer, or probe more often.",
    "eval-mode": "CANNOT TELL: the model was in eval mode. Call `model.train()` before training.",
}
_HOW_STEPS_WENT = {
    "inefficient": ": too long, or gradients add up (is `zero_grad` called?)",
    "short-steps": ": short",
}
_NEXT = {
    KEEP: "one run cannot rank lr within a factor of 3: give two runs to compare",
    RAISE: "run again and ask again, or give both runs to compare",
    LOWER: "run again and ask again, or give both runs to compare",
}


def verdict_on(decision: Answer, run: Outcome) -> str:
    """One line to act on: the answer in capitals, the old value and the new one."""
    rate = rate_name(run.scheduled)
    template = _VERDICTS.get(decision.kind) or _VERDICTS[decision.action]
    return template.format(
        setting=setting_name(run).removesuffix(", no step clipped"),
        change=rate if decision.lr is None else f"{rate} {run.lr:.3g} -> {decision.lr:.3g}",
        where="" if run.lost_at is None else f" at step {run.lost_at}",
        lost_at=run.lost_at,
        num_rows=run.num_rows,
        least=LEAST_ROWS,
        failure=shorten(run.failure, 110, placeholder=" …"),
    )


def reasons_for(decision: Answer, run: Outcome) -> tuple[Note, ...]:
    """Reasons of the verdict, a line each: the loss, the steps, the start, clipping, what to do next."""
    found = {
        "loss": _about_loss(run),
        "steps": _about_steps(decision, run),
        "start": _about_start(run),
        "clipping": _about_clipping(run),
        "next": _NEXT.get(decision.action, ""),
    }
    return tuple(Note(kind, text) for kind, text in found.items() if text)


def warnings_about(run: Outcome) -> tuple[Note, ...]:
    """Doubts about the answer."""
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
        names = "; ".join(map(setting_name, ties[:3]))
        found.append(Note("tie", f"Tied within two standard errors: {names}."))
    ranked = sorted(settings, key=lambda setting: (not math.isfinite(setting.loss), setting.loss))
    for setting in ranked[:MOST_LISTED]:
        found.append(Note("setting", f"{setting_name(setting)}: {_ending(setting)}"))
    if len(ranked) > MOST_LISTED:
        found.append(Note("setting", f"{len(ranked) - MOST_LISTED} more did worse."))
    return tuple(found)


def rate_name(scheduled: bool) -> str:
    """Name of ``lr``: of a schedule its peak."""
    return "peak lr" if scheduled else "lr"


def setting_name(setting: TriedSetting | Outcome) -> str:
    """The setting as a person writes it."""
    clip = "no step clipped" if math.isinf(setting.max_norm) else f"max_norm {setting.max_norm:.3g}"
    return f"{rate_name(setting.scheduled)} {setting.lr:.3g}, {clip}"


def _ending(setting: TriedSetting) -> str:
    lost, num_runs = sum(math.isinf(loss) for loss in setting.losses), len(setting.losses)
    if lost:
        return "diverged" if num_runs == 1 else f"diverged in {lost} of {num_runs} runs"
    if math.isnan(setting.loss):
        return "cannot be compared: it ended early, or has no loss"
    ending = f"loss {setting.loss:.4g} ± {setting.error:.2g}"
    return ending if num_runs == 1 else f"{ending}, {num_runs} runs"


def _about_loss(run: Outcome) -> str:
    if not run.num_losses:
        return ""
    text = f"{run.first_loss:.3g} -> {run.last_loss:.3g}, highest {run.highest_loss:.3g}"
    return text if run.lost_at is None else f"{text}; not finite at step {run.lost_at}"


def _about_steps(decision: Answer, run: Outcome) -> str:
    if not math.isfinite(run.kappa):
        return ""
    text = f"efficiency {run.efficiency:.0%}, gradient changes by {run.kappa:.2g} of its norm"
    return text + _HOW_STEPS_WENT.get(decision.kind, "")


def _about_start(run: Outcome) -> str:
    factor = run.start_factor
    if not math.isfinite(factor):
        return ""
    times = f"{factor:.2g}x" if factor >= 1 else f"1/{1 / factor:.2g} of"
    return f"the largest working step was {times} the step taken"


def _about_clipping(run: Outcome) -> str:
    if math.isnan(run.clipped):
        return ""
    if run.clipped == 0:
        return "no step was clipped"
    meaning = "for these only lr x max_norm counts"
    if run.family.is_adaptive:
        meaning = "Adam divides by the norm again"
    return f"{run.clipped:.0%} of the steps, at {run.max_norm:.3g}; {meaning}"
