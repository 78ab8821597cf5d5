r"""Named training configurations, at four scales from minutes on a laptop to the paper's own.

A recipe is a frozen dataclass: together with its seed it decides a training run, so that a run is a function
of its recipe. Change a field with :func:`get_recipe` or :func:`with_fields`; an unknown field is an error
that lists the valid ones.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar, get_args, get_origin, get_type_hints

from curvestep.checks import check_choice, check_count, nearest
from curvestep.files import dump_json, load_json
from curvestep.trace.run import Fields
from curvestep_reproduction.models import MODELS, models_of, options_of
from curvestep_reproduction.recipe_fields import CHECKS, check_nothing, read_value

Scale = Literal["laptop", "longer", "epoch", "paper"]
SCALES: tuple[str, ...] = get_args(Scale)


@dataclass(frozen=True)
class Rule:
    """A step rule that recipes name: an optimizer of the library, and the fields that it is made from."""

    optimizer: str  # its class, a public name of curvestep
    threshold: str  # field with the gradient norm at which it bends
    others: tuple[str, ...] = ("momentum", "weight_decay")  # further fields that it takes
    bends_below: float = 1.0  # coefficient on the gradient below which it has bent
    words: str = ""  # in labels, before the threshold


RULES = {
    "clipped": Rule("ClippedSGD", "max_norm"),
    "normalized": Rule("NormalizedSGD", "offset", bends_below=0.5, words="normalized, "),
    "adamw": Rule("ClippedAdamW", "max_norm", ("weight_decay",), words="AdamW, "),
}
"""Every step rule by its name in recipes."""
_THRESHOLD_WORDS = {"max_norm": "clip", "offset": "offset"}


@dataclass(frozen=True, kw_only=True)
class Recipe(ABC):
    r"""Fields that every training run has, whatever the task.

    Args:
        name: Name of the recipe, as on the command line.
        scale: ``laptop`` (minutes), ``longer`` (hours on two cores), ``epoch`` (the paper's model for its
            first epoch, hours a run) or ``paper`` (days).
        seed: Decides the start and the batches. The optimizer is left out of it, so that all optimizers see
            the same start and the same batches.
        optimizer: Step rule: ``clipped``, h = min{η, γη/g}, ``normalized``, h = η/(g + β), or ``adamw``.
        model: The model, a key of ``MODELS``.
        lr: Learning rate η.
        max_norm: Gradient norm γ at which clipping starts; ``inf`` is plain SGD.
        offset: Gradient norm β added in the normalized step.
        momentum: Momentum of the optimizer.
        weight_decay: Coefficient of the L2 penalty. The losses in the records are without it.
        lr_drops: Shares of the run after which ``lr`` is divided by ten.
        batch_size: Streams of text, or images, in a batch; over all devices together.
        steps: Steps to take; 0 leaves it to ``epochs``.
        epochs: Passes over the data, if ``steps`` is 0.
        probe_every: Steps between two measurements of smoothness; 0 measures nothing.
        probe_from: Step of the first measurement: to leave out the start of training.
        fractions: Fractions of the step at which the probe takes the gradient again.
        probe_data: Share of the training data on which the probe measures; 0 is the training batch.
        spectral_every: Measurements between two of the Hessian's operator norm; 0 measures none.
        eval_every: Steps between two evaluations on held-out data; 0 evaluates at the end only.
        eval_part: Share of the held-out data to evaluate on before the end, in rows of a split of its own,
            such as ``valid-part``; the end is evaluated on all of it, too.
        eval_size: Held-out tokens or images to evaluate on; 0 takes all.
        log_every: Steps after which the mean loss is fetched from the device and written; an evaluation does
            so too.
        diverged_above: The run counts as diverged once the loss exceeds this multiple of the first one.
        precision: ``32-true``, ``64-true``, or ``bf16-mixed``: training passes in bfloat16 autocast,
            parameters, measurements and evaluations in float32.
    """

    task = ""  # ``language`` or ``images``; a fact of the class, no field
    name: str
    scale: Scale = "laptop"
    seed: int = 0
    optimizer: str = "clipped"
    model: str = ""
    # The model's own options, as its class declares them; given beside the fields, as ``hidden=100``.
    options: Mapping[str, float] = field(default_factory=dict)
    lr: float = 1.0
    max_norm: float = math.inf
    offset: float = 1.0
    momentum: float = 0.0
    weight_decay: float = 0.0
    lr_drops: tuple[float, ...] = ()
    batch_size: int = 20
    steps: int = 0
    epochs: int = 0
    probe_every: int = 5
    probe_from: int = 0
    fractions: tuple[float, ...] = (0.5, 1.0)
    probe_data: float = 0.0
    spectral_every: int = 0
    eval_every: int = 0
    eval_size: int = 0
    eval_part: float = 1.0
    log_every: int = 1
    diverged_above: float = 3.0
    precision: Literal["32-true", "64-true", "bf16-mixed"] = "32-true"

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            if get_origin(hint) is Literal:
                check_choice(name, getattr(self, name), get_args(hint))
        check_choice("optimizer", self.optimizer, tuple(RULES))
        check_choice("model", self.model, models_of(self.task))
        defaults = options_of(MODELS[self.model])
        for name in self.options:
            check_choice("options", name, tuple(defaults))
        object.__setattr__(self, "options", {**defaults, **self.options})
        for name, value in {**vars(self), **self.options}.items():
            CHECKS.get(name, check_nothing)(name, value)
        if not self.fractions:
            raise ValueError("`fractions` must be numbers in (0, 1], got none.")
        if (self.steps == 0) == (self.epochs == 0):
            raise ValueError(
                f"`steps` and `epochs` must not both be zero, nor both be set, got {self.steps} and "
                f"{self.epochs}. Set one of them."
            )

    @property
    @abstractmethod
    def data(self) -> str:
        """The data set."""

    @property
    @abstractmethod
    def model_words(self) -> str:
        """The model, and what its data were cut to: ``LSTM 200/512``."""

    @property
    @abstractmethod
    def problem(self) -> str:
        """The data and the model, which with the seed decide the start and the batches."""

    @property
    def rule(self) -> Rule:
        """The step rule."""
        return RULES[self.optimizer]

    @property
    def threshold(self) -> float:
        """The gradient norm at which the step rule bends; infinity for never."""
        return getattr(self, self.rule.threshold)

    @property
    def sizes(self) -> str:
        """The options that make another model, for names: ``200/512/2``."""
        return "/".join(str(self.options[name]) for name in MODELS[self.model].sizes)

    @property
    def label(self) -> str:
        """The setting in words, for legends: ``lr 30, clip 0.25``."""
        words = [f"lr {self.lr:g}"]
        if self.threshold < math.inf:
            words.append(f"{self.rule.words}{_THRESHOLD_WORDS[self.rule.threshold]} {self.threshold:g}")
        else:
            words.append(f"{self.rule.words}no clip")
        if self.momentum:
            words.append(f"momentum {self.momentum:g}")
        if self.lr_drops:
            words.append("lr drops")
        return ", ".join(words)


@dataclass(frozen=True, kw_only=True)
class LanguageRecipe(Recipe):
    """Training of a language model on a stream of words.

    Args:
        corpus: ``ptb``, ``topics`` (always there), or the path of a text file.
        num_words: Training words to use, the first of the text; 0 takes all.
        vocabulary: Different words to keep, the most frequent of the training text with ``<eos>`` and
            ``<unk>``; the others become ``<unk>``; 0 keeps all of PTB, 10,000 of any other text.
        activation_penalty: Weight of the mean square of the last layer's dropped-out output.
        temporal_penalty: Weight of the mean square of its change from word to word.
        bptt: Words of truncated backpropagation.
        probe_pieces: Measure on so many short pieces of text that represent all of it, side by side in one
            batch, each after its own words, and beside it the gradient norm without dropout; 0 measures on
            ``probe_data``.
        authors_at: Shares of the run at which the authors' own estimate of smoothness is taken, too.
        variable_bptt: Draw the length of each piece as Merity et al. do, and scale ``lr`` by it.
    """

    task = "language"
    model: str = "lstm"
    corpus: str = "ptb"
    num_words: int = 0
    vocabulary: int = 0
    activation_penalty: float = 0.0
    temporal_penalty: float = 0.0
    bptt: int = 35
    probe_pieces: int = 0
    authors_at: tuple[float, ...] = ()
    variable_bptt: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocabulary:
            check_count("vocabulary", self.vocabulary, least=3)
        if self.probe_pieces and self.probe_data:
            raise ValueError(
                f"The probe measures on `probe_pieces` or on `probe_data`, got {self.probe_pieces} and "
                f"{self.probe_data!r}. Set one of them."
            )

    @property
    def data(self) -> str:
        """The corpus."""
        return self.corpus

    @property
    def model_words(self) -> str:
        """The model with its sizes, and what the text was cut to."""
        words = f"{self.model.upper()} {self.sizes.rpartition('/')[0]}"
        if self.vocabulary:
            words += f", {self.vocabulary:,} different words"
        if self.num_words:
            words += f", {self.num_words:,} words of text"
        return words

    @property
    def problem(self) -> str:
        """The corpus, the model and its sizes; of a text only its name, so that folders do not matter."""
        corpus = Path(self.corpus).name
        if self.vocabulary:
            corpus += f"-{self.vocabulary}"
        return f"{corpus}/{self.model}/{self.sizes}"


@dataclass(frozen=True, kw_only=True)
class ImageRecipe(Recipe):
    """Training of ResNet20 on images, with random crops and flips.

    Args:
        images: ``cifar10``, ``cifar10-subset`` (10,000 images) or ``digits`` (always there).
        num_images: Training images to use, the first of each class, as many of each; 0 takes all.
        pooling: Average over squares of so many pixels a side: 2 makes a quarter of the cost.
    """

    task = "images"
    model: str = "resnet20"
    images: Literal["cifar10", "cifar10-subset", "digits"] = "cifar10-subset"
    num_images: int = 0
    pooling: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pooling not in (1, 2, 4):
            raise ValueError(f"`pooling` must be 1, 2 or 4 pixels a side, got {self.pooling!r}.")

    @property
    def data(self) -> str:
        """The images."""
        return self.images

    @property
    def model_words(self) -> str:
        """The network, and what its images were cut to."""
        words = MODELS[self.model].__name__
        if self.num_images:
            words += f", {self.num_images:,} images"
        if self.pooling > 1:
            words += f", {32 // self.pooling} pixels a side"
        return words

    @property
    def problem(self) -> str:
        """The images and the model."""
        images = self.images if self.pooling == 1 else f"{self.images}-{self.pooling}"
        return f"{images}/{self.model}"


_PTB_LSTM = LanguageRecipe(name="ptb-lstm", lr=10.0, max_norm=0.25, steps=300, eval_size=7_000)
# The quantitative comparison of the paper: two layers, 200 and 512, lr 10 with threshold 0.25.
_PTB_LSTM_PAPER = replace(
    _PTB_LSTM,
    scale="paper",
    options={"embedding": 200, "hidden": 512},
    steps=0,
    epochs=1,
    probe_data=0.1,
    eval_size=0,
)
# The same model and text, measured on a hundredth of the text.
_PTB_LSTM_LONGER = replace(
    _PTB_LSTM_PAPER, scale="longer", probe_every=40, probe_data=0.01, fractions=(0.1, 0.5, 1.0),
    eval_every=332,
)  # fmt: skip
# Merity et al. (2018): the public recipe that the paper follows, but for its average of the last iterates.
_AWD_LSTM_PAPER = LanguageRecipe(
    name="ptb-awd-lstm", scale="paper", model="awd-lstm",
    options={
        "embedding": 400, "hidden": 1150, "layers": 3, "dropout": 0.4, "weight_drop": 0.5,
        "dropout_input": 0.4, "dropout_hidden": 0.25, "dropout_embedding": 0.1,
    },
    activation_penalty=2.0, temporal_penalty=1.0, bptt=70, variable_bptt=True,
    lr=30.0, max_norm=0.25, weight_decay=1.2e-6, epochs=500, probe_every=0,
    eval_every=684,  # an epoch of random pieces
)  # fmt: skip
# Its first epoch, measured on five short pieces instead of a tenth of the text.
_AWD_LSTM_EPOCH = replace(
    _AWD_LSTM_PAPER, scale="epoch", epochs=1, probe_every=5, probe_pieces=5,
    fractions=(0.05, 0.15, 0.5, 1.0), eval_every=50, eval_part=0.2,
)  # fmt: skip
_AWD_LSTM = replace(
    _AWD_LSTM_PAPER, scale="laptop", options={**_AWD_LSTM_PAPER.options, "embedding": 128, "hidden": 200},
    bptt=35, epochs=0, steps=300, probe_every=5, eval_every=0, eval_size=7_000,
)  # fmt: skip
_RESNET20 = ImageRecipe(
    name="cifar-resnet20", lr=0.1, momentum=0.9, weight_decay=5e-4, batch_size=128, steps=150,
    diverged_above=20.0,  # batch norm recovers from a high loss
)  # fmt: skip
_RESNET20_PAPER = replace(
    _RESNET20, scale="paper", images="cifar10", steps=0, epochs=200, lr_drops=(0.5, 0.75),
    probe_every=195, probe_data=0.01, fractions=(0.1, 0.5, 1.0), eval_every=390, log_every=10,
    precision="bf16-mixed",
)  # fmt: skip
# Ten epochs of the 10,000 images, measured past the first one.
_RESNET20_LONGER = replace(
    _RESNET20, scale="longer", steps=0, epochs=10, lr_drops=(0.5, 0.75), probe_every=20, probe_from=80,
    probe_data=0.05, fractions=(0.1, 0.5, 1.0), eval_every=78,
)  # fmt: skip

RECIPES: dict[tuple[str, str], Recipe] = {
    (recipe.name, recipe.scale): recipe
    for recipe in (
        _PTB_LSTM, _PTB_LSTM_LONGER, _PTB_LSTM_PAPER, _AWD_LSTM, _AWD_LSTM_EPOCH, _AWD_LSTM_PAPER,
        _RESNET20, _RESNET20_LONGER, _RESNET20_PAPER,
    )
}  # fmt: skip
"""Every recipe by name and scale."""

RecipeT = TypeVar("RecipeT", bound=Recipe)


def get_recipe(name: str, scale: str = "laptop", **overrides: object) -> Recipe:
    """The recipe of this name and scale, with some fields changed.

    Example:
        >>> get_recipe("ptb-lstm", lr=30, max_norm=0.25).label
        'lr 30, clip 0.25'
        >>> get_recipe("ptb-lstm", learning_rate=30)
        Traceback (most recent call last):
        ValueError: Recipe ptb-lstm has no field `learning_rate`. ...
    """
    names = recipe_names()
    if name not in names:
        raise ValueError(f"There is no recipe {name!r}.{nearest(name, names)} Recipes: {', '.join(names)}.")
    check_choice("scale", scale, SCALES)
    if (name, scale) not in RECIPES:
        scales = ", ".join(there for other, there in RECIPES if other == name)
        raise ValueError(f"There is no recipe {name} at `scale` {scale!r}. It has: {scales}.")
    return with_fields(RECIPES[name, scale], **overrides)


def with_fields(recipe: RecipeT, **overrides: object) -> RecipeT:
    """``recipe`` with some fields changed; numbers given as text are read, lists become tuples.

    Setting ``steps`` clears ``epochs`` and the other way round, unless both are given.

    Example:
        >>> with_fields(get_recipe("cifar-resnet20"), max_norm="inf", epochs=2).steps
        0
    """
    hints = get_type_hints(type(recipe))
    chosen = check_choice("model", str(overrides.get("model", recipe.model)), models_of(recipe.task))
    of_model = options_of(MODELS[chosen])
    valid = (*(name for name in hints if name in vars(recipe) and name != "options"), *of_model)
    for name in overrides:
        if name not in valid:
            hint = f"{nearest(name, valid)} Fields: {', '.join(valid)}."
            raise ValueError(f"Recipe {recipe.name} has no field `{name}`.{hint}")
    changes: Fields = {}
    options: Fields = {name: value for name, value in recipe.options.items() if name in of_model}
    for name, value in overrides.items():
        if name in of_model:
            options[name] = read_value(name, value, type(of_model[name]))
        else:
            changes[name] = read_value(name, value, hints[name])
    for given, other in (("steps", "epochs"), ("epochs", "steps")):
        if changes.get(given):
            changes.setdefault(other, 0)
    return replace(recipe, **changes, options=options)


def to_dict(recipe: Recipe) -> Fields:
    """The recipe as plain values, lists for tuples, the model's options beside the fields."""
    values = {"task": recipe.task, **dataclasses.asdict(recipe)}
    options = values.pop("options")
    return load_json(dump_json({**values, **options}))


# Fields that do not decide how a run trains, or, the seed, by chance only.
NOT_SETTINGS = (
    "name", "scale", "seed", "probe_every", "probe_from", "fractions", "probe_data", "eval_every",
    "eval_size", "eval_part", "log_every",
)  # fmt: skip


def in_words(recipe: Recipe) -> Fields:
    """What a page says of a run of this recipe, for :class:`curvestep.trace.run.Run`."""
    return {
        "label": recipe.label,
        "task": f"{recipe.name}, {recipe.scale}, {recipe.problem}, batch {recipe.batch_size}",
        "optimizer": recipe.rule.optimizer,
        "max_norm": recipe.max_norm if recipe.rule.threshold == "max_norm" else math.inf,
        "not_settings": list(NOT_SETTINGS),
    }


def from_dict(values: Fields) -> Recipe:
    """The recipe that :func:`to_dict` wrote.

    Example:
        >>> recipe = get_recipe("ptb-lstm", max_norm=float("inf"))
        >>> from_dict(to_dict(recipe)) == recipe
        True
    """
    values = dict(item for item in values.items() if item not in _RETIRED.items())
    values.pop("figures", None)
    values.pop("about", None)
    task = values.pop("task", None)
    if task not in TASKS:
        raise ValueError(f"`task` must be one of {', '.join(TASKS)}, got {task!r}.")
    return with_fields(TASKS[task](name=str(values.get("name")), steps=1), **values)


# Fields that kept runs have, not in use.
_RETIRED = {"start_from": "", "averaging": "never", "patience": 5, "augmented": True}
TASKS: dict[str, type[Recipe]] = {kind.task: kind for kind in (LanguageRecipe, ImageRecipe)}


def recipe_names() -> tuple[str, ...]:
    """The names of all recipes."""
    return tuple(dict.fromkeys(name for name, _ in RECIPES))
