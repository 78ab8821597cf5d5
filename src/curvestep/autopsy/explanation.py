"""Why a kept step raised the loss: what each change of it would have made of the rise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from torch import nn

from curvestep.autopsy.autopsy_words import sentences
from curvestep.autopsy.cause import BLOCK, FEWEST_STEPS, SPIKE, cause_of, share
from curvestep.autopsy.kept_step import KeptStep, StepStart, norms_of
from curvestep.autopsy.moments import BatchMoments, has_first, has_second
from curvestep.autopsy.retake import Alteration, Losses, Retakes, Walked, factors, full_precision, joint
from curvestep.smoothness.measurement import layer_groups
from curvestep.vectors import precision


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
        largest: The number of the kept step that raised the loss most.
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
        return self.rise > SPIKE * self.usual

    def __str__(self) -> str:
        return "\n".join(sentences(self))


def explained(
    model: nn.Module, starts: Sequence[StepStart], steps: Sequence[KeptStep], number: int | None
) -> Explanation:
    """Why a kept step raised the loss: that of this ``number``, or the one that raised it most."""
    with Retakes(model, starts, steps) as again:
        walked = again.walk()
        rises = [rise(step.before, step.after) for step in walked]
        largest = max(range(FEWEST_STEPS, len(steps)), key=rises.__getitem__)
        place = largest if number is None else number - steps[0].number
        step, before = steps[place], walked[place].before
        here = again.before(step.number)
        scales = factors(step, norms_of(again.gradients(step)))
        changes = alterations(again, steps[:place], step, here, scales)
        changed = {name: rise(before, again.retake(step, here, scales, c)) for name, c in changes.items()}
    usual = max(map(abs, rises[:place]))
    longer = times_longer(walked[: place + 1], blocks_of(again))
    return Explanation(
        step=step.number,
        cause=cause_of(rises[place], usual, changed, longer),
        rise=rises[place],
        usual=usual,
        shares={name: share(rises[place], value) for name, value in changed.items()},
        largest=steps[largest].number,
    )


def blocks_of(again: Retakes) -> dict[str, list[int]]:
    """The indices of the parameters of each module, by name."""
    blocks = layer_groups(again.model, again.parameters)
    return {BLOCK + name: indices for name, indices in blocks.items()}


def times_longer(walked: Sequence[Walked], blocks: Mapping[str, list[int]]) -> dict[str, float]:
    """How many times as far as usual each block moved in the last step."""
    longer: dict[str, float] = {}
    for name, indices in blocks.items():
        *usual, last = [float(np.linalg.norm(step.lengths[indices])) for step in walked]
        longer[name] = last / (median(usual) or math.inf)
    return longer


def rise(before: Losses, after: Losses) -> float:
    """The median rise of the judges' losses; infinite where a finite loss is lost.

    Example:
        >>> rise(np.array([1.0, 1.0, 1.0]), np.array([2.0, 1.5, math.nan]))
        1.0
    """
    ended = np.where(np.isfinite(after), after, math.inf)
    begun = np.where(np.isfinite(before), before, math.inf)
    with np.errstate(invalid="ignore"):
        return float(np.median(np.where(np.isfinite(begun), ended - begun, 0.0)))


def alterations(
    again: Retakes, earlier: Sequence[KeptStep], step: KeptStep, here: StepStart, scales: list[float]
) -> dict[str, Alteration]:
    """Changes of a step, by name."""
    moments = BatchMoments(again.parameters, again.coefficient(step, here, scales))
    states = here.optimizer().state.values()
    changes = {
        "half": Alteration(fraction=0.5),
        "batch": Alteration(batch=earlier[-1]),
        "clipped": Alteration(max_norm=median(joint(kept.norms) for kept in earlier)),
    }
    if any(map(has_first, states)):
        changes["momentum"] = Alteration(moments=moments.set_first)
    if any(map(has_second, states)):
        changes["second moment"] = Alteration(moments=moments.set_second)
    if again.precision > precision(again.parameters):
        changes["precision"] = Alteration(computing=full_precision)
    blocks = {name: Alteration(left_out=indices) for name, indices in blocks_of(again).items()}
    return {**changes, **blocks}
