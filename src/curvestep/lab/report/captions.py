"""What each chart says, in a sentence or two: its caption, and all that a screen reader has of it."""

from __future__ import annotations

import numpy as np

from curvestep.lab.report.views import Columns, RunView


def run_in_words(view: RunView) -> str:
    """How the run ended and how much was clipped."""
    words = {
        "finished": f"Finished after {view.step:,} steps.",
        "diverged": f"Diverged at step {view.step:,}: {view.facts.get('message', 'no reason is on record')}.",
        "interrupted": f"Interrupted at step {view.step:,}; it can be resumed.",
        "failed": f"Failed at step {view.step:,}: {view.facts.get('message', 'no reason is on record')}.",
        "running": f"Not finished: {view.step:,} steps so far.",
    }.get(view.status, f"{view.step:,} steps.")
    share = view.clipped_fraction
    return words + (f" {share:.0%} of the steps were clipped." if np.isfinite(share) else "")


def scatter_in_words(view: RunView) -> str:
    """Range, correlation with its control, and the fitted line."""
    rows = _usable(view.measured, "grad_norm", "smoothness")
    if not len(rows["grad_norm"]):
        return "No smoothness was measured."
    words = [
        f"Local smoothness against gradient norm at {len(rows['grad_norm']):,} steps: the gradient norm goes "
        f"from {_span(rows['grad_norm'])}, smoothness from {_span(rows['smoothness'])}."
    ]
    if fit := view.fit:
        low, high = fit.spearman_interval
        words.append(
            f"Rank correlation {fit.spearman:.2f} ({fit.level:.0%} interval {low:.2f} to {high:.2f})"
        )
        control = fit.control.spearman if fit.control else None
        words[-1] += "." if control is None else f"; a constant Hessian would show {control:.2f}."
        words.append(
            f"Line with {fit.quantile:.0%} of the points below: L0 {fit.L0:.3g}, L1 {fit.L1:.3g}. The "
            "frontier lies above all points."
        )
    return " ".join(words)


def norm_in_words(view: RunView) -> str:
    """Range of the gradient norm and how often it was clipped."""
    columns = view.train if len(view.train.get("step", ())) else view.measured
    norms = _finite(columns.get("grad_norm"))
    if not len(norms):
        return "No gradient norm is on record."
    words = f"Gradient norm over the steps: from {_span(norms)}, median {np.median(norms):.3g}."
    if np.isfinite(view.max_norm):
        words += f" Clipping starts at {view.max_norm:.4g}"
        share = view.clipped_fraction
        words += f"; {share:.0%} of the steps shown were clipped." if np.isfinite(share) else "."
    return words


def loss_in_words(view: RunView) -> str:
    """Where the loss started, where it ended, and its lowest point."""
    columns = view.train if len(view.train.get("step", ())) else view.measured
    loss = _finite(columns.get("loss"))
    if not len(loss):
        return "No loss is on record."
    words = f"Training loss: {loss[0]:.4g} at the start, {loss[-1]:.4g} at the end, lowest {loss.min():.4g}."
    held_out = _finite(view.held_out.get("loss"))
    return words + (f" Held-out loss at the end: {held_out[-1]:.4g}." if len(held_out) else "")


def edge_in_words(view: RunView) -> str:
    """lr·L/2: how much of the run lies above the edge of stability."""
    rows = _usable(view.measured, "lr", "smoothness")
    if not len(rows["lr"]):
        return "There is no learning rate or no smoothness on record."
    edge = rows["lr"] * rows["smoothness"] / 2
    words = f"Learning rate times smoothness over two: median {np.median(edge):.3g}, from {_span(edge)}; "
    words += f"{np.mean(edge > 1):.0%} of the measured steps are above the edge at 1."
    rows = _usable(view.measured, "step_norm", "grad_norm", "smoothness")
    effective = rows["step_norm"] / rows["grad_norm"] * rows["smoothness"] / 2
    return words + (
        f" With the step as it was taken: median {np.median(effective):.3g}." if len(effective) else ""
    )


def layers_in_words(view: RunView) -> str:
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


def comparison_in_words(views: list[RunView]) -> str:
    """Runs by final training loss."""
    finished = sorted((v for v in views if np.isfinite(v.final_loss)), key=lambda v: v.final_loss)
    diverged = sum(view.status == "diverged" for view in views)
    words = f"{len(views)} runs on shared axes."
    if finished:
        best = finished[0]
        words += f" Lowest final training loss: {best.final_loss:.4g}, {best.name} ({best.setting})."
    return words + (f" {diverged} diverged." if diverged else "")


def _usable(columns: Columns, *names: str) -> Columns:
    """Rows where all the named columns are positive and finite."""
    values = [columns.get(name, np.array([])) for name in names]
    if any(len(value) != len(values[0]) for value in values):
        return {name: np.array([]) for name in names}
    keep = (
        np.all([np.isfinite(value) & (value > 0) for value in values], axis=0) if len(values[0]) else slice(0)
    )
    return {name: value[keep] for name, value in zip(names, values, strict=True)}


def _finite(values: np.ndarray | None) -> np.ndarray:
    return np.array([]) if values is None else values[np.isfinite(values)]


def _span(values: np.ndarray) -> str:
    return f"{values.min():.3g} to {values.max():.3g}"
