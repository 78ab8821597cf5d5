"""Command lines by argparse: errors of one line, the nearest name for a mistyped one."""

from __future__ import annotations

import argparse
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from curvestep.checks import nearest

# Names of these options in other programs.
ALIASES = {
    "--learning-rate": "--lr", "--learnrate": "--lr", "--clip": "--max-norm", "--clip-norm": "--max-norm",
    "--clip-grad-norm": "--max-norm", "--wd": "--weight-decay", "--batch": "--batch-size",
    "--output-dir": "--folder", "--out": "--folder", "--dir": "--folder", "--gpus": "--devices",
}  # fmt: skip


class UsageError(Exception):
    """A command line that cannot be run: one line for the user, exit code 2."""


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
            add_help=False,  # as below: defaults may depend on other options
        )
        self.shown: dict[str, str] = {}  # the default of each option, as the help says it
        self._options: list[str] = []
        self._words: dict[str, Kind] = {}  # what reads the words that are no options
        self.add_argument("-h", "--help", action="store_true", help="show this help message and exit")

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
        words = words.replace("%", "%%")
        settings = {"type": kind, "metavar": kind.metavar, "default": default, **other}
        added = self.add_argument(*names.split(), help=f"{words} (default: %(default)s)", **settings)
        self.shown[added.dest] = shown or as_typed(default)
        self._options += added.option_strings

    def flag(self, name: str, words: str) -> None:
        """Add an option without a value, which is off by default."""
        self.add_argument(name, help=f"{words} (default: off)", action="store_true")
        self._options.append(name)

    def positional(self, name: str, words: str, *, kind: Kind = TEXT) -> None:
        """Add the words that are no options, any number of them."""
        self.add_argument(name, help=words, nargs="*", metavar=name)
        self._words[name] = kind

    def read(self, args: Sequence[str]) -> Namespace:
        """The values by name; :class:`UsageError` names the option and what it needs."""
        chosen = self.parse(args)
        if chosen.help:
            self.show_help()
        return chosen

    def parse(self, args: Sequence[str]) -> Namespace:
        """As :meth:`read`, with ``help`` among the values."""
        chosen, unexpected = self.parse_known_args([_dashed(arg) for arg in args])
        for word in unexpected:
            self._refuse(word)
        # Only now: the value of a mistyped option, which stands among these words, is not to blame.
        for name, kind in self._words.items():
            try:
                setattr(chosen, name, [kind(word) for word in getattr(chosen, name)])
            except ArgumentTypeError as error:
                self.error(f"{name}: {error}")
        return chosen

    def show_help(self) -> NoReturn:
        """Print the help, with the defaults in ``shown``, and end."""
        self.set_defaults(**self.shown)
        self.print_help()
        self.exit()

    def error(self, message: str) -> NoReturn:
        """Raise :class:`UsageError`."""
        message = message.removeprefix("argument ").rstrip(".")
        raise UsageError(f"{self.prog}: {message}. See {self.prog} --help.")

    def _refuse(self, word: str) -> NoReturn:
        if not word.startswith("-"):
            self.error(f"unexpected argument: {word}")
        name, _, _ = word.partition("=")
        hint = nearest(ALIASES.get(name.lower(), name), self._options)
        raise UsageError(f"{self.prog}: there is no option {name}.{hint} See {self.prog} --help.")


def _dashed(word: str) -> str:
    """``--batch_size=20`` as ``--batch-size=20``."""
    name, equals, value = word.partition("=")
    if not name.startswith("--"):
        return word
    return name.replace("_", "-") + equals + value


def as_typed(default: object) -> str:
    """A default as it would be typed."""
    if isinstance(default, tuple):
        return " ".join(as_typed(one) for one in default) or "none"
    if isinstance(default, float):
        return f"{default:g}"
    if isinstance(default, bool):
        return str(default).lower()
    return str(default) or "none"


@dataclass(frozen=True)
class Command:
    """A command: its function, what it does, words to type after it, and a placeholder of such words."""

    function: Callable[[Parser, list[str]], int]
    words: str
    example: str
    names: str = ""

    def run(self, name: str, args: list[str]) -> int:
        """The exit code of ``curvestep name args``."""
        text = f"{self.words[:1].upper()}{self.words[1:]}."
        return self.function(Parser(f"curvestep {name}", text, example=self.example, names=self.names), args)
