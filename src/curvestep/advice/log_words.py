"""The sentences about the log of a trainer."""

from __future__ import annotations

import math

from curvestep.advice.log_facts import LogFacts, LoggedSpike
from curvestep.notes import Note


def verdict_on_log(facts: LogFacts) -> str:
    """What a log is good for."""
    return (
        f"FACTS ONLY, from {facts.num_steps:,} logged steps. A log does not show whether lr is right: "
        "train with a probe (cs.SmoothnessProbe)."
    )


def notes_on_log(facts: LogFacts) -> tuple[Note, ...]:
    """A note for each fact; none for a clean log."""
    notes = []
    if facts.nonfinite_at is not None:
        text = f"the loss or the gradient norm is not finite from step {facts.nonfinite_at} on"
        if not facts.stays_nonfinite:
            text = f"the loss or the gradient norm is not finite at step {facts.nonfinite_at}"
        notes.append(Note("not-finite", text))
    if facts.loss_spike is not None:
        notes.append(Note("loss-spike", _spike("loss", facts.loss_spike)))
    if facts.norm_spike is not None:
        notes.append(Note("norm-spike", _spike("gradient norm", facts.norm_spike)))
    if facts.warmup_end is not None:
        notes.append(Note("warm-up", f"lr rises until step {facts.warmup_end}, to {facts.peak_lr:.3g}"))
    if facts.jump is not None:
        jump = facts.jump
        notes.append(
            Note("lr-jump", f"lr jumps from {jump.before:.3g} to {jump.after:.3g} by step {jump.step}")
        )
    if math.isfinite(facts.piled_norm):
        text = (
            f"{facts.piled_share:.0%} of the logged gradient norms are {facts.piled_norm:.4g}: they were "
            "clipped before they were logged. Do not clip a second time"
        )
        notes.append(Note("piled-norms", text))
    if math.isfinite(facts.clipped):
        text = f"{facts.clipped:.0%} of the logged gradient norms are above max_norm {facts.max_norm:.3g}"
        notes.append(Note("clipping", text))
    return tuple(notes)


def _spike(name: str, spike: LoggedSpike) -> str:
    """A value that stands out, and what came after."""
    text = f"the {name} is {spike.value:.3g} at step {spike.step}, after {spike.usual:.3g}"
    if spike.recovered_at is None:
        return f"{text}; it does not come back"
    return f"{text}; it is back at step {spike.recovered_at}"
