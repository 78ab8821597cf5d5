"""When to measure, and where on a step: counted in gradients, so that rows do not depend on the machine."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from curvestep.checks import check_count, check_positive
from curvestep.trace.schema import LEAST_ROWS

FIRST_ROWS = LEAST_ROWS  # measured whatever they cost
SPACING = 5  # steps between measurements, where nothing else is asked for
COST_SHARE = 0.05  # gradients for measuring over those for training, likewise, after the first rows
FOLLOWED_ROWS = 5  # that choose the fractions of the next
# Change of the gradient over its norm up to the longer of the short fractions: less than the third that the
# test inside steps bears, since the next steps may be longer than the last.
SHORT_CHANGE = 0.25


def short_fractions(rates: Sequence[float]) -> tuple[float, float]:
    r"""Two fractions of a step before it overshoots: a power of two, and a third of it.

    Up to the longer one :math:`\gamma` the gradient changes by at most a quarter of its norm, if the next
    step goes as the median of the last: :math:`\gamma\,r \le \tfrac14`, and :math:`\gamma` is at most a half.
    Powers of two, so that neighbouring rows have the same fractions as a rule.

    Args:
        rates: Of the last rows: by how much a whole step would change the gradient, over its norm, if it went
            on changing as at its beginning, :math:`r = s(\gamma)\lVert d\rVert/\lVert g\rVert`.

    Example:
        >>> short_fractions([0.9, 1.0, 7.0])
        (0.08333333333333333, 0.25)
        >>> short_fractions([])
        (0.16666666666666666, 0.5)
    """
    longer = 0.5
    if rates:
        longer = min(longer, SHORT_CHANGE / statistics.median(rates))
    longer = 2.0 ** math.floor(math.log2(longer))
    return longer / 3, longer


def check_fractions(fractions: Iterable[float]) -> tuple[float, ...]:
    """The fractions in ascending order, if they lie in (0, 1]."""
    if not isinstance(fractions, Iterable):
        raise TypeError(f"`fractions` must be several numbers, such as (0.5, 1.0), got {fractions!r}.")
    ordered = tuple(sorted(float(fraction) for fraction in fractions))
    if not ordered or not 0.0 < ordered[0] <= ordered[-1] <= 1.0:
        raise ValueError(f"`fractions` must be numbers in (0, 1], at least one, got {ordered}.")
    return ordered


class Schedule:
    r"""The next step to measure.

    With ``every`` alone, every ``every``-th step. With a budget the first ten rows come ``every`` steps
    apart, since no fit takes fewer; each row that cost :math:`c` gradients is then followed by
    :math:`c/\omega` steps without one, so that measuring takes the share :math:`\omega` of
    training's gradients. Without both: five steps apart, then a share of 5 %.

    Args:
        every: Fewest steps between measurements.
        max_overhead: :math:`\omega > 0`.

    Example:
        >>> schedule = Schedule()
        >>> for step in range(200):
        ...     schedule.finished(step, num_gradients=3)
        >>> schedule.num_rows, schedule.num_gradients, schedule.next
        (12, 36, 225)
    """

    def __init__(self, *, every: int | None = None, max_overhead: float | None = None) -> None:
        if max_overhead is not None:
            check_positive("max_overhead", max_overhead)
        elif every is None:
            max_overhead = COST_SHARE
        self.every = SPACING if every is None else check_count("every", every)
        self.max_overhead = max_overhead
        self.next = 0
        self.num_rows = 0
        self.num_gradients = 0  # of all measurements

    def finished(self, step: int, *, num_gradients: int) -> None:
        """Count one step, and the gradients that measuring it took; choose the next if it was due."""
        if step != self.next:
            return
        self.num_rows += 1
        self.num_gradients += num_gradients
        gap = self.every
        if self.max_overhead is not None and self.num_rows >= FIRST_ROWS:
            gap = max(gap, math.ceil(num_gradients / self.max_overhead))
        self.next = step + gap

    def state_dict(self) -> dict[str, int]:
        """Everything that changes, as plain numbers."""
        return {"next": self.next, "num_rows": self.num_rows, "num_gradients": self.num_gradients}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue where :meth:`state_dict` was taken; an older state has no counts."""
        self.next = state["next"]
        self.num_rows = state.get("num_rows", 0)
        self.num_gradients = state.get("num_gradients", 0)
