"""The text of the page: verdicts, a sentence or two for each chart and run, headings, the setup table."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from markupsafe import Markup

import curvestep
from curvestep.advice.advice import Advice
from curvestep.advice.advice_words import rate_name
from curvestep.advice.decision import CANNOT_TELL, DIVERGED
from curvestep.report.chart import NUM_COLOURS
from curvestep.report.markup import plain
from curvestep.report.results import finite, shows_law, stability, usable
from curvestep.report.views import DAMAGED, RunView, Task
from curvestep.trace.history import lr_of_run
from curvestep.trace.run import Fields
from curvestep.trace.schema import FIELDS

_SUBJECTS = {"start": "at the start "}  # for kinds of reasons that name none
_NOT_MEASURED = "No advice: nothing was measured. Train with a probe, and make the page again."


def verdict(task: Task, *, title: str = "") -> Fields:
    """Verdict of a task's runs together: numbers, reasons, and what to know before relying on them."""
    first, *others = task.runs
    so_far = ""
    if first.status == "running" and not others:
        so_far = f"{_ending(first)} "
    missing = _missing(task)
    advice = task.advice
    if advice is None or advice.action == CANNOT_TELL:
        return {"title": title, **_without_advice(task, so_far), "warnings": missing}
    # How the loss ended stands once on the page, beside its curve.
    beside = {"tie", "loss"} if not others else {"tie"}
    reasons = [note for note in advice.reasons if note.kind not in beside]
    return {
        "title": title,
        "action": advice.action,
        "verdict": f"{so_far}{advice.verdict}",
        "advice": advice_table(advice, task),
        "code": code_for(advice, first),
        "sure": how_sure(task, [note.text for note in advice.reasons if note.kind == "tie"]),
        "reasons": [f"{_SUBJECTS.get(note.kind, '')}{note.text}" for note in reasons],
        "warnings": [*(str(note) for note in advice.warnings), *missing],
    }


def _missing(task: Task) -> list[str]:
    """What the runs lack, and why; for a lone run only what its verdict does not say."""
    if len(task.runs) == 1:
        return [note.text for note in task.runs[0].notes if note.kind == DAMAGED]
    lines: list[str] = []
    for view in task.runs:
        if view.diverged:
            reason = view.facts.get("message", "its loss rose far, or was not finite")
            lines.append(f"{view.name}: diverged with {view.setting}; {reason}.")
            continue
        if view.status == "running":
            lines.append(f"{view.name} is not finished: this is what {view.step:,} steps say.")
        lines += [f"{view.name}: {note}" for note in view.notes]
    return lines


def _without_advice(task: Task, so_far: str) -> Fields:
    """The verdict where nothing can be advised."""
    reasons = [
        f"{view.setting}: {view.facts.get('message', f'at step {view.step:,}')}"
        for view in task.runs
        if view.diverged
    ]
    if len(reasons) == len(task.runs):
        way_out = "Clip at a smaller max_norm or lower lr; calibrate measures both beforehand."
        return {"action": DIVERGED, "verdict": f"DIVERGED {'; '.join(reasons)}. {way_out}"}
    if task.advice is None:
        return {"verdict": f"{so_far}{_NOT_MEASURED}"}
    return {"verdict": f"{so_far}{task.advice.verdict}"}


def advice_table(advice: Advice, task: Task) -> dict[str, str]:
    """The numbers of the advice, for one run old and new, rounded for reading; none where it has none."""
    if advice.lr is None or advice.max_norm is None:
        return {}
    rate = rate_name(advice.lr_is_peak)
    lr = f"{advice.lr:.3g}"
    max_norm = "none" if math.isinf(advice.max_norm) else f"{advice.max_norm:.3g}"
    table = {"rate": rate, "lr": lr, "max_norm": max_norm}
    if advice.next_lr is not None:
        table["next"] = f"{rate} {advice.next_lr:.3g}"
    view, *others = task.runs
    if others:
        return table
    taken = f"{lr_of_run(view.header, view.measured['lr']):.3g}"
    if taken != lr:
        table["lr"] = f"{taken} → {lr}"
    if math.isfinite(view.clipped_fraction):
        table["clipped"] = f"{view.clipped_fraction:.0%} of steps clipped"
    return table


def how_sure(task: Task, ties: list[str]) -> str:
    """What the verdict rests on, in a line."""
    view, *others = task.runs
    if others:
        return " ".join([f"{len(task.runs)} runs are compared by their final training loss.", *ties])
    return f"one run of {len(view.measured['step']):,} measurements cannot compare learning rates."


def code_for(advice: Advice, view: RunView) -> str:
    """Lines that make an optimizer as advised; empty where no number or no optimizer is known.

    Example:
        >>> advice = Advice(
        ...     action="no sign", kind="no-sign", verdict="", lr=0.003, max_norm=0.92, lr_is_peak=True
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
    limit = "float('inf')" if math.isinf(advice.max_norm) else f"{advice.max_norm:.3g}"
    ours = getattr(curvestep, name, None)
    threshold = view.header.get("threshold") or getattr(ours, "threshold", "max_norm")
    if ours is not None:
        lines = [f"opt = cs.{name}({settings}, {threshold}={limit})"]
    elif threshold != "max_norm":  # a step rule of the user's own
        lines = [f"opt = {name}({settings}, {threshold}={limit})"]
    else:
        home = "torch.optim." if hasattr(torch.optim, name) else ""
        lines = [f"opt = {home}{name}({settings})"]
        if math.isfinite(advice.max_norm):
            lines.append(f"cs.clip(opt, {limit})")
    if advice.lr_is_peak:
        lines.append("# lr is the peak: keep your schedule")
    return "\n".join(lines)


def run_summary(view: RunView) -> str:
    """How the run ended, how much was clipped, and how it did on held-out data."""
    sentences = [_ending(view)]
    if view.metrics:
        metrics = [f"{name.replace('_', ' ')} {value:.4g}" for name, value in view.metrics.items()]
        sentences.append(f"{', '.join(metrics).capitalize()}.")
    if math.isfinite(view.clipped_fraction):
        sentences.append(f"{view.clipped_fraction:.0%} of the steps were clipped.")
    sentences += _spikes(view)
    return " ".join(sentences)


def _spikes(view: RunView) -> list[str]:
    """How many steps stood out by their gradient norm, and where the last did; empty without any."""
    if view.trace is None or not view.trace.spikes:
        return []
    spikes = view.trace.spikes
    last = spikes[-1]
    where = f"The last is at step {last['step']:,}, most of it in {last.get('layer')}."
    return [f"Spikes: {len(spikes):,}.", where]


def _ending(view: RunView) -> str:
    unknown = "no reason is on record" if view.fields else "a number is not finite"
    reason = view.facts.get("message", unknown)
    endings = {
        "finished": f"Finished after {view.step:,} steps.",
        "diverged": f"Diverged at step {view.step:,}: {reason}.",
        "interrupted": f"Interrupted at step {view.step:,}; it can be resumed.",
        "failed": f"Failed at step {view.step:,}: {reason}.",
        "running": f"It is not finished: it has taken {view.step:,} steps.",
    }
    return endings.get(view.status, f"The trace ends at step {view.step:,}.")


def scatter(view: RunView) -> str:
    """Range, correlation with its control, and the fitted line."""
    rows = usable(view.measured, "grad_norm", "smoothness")
    words = (
        f"A point is one of {len(rows['grad_norm']):,} steps. Gradient norms go from "
        f"{_range(rows['grad_norm'])}, sharpness from {_range(rows['smoothness'])}."
    )
    if view.fit is None:
        return words
    fit = view.fit
    low, high = fit.spearman_interval
    words += (
        f" Their rank correlation is {fit.spearman:.2f} ({fit.level:.0%} interval {low:.2f} to {high:.2f})."
    )
    if fit.control is not None:
        evidence = "no evidence of growth" if fit.explained else "more than a constant Hessian explains"
        words += f" A constant Hessian reaches {fit.control.spearman_interval[1]:.2f}, so this is {evidence}."
    if not shows_law(fit):
        return f"{words} No line is drawn, since the test within steps cannot tell."
    return (
        f"{words} The line has {fit.quantile:.0%} of the points below it: L0 {fit.L0:.3g}, L1 {fit.L1:.3g}. "
        "The frontier lies above all points."
    )


def norm(view: RunView) -> str:
    """Range of the gradient norm and how often it was clipped."""
    norms = finite(view.rows["grad_norm"])
    words = f"Gradient norms go from {_range(norms)}; their median is {np.median(norms):.3g}."
    if math.isinf(view.max_norm):
        return words
    share = view.clipped_fraction
    clipped = "" if math.isnan(share) else f"; about {share:.0%} of the steps were clipped"
    return f"{words} Clipping starts at {view.max_norm:.4g}{clipped}."


def loss(view: RunView) -> str:
    """Where the loss started, where it ended, and its lowest point."""
    values = finite(view.rows["loss"])
    end = f"{values[-1]:.4g} at the last step where it was finite"
    if math.isfinite(view.final_loss):
        end = f"{view.final_loss:.4g} at the end (mean over the last 5 % of the steps, at most 50)"
    words = f"Training loss is {values[0]:.4g} at the start, {values.min():.4g} at its lowest and {end}."
    held_out = finite(view.held_out.get("loss", np.array([])))
    if len(held_out):
        words += f" Held-out loss ends at {held_out[-1]:.4g}."
    return words


def stability_margin(view: RunView) -> str:
    """How much of the run lies above the edge of stability."""
    margins, limit = stability(view.measured)
    margins = margins[np.isfinite(margins) & (margins > 0)]
    if not len(margins):
        return "There is no learning rate or no positive sharpness on record."
    metric = "" if limit == 2.0 else ", in the optimizer's metric: read it as a trend"
    return (
        f"The stability margin is {np.median(margins):.3g} in the median and goes from {_range(margins)}; "
        f"{np.mean(margins > 1):.0%} of the steps shown are above 1. "
        f"It is lr times sharpness over {limit:.3g}{metric}."
    )


def of_column(view: RunView, *, column: str, title: str) -> str:
    """What a column means, its range and its median."""
    values = finite(view.measured[column])
    meaning = FIELDS[column].meaning.replace("`", "")
    return f"{title}: {meaning} It goes from {_range(values)}; its median is {np.median(values):.3g}."


def within(view: RunView) -> str:
    """Whether smoothness grows with the gradient norm inside single steps; empty where not tested."""
    if view.fit is None or view.fit.within.missing:
        return ""
    return str(view.fit.within)


def within_chart(view: RunView) -> str:
    """The same, and what a point of the chart is."""
    return f"{within(view)} Each point is one step: the change of both over its last part."


def layers(view: RunView) -> str:
    """The layers with the largest and the smallest median sharpness."""
    names = [f"{name} ({np.median(finite(values)):.3g})" for name, values in view.layers.items()]
    words = (
        f"A line is the sharpness of one of {len(names)} layers. "
        f"In the median it is largest in {names[0]} and smallest in {names[-1]}."
    )
    if len(names) > NUM_COLOURS:
        words += " The sharpest have names, the others are grey."
    return words


def calibration(view: RunView) -> str:
    """Gains of the trials, and the setting that follows."""
    result = view.calibration
    assert result is not None
    trials = result.last_trials
    best = max(trials, key=lambda trial: trial.gain)
    return (
        f"{len(trials)} trials of {trials[0].num_steps} steps ran before training and took "
        f"{result.num_gradients} gradients in all. The loss of other batches fell most, "
        f"by {best.gain:.3g}, at lr {best.lr:.3g}. The choice is lr {result.lr:.3g}; confidence: "
        f"{result.confidence}."
    )


def comparison(views: Sequence[RunView], num_settings: int) -> str:
    """Runs by final training loss, the best first."""
    best = views[0]
    num_diverged = sum(view.diverged for view in views)
    sentences = [f"{len(views)} runs share these axes."]
    if num_settings < len(views):
        sentences.append(f"{num_settings} settings: a line is the mean over seeds, a band their range.")
    if math.isfinite(best.final_loss):
        where = f"{best.name} ({best.setting})"
        sentences.append(f"Training loss ends lowest, at {best.final_loss:.4g}, in {where}.")
    if num_diverged:
        sentences.append(f"{num_diverged} diverged.")
    return " ".join(sentences)


def claim_parts(saved: Fields) -> list[Fields]:
    """The claims of a reproduction kind by kind, under its own headings, each with the class of its badge."""
    claims: list[Fields] = saved.get("claims", [])
    badges: Fields = saved.get("badges", {})
    headings: Fields = saved.get("headings", {})  # by kind: that of the table, and of its column of claims
    parts = []
    for kind in dict.fromkeys([*headings, *(claim.get("kind", "") for claim in claims)]):
        rows = [
            {**claim, "badge": badges.get(str(claim.get("verdict")), "")}
            for claim in claims
            if claim.get("kind", "") == kind
        ]
        if rows:
            heading, asked = headings.get(kind, (kind, "claim"))
            tally = Counter((row["verdict"], row["badge"]) for row in rows)
            parts.append({"heading": heading, "asked": asked, "rows": rows, "tally": tally})
    return parts


def page_title(views: Sequence[RunView], places: Sequence[Path]) -> str:
    """The heading where nobody gave one: what was trained and by what, or the folders of several runs."""
    trained = {str(view.header.get("model", "")) for view in views}
    optimizers = {str(view.header.get("optimizer", "")) for view in views}
    if len(trained) == len(optimizers) == 1 and "" not in trained | optimizers:
        what = f"{trained.pop()} with {optimizers.pop()}"
        return what if len(views) == 1 else f"{len(views)} runs of {what}"
    if len(views) == 1:
        recipe = views[0].fields.get("name")
        return f"{recipe}, {views[0].setting}" if recipe else views[0].name
    names = [place.resolve().name for place in places]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def subtitle(views: Sequence[RunView]) -> str:
    """How the runs ended, and on which data; the setup tells where from."""
    states = Counter(view.ending or "measured" for view in views)
    facts = [f"{count} {status}" for status, count in states.items()]
    if len(views) == 1:
        facts = [f"{views[0].step:,} steps"]
        if page_title(views, ()) != views[0].name:
            facts.insert(0, views[0].name)
    facts += dict.fromkeys(str(view.facts.get("data", "")).partition(" from ")[0] for view in views)
    return "; ".join(fact for fact in facts if fact)


def setup(views: Sequence[RunView]) -> dict[str, str]:
    """What was trained, its status, the header of the trace: each field with the values that runs have."""
    table: dict[str, dict[str, None]] = {}
    for view in views:
        for name, value in {**view.fields, **view.facts, **view.header}.items():
            table.setdefault(name.replace("_", " "), {})[_plain(value)] = None
    return {name: "; ".join(values) for name, values in table.items()}


def _plain(value: object) -> str:
    """A value as people read it: six digits, no brackets of Python."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(one)}" for name, one in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(_plain(one) for one in value)
    return str(value)


def _range(values: np.ndarray) -> str:
    return f"{values.min():.3g} to {values.max():.3g}"


# Words with an explanation on hover, and in the list at the end of the page.
GLOSSARY = {
    "sharpness": "How fast the gradient changes along the step. The sharper, the shorter safe steps.",
    "gradient norm": "Length of the gradient of all parameters together, before clipping.",
    "stability margin": "lr times sharpness, over the largest stable value. Above 1 steps overshoot.",
    "edge of stability": "A stability margin of 1: longer steps overshoot.",
    "elasticity": "How sharpness follows the gradient norm: 0 is not at all, 1 is in proportion.",
    "frontier": "The lowest line above all measured points.",
    "rank correlation": "1 where two numbers always rise together, 0 where they are unrelated.",
    "max_norm": "Gradient norm at which clipping starts.",
    "predicted fall": "The fall of the loss if its slope stayed. Short steps achieve most of it.",
    "peak lr": "The largest learning rate of the schedule.",
}
_WORDS = re.compile(rf"\b({'|'.join(GLOSSARY)})\b", re.IGNORECASE)


def explained_in(text: str) -> set[str]:
    """The words of a text that the page explains."""
    return {word.lower() for word in _WORDS.findall(text)}


def with_glossary(text: str) -> Markup:
    """The text for HTML, the first use of each known word with its explanation on hover.

    Example:
        >>> with_glossary("frontier <b>")
        Markup('<abbr title="The lowest line above all measured points.">frontier</abbr> &lt;b&gt;')
    """
    unused = set(GLOSSARY)

    def mark(match: re.Match[str]) -> str:
        word = match.group()
        if word.lower() not in unused:
            return word
        unused.discard(word.lower())
        return f'<abbr title="{GLOSSARY[word.lower()]}">{word}</abbr>'

    return Markup(_WORDS.sub(mark, plain(text)))
