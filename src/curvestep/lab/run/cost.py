"""What a recipe would cost, from a few steps on data of the right shape. Nothing is fetched or written."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from curvestep.lab.data import placeholder_cifar10, placeholder_ptb
from curvestep.lab.progress import duration
from curvestep.lab.recipes import ImageRecipe, LanguageRecipe, Recipe
from curvestep.lab.run.devices import run_context
from curvestep.lab.run.session import make_optimizer
from curvestep.lab.tasks import ImageTask, LanguageTask, make_task


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What would run, and how long it would take on this machine.

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
        probe = (
            f"every {recipe.probe_every} steps, {self.seconds_per_probe:.3g} s each"
            if recipe.probe_every
            else "off"
        )
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
    """The cost of ``recipe``, measured on ``measured_steps`` steps with made-up words or pixels."""
    with run_context(recipe):
        return _measure(recipe, measured_steps)


def _measure(recipe: Recipe, measured_steps: int) -> DryRun:
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
    of_gradient = _seconds(gradient, measured_steps)
    of_step = of_gradient + _seconds(optimizer.step, measured_steps)
    of_forward = _seconds(forward, 1)
    steps = task.num_steps()
    # The training batch's own gradient is there already; a share of the data needs one more.
    gradients = len(recipe.fractions)
    if recipe.probe_data:
        gradients = (gradients + 1) * len(task.oracle_batches(recipe.probe_data))
    of_probe = gradients * of_gradient
    num_probes = steps // recipe.probe_every if recipe.probe_every else 0
    if isinstance(task, LanguageTask):
        batches = (recipe.eval_size or len(task.corpus.valid)) / (task.recipe.bptt * recipe.batch_size)
    else:
        assert isinstance(task, ImageTask)
        batches = (recipe.eval_size or len(task.images.test_y)) / recipe.batch_size
    evaluations = (steps // recipe.eval_every if recipe.eval_every else 1) * batches
    return DryRun(
        recipe=recipe,
        num_parameters=sum(p.numel() for p in model.parameters()),
        steps=steps,
        seconds_per_step=of_step,
        seconds_per_probe=of_probe,
        seconds=steps * of_step + num_probes * of_probe + evaluations * of_forward,
    )


def _seconds(function: Callable[[], object], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        function()
    return (time.perf_counter() - start) / times
