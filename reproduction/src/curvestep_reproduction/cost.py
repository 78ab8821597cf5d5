"""Cost of a run, known without its data: for plans and the order of their runs."""

from __future__ import annotations

import math

from curvestep_reproduction.data.corpus import NUM_WORDS, num_train_words
from curvestep_reproduction.models import LANGUAGE_MODELS, mean_bptt_length
from curvestep_reproduction.recipes import ImageRecipe, LanguageRecipe, Recipe
from curvestep_reproduction.tasks import PIECE_WORDS

# CPU seconds, measured on one core of the machine that the plan was made on: of a step of training, and of a
# gradient of one batch when measuring.
_LANGUAGE_STEP = 0.033
_LANGUAGE_OVERHEAD = 0.011  # a gradient is a step less this
_IMAGE_STEP = 0.064
_IMAGE_GRADIENT = 0.066


def cost_of(recipe: Recipe) -> float:
    """CPU seconds that a run takes, roughly: what was measured, scaled by the size of model and batch.

    Example:
        >>> from curvestep_reproduction.recipes import get_recipe
        >>> hours = cost_of(get_recipe("cifar-resnet20", "paper")) / 3600
        >>> f"{hours:.0f} core-hours"
        '12 core-hours'
    """
    if recipe.scale == "laptop" and recipe.max_norm == math.inf and recipe.lr >= 10:
        return 1.5  # diverges at once
    step, gradient = _seconds(recipe)
    num_steps = steps_of(recipe)
    num_rows = 0
    if recipe.probe_every:
        num_rows = len(range(recipe.probe_from, num_steps, recipe.probe_every))
    return num_steps * step + num_rows * _batches_of_a_row(recipe) * gradient


def _seconds(recipe: Recipe) -> tuple[float, float]:
    """CPU seconds of a step and of a gradient."""
    if isinstance(recipe, LanguageRecipe):
        words = recipe.vocabulary or NUM_WORDS
        work = LANGUAGE_MODELS[recipe.model].work(words, recipe.options)
        # Larger products are faster for their size: 200/512 takes 8 times as long for 17 times the work.
        scale = (work / 259_000) ** 0.75 * recipe.batch_size * recipe.bptt / 700
        return scale * _LANGUAGE_STEP, scale * _LANGUAGE_STEP - _LANGUAGE_OVERHEAD
    assert isinstance(recipe, ImageRecipe)
    scale = 4 / recipe.pooling**2 * recipe.batch_size / 64
    return scale * _IMAGE_STEP, scale * _IMAGE_GRADIENT


def _batches_of_a_row(recipe: Recipe) -> float:
    """Gradients of a measurement, in those of a training batch."""
    gradients = len(recipe.fractions)
    if isinstance(recipe, LanguageRecipe) and recipe.probe_pieces:
        # At the start too, and without dropout; the words before each piece are a third more.
        return (gradients + 2) * 1.3 * recipe.probe_pieces * PIECE_WORDS / recipe.bptt
    if recipe.probe_data:
        return (gradients + 1) * max(1, round(recipe.probe_data * _epoch(recipe)))
    return gradients


def steps_of(recipe: Recipe) -> int:
    """Steps of a run, known without its data: those given, or about those of its epochs.

    Example:
        >>> from curvestep_reproduction.recipes import get_recipe
        >>> steps_of(get_recipe("ptb-lstm", "longer")), steps_of(get_recipe("cifar-resnet20", "paper"))
        (1328, 78000)
    """
    return recipe.steps or round(recipe.epochs * _epoch(recipe))


def _epoch(recipe: Recipe) -> float:
    """Steps of an epoch, roughly."""
    if isinstance(recipe, LanguageRecipe):
        length = mean_bptt_length(recipe.bptt) if recipe.variable_bptt else recipe.bptt
        return (recipe.num_words or num_train_words(recipe.corpus)) / (recipe.batch_size * length)
    assert isinstance(recipe, ImageRecipe)
    sizes = {"cifar10": 50_000, "cifar10-subset": 10_000, "digits": 1_437}
    return (recipe.num_images or sizes[recipe.images]) // recipe.batch_size
