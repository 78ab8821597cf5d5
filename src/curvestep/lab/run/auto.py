"""Measurements before a run trains: its learning rate and threshold, and its cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from timeit import timeit
from typing import Any, TypeVar

import torch

from curvestep._checks import check_choice
from curvestep.calibration.calibrate import calibrate
from curvestep.calibration.result import Calibration, read_calibration, write_calibration
from curvestep.lab.data.cifar10 import placeholder_cifar10
from curvestep.lab.data.ptb import placeholder_ptb
from curvestep.lab.progress import duration
from curvestep.lab.recipes import OPTIMIZERS, ImageRecipe, LanguageRecipe, Recipe
from curvestep.lab.run.devices import run_context
from curvestep.lab.run.folder import CONFIG, Run, RunResult
from curvestep.lab.run.loop import train
from curvestep.lab.run.session import make_optimizer
from curvestep.lab.tasks import ImageTask, LanguageTask, make_task, seed_of

RecipeT = TypeVar("RecipeT", bound=Recipe)


def calibrate_recipe(
    recipe: RecipeT, *, budget: float | None = None, offline: bool = False
) -> tuple[RecipeT, Calibration]:
    """The recipe with measured ``lr`` and ``max_norm`` (or ``offset``), and the calibration.

    The model is the one that a run of the recipe starts from, the batches are its first ones, each with a
    recurrent state of zeros. Mixed precision is measured in float32. Nothing is written.

    Args:
        recipe: What will be trained; its ``lr``, ``max_norm`` and ``offset`` are not looked at.
        budget: Gradients that the trials may take, or their share of the steps of training.
        offline: Use no network for the data.

    Example:
        >>> from curvestep.lab.recipes import get_recipe
        >>> recipe = get_recipe("cifar-resnet20", images="digits", batch_size=16, momentum=0.0)
        >>> recipe, found = calibrate_recipe(recipe, budget=48)
        >>> found.optimizer, recipe.lr == found.lr, 0 < found.lr < 10
        ('ClippedSGD', True, True)
    """
    with run_context(recipe):
        task = make_task(recipe, offline=offline)
        model = task.build().train()
        torch.manual_seed(seed_of(recipe, "dropout/0"))
        found = calibrate(
            model,
            lambda batch: task.loss(model, batch)[0],
            map(task.batch, count()),
            optimizer=OPTIMIZERS[recipe.optimizer],
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
            num_steps=task.num_steps(),
            budget=budget,
            progress=False,
        )
    return replace(recipe, **{"lr": found.lr, _threshold(recipe): found.max_norm}), found


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
    for name in names:
        check_choice("names", name, ("lr", _threshold(recipe)))
    if (folder / CONFIG).exists():
        if not resume:
            raise ValueError(f"{folder} already holds a run. Resume it, or choose another folder.")
        begun = Run.load(folder).recipe
        return replace(recipe, **{name: getattr(begun, name) for name in names}), read_calibration(folder)
    measured, found = calibrate_recipe(recipe, offline=offline)
    write_calibration(folder, found)
    return replace(recipe, **{name: getattr(measured, name) for name in names}), found


def run_calibrated(
    recipe: Recipe, folder: Path, *, resume: bool = False, offline: bool = False, **options: Any
) -> RunResult:
    """:func:`~curvestep.lab.run.loop.train` with measured ``lr`` and ``max_norm``."""
    measured, _ = calibrate_run(recipe, folder, resume=resume, offline=offline)
    return train(measured, folder, resume=resume, offline=offline, **options)


def _threshold(recipe: Recipe) -> str:
    return "offset" if recipe.optimizer == "normalized" else "max_norm"


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """A run that was not begun, and how long it would take on this machine.

    Args:
        recipe: The recipe.
        num_parameters: Parameters of its model.
        steps: Steps of the whole run.
        seconds_per_step: One step of training, measured.
        seconds_per_probe: One measurement of smoothness, from the time of a gradient.
        seconds: Estimate for the whole run, evaluations included.
    """

    recipe: Recipe
    num_parameters: int
    steps: int
    seconds_per_step: float
    seconds_per_probe: float
    seconds: float

    def __str__(self) -> str:
        recipe = self.recipe
        data = recipe.corpus if isinstance(recipe, LanguageRecipe) else getattr(recipe, "images", "")
        probe = "off"
        if recipe.probe_every:
            probe = f"every {recipe.probe_every} steps, {self.seconds_per_probe:.3g} s each"
        threads = torch.get_num_threads()
        return "\n".join(
            [
                f"{recipe.name} at {recipe.scale} scale, for {', '.join(recipe.figures) or 'no figure'}",
                f"  setting     {recipe.label}, seed {recipe.seed}, batches of {recipe.batch_size}",
                f"  model       {self.num_parameters:,} parameters",
                f"  data        {data}",
                f"  steps       {self.steps:,}, {self.seconds_per_step:.3g} s each",
                f"  probe       {probe}",
                f"  whole run   about {duration(self.seconds)} on this machine ({threads} threads)",
            ]
        )


def dry_run(recipe: Recipe, *, measured_steps: int = 2) -> DryRun:
    """The cost of ``recipe``, measured on ``measured_steps`` steps with made-up words or pixels.

    Nothing is fetched or written.
    """
    with run_context(recipe):
        # Words or pixels without meaning where the real ones would have to be fetched.
        if isinstance(recipe, LanguageRecipe) and recipe.corpus == "ptb":
            task = LanguageTask(recipe, placeholder_ptb(max_vocabulary=recipe.vocabulary or 10_000))
        elif isinstance(recipe, ImageRecipe) and recipe.images in ("cifar10", "cifar10-subset"):
            task = ImageTask(recipe, placeholder_cifar10(subset=recipe.images == "cifar10-subset"))
        else:
            task = make_task(recipe, offline=True)
        model = task.build()
        optimizer = make_optimizer(recipe, model)
        batch = task.batch(0)

        def gradient() -> None:
            optimizer.zero_grad()
            task.loss(model, batch)[0].backward()

        def forward() -> None:
            with torch.no_grad():
                task.loss(model, batch)

        gradient()  # the first pass allocates and is slower
        optimizer.step()
        of_gradient = timeit(gradient, number=measured_steps) / measured_steps
        of_step = of_gradient + timeit(optimizer.step, number=measured_steps) / measured_steps
        of_forward = timeit(forward, number=1)
        steps = task.num_steps()
        # The training batch's own gradient is there already; a share of the data needs one more.
        gradients = len(recipe.fractions)
        if recipe.probe_data:
            gradients = (gradients + 1) * len(task.oracle_batches(recipe.probe_data))
        of_probe = gradients * of_gradient
        num_probes = 0
        if recipe.probe_every:
            num_probes = len(range(recipe.probe_from, steps, recipe.probe_every))
        if isinstance(task, LanguageTask):
            batches = (recipe.eval_size or len(task.corpus.valid)) / (task.recipe.bptt * recipe.batch_size)
        else:
            batches = (recipe.eval_size or len(task.images.test_y)) / recipe.batch_size
        # On the first split now and then and at the end, on the others, of about that size, once.
        evaluations = math.ceil(steps / (recipe.eval_every or steps)) + len(task.splits) - 1
        return DryRun(
            recipe=recipe,
            num_parameters=sum(p.numel() for p in model.parameters()),
            steps=steps,
            seconds_per_step=of_step,
            seconds_per_probe=of_probe,
            seconds=steps * of_step + num_probes * of_probe + evaluations * batches * of_forward,
        )
