"""The commands that train: ``curvestep reproduce | train | sweep | calibrate | data``."""

from __future__ import annotations

import math
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from curvestep.checks import nearest
from curvestep.cli import FAILED, INTERRUPTED, OK, say
from curvestep.cli.parser import INTEGER, NUMBER, Command, Parser, UsageError, one_of
from curvestep.files import dump_json
from curvestep.trace.run import Fields
from curvestep_reproduction.recipe_options import add_scale, read_with_recipe, with_given

if TYPE_CHECKING:
    from curvestep_reproduction.training.run_folder import RunResult

AUTO = ("lr", "max_norm", "offset")  # fields that may be measured before training


def reproduce(parser: Parser, args: list[str]) -> int:
    """``curvestep reproduce``: runs, figures, claims, and the page about them."""
    kind = one_of(*[f"fig{number}" for number in range(1, 9)])
    parser.positional("FIGURE", "fig1 to fig8 (default: all)", kind=kind)
    parser.option("--folder", "Where runs, figures, claims.md and report.html go", default="reproduced")
    add_scale(parser, "laptop: minutes; longer: hours; epoch: the paper's LSTM, 30 core-hours; paper: days")
    add_engine(parser, "How many runs train at a time")
    words = "Train these runs alone, such as cifar-momentum-seed0; draw and judge with all that are there"
    parser.option(
        "--only", words, default=(), shown="every run that a figure needs", nargs="+", metavar="RUN"
    )
    parser.flag("--offline", "Use no network; stand-ins replace missing data")
    parser.flag("--quiet", "Show no progress")
    parser.flag("--dry-run", "Only print which runs it would make, and their cost in core-hours")
    chosen = parser.read(args)
    from curvestep_reproduction.figures.reproduction import cost_table, make_plan, reproduce as library
    from curvestep_reproduction.training.run_folder import space_in

    figures = chosen.FIGURE or None
    if chosen.dry_run:
        say(cost_table(make_plan(chosen.scale, figures), chosen.only))
        return OK

    names = ("scale", "only", "offline", "engine", "workers", "address")
    kept = "Runs and pictures so far are kept: free space, then run the same command again."
    with space_in(Path(chosen.folder), kept):
        result = library(chosen.folder, figures=figures, **_arguments(chosen, *names))
    say(result)
    return _code(failed=bool(result.failures))


def train(parser: Parser, args: list[str]) -> int:
    """``curvestep train``: one run."""
    parser.option("--folder", "Run folder", shown="runs/<recipe>-<setting>")
    add_scale(parser)
    parser.flag("--resume", "Continue from the folder's checkpoint")
    parser.option("--devices", "Processes that share each batch", default=1, kind=INTEGER)
    parser.option("--checkpoint-seconds", "Time between checkpoints", default=60.0, kind=NUMBER)
    parser.option("--threads", "Torch threads of each process", default=None, shown="torch's", kind=INTEGER)
    parser.flag("--offline", "Use no network for the data")
    parser.flag("--quiet", "Show no progress")
    chosen, recipe, given = read_with_recipe(parser, args, auto=AUTO)
    auto = [name for name in AUTO if given.get(name) == "auto"]
    fixed = {name: value for name, value in given.items() if name not in auto}
    recipe = with_given(parser, recipe, fixed)
    from curvestep_reproduction.training.loop import train as library

    names = ("resume", "devices", "checkpoint_seconds", "offline", "threads")
    setting = "auto" if auto else recipe.label.replace(", ", "-").replace(" ", "")
    folder = Path(chosen.folder or f"runs/{recipe.name}-{setting}")
    if auto:
        from curvestep_reproduction.training.auto import calibrate_run

        where = {"resume": chosen.resume, "offline": chosen.offline}
        recipe, calibration = calibrate_run(recipe, folder, auto, **where)
        if calibration is not None and not chosen.quiet:
            say(calibration)
    result = library(recipe, folder, **_arguments(chosen, *names))
    say(_ending(result))
    return {"interrupted": INTERRUPTED}.get(result.status, OK)


def sweep(parser: Parser, args: list[str]) -> int:
    """``curvestep sweep``: a grid of runs."""
    parser.option("--folder", "Where the sweep goes", shown="runs/sweep-<recipe>")
    add_scale(parser)
    add_engine(parser, "How many runs train at a time")
    parser.flag("--offline", "Use no network for the data")
    parser.flag("--quiet", "Show no progress")
    chosen, recipe, given = read_with_recipe(parser, args, several=True)
    grid = {name: tuple(values) for name, values in given.items() if len(values) > 1}
    recipe = with_given(parser, recipe, {name: given[name][0] for name in given if name not in grid})
    if not grid:
        parser.error("give at least one field several values, such as --lr 3 10 30")
    from curvestep_reproduction.training.sweep import ranking, sweep as library

    names = ("engine", "workers", "address", "offline")
    folder = chosen.folder or f"runs/sweep-{recipe.name}"
    trials = library(recipe, grid, folder, **_arguments(chosen, *names))
    say(ranking(trials))
    say(f"curvestep report {folder}")
    return _code(failed=any(trial.status == "failed" for trial in trials))


def calibrate(parser: Parser, args: list[str]) -> int:
    """``curvestep calibrate``: lr and max_norm of a recipe before it is trained."""
    add_scale(parser)
    parser.flag("--offline", "Use no network for the data")
    parser.flag("--json", "Print JSON instead of words")
    chosen, recipe, given = read_with_recipe(parser, args)
    recipe = with_given(parser, recipe, given)
    from curvestep_reproduction.training.auto import calibrate_recipe

    _, calibration = calibrate_recipe(recipe, offline=chosen.offline)
    say(dump_json(calibration, indent=2) if chosen.json else calibration)
    return OK


def data(parser: Parser, args: list[str]) -> int:
    """``curvestep data get``: fetch data sets."""
    parser.positional("NAME", "Data sets to fetch (default: all)", kind=one_of("ptb", "cifar10"))
    parser.flag("--offline", "Only check what is here already")
    parser.flag("--quiet", "Show no progress")
    parser.prog = "curvestep data get"
    action = args[:1]
    rest = args[1:]
    if action in (["-h"], ["--help"]):
        parser.show_help()
    if action != ["get"]:
        hint = nearest("".join(action), ["get"])
        raise UsageError(f"curvestep data: name an action: curvestep data get ptb cifar10.{hint}")
    chosen = parser.read(rest)
    from curvestep_reproduction.data import NAMES, get

    for name, source in get(chosen.NAME or NAMES, offline=chosen.offline, progress=not chosen.quiet).items():
        say(f"{name}: {source}")
    return OK


def _code(*, failed: bool) -> int:
    return FAILED if failed else OK


def add_engine(parser: Parser, workers: str) -> None:
    """Add the options of commands that start several runs."""
    parser.option("--engine", "Processes here, or a cluster", default="joblib", kind=one_of("joblib", "ray"))
    parser.option("--workers", workers, default=2, kind=INTEGER)
    parser.option("--address", "Ray cluster, such as 10.0.0.1:6379", default=None, shown="start one here")


def _arguments(chosen: Namespace, *names: str) -> Fields:
    """Options as arguments of the library, by the same names."""
    return {"progress": not chosen.quiet, **{name: getattr(chosen, name) for name in names}}


def _ending(result: RunResult) -> str:
    """How a run ended, in a line or two."""
    parts = [f"{result.status} after {result.step} steps"]
    if math.isfinite(result.train_loss):
        parts.append(f"training loss {result.train_loss:.4g}")
    for split, values in result.metrics.items():
        parts += [f"{split} {name} {value:.4g}" for name, value in values.items() if name != "loss"]
    message = f": {result.message}" if result.message else ""
    return f"{', '.join(parts)}{message}\ndata: {result.data}\ncurvestep report {result.folder}"


REPRODUCE = Command(
    reproduce,
    "make every figure and table of the paper, and one HTML report",
    "fig2 fig8 --folder reproduced",
    "[FIGURE ...]",
)
TRAIN = Command(
    train, "train one built-in recipe and keep everything in a run folder", "--lr auto --max-norm auto"
)
SWEEP = Command(
    sweep, "train one recipe over a grid: give fields several values", "--lr 0.1 1 10 --max-norm inf 0.25"
)
CALIBRATE = Command(calibrate, "find lr and max_norm of a built-in recipe before training", "--batch-size 40")
DATA = Command(data, "fetch and verify the data sets", "ptb cifar10", "[NAME ...]")
