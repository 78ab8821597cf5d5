"""The text of the page: a sentence or two for each chart and each run, headings, and the setup table."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import numpy as np

from curvestep.calibration.result import Calibration
from curvestep.display.markup import visible
from curvestep.display.results import finite, stability, usable
from curvestep.lab.recipes import OPTIMIZERS, Fields
from curvestep.lab.report.views import RunView


def _sentences(*said: tuple[bool, str]) -> str:
    """The sentences that apply, one after the other."""
    return " ".join(text for applies, text in said if applies)


def run_summary(view: RunView) -> str:
    """How the run ended, how much was clipped, and how it did on held-out data."""
    when = "at the end" if view.status else "in the last rows"
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in view.metrics.items()).replace("_", " ")
    clipped, spikes = view.clipped_fraction, _spikes(view)
    return _sentences(
        (True, _ending(view)),
        (math.isfinite(view.final_loss), f"Training loss {when} {view.final_loss:.4g}."),
        (metrics != "", f"{metrics.capitalize()}."),
        (math.isfinite(clipped), f"{clipped:.0%} of the steps were clipped."),
        (spikes != "", spikes),
    )


def _spikes(view: RunView) -> str:
    """How many steps stood out by their gradient norm, and where the last did; empty without any."""
    spikes = view.trace.spikes if view.trace else []
    if not spikes:
        return ""
    step, layer = spikes[-1]["step"], visible(str(spikes[-1].get("layer")))
    return f"Spikes: {len(spikes):,}, the last at step {step:,} in layer {layer}."


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
    fields = view.fields
    words = [f"{OPTIMIZERS[fields['optimizer']]}: {view.setting.partition(', momentum')[0]}"]
    names = [name for name in ("momentum", "weight_decay", "batch_size") if fields.get(name)]
    words += [f"{name.replace('_', ' ')} {fields[name]:g}" for name in (*names, "seed")]
    return ", ".join(words)


def _optimizer_of_trace(view: RunView) -> str:
    names = [view.header.get("optimizer")]
    if names == [None] and view.trace is not None:
        names = dict.fromkeys(view.trace.column("optimizer"))
    words = [str(name) for name in names if name]
    rates = finite(view.measured.get("lr", np.array([])))
    if not len(rates):
        return ", ".join(words)
    ends = dict.fromkeys((f"{rates.min():.3g}", f"{rates.max():.3g}"))  # once if they agree
    words.append(f"lr {' to '.join(ends)}")
    words.append("no step clipped" if math.isinf(view.max_norm) else f"clipped at {view.max_norm:.3g}")
    return ", ".join(words)


def scatter(view: RunView) -> str:
    """Range, correlation with its control, and the fitted line."""
    rows = usable(view.measured, "grad_norm", "smoothness")
    words = (
        f"Smoothness against gradient norm at {len(rows['grad_norm']):,} steps: the gradient norm goes "
        f"from {_range(rows['grad_norm'])}, smoothness from {_range(rows['smoothness'])}."
    )
    if view.fit is None:
        return words
    fit, control = view.fit, view.fit.control
    low, high = fit.spearman_interval
    expected = f"; a constant Hessian would show {control.spearman:.2f}" if control else ""
    return (
        f"{words} Rank correlation {fit.spearman:.2f} ({fit.level:.0%} interval {low:.2f} to {high:.2f})"
        f"{expected}. Line with {fit.quantile:.0%} of the points below: L0 {fit.L0:.3g}, L1 {fit.L1:.3g}. "
        "The frontier lies above all points."
    )


def norm(view: RunView) -> str:
    """Range of the gradient norm and how often it was clipped."""
    norms, share = finite(view.rows["grad_norm"]), view.clipped_fraction
    clipped = "" if math.isnan(share) else f"; {share:.0%} of the steps shown were clipped"
    return _sentences(
        (True, f"Gradient norm over the steps: from {_range(norms)}, median {np.median(norms):.3g}."),
        (math.isfinite(view.max_norm), f"Clipping starts at {view.max_norm:.4g}{clipped}."),
    )


def loss(view: RunView) -> str:
    """Where the loss started, where it ended, and its lowest point."""
    values = finite(view.rows["loss"])
    end = f"{values[-1]:.4g} at the last step where it was finite"
    if math.isfinite(view.final_loss):
        end = f"{view.final_loss:.4g} at the end (mean over the last steps)"
    words = f"Training loss: {values[0]:.4g} at the start, lowest {values.min():.4g}, {end}."
    held_out = finite(view.held_out.get("loss", np.array([])))
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
            f"Stability margin: lr times sharpness in the optimizer's metric, over its limit {limit:.3g}. "
            f"It is {found} Read it as a trend: along one step it is less than over all directions."
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
    known = {name: finite(values) for name, values in view.layers.items()}
    medians = {name: float(np.median(values)) for name, values in known.items() if len(values)}
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
    best = min(views, key=lambda view: (not math.isfinite(view.final_loss), view.final_loss))
    lowest = f"Lowest final training loss: {best.final_loss:.4g}, {best.name} ({best.setting})."
    diverged = sum(view.status == "diverged" for view in views)
    seeds = f"{num_settings} settings: a line is the mean over seeds, a band their range."
    return _sentences(
        (True, f"{len(views)} runs on shared axes."),
        (num_settings < len(views), seeds),
        (math.isfinite(best.final_loss), lowest),
        (diverged > 0, f"{diverged} diverged."),
    )


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
    states = Counter(view.status or "measured" for view in views)
    counts = ", ".join(f"{count} {status}" for status, count in states.items())
    plural = "s" if len(views) > 1 else ""
    facts = [f"{len(views)} run{plural} ({counts})"]
    if not reproduction:
        facts += dict.fromkeys(str(view.facts["data"]) for view in views if view.facts.get("data"))
    return "; ".join(facts)


def setup(views: Sequence[RunView]) -> Fields:
    """Recipe, status and header of the trace: ``shared`` by all runs, and a row a run of what differs."""
    runs = [{**view.fields, **view.facts, **view.header} for view in views]
    shared: dict[str, str] = {}
    differ: dict[str, list[str]] = {}
    for name in dict.fromkeys(chain(*runs)):
        column = [_plain(run.get(name)) for run in runs]
        if len(set(column)) > 1:
            differ[name.replace("_", " ")] = column
        elif name not in ("format", "schema"):
            shared[name.replace("_", " ")] = column[0]
    names = [view.name for view in views]
    rows = list(zip(names, zip(*differ.values(), strict=True), strict=False))
    return {"shared": shared, "names": list(differ), "rows": rows}


def _plain(value: object) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value)


def _range(values: np.ndarray) -> str:
    return f"{values.min():.3g} to {values.max():.3g}"
