"""A recipe with the learning rate and threshold that were measured at its start."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch

from clipwise.lab.recipes import Recipe
from clipwise.lab.tasks import Task, make_task, seed_of
from clipwise.smoothness.calibrate import calibrate
from clipwise.smoothness.calibration import Calibration

AnyRecipe = TypeVar("AnyRecipe", bound=Recipe)
NUM_BATCHES = 8  # at most; four are enough where they agree


def calibrate_recipe(
    recipe: AnyRecipe, *, task: Task | None = None, offline: bool = False
) -> tuple[AnyRecipe, Calibration]:
    """The recipe with measured ``lr`` and ``max_norm`` (or ``offset``), and the calibration.

    The model is the one that a run of the recipe starts from, the batches are its first ones, each with a
    recurrent state of zeros. Mixed precision is measured in float32.

    Args:
        recipe: What will be trained; its ``lr`` and ``max_norm`` are not looked at.
        task: The recipe's task, if it is at hand.
        offline: Use no network for the data.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if recipe.precision == "64-true" else torch.float32)
    try:
        with torch.random.fork_rng(devices=[]):
            task = task or make_task(recipe, offline=offline)
            model = task.build().train()
            torch.manual_seed(seed_of(recipe, "dropout/0"))
            cal = calibrate(
                model,
                lambda batch: task.loss(model, batch)[0],
                (task.batch(step) for step in range(min(NUM_BATCHES, task.num_steps()))),
                optimizer={"clipped": "ClippedSGD", "normalized": "NormalizedSGD"}[recipe.optimizer],
                momentum=recipe.momentum,
                weight_decay=recipe.weight_decay,
            )
    finally:
        torch.set_default_dtype(before)
    if recipe.optimizer == "normalized":
        return replace(recipe, lr=cal.lr, offset=cal.offset), cal
    return replace(recipe, lr=cal.lr, max_norm=cal.max_norm), cal
