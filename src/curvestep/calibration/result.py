"""Result of a calibration: learning rate, threshold, the trials it was read from; its file."""

from __future__ import annotations

import math
import warnings as python_warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from curvestep._files import dump_json, load_json, write_atomically
from curvestep.calibration import calibration_words as words
from curvestep.calibration.choice import Arm, longest
from curvestep.calibration.method import momenta, threshold_name
from curvestep.display.markup import html_table
from curvestep.lr_schedules import flattened, peak_lr, rescale
from curvestep.notes import Note
from curvestep.optimizer_family import Family, family_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CALIBRATION = "calibration.json"


@dataclass(frozen=True, kw_only=True, repr=False)
class Calibration:
    r"""Learning rate and threshold, and the trials that they were read from.

    Args:
        optimizer: The optimizer they are for.
        family: How it turns gradients into steps.
        momentum: The momentum that they are for.
        lr: Learning rate for ``schedule``; the largest one if groups differ.
        max_norm: Gradient norm at which the trials clipped, and training should; for NormalizedSGD its
            ``offset``. Infinite if nothing is clipped.
        schedule: ``"constant"``, or ``"warmup-decay"``, of which ``lr`` is the peak.
        confidence: ``"high"``, ``"medium"``, or ``"cannot tell"``: ``lr`` is then only a safe value.
        arms: Every trial: ``lr``, ``num_steps``, ``gain``, ``error``; those of a search ascending in ``lr``.
        loss: Loss at the start.
        grad_norm: Gradient norm at the start.
        num_gradients: Gradients computed.
        seconds: Time taken.
        warnings: What to know before relying on the numbers, each with its ``kind``.
    """

    optimizer: str
    family: Family
    momentum: float
    lr: float
    max_norm: float
    schedule: str
    confidence: str
    arms: tuple[Arm, ...]
    loss: float
    grad_norm: float
    num_gradients: int
    seconds: float = field(compare=False)
    warnings: tuple[Note, ...] = ()

    @property
    def offset(self) -> float:
        """The ``offset`` of NormalizedSGD: ``max_norm`` by its other name."""
        return self.max_norm

    @property
    def last_arms(self) -> tuple[Arm, ...]:
        """The trials that ``lr`` was read from: the longest, ascending in ``lr``."""
        return tuple(longest(self.arms))

    def __str__(self) -> str:
        return "\n".join(words.lines(self))

    def __repr__(self) -> str:
        return f"<Calibration of {words.headline(self)}>"

    def details(self) -> str:
        """Everything: each trial, every warning in full."""
        return "\n".join(words.details(self))

    def _repr_html_(self) -> str:
        rows = [(f"{arm.lr:.3g}", f"{arm.gain:.4g}", f"{arm.error:.2g}") for arm in self.last_arms]
        notes = (words.trust(self), *map(str, self.warnings))
        return html_table(words.headline(self), [("lr", "gain", "standard error"), *rows], notes)

    def plot(self, *, title: str = "") -> Figure:
        """Gain of each trial against its learning rate, and the choice; needs matplotlib."""
        from curvestep.display.drawing import figure_of
        from curvestep.display.results import calibration

        return figure_of(calibration(self), title=title, note=words.headline(self))

    def apply(self, optimizer: Optimizer, *schedulers: Any) -> None:
        """Set the learning rate of an optimizer and of its schedules, and a threshold where it has none.

        The largest peak of its groups becomes ``lr``; groups keep their ratios and schedules their shape and
        place. An infinite ``max_norm`` of an optimizer that clips becomes the one found; a finite one is
        yours and stays.

        Args:
            optimizer: Of the kind that was calibrated for.
            schedulers: Every scheduler of the optimizer.

        Raises:
            ValueError: the optimizer is another one, or has a scheduler that was not given.

        Example:
            >>> import torch
            >>> from curvestep import ClippedAdamW, calibrate
            >>> model = torch.nn.Linear(2, 1, bias=False)
            >>> opt = ClippedAdamW(model.parameters(), lr=1.0, max_norm=0.5)
            >>> warmup = torch.optim.lr_scheduler.LinearLR(opt, 0.5, total_iters=10)
            >>> batches = [torch.randn(8, 2) for _ in range(24)]
            >>> cal = calibrate(model, lambda x: (model(x) - 1).square().mean(), batches, optimizer=opt)
            >>> cal.apply(opt, warmup)
            >>> opt.param_groups[0]["initial_lr"] == cal.lr, opt.param_groups[0]["max_norm"]
            (True, 0.5)
        """
        self._check(optimizer)
        every = flattened(schedulers)
        for scheduler in every:
            if scheduler.optimizer is not optimizer:
                raise ValueError(f"The {type(scheduler).__name__} belongs to another optimizer.")
        if not every and any("initial_lr" in group for group in optimizer.param_groups):
            raise ValueError(
                "`optimizer` has a scheduler, which would set its own lr again. Give it too: "
                "`apply(optimizer, scheduler)`."
            )
        rescale(optimizer, every, self.lr / peak_lr(optimizer, every))
        self._set_threshold(optimizer)

    def _check(self, optimizer: Optimizer) -> None:
        own = _kind(self.family, self.optimizer, [self.momentum])
        given = _kind(family_of(optimizer), type(optimizer).__name__, momenta(optimizer))
        if own != given:
            raise ValueError(
                f"This was measured for {own}, got {given}. Calibrate with `optimizer=` the one that trains."
            )

    def _set_threshold(self, optimizer: Optimizer) -> None:
        if math.isinf(self.max_norm):
            return
        name, groups = threshold_name(optimizer), optimizer.param_groups
        own = [group[name] for group in groups if name in group]  # numbers, or rules
        scope = optimizer.defaults.get("norm_scope", "global")
        if own == [math.inf] * len(groups) and scope == "global":
            for group in groups:
                group[name] = self.max_norm
        elif own != [self.max_norm] * len(groups):
            python_warnings.warn(words.other_threshold(self, type(optimizer).__name__, own), stacklevel=3)


def _kind(family: Family, name: str, momenta: list[float]) -> str:
    """What a learning rate is for: Adam's serves all of them, SGD's all of the same momentum."""
    if family is Family.ADAM:
        return "Adam"
    if family in (Family.SGD, Family.MOMENTUM):
        return f"SGD with momentum {' and '.join(f'{momentum:g}' for momentum in momenta)}"
    return name


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
        family = Family(values.pop("family"))
        arms = tuple(Arm(**arm) for arm in values.pop("arms"))
        notes = tuple(Note(**note) for note in values.pop("warnings"))
        return Calibration(**values, family=family, arms=arms, warnings=notes)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not a calibration of this version: {error}") from None
