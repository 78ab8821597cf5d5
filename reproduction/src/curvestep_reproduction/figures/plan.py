"""Parts of a figure of the paper, the runs of a plan, and what they left.

Runs of the larger scales come with the package: nothing is trained to draw a figure from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path

from matplotlib.figure import Figure

from curvestep.checks import check_choice
from curvestep.trace.run import CONFIG, DIVERGED, STATUS, Fields
from curvestep_reproduction.archives import KEPT, commit_of, runs_below, unpack_all
from curvestep_reproduction.claims.claims import MissingRuns, NotPlanned
from curvestep_reproduction.cost import cost_of
from curvestep_reproduction.recipes import SCALES, Recipe, with_fields
from curvestep_reproduction.training.run_folder import TrainedRun

KEPT_CLAIMS = KEPT / "claims.json"  # of the larger scales, written by reproduction/pages.py
# Figures for which a scale has the paper's own model; for figure 4 one has (a) and (b), another (c) and (d).
PAPER_SIZE = {
    "epoch": ("fig1", "fig2", "fig4", "fig5", "fig6"),
    "paper": ("fig3", "fig4"),
    "longer": ("fig8",),
}


@dataclass(frozen=True)
class Planned:
    """One run of the plan."""

    setting: str  # short name of the setting, the same for all seeds
    recipe: Recipe  # what to train
    _: KW_ONLY
    # Whether ``lr`` and ``max_norm`` are measured before training; those of the recipe are not looked at.
    calibrated: bool = False
    place: str = ""  # folder for runs on the same data and at the same scale

    @property
    def name(self) -> str:
        """Name of the run."""
        return f"{self.setting}-seed{self.recipe.seed}"

    @property
    def cost(self) -> float:
        """CPU seconds, roughly; long runs start first."""
        return cost_of(self.recipe) * (2 if self.calibrated else 1)

    @property
    def path(self) -> Path:
        """Its folder below that of all runs."""
        return Path(self.place) / self.name


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One image: its file name without suffix, its heading, what is seen on it, and how it is drawn."""

    name: str
    title: str  # above it on a page; what is found stands in the image
    caption: str
    draw: Callable[[Results], Figure]


@dataclass(frozen=True, kw_only=True)
class PaperFigure(Picture):
    """A figure of the paper, such as ``fig2``: a picture with its runs."""

    # The runs that it needs at a scale. Figures share a run by giving it the same name.
    runs: Callable[[str], Iterable[Planned]]
    beside: tuple[Picture, ...] = ()  # further pictures of the same
    # What it computes without training: into the reproduction's folder, with progress or not.
    experiment: Callable[[Path, bool], None] = lambda folder, progress: None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Figures, and every run that one of them needs: the longest first, and seed by seed."""

    scale: str
    figures: tuple[PaperFigure, ...]
    runs: tuple[Planned, ...]

    @property
    def pictures(self) -> list[tuple[PaperFigure, Picture]]:
        """Every picture, with its figure."""
        return [(figure, picture) for figure in self.figures for picture in (figure, *figure.beside)]

    def of(self, setting: str) -> list[Planned]:
        """The runs of one setting, by seed."""
        return sorted((run for run in self.runs if run.setting == setting), key=lambda run: run.recipe.seed)


def plan_runs(scale: str, figures: Sequence[PaperFigure], **changes: Fields) -> Plan:
    """The plan of these figures, with fields to change in every run of a task, ``language`` or ``images``."""
    check_choice("scale", scale, SCALES)
    runs: dict[str, Planned] = {}
    for figure in figures:
        for run in figure.runs(scale):
            fields = dict(changes.get(run.recipe.task, {}))
            if run.recipe.probe_every == 0:  # a run that is not to be measured stays so
                fields.pop("probe_every", None)
            changed = replace(run, recipe=with_fields(run.recipe, **fields))
            assert runs.setdefault(run.name, changed).recipe == changed.recipe, f"{run.name} is two runs"
    return Plan(
        scale=scale,
        figures=tuple(figures),
        runs=tuple(sorted(runs.values(), key=lambda run: (-run.cost, run.recipe.seed))),
    )


class Results:
    """The runs of a plan in the reproduction's folder, each loaded, and its trace fitted, at most once."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.folder = folder
        self.at: dict[str, Results] = {plan.scale: self}  # those of other scales that are loaded, too
        self._runs: dict[str, TrainedRun] = {}
        for planned in plan.runs:
            path = folder / "runs" / planned.path
            if (path / CONFIG).exists() and (path / STATUS).exists():
                self._runs[planned.name] = TrainedRun.load(path)

    @property
    def runs(self) -> list[TrainedRun]:
        """Every run that is there, in the order of the plan."""
        return list(self._runs.values())

    def of_figure(self, figure: PaperFigure) -> list[TrainedRun]:
        """The runs that are there for a figure."""
        return [self._runs[run.name] for run in figure.runs(self.plan.scale) if run.name in self._runs]

    def nearest(self) -> list[Results]:
        """Results of the smaller scales that are loaded, the nearest first."""
        smaller = SCALES[: SCALES.index(self.plan.scale)]
        return [self.at[scale] for scale in reversed(smaller) if scale in self.at]

    def of(self, setting: str) -> list[TrainedRun]:
        """Runs of a setting by seed: all of them, ended, or an error that names the setting."""
        self.require(setting)
        return [self._runs[run.name] for run in self.plan.of(setting)]

    def require(self, *settings: str) -> None:
        """An error unless every planned run of these settings has ended."""
        missing = []
        for setting in settings:
            planned = self.plan.of(setting)
            if not planned:
                raise NotPlanned(f"the plan has no run of {setting}")
            missing += [run for run in planned if not self._has_ended(run)]
        if missing:
            raise MissingRuns(f"not ended: {', '.join(run.name for run in missing)}", missing)

    def _has_ended(self, planned: Planned) -> bool:
        return planned.name in self._runs and self._runs[planned.name].has_ended

    def settings_with_runs(self, settings: Iterable[str]) -> list[str]:
        """Those of the settings that have a run, to be drawn; an error if none has."""
        asked = dict.fromkeys(settings)
        planned = [run for run in self.plan.runs if run.setting in asked]
        there = {run.setting for run in planned if run.name in self._runs}
        if not planned:
            raise NotPlanned(f"the plan has no run of {', '.join(asked)}")
        if not there:
            raise MissingRuns(f"there is no run of {', '.join(asked)}")
        return [setting for setting in asked if setting in there]

    def runs_to_draw(self, setting: str) -> list[TrainedRun]:
        """Runs of a setting by seed, as many as there are, to be drawn; an error if there is none."""
        self.settings_with_runs([setting])
        return [self._runs[run.name] for run in self.plan.of(setting) if run.name in self._runs]

    def paired(self, one: str, other: str) -> tuple[list[TrainedRun], list[TrainedRun]]:
        """Finished runs of two settings, with the seeds that both have."""
        self.require(one, other)
        left = self.all_finished(one)
        right = self.all_finished(other)
        seeds = {run.recipe.seed for run in left} & {run.recipe.seed for run in right}
        return (
            [run for run in left if run.recipe.seed in seeds],
            [run for run in right if run.recipe.seed in seeds],
        )

    def all_finished(self, setting: str) -> list[TrainedRun]:
        """Runs of a setting by seed; an error if one of them diverged."""
        runs = self.of(setting)
        lost = sum(run.status["status"] == DIVERGED for run in runs)
        if lost:
            raise MissingRuns(f"{lost} of {len(runs)} runs with {runs[0].recipe.label} diverged")
        return runs

    def label(self, setting: str) -> str:
        """The setting in words."""
        return self.of(setting)[0].recipe.label


@dataclass(frozen=True, kw_only=True)
class KeptRuns:
    """The kept runs of a plan."""

    results: Results  # those that can be read, with the whole plan
    damaged: tuple[str, ...]  # a line for each archive or run that cannot be read
    commits: Mapping[str, str]  # the commit that made each run, by the run's name

    @property
    def about(self) -> str:
        """How many runs there are, which commit made them, and what they cost, in a sentence."""
        runs = self.results.runs
        if not runs:
            return "No run is kept yet."
        hours = sum(run.status["seconds"] for run in runs) / 3600
        commits = ", ".join(sorted({self.commits[run.folder.name] for run in runs}))
        planned = len(self.results.plan.runs)
        return f"{len(runs)} of {planned} runs, made by {commits} in {hours:.1f} hours of one core."


def load_kept(plan: Plan, source: Path, folder: Path) -> KeptRuns:
    """Unpack the archives in ``source`` into ``folder`` and read the runs of the plan; the lost are named."""
    runs = folder / "runs"
    damaged = tuple(unpack_all(source, runs))
    places: dict[str, str] = {}
    commits: dict[str, str] = {}
    for path in runs_below(runs):
        places[path.name] = str(path.parent.relative_to(runs))
        commits[path.name] = commit_of(path)
    placed = tuple(replace(run, place=places.get(run.name, "")) for run in plan.runs)
    results = Results(replace(plan, runs=placed), folder)
    return KeptRuns(results=results, damaged=damaged, commits=commits)
