"""The fields of a recipe as options: ``--lr``, ``--max-norm``, … with their units and choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, fields, make_dataclass
from typing import Annotated, Any, Literal, get_type_hints

import tyro

from curvestep.cli.parse import UsageError, nearest
from curvestep.lab.recipes import OPTIMIZERS, PRECISIONS, RECIPES, SCALES, Recipe, get_recipe

NAMES = tuple(dict.fromkeys(name for name, _ in RECIPES))
LEFT_OUT = ("name", "figures", "scale")

# Field: its choices, if any, and what it is with its unit.
HELP: dict[str, str] = {
    "seed": "whole number; decides the start and the batches",
    "optimizer": "step rule: min{lr, lr*max_norm/g}, or lr/(g + offset)",
    "lr": "learning rate",
    "max_norm": "gradient norm at which clipping starts; inf: none",
    "offset": "gradient norm added in the normalized step",
    "momentum": "share of the last update, 0 to 1",
    "weight_decay": "coefficient of the L2 penalty",
    "lr_drops": "shares of the run after which lr is divided by 10",
    "batch_size": "streams of text, or images, in a batch",
    "steps": "optimizer steps; sets epochs to 0",
    "epochs": "passes over the data; sets steps to 0",
    "probe_every": "steps between measurements; 0: never",
    "probe_from": "step of the first measurement",
    "fractions": "where on the step to measure, shares in (0, 1]",
    "probe_data": "share of the data to measure on; 0: the batch",
    "eval_every": "steps between evaluations; 0: at the end only",
    "eval_size": "held-out words or images; 0: all",
    "log_every": "steps between rows of the metrics",
    "diverged_above": "multiple of the first loss that counts as diverged",
    "precision": "floating-point format",
    "model": "which network",
    "corpus": "ptb, topics, or a path of text",
    "num_words": "training words; 0: all",
    "vocabulary": "different words to keep, others <unk>; 0: all",
    "embedding": "numbers in a word vector",
    "hidden": "units in a hidden layer",
    "layers": "number of LSTM layers",
    "dropout": "share dropped between layers, or of the output",
    "weight_drop": "share of hidden-to-hidden weights dropped",
    "dropout_input": "share of the word vectors dropped",
    "dropout_hidden": "share dropped between layers",
    "dropout_embedding": "share of the words dropped",
    "activation_penalty": "weight of the squared activations",
    "temporal_penalty": "weight of their squared change",
    "bptt": "words of truncated backpropagation",
    "variable_bptt": "draw the length of each piece",
    "averaging": "when to average the iterates",
    "patience": "evaluations that the trigger looks back on",
    "start_from": "run folder whose parameters to start from",
    "images": "which data set",
    "augmented": "random crops and flips",
    "num_images": "training images; 0: all",
    "pooling": "pixels a side to average over: 1, 2 or 4",
}
CHOICES: dict[str, tuple[str, ...]] = {
    "optimizer": OPTIMIZERS,
    "precision": PRECISIONS,
    "averaging": ("never", "triggered", "always"),
    "images": ("cifar10", "cifar10-subset", "digits"),
}
MODELS = (("lstm", "awd-lstm"), ("resnet20", "resnet18"))


def chosen_recipe(args: list[str], *, prog: str) -> tuple[Recipe, list[str]]:
    """The recipe that a command line names first, at the scale it names anywhere; and the other words."""
    if not args or args[0].startswith("-"):
        raise UsageError(f"{prog}: name a recipe first, one of {', '.join(NAMES)}. See {prog} --help.")
    name, rest = args[0], list(args[1:])
    if name not in NAMES:
        raise UsageError(
            f"{prog}: there is no recipe {name}.{nearest(name, NAMES)} Recipes: {', '.join(NAMES)}."
        )
    scale = "laptop"
    if "--scale" in rest[:-1]:
        scale = rest[rest.index("--scale") + 1]
    if scale not in SCALES:
        raise UsageError(f"{prog}: --scale must be one of {', '.join(SCALES)}, got {scale}.")
    return get_recipe(name, scale), rest


def with_recipe_fields(base: type, recipe: Recipe, *, many: bool = False, auto: Sequence[str] = ()) -> type:
    """A copy of the dataclass ``base`` with one more option for each field of ``recipe``.

    Args:
        base: The command's own options.
        recipe: Gives the fields, their types and their defaults.
        many: Each option takes several values, for a grid.
        auto: Fields that may be ``auto``, to be measured before training.
    """
    hints = get_type_hints(type(recipe))
    more = []
    for item in fields(recipe):
        hint = hints[item.name]
        is_tuple = hint not in (int, float, str, bool)
        if item.name in LEFT_OUT or (many and is_tuple):
            continue
        default, words = getattr(recipe, item.name), HELP[item.name]
        choices = (
            next((m for m in MODELS if default in m), ()) if item.name == "model" else CHOICES.get(item.name)
        )
        kind = Literal[choices] if choices else hint
        if item.name in auto:
            kind, words = kind | Literal["auto"], f"{words}; auto: measured at the start"
        if many:
            kind, default = tuple[kind, ...], (default,)
        elif default is True:  # the option is --no-...
            words = f"no {words}"
        option = Annotated[kind, tyro.conf.arg(help=words)]
        more.append((item.name, option, field(default=default)))
    made = make_dataclass(base.__name__, more, bases=(base,), kw_only=True)
    made.__doc__ = _example_of(recipe, base.__doc__ or "")
    return made


def _example_of(recipe: Recipe, words: str) -> str:
    """The example in ``words`` with the name of this recipe, and a learning rate of its kind."""
    if "resnet" in recipe.name:
        words = words.replace("--lr 3 10 30", "--lr 0.1 1 5").replace("--lr 30", "--lr 5")
    return words.replace("ptb-lstm", recipe.name)


def given_fields(options: Any, recipe: Recipe) -> dict[str, Any]:
    """The fields whose option differs from the recipe."""
    return {
        item.name: value
        for item in fields(recipe)
        if item.name not in LEFT_OUT and (value := getattr(options, item.name)) != getattr(recipe, item.name)
    }
