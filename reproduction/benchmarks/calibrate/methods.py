"""What chooses a learning rate: calibrate, a grid, and rivals, each as its README says.

A method prepares an optimizer for a run and says what it spent. Packages that are not installed are named and
left out: prodigyopt, schedulefree, prodigy-plus-schedule-free, momo-opt.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from reproduction.benchmarks.calibrate.scheduled import Recipe
from torch import Tensor, nn
from torch.optim import Optimizer

from curvestep import ClippedAdamW, ClippedSGD, calibrate
from curvestep.lr_schedules import SCHEDULES
from curvestep.tensors.vectors import global_norm

FIXED = {"AdamW 1e-3": 1e-3, "AdamW 3e-4": 3e-4, "AdamW 4e-3": 4e-3}
SGD_FIXED = {"SGD 0.01": 0.01, "SGD 0.1": 0.1}  # not clipped, with the momentum of the kind
BUDGETS = {f"budget {budget}": budget for budget in (80, 160, 320)}  # of calibrate: never doubled
# AlgoPerf's baseline of external tuning: its first setting, a warm-up of 2 % and a cosine.
ALGOPERF = {"lr": 0.0017486387539278373, "betas": (0.93266073836, 0.9955159689799007),
            "weight_decay": 0.08121616522670176}  # fmt: skip
PACKAGES = {"Prodigy": "prodigyopt", "schedule-free": "schedulefree",
            "prodigy-plus-schedule-free": "prodigyplus", "MoMo": "momo"}  # fmt: skip
RIVALS = (*FIXED, "NadamW, AlgoPerf", "lr_find", *PACKAGES)
SCHEDULE = {
    "adamw": "warmup-decay",
    "momentum": "warmup-decay",
    "plain": "warmup-decay",
    "clipped": "constant",
}
FIRST_RATE = {"adamw": 0.008, "momentum": 0.1, "plain": 1.0, "clipped": 1.0}


class NotInstalled(Exception):
    """A rival's package is missing."""


@dataclass
class Prepared:
    """An optimizer, and what to know of it.

    Args:
        optimizer: The optimizer.
        shape: Multiples of its learning rates, step by step; None if it has a schedule of its own.
        spent: Gradients used before training.
        found: Numbers to keep.
        clips: The threshold to clip at outside of it.
        needs_loss: Whether its step asks for the loss.
    """

    optimizer: Optimizer
    shape: list[float] | None
    spent: int = 0
    found: dict[str, Any] = field(default_factory=dict)
    clips: float = math.inf
    needs_loss: bool = False


def make(recipe: Recipe, kind: str, model: nn.Module, lr: float, max_norm: float) -> Optimizer:
    """The optimizer that a recipe is trained with."""
    if kind == "adamw":
        groups = recipe.groups(model, recipe.weight_decay)
        return ClippedAdamW(groups, lr=lr, max_norm=max_norm, betas=recipe.betas, nonfinite="propagate")
    return ClippedSGD(
        [p for p in model.parameters() if p.requires_grad], lr=lr, max_norm=max_norm,
        momentum=0.9 if kind == "momentum" else 0.0, weight_decay=min(recipe.weight_decay, 5e-4),
        nonfinite="propagate",
    )  # fmt: skip


def prepare(recipe: Recipe, job: dict[str, Any], model: nn.Module) -> Prepared:
    """The optimizer of a job."""
    kind, method, steps = job["kind"], job["method"], recipe.task.steps
    shape = SCHEDULES[SCHEDULE[kind]](steps)
    if method == "calibrate" or method in BUDGETS:
        return calibrated(recipe, job, model, shape)
    if method == "grid" or method in FIXED:
        max_norm = 1.0
        if kind != "adamw":  # the threshold of SGD has a unit
            max_norm = first_norm(recipe, job["seed"], model)
        return Prepared(make(recipe, kind, model, job["lr"], max_norm), shape, found={"max_norm": max_norm})
    if method in SGD_FIXED:
        return Prepared(make(recipe, kind, model, job["lr"], math.inf), shape)
    if method == "lr_find":
        lr, spent = lr_find(recipe, job["seed"])
        return Prepared(make(recipe, kind, model, lr, 1.0), shape, spent, {"lr": lr})
    return RIVAL[method](recipe, model, shape)


def calibrated(recipe: Recipe, job: dict[str, Any], model: nn.Module, shape: list[float]) -> Prepared:
    """What ``curvestep.calibrate`` says; its gradients are counted and not taken off the steps."""
    optimizer = make(recipe, job["kind"], model, 1.0, math.inf)
    found = calibrate(
        model, lambda batch: recipe.task.loss(model, batch), recipe.task.stream(job["seed"], "measuring"),
        optimizer=optimizer, schedule=SCHEDULE[job["kind"]], num_steps=recipe.task.steps,
        budget=BUDGETS.get(job["method"]),
    )  # fmt: skip
    found.apply(optimizer)
    arms = [[arm.lr, arm.num_steps, arm.gain, arm.error] for arm in found.arms]
    numbers = {"lr": found.lr, "max_norm": found.max_norm, "confidence": found.confidence, "arms": arms,
               "seconds": found.seconds, "warnings": [note.kind for note in found.warnings]}  # fmt: skip
    return Prepared(optimizer, shape, found.num_gradients, numbers)


def first_norm(recipe: Recipe, seed: int, model: nn.Module) -> float:
    """Median gradient norm at the start."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    norms = []
    for batch in islice(recipe.task.stream(seed, "measuring"), 3):
        gradients = torch.autograd.grad(recipe.task.loss(model, batch), parameters, allow_unused=True)
        norms.append(global_norm(gradients).item())
    return float(np.median(norms))


def lr_find(recipe: Recipe, seed: int) -> tuple[float, int]:
    """Lightning's learning rate finder, written again: its suggestion, and the steps it took.

    100 steps of AdamW from 1e-8 to 1, loss smoothed by 0.98, an end at four times its lowest, and the rate
    where the smoothed loss falls most steeply, without the first ten steps and the last one.
    """
    model, rates = recipe.task.start(seed), np.geomspace(1e-8, 1.0, 100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-8)
    average, smooth = 0.0, []
    for i, batch in enumerate(islice(recipe.task.stream(seed, "measuring"), len(rates))):
        optimizer.param_groups[0]["lr"] = rates[i]
        optimizer.zero_grad()
        loss = recipe.task.loss(model, batch)
        loss.backward()
        optimizer.step()
        average = 0.98 * average + 0.02 * loss.item()
        smooth.append(average / (1 - 0.98 ** (i + 1)))
        if not smooth[-1] < 4 * min(smooth[:-1], default=math.inf):
            break
    kept = np.array(smooth[10:-1])
    best = 10 + int(np.argmin(np.gradient(kept))) if len(kept) > 1 else 0
    return float(rates[best]), len(smooth)


# Rivals


def _package(method: str) -> Any:
    try:
        return importlib.import_module(PACKAGES[method])
    except ImportError:
        raise NotInstalled(f"{method}: {PACKAGES[method]} is not installed") from None


def nadamw(recipe: Recipe, model: nn.Module, shape: list[float]) -> Prepared:
    """AlgoPerf's NadamW."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    warm = max(1, round(0.02 * len(shape)))
    rest = len(shape) - warm
    decay = [0.5 * (1 + math.cos(math.pi * k / rest)) for k in range(rest)]
    own = [(k + 1) / warm for k in range(warm)] + decay
    return Prepared(torch.optim.NAdam(parameters, decoupled_weight_decay=True, **ALGOPERF), own, clips=1.0)


def prodigy(recipe: Recipe, model: nn.Module, shape: list[float]) -> Prepared:
    """Its README: lr 1, a cosine, safeguard_warmup with a warm-up, bias correction."""
    made = _package("Prodigy").Prodigy(
        recipe.groups(model, recipe.weight_decay), lr=1.0, weight_decay=recipe.weight_decay,
        safeguard_warmup=True, use_bias_correction=True, betas=recipe.betas,
    )  # fmt: skip
    return Prepared(made, shape, clips=1.0)


def schedule_free(recipe: Recipe, model: nn.Module, shape: list[float]) -> Prepared:
    """Its README: no schedule, a warm-up of its own."""
    made = _package("schedule-free").AdamWScheduleFree(
        recipe.groups(model, recipe.weight_decay), lr=0.0025, weight_decay=recipe.weight_decay,
        warmup_steps=round(0.1 * len(shape)),
    )  # fmt: skip
    return Prepared(made, None, clips=1.0)


def prodigy_plus(recipe: Recipe, model: nn.Module, shape: list[float]) -> Prepared:
    """Its README: all defaults, no schedule, no clipping outside."""
    made = _package("prodigy-plus-schedule-free").ProdigyPlusScheduleFree(
        recipe.groups(model, recipe.weight_decay), lr=1.0, betas=recipe.betas
    )
    return Prepared(made, None)


def momo(recipe: Recipe, model: nn.Module, shape: list[float]) -> Prepared:
    """Its README: MomoAdam at 1e-2, any schedule beside it, and the loss given to its step."""
    groups = recipe.groups(model, recipe.weight_decay)
    return Prepared(_package("MoMo").MomoAdam(groups, lr=1e-2), shape, needs_loss=True)


RIVAL: dict[str, Callable[[Recipe, nn.Module, list[float]], Prepared]] = {
    "NadamW, AlgoPerf": nadamw, "Prodigy": prodigy, "schedule-free": schedule_free,
    "prodigy-plus-schedule-free": prodigy_plus, "MoMo": momo,
}  # fmt: skip


def step(prepared: Prepared, model: nn.Module, loss: Tensor) -> None:
    """One step, clipped where the method asks for it."""
    if math.isfinite(prepared.clips):
        nn.utils.clip_grad_norm_(model.parameters(), prepared.clips)
    if prepared.needs_loss:
        prepared.optimizer.step(loss=loss)  # type: ignore[call-arg]
    else:
        prepared.optimizer.step()
