"""The verdict on each task at the top of the page: numbers, why, how sure, code to copy, doubts."""

from __future__ import annotations

import math

import torch

import curvestep
from curvestep.advice.advice import Advice
from curvestep.advice.advice_words import rate_name
from curvestep.advice.decision import CANNOT_TELL, DIVERGED
from curvestep.fit.samples import lr_of_run
from curvestep.lab.recipe_fields import Fields
from curvestep.lab.report.views import DAMAGED, RunView, Task
from curvestep.notes import Note

OWN_NAMES = {"NormalizedSGD": "offset"}  # of thresholds
_SUBJECTS = {"loss": "loss ", "start": "at the start "}  # of reasons that name none
_MOST_SHOWN = 4  # notes of a kind at the top; the others are one click away


def verdict(task: Task, *, title: str = "") -> Fields:
    """Verdict of a task's runs together: numbers, reasons, and what to know before relying on them."""
    first, *others = task.runs
    so_far = ""
    if first.status == "running" and not others:
        so_far = f"It is not finished: it has taken {first.step:,} steps. "
    missing = _missing(task)
    advice = task.advice
    if advice is None or advice.action == CANNOT_TELL:
        return {"title": title, **_without_advice(task, so_far), **_parted(missing)}
    return {
        "title": title,
        "action": advice.action,
        "verdict": f"{so_far}{advice.verdict}",
        "answer": f"{so_far}{advice.verdict.removeprefix(advice.action.upper())}",
        "advice": advice_table(advice, task),
        "code": code_for(advice, first),
        "sure": how_sure(task, [note.text for note in advice.reasons if note.kind == "tie"]),
        "reasons": [_reason(note) for note in advice.reasons if note.kind != "tie"],
        **_parted([*map(str, advice.warnings), *missing]),
    }


def _reason(note: Note) -> str:
    """A reason as a phrase that stands alone: of the loss and of the start with what it is about."""
    return f"{_SUBJECTS.get(note.kind, '')}{note.text}"


def _parted(notes: list[str]) -> Fields:
    return {"warnings": notes[:_MOST_SHOWN], "more": notes[_MOST_SHOWN:]}


def _missing(task: Task) -> list[str]:
    """Facts that runs lack, and how they were lost; of a lone run only what its verdict does not say."""
    if len(task.runs) == 1:
        return [note.text for note in task.runs[0].notes if note.kind == DAMAGED]
    lines: list[str] = []
    for view in task.runs:
        if view.is_lost:
            reason = view.facts.get("message", "its loss rose far, or was not finite")
            lines.append(f"{view.name}: diverged with {view.setting}; {reason}.")
            continue
        if view.status == "running":
            lines.append(f"{view.name} is not finished: this is what {view.step:,} steps say.")
        lines += [f"{view.name}: {note}" for note in view.notes]
    return lines


def _without_advice(task: Task, so_far: str) -> Fields:
    """The verdict where nothing can be advised."""
    lost = [
        f"{view.setting}: {view.facts.get('message', f'at step {view.step:,}')}"
        for view in task.runs
        if view.is_lost
    ]
    if len(lost) == len(task.runs):
        way_out = "Clip at a smaller max_norm or lower lr; calibrate measures both beforehand."
        answer = f"{'; '.join(lost)}. {way_out}"
        return {"action": DIVERGED, "verdict": f"DIVERGED {answer}", "answer": answer}
    found = "No advice: nothing was measured. Train with a probe (--probe-every 5), and make the page again."
    if task.advice is not None:
        found = task.advice.verdict
    return {"verdict": f"{so_far}{found}", "answer": f"{so_far}{found}"}


def advice_table(advice: Advice, task: Task) -> dict[str, str]:
    """The numbers of the advice, of one run old and new, rounded for reading; none where it has none."""
    if advice.lr is None or advice.max_norm is None:
        return {}
    rate, lr = rate_name(advice.lr_is_peak), f"{advice.lr:.3g}"
    table = {"rate": rate, "lr": lr, "max_norm": f"{advice.max_norm:.3g}".replace("inf", "none")}
    if advice.next_lr is not None:
        table["next"] = f"{rate} {advice.next_lr:.3g}"
    view, *others = task.runs
    if others:
        return table
    taken = f"{lr_of_run(view.header, view.measured['lr']):.3g}"
    share = f"{view.clipped_fraction:.0%} of steps clipped".replace("nan% of steps clipped", "")
    return {**table, "lr": " → ".join(dict.fromkeys((taken, lr))), "clipped": share}


def how_sure(task: Task, ties: list[str]) -> str:
    """What the verdict rests on, in a line."""
    view, *others = task.runs
    if others:
        return " ".join([f"{len(task.runs)} runs are compared by their final training loss.", *ties])
    return f"one run of {len(view.measured['step']):,} measurements cannot rank lr within a factor of 10."


def code_for(advice: Advice, view: RunView) -> str:
    """Lines that make an optimizer as advised; empty where no number or no optimizer is known.

    Example:
        >>> advice = Advice(
        ...     action="keep", kind="no-sign", verdict="", lr=0.003, max_norm=0.92, lr_is_peak=True
        ... )
        >>> header = {"optimizer": "AdamW", "weight_decay": 0.1}
        >>> print(code_for(advice, RunView(name="", setting="", header=header)))
        opt = torch.optim.AdamW(model.parameters(), lr=0.003, weight_decay=0.1)
        cs.clip(opt, 0.92)
        # lr is the peak: keep your schedule
    """
    name = str(view.header.get("optimizer", ""))
    if advice.lr is None or advice.max_norm is None or not name.isidentifier():
        return ""
    settings = f"model.parameters(), lr={advice.lr:.3g}"
    for option in ("momentum", "weight_decay"):
        if value := view.header.get(option):
            settings += f", {option}={value:g}"
    threshold = f"{advice.max_norm:.3g}".replace("inf", "float('inf')")
    if hasattr(curvestep, name):
        lines = [f"opt = cs.{name}({settings}, {OWN_NAMES.get(name, 'max_norm')}={threshold})"]
    else:
        home = "torch.optim." if hasattr(torch.optim, name) else ""
        lines = [f"opt = {home}{name}({settings})", f"cs.clip(opt, {threshold})"]
        lines = lines[: 1 + math.isfinite(advice.max_norm)]
    if advice.lr_is_peak:
        lines.append("# lr is the peak: keep your schedule")
    return "\n".join(lines)
