"""Fields of recipes as options of a command line."""

from __future__ import annotations

import inspect
import re
from argparse import SUPPRESS, Namespace
from collections.abc import Sequence
from typing import get_args, get_type_hints

from curvestep.cli.parser import INTEGER, NUMBER, TEXT, Kind, Parser, UsageError, as_typed, one_of
from curvestep.trace.run import Fields
from curvestep_reproduction.models import MODELS, models_of
from curvestep_reproduction.recipes import RULES, SCALES, Recipe, get_recipe, recipe_names, with_fields

NOT_OPTIONS = ("name", "scale", "options")  # chosen by its name and scale, or one by one
NUMBER_OR_AUTO = Kind("auto|X", "a number or auto", lambda word: word if word == "auto" else float(word))
KINDS = {
    str: TEXT, int: INTEGER, float: NUMBER, bool: one_of("true", "false"), tuple[float, ...]: NUMBER,
}  # fmt: skip


def read_with_recipe(
    parser: Parser, args: Sequence[str], *, auto: Sequence[str] = (), several: bool = False
) -> tuple[Namespace, Recipe, Fields]:
    """A command's own options, the recipe that is named first, and its fields that were given.

    Fields in ``auto`` may be measured; with ``several`` each field takes a list of values.
    """
    command = parser.prog
    names = recipe_names()
    if args[:1] in (["-h"], ["--help"]):
        parser.usage = f"{command} RECIPE [-h] [OPTIONS]"
        parser.prog = f"{command} {names[0]}"
        parser.epilog = f"Recipes: {', '.join(names)}.\nEvery field is an option too: {parser.prog} --help"
        parser.show_help()
    if not args or args[0].startswith("-"):
        parser.error(f"name a recipe first, one of {', '.join(names)}")
    name, *rest = args
    if name.endswith(".py"):
        raise UsageError(
            f"{command}: {name} is a script, and {command} serves built-in recipes: {', '.join(names)}. In "
            "your script call curvestep.calibrate or curvestep.SmoothnessProbe; see curvestep --help."
        )
    recipe = _named(command, name)  # of any scale: what it trains decides which options there are
    parser.prog = f"{command} {name}"
    options = _add_fields(parser, recipe, auto, several)
    chosen = parser.parse(rest)
    recipe = _named(command, name, chosen.scale)  # which decides their defaults
    if chosen.help:
        defaults = {**vars(recipe), **recipe.options}
        parser.shown |= {option: as_typed(defaults[option]) for option in options}
        parser.show_help()
    return chosen, recipe, {option: vars(chosen)[option] for option in options if option in chosen}


def _named(command: str, name: str, scale: str = "laptop") -> Recipe:
    """The recipe of this name; a name or scale that is none is a wrong command line."""
    try:
        return get_recipe(name, scale)
    except ValueError as error:
        raise UsageError(f"{command}: {error}") from None


def with_given(parser: Parser, recipe: Recipe, given: Fields) -> Recipe:
    """The recipe with these fields; a value that it refuses is a wrong command line."""
    try:
        return with_fields(recipe, **given)
    except (TypeError, ValueError) as error:
        parser.error(str(error))


def add_scale(parser: Parser, words: str = "Preset of sizes and step counts") -> None:
    """Add ``--scale``."""
    parser.option("--scale", words, default="laptop", kind=one_of(*SCALES))


def _add_fields(parser: Parser, recipe: Recipe, auto: Sequence[str], several: bool) -> list[str]:
    """Add an option for every field of a recipe; the names of the fields."""
    hints = get_type_hints(type(recipe)) | {name: type(value) for name, value in recipe.options.items()}
    texts = help_texts(type(recipe)) | help_texts(MODELS[recipe.model])
    choices = {"model": models_of(recipe.task), "optimizer": tuple(RULES)}
    added = []
    for name, default in {**vars(recipe), **recipe.options}.items():
        is_list = isinstance(default, tuple)
        if name in NOT_OPTIONS or (several and is_list):
            continue
        kind = KINDS.get(hints[name]) or one_of(*get_args(hints[name]))
        if name in choices:
            kind = one_of(*choices[name])
        words = texts[name].rstrip(".")
        settings: Fields = {"default": SUPPRESS}
        if name in auto:
            kind = NUMBER_OR_AUTO
            words = f"{words}; auto: measured at the start"
        if several or is_list:
            settings["nargs"] = "+" if several else "*"
        if several and kind.metavar.startswith("{"):  # argparse would list the choices twice
            settings["metavar"] = "NAME"
            words = f"{words}; {kind.needed}"
        parser.option(f"--{name.replace('_', '-')}", words, kind=kind, **settings)
        added.append(name)
    return added


def help_texts(described: type) -> dict[str, str]:
    """The help of each argument: the first sentence about it in the ``Args`` of a class, or of its bases.

    Example:
        >>> help_texts(Recipe)["momentum"]
        'Momentum of the optimizer.'
    """
    found: dict[str, str] = {}
    for owner in reversed(described.__mro__):
        listed = inspect.cleandoc(str(owner.__doc__)).partition("\nArgs:\n")[2]
        for entry in re.split(r"\n(?=    \w+: )", "\n" + listed):
            name, _, text = " ".join(entry.split()).partition(": ")
            found[name] = re.split(r"(?<=\.) ", text.replace("``", ""))[0]
    return found
