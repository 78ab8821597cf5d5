"""The library's commands: each reads its options, calls one library function and prints what came back."""

from __future__ import annotations

import webbrowser
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from curvestep.cli import FAILED, OK, say
from curvestep.cli.parser import NUMBER, Command, Parser
from curvestep.files import dump_json

if TYPE_CHECKING:
    from curvestep.advice.advice import Advice
    from curvestep.trace.trace import Trace


def report(parser: Parser, args: list[str]) -> int:
    """``curvestep report``: runs as one page."""
    parser.positional("RUN", "Run folders, folders of runs, or trace files to show")
    output = "HTML file to write; an earlier page is replaced, any other file is not"
    parser.option("--output -o", output, default="report.html")
    parser.flag("--open", "Open the page in a browser")
    chosen = parser.read(args)
    if not chosen.RUN:
        parser.error("name a run folder or a trace file")
    from curvestep.report import report as write_report

    page = write_report(*chosen.RUN, output=chosen.output)
    for task in page.verdicts:
        title = f"{task['title']}: " if task["title"] else ""
        say(f"{title}{task['verdict']}")
    say(f"report: {page.path}")
    if chosen.open:
        webbrowser.open(page.path.resolve().as_uri())
    return OK


def advise(parser: Parser, args: list[str]) -> int:
    """``curvestep advise``: what a trace says, in words or JSON."""
    parser.positional("TRACE", "Run folders, folders of runs, or trace files; tasks are judged one by one")
    parser.flag("--details", "Print all reasons, and for a single run its (L0, L1)")
    parser.flag("--json", "Print JSON instead of words")
    metric = "Rank runs by this column of their rows or logs, in place of the training loss"
    parser.option("--metric", metric, default=None, shown="the training loss")
    parser.option("--mode", "min or max: which value of the metric is better", default=None, shown="by name")
    parser.flag("--no-progress", "The loss measures no progress (policies, GANs): only say what is unstable")
    larger = "For a trainer's log: count the steps with a larger gradient norm"
    parser.option("--max-norm", larger, default=None, shown="none", kind=NUMBER)
    chosen = parser.read(args)
    if not chosen.TRACE:
        parser.error("name a trace file or a run folder")
    from curvestep.advice.advice import advise as advise_on, is_trainer_log
    from curvestep.advice.decision import CANNOT_TELL
    from curvestep.trace.sources import traces_by_task

    tasks: dict[str, list[Trace]] = {}
    if any(is_trainer_log(place) for place in chosen.TRACE):
        advices = {"": advise_on(*chosen.TRACE, max_norm=chosen.max_norm)}
    else:
        tasks = traces_by_task(chosen.TRACE)
        options = {"metric": chosen.metric, "mode": chosen.mode, "progress": not chosen.no_progress}
        advices = {task: advise_on(*traces, **options) for task, traces in tasks.items()}
    if not chosen.json:
        say("\n\n".join(_advice_of(task, tasks, advices, details=chosen.details) for task in advices))
    elif len(advices) == 1:
        say(dump_json(*advices.values(), indent=2))
    else:
        listed = [{"task": task, "advice": advice} for task, advice in advices.items()]
        say(dump_json({"tasks": listed}, indent=2))
    return FAILED if any(advice.action == CANNOT_TELL for advice in advices.values()) else OK


def fit(parser: Parser, args: list[str]) -> int:
    """``curvestep fit``: (L0, L1) along a run, in words or JSON."""
    parser.positional("TRACE", "Run folders, folders of runs, or trace files; each trace has its own fit")
    parser.flag("--json", "Print JSON instead of words")
    chosen = parser.read(args)
    if not chosen.TRACE:
        parser.error("name a trace file or a run folder")
    from curvestep.fit.fit import fit_smoothness
    from curvestep.trace.sources import traces_by_task

    traces = [trace for traces in traces_by_task(chosen.TRACE).values() for trace in traces]
    if chosen.json:
        fits = [fit_smoothness(trace) for trace in traces]
        say(dump_json(fits[0] if len(fits) == 1 else {"fits": fits}, indent=2))
        return OK
    for trace in traces:
        words = _fit_words(trace)
        say(f"{trace.path}\n{words}" if len(traces) > 1 else words)
    return OK


def _advice_of(
    task: str, tasks: Mapping[str, Sequence[Trace]], advices: Mapping[str, Advice], *, details: bool
) -> str:
    """The advice for one task, under its name if there are several."""
    advice = advices[task]
    traces = tasks.get(task, ())  # none of a trainer's log
    words = advice.details() if details else str(advice)
    if details and len(traces) == 1:
        words = f"{words}\n\n{_fit_words(traces[0])}"
    if len(advices) == 1:
        return words
    num_runs = "1 run" if len(traces) == 1 else f"{len(traces)} runs"
    return f"{task or 'other'}, {num_runs}\n{words}"


def _fit_words(trace: Trace) -> str:
    """The fit of a trace, or why there is none."""
    from curvestep.fit.fit import fit_smoothness

    try:
        return str(fit_smoothness(trace))
    except ValueError as error:
        return f"No fit: {error}"


COMMANDS = {
    "advise": Command(
        advise, "say whether to keep, raise or lower lr after runs of any script", "runs/mine/trace.jsonl",
        "TRACE ...",
    ),
    "report": Command(
        report, "write one HTML page about runs, sweeps, or traces of any script",
        "runs/mine runs/other -o report.html", "RUN ...",
    ),
    "fit": Command(
        fit, "print (L0, L1) along a run, with intervals and a control", "runs/mine/trace.jsonl", "TRACE ..."
    ),
}  # fmt: skip
