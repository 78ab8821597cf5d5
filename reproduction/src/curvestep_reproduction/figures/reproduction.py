r"""All experiments of the paper with one call: data, runs, figures, the table of claims, and the page.

``reproduce`` loops over :data:`FIGURES`; to add a figure, write its file and put it into that list. In the
reproduction's folder it leaves ``runs``, ``figures``, ``claims.json`` with ``claims.md``, ``report.html``,
and ``figures.json``, from which the page takes its pictures: an entry a picture, with paths relative to the
folder. At laptop scale the paper's own size stands beside it, drawn from the runs that come with the package.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from curvestep import SmoothnessFit, fit_smoothness
from curvestep.checks import check_choice, nearest
from curvestep.report.drawing import save
from curvestep.report.page import write_page
from curvestep.trace.run import Run, last_step, read_json, write_json
from curvestep_reproduction.archives import KEPT
from curvestep_reproduction.claims.claims import Claim, NotPlanned, as_markdown, decided, tally, write_claims
from curvestep_reproduction.claims.statements import make_claims
from curvestep_reproduction.cost import steps_of
from curvestep_reproduction.figures.fig1_scatter import FIG1, FIG2, FIG3, FIG5
from curvestep_reproduction.figures.fig4_curves import EQUIVALENCE, FIG4
from curvestep_reproduction.figures.fig6_data_fraction import FIG6
from curvestep_reproduction.figures.fig7_synthetic import FIG7
from curvestep_reproduction.figures.fig8_lstm_gd import FIG8
from curvestep_reproduction.figures.grid import claims_grid
from curvestep_reproduction.figures.legend import length_words, missing_words, seed_words
from curvestep_reproduction.figures.plan import (
    KEPT_CLAIMS,
    PAPER_SIZE,
    PaperFigure,
    Plan,
    Planned,
    Results,
    load_kept,
    plan_runs,
)
from curvestep_reproduction.progress import Progress, duration
from curvestep_reproduction.recipes import SCALES
from curvestep_reproduction.tasks import load_data
from curvestep_reproduction.training.auto import run_calibrated
from curvestep_reproduction.training.jobs import run_jobs
from curvestep_reproduction.training.loop import train
from curvestep_reproduction.training.run_folder import RunResult, TrainedRun, has_ended, result_in

FIGURES = {figure.name: figure for figure in (FIG1, FIG2, FIG3, FIG4, FIG5, FIG6, FIG7, FIG8, EQUIVALENCE)}
PICTURES = "figures.json"
PAGE = "report.html"
SILENCE = 30.0  # seconds without a line, after which one is due


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """Files and claims of a reproduction."""

    folder: Path  # holds what the module describes
    figures: dict[str, Path]  # the main image file of each figure
    claims: tuple[Claim, ...]  # the table of claims
    data: tuple[str, ...]  # where the data came from; stand-ins are named as such
    failures: tuple[str, ...]  # what went wrong, in one line each; the rest was done all the same
    page: Path  # the HTML page about all of it
    seconds: float  # time that this call took

    def __str__(self) -> str:
        lines = [
            tally(self.claims),
            f"figures: {len(self.figures)} in {self.folder}, after {duration(self.seconds)}",
            *(f"data: {source}" for source in self.data),
            *(f"failed: {failure}" for failure in self.failures),
            f"report: {self.page}",
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class Drawn:
    """Pictures that were drawn."""

    # Title, caption and files of every picture, as in ``figures.json``.
    entries: list[dict[str, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # what could not be drawn, a line each


def reproduce(
    folder: str | Path,
    *,
    figures: Sequence[str] | None = None,
    scale: str = "laptop",
    only: Sequence[str] = (),
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
        figures: Such as ``["fig2", "fig8"]``; default all.
        scale: ``laptop``, in a quarter of an hour on two cores; ``longer``, in three hours; ``epoch``, the
            paper's AWD-LSTM in about 30 core-hours; or ``paper``.
        only: Names of the runs to train, such as ``["cifar-momentum-seed0"]``; default all of the plan.
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
    named_runs(plan, only)  # before anything is made
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    places, sources = prepare_data(plan, offline=offline, progress=progress)
    plan = replace(plan, runs=tuple(replace(run, place=places[run.recipe.data]) for run in plan.runs))
    failures = run_all(
        replace(plan, runs=named_runs(plan, only)),
        folder / "runs",
        engine=engine,
        workers=workers,
        address=address,
        progress=progress,
    )
    for figure in plan.figures:
        try:
            figure.experiment(folder, progress)
        except (ValueError, OSError) as error:
            failures.append(f"{figure.name}: {error}")
    results = Results(plan, folder)
    drawn = draw_all(results, progress=progress, folder=folder)
    images = {entry["figure"]: folder / entry["png"] for entry in reversed(drawn.entries)}  # of two the first
    with tempfile.TemporaryDirectory() as place:
        if plan.scale != "laptop":  # one seed may be judged by the spread at a smaller scale
            results.at |= load_smaller(plan, Path(place))
        claims = make_claims(results)
    by_scale = {plan.scale: claims}
    notes = [f"Trained here: scale {plan.scale}."]
    if plan.scale == "laptop":
        try:
            kept = kept_claims({claim.name for claim in claims})
        except (OSError, ValueError) as error:  # the package is damaged: the rest is shown all the same
            kept = {}
            failures.append(f"claims of the larger scales: {error}")
        by_scale |= kept
        claims = decided(by_scale)
        notes.append(f"Kept runs of other scales decide where they are larger: {', '.join(kept) or 'none'}.")
        at_size = draw_kept({figure.name for figure in plan.figures}, folder, progress=progress)
        drawn.entries.extend(at_size.entries)
        notes += [f"Of the kept runs: {line}." for line in at_size.failures]
    # The paper's figures in their order, each at both sizes.
    entries = sorted(drawn.entries, key=lambda entry: list(FIGURES).index(entry["figure"]))
    write_json(folder / PICTURES, {"figures": entries})
    write_claims(claims, folder, data=sources, notes=notes, picture=draw_grid(by_scale, folder))
    loaded = {run.folder.resolve(): run for run in results.runs}
    page = write_page([folder], folder / PAGE, overwrite=True, fit=partial(_fit_of, loaded=loaded)).path
    result = Reproduction(
        folder=folder,
        figures=images,
        claims=tuple(claims),
        data=tuple(sources),
        failures=(*failures, *drawn.failures),
        page=page,
        seconds=time.monotonic() - start,
    )
    if progress:
        print(as_markdown(claims, data=sources, notes=notes), flush=True)
    return result


def draw_grid(by_scale: Mapping[str, Sequence[Claim]], folder: Path) -> dict[str, str]:
    """Draw the grid of claims by scales; its entry, as in ``figures.json``."""
    png, svg = save(claims_grid(by_scale), folder / "figures" / "claims")
    files = {path.suffix[1:]: path.relative_to(folder).as_posix() for path in (png, svg)}
    caption = "A row is a claim of the paper, a column a scale. A frame marks the scale that decides."
    return {"title": "Claims by scales", "caption": caption} | files


def _fit_of(run: Run, *, loaded: Mapping[Path, TrainedRun]) -> SmoothnessFit:
    """The fit of a run of the page, which claims and figures have computed already."""
    known = loaded.get(run.folder.resolve())
    return known.fit if known else fit_smoothness(run.trace)


def load_smaller(plan: Plan, folder: Path) -> dict[str, Results]:
    """The kept runs of the scales below that of a plan, for its figures."""
    names = [figure.name for figure in plan.figures]
    smaller = [scale for scale in SCALES[: SCALES.index(plan.scale)] if (KEPT / scale).is_dir()]
    return {
        scale: load_kept(make_plan(scale, names), KEPT / scale, folder / scale).results for scale in smaller
    }


def named_runs(plan: Plan, only: Sequence[str]) -> tuple[Planned, ...]:
    """The runs of a plan that these names ask for; all of them where there is no name."""
    names = {run.name for run in plan.runs}
    for name in only:
        if name not in names:
            raise ValueError(f"`only` names no run of this plan: {name!r}.{nearest(name, names)}")
    return tuple(run for run in plan.runs if run.name in only) if only else plan.runs


def cost_table(plan: Plan, only: Sequence[str] = ()) -> str:
    """The runs of a plan with their cost in core-hours, roughly, one line a setting."""
    plan = replace(plan, runs=named_runs(plan, only))
    total = sum(run.cost for run in plan.runs) / 3600
    lines = [f"{len(plan.runs)} run{'s' * (len(plan.runs) != 1)}, about {total:.3g} core-hours in all"]
    for setting in dict.fromkeys(run.setting for run in plan.runs):
        runs = plan.of(setting)
        hours = sum(run.cost for run in runs) / 3600
        lines.append(f"{setting}: {runs[0].recipe.label}, {seed_words(runs)}: {hours:.2g} core-hours")
    return "\n".join(lines)


def kept_claims(names: Container[str]) -> dict[str, list[Claim]]:
    """Those of these claims that were judged on kept runs of the larger scales, the largest scale last."""
    kept = read_json(KEPT_CLAIMS)
    return {
        scale: [Claim(**row) for row in kept[scale] if row["name"] in names]
        for scale in sorted(kept, key=SCALES.index)
    }


def make_plan(scale: str = "laptop", figures: Sequence[str] | None = None, **fields: Any) -> Plan:
    """The runs that ``figures`` (default: all) need at ``scale``; ``fields`` as in :func:`plan_runs`."""
    names = {check_choice("figures", name, tuple(FIGURES)) for name in figures or FIGURES}
    return plan_runs(scale, [figure for name, figure in FIGURES.items() if name in names], **fields)


def draw_all(
    results: Results, *, progress: bool, folder: Path, where: str = "", suffix: str = "", words: str = ""
) -> Drawn:
    """Draw every picture of the plan; ``where``, ``suffix``, ``words`` end its title, name and caption."""
    drawn = Drawn()
    for figure, picture in results.plan.pictures:
        name = f"{picture.name}{suffix}"
        title = f"{picture.title}{where}"
        try:
            png, svg = save(picture.draw(results), folder / "figures" / name)
        except NotPlanned:
            continue
        except (ValueError, OSError) as error:
            line = f"{name}: {error}"
            drawn.failures.append(line)
        else:
            line = f"{name}: {png}"
            files = {path.suffix[1:]: path.relative_to(folder).as_posix() for path in (png, svg)}
            caption = " ".join([picture.caption, *_trained(figure, results), words]).rstrip()
            about = {"figure": figure.name, "name": name, "title": title, "caption": caption}
            drawn.entries.append(about | files)
        if progress:
            print(line, flush=True)
    return drawn


def _trained(figure: PaperFigure, results: Results) -> list[str]:
    """Runs of a figure, a sentence a model, and the settings that are missing."""
    runs = sorted(results.of_figure(figure), key=lambda run: (not run.has_ended, -run.status["step"]))
    models: dict[str, list[TrainedRun]] = {}
    for run in runs:
        models.setdefault(run.recipe.model_words, []).append(run)
    words = []
    for model, (longest, *others) in models.items():
        unended = [length_words(run) for run in others if not run.has_ended]
        lengths = " and ".join(dict.fromkeys([length_words(longest), *unended]))
        words.append(f"{model}, {lengths}, {seed_words([longest, *others])}.")
    missing = missing_words(figure.runs(results.plan.scale), runs)
    return [*words, missing] if missing and runs else words


def draw_kept(asked: Container[str], folder: Path, *, progress: bool) -> Drawn:
    """Draw figures at the paper's size from the runs that come with the package; lost ones are named."""
    drawn = Drawn()
    for scale, own in PAPER_SIZE.items():
        names = [name for name in own if name in asked]
        if not names:
            continue
        with tempfile.TemporaryDirectory() as place:
            kept = load_kept(make_plan(scale, names), KEPT / scale, Path(place))
            results = kept.results
            plan = kept.results.plan
            able = tuple(figure for figure in plan.figures if results.of_figure(figure))
            results.plan = replace(plan, figures=able)
            again = f"Not trained here; `curvestep reproduce --scale {scale}` trains it anew."
            drawn_at_scale = draw_all(
                results, progress=progress, folder=folder, where=" (paper's size, kept runs)",
                suffix=f"_{scale}", words=f"{kept.about} {again}",
            )  # fmt: skip
        drawn.entries.extend(drawn_at_scale.entries)
        drawn.failures.extend([*kept.damaged, *drawn_at_scale.failures])
        without = [figure.name for figure in plan.figures if figure not in able]
        if without:
            drawn.failures.append(f"no run of the scale {scale} is kept for {', '.join(without)}")
    return drawn


def prepare_data(plan: Plan, *, offline: bool, progress: bool) -> tuple[dict[str, str], list[str]]:
    """Fetch what the plan needs, once, before many processes want it; folders for runs, and sources.

    Runs on a stand-in, or at another scale, are kept apart from the real ones.
    """
    recipes = {run.recipe.data: run.recipe for run in plan.runs}
    suffix = f"-{plan.scale}".removesuffix("-laptop")
    places: dict[str, str] = {}
    sources = []
    for name in sorted(recipes, key=lambda name: (name != "ptb", name)):
        data = load_data(recipes[name], offline=offline, progress=progress)
        places[name] = f"{Path(data.name).stem}{suffix}"
        sources.append(data.source)
    return places, sources


def run_all(
    plan: Plan, runs: Path, *, engine: str, workers: int, address: str | None, progress: bool
) -> list[str]:
    """Make every run that has not ended; the failures, a line each."""
    planned: dict[str, Planned] = {}
    jobs: dict[str, Callable[..., RunResult]] = {}
    # The data are in the cache now, or not available: no process need ask the network again.
    how = {"resume": True, "progress": False, "offline": True}
    for run in plan.runs:
        make = run_calibrated if run.calibrated else train
        measured = ("lr", "max_norm") if run.calibrated else ()
        if not has_ended(runs / run.path, run.recipe, apart_from=measured):
            planned[run.name] = run
            jobs[run.name] = partial(make, run.recipe, runs / run.path, **how)
    total = sum(run.cost for run in plan.runs)
    ended = total - sum(run.cost for run in planned.values())
    visible = progress and bool(jobs)
    failures = []
    with Progress("training", total, start=ended, unit="share", interval=SILENCE, shown=visible) as shown:
        watch = watch_runs(planned.values(), runs, ended, shown)
        outcomes = run_jobs(jobs, engine=engine, workers=workers, address=address, watch=watch)
        for count, (name, error, _) in enumerate(outcomes, len(plan.runs) - len(jobs) + 1):
            if error:
                failures.append(f"{name}: {error}")
            ending = result_in(runs / planned[name].path, error).ending
            time_left = shown.time_left(ended + _done(planned.values(), runs))
            shown.print(f"[{count}/{len(plan.runs)}] {name}: {ending} ({time_left} left)")
    return failures


def watch_runs(planned: Collection[Planned], runs: Path, ended: float, shown: Progress) -> Callable[[], None]:
    """A function that shows how far planned runs are, beside the cost of those that have ended before."""

    def watch() -> None:
        words = []
        for run in planned:
            step = last_step(runs / run.path)
            if step > 0 and not has_ended(runs / run.path):
                words.append(f"{run.name} {step}/{steps_of(run.recipe)}")
        shown.update(ended + _done(planned, runs), ", ".join(words) or "starting")

    return watch


def _done(planned: Iterable[Planned], runs: Path) -> float:
    """Cost of what has been done of these runs."""
    done = 0.0
    for run in planned:
        folder = runs / run.path
        share = 1.0 if has_ended(folder) else last_step(folder) / steps_of(run.recipe)
        done += run.cost * min(1.0, share)
    return done
