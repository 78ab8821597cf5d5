"""A recipe, or a run of one, with the learning rate and threshold that were measured at its start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from curvestep._checks import check_choice
from curvestep.calibration.result import Calibration, read_calibration, write_calibration
from curvestep.calibration.search import calibrate
from curvestep.lab.recipes import Recipe
from curvestep.lab.run.devices import run_context
from curvestep.lab.run.folder import CONFIG, Run, RunResult
from curvestep.lab.run.loop import train
from curvestep.lab.run.session import load_start
from curvestep.lab.tasks import Task, make_task, seed_of

AnyRecipe = TypeVar("AnyRecipe", bound=Recipe)
_BATCHES_PER_WANTED = 4  # further ones are taken only while lr is unsure


def calibrate_recipe(
    recipe: AnyRecipe,
    *,
    task: Task | None = None,
    num_batches: int = 3,
    max_gradients: int = 40,
    offline: bool = False,
) -> tuple[AnyRecipe, Calibration]:
    """The recipe with measured ``lr`` and ``max_norm`` (or ``offset``), and the calibration.

    The model is the one that a run of the recipe starts from, the batches are its first ones, each with a
    recurrent state of zeros. Mixed precision is measured in float32. Nothing is written.

    Args:
        recipe: What will be trained; its ``lr``, ``max_norm`` and ``offset`` are not looked at.
        task: The recipe's task, if it is at hand.
        num_batches: Batches to measure at least.
        max_gradients: Gradients to evaluate at most.
        offline: Use no network for the data.

    Example:
        >>> from curvestep.lab.recipes import get_recipe
        >>> recipe = get_recipe("cifar-resnet20", images="digits", batch_size=16, momentum=0.0)
        >>> recipe, found = calibrate_recipe(recipe, num_batches=1, max_gradients=30)
        >>> found.optimizer, recipe.lr == found.lr, 0 < found.lr < 10
        ('ClippedSGD', True, True)
    """
    with run_context(recipe):
        task = task or make_task(recipe, offline=offline)
        model = load_start(recipe, task.build()).train()
        torch.manual_seed(seed_of(recipe, "dropout/0"))
        count = min(task.num_steps(), _BATCHES_PER_WANTED * num_batches)
        found = calibrate(
            model,
            lambda batch: task.loss(model, batch)[0],
            (task.batch(step) for step in range(count)),
            optimizer={"clipped": "ClippedSGD", "normalized": "NormalizedSGD"}[recipe.optimizer],
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
            num_batches=num_batches,
            max_gradients=max_gradients,
        )
    return replace(recipe, **_measured(recipe, found)), found


def calibrate_run(
    recipe: AnyRecipe,
    folder: str | Path,
    names: Sequence[str] = ("lr", "max_norm"),
    *,
    resume: bool = False,
    offline: bool = False,
) -> tuple[AnyRecipe, Calibration | None]:
    """The recipe with the fields ``names`` measured, for a run in ``folder`` that keeps the calibration.

    With ``resume``, a run that is there goes on with the numbers that it was begun with; nothing is measured
    again.

    Args:
        recipe: What will be trained.
        folder: The run folder; ``calibration.json`` is written into it.
        names: Fields to measure: ``lr``, ``max_norm``, or ``offset`` for the normalized rule.
        resume: Whether the folder may hold a run already.
        offline: Use no network for the data.

    Returns:
        The recipe, and its calibration: the one that the folder holds, if the run is resumed.
    """
    folder = Path(folder)
    for name in names:
        check_choice("names", name, ("lr", _threshold(recipe)))
    if (folder / CONFIG).exists():
        if not resume:
            raise ValueError(f"{folder} already holds a run. Resume it, or choose another folder.")
        begun = Run.load(folder).recipe
        return replace(recipe, **{name: getattr(begun, name) for name in names}), read_calibration(folder)
    _, found = calibrate_recipe(recipe, offline=offline)
    measured = _measured(recipe, found)
    write_calibration(folder, found)
    return replace(recipe, **{name: measured[name] for name in names}), found


def run_calibrated(
    recipe: Recipe, folder: Path, *, resume: bool = False, offline: bool = False, **options: Any
) -> RunResult:
    """:func:`~curvestep.lab.run.loop.train` with measured ``lr`` and ``max_norm``."""
    measured, _ = calibrate_run(recipe, folder, resume=resume, offline=offline)
    return train(measured, folder, resume=resume, offline=offline, **options)


def _threshold(recipe: Recipe) -> str:
    return "offset" if recipe.optimizer == "normalized" else "max_norm"


def _measured(recipe: Recipe, found: Calibration) -> dict[str, float]:
    """The fields of the recipe that the calibration names."""
    return {"lr": found.lr, _threshold(recipe): found.max_norm}
