"""The text of the page: what each chart says in a sentence or two, the verdicts, and what was found."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from curvestep.advice.advice import Advice
from curvestep.advice.advice_words import rate_name
from curvestep.calibration.result import Calibration
from curvestep.display.chart import Grid
from curvestep.display.results import stability, usable
from curvestep.lab.recipes import OPTIMIZERS, Fields
from curvestep.lab.report.views import NOT_JUDGED, NOT_MEASURED, RunView, Task

NOT_RUN = "not run"  # in a cell of a map
_MOST_SHOWN = 4  # notes of a kind at the top; the others are one click away


def run_summary(view: RunView) -> str:
    """How the run ended, how much was clipped, and how it did on held-out data."""
    words = [_ending(view)]
    if math.isfinite(view.final_loss):
        when = "at the end" if view.status else "in the last rows"
        words.append(f"Training loss {when} {view.final_loss:.4g}.")
    if view.metrics:
        told = ", ".join(f"{name} {value:.4g}" for name, value in view.metrics.items()).replace("_", " ")
        words.append(f"{told.capitalize()}.")
    if math.isfinite(view.clipped_fraction):
        words.append(f"{view.clipped_fraction:.0%} of the steps were clipped.")
    return " ".join(words)


def _ending(view: RunView) -> str:
    unknown = "no reason is on record" if view.fields else "a number is not finite"
    reason = view.facts.get("message", unknown)
    endings = {
        "finished": f"Finished after {view.step:,} steps.",
        "diverged": f"Diverged at step {view.step:,}: {reason}.",
        "interrupted": f"Interrupted at step {view.step:,}; it can be resumed.",
        "failed": f"Failed at step {view.step:,}: {reason}.",
        "running": f"Not finished: {view.step:,} steps so far.",
    }
    unfinished = f"Measured up to step {view.step:,}; whether the run goes on, a trace does not say."
    return endings.get(view.status, unfinished)


def optimizer(view: RunView) -> str:
    """The optimizer with its main options, from the recipe or the trace."""
    if not view.fields:
        return _optimizer_of_trace(view)
    words = [f"{OPTIMIZERS[view.fields['optimizer']]}: {view.setting.partition(', momentum')[0]}"]
    for name in ("momentum", "weight_decay", "batch_size", "seed"):
        value = view.fields.get(name)
        if value or name == "seed":
            words.append(f"{name.replace('_', ' ')} {value:g}")
    return ", ".join(words)


def _optimizer_of_trace(view: RunView) -> str:
    if "optimizer" in view.header:
        words = [str(view.header["optimizer"])]
    elif view.trace is not None:
        words = list(dict.fromkeys(filter(None, view.trace.column("optimizer"))))
    else:
        words = []
    rates = view.measured.get("lr", np.array([]))
    rates = rates[np.isfinite(rates)]
    if not len(rates):
        return ", ".join(words)
    low, high = float(rates.min()), float(rates.max())
    if math.isclose(low, high, rel_tol=1e-3):
        words.append(f"lr {low:.3g}")
    else:
        words.append(f"lr {low:.3g} to {high:.3g}")
    if math.isinf(view.max_norm):
        words.append("no step clipped")
    else:
        words.append(f"clipped at {view.max_norm:.3g}")
    return ", ".join(words)


def scatter(view: RunView) -> str:
    """Range, correlation with its control, and the fitted line."""
    rows = usable(view.measured, "grad_norm", "smoothness")
    words = [
        f"Smoothness against gradient norm at {len(rows['grad_norm']):,} steps: the gradient norm goes "
        f"from {_range(rows['grad_norm'])}, smoothness from {_range(rows['smoothness'])}."
    ]
    if fit := view.fit:
        low, high = fit.spearman_interval
        correlation = (
            f"Rank correlation {fit.spearman:.2f} ({fit.level:.0%} interval {low:.2f} to {high:.2f})"
        )
        if fit.control:
            correlation += f"; a constant Hessian would show {fit.control.spearman:.2f}"
        words.append(f"{correlation}.")
        words.append(
            f"Line with {fit.quantile:.0%} of the points below: L0 {fit.L0:.3g}, L1 {fit.L1:.3g}. The "
            "frontier lies above all points."
        )
    return " ".join(words)


def norm(view: RunView) -> str:
    """Range of the gradient norm and how often it was clipped."""
    norms = view.rows["grad_norm"]
    norms = norms[np.isfinite(norms)]
    words = f"Gradient norm over the steps: from {_range(norms)}, median {np.median(norms):.3g}."
    if not math.isfinite(view.max_norm):
        return words
    words += f" Clipping starts at {view.max_norm:.4g}"
    if math.isnan(view.clipped_fraction):
        return f"{words}."
    return f"{words}; {view.clipped_fraction:.0%} of the steps shown were clipped."


def loss(view: RunView) -> str:
    """Where the loss started, where it ended, and its lowest point."""
    values = view.rows["loss"]
    finite = values[np.isfinite(values)]
    words = f"Training loss: {finite[0]:.4g} at the start, lowest {finite.min():.4g}"
    if math.isfinite(view.final_loss):
        words += f", {view.final_loss:.4g} at the end (mean over the last steps)."
    else:
        words += f", {finite[-1]:.4g} at the last step where it was finite."
    held_out = view.held_out.get("loss", np.array([]))
    held_out = held_out[np.isfinite(held_out)]
    if len(held_out):
        words += f" Held-out loss at the end: {held_out[-1]:.4g}."
    return words


def edge(view: RunView) -> str:
    """lr·L/2: how much of the run lies above the edge of stability."""
    edges, limit = stability(view.measured)
    edges = edges[np.isfinite(edges) & (edges > 0)]
    if not len(edges):
        return "There is no learning rate or no positive smoothness on record."
    found = f"median {np.median(edges):.3g}, from {_range(edges)}; {np.mean(edges > 1):.0%} of the measured "
    found += "steps are above the edge at 1."
    if limit != 2.0:
        return (
            f"Learning rate times smoothness in the optimizer's metric over {limit:.3g}, its limit on a "
            f"quadratic: {found} Along one step it is less than over all directions: read it as a trend."
        )
    rows = usable(view.measured, "step_norm", "grad_norm", "smoothness")
    taken = rows["step_norm"] / rows["grad_norm"] * rows["smoothness"] / 2
    words = f"Learning rate times smoothness over two: {found}"
    if len(taken):
        words += f" With the step as it was taken: median {np.median(taken):.3g}."
    return words


def within(view: RunView) -> str:
    """Whether smoothness grows with the gradient norm inside single steps; empty where not tested."""
    if view.fit is None or view.fit.within.missing:
        return ""
    return str(view.fit.within)


def layers(view: RunView) -> str:
    """The layer with the largest smoothness, and the one with the smallest."""
    medians: dict[str, float] = {}
    for name, values in view.layers.items():
        known = values[np.isfinite(values)]
        if len(known):
            medians[name] = float(np.median(known))
    if not medians:
        return "No layer was measured."
    high, low = max(medians, key=medians.__getitem__), min(medians, key=medians.__getitem__)
    return (
        f"Smoothness of {len(medians)} layers over the steps: largest in {high} (median {medians[high]:.3g}"
        f"), smallest in {low} (median {medians[low]:.3g})."
    )


# By the kind of the chart.
OF_RUN: dict[str, Callable[[RunView], str]] = {
    "scatter": scatter, "norm": norm, "loss": loss, "edge": edge, "layers": layers,
    "within": lambda view: f"{within(view)} Each point is one step: the change of both over its last part.",
}  # fmt: skip


def calibration(found: Calibration) -> str:
    """Gains of the trials, and the setting that follows."""
    arms = found.last_arms
    best = max(arms, key=lambda arm: arm.gain)
    return (
        f"{len(arms)} trials of {arms[0].num_steps} steps before the first step of training, "
        f"{found.num_gradients} gradients in all. The loss of batches that they did not step on fell most, "
        f"by {best.gain:.3g}, at lr {best.lr:.3g}. The choice is lr {found.lr:.3g}; confidence: "
        f"{found.confidence}."
    )


def comparison(views: Sequence[RunView], num_settings: int) -> str:
    """Runs by final training loss."""
    words = [f"{len(views)} runs on shared axes."]
    if num_settings < len(views):
        words.append(f"{num_settings} settings: a line is the mean over seeds, a band their range.")
    finished = [view for view in views if math.isfinite(view.final_loss)]
    if finished:
        best = min(finished, key=lambda view: view.final_loss)
        words.append(f"Lowest final training loss: {best.final_loss:.4g}, {best.name} ({best.setting}).")
    diverged = sum(view.status == "diverged" for view in views)
    if diverged:
        words.append(f"{diverged} diverged.")
    return " ".join(words)


def heat(grid: Grid, rows: str, columns: str) -> str:
    """The best cell of a sweep, and how many of those that were run have no number."""
    down_name = f"{rows} and " if rows else ""
    words = [f"Final training loss over {down_name}{columns}."]
    cells = []
    for i, j in np.argwhere(np.isfinite(grid.values)):
        cells.append((float(grid.values[i, j]), grid.down[i], str(grid.across[j])))
    if cells:
        least, down, across = min(cells)
        place = f"{rows} {down}, " if rows else ""
        words.append(f"Lowest: {least:.4g} at {place}{columns} {across}.")
    num_run = sum(text != NOT_RUN for row in grid.text for text in row)
    lost = num_run - len(cells)
    if lost:
        words.append(f"{lost} of {num_run} settings did not finish.")
    return " ".join(words)


def verdict(task: Task, *, title: str = "") -> Fields:
    """Verdict of a task's runs together: numbers, reasons, and what to know before relying on them."""
    so_far, missing = _missing_from(task)
    group: Fields = {"title": title, "more": missing[_MOST_SHOWN:]}
    missing = missing[:_MOST_SHOWN]
    advice = task.advice
    if advice is None or advice.refused:
        return {**group, "verdict": f"{so_far}{_without_advice(task)}", "warnings": missing}
    warnings = task.runs[0].warnings if len(task.runs) == 1 else tuple(map(str, advice.warnings))
    return {
        **group,
        "verdict": f"{so_far}{advice.verdict}",
        "advice": advice_table(advice),
        "reasons": [f"{note.kind}: {note.text}" for note in advice.reasons],
        "warnings": [*warnings, *missing],
    }


def _missing_from(task: Task) -> tuple[str, list[str]]:
    """Words before the verdict on a run that goes on, and a line for all that is missing in the runs."""
    view, *others = task.runs
    if others:
        return "", [line for run in task.runs for line in _missing_of(run)]
    if view.status == "diverged":
        return "", []  # that it has too few rows is no reason to train it longer
    so_far = f"Not finished, {view.step:,} steps so far. " if view.status == "running" else ""
    unsaid = view.notes
    if task.advice is None or task.advice.refused:  # then the verdict itself says why
        unsaid = [note for note in view.notes if note.kind not in (NOT_MEASURED, NOT_JUDGED)]
    return so_far, [note.text for note in unsaid]


def _missing_of(view: RunView) -> list[str]:
    """The same for one run among several."""
    if view.status == "diverged":
        reason = view.facts.get("message", "no reason is on record")
        return [f"{view.name}: diverged with {view.setting}; {reason}."]
    lines = [f"{view.name}: {note}" for note in view.notes]
    if view.status == "running":
        lines.insert(0, f"{view.name} is not finished: this is what {view.step:,} steps say.")
    return lines


def _without_advice(task: Task) -> str:
    """The verdict where nothing can be advised."""
    if all(view.status == "diverged" for view in task.runs):
        endings = [view.facts.get("message", f"at step {view.step:,}") for view in task.runs]
        ends = [f"{view.setting}: {ending}" for view, ending in zip(task.runs, endings, strict=True)]
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


# Headings of the kinds of claims of a reproduction, what their second column holds, and colours of verdicts.
CLAIM_PARTS = {
    "paper": ("The paper's claims", "the paper says"),
    "erratum": ("Errata", "the paper says"),
    "addition": ("Our additions", "asked"),
}
BADGES = {"reproduced": "supported", "holds": "supported", "not reproduced": "not", "does not hold": "not"}


def claim_parts(claims: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """The claims of a reproduction kind by kind, each with the class of its badge."""
    parts = []
    for kind, (heading, asked) in CLAIM_PARTS.items():
        rows = [
            {**claim, "badge": BADGES.get(str(claim.get("verdict")), "")}
            for claim in claims
            if claim.get("kind") == kind
        ]
        if rows:
            parts.append({"heading": heading, "asked": asked, "rows": rows})
    return parts


def page_title(views: Sequence[RunView], *, reproduction: bool) -> str:
    """The heading where the user gave none."""
    if reproduction:
        return "Why gradient clipping accelerates training: a reproduction"
    return views[0].name if len(views) == 1 else f"{len(views)} runs"


def subtitle(views: Sequence[RunView], *, reproduction: bool) -> str:
    """How many runs, how they ended, and on which data, which a reproduction names beside its claims."""
    if not views:
        return "figures and claims"
    states = [view.status or "measured" for view in views]
    counts = ", ".join(f"{states.count(status)} {status}" for status in dict.fromkeys(states))
    data = dict.fromkeys(str(v.facts["data"]) for v in views if v.facts.get("data") and not reproduction)
    return "; ".join([f"{len(views)} run{'s' if len(views) > 1 else ''} ({counts})", *data])


def setup(views: Sequence[RunView]) -> Fields:
    """Recipe, status and header of the trace: ``shared`` by all runs, and a row a run of what differs."""
    told = [{**view.fields, **view.facts, **view.header} for view in views]
    names = dict.fromkeys(name for one in told for name in one)
    table: dict[str, list[str]] = {}
    for name in names:
        if name not in ("format", "schema"):
            table[name.replace("_", " ")] = [_plain(one.get(name)) for one in told]
    differ = {name: column for name, column in table.items() if len(set(column)) > 1}
    return {
        "shared": {name: column[0] for name, column in table.items() if name not in differ},
        "names": list(differ),
        "rows": [(view.name, [column[i] for column in differ.values()]) for i, view in enumerate(views)],
    }


def _plain(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


def _range(values: np.ndarray) -> str:
    return f"{values.min():.3g} to {values.max():.3g}"
