"""How often clipping fires and how many steps are left out: numbers that a checkpoint keeps.

On the host they are the floats of :class:`HostCounters`, on an accelerator the tensors of
``device.DeviceCounters``. Both count a step by ``count`` and give plain numbers by ``read``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Any, NamedTuple, NotRequired, TypedDict, cast

# Steps that `recent_clipped_fraction` and the running median look back on.
RECENT_STEPS = 100
# Gradient norms that a running median needs before it can leave out a step.
FEWEST_NORMS = 10
# A norm so many standard deviations above the mean of the last ones is a spike; how often that is renewed.
SPIKE_SIGMAS = 6.0
RENEWED_STEPS = 10
# Norms that agree to 1e-5 and are the largest, but neither the same nor in order: somebody clips before us.
NUM_EQUAL_NORMS = 4
EQUAL_NORMS = 1 - 1e-5


class Limit(NamedTuple):
    """Limit of a step that is taken: a norm, a multiple of the running median, deviations from the mean."""

    number: float
    unit: str  # "norm", "x" or "sigma"


class ClipEdge(NamedTuple):
    """Where the rule of an optimizer bends.

    Attributes:
        norm: The gradient norm beyond which a step counts as clipped; NaN where groups differ or a rule
            chooses it.
        coefficient: The factor on a gradient of this norm, relative to that on a gradient near zero: 1 for
            clipping, 1/2 for :class:`NormalizedSGD`.
    """

    norm: float
    coefficient: float


class Spike(TypedDict):
    """A step whose gradient norm stood out from those before it.

    Attributes:
        step: Steps counted before it, skipped ones among them.
        grad_norm: Norm of the gradient.
        clipped_norm: The same after clipping, 0 if the step was left out.
        loss: What the closure of the step returned, None without one.
        layer: The parameter with the largest gradient: its name, if the optimizer was given names.
        share: Its share of the squared norm.
    """

    step: int
    grad_norm: float
    clipped_norm: float
    loss: float | None
    layer: str
    share: float


class ClipStats(TypedDict):
    """The result of ``clip_stats()``.

    Attributes:
        grad_norm: Norm of the last gradient, before clipping.
        coefficient: Factor on the last step, 1 where nothing was clipped; the smallest if there were several.
        steps: Steps taken, without the skipped ones.
        clipped_fraction: Share of these steps whose gradient norm was above the threshold.
        recent_clipped_fraction: The same over the last 100 steps.
        skipped: Steps skipped because the gradient was not finite, or its norm larger than ``skip_above``.
            With ``fused=True`` also those of a ``GradScaler``, which otherwise skips the step without calling
            the optimizer.
        layers: Gradient norm of each parameter, if asked for.
    """

    grad_norm: float
    coefficient: float
    steps: int
    clipped_fraction: float
    recent_clipped_fraction: float
    skipped: int
    layers: NotRequired[dict[str, float]]


@dataclass
class HostCounters:
    """Counters of steps whose numbers are floats."""

    grad_norm: float = 0.0  # of the last gradient
    coefficient: float = 1.0  # the smallest factor on the last step that was taken
    steps: int = 0  # that were taken
    clipped: float = 0.0  # sum of the shares of clipping decisions that fired
    skipped: int = 0
    recent: list[float] = field(default_factory=list[float])  # the shares of the last steps taken
    # The last finite norms, those of skipped steps among them: where gradients grow for good, their median
    # follows and steps are taken again after at most 50.
    norms: list[float] = field(default_factory=list[float])
    losses: list[float] = field(default_factory=list[float])  # the last ones that closures returned
    spike_bound: float = math.inf  # the norm above which a step is a spike
    spikes: list[Spike] = field(default_factory=list[Spike])

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> HostCounters:
        """The counters that a checkpoint has; one of an older version lacks some."""
        return cls(**{f.name: saved[f.name] for f in fields(cls) if f.name in saved})

    def count(self, norm: float, coefficients: list[float], fired: list[bool]) -> None:
        """Count a step, with a coefficient for each clipping decision and whether it fired."""
        share = sum(fired) / len(fired)
        self.coefficient = min(coefficients)
        self.steps += 1
        self.clipped += share
        _push(self.recent, share)
        self._keep_norm(norm)

    def count_skipped(self, norm: float) -> None:
        """Count a step that was left out."""
        self.skipped += 1
        self._keep_norm(norm)

    def exceeds(self, limit: Limit, norm: float, loss: float | None) -> bool:
        """Whether norm or loss is above the limit; never while those before are few."""
        if limit.unit == "norm":
            return norm > limit.number
        if limit.unit == "x":
            return len(self.norms) >= FEWEST_NORMS and norm > limit.number * median(self.norms)
        is_high = loss is not None and loss > _mean_and_deviations(self.losses, limit.number)
        return is_high or norm > _mean_and_deviations(self.norms, limit.number)

    def keep_loss(self, loss: float | None) -> None:
        """Remember a loss, if there is one and it is finite."""
        if loss is not None and math.isfinite(loss):
            _push(self.losses, loss)

    def keep_spike(self, spike: Spike) -> None:
        """Add a spike to the last ones."""
        self.spikes.append(spike)
        del self.spikes[:-RECENT_STEPS]

    def read(self) -> HostCounters:
        """The numbers themselves."""
        return self

    def _keep_norm(self, norm: float) -> None:
        self.grad_norm = norm
        if math.isfinite(norm):
            _push(self.norms, norm)
        if (self.steps + self.skipped) % RENEWED_STEPS == 0:
            self.spike_bound = _mean_and_deviations(self.norms, SPIKE_SIGMAS)


def _mean_and_deviations(values: list[float], sigmas: float) -> float:
    """The mean plus so many standard deviations, ``inf`` while values are few."""
    if len(values) < FEWEST_NORMS:
        return math.inf
    mean = sum(values) / len(values)
    return mean + sigmas * math.sqrt(sum([(value - mean) ** 2 for value in values]) / len(values))


def _push(values: list[float], value: float) -> None:
    values.append(value)
    del values[:-RECENT_STEPS]


class PrintedStats(dict[str, Any]):
    """The dict of :class:`ClipStats`, which prints its answer first.

    Example:
        >>> stats = {"grad_norm": 2.0, "coefficient": 0.5, "steps": 8, "clipped_fraction": 0.25, "skipped": 1}
        >>> print(PrintedStats(stats, recent_clipped_fraction=0.25))
        CLIPPED 25% of 8 steps; 25% of the last 8
          last step  gradient norm 2, multiplied by 0.5
          skipped    1 steps: their gradient was not finite, or above skip_above
    """

    def __str__(self) -> str:
        lines = [
            f"CLIPPED {self['clipped_fraction']:.0%} of {self['steps']:,} steps; "
            f"{self['recent_clipped_fraction']:.0%} of the last {min(self['steps'], RECENT_STEPS)}",
            f"  last step  gradient norm {self['grad_norm']:.3g}, multiplied by {self['coefficient']:.3g}",
        ]
        if self["skipped"]:
            lines.append(
                f"  skipped    {self['skipped']:,} steps: their gradient was not finite, or above skip_above"
            )
        return "\n".join(lines)


def clip_stats_of(counters: HostCounters) -> ClipStats:
    """The counters as ``clip_stats()`` returns them."""
    stats: ClipStats = {
        "grad_norm": counters.grad_norm,
        "coefficient": counters.coefficient,
        "steps": counters.steps,
        "clipped_fraction": counters.clipped / max(counters.steps, 1),
        "recent_clipped_fraction": sum(counters.recent) / max(len(counters.recent), 1),
        "skipped": counters.skipped,
    }
    return cast(ClipStats, PrintedStats(stats))


def is_clipped_before(norms: list[float]) -> bool:
    """Whether somebody clips before us: a largest norm that gradients come close to again and again.

    What clipping leaves differs in the last digits. Gradients that stay as they are have one norm, and a run
    that hardly moves has norms that only rise or only fall.

    Example:
        >>> is_clipped_before([0.3, 1.0, 0.9999999, 0.5, 0.9999998, 1.0, 0.9999997])
        True
        >>> is_clipped_before([0.3, 1.0, 0.9, 0.5, 0.8, 0.7])
        False
    """
    bound = max(norms, default=0.0) * EQUAL_NORMS
    equal = [norm for norm in norms if norm >= bound]
    rising = sorted(equal)
    return len(set(equal)) >= NUM_EQUAL_NORMS and equal not in (rising, rising[::-1])
