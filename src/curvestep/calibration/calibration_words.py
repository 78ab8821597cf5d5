"""The sentences of a calibration, in one place: what was found, how far to trust it, what to know."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from curvestep.calibration import pilots
from curvestep.calibration.method import Method
from curvestep.notes import Note
from curvestep.optimizer_family import Family
from curvestep.smoothness.observer import differs_in_eval
from curvestep.vectors import precision

if TYPE_CHECKING:
    from curvestep.calibration.result import Calibration

# Share of the best progress of a tuned grid that answers missed in the median, by docs/results/calibrate.md.
EVIDENCE = {
    (Family.ADAM, "warmup-decay"): "0.4 % of the best progress on 12 judged tasks, 3.0 % at worst",
    (Family.MOMENTUM, "warmup-decay"): "1.4 % of the best progress on 5 judged tasks, 19 % at worst",
    (Family.SGD, "warmup-decay"): "0.3 % of the best progress on 5 judged tasks, 19 % at worst",
    (Family.ADAM, "constant"): "1.7 % of the best progress on 19 development tasks, 9 % at worst",
    (Family.MOMENTUM, "constant"): "1.6 % of the best progress on 19 development tasks, 23 % at worst",
    (Family.SGD, "constant"): "0.2 % of the best progress on 13 development tasks, 9.6 % at worst",
}
WHEN = {"constant": "at a constant rate: lr", "warmup-decay": "with warm-up and decay: peak lr"}
CLEAR_LINE = "\r\x1b[K"  # of a terminal


def is_proven(family: Family, schedule: str) -> bool:
    """Whether judged answers for such an optimizer, so scheduled, were good: SGD's were not."""
    return (family, schedule) == (Family.ADAM, "warmup-decay")


def headline(found: Calibration) -> str:
    """The answer."""
    what = f"{found.optimizer} {WHEN[found.schedule]} {found.lr:.3g}"
    if math.isinf(found.max_norm):
        return what
    return f"{what}, {found.family.threshold} {found.max_norm:.3g}"


def trust(found: Calibration) -> str:
    """How far to trust it, in a sentence."""
    if found.confidence == "cannot tell":
        return "cannot tell: no trial surely lowered the loss, so lr is only a safe value"
    missed = EVIDENCE.get((found.family, found.schedule))
    if missed is None:
        return f"{found.confidence}: {found.optimizer} is not part of the benchmark"
    return f"{found.confidence}: answers came within {missed}"


def lines(found: Calibration) -> list[str]:
    """The answer in at most eight lines."""
    arms = found.last_arms
    pairs = [(f"{arm.lr:.2g}", _gain(arm.gain)) for arm in arms]
    widths = [max(map(len, pair)) for pair in pairs]
    rates, gains = ("  ".join(map(str.rjust, row, widths)) for row in zip(*pairs, strict=True))
    others = len(found.warnings) - 1
    more = f" (and {others} more)" if others > 0 else ""
    cost = f"{found.num_gradients} gradients. Model and optimizer are unchanged."
    return [
        headline(found),
        f"  tried lr  {rates}",
        f"  loss fell {gains}   on other batches, in {arms[0].num_steps} steps",
        f"  trust     {trust(found)}",
        f"  to check  lr {found.lr / 2:.2g} and {found.lr * 2:.2g}, with two runs to spare",
        *(f"  warning   {first}{more}" for first in found.warnings[:1]),
        f"{cost} More: print(cal.details()), cal.plot()",
    ]


def details(found: Calibration) -> list[str]:
    """Every trial and every warning."""
    start = f"  start     loss {found.loss:.4g}, gradient norm {found.grad_norm:.3g}"
    trials = [
        f"  trial     lr {arm.lr:<9.3g} {arm.num_steps} steps: the loss fell by {_gain(arm.gain)} "
        f"(standard error {arm.error:.2g})"
        for arm in found.arms
    ]
    warnings = [f"  warning   {note}" for note in found.warnings]
    cost = f"{found.num_gradients} gradients, {found.seconds:.1f} s."
    return [headline(found), start, *trials, f"  trust     {trust(found)}", *warnings, cost]


def _gain(gain: float) -> str:
    return f"{gain:.3g}" if math.isfinite(gain) else "broke"


def before(name: str, num_steps: int, num_gradients: int, *, may_double: bool) -> str:
    """The coming trials, and their cost."""
    doubled = 2 * num_gradients + len(pilots.FIRST_OCTAVES) * pilots.NUM_STEPS
    more = f", up to {doubled} if noise hides the answer" if may_double else ""
    return f"calibrate {name}: trials of {num_steps} steps, about {num_gradients} gradients{more}\n"


def trial(num_steps: int, lr: float) -> str:
    """The trial that is running."""
    return f"{CLEAR_LINE}calibrate: {num_steps} steps at lr {lr:.3g}"


def other_threshold(found: Calibration, name: str, own: Iterable[object]) -> str:
    """That an optimizer clips otherwise than the trials did."""
    tried = f"lr {found.lr:.3g} was tried with max_norm {found.max_norm:.3g}"
    given = " and ".join(sorted(set(map(str, own))))
    if given:
        return f"{tried}, and {name} keeps its own, {given}. Calibrate with `optimizer=` the one that trains."
    return (
        f"{tried}, and {name} does not clip. Add `curvestep.clip(optimizer, cal.max_norm)`, or clip yourself."
    )


def of_arms(arms: Sequence[pilots.Arm], lr: float, *, num_judges: int) -> list[Note]:
    """Doubts that the trials leave."""
    if pilots.clarity(arms) < pilots.BLIND:
        text = "No trial lowered the loss of other batches for sure. Is the model trained, or the batch tiny?"
        return [Note("unknown", text)]
    ends = f"{arms[0].lr:.2g} to {arms[-1].lr:.2g}"
    return _that_hold(
        (pilots.is_doubled(arms), "noise",
         "Noise hid the gains of short trials, so trials became twice as long. Larger batches say more."),
        (pilots.clarity(arms) < pilots.CLEAR and not pilots.is_doubled(arms), "noise",
         "Noise hides the gains of the trials. Use larger batches, and leave `budget` out."),
        (not pilots.is_bracketed(arms), "edge", f"lr is at an end of what was tried, {ends}: try beyond it."),
        (not pilots.is_long(arms) and pilots.is_flat(arms, lr), "flat",
         "Half of this lr gains nearly as much, so short trials say little. Try twice and four times it."),
        (num_judges < pilots.NUM_JUDGES, "few-batches",
         f"Only {num_judges} batches judged the trials. "
         f"Give {pilots.NUM_JUDGES + arms[0].num_steps} or more."),
    )  # fmt: skip


def of_start(model: nn.Module, method: Method, grad_norm: float, outside: int, idle: int) -> list[Note]:
    """Oddities of the model, the optimizer and the loss, which may train tensors ``outside`` or ``idle``."""
    where = "the optimizer does not train" if idle else "are not in `model`"
    still = sum(differs_in_eval(m) and not m.training for m in model.modules())
    return _that_hold(
        ((method.family, "constant") not in EVIDENCE, "less-tested",
         f"{method.name} is less tested than Adam and SGD: try half of this lr and twice it, too."),
        (not 0.01 <= grad_norm <= 100, "scaled-loss",
         f"The first gradient norm is {grad_norm:.2g}. Is the loss a sum, or scaled? Use the mean."),
        (any(map(bool, method.optimizer.state.values())), "stepped",
         "The optimizer has stepped before: the trials went on from its state."),
        (still > 0, "eval-mode",
         f"{still} BatchNorm or dropout layers are in eval mode. Will they train? Call `model.train()`."),
        (precision(model.parameters()) > torch.finfo(torch.float32).eps, "half-precision",
         "In half precision small steps are lost in rounding: float32 is surer."),
        (outside + idle > 0, "untrained",
         f"The loss depends on {outside + idle} trainable tensors that {where}: they stood still. "
         "If another optimizer trains them, try a tenth of this lr."),
    )  # fmt: skip


def _that_hold(*said: tuple[bool, str, str]) -> list[Note]:
    return [Note(kind, text) for holds, kind, text in said if holds]
