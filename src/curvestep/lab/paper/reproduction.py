"""All experiments of the paper with one call: data, runs, figures, and the table of claims."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from curvestep.lab.data import load_cifar10, load_ptb
from curvestep.lab.grid import SweepResult, has_ended, run_trial, trial_in
from curvestep.lab.jobs import Job, run_jobs, stop_if_interrupted
from curvestep.lab.paper.claims import Claim, as_markdown, make_claims, write_claims
from curvestep.lab.paper.evidence import Results, final_loss
from curvestep.lab.paper.plan import (
    FIGURES,
    IMAGE_SWEEP,
    IMAGES,
    LANGUAGE,
    SHARES,
    SHOWN_SEED,
    Plan,
    Planned,
    make_plan,
)
from curvestep.lab.progress import duration
from curvestep.lab.recipes import Recipe
from curvestep.lab.run.auto import run_calibrated
from curvestep.lab.run.folder import Run, write_json

SUMMARY = "reproduction.json"
SILENCE = 30.0  # seconds without a line, after which one is due


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """What a reproduction left.

    Args:
        folder: Holds ``runs``, ``figures``, ``claims.md`` and ``claims.json``.
        figures: Image files by figure.
        claims: The table of claims.
        data: Where the data came from; stand-ins are named as such.
        failures: What went wrong, in one line each; the rest was done all the same.
        seconds: Time that this call took.
    """

    folder: Path
    figures: dict[str, Path]
    claims: tuple[Claim, ...]
    data: tuple[str, ...]
    failures: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        verdicts = [claim.verdict for claim in self.claims]
        counts = ", ".join(f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts))
        lines = [
            f"figures: {len(self.figures)}, claims: {len(self.claims)} ({counts}) in {self.folder}, "
            f"after {duration(self.seconds)}",
            *(f"data: {source}" for source in self.data),
            *(f"failed: {failure}" for failure in self.failures),
        ]
        return "\n".join(lines)


def reproduce(
    folder: str | Path,
    *,
    figures: Sequence[str] | None = None,
    scale: str = "laptop",
    progress: bool = True,
    offline: bool = False,
    engine: str = "joblib",
    workers: int = 2,
    address: str | None = None,
    plan: Plan | None = None,
) -> Reproduction:
    """Regenerate figures of the paper, and the table of what supports its claims and what does not.

    Run again, it skips every run that has ended, goes on with the others, and draws anew.

    Args:
        folder: Where everything goes.
        figures: Such as ``["fig2", "fig8"]``; default all eight.
        scale: ``laptop``, in a quarter of an hour on two cores; or ``paper``.
        progress: Show how far it is (plain lines without a terminal).
        offline: Use no network: data that are not here are replaced by stand-ins, and the report says so.
        engine: ``joblib`` or ``ray``.
        workers: Runs at a time.
        address: Of a Ray cluster.
        plan: Runs to make instead of the ones that ``figures`` and ``scale`` name.
    """
    start = time.monotonic()
    folder = Path(folder)
    plan = plan or make_plan(scale, tuple(figures) if figures else None)
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    places, sources = _data(plan, offline=offline, progress=progress)
    plan = replace(plan, runs=tuple(replace(run, place=places[_data_of(run.recipe)]) for run in plan.runs))
    runs = folder / "runs"
    failures = _run(plan, runs, engine=engine, workers=workers, address=address, progress=progress)
    if plan.synthetic:
        failures += _run_synthetic(folder / "synthetic", progress=progress)
    drawn, undrawn = _draw(plan, runs, folder, progress=progress)
    claims = tuple(make_claims(Results(plan, runs, synthetic=folder / "synthetic")))
    notes = [f"Scale: {plan.scale}."]
    write_claims(claims, folder, data=sources, notes=notes)
    result = Reproduction(
        folder=folder,
        figures=drawn,
        claims=claims,
        data=tuple(sources),
        failures=(*failures, *undrawn),
        seconds=time.monotonic() - start,
    )
    values = asdict(result) | {"folder": str(folder), "figures": {k: str(v) for k, v in drawn.items()}}
    write_json(folder / SUMMARY, values)
    if progress:
        print(as_markdown(claims, data=sources, notes=notes), flush=True)
    return result


def _data(plan: Plan, *, offline: bool, progress: bool) -> tuple[dict[str, str], list[str]]:
    """Fetch what the plan needs, once, before many processes want it; folders for runs, and sources.

    Runs on a stand-in, or at another scale, are kept apart from the real ones.
    """
    places: dict[str, str] = {}
    sources = []
    for name in sorted({_data_of(run.recipe) for run in plan.runs}, key=lambda name: (name != "ptb", name)):
        found, source = Path(name).stem, name  # any other data are in no need of fetching
        if name == "ptb":
            corpus = load_ptb(offline=offline, progress=progress)
            found, source = corpus.name, corpus.source
        elif name in ("cifar10", "cifar10-subset"):
            images = load_cifar10(subset=name == "cifar10-subset", offline=offline, progress=progress)
            found, source = images.name, images.source
        places[name] = found if plan.scale == "laptop" else f"{found}-{plan.scale}"
        sources.append(source)
    return places, sources


def _data_of(recipe: Recipe) -> str:
    """The data that a recipe names."""
    return str(getattr(recipe, "corpus", "") or getattr(recipe, "images", ""))


def _run(
    plan: Plan, runs: Path, *, engine: str, workers: int, address: str | None, progress: bool
) -> list[str]:
    """Make every run that has not ended; the failures, a line each."""
    planned = {run.name: run for run in plan.runs}
    measured = ("lr", "max_norm")  # before training, where a run is calibrated
    left = [
        run
        for run in plan.runs
        if not has_ended(runs / run.path, run.recipe, apart_from=measured if run.calibrated else ())
    ]
    jobs = [
        Job(
            name=run.name,
            folder=runs / run.path,
            function=run_calibrated if run.calibrated else run_trial,
            # The data are in the cache now, or cannot be had: no process need ask the network again.
            arguments={"recipe": run.recipe, "folder": runs / run.path, "offline": True},
            total=run.recipe.steps,
        )
        for run in left
    ]
    failures = []
    with _progress(plan.runs, jobs, runs, shown=progress) as (watch, ended):
        for outcome in run_jobs(jobs, engine=engine, workers=workers, address=address, watch=watch):
            stop_if_interrupted(outcome)
            run = planned[outcome.name]
            if outcome.error:
                failures.append(f"{outcome.name}: {outcome.error}")
            ended(run, outcome.error)
    return failures


def _run_synthetic(folder: Path, *, progress: bool) -> list[str]:
    """Make the synthetic experiment unless it is there; its failure, in a line."""
    from curvestep.lab.paper.synthetic import SUMMARY as DONE, run_synthetic

    try:
        if not (folder / DONE).exists():
            run_synthetic(folder, progress=progress)
    except (ValueError, OSError) as error:
        return [f"synthetic experiment: {error}"]
    return []


@contextmanager
def _progress(
    runs: Sequence[Planned], jobs: Sequence[Job], folder: Path, *, shown: bool
) -> Iterator[tuple[Callable[[], None], Callable[[Planned, str], None]]]:
    """How far all runs are, weighted by cost: a live bar, or lines, one at least every half minute."""
    total = sum(run.cost for run in runs)
    by_name = {run.name: run for run in runs}
    before = total - sum(by_name[job.name].cost for job in jobs)
    start, count = time.monotonic(), len(runs) - len(jobs)
    said = start

    def done() -> float:
        return before + sum(_share(job) * by_name[job.name].cost for job in jobs)

    def under_way() -> str:
        return ", ".join(f"{job.name} {job.steps()}/{job.total or '?'}" for job in jobs if _is_busy(job))

    def left() -> str:
        share = (done() - before) / max(total - before, 1e-9)
        elapsed = time.monotonic() - start
        return f"{duration(elapsed / share * (1 - share) if share > 0 else float('inf'))} left"

    def line(run: Planned, error: str) -> None:
        nonlocal count, said
        count += 1
        if shown:
            words = error or _ending(folder / run.path)
            print(f"[{count}/{len(runs)}] {run.name}: {words} ({left()})", flush=True)
            said = time.monotonic()

    def sign_of_life() -> None:
        nonlocal said
        if shown and time.monotonic() - said > SILENCE:
            said = time.monotonic()
            print(f"[{count}/{len(runs)}] {under_way() or 'starting'} ({left()})", flush=True)

    console = Console(stderr=True)
    if not (shown and console.is_terminal and jobs):
        yield sign_of_life, line
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=32),
        TextColumn("{task.percentage:3.0f} %  {task.fields[under_way]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("training", total=total, under_way="")

        def watch() -> None:
            bar.update(task, completed=done(), under_way=under_way())

        def ended(run: Planned, error: str) -> None:
            bar.console.print(f"{run.name}: {error or _ending(folder / run.path)}", highlight=False)

        yield watch, ended


def _share(job: Job) -> float:
    if has_ended(job.folder):
        return 1.0
    return min(1.0, job.steps() / job.total) if job.total else 0.0


def _is_busy(job: Job) -> bool:
    return job.steps() > 0 and not has_ended(job.folder)


def _ending(folder: Path) -> str:
    run = Run.load(folder)
    status, loss = run.status["status"], run.status.get("train_loss", float("nan"))
    return (
        f"finished, training loss {loss:.3f}"
        if status == "finished"
        else f"{status}, {run.status['message']}"
    )


def _draw(plan: Plan, runs: Path, folder: Path, *, progress: bool) -> tuple[dict[str, Path], list[str]]:
    """Every figure of the plan, from the run folders alone; what could not be drawn, a line each."""
    drawn, failures = {}, []
    for figure in (figure for figure in FIGURES if figure in plan.figures):
        try:
            drawn[figure] = DRAW[figure](plan, runs, folder)
        except (ValueError, OSError) as error:
            failures.append(f"{figure}: {error}")
        if progress:
            print(f"{figure}: {drawn[figure] if figure in drawn else failures[-1]}", flush=True)
    return drawn, failures


def _path(plan: Plan, runs: Path, setting: str, seed: int | None = None) -> Path:
    """Folder of one run of a setting: the seed that the scatter plots show, or the only one there is."""
    planned = plan.of(setting)
    chosen = [run for run in planned if run.recipe.seed == seed] or planned[-1:]
    if not chosen:
        raise ValueError(f"the plan has no run of {setting}")
    return runs / chosen[0].path


def _all(plan: Plan, runs: Path, settings: Sequence[str]) -> list[Path]:
    return [runs / run.path for setting in settings for run in sorted(plan.of(setting), key=lambda r: r.name)]


def _scatter(
    settings: Sequence[str],
    title: str,
    name: str,
    *,
    seeds: Sequence[int] = (),
    log: Sequence[bool] = (),
    notes: Sequence[str] = (),
) -> Callable[[Plan, Path, Path], Path]:
    def draw(plan: Plan, runs: Path, folder: Path) -> Path:
        from curvestep.lab.paper import save, scatter

        chosen = seeds or [SHOWN_SEED] * len(settings)
        paths = [_path(plan, runs, setting, seed) for setting, seed in zip(settings, chosen, strict=True)]
        figure = scatter(paths, title=title, log=list(log) or True, notes=notes)
        return save(figure, folder / "figures" / name)[0]

    return draw


def _draw_curves(plan: Plan, runs: Path, folder: Path) -> Path:
    from curvestep.lab.paper import curves, heatmap, save

    paths = _all(plan, runs, [*LANGUAGE, *IMAGES])
    drawn = curves(paths, title="Figure 4: training with and without clipping")
    sweep = heatmap(_image_sweep(plan, runs), title="Figure 4: ResNet20, a short sweep")
    save(sweep, folder / "figures" / "fig4_sweep")
    return save(drawn, folder / "figures" / "fig4")[0]


def _image_sweep(plan: Plan, runs: Path) -> SweepResult:
    """The sweep on images; its losses are means over the last steps only, for it is short."""
    trials = []
    for setting, (lr, max_norm) in IMAGE_SWEEP.items():
        found = trial_in({"lr": lr, "max_norm": max_norm}, _path(plan, runs, setting))
        if found.result:
            loss = final_loss(Run.load(found.folder))
            found = replace(found, result=replace(found.result, train_loss=loss))
        trials.append(found)
    return SweepResult(folder=runs, trials=tuple(trials))


def _draw_shares(plan: Plan, runs: Path, folder: Path) -> Path:
    from curvestep.lab.paper import data_fraction, save

    part, whole = (_path(plan, runs, setting) for setting in SHARES)
    return save(
        data_fraction(part, whole, title="Figure 6: a tenth of the data against all of it"),
        folder / "figures" / "fig6",
    )[0]


def _draw_synthetic(plan: Plan, runs: Path, folder: Path) -> Path:
    from curvestep.lab.paper.synthetic_figures import draw_synthetic

    return draw_synthetic(folder / "synthetic")[0]


def _draw_gd(plan: Plan, runs: Path, folder: Path) -> Path:
    from curvestep.lab.paper import lstm_gd, save

    gd, clipped = (_path(plan, runs, name, SHOWN_SEED) for name in plan.descent)
    drawn = lstm_gd(gd, clipped, title="Figure 8: GD against clipped GD on the 2-layer LSTM")
    return save(drawn, folder / "figures" / "fig8")[0]


_FIRST = "lm-lr30clip0.25"
DRAW: dict[str, Callable[[Plan, Path, Path], Path]] = {
    "fig1": _scatter([_FIRST], "Figure 1: smoothness against gradient norm, LSTM on PTB", "fig1"),
    "fig2": _scatter([_FIRST, "lm-lr2", "lm-lr2clip0.25"], "Figure 2: language model", "fig2"),
    "fig3": _scatter([*IMAGES], "Figure 3: ResNet20", "fig3"),
    "fig4": _draw_curves,
    "fig5": _scatter(
        [_FIRST, _FIRST], "Figure 5: linear scale, and the longer run", "fig5",
        seeds=[SHOWN_SEED, 0], log=[False, True], notes=["linear scale", "longer run"],
    ),
    "fig6": _draw_shares,
    "fig7": _draw_synthetic,
    "fig8": _draw_gd,
}  # fmt: skip
