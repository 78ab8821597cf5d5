"""The sentences of a calibration, in one place: what was found, how far to trust it, what to know."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from curvestep.calibration.loaders import Batch
from curvestep.calibration.method import Method
from curvestep.calibration.pilots import FIRST_OCTAVES, NUM_JUDGES, RULES, SUFFICIENT, Trial
from curvestep.notes import Note
from curvestep.optimizer_family import Family
from curvestep.smoothness.observer import differs_in_eval
from curvestep.smoothness.oracle import BatchReplay
from curvestep.tensors.vectors import precision

if TYPE_CHECKING:
    from curvestep.calibration.result import Calibration

# Fall of the loss by answers, in per cent of that at a grid's best lr: median and worst, by docs/results.
PROVEN = {(Family.ADAM, "warmup-decay"): ("12 unseen tasks", "99.6", "97")}
EVIDENCE = PROVEN | {
    (Family.MOMENTUM, "warmup-decay"): ("5 unseen tasks", "98.6", "81"),
    (Family.SGD, "warmup-decay"): ("5 unseen tasks", "99.7", "81"),
    (Family.ADAM, "constant"): ("19 tuning tasks", "98.3", "91"),
    (Family.MOMENTUM, "constant"): ("19 tuning tasks", "98.4", "77"),
    (Family.SGD, "constant"): ("13 tuning tasks", "99.8", "90"),
}
WHEN = {"constant": "at a constant rate: lr", "warmup-decay": "with warm-up and decay: peak lr"}
DOUBTS = {
    "unknown": "No trial surely lowered the loss of other batches. Is the model trained, or the batch tiny?",
    "noise": "Noise hides the gains of short trials: use larger batches. A `budget` keeps trials short.",
    "edge": "lr is at an end of what was tried, {ends}: try beyond it.",
    "flat": "Half of this lr gains nearly as much, so trials say little. Try half, twice and four times it.",
}


def evidence(found: Calibration | Method, schedule: str) -> tuple[str, str, str] | None:
    """How answers for such an optimizer did in the benchmark; None if it is not part of it."""
    if found.threshold != "max_norm":  # a rule of its own
        return None
    return EVIDENCE.get((found.family, schedule))


def confidence(family: Family, schedule: str, warnings: Iterable[Note]) -> str:
    """How far to trust the answer: where a doubt was noted, no judged answer says that it was good."""
    kinds = {note.kind for note in warnings} - {"iterator"}  # which says nothing of the answer
    if "unknown" in kinds:
        return "cannot tell"
    is_sure = (family, schedule) in PROVEN and not kinds
    return "high" if is_sure else "medium"


def headline(found: Calibration) -> str:
    """The answer."""
    momentum = f", momentum {found.momentum:g}," if found.family.is_descent else ""
    what = f"{found.optimizer}{momentum} {WHEN[found.schedule]} {found.lr:.3g}"
    if math.isinf(found.max_norm):
        return what
    return f"{what}, {found.threshold} {found.max_norm:.3g}"


def trust(found: Calibration) -> str:
    """How far to trust it, in a sentence."""
    if found.confidence == "cannot tell":
        return "cannot tell: no trial surely lowered the loss, so lr is only a safe value"
    judged = evidence(found, found.schedule)
    if judged is None:
        return f"{found.confidence}: {found.optimizer} is not part of the benchmark"
    tasks, usual, worst = judged
    fell = f"the loss fell {usual} % as far as at the best lr, {worst} % at worst"
    return f"{found.confidence}: on {tasks} {fell}"


def choice(found: Calibration) -> str:
    """How lr was read from the trials."""
    rule = RULES[found.last_trials[0].num_steps]
    enough = f"the smallest lr with {SUFFICIENT:.0%} of the best fall"
    if found.confidence == "cannot tell":
        return "half of the lowest lr tried"
    if rule.takes_best:
        return f"{rule.factor:g} of the lr where the loss fell furthest"
    if found.schedule == "constant":
        return f"between {enough} and the largest step that works"
    return f"near {enough}: larger ones harm long runs"


def lines(found: Calibration) -> list[str]:
    """The answer in at most eight lines."""
    trials = found.last_trials
    pairs = [(f"{trial.lr:.2g}", _gain(trial.gain)) for trial in trials]
    widths = [max(map(len, pair)) for pair in pairs]
    rates, gains = ("  ".join(map(str.rjust, row, widths)) for row in zip(*pairs, strict=True))
    others = len(found.warnings) - 1
    more = f" (and {others} more)" if others > 0 else ""
    cost = f"{found.num_gradients} gradients. Model and optimizer are unchanged."
    return [
        headline(found),
        f"  tried lr  {rates}",
        f"  loss fell {gains}   on other batches, in {trials[0].num_steps} steps",
        f"  choice    {choice(found)}",
        f"  trust     {trust(found)}",
        f"  to check  lr {found.lr / 2:.2g} and {found.lr * 2:.2g}, with two runs to spare",
        *(f"  warning   {first}{more}" for first in found.warnings[:1]),
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


def before(name: str, num_steps: int, num_gradients: int, *, may_double: bool) -> str:
    """The coming trials, and their cost."""
    doubled = 2 * num_gradients + len(FIRST_OCTAVES) * num_steps
    more = f", up to {doubled} if noise hides the answer" if may_double else ""
    return f"calibrate {name}: trials of {num_steps} steps, about {num_gradients} gradients{more}"


def other_threshold(found: Calibration, name: str, own: Iterable[object]) -> str:
    """That an optimizer clips otherwise than the trials did."""
    tried = f"lr {found.lr:.3g} was tried with {found.threshold} {found.max_norm:.3g}"
    given = " and ".join(sorted(set(map(str, own))))
    if given:
        return f"{tried}, and {name} keeps its own, {given}. Calibrate with `optimizer=` the one that trains."
    return (
        f"{tried}, and {name} does not clip. Add `curvestep.clip(optimizer, cal.max_norm)`, or clip yourself."
    )


def other_schedule(found: Calibration) -> str:
    """That a constant rate is given to a schedule."""
    what = f"lr {found.lr:.3g} is for a constant rate, and this schedule varies it"
    return f'{what}. Calibrate with schedule="warmup-decay".'


def of_trials(doubts: Iterable[str], trials: Sequence[Trial]) -> list[Note]:
    """Doubts that the trials leave, by their kinds."""
    ends = f"{trials[0].lr:.2g} to {trials[-1].lr:.2g}"
    return [Note(kind, DOUBTS[kind].format(ends=ends)) for kind in doubts]


def of_start(
    passes: BatchReplay,
    method: Method,
    grad_norm: float,
    num_idle: int,
    batches: Iterable[Batch],
    num_read: int,
) -> list[Note]:
    """Oddities of what was given: model, optimizer, loss, of which tensors may be idle, and batches."""
    still = sum(differs_in_eval(m) and not m.training for m in passes.model.modules())
    untrained = passes.num_outside + num_idle
    where = "the optimizer does not train" if num_idle else "are not in `model`"
    found = (
        (evidence(method, "constant") is None, "less-tested",
         f"{method.name} is less tested than Adam and SGD: try half of this lr and twice it, too."),
        (not 0.01 <= grad_norm <= 100, "scaled-loss",
         f"The first gradient norm is {grad_norm:.2g}. Is the loss a sum, or scaled? Use the mean."),
        (any(map(bool, method.optimizer.state.values())), "stepped",
         "The optimizer has stepped before: the trials went on from its state."),
        (still > 0, "eval-mode",
         f"{still} BatchNorm or dropout layers are in eval mode. Will they train? Call `model.train()`."),
        (precision(passes.parameters) > torch.finfo(torch.float32).eps, "half-precision",
         "In half precision small steps are lost in rounding: float32 is surer."),
        (untrained > 0, "untrained",
         f"The loss depends on {untrained} trainable tensors that {where}: they stood still. "
         "If another optimizer trains them, try a tenth of this lr."),
        (num_read < 3 * NUM_JUDGES, "few-batches",
         f"Only {num_read} batches were there, a third of them to judge by. Give 24 or more, for SGD 56."),
        (isinstance(batches, Iterator), "iterator",
         f"The iterator lost {num_read} batches: training will not see them. Give a list or a loader."),
    )  # fmt: skip
    return [Note(kind, text) for holds, kind, text in found if holds]
