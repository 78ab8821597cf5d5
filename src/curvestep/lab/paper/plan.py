"""What a figure of the paper consists of, the runs of a plan, and the settings of the paper's legend."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from curvestep._checks import check_choice
from curvestep.lab.paper.claims import Evidence, MissingRuns
from curvestep.lab.recipes import SCALES, LanguageRecipe, Recipe, get_recipe, with_fields
from curvestep.lab.run.folder import CONFIG, DIVERGED, ENDED, FINISHED, STATUS, Run

SEEDS = (0, 1, 2)
SHOWN_SEED = 1  # of the scatter plots


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One run of the plan.

    Args:
        setting: Short name of the setting, the same for all seeds.
        recipe: What to train.
        cost: Rough cost in seconds on one core of a laptop; long runs start first.
        calibrated: Whether ``lr`` and ``max_norm`` are measured before training; those of the recipe are not
            looked at.
        place: Folder for runs on the same data and at the same scale.
    """

    setting: str
    recipe: Recipe
    cost: float
    calibrated: bool = False
    place: str = ""

    @property
    def name(self) -> str:
        """Name of the run."""
        return f"{self.setting}-seed{self.recipe.seed}"

    @property
    def path(self) -> Path:
        """Its folder below that of all runs."""
        return Path(self.place) / self.name


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One image: its file name without suffix, its title, what is seen on it, and how it is drawn."""

    name: str
    title: str
    caption: str
    draw: Callable[[Results, str], Figure]  # takes the title too


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A sentence of the paper, and what the runs say about it; None leaves the sentence out."""

    paper: str
    judge: Callable[[Results], Evidence | None]


@dataclass(frozen=True, kw_only=True)
class PaperFigure:
    """A figure of the paper: its runs, its pictures with captions, its claims.

    Args:
        name: Such as ``fig2``.
        runs: The runs that it needs at a scale. Figures share a run by giving it the same name.
        pictures: What is drawn from them.
        claims: What is judged from them.
        experiment: What it computes without training: into the reproduction's folder, with progress or not.
    """

    name: str
    runs: Callable[[str], Iterable[Planned]]
    pictures: tuple[Picture, ...]
    claims: tuple[Statement, ...] = ()
    experiment: Callable[[Path, bool], None] | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Figures, and every run that one of them needs, the longest first."""

    scale: str
    figures: tuple[PaperFigure, ...]
    runs: tuple[Planned, ...]

    def of(self, setting: str) -> list[Planned]:
        """The runs of one setting, by seed."""
        return sorted((run for run in self.runs if run.setting == setting), key=lambda run: run.recipe.seed)


def plan_runs(
    scale: str,
    figures: Sequence[PaperFigure],
    *,
    language: dict[str, Any] | None = None,
    images: dict[str, Any] | None = None,
) -> Plan:
    """The plan of these figures at ``scale``.

    Args:
        scale: One of ``SCALES``.
        figures: What is wanted.
        language: Fields to change in every language-model run.
        images: Fields to change in every image run.
    """
    check_choice("scale", scale, SCALES)
    runs: dict[str, Planned] = {}
    for figure in figures:
        for run in figure.runs(scale):
            fields = (language if isinstance(run.recipe, LanguageRecipe) else images) or {}
            if run.recipe.probe_every == 0:  # a run that is not to be measured stays so
                fields = {name: value for name, value in fields.items() if name != "probe_every"}
            changed = replace(run, recipe=with_fields(run.recipe, **fields))
            assert runs.setdefault(run.name, changed).recipe == changed.recipe, f"{run.name} is two runs"
    return Plan(
        scale=scale,
        figures=tuple(figures),
        runs=tuple(sorted(runs.values(), key=lambda run: -run.cost)),
    )


class Results:
    """The runs of a plan, each loaded, and its trace fitted, at most once.

    Args:
        plan: What was to be run.
        folder: The reproduction's folder.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.folder = folder
        self._runs: dict[str, Run] = {}
        for planned in plan.runs:
            path = folder / "runs" / planned.path
            if (path / CONFIG).exists() and (path / STATUS).exists():
                self._runs[planned.name] = Run.load(path)

    @property
    def runs(self) -> list[Run]:
        """Every run that is there, in the order of the plan."""
        return list(self._runs.values())

    def of(self, setting: str) -> list[Run]:
        """Runs of a setting by seed: all of them, ended, or an error that names the setting."""
        names = [run.name for run in self.plan.of(setting)]
        runs = [self._runs[name] for name in names if name in self._runs]
        if len(runs) < len(names) or not runs or any(run.status["status"] not in ENDED for run in runs):
            raise MissingRuns(f"{setting} has not been trained")
        return runs

    def shown(self, setting: str) -> Run:
        """The run of a setting that is drawn where there is room for one."""
        chosen = [run for run in self.plan.of(setting) if run.recipe.seed == SHOWN_SEED]
        names = [run.name for run in chosen or self.plan.of(setting)[:1]]
        if not names or names[0] not in self._runs:
            raise MissingRuns(f"{setting} has not been trained")
        return self._runs[names[0]]

    def all_finished(self, setting: str) -> list[Run]:
        """Runs of a setting by seed; an error if one of them diverged."""
        runs = self.of(setting)
        lost = sum(run.status["status"] == DIVERGED for run in runs)
        if lost:
            raise MissingRuns(f"{lost} of {len(runs)} runs with {runs[0].recipe.label} diverged")
        return runs

    def finished(self, setting: str) -> bool:
        """Whether no seed of the setting diverged."""
        return all(run.status["status"] == FINISHED for run in self.of(setting))

    def label(self, setting: str) -> str:
        """The setting in words."""
        return self.of(setting)[0].recipe.label


# Learning rate and threshold of the language model, as in the paper's legend.
LANGUAGE = {
    "lm-lr30clip0.25": (30.0, 0.25),
    "lm-lr10clip0.25": (10.0, 0.25),
    "lm-lr2clip0.25": (2.0, 0.25),
    "lm-lr2": (2.0, math.inf),
    "lm-lr4": (4.0, math.inf),
    "lm-lr10": (10.0, math.inf),
    "lm-lr30": (30.0, math.inf),
}
# Learning rate, threshold and momentum of ResNet20.
IMAGES = {
    "cifar-momentum": (0.1, math.inf, 0.9),
    "cifar-lr1": (1.0, math.inf, 0.0),
    "cifar-lr5clip0.25": (5.0, 0.25, 0.0),
}
BY_HAND = "lm-lr30clip0.25"
_LANGUAGE_STEPS, _IMAGE_STEPS = 200, 120  # at laptop scale


def seeds_of(scale: str) -> tuple[int, ...]:
    """The seeds of every setting at ``scale``."""
    return SEEDS if scale == "laptop" else SEEDS[:1]


def language_runs(scale: str, settings: Iterable[str]) -> list[Planned]:
    """Settings of the legend on the language model; at paper scale on AWD-LSTM."""
    runs = []
    for setting in settings:
        lr, max_norm = LANGUAGE[setting]
        name = "ptb-lstm" if scale == "laptop" else "ptb-awd-lstm"
        recipe = get_recipe(name, scale, lr=lr, max_norm=max_norm)
        if scale == "laptop":
            recipe = with_fields(recipe, steps=_LANGUAGE_STEPS, eval_every=50)
        diverges = max_norm == math.inf and lr >= 10
        cost = 1.0 if diverges else max(0.24 * recipe.steps, 1.0)
        runs += [
            Planned(setting=setting, recipe=replace(recipe, seed=seed), cost=cost) for seed in seeds_of(scale)
        ]
    return runs


def image_runs(scale: str, settings: Iterable[str]) -> list[Planned]:
    """Settings of the legend on ResNet20."""
    runs = []
    for setting in settings:
        lr, max_norm, momentum = IMAGES[setting]
        recipe = get_recipe("cifar-resnet20", scale, lr=lr, max_norm=max_norm, momentum=momentum)
        if scale == "laptop":
            recipe = with_fields(recipe, steps=_IMAGE_STEPS, batch_size=64, eval_every=60)
        cost = max(0.35 * recipe.steps, 1.0)
        runs += [
            Planned(setting=setting, recipe=replace(recipe, seed=seed), cost=cost) for seed in seeds_of(scale)
        ]
    return runs
