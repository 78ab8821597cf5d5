"""Command lines by argparse: errors of one line, the nearest name for a mistyped one."""

from __future__ import annotations

import argparse
import re
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
        words = f"{words} (default: {shown or as_typed(default)})".replace("%", "%%")
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
        words = [_dashed(arg) for arg in args]
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


def _dashed(word: str) -> str:
    """``--batch_size=20`` as ``--batch-size=20``."""
    return re.sub("^--[^=]+", lambda name: name.group().replace("_", "-"), word)


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
