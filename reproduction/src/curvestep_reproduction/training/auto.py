"""Measurements before a run trains: its learning rate and threshold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from curvestep import Calibration, calibrate
from curvestep.calibration.result import read_calibration, write_calibration
from curvestep.trace.run import CONFIG
from curvestep_reproduction.recipes import Recipe, RecipeT
from curvestep_reproduction.tasks import Task, make_task, seed_of
from curvestep_reproduction.training.devices import run_context
from curvestep_reproduction.training.loop import train
from curvestep_reproduction.training.run_folder import RunResult, TrainedRun


def calibrate_recipe(recipe: RecipeT, *, offline: bool = False) -> tuple[RecipeT, Calibration]:
    """The recipe with measured ``lr`` and ``max_norm`` (or ``offset``), and the calibration.

    The model is the one that a run of the recipe starts from, the batches are its first ones, each with a
    recurrent state of zeros. Nothing is written.

    Args:
        recipe: What will be trained; its ``lr``, ``max_norm`` and ``offset`` are not looked at.
        offline: Use no network for the data.

    Example:
        >>> from curvestep_reproduction.recipes import get_recipe
        >>> recipe = get_recipe("cifar-resnet20", images="digits", batch_size=4, pooling=4, momentum=0.0)
        >>> recipe, found = calibrate_recipe(recipe)
        >>> found.optimizer, recipe.lr == found.lr, 0 < found.lr < 10
        ('ClippedSGD', True, True)
    """
    with run_context(recipe):
        task = make_task(recipe, offline=offline)
        model = task.build().train()
        torch.manual_seed(seed_of(recipe, "dropout/0"))
        measured = partial(
            calibrate,
            model,
            lambda batch: task.loss(model, batch)[0],
            _Batches(task),
            optimizer=recipe.rule.optimizer,
            **{name: getattr(recipe, name) for name in recipe.rule.others},
            schedule="constant",
            num_steps=task.num_steps(),
            progress=False,
        )
        found = measured()
        thresholds = [trial.max_norm for trial in found.trials]
        if math.isinf(found.max_norm) and min(thresholds) < math.inf:
            # These recipes clip. Where no trial earned a threshold, they get the one that was tried.
            found = measured(max_norm=min(thresholds))
    return replace(recipe, **{"lr": found.lr, recipe.rule.threshold: found.max_norm}), found


def calibrate_run(
    recipe: RecipeT,
    folder: str | Path,
    names: Sequence[str] = ("lr", "max_norm"),
    *,
    resume: bool = False,
    offline: bool = False,
) -> tuple[RecipeT, Calibration | None]:
    """The recipe with the fields ``names`` measured, and the calibration, for a run in ``folder``.

    ``calibration.json`` is written into it. With ``resume``, a run that is there goes on with the numbers
    that it was begun with, and its own calibration; nothing is measured again. ``names`` are ``lr`` and
    ``max_norm``, or ``offset`` for the normalized rule.
    """
    folder = Path(folder)
    threshold = recipe.rule.threshold
    if others := [name for name in names if name not in ("lr", threshold)]:
        raise ValueError(
            f"The optimizer {recipe.optimizer!r} has no `{others[0]}`: auto measures `lr` and `{threshold}`."
        )
    if (folder / CONFIG).exists():
        if not resume:
            raise ValueError(f"{folder} already holds a run. Resume it, or choose another folder.")
        begun = TrainedRun.load(folder).recipe
        return replace(recipe, **{name: getattr(begun, name) for name in names}), read_calibration(folder)
    measured, found = calibrate_recipe(recipe, offline=offline)
    write_calibration(folder, found)
    return replace(recipe, **{name: getattr(measured, name) for name in names}), found


def run_calibrated(
    recipe: Recipe, folder: Path, *, resume: bool = False, offline: bool = False, **options: Any
) -> RunResult:
    """:func:`~curvestep_reproduction.training.loop.train` with measured ``lr`` and ``max_norm``."""
    measured, _ = calibrate_run(recipe, folder, resume=resume, offline=offline)
    return train(measured, folder, resume=resume, offline=offline, **options)


@dataclass(frozen=True)
class _Batches:
    """The batches of a run, from the first one whenever they are read."""

    task: Task

    def __iter__(self) -> Iterator[Any]:
        for step in count():
            yield self.task.batch(step)
