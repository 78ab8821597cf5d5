"""Which change of a step takes its rise away: the rule, as a function of numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

# Steps before a spike that say what is usual.
FEWEST_STEPS = 4
# A spike raises the loss by more than this multiple of the largest usual change.
SPIKE_RATIO = 3.0
# Share of a rise that counts as all of it.
WHOLE_SHARE = 0.9

CANNOT_TELL = "cannot tell"
BLOCK = "block "  # before the block's name
# Changes that name a cause after precision, block and batch: what overflows does so on some batches only, and
# a batch that is too large is too large for the second moment. `half` and `clipped` shorten any step.
MOMENTS = ("momentum", "second moment")


def share(rise: float, with_change: float) -> float:
    """The share of a rise that a change takes away.

    Example:
        >>> share(4.0, 1.0), share(4.0, -2.0), share(4.0, 5.0), share(math.inf, 3.0)
        (0.75, 1.0, 0.0, 1.0)
    """
    if math.isinf(rise):
        return float(math.isfinite(with_change))
    if not rise > 0:
        return 0.0
    return min(max(1.0 - with_change / rise, 0.0), 1.0)


def usual_change(rises: Sequence[float]) -> float:
    """The largest change of the loss by these steps, up or down."""
    return max(abs(rise) for rise in rises)


def is_spike(rise: float, usual: float) -> bool:
    """Whether a step raised the loss by far more than the steps before it changed it."""
    return rise > SPIKE_RATIO * usual


def largest_spike(rises: Sequence[float]) -> int:
    """The place of the step that raised the loss by the largest multiple of what was usual before it.

    After a spike the loss may swing further up and down than in the spike itself. Before it nothing did.

    Example:
        >>> largest_spike([0.1, -0.1, 0.1, -0.1, 0.2, 80.0, 110.0, -190.0])
        5
    """
    best = FEWEST_STEPS
    best_ratio = -math.inf
    for place in range(FEWEST_STEPS, len(rises)):
        usual = usual_change(rises[:place])
        if math.isinf(usual):  # the loss was lost before
            break
        ratio = rises[place] / max(usual, 1e-300)
        if ratio > best_ratio:
            best = place
            best_ratio = ratio
    return best


def cause_of(rise: float, usual: float, changed: Mapping[str, float], longer: Mapping[str, float]) -> str:
    """The cause of a rise: the change without which there is no spike.

    Args:
        rise: Of the loss, over the step.
        usual: The largest change of the steps before.
        changed: The rise with each change.
        longer: How many times as far as usual each block moved.

    Example:
        >>> cause_of(9.0, 1.0, {"half": 4.0, "batch": -0.1, "momentum": 8.0}, {})
        'batch'
        >>> cause_of(2.0, 1.0, {"half": 0.5, "batch": -0.1, "momentum": 8.0}, {})
        'cannot tell'
    """

    def takes_all(value: float) -> bool:
        """Any finite value takes all of an infinite rise away: it has to beat half the length too."""
        return share(rise, value) >= WHOLE_SHARE and value < changed["half"]

    if not is_spike(rise, usual):
        return CANNOT_TELL
    cures = [name for name, value in changed.items() if not is_spike(value, usual) or takes_all(value)]
    alone = [name for name in cures if name in longer and _moved_far_alone(name, longer)]
    for name in ("precision", *alone, "batch"):
        if name in cures:
            return name
    return min([name for name in MOMENTS if name in cures], key=lambda name: changed[name], default="length")


def _moved_far_alone(block: str, longer: Mapping[str, float]) -> bool:
    """Whether a block, of several, moved far alone."""
    others = [value for name, value in longer.items() if name != block]
    return longer[block] > SPIKE_RATIO * max(others, default=math.inf)
