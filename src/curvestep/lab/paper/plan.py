"""Which runs the figures of the paper need, and on which data."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from curvestep._checks import check_choice
from curvestep.lab.recipes import SCALES, Recipe, get_recipe, with_fields

FIGURES = tuple(f"fig{number}" for number in range(1, 9))
SEEDS = (0, 1, 2)
SHOWN_SEED = 1  # of the scatter plots; seed 0 of the first setting is the longer run of figure 5


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One run of the plan.

    Args:
        setting: Short name of the setting, the same for all seeds.
        recipe: What to train.
        figures: Figures that use it.
        cost: Rough cost in seconds on one core of a laptop; long runs start first.
        calibrated: Whether ``lr`` and ``max_norm`` are measured before training; those of the recipe are not
            looked at.
        place: Folder for runs on the same data and at the same scale.
    """

    setting: str
    recipe: Recipe
    figures: tuple[str, ...]
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
class Plan:
    """All runs, and how many steps of each the comparisons use."""

    scale: str
    runs: tuple[Planned, ...]
    synthetic: bool
    figures: tuple[str, ...]

    @property
    def descent(self) -> tuple[str, str]:
        """Settings of GD and of clipped GD on the two-layer LSTM: figure 8."""
        return DESCENT if self.scale == "laptop" else (_two_layer(DESCENT[0]), _two_layer(DESCENT[1]))

    def of(self, setting: str) -> list[Planned]:
        """The runs of one setting, by seed."""
        return [run for run in self.runs if run.setting == setting]


# Setting: learning rate, threshold, figures. The names are those of the paper's legend.
LANGUAGE = {
    "lm-lr30clip0.25": (30.0, 0.25, ("fig1", "fig2", "fig4", "fig5")),
    "lm-lr10clip0.25": (10.0, 0.25, ("fig4", "fig8")),
    "lm-lr2clip0.25": (2.0, 0.25, ("fig2", "fig4")),
    "lm-lr2": (2.0, math.inf, ("fig2", "fig4", "fig8")),
    "lm-lr4": (4.0, math.inf, ("fig4",)),
    "lm-lr10": (10.0, math.inf, ("fig4",)),
    "lm-lr30": (30.0, math.inf, ("fig4",)),
}
DESCENT = ("lm-lr2", "lm-lr10clip0.25")
# Setting: learning rate, threshold, momentum, figures.
IMAGES = {
    "cifar-momentum": (0.1, math.inf, 0.9, ("fig3", "fig4")),
    "cifar-lr1": (1.0, math.inf, 0.0, ("fig3", "fig4")),
    "cifar-lr5clip0.25": (5.0, 0.25, 0.0, ("fig3", "fig4")),
}
# The small sweep of figure 4 on images: learning rate and threshold by setting, without momentum.
IMAGE_SWEEP = {
    f"cifar-sweep-lr{lr:g}" + (f"clip{max_norm:g}" if max_norm < math.inf else ""): (lr, max_norm)
    for lr in (0.2, 1.0, 5.0)
    for max_norm in (0.25, math.inf)
}
BY_HAND, CALIBRATED = "lm-lr30clip0.25", "lm-calibrated"  # the paper's numbers, and measured ones
SHARES = {"lm-share0.1": 0.1, "lm-share1": 1.0}
CLIPPED = tuple(name for name, (_, norm, _) in LANGUAGE.items() if norm < math.inf)
UNCLIPPED = tuple(name for name, (_, norm, _) in LANGUAGE.items() if norm == math.inf)

_LANGUAGE_STEPS = {"laptop": 200, "paper": 0}
_LONG_STEPS = 400  # the longer run of figure 5 at laptop scale
_IMAGE_STEPS = {"laptop": 120, "paper": 0}
_SWEEP_STEPS = 40  # of the sweep on images at laptop scale
_SWEEP_EPOCHS = 10  # at paper scale


def make_plan(
    scale: str = "laptop",
    figures: tuple[str, ...] | None = None,
    *,
    language: dict[str, object] | None = None,
    images: dict[str, object] | None = None,
) -> Plan:
    """The runs that ``figures`` (default: all) need at ``scale``.

    Args:
        scale: ``laptop``, all in a quarter of an hour on two cores; or ``paper``.
        figures: Such as ``("fig2", "fig8")``.
        language: Fields to change in every language-model run.
        images: Fields to change in every image run.
    """
    check_choice("scale", scale, SCALES)
    chosen = tuple(figures) if figures else FIGURES
    for figure in chosen:
        check_choice("figures", figure, FIGURES)
    fields = language or {}
    runs = [
        *_language(scale, fields),
        *_images(scale, images or {}),
        *_image_sweep(scale, images or {}),
        *_shares(scale, fields),
        *_calibrated(scale, fields),
    ]
    wanted = tuple(run for run in runs if set(run.figures) & set(chosen))
    return Plan(
        scale=scale,
        runs=tuple(sorted(wanted, key=lambda run: -run.cost)),
        synthetic="fig7" in chosen,
        figures=chosen,
    )


def compared_steps(recipe: Recipe) -> int:
    """Steps over which runs of a setting are compared: the longer run counts as far as the others go."""
    return min(recipe.steps, _LANGUAGE_STEPS["laptop"]) if recipe.steps == _LONG_STEPS else recipe.steps


def _language(scale: str, fields: dict[str, object]) -> list[Planned]:
    """The settings of the legend; at paper scale on AWD-LSTM, those of figure 8 on the two-layer LSTM too."""
    runs = []
    for setting, (lr, max_norm, figures) in LANGUAGE.items():
        if scale == "laptop":
            runs += _seeds(setting, scale, "ptb-lstm", lr, max_norm, figures, fields)
            continue
        others = tuple(figure for figure in figures if figure != "fig8")
        runs += _seeds(setting, scale, "ptb-awd-lstm", lr, max_norm, others, fields)
        if setting in DESCENT:
            runs += _seeds(_two_layer(setting), scale, "ptb-lstm", lr, max_norm, ("fig8",), fields)
    return runs


def _two_layer(setting: str) -> str:
    return setting.replace("lm-", "lstm-")


def _seeds(
    setting: str,
    scale: str,
    name: str,
    lr: float,
    max_norm: float,
    figures: tuple[str, ...],
    fields: dict[str, object],
) -> list[Planned]:
    """One setting of the language model, once for each seed."""
    recipe = get_recipe(name, scale, lr=lr, max_norm=max_norm)
    if scale == "laptop":
        recipe = with_fields(recipe, steps=_LANGUAGE_STEPS[scale], eval_every=50)
    recipe = with_fields(recipe, **fields)
    runs = []
    for seed in SEEDS if scale == "laptop" else SEEDS[:1]:
        run = replace(recipe, seed=seed)
        if scale == "laptop" and setting == BY_HAND and seed == 0 and not fields:
            run = with_fields(run, steps=_LONG_STEPS)
        diverges = max_norm == math.inf and lr >= 10
        cost = 1.0 if diverges else max(0.24 * run.steps, 1.0)
        runs.append(Planned(setting=setting, recipe=run, figures=figures, cost=cost))
    return runs


def _images(scale: str, fields: dict[str, object]) -> list[Planned]:
    runs = []
    for setting, (lr, max_norm, momentum, figures) in IMAGES.items():
        recipe = get_recipe("cifar-resnet20", scale, lr=lr, max_norm=max_norm, momentum=momentum)
        if scale == "laptop":
            recipe = with_fields(recipe, steps=_IMAGE_STEPS[scale], batch_size=64, eval_every=60)
        recipe = with_fields(recipe, **fields)
        for seed in SEEDS if scale == "laptop" else SEEDS[:1]:
            run = replace(recipe, seed=seed)
            runs.append(
                Planned(setting=setting, recipe=run, figures=figures, cost=max(0.35 * run.steps, 1.0))
            )
    return runs


def _image_sweep(scale: str, fields: dict[str, object]) -> list[Planned]:
    """Every point of the sweep on images: short, not measured, one seed."""
    laptop = {"steps": _SWEEP_STEPS, "batch_size": 64, "eval_size": 500}
    length = laptop if scale == "laptop" else {"epochs": _SWEEP_EPOCHS}
    short = {"momentum": 0.0, "lr_drops": (), "eval_every": 0, **length, **fields, "probe_every": 0}
    return [
        Planned(
            setting=setting,
            recipe=get_recipe("cifar-resnet20", scale, lr=lr, max_norm=max_norm, seed=SHOWN_SEED, **short),
            figures=("fig4",),
            cost=0.28 * _SWEEP_STEPS,
        )
        for setting, (lr, max_norm) in IMAGE_SWEEP.items()
    ]


def _calibrated(scale: str, fields: dict[str, object]) -> list[Planned]:
    """At laptop scale, the first setting once more, with numbers measured before training."""
    runs = []
    for run in _language(scale, fields):
        if (run.setting, run.recipe.seed) == (BY_HAND, SHOWN_SEED):
            recipe = with_fields(run.recipe, probe_every=2 * run.recipe.probe_every, eval_every=0)
            runs.append(
                Planned(
                    setting=CALIBRATED,
                    recipe=recipe,
                    figures=("fig4",),
                    cost=max(0.2 * recipe.steps, 1.0),
                    calibrated=True,
                )
            )
    return runs


def _shares(scale: str, fields: dict[str, object]) -> list[Planned]:
    """The same run twice, measured on a tenth of its text and on all of it.

    At laptop scale the text is the first 14,000 words: with all of PTB one gradient takes minutes.
    """
    lr, max_norm, _ = LANGUAGE["lm-lr30clip0.25"]
    if scale == "paper":
        recipe = get_recipe("ptb-awd-lstm", scale, lr=lr, max_norm=max_norm, epochs=1, probe_every=60)
    else:
        recipe = get_recipe("ptb-lstm", lr=lr, max_norm=max_norm, num_words=14_000, steps=90, probe_every=10)
    recipe = with_fields(recipe, **fields)
    return [
        Planned(
            setting=setting,
            recipe=replace(recipe, seed=SHOWN_SEED, probe_data=share),
            figures=("fig6",),
            cost=max(recipe.steps * (0.2 + share), 1.0),
        )
        for setting, share in SHARES.items()
    ]
