"""When to measure: every so many steps, or as often as a share of the time allows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from curvestep._checks import check_count, check_positive

# The first steps are slower than the rest, so they are not taken for the usual time of a step …
_WARM_UP = 3
# … and this many are timed before the first measurement under a budget.
_TIMED = 5


# Change of the gradient over its norm up to the longer of the short fractions: less than the third that the
# test inside steps bears, since the next steps may be longer than the last.
_SHORT_CHANGE = 0.25


def short_fractions(grad_norm: float, first_secant: float, step_norm: float) -> tuple[float, float]:
    r"""Two fractions of a step before it overshoots, the first a third of the second.

    Up to the second the gradient changes by a quarter of its norm, if it goes on changing as it did:
    :math:`\gamma = \tfrac14 \lVert g\rVert/(s\lVert d\rVert)`, at most a half. Give medians over the last
    rows, so that the fractions follow the run.

    Args:
        grad_norm: :math:`\lVert g\rVert` at the start of the step.
        first_secant: Smoothness s over the shortest fraction that was measured.
        step_norm: Length :math:`\lVert d\rVert` of the step.

    Example:
        >>> short_fractions(1.0, 2.0, 0.5)      # κ = 1
        (0.08333333333333333, 0.25)
        >>> short_fractions(1.0, 2.0, 0.01)
        (0.16666666666666666, 0.5)
    """
    longer = min(0.5, _SHORT_CHANGE * grad_norm / (first_secant * step_norm))
    return longer / 3, longer


class Schedule:
    r"""The next step to measure.

    Without a budget every ``every``-th step, from step 0 on. With one, the soonest step :math:`k`, at least
    ``every`` after the last, at which all measurements so far and the next one together take at most the
    share ``max_overhead`` of what the steps would have taken without them:

    .. math::
        T_\text{probe} + c \le \omega\,(k + 1)\,t, \qquad
            k = \Bigl\lceil \frac{T_\text{probe} + c}{\omega\,t} \Bigr\rceil - 1

    with :math:`t` the mean time of a step that no measurement touched and :math:`c` the expected cost of a
    measurement. The choice is made after a measurement and made again just before the next one, with what is
    known by then.

    A measurement costs more than the time between its start and its end: it pushes training's data out of the
    caches, and memory has to be asked for again. What the measured step and the one after it took beyond
    :math:`2t` is therefore counted too, up to as much again as the measurement itself; more than that was
    something else, such as an evaluation or a checkpoint.

    Args:
        every: Fewest steps between measurements.
        max_overhead: :math:`\omega > 0`, or None.
        first_cost: Cost of the first measurement in steps, before any has been timed.
        clock: Seconds since any fixed moment. Whatever is timed here and in the probe is timed with it, so
            that a simulated clock makes a schedule exact arithmetic.

    Example:
        >>> import itertools
        >>> schedule = Schedule(every=5, max_overhead=0.05, first_cost=2.0, clock=itertools.count().__next__)
        >>> for step in range(10):
        ...     schedule.finished(step)
        >>> schedule.plan(step=9)     # a measurement of 2 steps' time is 5 % of 40
        >>> schedule.next
        39
    """

    def __init__(
        self,
        *,
        every: int,
        max_overhead: float | None = None,
        first_cost: float = 1.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.every = check_count("every", every)
        self.max_overhead = max_overhead
        self.next: int | None = 0
        if max_overhead is not None:
            check_positive("max_overhead", max_overhead)
            self.next = None  # until steps were timed
        self.first_cost = first_cost
        self.clock = clock
        self.train_seconds = 0.0  # of steps that no measurement touched
        self.train_steps = 0
        self.probe_seconds = 0.0
        self.last_cost: float | None = None
        self._ended = math.nan
        self._aftermath = 0.0  # how long the measurement of the step before took
        self._was_routine = False

    @property
    def step_seconds(self) -> float:
        """Mean time of a step that no measurement touched; zero if there was none."""
        return self.train_seconds / max(self.train_steps, 1)

    def finished(self, step: int, *, spent: float = 0.0, routine: bool = True) -> None:
        """Count one step, of which ``spent`` seconds went into measuring.

        A measurement that is not ``routine`` says nothing about the cost of the next.
        """
        now = self.clock()
        took = now - self._ended  # NaN at the first step
        self._ended = now
        if spent:
            self._count_cost(spent, took=took, least=spent, routine=routine)
            self._aftermath, self._was_routine = spent, routine
        elif self._aftermath:
            self._count_cost(self._aftermath, took=took, least=0.0, routine=self._was_routine)
            self._aftermath = 0.0
        elif not math.isnan(took) and step >= _WARM_UP:
            self.train_seconds += took
            self.train_steps += 1

    def needs_plan(self, step: int) -> bool:
        """Whether :meth:`plan` should be called after ``step``: alike on all ranks."""
        if self.next is None:
            return step + 1 >= _WARM_UP + _TIMED
        return step == self.next or (self.max_overhead is not None and step + 1 == self.next)

    def plan(self, step: int) -> None:
        """Choose the next step to measure, now that ``step`` is done."""
        soonest = step + (self.every if step == self.next else 1)
        t = self.step_seconds
        if self.max_overhead is None or t == 0:
            self.next = soonest
            return
        cost = self.last_cost
        if cost is None:
            cost = self.first_cost * t
        affordable = math.ceil((self.probe_seconds + cost) / (self.max_overhead * t)) - 1
        self.next = max(soonest, affordable)

    def state_dict(self) -> dict[str, float | None]:
        """Everything that changes, as plain numbers."""
        names = ("next", "train_seconds", "train_steps", "probe_seconds", "last_cost")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        for name in self.state_dict():
            setattr(self, name, state[name])
        self._ended, self._aftermath = math.nan, 0.0

    def _count_cost(self, spent: float, *, took: float, least: float, routine: bool) -> None:
        """Count ``least`` seconds of a step and whatever else it took beyond the usual, up to ``spent``."""
        cost = least
        if self.train_steps and not math.isnan(took):
            cost += min(max(took - least - self.step_seconds, 0.0), spent)
        self.probe_seconds += cost
        if routine and least:
            self.last_cost = cost
        elif routine:
            self.last_cost = (self.last_cost or 0.0) + cost
