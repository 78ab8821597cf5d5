"""Command lines by argparse: errors of one line, the nearest name for a mistyped one, recipes' fields too."""

from __future__ import annotations

import argparse
import inspect
import re
from argparse import SUPPRESS, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import NoReturn, get_args, get_type_hints

from curvestep.cli import UsageError
from curvestep.lab.recipe_fields import Fields, nearest
from curvestep.lab.recipes import SCALES, Recipe, get_recipe, recipe_names, with_fields

# Names of these options in other programs.
ALIASES = {
    "--learning-rate": "--lr", "--learnrate": "--lr", "--clip": "--max-norm", "--clip-norm": "--max-norm",
    "--clip-grad-norm": "--max-norm", "--wd": "--weight-decay", "--batch": "--batch-size",
    "--output-dir": "--folder", "--out": "--folder", "--dir": "--folder", "--gpus": "--devices",
}  # fmt: skip
NOT_OPTIONS = ("name", "scale")  # fields of a recipe that are chosen by its name and scale


@dataclass(frozen=True)
class Kind:
    """A kind of value: its placeholder in the help, the words for it in an error, and its reader."""

    metavar: str
    needed: str
    convert: Callable[[str], object]

    def __call__(self, word: str) -> object:
        """The value of a word, for argparse."""
        try:
            return self.convert(word)
        except (KeyError, ValueError):
            raise ArgumentTypeError(f"needs {self.needed}, got {word!r}") from None


def one_of(*names: str) -> Kind:
    """The kind of a value with few choices."""
    members = dict(zip(names, names, strict=True))
    return Kind("{" + ",".join(names) + "}", f"one of {', '.join(names)}", members.__getitem__)


TEXT = Kind("TEXT", "text", str)
INTEGER = Kind("INT", "a whole number", int)
NUMBER = Kind("FLOAT", "a number", float)
NUMBER_OR_AUTO = Kind("auto|X", "a number or auto", lambda word: word if word == "auto" else float(word))
KINDS = {
    str: TEXT, int: INTEGER, float: NUMBER, bool: one_of("true", "false"), tuple[float, ...]: NUMBER,
}  # fmt: skip


class Parser(argparse.ArgumentParser):
    """The options of one command, an example, and a placeholder of the words that are no options."""

    def __init__(self, command: str, text: str, *, example: str, names: str) -> None:
        formatter = partial(argparse.RawDescriptionHelpFormatter, max_help_position=30, width=80)
        super().__init__(
            prog=command,
            usage=f"%(prog)s [-h] [OPTIONS] {names}".rstrip(),
            description=f"{text}\n\nExample: %(prog)s {example}",
            formatter_class=formatter,
            allow_abbrev=False,
        )

    def option(
        self,
        names: str,
        words: str,
        *,
        default: object = "",
        shown: str = "",
        kind: Kind = TEXT,
        **other: object,
    ) -> None:
        """Add an option with a value; ``shown`` describes its default where that is no value to type."""
        words = f"{words} (default: {shown or _shown(default)})".replace("%", "%%")
        settings = {"type": kind, "metavar": kind.metavar, "default": default, **other}
        self.add_argument(*names.split(), help=words, **settings)

    def flag(self, name: str, words: str) -> None:
        """Add an option without a value, which is off by default."""
        self.add_argument(name, help=f"{words} (default: off)", action="store_true")

    def positional(self, name: str, words: str, *, kind: Kind = TEXT) -> None:
        """Add the words that are no options, any number of them."""
        self.add_argument(name, help=words, type=kind, nargs="*", metavar=name)

    def read(self, args: Sequence[str]) -> Namespace:
        """The values by name; :class:`UsageError` names the option and what it needs."""
        words = list(map(_dashed, args))
        for word in words:
            name = word.partition("=")[0]
            # Here, before argparse takes the value that follows for something else.
            if re.match("--?[a-zA-Z]", name) and name not in self._option_string_actions:
                self._refuse(name)
        chosen, unexpected = self.parse_known_args(words)
        if unexpected:
            self.error(f"unexpected argument: {unexpected[0]}")
        return chosen

    def error(self, message: str) -> NoReturn:
        """Raise :class:`UsageError`."""
        message = message.removeprefix("argument ").rstrip(".")
        raise UsageError(f"{self.prog}: {message}. See {self.prog} --help.")

    def _refuse(self, name: str) -> NoReturn:
        listed = [known for known in self._option_string_actions if re.match("--(?!help)", known)]
        hint = nearest(ALIASES.get(name.lower(), name), listed)
        raise UsageError(f"{self.prog}: there is no option {name}.{hint} See {self.prog} --help.")


def read_with_recipe(
    parser: Parser, args: Sequence[str], *, auto: Sequence[str] = (), several: bool = False
) -> tuple[Namespace, Recipe, Fields]:
    """A command's own options, the recipe that is named first, and its fields that were given.

    Fields in ``auto`` may be measured; with ``several`` each field takes a list of values.
    """
    command, names = parser.prog, recipe_names()
    if args[:1] in (["-h"], ["--help"]):
        parser.usage = f"{command} RECIPE [-h] [OPTIONS]"
        parser.prog = f"{command} {names[0]}"
        parser.epilog = f"Recipes: {', '.join(names)}.\nEvery field is an option too: {parser.prog} --help"
        parser.read(args)
    if not args or args[0].startswith("-"):
        parser.error(f"name a recipe first, one of {', '.join(names)}")
    name, *rest = args
    if name.endswith(".py"):
        raise UsageError(
            f"{command}: {name} is a script, and {command} serves built-in recipes: {', '.join(names)}. In "
            "your script call curvestep.calibrate or curvestep.SmoothnessProbe; see curvestep --help."
        )
    without_help = [word for word in rest if word not in ("-h", "--help")]
    scale = parser.parse_known_args(without_help)[0].scale  # which decides the other defaults
    try:
        recipe = get_recipe(name, scale)
    except ValueError as error:
        raise UsageError(f"{command}: {error}") from None
    parser.prog = f"{command} {name}"
    options = _add_fields(parser, recipe, auto, several)
    chosen = parser.read(rest)
    return chosen, recipe, {name: vars(chosen)[name] for name in options if name in chosen}


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
    hints, texts = get_type_hints(type(recipe)), help_texts(type(recipe))
    added = []
    for field in fields(recipe):
        name, default = field.name, getattr(recipe, field.name)
        is_list = isinstance(default, tuple)
        if name in NOT_OPTIONS or (several and is_list):
            continue
        kind, words = KINDS.get(hints[name]) or one_of(*get_args(hints[name])), texts[name].rstrip(".")
        settings: Fields = {"default": SUPPRESS, "shown": _shown(default)}
        if name in auto:
            kind, words = NUMBER_OR_AUTO, f"{words}; auto: measured at the start"
        if several or is_list:
            settings["nargs"] = "+" if several else "*"
        if several and kind.metavar.startswith("{"):  # argparse would list the choices twice
            settings["metavar"] = "NAME"
            words = f"{words}; {kind.needed}"
        parser.option(f"--{name.replace('_', '-')}", words, kind=kind, **settings)
        added.append(name)
    return added


def help_texts(recipe: type[Recipe]) -> dict[str, str]:
    """The help of each field: the first sentence about it in the ``Args`` of its class, or of a base class.

    Example:
        >>> help_texts(Recipe)["momentum"]
        'Momentum of the optimizer.'
    """
    found: dict[str, str] = {}
    for owner in reversed(recipe.__mro__):
        listed = inspect.cleandoc(str(owner.__doc__)).partition("\nArgs:\n")[2]
        for entry in re.split(r"\n(?=    \w+: )", "\n" + listed):
            name, _, text = " ".join(entry.split()).partition(": ")
            found[name] = re.split(r"(?<=\.) ", text.replace("``", ""))[0]
    return found


def _dashed(word: str) -> str:
    """``--batch_size=20`` as ``--batch-size=20``."""
    return re.sub("^--[^=]+", lambda name: name.group().replace("_", "-"), word)


def _shown(default: object) -> str:
    """A default as it would be typed."""
    if isinstance(default, tuple):
        return " ".join(map(_shown, default)) or "none"
    if isinstance(default, float):
        return f"{default:g}"
    if isinstance(default, bool):
        return str(default).lower()
    return str(default) or "none"
