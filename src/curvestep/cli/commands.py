"""The commands: each reads its options, calls one library function, and prints what came back."""

from __future__ import annotations

import math
import os
import sys
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from curvestep._files import dump_json
from curvestep.cli import options
from curvestep.cli.options import UsageError, choose_recipe, read_options
from curvestep.lab.recipes import Recipe, nearest, recipe_names, with_fields

OK, FAILED, INTERRUPTED = 0, 1, 130
Options = TypeVar("Options")
AUTO = ("lr", "max_norm", "offset")  # fields that may be measured before training


def reproduce(args: list[str]) -> int:
    """``curvestep reproduce``: runs, figures, claims, and the page about them."""
    chosen, _ = read_options(options.Reproduce, args, prog="curvestep reproduce")
    from curvestep.lab.paper.reproduction import reproduce as library

    names = ("scale", "offline", "engine", "workers", "address")
    result = library(chosen.folder, figures=chosen.FIGURE or None, **_arguments(chosen, *names))
    print(result)
    if sys.stdout.isatty() and not chosen.no_open:
        _show(result.page)
    return FAILED if result.failures else OK


def train(args: list[str]) -> int:
    """``curvestep train``: one run."""
    chosen, recipe, auto = _with_recipe(options.Train, args, prog="curvestep train", auto=AUTO)
    measured = [name for name in AUTO if name in auto]
    if chosen.dry_run:
        from curvestep.lab.run.auto import dry_run

        print(dry_run(recipe))
        if measured:
            print(f"  {' and '.join(measured)} will be measured before the first step")
        return OK
    from curvestep.lab.run.loop import train as library

    names = ("resume", "devices", "accelerator", "strategy", "loggers", "checkpoint_seconds", "offline")
    setting = "auto" if measured else recipe.label.replace(", ", "-").replace(" ", "")
    folder = Path(chosen.folder or f"runs/{recipe.name}-{setting}")
    if measured:
        recipe = _measure(recipe, folder, measured, chosen)
    result = library(recipe, folder, threads=chosen.threads or None, **_arguments(chosen, *names))
    if os.environ.get("RANK", "0") == "0":  # torchrun starts several of us
        print(_ending(result))
    return INTERRUPTED if result.status == "interrupted" else OK


def sweep(args: list[str]) -> int:
    """``curvestep sweep``: a grid of runs."""
    chosen, recipe, grid = _with_recipe(options.Sweep, args, prog="curvestep sweep", many=True)
    if not grid:
        prog = f"curvestep sweep {recipe.name}"
        raise UsageError(
            f"{prog}: give at least one field several values, such as --lr 3 10 30. See {prog} --help."
        )
    from curvestep.lab.grid import sweep as library

    names = ("engine", "workers", "address", "checkpoint_seconds", "offline")
    folder = chosen.folder or f"runs/sweep-{recipe.name}"
    result = library(recipe, grid, folder, **_arguments(chosen, *names))
    print(result)
    print(f"table, heat map and runs in {result.folder}; curvestep report {result.folder}")
    return FAILED if any(trial.status == "failed" for trial in result.trials) else OK


def report(args: list[str]) -> int:
    """``curvestep report``: runs as one page."""
    chosen, _ = read_options(options.Report, args, prog="curvestep report")
    if not chosen.RUN:
        raise UsageError("curvestep report: name a run folder or a trace file. See curvestep report --help.")
    from curvestep.lab.report.page import write_page

    page = write_page(chosen.RUN, chosen.output, title=chosen.title, overwrite=chosen.overwrite)
    if chosen.figures:
        from curvestep.lab.report.page import save_figures

        save_figures(page.runs, chosen.figures)
    if chosen.json:
        names = ("name", "setting", "status", "step", "final_loss", "clipped_fraction")
        names += ("advice", "warnings", "doubts")
        runs = [{name: getattr(view, name) for name in names} for view in page.runs]
        print(dump_json({"page": str(page.path), "verdicts": page.verdicts, "runs": runs}, indent=2))
    else:
        for said in page.verdicts:
            print(f"{said['title']}: {said['verdict']}" if said["title"] else said["verdict"])
        print(f"report: {page.path}")
    if chosen.open:
        _show(page.path)
    return OK


def advise(args: list[str]) -> int:
    """``curvestep advise``: what a trace says, in words or JSON."""
    chosen, _ = read_options(options.Advise, args, prog="curvestep advise")
    if not chosen.TRACE:
        raise UsageError("curvestep advise: name a trace file or a run folder. See curvestep advise --help.")
    from curvestep.advice.advice import advise as library
    from curvestep.lab.report.views import traces_by_task

    tasks = traces_by_task(chosen.TRACE)
    found = {task: library(*traces) for task, traces in tasks.items()}
    if chosen.json:
        told = [{"task": task, "advice": advice} for task, advice in found.items()]
        print(dump_json(told[0]["advice"] if len(told) == 1 else {"tasks": told}, indent=2))
    else:
        for number, (task, advice) in enumerate(found.items()):
            if len(found) > 1:
                runs = len(tasks[task])
                print(f"{chr(10) * (number > 0)}{task or 'other runs'} ({runs} run{'s' * (runs > 1)})")
            print(advice.verdict if advice.refused else advice)
            if len(tasks[task]) == 1 and advice.fit is not None:
                print(f"\n{advice.fit}")
    return FAILED if any(advice.refused for advice in found.values()) else OK


def calibrate(args: list[str]) -> int:
    """``curvestep calibrate``: lr and max_norm of a recipe before it is trained."""
    chosen, recipe, _ = _with_recipe(options.Calibrate, args, prog="curvestep calibrate")
    from curvestep.lab.run.auto import calibrate_recipe

    _, found = calibrate_recipe(
        recipe, num_batches=chosen.num_batches, max_gradients=chosen.max_gradients, offline=chosen.offline
    )
    print(dump_json(found, indent=2) if chosen.json else found)
    return OK


def data(args: list[str]) -> int:
    """``curvestep data get``: fetch data sets."""
    if _wants_help(args):
        return _help(options.Data, "curvestep data get")
    if args[:1] != ["get"]:
        hint = nearest(args[0], ["get"]) if args else ""
        raise UsageError(f"curvestep data: name an action: curvestep data get ptb cifar10.{hint}")
    chosen, _ = read_options(options.Data, args[1:], prog="curvestep data get")
    from curvestep.lab.data import NAMES, get

    for name, source in get(chosen.NAME or NAMES, offline=chosen.offline, progress=not chosen.quiet).items():
        print(f"{name}: {source}")
    return OK


COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "reproduce": (reproduce, "every figure and table of the paper, one HTML report"),
    "train": (train, "one training run with the probe built in"),
    "sweep": (sweep, "a grid of runs: --lr 3 10 30 --max-norm inf 0.25"),
    "report": (report, "runs as one self-contained HTML page"),
    "advise": (advise, "what (L0, L1), which lr, which max_norm, and why"),
    "calibrate": (calibrate, "lr and max_norm measured before training"),
    "data": (data, "fetch and verify the data sets"),
}


def _measure(recipe: Any, folder: Path, names: list[str], chosen: Any) -> Any:
    """The recipe with the fields that were ``auto``: measured now, or those of the run that goes on."""
    from curvestep.lab.run.auto import calibrate_run

    wrong = "offset" if recipe.optimizer == "clipped" else "max_norm"
    if wrong in names:
        right = "max-norm" if recipe.optimizer == "clipped" else "offset"
        raise UsageError(
            f"curvestep train {recipe.name}: --{wrong.replace('_', '-')} auto is not for the optimizer "
            f"{recipe.optimizer}, which does not use it. Say --{right} auto."
        )
    recipe, found = calibrate_run(recipe, folder, names, resume=chosen.resume, offline=chosen.offline)
    if not chosen.quiet and found is not None:
        print(found, flush=True)
    return recipe


def _arguments(chosen: Any, *names: str) -> dict[str, Any]:
    """Options as arguments of the library, by the same names; an empty text is None."""
    given = {name: getattr(chosen, name) for name in names}
    return {"progress": not chosen.quiet} | {k: None if value == "" else value for k, value in given.items()}


def _with_recipe(
    kind: type[Options], args: list[str], *, prog: str, auto: tuple[str, ...] = (), many: bool = False
) -> tuple[Options, Recipe, dict[str, Any]]:
    """The command's options, the recipe with the fields that were given, and the fields left open.

    Those are ``auto``, or of a grid the ones with several values.
    """
    if _wants_help(args):
        raise SystemExit(_help(kind, prog))
    recipe, rest = choose_recipe(args, prog=prog)
    prog = f"{prog} {recipe.name}"
    chosen, given = read_options(kind, rest, prog=prog, recipe=recipe, auto=auto, many=many)
    left = {name: value for name, value in given.items() if (len(value) > 1 if many else value == "auto")}
    fixed = {name: value[0] if many else value for name, value in given.items() if name not in left}
    try:
        return chosen, with_fields(recipe, **fixed), left
    except (TypeError, ValueError) as error:  # a value that the recipe refuses is a wrong command line
        raise UsageError(f"{prog}: {error} See {prog} --help.") from None


def _wants_help(args: list[str]) -> bool:
    """Whether help is asked for before a recipe is named."""
    return args[:1] in (["--help"], ["-h"])


def _help(kind: type, prog: str) -> int:
    """The command's own options, and where those of its recipes are."""
    try:
        read_options(kind, ["--help"], prog=prog if kind is options.Data else f"{prog} RECIPE")
    except SystemExit:
        if kind is not options.Data:
            names = recipe_names()
            print(f"\nRecipes: {', '.join(names)}.\nEvery field is an option too: {prog} {names[0]} --help")
    return OK


def _ending(result: Any) -> str:
    """How a run ended, in a line or two."""
    words = f"{result.status} after {result.step} steps"
    if math.isfinite(result.train_loss):
        words += f", training loss {result.train_loss:.4g}"
    held_out = [
        f"{s} {k} {v:.4g}" for s, values in result.metrics.items() for k, v in values.items() if k != "loss"
    ]
    words = ", ".join([words, *held_out])
    message = f": {result.message}" if result.message else ""
    return f"{words}{message}\ndata: {result.data}\ncurvestep report {result.folder}"


def _show(path: Path) -> None:
    webbrowser.open(path.resolve().as_uri())
