"""The explanation of a step that raised the loss, and its sentences: the answer, the numbers, what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from curvestep.autopsy.cause import BLOCK, CANNOT_TELL, is_spike

# By cause: the answer, and what to do.
ANSWERS = {
    "batch": (
        "the batch. With another batch this step is no spike.",
        'Look at the batch. `skip_above="10x"` leaves such steps out, clipping shortens them.',
    ),
    "length": (
        "the length of the step. No other single change takes the rise away.",
        "Lower lr, or warm up longer.",
    ),
    "momentum": (
        "the momentum. Built from this batch alone, it makes no spike.",
        "Find what wrote to the momentum. A smaller momentum forgets sooner.",
    ),
    "second moment": (
        "the second moment. It is too small for this gradient.",
        "Lower the second beta, or cap the update by `update_rms`.",
    ),
    "precision": (
        "the precision. In float32 this step is no spike.",
        "Compute this part of the loss in float32.",
    ),
    "block": (
        "block {block}. Without its part the step is no spike.",
        "Look at the gradient and the lr of this block.",
    ),
    CANNOT_TELL: ("cannot tell. This step is no spike.", "Ask again after a step that raised the loss."),
}
CHANGES = {
    "half": "half the length",
    "batch": "another batch",
    "clipped": "clipped to the usual norm",
    "momentum": "momentum of this batch",
    "second moment": "second moment of this batch",
    "precision": "float32",
}


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why a step raised the loss, if that can be told.

    Attributes:
        step: Its number.
        cause: ``"batch"``, ``"length"``, ``"momentum"``, ``"second moment"``, ``"precision"``, ``"block "``
            and the name of the block, or ``"cannot tell"``.
        rise: Of the loss, over the step: median over kept batches.
        usual: The largest change of the steps before it, up or down.
        shares: For each change, the share of the rise that it takes away: from 0 to 1.
        largest: The number of the kept step that raised the loss by the largest multiple of what was usual
            before it: the one that is explained by default.
    """

    step: int
    cause: str
    rise: float
    usual: float
    shares: Mapping[str, float]
    largest: int

    @property
    def is_spike(self) -> bool:
        """Whether the step raised the loss by far more than usual."""
        return is_spike(self.rise, self.usual)

    def __str__(self) -> str:
        return "\n".join(sentences(self))


def sentences(explanation: Explanation) -> list[str]:
    """At most eight lines."""
    kind = BLOCK.strip() if explanation.cause.startswith(BLOCK) else explanation.cause
    answer, advice = ANSWERS[kind]
    lines = [
        f"Step {explanation.step}: {answer.format(block=explanation.cause.removeprefix(BLOCK))}",
        f"It changed the loss of kept batches by {explanation.rise:+.3g} in the median.",
        f"Before it, steps changed it by {explanation.usual:.3g} at most.",
    ]
    if explanation.is_spike:
        lines += ["One change takes away this share of the rise:", *_share_lines(explanation)]
    elif explanation.largest != explanation.step:
        advice = f"Step {explanation.largest} stands out most: ask for that one."
    return [*lines, advice]


def _share_lines(explanation: Explanation) -> list[str]:
    """One line for changes of the whole step, one for the block that matters most."""
    ordered = sorted(explanation.shares.items(), key=lambda entry: -entry[1])
    whole = [f"{CHANGES[name]} {value:.0%}" for name, value in ordered if name in CHANGES]
    block, value = next(entry for entry in ordered if entry[0] not in CHANGES)
    return ["  " + ", ".join(whole), f"  {block} left out {value:.0%}; no other block takes away more"]
