"""The verdict on each task at the top of the page: numbers, reasons, and doubts."""

from __future__ import annotations

import math

from curvestep.advice.advice import Advice
from curvestep.advice.advice_words import rate_name
from curvestep.lab.recipes import Fields
from curvestep.lab.report.views import NOT_JUDGED, NOT_MEASURED, Task

_MOST_SHOWN = 4  # notes of a kind at the top; the others are one click away


def verdict(task: Task, *, title: str = "") -> Fields:
    """Verdict of a task's runs together: numbers, reasons, and what to know before relying on them."""
    first, *others = task.runs
    missing = _missing_in_all(task) if others else _missing_in_one(task)
    so_far = ""
    if first.status == "running" and not others:
        so_far = f"Not finished, {first.step:,} steps so far. "
    shown: Fields = {"title": title, "more": missing[_MOST_SHOWN:], "warnings": missing[:_MOST_SHOWN]}
    advice = task.advice
    if advice is None or not task.judged:
        found = f"{so_far}{_without_advice(task)}"
        return {**shown, "verdict": found, "answer": found}
    warnings = map(str, advice.warnings) if others else first.warnings
    return {
        **shown,
        "action": advice.action,
        "verdict": f"{so_far}{advice.verdict}",
        "answer": f"{so_far}{advice.verdict.removeprefix(advice.action.upper())}",
        "advice": advice_table(advice),
        "reasons": [f"{note.kind}: {note.text}" for note in advice.reasons],
        "warnings": [*warnings, *shown["warnings"]],
    }


def _missing_in_one(task: Task) -> list[str]:
    """Facts that the only run of a task lacks, as far as its verdict does not say so itself."""
    (view,) = task.runs
    if view.status == "diverged":
        return []  # that it has too few rows is no reason to train it longer
    said = () if task.judged else (NOT_MEASURED, NOT_JUDGED)
    return [note.text for note in view.notes if note.kind not in said]


def _missing_in_all(task: Task) -> list[str]:
    lines: list[str] = []
    for view in task.runs:
        if view.status == "diverged":
            reason = view.facts.get("message", "no reason is on record")
            lines.append(f"{view.name}: diverged with {view.setting}; {reason}.")
            continue
        if view.status == "running":
            lines.append(f"{view.name} is not finished: this is what {view.step:,} steps say.")
        lines += [f"{view.name}: {note}" for note in view.notes]
    return lines


def _without_advice(task: Task) -> str:
    """The verdict where nothing can be advised."""
    if all(view.status == "diverged" for view in task.runs):
        ends = [
            f"{view.setting}: {view.facts.get('message', f'at step {view.step:,}')}" for view in task.runs
        ]
        return (
            f"Diverged ({'; '.join(ends)}). Clip at a smaller max_norm or lower lr; calibrate measures both "
            "beforehand."
        )
    if task.advice is None:
        return (
            "No advice: nothing was measured. Train with a probe (--probe-every 5), and make the page again."
        )
    return task.advice.verdict


def advice_table(advice: Advice) -> dict[str, str]:
    """The numbers of the advice, rounded for reading; none where it has none."""
    if advice.lr is None or advice.max_norm is None:
        return {}
    max_norm = "no step clipped" if math.isinf(advice.max_norm) else f"{advice.max_norm:.3g}"
    following = ""
    if advice.next_lr is not None:
        following = f"{rate_name(advice.lr_is_peak)} {advice.next_lr:.3g}"
    return {
        "rate": "peak learning rate" if advice.lr_is_peak else "learning rate",
        "lr": f"{advice.lr:.3g}",
        "max_norm": max_norm,
        "next": following,
    }
