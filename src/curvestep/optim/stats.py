"""The answers about an optimizer's steps: ``clip_stats()``, spikes, and what is wrong with a gradient."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch gives vector_norm and tolist no type.

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, NotRequired, TypedDict, cast

from torch import Tensor

from curvestep.parameter_names import name_of
from curvestep.tensors.vectors import global_norm, read

if TYPE_CHECKING:
    from curvestep.optim.clip_step import Counters, StepRecord
    from curvestep.optim.update import Settings

# Norms that agree to 1e-5 and are the largest, but neither the same nor in order: somebody clips before us.
NUM_EQUAL_NORMS = 4
EQUAL_NORMS = 1 - 1e-5


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
    """A step with a gradient norm far above those before it.

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


class PrintedStats(dict[str, Any]):
    """The dict of :class:`ClipStats`, which prints its answer first.

    Example:
        >>> stats = {"grad_norm": 2.0, "coefficient": 0.5, "steps": 8, "clipped_fraction": 0.25, "skipped": 1}
        >>> print(PrintedStats(stats, recent_clipped_fraction=0.25))
        CLIPPED 25% of 8 steps; 25% of the last 8
          last step  gradient norm 2, multiplied by 0.5
          skipped    1 steps: their gradient was not finite, or above skip_above
    """

    num_recent: int | None = None  # steps that `recent_clipped_fraction` looks back on, if not all

    def __str__(self) -> str:
        num_recent = self["steps"] if self.num_recent is None else self.num_recent
        lines = [
            f"CLIPPED {self['clipped_fraction']:.0%} of {self['steps']:,} steps; "
            f"{self['recent_clipped_fraction']:.0%} of the last {num_recent}",
            f"  last step  gradient norm {self['grad_norm']:.3g}, multiplied by {self['coefficient']:.3g}",
        ]
        if self["skipped"]:
            lines.append(
                f"  skipped    {self['skipped']:,} steps: their gradient was not finite, or above skip_above"
            )
        return "\n".join(lines)


def clip_stats(record: StepRecord, whose: str, param_groups: list[Settings], *, layers: bool) -> ClipStats:
    """An optimizer's ``clip_stats()``; warns once if somebody clips before it."""
    counters = record.read()
    if record.checks_double_clip and is_clipped_before(counters.norms):
        record.checks_double_clip = False
        warnings.warn(
            f"Gradients arrive at {whose} already clipped (several had norm "
            f"{max(counters.norms):.6g}, none a larger one), so clip_stats() is wrong. Clip once: "
            "max_grad_norm=0 in TrainingArguments (its default is 1.0), no gradient_clip_val in "
            "Lightning, no clip_grad_norm_.",
            stacklevel=3,
        )
    stats = _stats_of(counters)
    if layers:
        stats["layers"] = layer_norms(param_groups)
    return stats


def _stats_of(counters: Counters) -> ClipStats:
    stats: ClipStats = {
        "grad_norm": counters.grad_norm,
        "coefficient": counters.coefficient,
        "steps": counters.steps,
        "clipped_fraction": counters.clipped / max(counters.steps, 1),
        "recent_clipped_fraction": sum(counters.recent) / max(len(counters.recent), 1),
        "skipped": counters.skipped,
    }
    printed = PrintedStats(stats)
    printed.num_recent = len(counters.recent)
    return cast(ClipStats, printed)


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


def layer_norms(groups: list[Settings]) -> dict[str, float]:
    """The norm of each parameter's gradient, by name; waits for a device."""
    named = [(name, p.grad) for name, p in _named(groups) if p.grad is not None]
    norms = read([global_norm([grad]) for _, grad in named])
    return {name: float(norm[0]) for (name, _), norm in zip(named, norms, strict=True)}


def nonfinite_gradient(groups: list[Settings]) -> str:
    """Which parameter has the first gradient that is not finite, in words for an error."""
    found = "All gradients are finite, but their norm overflows."
    for name, p in _named(groups):
        # Times zero, a finite number is zero and any other is NaN; the norm itself may overflow.
        if p.grad is not None and math.isnan(global_norm([p.grad * 0])):
            found = f"The gradient of `{name}`, shape {tuple(p.shape)}, is not finite."
            break
    return (
        f'{found} Nothing was changed. Use nonfinite="skip" to leave such steps out, or "propagate" to take '
        "them."
    )


def _named(groups: list[Settings]) -> Iterator[tuple[str, Tensor]]:
    """The parameters with their names: those given, else those of a model that is known, else numbers."""
    for number, group in enumerate(groups):
        names = group.get("param_names")
        if names is None:
            names = [name_of(p, f"parameter {i} of group {number}") for i, p in enumerate(group["params"])]
        yield from zip(names, group["params"], strict=True)
