"""Command lines read by tyro, with its complaints brought down to one helpful line."""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import tyro

Options = TypeVar("Options")
WIDTH = 80


class UsageError(Exception):
    """A command line that cannot be run: one line for the user, exit code 2."""


def parse(kind: type[Options], args: Sequence[str], *, prog: str) -> Options:
    """The options of a command.

    Args:
        kind: A dataclass: one option a field.
        args: The command line after the command.
        prog: The command as it was typed, for usage and hints.

    Raises:
        UsageError: with the nearest option for an unknown one.
        SystemExit: after ``--help``.
    """
    complaint, said = io.StringIO(), io.StringIO()
    redirected = contextlib.redirect_stderr(complaint), contextlib.redirect_stdout(said)
    try:
        with redirected[0], redirected[1], _width(WIDTH if "--help" in args or "-h" in args else 1000):
            options, unknown = tyro.cli(
                kind,
                args=list(args),
                prog=prog,
                return_unknown_args=True,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as end:
        if not end.code:
            print(_short_usage(said.getvalue()), end="")
            raise
        raise UsageError(f"{prog}: {_one_line(complaint.getvalue())} See {prog} --help.") from None
    if unknown:
        raise UsageError(unknown_option(unknown[0], option_names(kind), prog=prog))
    return options


def unknown_option(name: str, known: Iterable[str], *, prog: str) -> str:
    """The line for an option that does not exist.

    Example:
        >>> unknown_option("--max-nrom", ["--max-norm", "--lr"], prog="curvestep train")
        'curvestep train: there is no option --max-nrom. Did you mean --max-norm? Options: --max-norm, --lr.'
    """
    if not name.startswith("-"):
        return f"{prog}: there is no use for {name}. See {prog} --help."
    known = list(known)
    return f"{prog}: there is no option {name}.{nearest(name, known)} Options: {', '.join(known)}."


# What other programs call our options.
_ELSEWHERE = {
    "--learning-rate": "--lr", "--learnrate": "--lr", "--clip": "--max-norm", "--clip-norm": "--max-norm",
    "--clip-grad-norm": "--max-norm", "--wd": "--weight-decay", "--batch": "--batch-size",
    "--output-dir": "--folder", "--out": "--folder", "--dir": "--folder", "--gpus": "--devices",
}  # fmt: skip


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint at the known name that is meant elsewhere by this one, or is closest; or nothing."""
    known = list(known)
    elsewhere = _ELSEWHERE.get(name.lower())
    if elsewhere in known:
        return f" Did you mean {elsewhere}?"
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    return f" Did you mean {close[0]}?" if close else ""


def option_names(kind: Any) -> list[str]:
    """Every option of a command, as it is typed."""
    return [
        f"--{'no-' if item.default is True else ''}{name.replace('_', '-')}"
        for name, item in kind.__dataclass_fields__.items()
    ]


def _short_usage(text: str) -> str:
    """Help whose usage line fits the terminal, and names what stands without a dash last."""
    usage, *rest = [line.rstrip() for line in text.split("\n")]
    named, rule, listed = "\n".join(rest).partition("\n options\n")
    positional = re.search(r" positional arguments\n -+\n +([A-Z]+) ", named)
    if len(usage) > WIDTH or positional:
        usage = f"{usage.split(' [')[0]} [-h] [OPTIONS]" + (f" {positional[1]} ..." if positional else "")
    named, listed = named.replace(" (default: )", ""), listed.replace("(default: )", "(default: none)")
    return f"{usage}\n{named}{rule}{listed}"


# What Python says of a wrong number, in words for someone who typed it.
_PLAINLY = (
    (r"^error parsing (--[\w-]+|[A-Z]+): ", r"\1: "),
    (r"invalid literal for int\(\) with base 10: (.*)", r"needs a whole number, got \1"),
    (
        r"no type matching FLOAT\|\{(\w+)\} could be instantiated from \[(.*)\]",
        r"needs a number or \1, got \2",
    ),
    (r"Could not find valid parse for arguments: \[(.*)\]", r"cannot be read: \1"),
    (r"could not convert string to float: (.*)", r"needs a number, got \1"),
)


def _one_line(box: str) -> str:
    r"""The first paragraph of what tyro says, without its title and frame.

    Example:
        >>> _one_line("Value error\n ---\n Error parsing --lr: could not convert string to float: 'x'\n ---")
        "--lr: needs a number, got 'x'."
    """
    paragraphs: list[list[str]] = [[]]
    for line in (line.strip("│╭╮╰╯ \n") for line in box.splitlines()[1:]):
        if set(line) <= set("─-"):
            paragraphs.append([])
        else:
            paragraphs[-1].append(line)
    words = next((lines for lines in paragraphs if lines), [""])
    said = re.sub(r"\s+", " ", " ".join(words)).strip().removesuffix(".")
    said = f"{said[:1].lower()}{said[1:]}".replace("Missing from", "missing from")
    for pattern, plainly in _PLAINLY:
        said = re.sub(pattern, plainly, said)
    return f"{said}."


@contextlib.contextmanager
def _width(columns: int) -> Iterator[None]:
    """Let tyro think that the terminal has this width."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(columns)
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
