"""When to measure: every so many steps, or as often as a share of the time allows."""

from __future__ import annotations

import math
from typing import Any

from clipwise._checks import check_count, check_positive

# Steps to time before the first measurement under a budget; the first few are slower than the rest.
_WARM_UP = 5


class Schedule:
    r"""The next step to measure.

    Without a budget every ``every``-th step, from step 0 on. With one, the soonest step, at least ``every``
    after the last, at which all measurements so far and the next one together take at most the share
    ``max_overhead`` of the time spent training:

    .. math::
        T_\text{probe} + c \le \omega\,(T_\text{train} + n\,t), \qquad
            n = \Bigl\lceil \frac{(T_\text{probe} + c)/\omega - T_\text{train}}{t} \Bigr\rceil

    with :math:`t` the mean time of a step and :math:`c` the expected cost of a measurement.

    Args:
        every: Fewest steps between measurements.
        max_overhead: :math:`\omega > 0`, or None.
        first_cost: Cost of the first measurement in steps, before any has been timed.

    Example:
        >>> schedule = Schedule(every=5, max_overhead=0.05, first_cost=2.0)
        >>> for step in range(5):
        ...     schedule.trained(1.0)
        >>> schedule.plan(step=4)     # a measurement of 2 steps' time is 5 % of 40
        >>> schedule.next
        39
    """

    def __init__(self, *, every: int, max_overhead: float | None = None, first_cost: float = 1.0) -> None:
        self.every = check_count("every", every)
        self.max_overhead = None if max_overhead is None else check_positive("max_overhead", max_overhead)
        self.first_cost = first_cost
        self.next: int | None = 0 if max_overhead is None else None
        self.train_seconds = 0.0
        self.train_steps = 0
        self.probe_seconds = 0.0
        self.last_cost: float | None = None

    def trained(self, seconds: float) -> None:
        """Count one training step."""
        self.train_seconds += seconds
        self.train_steps += 1

    def measured(self, seconds: float, *, routine: bool = True) -> None:
        """Count one measurement; one that is not ``routine`` says nothing about the next."""
        self.probe_seconds += seconds
        if routine:
            self.last_cost = seconds

    def needs_plan(self, step: int) -> bool:
        """Whether :meth:`plan` should be called after ``step``: alike on all ranks."""
        return step == self.next or (self.next is None and step + 1 >= _WARM_UP)

    def plan(self, step: int) -> None:
        """Choose the next step to measure, now that ``step`` is done."""
        soonest = step + self.every if self.next is not None else step + 1
        if self.max_overhead is None:
            self.next = soonest
            return
        step_seconds = self.train_seconds / max(self.train_steps, 1)
        cost = self.first_cost * step_seconds if self.last_cost is None else self.last_cost
        missing = (self.probe_seconds + cost) / self.max_overhead - self.train_seconds
        wait = math.ceil(missing / step_seconds) if step_seconds > 0 else 0
        self.next = max(soonest, step + wait)

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes, as plain numbers."""
        names = ("next", "train_seconds", "train_steps", "probe_seconds", "last_cost")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        for name in self.state_dict():
            setattr(self, name, state[name])
