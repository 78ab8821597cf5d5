"""The sentences of a calibration, in one place: what was found, how far to trust it, what to know."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch.utils.data import Dataset, IterableDataset

from curvestep.calibration.ladder import APART, FIRST_STEPS, Rung
from curvestep.calibration.loaders import Batch
from curvestep.calibration.lr_schedules import has_scheduler, is_below_peak
from curvestep.calibration.method import Method
from curvestep.notes import Note
from curvestep.optimizer_family import Family
from curvestep.smoothness.observer import differs_in_eval, tensors_in
from curvestep.smoothness.oracle import BatchReplay
from curvestep.tensors.vectors import precision

if TYPE_CHECKING:
    from curvestep.calibration.result import Calibration

LEAST_BATCHES = 24  # fewer are named
JUDGED = (Family.ADAM, Family.MOMENTUM, Family.SGD)  # of Muon a judged answer was far too large
WHEN = {"constant": "at a constant rate: lr", "warmup-decay": "with warm-up and decay: peak lr"}
SAYS_NOTHING = {"iterator"}  # of the answer
DOUBTS = {
    "unknown": "No trial surely lowered the loss of other batches. Is the model trained, or the batch tiny?",
    "noise": "Noise hides the gains of the trials. Use larger batches or a larger `budget`.",
    "edge": "The best rates lie at an end of those tried, {ends}. Try beyond it, or give a larger `budget`.",
    "flat": "Rates a factor of four from lr gain nearly as much, so the trials say little. Try them too.",
    "one-length": "All trials have {length} steps. A larger `budget` would show whether longer ones agree.",
    "lengths": "Trials of {below} steps say lr {short:.2g}, trials of {length} steps say {long:.2g}. "
    "A larger `budget` adds longer ones.",
}


SCHEDULE_DOUBTS = {
    "scheduler-left-out": "A scheduler is attached, and the trials kept lr constant. "
    'Give schedule="warmup-decay".',
    "schedule-left-out": "`num_steps` is given without `schedule`, so the trials kept lr constant. "
    'If lr will be decayed, give schedule="warmup-decay".',
    "no-warmup": "The run has no warm-up, and the trials had one. Warm up over a tenth of the steps.",
}


def confidence(warnings: Iterable[Note]) -> str:
    """How far to trust the answer, by what was noted of these trials."""
    kinds = {note.kind for note in warnings} - SAYS_NOTHING
    if "unknown" in kinds:
        return "cannot tell"
    return "medium" if kinds else "high"


def headline(found: Calibration) -> str:
    """The answer."""
    momentum = f", momentum {found.momentum:g}," if found.family.is_descent else ""
    what = f"{found.optimizer}{momentum} {WHEN[found.schedule]} {found.lr:.3g}"
    if math.isinf(found.max_norm):
        return what
    return f"{what}, {found.threshold} {found.max_norm:.3g}"


def trust(found: Calibration) -> str:
    """How far to trust it, in a sentence about these trials."""
    if found.confidence == "cannot tell":
        return "cannot tell: no trial surely lowered the loss, so lr is only a safe value"
    if found.confidence == "high":
        short, long = found.lengths[-2:]
        return f"high: trials of {short} and {long} steps agree, and rates {APART:g} times away gain less"
    return "medium: see the warning"


def choice(found: Calibration) -> str:
    """How lr was read from the trials."""
    if found.confidence == "cannot tell":
        return "half of the lowest lr tried"
    if len(found.lengths) == 1:
        return "the middle of the rates with nearly the best gain"
    return "the middle of the rates that gain nearly most beyond the shorter trials, lower for a longer run"


def lines(found: Calibration) -> list[str]:
    """The answer in at most eight lines."""
    trials = found.last_trials
    pairs = [(f"{trial.lr:.2g}", _gain(trial.gain)) for trial in trials]
    widths = [max(map(len, pair)) for pair in pairs]
    rates, gains = ("  ".join(map(str.rjust, row, widths)) for row in zip(*pairs, strict=True))
    doubtful = [note for note in found.warnings if note.kind not in SAYS_NOTHING]
    ordered = [*doubtful, *(note for note in found.warnings if note.kind in SAYS_NOTHING)]
    others = len(ordered) - 1
    more = f" (and {others} more)" if others > 0 else ""
    cost = f"{found.num_gradients} gradients. Model and optimizer are unchanged."
    return [
        headline(found),
        f"  tried lr  {rates}",
        f"  loss fell {gains}   on other batches, in {trials[0].num_steps} steps",
        f"  choice    {choice(found)}",
        f"  trust     {trust(found)}",
        f"  to check  if you can afford two more runs, try lr {found.lr / 2:.2g} and {found.lr * 2:.2g}",
        *(f"  warning   {first}{more}" for first in ordered[:1]),
        f"{cost} More: print(cal.details()), cal.plot()",
    ]


def details(found: Calibration) -> list[str]:
    """Every trial and every warning."""
    return [
        headline(found),
        f"  start     loss {found.loss:.4g}, gradient norm {found.grad_norm:.3g}",
        *(f"  trial     lr {trial.lr:<9.3g} {trial.num_steps} steps: the loss fell by {_gain(trial.gain)} "
          f"(standard error {trial.error:.2g})" for trial in found.trials),
        f"  trust     {trust(found)}",
        *(f"  warning   {note}" for note in found.warnings),
        f"{found.num_gradients} gradients, {found.seconds:.1f} s.",
    ]  # fmt: skip


def _gain(gain: float) -> str:
    return f"{gain:.3g}" if math.isfinite(gain) else "broke"


def before(name: str, usual: int, most: int) -> str:
    """The coming trials, and their cost."""
    more = f", up to {most} if the answer is doubtful" if most > usual else ""
    return f"calibrate {name}: trials from {FIRST_STEPS} steps on, about {usual} gradients{more}"


def other_threshold(found: Calibration, name: str, own: Iterable[object]) -> str:
    """That an optimizer clips otherwise than the trials did."""
    tried = f"lr {found.lr:.3g} was tried with {found.threshold} {found.max_norm:.3g}"
    given = " and ".join(sorted(set(map(str, own))))
    if given:
        return f"{tried}, and {name} keeps its own, {given}. Calibrate with `optimizer=` the one that trains."
    if found.family.is_descent:  # of these trials with the threshold gained more than others without it
        return f"{tried}, and {name} does not clip. Add `curvestep.clip(optimizer, cal.max_norm)`."
    return f"{tried}, and {name} does not clip. Calibrate with max_norm=math.inf for a run without clipping."


def other_schedule(found: Calibration) -> str:
    """That a constant rate is given to a schedule."""
    what = f"lr {found.lr:.3g} is for a constant rate, and this schedule varies it"
    return f'{what}. Calibrate with schedule="warmup-decay".'


def waits_for_plateau(name: str) -> str:
    """That a scheduler waits for the loss to stop falling."""
    return (
        f"{name} lowers lr when progress stops, and the trials followed a warm-up and a decay. Calibrate "
        'with schedule="constant".'
    )


def of_rungs(rungs: Sequence[Rung], doubts: Iterable[str]) -> list[Note]:
    """Doubts that the trials leave, by their kinds."""
    last = rungs[-1]
    below = rungs[-2] if len(rungs) > 1 else last
    facts = {
        "ends": f"{last.trials[0].lr:.2g} to {last.trials[-1].lr:.2g}",
        "length": last.num_steps,
        "below": below.num_steps,
        "short": below.answer,
        "long": last.answer,
    }
    return [Note(kind, DOUBTS[kind].format(**facts)) for kind in doubts]


def of_schedule(method: Method, schedule: str | None, num_steps: int | None) -> list[Note]:
    """What an attached scheduler and ``num_steps`` say of the schedule that was asked for."""
    scheduled = [optimizer for optimizer in method.optimizers if has_scheduler(optimizer)]
    asks_warmup = schedule == "warmup-decay"
    found = {
        "scheduler-left-out": schedule is None and len(scheduled) > 0,
        "schedule-left-out": schedule is None and not scheduled and num_steps is not None,
        "no-warmup": asks_warmup and any(not is_below_peak(one) for one in scheduled),
    }
    return [noted(kind) for kind, holds in found.items() if holds]


def noted(kind: str) -> Note:
    """A warning about the schedule."""
    return Note(kind, SCHEDULE_DOUBTS[kind])


def of_start(
    passes: BatchReplay,
    method: Method,
    loss: float,
    grad_norm: float,
    num_idle: int,
    batches: Iterable[Batch],
    known: Sequence[Batch],
) -> list[Note]:
    """Oddities of what was given: model, optimizer, loss, of which tensors may be idle, and batches."""
    still = sum(differs_in_eval(m) and not m.training for m in passes.model.modules())
    untrained = passes.num_outside + num_idle
    where = "the optimizer does not train" if num_idle else "are not in `model`"
    is_data_set = isinstance(batches, Dataset) and not isinstance(batches, IterableDataset)
    has_stepped = any(any(map(bool, one.state.values())) for one in method.optimizers)
    found = (
        (method.family not in JUDGED or method.threshold != "max_norm", "less-tested",
         f"{method.name} is less tested than Adam and SGD: try half of this lr and twice it, too."),
        (loss < 0, "negative-loss",
         f"The loss starts at {loss:.3g}, below zero. Is it negated, or without a lower bound?"),
        (not 0.01 <= grad_norm <= 100, "scaled-loss",
         f"The first gradient norm is {grad_norm:.2g}. Is the loss a sum, or scaled? Use the mean."),
        (has_stepped, "stepped",
         "The optimizer has stepped before: the trials went on from its state."),
        (still > 0, "eval-mode",
         f"{still} BatchNorm or dropout layers are in eval mode. Will they train? Call `model.train()`."),
        (precision(passes.parameters) > torch.finfo(torch.float32).eps, "half-precision",
         "In half precision small steps are lost in rounding: float32 is surer."),
        (untrained > 0, "untrained",
         f"The loss depends on {untrained} trainable tensors that {where}: they stood still. "
         "If another optimizer trains them, try a tenth of this lr."),
        (len(known) < LEAST_BATCHES, "few-batches",
         f"Only {len(known)} batches were there, a third of them to judge by. Give 24 or more, better 80."),
        (is_data_set or _has_one_sample(known[0]), "one-sample",
         "Each batch has one sample. Give a data loader with the batch size of training."),
        (isinstance(batches, Iterator), "iterator",
         f"The iterator lost {len(known)} batches: training will not see them. Give a list or a loader."),
    )  # fmt: skip
    return [Note(kind, text) for holds, kind, text in found if holds]


def _has_one_sample(batch: Batch) -> bool:
    tensors = [tensor for tensor in tensors_in(batch) if tensor.dim() > 0]
    return len(tensors) > 1 and all(len(tensor) == 1 for tensor in tensors)
