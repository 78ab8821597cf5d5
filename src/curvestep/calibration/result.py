"""Result of a calibration: learning rate, threshold, the trials it was read from; its file."""

from __future__ import annotations

import math
import warnings as python_warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from curvestep.calibration import calibration_words as words
from curvestep.calibration.ladder import Trial
from curvestep.calibration.lr_schedules import is_below_peak, set_peak
from curvestep.files import dump_json, load_json, write_atomically
from curvestep.notes import Note
from curvestep.optimizer_family import Family, family_of, momenta, threshold_of
from curvestep.report.markup import html_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CALIBRATION = "calibration.json"


@dataclass(frozen=True, kw_only=True, repr=False)
class Calibration:
    """Learning rate and threshold for an optimizer, and the trials that they were read from.

    Args:
        optimizer: The class, with its ``family`` and ``momentum``.
        lr: Learning rate for ``schedule``, the peak of ``"warmup-decay"``; the largest one if groups differ.
        max_norm: Gradient norm at which the trials clipped, and training should.
        threshold: What the optimizer calls it: of NormalizedSGD ``offset``.
        confidence: ``"high"``, ``"medium"``, or ``"cannot tell"``: ``lr`` is then only a safe value.
        trials: Each with ``lr``, ``num_steps``, ``max_norm``, ``gain`` and ``error``, in their order.
        loss: Loss before any trial; ``grad_norm`` likewise.
        num_gradients: Gradients computed; ``seconds`` is the wall time.
        warnings: What to know before relying on the numbers, each with its ``kind``.
        clips_outside: Whether training clips outside of the optimizer: ``apply`` then sets no threshold.
    """

    optimizer: str
    family: Family
    momentum: float
    lr: float
    max_norm: float
    schedule: str
    confidence: str
    trials: tuple[Trial, ...]
    loss: float
    grad_norm: float
    num_gradients: int
    seconds: float = field(compare=False)
    warnings: tuple[Note, ...] = ()
    clips_outside: bool = field(default=False, compare=False)
    threshold: str = "max_norm"

    @property
    def lengths(self) -> list[int]:
        """Steps of the trials, ascending."""
        return sorted({trial.num_steps for trial in self.trials})

    def trials_of(self, num_steps: int) -> tuple[Trial, ...]:
        """Trials of one length, ascending in ``lr``, without those that tried a threshold in vain."""
        rates = dict[float, Trial]()
        for trial in self.trials:
            if trial.num_steps == num_steps and trial.max_norm >= self.max_norm:
                rates[trial.lr] = trial
        return tuple(rates[lr] for lr in sorted(rates))

    @property
    def last_trials(self) -> tuple[Trial, ...]:
        """The trials that ``lr`` was read from: the longest, ascending in ``lr``."""
        return self.trials_of(self.lengths[-1])

    def __str__(self) -> str:
        return "\n".join(words.lines(self))

    def __repr__(self) -> str:
        return f"<Calibration of {words.headline(self)}>"

    def details(self) -> str:
        """Everything: each trial, every warning in full."""
        return "\n".join(words.details(self))

    def _repr_html_(self) -> str:
        rows = [(f"{trial.lr:.3g}", f"{trial.gain:.4g}", f"{trial.error:.2g}") for trial in self.last_trials]
        notes = (words.trust(self), *map(str, self.warnings))
        return html_table(words.headline(self), [("lr", "gain", "standard error"), *rows], notes)

    def plot(self, *, title: str = "") -> Figure:
        """Gain of each trial against its learning rate, and the choice; needs matplotlib."""
        from curvestep.report.results import calibration, draw_charts

        return draw_charts([calibration(self)], title=title, note=words.headline(self))

    def doubted(self, kind: str) -> Calibration:
        """The same with one more warning, whose sentence is known by its kind, and the trust that is left."""
        if any(note.kind == kind for note in self.warnings):
            return self
        notes = (*self.warnings, words.noted(kind))
        return replace(self, warnings=notes, confidence=words.confidence(notes))

    def apply(self, optimizer: Optimizer, *others: Any) -> None:
        """Set the learning rates of optimizers and their schedulers, and a threshold that has none.

        Groups keep their ratios, schedules their shape and place, and a finite ``max_norm`` is yours and
        stays.

        Args:
            optimizer: The one that trains, or the first of several.
            others: The other optimizers, and all schedulers.

        Raises:
            TypeError: The first argument is no torch optimizer.
            ValueError: The optimizers are of another kind than those calibrated, or a scheduler is missing.
        """
        if not isinstance(optimizer, Optimizer):
            name = type(optimizer).__name__
            raise TypeError(f"`optimizer` must be a torch optimizer, got a {name}. Schedulers come after it.")
        optimizers = [optimizer, *(other for other in others if isinstance(other, Optimizer))]
        schedulers = [other for other in others if not isinstance(other, Optimizer)]
        own, given = self._kind(), _kind_of(optimizers)
        if own != given:
            raise ValueError(
                f"This was measured for {own}, got {given}. Calibrate with `optimizer=` the one that trains."
            )
        set_peak(optimizers, schedulers, self.lr)
        if self.schedule == "constant" and any(map(is_below_peak, optimizers)):
            python_warnings.warn(words.other_schedule(self), stacklevel=2)
        waits = [type(one).__name__ for one in schedulers if isinstance(one, ReduceLROnPlateau)]
        if self.schedule != "constant" and waits:
            python_warnings.warn(words.waits_for_plateau(waits[0]), stacklevel=2)
        if math.isfinite(self.max_norm) and not self.clips_outside:
            for one in optimizers:
                self._set_threshold(one)

    def _set_threshold(self, optimizer: Optimizer) -> None:
        name, groups = self.threshold, optimizer.param_groups
        own = [group[name] for group in groups if name in group]  # numbers, or rules
        scope = optimizer.defaults.get("norm_scope", "global")
        if own == [math.inf] * len(groups) and scope == "global":
            for group in groups:
                group[name] = self.max_norm
        elif own != [self.max_norm] * len(groups):
            python_warnings.warn(words.other_threshold(self, type(optimizer).__name__, own), stacklevel=3)

    def _kind(self) -> str:
        if " + " in self.optimizer:
            return self.optimizer
        return _kind(self.family, self.optimizer, self.threshold, [self.momentum])


def _kind_of(optimizers: Sequence[Optimizer]) -> str:
    if len(optimizers) > 1:
        return " + ".join(type(optimizer).__name__ for optimizer in optimizers)
    (one,) = optimizers
    return _kind(family_of(one), type(one).__name__, threshold_of(one), momenta(one))


def _kind(family: Family, name: str, threshold: str, momenta: list[float]) -> str:
    """What a learning rate is for: Adam's serves all of them, SGD's all of the same momentum."""
    if threshold != "max_norm":  # a rule of its own, and an lr of another meaning
        return name
    sgd = f"SGD with momentum {' and '.join(f'{momentum:g}' for momentum in momenta)}"
    return {Family.ADAM: "Adam", Family.SGD: sgd, Family.MOMENTUM: sgd}.get(family, name)


def write_calibration(folder: str | Path, found: Calibration) -> Path:
    """Keep ``found`` in the folder of a run, made if it is not there; the file."""
    path = Path(folder) / CALIBRATION
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, dump_json(found, indent=2) + "\n")
    return path


def read_calibration(folder: str | Path) -> Calibration | None:
    """The calibration that the folder of a run keeps; None if its numbers were given by hand."""
    path = Path(folder) / CALIBRATION
    if not path.exists():
        return None
    try:
        values = load_json(path.read_text(encoding="utf-8"))
        if values["family"] == "normalized":  # of an older version
            values["threshold"] = "offset"
        if "arms" in values:  # of an older version
            values["trials"] = values.pop("arms")
        family = Family(values.pop("family"))
        trials = tuple(Trial(**trial) for trial in values.pop("trials"))
        notes = tuple(Note(**note) for note in values.pop("warnings"))
        return Calibration(**values, family=family, trials=trials, warnings=notes)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not a calibration of this version: {error}") from None
