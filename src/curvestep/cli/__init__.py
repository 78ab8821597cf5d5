"""The command line: ``curvestep advise | report | fit``, and commands of other packages by entry points."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points

from curvestep import __version__
from curvestep.checks import MissingExtraError, nearest
from curvestep.cli.parser import Command, UsageError
from curvestep.report.markup import visible

OK, FAILED, WRONG_USAGE = 0, 1, 2
INTERRUPTED = 128 + signal.SIGINT

# Commands of the package curvestep-reproduction, which come by entry points where it is installed.
OF_REPRODUCTION = ("reproduce", "train", "sweep", "calibrate", "data")
ENTRY_POINTS = "curvestep.commands"

USAGE = """\
usage: curvestep COMMAND [OPTIONS]

Know how far to step, and how hard to clip.

{commands}

For your own training script, in Python (import curvestep as cs):
  cs.calibrate(model, loss, batches)         lr and max_norm before training
  cs.SmoothnessProbe(model, trace="t.jsonl")  measures while you train
Then: curvestep advise t.jsonl; curvestep report t.jsonl; curvestep fit t.jsonl

options: --help after any command, --version, --debug (tracebacks)
example: curvestep advise runs/mine/trace.jsonl"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, default: that of this process; 0, 1 (failed), 2 (wrong usage), 130 (interrupted)."""
    args = sys.argv[1:] if argv is None else list(argv)
    for stream in (sys.stdout, sys.stderr):  # a terminal without Greek letters is no reason to end
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    debug = "--debug" in args
    args = [arg for arg in args if arg != "--debug"]
    try:
        code = _run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever reads, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            raise
        line, code = _explain(error)
        print(visible(line), file=sys.stderr)
        return code


def say(result: object) -> None:
    """Print a result; a control character, such as one in the name of a folder, as its escape."""
    print(visible(str(result)), flush=True)


def _run(args: list[str]) -> int:
    if args == ["--version"]:
        print(f"curvestep {__version__}")
        return OK
    name, *rest = args or [""]
    if name in ("", "--help", "-h", "help"):
        listed = "\n".join(f"  {name:<11}{command.words}" for name, command in all_commands().items())
        print(USAGE.format(commands=listed))
        return OK if args else WRONG_USAGE
    known = all_commands()
    if name not in known:
        if name in OF_REPRODUCTION:
            raise UsageError(
                f"curvestep {name} comes with the package curvestep-reproduction, which is not installed. "
                "In the folder of curvestep: pip install -c constraints.txt . ./reproduction"
            )
        hint = nearest(name, known)
        raise UsageError(f"curvestep: there is no command {name}.{hint} Commands: {', '.join(known)}.")
    try:
        return known[name].run(name, rest)
    except SystemExit:  # after --help
        return OK


def all_commands() -> dict[str, Command]:
    """The library's own commands, then those of other packages that are installed."""
    from curvestep.cli.commands import COMMANDS

    others = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    return {**COMMANDS, **{name: point.load() for name, point in others.items()}}


def _explain(error: BaseException) -> tuple[str, int]:
    """One line about what went wrong, and the exit code."""
    words = " ".join(_words(error).split()) or type(error).__name__
    match error:
        case UsageError():
            return words, WRONG_USAGE
        case KeyboardInterrupt():
            return "curvestep: interrupted.", INTERRUPTED
        case ValueError() | OSError() | MissingExtraError():
            return f"curvestep: {words}", FAILED
        case _:
            kind = type(error).__name__
            return f"curvestep: {kind}: {words} (run it again with --debug for the traceback)", FAILED


def _words(error: BaseException) -> str:
    """The message; of the system's errors the file and the reason, without number and detours.

    Example:
        >>> _words(PermissionError(13, "Permission denied", "runs/mine"))
        'runs/mine: permission denied'
    """
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        # Of a move, the goal: the file that is moved is one of ours.
        name = error.filename2 or error.filename
        if isinstance(error, FileExistsError):
            return f"{name} is a file, and a folder is needed."
        return f"{name}: {error.strerror[:1].lower()}{error.strerror[1:]}"
    return str(error)
