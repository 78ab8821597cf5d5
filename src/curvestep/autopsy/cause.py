"""Which change of a step takes its rise away: the rule, as a function of numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping

# Steps before a spike that say what is usual.
FEWEST_STEPS = 4
# A spike raises the loss by more than this multiple of the largest usual change.
SPIKE = 3.0
# Share of a rise that counts as all of it.
WHOLE = 0.9

CANNOT_TELL = "cannot tell"
BLOCK = "block "  # before the block's name
# Changes that name a cause after precision, block and batch: what overflows does so on some batches only, and
# a batch that is too large is too large for the second moment. `half` and `clipped` shorten any step.
MOMENTS = {"momentum", "second moment"}


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
    limit = SPIKE * usual

    def is_whole(value: float) -> bool:
        """Any finite value takes all of an infinite rise away: it has to beat half the length too."""
        return share(rise, value) >= WHOLE and value < changed["half"]

    if not rise > limit:
        return CANNOT_TELL
    cures = [name for name, value in changed.items() if value <= limit or is_whole(value)]
    alone = [name for name in cures if name in longer and _stands_out(name, longer)]
    for name in ("precision", *alone, "batch"):
        if name in cures:
            return name
    return min(set(cures) & MOMENTS, key=changed.__getitem__, default="length")


def _stands_out(block: str, longer: Mapping[str, float]) -> bool:
    """Whether a block, of several, moved far alone."""
    others = [value for name, value in longer.items() if name != block]
    return longer[block] > SPIKE * max(others, default=math.inf)
