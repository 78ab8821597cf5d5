"""The text of the page: what each chart says in a sentence or two, the verdicts, and what was found."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from curvestep.advice.advice import Advice
from curvestep.advice.decision import KEEP
from curvestep.advice.settings import rate_name
from curvestep.calibration.result import Calibration
from curvestep.display.chart import Grid
from curvestep.display.results import stability, usable
from curvestep.lab.recipes import OPTIMIZERS
from curvestep.lab.report.views import RunView, Task

NOT_RUN = "not run"  # in a cell of a map
_MOST_SHOWN = 4  # notes of a kind at the top; the others are one click away


def run_summary(view: RunView) -> str:
    """How the run ended, how much was clipped, and how it did on held-out data."""
    reason = view.facts.get(
        "message", "a number is not finite" if not view.fields else "no reason is on record"
    )
    words = {
        "finished": f"Finished after {view.step:,} steps.",
        "diverged": f"Diverged at step {view.step:,}: {reason}.",
        "interrupted": f"Interrupted at step {view.step:,}; it can be resumed.",
        "failed": f"Failed at step {view.step:,}: {reason}.",
        "running": f"Not finished: {view.step:,} steps so far.",
    }.get(view.status, f"Measured up to step {view.step:,}; whether the run goes on, a trace does not say.")
    if math.isfinite(view.final_loss):
        words += (
            f" Training loss {'at the end' if view.status else 'in the last rows'} {view.final_loss:.4g}."
        )
    if view.metrics:
        told = ", ".join(f"{name} {value:.4g}" for name, value in view.metrics.items()).replace("_", " ")
        words += f" {told.capitalize()}."
    share = view.clipped_fraction
    return words + (f" {share:.0%} of the steps were clipped." if np.isfinite(share) else "")


def optimizer(view: RunView) -> str:
    """The optimizer with what matters of its options, from the recipe or the trace."""
    fields, header = view.fields, view.header
    if not fields:
        rows = () if view.trace is None else view.trace.column("optimizer")
        words = (
            [str(header["optimizer"])] if "optimizer" in header else list(dict.fromkeys(filter(None, rows)))
        )
        rates = view.measured.get("lr", np.array([]))
        rates = rates[np.isfinite(rates)]
        if len(rates):
            low, high = float(rates.min()), float(rates.max())
            words.append(
                f"lr {low:.3g}" if math.isclose(low, high, rel_tol=1e-3) else f"lr {low:.3g} to {high:.3g}"
            )
            words.append(
                "no step clipped" if math.isinf(view.max_norm) else f"clipped at {view.max_norm:.3g}"
            )
        return ", ".join(words)
    options = {key: fields.get(key) for key in ("momentum", "weight_decay", "batch_size", "seed")}
    said = [f"{key.replace('_', ' ')} {value:g}" for key, value in options.items() if value or key == "seed"]
    return ", ".join([f"{OPTIMIZERS[fields['optimizer']]}: {view.setting.partition(', momentum')[0]}", *said])


def scatter(view: RunView) -> str:
    """Range, correlation with its control, and the fitted line."""
    rows = usable(view.measured, "grad_norm", "smoothness")
    words = [
        f"Smoothness against gradient norm at {len(rows['grad_norm']):,} steps: the gradient norm goes "
        f"from {_range(rows['grad_norm'])}, smoothness from {_range(rows['smoothness'])}."
    ]
    if fit := view.fit:
        low, high = fit.spearman_interval
        control = f"; a constant Hessian would show {fit.control.spearman:.2f}" if fit.control else ""
        interval = f"{fit.level:.0%} interval {low:.2f} to {high:.2f}"
        words.append(f"Rank correlation {fit.spearman:.2f} ({interval}){control}.")
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
    if np.isfinite(view.max_norm):
        words += f" Clipping starts at {view.max_norm:.4g}"
        share = view.clipped_fraction
        words += f"; {share:.0%} of the steps shown were clipped." if np.isfinite(share) else "."
    return words


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
    return words + (f" Held-out loss at the end: {held_out[-1]:.4g}." if len(held_out) else "")


def edge(view: RunView) -> str:
    """lr·L/2: how much of the run lies above the edge of stability."""
    edges, limit = stability(view.measured)
    edges = edges[np.isfinite(edges) & (edges > 0)]
    if not len(edges):
        return "There is no learning rate or no positive smoothness on record."
    over = (
        "over two"
        if limit == 2.0
        else f"in the optimizer's metric over {limit:.3g}, its limit on a quadratic"
    )
    words = f"Learning rate times smoothness {over}: median {np.median(edges):.3g}, from {_range(edges)}; "
    words += f"{np.mean(edges > 1):.0%} of the measured steps are above the edge at 1."
    if limit != 2.0:
        return f"{words} Along one step it is less than over all directions: read it as a trend."
    rows = usable(view.measured, "step_norm", "grad_norm", "smoothness")
    taken = rows["step_norm"] / rows["grad_norm"] * rows["smoothness"] / 2
    return words + (f" With the step as it was taken: median {np.median(taken):.3g}." if len(taken) else "")


def within(view: RunView) -> str:
    """Whether smoothness grows with the gradient norm inside single steps; empty where not tested."""
    return "" if view.fit is None or view.fit.within.missing else str(view.fit.within)


def layers(view: RunView) -> str:
    """The layer with the largest smoothness, and the one with the smallest."""
    medians = {
        name: float(np.median(values[np.isfinite(values)]))
        for name, values in view.layers.items()
        if np.isfinite(values).any()
    }
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
    """What the trials gained, and what was made of it."""
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
    finished = sorted((v for v in views if np.isfinite(v.final_loss)), key=lambda v: v.final_loss)
    diverged = sum(view.status == "diverged" for view in views)
    words = f"{len(views)} runs on shared axes."
    if num_settings < len(views):
        words += f" {num_settings} settings: a line is the mean over seeds, a band their range."
    if finished:
        best = finished[0]
        words += f" Lowest final training loss: {best.final_loss:.4g}, {best.name} ({best.setting})."
    return words + (f" {diverged} diverged." if diverged else "")


def heat(grid: Grid, rows: str, columns: str) -> str:
    """The best cell of a sweep, and how many of those that were run have no number."""
    cells = [
        (float(grid.values[i, j]), grid.down[i], str(grid.across[j]))
        for i, j in np.argwhere(np.isfinite(grid.values))
    ]
    words = f"Final training loss over {f'{rows} and ' if rows else ''}{columns}."
    if cells:
        least, down, across = min(cells)
        words += f" Lowest: {least:.4g} at {f'{rows} {down}, ' if rows else ''}{columns} {across}."
    num_run = sum(text != NOT_RUN for row in grid.text for text in row)
    lost = num_run - len(cells)
    return words + (f" {lost} of {num_run} settings did not finish." if lost else "")


def verdict(task: Task, *, title: str = "") -> dict[str, Any]:
    """What a task's runs say together: verdict, numbers, reasons, and what to know before relying on them."""
    runs, advice = task.runs, task.advice
    missing, so_far = [], ""
    for view in runs:
        if view.status == "running" and len(runs) == 1:
            so_far = f"Not finished, {view.step:,} steps so far. "
        elif view.status == "running":
            missing.append(f"{view.name} is not finished: this is what {view.step:,} steps say.")
        if view.status == "diverged" and len(runs) == 1:
            break  # that it has too few rows is no reason to train it longer
        if view.status == "diverged":
            reason = view.facts.get("message", "no reason is on record")
            missing.append(f"{view.name}: diverged with {view.setting}; {reason}.")
        elif len(runs) > 1:
            missing += [f"{view.name}: {doubt}" for doubt in view.doubts]
        else:
            missing += view.doubts
    if advice is None or advice.refused:
        said = _without_advice(task)
        notes = [line for line in missing if line not in said and not line.startswith("Nothing was measured")]
        said = f"{so_far}{said}"
        return {"title": title, "verdict": said, "warnings": notes[:_MOST_SHOWN], "more": notes[_MOST_SHOWN:]}
    warnings = runs[0].warnings if len(runs) == 1 else advice.warnings
    return {
        "title": title,
        "verdict": f"{so_far}{advice.verdict}",
        "advice": advice_table(advice),
        "reasons": [words for words in (*advice.reasons, advice.clipping) if words],
        "warnings": [*warnings, *missing[:_MOST_SHOWN]],
        "more": missing[_MOST_SHOWN:],
    }


def _without_advice(task: Task) -> str:
    """What to do where nothing can be advised."""
    if all(view.status == "diverged" for view in task.runs) and (task.advice is None or task.advice.refused):
        ends = "; ".join(
            f"{view.setting}: {view.facts.get('message', f'at step {view.step:,}')}" for view in task.runs
        )
        return (
            f"Diverged ({ends}). Clip at a smaller max_norm or lower lr; calibrate measures both beforehand."
        )
    if task.advice is None:
        return (
            "No advice: nothing was measured. Train with a probe (--probe-every 5), and make the page again."
        )
    return task.advice.verdict


def advice_table(advice: Advice) -> dict[str, str]:
    """The numbers of the advice, rounded for reading."""

    def number(value: float | None) -> str:
        if value is None or math.isnan(value):
            return "unknown"
        if math.isinf(value):  # what was run and is kept may have a threshold that no gradient reached
            return "no step clipped" if advice.action == KEEP else "no clipping"
        return f"{value:.3g}"

    def interval(ends: tuple[float, float] | None) -> str:
        known = ends is not None and all(map(math.isfinite, ends))
        return f"{ends[0]:.3g} to {ends[1]:.3g}" if ends is not None and known else ""

    clipped = advice.clipped_fraction
    return {
        "rate": "peak learning rate" if advice.lr_is_peak else "learning rate",
        "lr": number(advice.lr),
        "lr_interval": interval(advice.lr_interval),
        "max_norm": number(advice.max_norm),
        "max_norm_interval": interval(advice.max_norm_interval),
        "step_cap": "" if advice.step_cap is None else number(advice.step_cap),  # Adam's has no such length
        "step_cap_interval": interval(advice.step_cap_interval),
        "clipped": "unknown" if clipped is None else f"{clipped:.0%}",
        "next": ", ".join(
            "no clipping"
            if math.isinf(value)
            else f"{rate_name(advice.lr_is_peak) if name == 'lr' else name} {value:.3g}"
            for name, value in (advice.next_setting or {}).items()
        ),
    }


def findings(claims: Sequence[Mapping[str, Any]]) -> str:
    """What a reproduction found, in up to three sentences: the tally, what holds, what does not."""
    said = [str(claim.get("verdict")) for claim in claims]
    tally = ", ".join(f"{said.count(verdict)} {verdict}" for verdict in dict.fromkeys(said))
    sentences = [f"Of {len(said)} claim{'s' * (len(said) != 1)}: {tally}."]
    for verdict in ("supported", "contradicted"):
        rows = [claim for claim in claims if claim.get("verdict") == verdict]
        if rows:
            own = [claim for claim in rows if not str(claim.get("paper")).startswith("Not in the paper")]
            shown = (own or rows)[0]
            figure = str(shown.get("figure", "")).removeprefix("fig")
            more = f", and {len(rows) - 1} more" if len(rows) > 1 else ""
            words = str(shown.get("paper", "")).rstrip(".")
            sentences.append(f"{verdict.capitalize()}: “{words}” (figure {figure}){more}.")
    return " ".join(sentences)


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


def setup(views: Sequence[RunView]) -> dict[str, Any]:
    """Recipe, status and header of the trace: ``shared`` by all runs, and a row a run of what differs."""
    told = [{**view.fields, **view.facts, **view.header} for view in views]
    names = [
        name for name in dict.fromkeys(k for one in told for k in one) if name not in ("format", "schema")
    ]
    table = {
        name.replace("_", " "): [
            "" if v is None else v if isinstance(v, str) else json.dumps(v) for v in column
        ]
        for name in names
        for column in [[one.get(name) for one in told]]
    }
    differ = {name: column for name, column in table.items() if len(set(column)) > 1}
    return {
        "shared": {name: column[0] for name, column in table.items() if name not in differ},
        "names": list(differ),
        "rows": [(view.name, [column[i] for column in differ.values()]) for i, view in enumerate(views)],
    }


def _range(values: np.ndarray) -> str:
    return f"{values.min():.3g} to {values.max():.3g}"
