"""The sentences of a calibration, in one place: what was found, how far to trust it, what to know."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from curvestep.calibration.method import Method
from curvestep.calibration.pilots import (
    BLIND,
    CLEAR,
    FIRST_OCTAVES,
    NUM_JUDGES,
    NUM_STEPS,
    Arm,
    clarity,
    is_bracketed,
)
from curvestep.notes import Note
from curvestep.optimizer_family import Family

if TYPE_CHECKING:
    from curvestep.calibration.result import Calibration

# Share of the progress that was missed, by the tables of docs/calibrate.md.
EVIDENCE = {
    (
        Family.ADAM,
        "warmup-decay",
    ): "a prototype of this rule missed 0.8 % of the progress on 19 tasks in the median, 8.9 % at worst",
    (
        Family.ADAM,
        "constant",
    ): "on 19 development tasks 2 % of the progress missed in the median, 9 % at worst",
    (Family.MOMENTUM, "warmup-decay"): "on 8 development tasks 0.7 % missed in the median, 3 % at worst",
    (Family.MOMENTUM, "constant"): "on 19 development tasks 1.6 % missed in the median, 23 % at worst",
    (Family.SGD, "warmup-decay"): "on 5 development tasks 0.5 % missed in the median, 1 % at worst",
    (Family.SGD, "constant"): "on 19 development tasks 2.1 % missed in the median, 17 % at worst",
}


def confidence(arms: Sequence[Arm], family: Family, schedule: str) -> str:
    """How far to trust the answer, in a word."""
    if clarity(arms) < BLIND:
        return "cannot tell"
    is_tested = schedule != "constant" and (family, schedule) in EVIDENCE
    is_clear = clarity(arms) >= CLEAR and arms[0].num_steps == NUM_STEPS
    return "high" if is_tested and is_clear and is_bracketed(arms) else "medium"


# What is printed


def headline(found: Calibration) -> str:
    """The answer."""
    if found.schedule == "constant":
        what = f"{found.optimizer} at a constant rate: lr {found.lr:.3g}"
    else:
        what = f"{found.optimizer} with warm-up and decay: peak lr {found.lr:.3g}"
    if math.isinf(found.max_norm):
        return what
    name = "offset" if found.family == Family.NORMALIZED else "max_norm"
    return f"{what}, {name} {found.max_norm:.3g}"


def trust(found: Calibration) -> str:
    """How far to trust it, in a sentence."""
    if found.confidence == "cannot tell":
        return "cannot tell: no trial gained for sure, so lr is only a safe value"
    unknown = f"{found.optimizer} is not part of the benchmark"
    return f"{found.confidence}: {EVIDENCE.get((found.family, found.schedule), unknown)}"


def lines(found: Calibration) -> list[str]:
    """The answer in at most eight lines."""
    arms = list(found.last_arms)
    columns = [(f"{arm.lr:.2g}", _gain(arm.gain)) for arm in arms]
    widths = [max(map(len, column)) for column in columns]
    rates, gains = (
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in zip(*columns, strict=True)
    )
    said = [
        headline(found),
        f"  tried lr  {rates}",
        f"  loss fell {gains}   on batches not stepped on, in {arms[0].num_steps} steps",
        f"  trust     {trust(found)}",
        f"  to check  lr {found.lr / 2:.2g} and {found.lr * 2:.2g}, with two runs to spare",
    ]
    if found.warnings:
        first, *others = found.warnings
        more = f" (and {len(others)} more)" if others else ""
        said.append(f"  warning   {first}{more}")
    return [*said, _cost(found)]


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


def _cost(found: Calibration) -> str:
    return (
        f"{found.num_gradients} gradients. Model and optimizer are unchanged. "
        "More: print(cal.details()), cal.plot()"
    )


def before(name: str, num_gradients: int, *, may_double: bool) -> str:
    """What is about to be done, and its cost."""
    doubled = 2 * num_gradients + len(FIRST_OCTAVES) * NUM_STEPS
    more = f", up to {doubled} if noise hides the answer" if may_double else ""
    return f"calibrate {name}: trials of {NUM_STEPS} steps, about {num_gradients} gradients{more}\n"


def trial(show: Callable[[str], None], num_steps: int, lr: float) -> None:
    """Show what is being tried."""
    show(f"calibrate: {num_steps} steps at lr {lr:.3g}")


def other_threshold(found: Calibration, name: str, own: Iterable[float]) -> str:
    """That an optimizer clips otherwise than the trials did."""
    tried = f"lr {found.lr:.3g} was tried with max_norm {found.max_norm:.3g}"
    if not own:
        return (
            f"{tried}, and {name} does not clip. Add `curvestep.clip(optimizer, cal.max_norm)`; ignore this "
            f"if you call clip_grad_norm_(…, {found.max_norm:.3g})."
        )
    given = " and ".join(f"{value:g}" for value in sorted(own))
    return f"{tried}, and {name} keeps its own, {given}. Calibrate with `optimizer=` the one that trains."


# What to know


def of_arms(arms: Sequence[Arm], *, num_judges: int) -> list[Note]:
    """What the trials leave open."""
    if clarity(arms) < BLIND:
        text = (
            "No trial lowered the loss of other batches for sure: the model may be trained already, or the "
            "batches too small. Do not rely on this lr."
        )
        return [Note("unknown", text)]
    notes = []
    if arms[0].num_steps > NUM_STEPS:
        text = "Noise hid the gains of short trials, so they were doubled. Larger batches say more."
        notes.append(Note("noise", text))
    if not is_bracketed(arms):
        text = f"lr is at an end of what was tried, {arms[0].lr:.2g} to {arms[-1].lr:.2g}: try beyond it."
        notes.append(Note("edge", text))
    if num_judges < NUM_JUDGES:
        text = f"Few batches: {num_judges} judged the trials. Give {NUM_JUDGES + NUM_STEPS}."
        notes.append(Note("few-batches", text))
    return notes


def of_start(model: nn.Module, method: Method, grad_norm: float) -> list[Note]:
    """What is unusual about the model, the optimizer and the loss."""
    still = [m for m in model.modules() if isinstance(m, (_BatchNorm, _DropoutNd)) and not m.training]
    halves = [p for p in model.parameters() if p.dtype in (torch.float16, torch.bfloat16)]
    said = {
        Note(
            "less-tested",
            f"{method.name} is less tested than Adam and SGD: half of this lr and twice it are worth a try.",
        ): (method.family, "constant") not in EVIDENCE,
        Note(
            "scaled-loss",
            f"The gradient norm at the start is {grad_norm:.2g}. Is the loss a sum, or scaled? Use the mean: "
            "a max_norm near 1 means little at other scales.",
        ): not 0.01 <= grad_norm <= 100,
        Note(
            "stepped", "The optimizer has stepped before: the trials went on from its state."
        ): method.has_stepped,
        Note(
            "eval-mode",
            f"{len(still)} BatchNorm or dropout layers are in eval mode. If they will train, call "
            "`model.train()` first: the answer may differ many times over.",
        ): bool(still),
        Note("half-precision", "In half precision small steps are lost in rounding: float32 is surer."): bool(
            halves
        ),
    }
    return [note for note, holds in said.items() if holds]


def of_untrained(num_outside: int, num_idle: int) -> list[Note]:
    """That the loss depends on trainable tensors that did not move."""
    if not num_outside + num_idle:
        return []
    where = "the optimizer does not train" if num_idle else "are not in `model`"
    text = (
        f"The loss also depends on {num_outside + num_idle} trainable tensors that {where}, and here they "
        "stood still. Where another optimizer trains them, as a GAN's other network, try a tenth of this lr."
    )
    return [Note("untrained", text)]
