"""Why a kept step raised the loss: the step is taken again with one thing changed at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median

import numpy as np
from torch import nn

from curvestep.autopsy.alteration import (
    Alteration,
    BatchMoments,
    FullPrecision,
    has_momentum,
    has_second_moment,
)
from curvestep.autopsy.cause import BLOCK, cause_of, largest_spike, share, usual_change
from curvestep.autopsy.explanation import Explanation
from curvestep.autopsy.kept_step import KeptStep, StepStart
from curvestep.autopsy.retake import AskedStep, Retakes, StepEffect, joint_norm
from curvestep.smoothness.measurement import layer_groups
from curvestep.tensors.vectors import precision

Blocks = dict[str, list[int]]  # names of blocks, with the indices of their parameters


def explain(
    model: nn.Module, starts: Sequence[StepStart], steps: Sequence[KeptStep], number: int | None
) -> Explanation:
    """Why the kept step of this ``number`` raised the loss, or, without one, the largest spike."""
    with Retakes(model, starts, steps) as retakes:
        effects = retakes.replay_all()
        rises = [effect.rise for effect in effects]
        largest = largest_spike(rises)
        place = largest if number is None else number - steps[0].number
        asked = retakes.asked(steps[place].number, effects[place].before)
        blocks = blocks_of(retakes)
        changes = changes_of(retakes, asked, steps[:place]) | changes_by_block(blocks)
        changed = {name: retakes.rise_with(change, asked) for name, change in changes.items()}
    rise = rises[place]
    usual = usual_change(rises[:place])
    return Explanation(
        step=steps[place].number,
        cause=cause_of(rise, usual, changed, times_longer(effects[: place + 1], blocks)),
        rise=rise,
        usual=usual,
        shares={name: share(rise, with_change) for name, with_change in changed.items()},
        largest=steps[largest].number,
    )


def blocks_of(retakes: Retakes) -> Blocks:
    """The modules that have parameters of their own."""
    groups = layer_groups(retakes.model, retakes.parameters)
    return {f"{BLOCK}{name}": indices for name, indices in groups.items()}


def changes_by_block(blocks: Blocks) -> dict[str, Alteration]:
    """The step without the part of each block, by the block's name."""
    return {name: Alteration(left_out=indices) for name, indices in blocks.items()}


def changes_of(retakes: Retakes, asked: AskedStep, earlier: Sequence[KeptStep]) -> dict[str, Alteration]:
    """Changes of a whole step, by name."""
    moments = BatchMoments(retakes.parameters, retakes.coefficient(asked))
    states = asked.start.optimizer().state.values()
    usual_norm = median(joint_norm(kept.norms) for kept in earlier)
    changes = {
        "half": Alteration(fraction=0.5),
        "batch": Alteration(batch_of=earlier[-1]),
        "clipped": Alteration(max_norm=usual_norm),
    }
    if has_momentum(states):
        changes["momentum"] = Alteration(change_state=moments.set_first)
    if has_second_moment(states):
        changes["second moment"] = Alteration(change_state=moments.set_second)
    if retakes.precision > precision(retakes.parameters):
        device = retakes.parameters[0].device.type
        changes["precision"] = Alteration(computed_in=partial(FullPrecision, device))
    return changes


def times_longer(effects: Sequence[StepEffect], blocks: Mapping[str, list[int]]) -> dict[str, float]:
    """How many times as far as usual each block moved in the last step."""
    longer: dict[str, float] = {}
    for name, indices in blocks.items():
        lengths = [float(np.linalg.norm(effect.lengths[indices])) for effect in effects]
        usual = median(lengths[:-1])
        longer[name] = lengths[-1] / (usual or math.inf)
    return longer
