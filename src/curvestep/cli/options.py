"""What each command can be told: one dataclass a command, one option a field, read by argparse.

A recipe's fields are options too. Names, types, choices, defaults and help come from the dataclasses, and the
help of a recipe's fields from its docstring, so nothing is written twice.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from curvestep.lab.recipes import SCALES, Recipe, Scale, choices_of, get_recipe, nearest, recipe_names

Options = TypeVar("Options")
Figure = Literal["fig1", "fig2", "fig3", "fig4", "fig5", "fig6", "fig7", "fig8"]
Engine = Literal["joblib", "ray"]
SHORT = {"output": "-o"}
NOT_OPTIONS = ("name", "figures", "scale")  # fields of a recipe: its name and scale choose it
# What other programs call our options.
ALIASES = {
    "--learning-rate": "--lr", "--learnrate": "--lr", "--clip": "--max-norm", "--clip-norm": "--max-norm",
    "--clip-grad-norm": "--max-norm", "--wd": "--weight-decay", "--batch": "--batch-size",
    "--output-dir": "--folder", "--out": "--folder", "--dir": "--folder", "--gpus": "--devices",
}  # fmt: skip


class UsageError(Exception):
    """A command line that cannot be run: one line for the user, exit code 2."""


@dataclass(kw_only=True)
class Reproduce:
    """Every figure and table of the paper, and one HTML report.

    Example: curvestep reproduce fig2 fig8 --folder reproduction
    """

    FIGURE: Annotated[tuple[Figure, ...], "fig1 to fig8; none: all"] = ()
    folder: Annotated[str, "Folder for runs, figures, claims.md and report.html"] = "reproduction"
    scale: Annotated[
        Scale, "laptop: minutes; longer: hours; epoch: the paper's LSTM, 30 core-hours; paper: days"
    ] = "laptop"
    engine: Annotated[Engine, "Processes here, or a Ray cluster"] = "joblib"
    workers: Annotated[int, "Runs at a time"] = 2
    address: Annotated[str, "Of a Ray cluster, such as 10.0.0.1:6379; none starts one here"] = ""
    offline: Annotated[bool, "Use no network; stand-ins replace data that are not here"] = False
    quiet: Annotated[bool, "Show no progress"] = False
    no_open: Annotated[bool, "Do not show the report in a browser at the end"] = False


@dataclass(kw_only=True)
class Train:
    """Train one recipe and keep everything in a run folder.

    Example: curvestep train ptb-lstm --lr auto --max-norm auto
    """

    folder: Annotated[str, "Run folder; none: runs/<recipe>-<setting>"] = ""
    scale: Annotated[Scale, "Which sizes the other defaults have"] = "laptop"
    resume: Annotated[bool, "Go on where the folder's checkpoint stands"] = False
    dry_run: Annotated[bool, "Only print what would run, and its cost in seconds"] = False
    devices: Annotated[int, "Processes that share each batch"] = 1
    accelerator: Annotated[Literal["auto", "cpu", "cuda"], "Where to train"] = "auto"
    strategy: Annotated[Literal["auto", "ddp", "fsdp"], "How several devices work together"] = "auto"
    loggers: Annotated[tuple[Literal["csv", "tensorboard"], ...], "Besides the run's own files"] = ()
    checkpoint_seconds: Annotated[float, "Seconds between two checkpoints"] = 60.0
    threads: Annotated[int, "Torch threads of each process; 0: torch decides"] = 0
    offline: Annotated[bool, "Use no network for the data"] = False
    quiet: Annotated[bool, "Show no progress"] = False


@dataclass(kw_only=True)
class Sweep:
    """Train one recipe at every point of a grid; give fields several values.

    Example: curvestep sweep ptb-lstm --lr 3 10 30 --max-norm inf 0.25
    """

    folder: Annotated[str, "Folder of the sweep; none: runs/sweep-<recipe>"] = ""
    scale: Annotated[Scale, "Which sizes the other defaults have"] = "laptop"
    engine: Annotated[Engine, "Processes here, or a Ray cluster"] = "joblib"
    workers: Annotated[int, "Trials at a time"] = 2
    address: Annotated[str, "Of a Ray cluster, such as 10.0.0.1:6379; none starts one here"] = ""
    checkpoint_seconds: Annotated[float, "Seconds between two checkpoints of a trial"] = 60.0
    offline: Annotated[bool, "Use no network for the data"] = False
    quiet: Annotated[bool, "Show no progress"] = False


@dataclass(kw_only=True)
class Report:
    """One self-contained HTML page about runs, sweeps, or traces of your own loop.

    Example: curvestep report runs/mine runs/other -o report.html
    """

    RUN: Annotated[tuple[str, ...], "Run folders, folders of runs, trace files"] = ()
    output: Annotated[str, "HTML file to write; a page about other runs is not replaced"] = "report.html"
    overwrite: Annotated[bool, "Replace the file whatever it is"] = False
    title: Annotated[str, "Heading of the page; none: what was found"] = ""
    figures: Annotated[str, "Folder for each figure as PNG and SVG; none writes none"] = ""
    json: Annotated[bool, "Print the verdict as JSON instead of words"] = False
    open: Annotated[bool, "Open the page in a browser"] = False


@dataclass(kw_only=True)
class Advise:
    """What (L0, L1) a run saw, which lr and max_norm follow, and why.

    Example: curvestep advise runs/mine/trace.jsonl
    """

    TRACE: Annotated[
        tuple[str, ...], "Run folders, folders of runs, trace files; tasks are judged one by one"
    ] = ()
    json: Annotated[bool, "Print JSON instead of words"] = False


@dataclass(kw_only=True)
class Calibrate:
    """lr and max_norm for a recipe, measured before training from a few gradients.

    Example: curvestep calibrate ptb-lstm --batch-size 40
    """

    scale: Annotated[Scale, "Which sizes the other defaults have"] = "laptop"
    num_batches: Annotated[int, "Batches to measure at least"] = 3
    max_gradients: Annotated[int, "Gradients to evaluate at most"] = 40
    offline: Annotated[bool, "Use no network for the data"] = False
    json: Annotated[bool, "Print JSON instead of words"] = False


@dataclass(kw_only=True)
class Data:
    """Fetch data sets, verify them, and keep them in the cache.

    Example: curvestep data get ptb cifar10
    """

    NAME: Annotated[tuple[Literal["ptb", "cifar10"], ...], "Data sets; none: all"] = ()
    offline: Annotated[bool, "Only check what is here already"] = False
    quiet: Annotated[bool, "Show no progress"] = False


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line, with the nearest option for an unknown one."""

    def error(self, message: str) -> NoReturn:
        """Raise :class:`UsageError`."""
        raise UsageError(f"{self.prog}: {message.removeprefix('argument ')}. See {self.prog} --help.")

    def read(self, args: Sequence[str]) -> dict[str, Any]:
        """The options that were given, by field."""
        # --batch_size is --batch-size.
        words = [re.sub(r"^--[^=]*", lambda m: m[0].replace("_", "-"), word) for word in args]
        names = [action.option_strings[0] for action in self._actions[1:] if action.option_strings]
        for name in (word.partition("=")[0] for word in words if re.match("--?[a-zA-Z]", word)):
            if name not in self._option_string_actions:  # before its value is taken for something else
                alias = ALIASES.get(name.lower())
                hint = f" Did you mean {alias}?" if alias in names else nearest(name, names)
                listed = ", ".join(names)
                raise UsageError(f"{self.prog}: there is no option {name}.{hint} Options: {listed}.")
        found, unknown = self.parse_known_args(words)
        if unknown:
            self.error(f"there is no use for {unknown[0]}")
        return {name: tuple(v) if isinstance(v, list) else v for name, v in vars(found).items()}


def read_options(
    kind: type[Options],
    args: Sequence[str],
    *,
    prog: str,
    recipe: Recipe | None = None,
    many: bool = False,
    auto: Sequence[str] = (),
) -> tuple[Options, dict[str, Any]]:
    """The options of a command, and the fields of its recipe that were given.

    Fields of ``recipe`` become options too; they take several values for a grid (``many``), and some may be
    ``auto``. ``args`` come after the command and the recipe, which are ``prog`` as it was typed.

    Raises:
        UsageError: with one line that names the option and what it needs.
        SystemExit: after ``--help``.
    """
    text = inspect.cleandoc(kind.__doc__ or "")
    if recipe is not None:
        lrs = {"--lr 3 10 30": "--lr 0.1 1 5"} if "resnet" in recipe.name else {}
        for old, new in {**lrs, "ptb-lstm": recipe.name}.items():
            text = text.replace(old, new)
    own = fields(kind)  # pyright: ignore[reportArgumentType] (a dataclass)
    positional = [item.name for item in own if item.name.isupper()]
    parser = Parser(
        prog=prog,
        usage=" ".join([prog, "[-h] [OPTIONS]", *(f"[{name} ...]" for name in positional)]),
        description=text,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=30, width=80
        ),
        allow_abbrev=False,
    )
    for item in own:
        add_option(parser, kind, item.name, item.default)
    if recipe is not None:
        for item in fields(recipe):
            is_tuple = isinstance(getattr(recipe, item.name), tuple)
            if item.name not in NOT_OPTIONS and not (many and is_tuple):
                default = getattr(recipe, item.name)
                add_option(
                    parser,
                    type(recipe),
                    item.name,
                    default,
                    many=many,
                    auto=item.name in auto,
                    given_only=True,
                )
    found = parser.read(args)
    names = {item.name for item in own}
    options = kind(**{name: value for name, value in found.items() if name in names})
    return options, {name: value for name, value in found.items() if name not in names}


def add_option(
    parser: argparse.ArgumentParser,
    kind: type,
    name: str,
    default: Any,
    *,
    many: bool = False,
    auto: bool = False,
    given_only: bool = False,
) -> None:
    """Make an option of a field: type, choices and help from its annotation, or help from its docstring."""
    hint, described = (get_type_hints(kind, include_extras=extras)[name] for extras in (False, True))
    several = many or (hint not in (bool, int, float, str) and not choices_of(hint))
    kept = argparse.SUPPRESS if given_only else default
    flag = f"--{name.replace('_', '-')}"
    text = described.__metadata__[0] if get_origin(described) is Annotated else help_texts(kind)[name]
    text = text.rstrip(".").replace("%", "%%")
    if hint is bool and not many:
        if default:
            flag, text = f"--no-{name.replace('_', '-')}", f"No {text[:1].lower()}{text[1:]}"
        action = "store_false" if default else "store_true"
        parser.add_argument(flag, action=action, dest=name, default=kept, help=f"{text} (default: off)")
        return
    values = default if isinstance(default, tuple) else (default,)
    shown = " ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in values).strip() or "none"
    item = hint if many or not several else get_args(hint)[0]
    choices = choices_of(item)
    if auto:
        text += "; auto: measured at the start"
    metavar = "{" + ",".join(choices) + "}" if choices else "auto|X" if auto else item.__name__.upper()
    if many and choices:  # argparse would list them twice
        text, metavar = f"{text}; of {', '.join(choices)}", "NAME"
    settings: dict[str, Any] = {
        "type": reader_of(item, auto=auto),
        "default": kept,
        "help": f"{text} (default: {shown})",
        "metavar": metavar,
    }
    if several:
        settings["nargs"] = "+" if many else "*"
    if name.isupper():
        settings["metavar"] = name
        parser.add_argument(name, **settings)
    else:
        parser.add_argument(flag, *filter(None, [SHORT.get(name)]), dest=name, **settings)


def reader_of(hint: Any, *, auto: bool = False) -> Callable[[str], Any]:
    """A function that reads one value of a type; its error says what is needed."""
    choices = choices_of(hint)
    if hint is bool:
        choices = ("true", "false")
    needed = (
        f"one of {', '.join(choices)}" if choices else {int: "a whole number", float: "a number"}.get(hint)
    )

    def read(word: str) -> Any:
        if auto and word == "auto":
            return word
        try:
            if choices and word not in choices:
                raise ValueError
            return word if choices else hint(word)
        except ValueError:
            or_auto = " or auto" if auto else ""
            raise argparse.ArgumentTypeError(f"needs {needed}{or_auto}, got {word!r}") from None

    return read


def help_texts(kind: type) -> dict[str, str]:
    """The help of each field: the first sentence about it in the ``Args`` of its class, or of a base class.

    Example:
        >>> help_texts(Recipe)["momentum"]
        'Momentum of the optimizer.'
    """
    found: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        listed = inspect.cleandoc(owner.__doc__ or "").partition("\nArgs:\n")[2]
        for entry in re.split(r"\n(?=    \w+: )", "\n" + listed):
            name, _, text = " ".join(entry.split()).partition(": ")
            found[name] = re.split(r"(?<=\.) ", text.replace("``", ""))[0]
    return found


def choose_recipe(args: Sequence[str], *, prog: str) -> tuple[Recipe, list[str]]:
    """The recipe that a command line names first, at the scale it names anywhere; and the other words."""
    names = recipe_names()
    if not args or args[0].startswith("-"):
        raise UsageError(f"{prog}: name a recipe first, one of {', '.join(names)}. See {prog} --help.")
    name, *rest = args
    if name not in names:
        raise UsageError(
            f"{prog}: there is no recipe {name}.{nearest(name, names)} Recipes: {', '.join(names)}."
        )
    scale = "laptop"
    for word, following in itertools.pairwise([*rest, ""]):
        if word.partition("=")[0] == "--scale":
            scale = word.partition("=")[2] or following
    if scale not in SCALES:
        raise UsageError(f"{prog}: --scale must be one of {', '.join(SCALES)}, got {scale}.")
    try:
        return get_recipe(name, scale), rest
    except ValueError as error:
        raise UsageError(f"{prog}: {error}") from None
