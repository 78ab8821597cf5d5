"""Calibration of a recipe: its model, its batches, before the first step."""

from __future__ import annotations

import torch

from clipwise.lab.recipes import Recipe
from clipwise.lab.tasks import make_task
from clipwise.smoothness.calibrate import Calibration, calibrate

_BATCHES_PER_WANTED = 4  # further ones are taken only while lr is unsure


def calibrate_recipe(
    recipe: Recipe, *, num_batches: int = 3, max_gradients: int = 40, offline: bool = False
) -> Calibration:
    """Learning rate and ``max_norm`` for ``recipe``, measured at its start on the batches it begins with.

    Its own ``lr``, ``max_norm`` and ``offset`` play no part. Nothing is written.

    Args:
        recipe: What is to be trained.
        num_batches: Batches to measure at least.
        max_gradients: Gradients to evaluate at most.
        offline: Use no network for the data.

    Example:
        >>> from clipwise.lab.recipes import get_recipe
        >>> recipe = get_recipe("cifar-resnet20", images="digits", batch_size=16, momentum=0.0)
        >>> found = calibrate_recipe(recipe, num_batches=1, max_gradients=20)
        >>> found.optimizer, 0 < found.lr < 10
        ('ClippedSGD', True)
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if recipe.precision == "64-true" else torch.float32)
    try:
        with torch.random.fork_rng(devices=[]):
            task = make_task(recipe, offline=offline)
            model = task.build().train()
            count = min(task.num_steps(), _BATCHES_PER_WANTED * num_batches)
            return calibrate(
                model,
                lambda batch: task.loss(model, batch)[0],
                (task.batch(step) for step in range(count)),
                optimizer="NormalizedSGD" if recipe.optimizer == "normalized" else "ClippedSGD",
                momentum=recipe.momentum,
                weight_decay=recipe.weight_decay,
                num_batches=num_batches,
                max_gradients=max_gradients,
            )
    finally:
        torch.set_default_dtype(before)
