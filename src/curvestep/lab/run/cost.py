"""What a recipe would cost, from a few steps on data of the right shape. Nothing is fetched or written."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from curvestep.lab.data import Corpus, Images
from curvestep.lab.progress import duration
from curvestep.lab.recipes import ImageRecipe, LanguageRecipe, Recipe
from curvestep.lab.run.session import make_optimizer
from curvestep.lab.tasks import ImageTask, LanguageTask, Task, make_task

PTB_WORDS = {"train": 929_589, "valid": 73_760, "test": 82_430}
PTB_VOCABULARY = 10_000
CIFAR_IMAGES = {"cifar10": (50_000, 10_000), "cifar10-subset": (10_000, 2_000)}


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
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if recipe.precision == "64-true" else torch.float32)
    try:
        with torch.random.fork_rng(devices=[]):
            return _measure(recipe, measured_steps)
    finally:
        torch.set_default_dtype(before)


def _measure(recipe: Recipe, measured_steps: int) -> DryRun:
    task = _stand_in(recipe)
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
    gradients = _gradients_per_probe(recipe, task)
    of_probe = gradients * of_gradient
    num_probes = steps // recipe.probe_every if recipe.probe_every else 0
    evaluations = (steps // recipe.eval_every if recipe.eval_every else 1) * _batches_per_evaluation(
        recipe, task
    )
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


def _gradients_per_probe(recipe: Recipe, task: Task) -> float:
    """The training batch's own gradient is there already; a share of the data needs one more."""
    if recipe.probe_data == 0:
        return len(recipe.fractions)
    return (len(recipe.fractions) + 1) * len(task.oracle_batches(recipe.probe_data))


def _batches_per_evaluation(recipe: Recipe, task: Task) -> float:
    if isinstance(task, LanguageTask):
        words = recipe.eval_size or len(task.corpus.valid)
        return words / (task.recipe.bptt * recipe.batch_size)
    assert isinstance(task, ImageTask)
    return (recipe.eval_size or len(task.images.test_y)) / recipe.batch_size


def _stand_in(recipe: Recipe) -> Task:
    """The task on data of the right size and no meaning, where the real ones would have to be fetched."""
    if isinstance(recipe, LanguageRecipe) and recipe.corpus == "ptb":
        words = {split: torch.randint(PTB_VOCABULARY, (count,)) for split, count in PTB_WORDS.items()}
        vocabulary = tuple(str(i) for i in range(PTB_VOCABULARY))
        return LanguageTask(recipe, Corpus(name="ptb", **words, vocabulary=vocabulary, source="made up"))
    if isinstance(recipe, ImageRecipe) and recipe.images in CIFAR_IMAGES:
        train, test = CIFAR_IMAGES[recipe.images]
        images = Images(
            name=recipe.images,
            train_x=torch.zeros(train, 3, 32, 32, dtype=torch.uint8),
            train_y=torch.arange(train) % 10,
            test_x=torch.zeros(test, 3, 32, 32, dtype=torch.uint8),
            test_y=torch.arange(test) % 10,
            mean=(0.5, 0.5, 0.5),
            std=(0.25, 0.25, 0.25),
            classes=tuple(str(i) for i in range(10)),
            source="made up",
        )
        return ImageTask(recipe, images)
    return make_task(recipe, offline=True)
