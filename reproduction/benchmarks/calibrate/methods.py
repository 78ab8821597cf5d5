"""What chooses a learning rate: calibrate, a grid, and rivals, each as its README says.

A method prepares the optimizers of a run and says what it spent. Packages that are not installed are named
and left out: prodigyopt, schedulefree, prodigy-plus-schedule-free, momo-opt.
"""

from __future__ import annotations

import importlib
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from reproduction.benchmarks.calibrate.data import Batch
from reproduction.benchmarks.calibrate.ladder import GRIDS
from reproduction.benchmarks.calibrate.scheduled import Recipe
from torch import Tensor, nn
from torch.optim import Optimizer

from curvestep import ClippedAdamW, ClippedSGD, calibrate
from curvestep.calibration.lr_schedules import SCHEDULES
from curvestep.tensors.vectors import global_norm

FIXED = {"AdamW 1e-3": 1e-3, "AdamW 3e-4": 3e-4, "AdamW 4e-3": 4e-3}
SGD_FIXED = {"SGD 0.01": 0.01, "SGD 0.1": 0.1}  # not clipped, with the momentum of the kind
MUON_FIXED = {"Muon 0.02": 0.02}  # and AdamW 0.003 beside it
BUDGETS = {f"budget {budget}": budget for budget in (80, 160, 320)}  # of calibrate: never doubled
# Numbers of gradients, or a share of the run's steps.
LADDER_BUDGETS: dict[str, float] = {**BUDGETS, "budget 640": 640, "budget half a run": 0.5}
RANDOM_BUDGETS = {f"random search, {name}": budget for name, budget in LADDER_BUDGETS.items()}
RANDOM = "random search"  # with what calibrate spent by default
# AlgoPerf's baseline of external tuning: its first setting, a warm-up of 2 % and a cosine.
ALGOPERF = {"lr": 0.0017486387539278373, "betas": (0.93266073836, 0.9955159689799007),
            "weight_decay": 0.08121616522670176}  # fmt: skip
PACKAGES = {"Prodigy": "prodigyopt", "schedule-free": "schedulefree",
            "prodigy-plus-schedule-free": "prodigyplus", "MoMo": "momo"}  # fmt: skip
RIVALS = (*FIXED, "NadamW, AlgoPerf", "lr_find", *PACKAGES)
LADDER_RIVALS = {
    "adamw": ("AdamW 1e-3", "AdamW 4e-3", "lr_find", *PACKAGES),
    "momentum": ("SGD 0.1", "lr_find", "schedule-free"),
    "plain": ("SGD 0.1", "lr_find"),
    "muon": ("Muon 0.02",),
}
SCHEDULE = {
    "adamw": "warmup-decay",
    "momentum": "warmup-decay",
    "plain": "warmup-decay",
    "clipped": "constant",
    "muon": "warmup-decay",
}
FIRST_RATE = {"adamw": 0.008, "momentum": 0.1, "plain": 1.0, "clipped": 1.0}
ADAMW_SHARE = 0.15  # of Muon's rate, for AdamW beside it: 0.003 beside 0.02
MOST_TRIALS, FEWEST_STEPS, NUM_JUDGES = 8, 8, 16  # of random search
NEVER_CLIPS = math.inf


class NotInstalled(Exception):
    """A rival's package is missing."""


@dataclass
class Prepared:
    """The optimizers of a run, and what to know of them.

    Args:
        optimizers: One, or Muon and AdamW.
        shape: Multiples of its learning rates, step by step; None if it has a schedule of its own.
        spent: Gradients used before training.
        found: Numbers to keep.
        clips: The threshold to clip at outside of it.
        needs_loss: Whether its step asks for the loss.
    """

    optimizers: list[Optimizer]
    shape: list[float] | None
    spent: int = 0
    found: dict[str, Any] = field(default_factory=dict)
    clips: float = math.inf
    needs_loss: bool = False


def make(recipe: Recipe, kind: str, model: nn.Module, lr: float, max_norm: float) -> list[Optimizer]:
    """The optimizers that a recipe is trained with: one, or Muon and AdamW."""
    if kind == "muon":
        return muon_and_adamw(recipe, model, lr)
    if kind == "adamw":
        groups = recipe.groups(model, recipe.weight_decay)
        return [ClippedAdamW(groups, lr=lr, max_norm=max_norm, betas=recipe.betas, nonfinite="propagate")]
    sgd = ClippedSGD(
        [p for p in model.parameters() if p.requires_grad], lr=lr, max_norm=max_norm,
        momentum=0.9 if kind == "momentum" else 0.0, weight_decay=min(recipe.weight_decay, 5e-4),
        nonfinite="propagate",
    )  # fmt: skip
    return [sgd]


def muon_and_adamw(recipe: Recipe, model: nn.Module, lr: float) -> list[Optimizer]:
    """Muon for the matrices inside of ``model.blocks``; AdamW, at a share of its rate, for the rest."""
    hidden = [p for name, p in model.named_parameters() if name.startswith("blocks.") and p.dim() == 2]
    known = {id(p) for p in hidden}
    rest = []
    for group in recipe.groups(model, recipe.weight_decay):
        rest.append({**group, "params": [p for p in group["params"] if id(p) not in known]})
    muon = torch.optim.Muon(hidden, lr=lr, weight_decay=recipe.weight_decay)
    return [muon, torch.optim.AdamW(rest, lr=ADAMW_SHARE * lr, betas=recipe.betas)]


def prepare(recipe: Recipe, job: dict[str, Any], model: nn.Module) -> Prepared:
    """The optimizers of a job."""
    kind, method, steps = job["kind"], job["method"], recipe.task.steps
    shape = SCHEDULES[SCHEDULE[kind]](steps)
    if method == "calibrate" or method in LADDER_BUDGETS:
        return calibrated(recipe, job, model, shape)
    if method == RANDOM or method in RANDOM_BUDGETS:
        budget = job["budget"] if method == RANDOM else RANDOM_BUDGETS[method]
        return random_search(recipe, job, model, budget)
    if method == "grid" or method in FIXED or method in MUON_FIXED:
        max_norm = grid_max_norm(recipe, job, model)
        kept = {"max_norm": max_norm} if math.isfinite(max_norm) else {}
        return Prepared(make(recipe, kind, model, job["lr"], max_norm), shape, found=kept)
    if method in SGD_FIXED:
        return Prepared(make(recipe, kind, model, job["lr"], NEVER_CLIPS), shape)
    if method.startswith("answer x "):  # the rate of an answer, or a multiple of it, with its threshold
        max_norm = job["max_norm"] or NEVER_CLIPS
        return Prepared(make(recipe, kind, model, job["lr"], max_norm), shape)
    if method == "lr_find":
        lr, spent = lr_find(recipe, job["seed"], kind)
        max_norm = 1.0 if kind == "adamw" else NEVER_CLIPS
        return Prepared(make(recipe, kind, model, lr, max_norm), shape, spent, {"lr": lr})
    if method == "schedule-free" and kind == "momentum":
        return schedule_free_sgd(recipe, model, shape)
    return RIVAL[method](recipe, model, shape)


def grid_max_norm(recipe: Recipe, job: dict[str, Any], model: nn.Module) -> float:
    """The threshold that all rates of a grid have; infinite if they do not clip."""
    if job["kind"] == "adamw":
        return 1.0
    if job["kind"] == "muon":
        return NEVER_CLIPS
    if recipe.sgd_max_norm is not None:
        return recipe.sgd_max_norm
    return first_norm(recipe, job["seed"], model)  # the threshold of SGD has a unit


def calibrated(recipe: Recipe, job: dict[str, Any], model: nn.Module, shape: list[float]) -> Prepared:
    """What ``curvestep.calibrate`` says; its gradients are counted and not taken off the steps."""
    optimizers = make(recipe, job["kind"], model, 1.0, NEVER_CLIPS)
    asked: Any = optimizers if len(optimizers) > 1 else optimizers[0]
    found = calibrate(
        model, lambda batch: recipe.task.loss(model, batch), recipe.task.stream(job["seed"], "measuring"),
        optimizer=asked, schedule=SCHEDULE[job["kind"]],
        num_steps=recipe.task.steps, budget=LADDER_BUDGETS.get(job["method"]),
    )  # fmt: skip
    found.apply(*optimizers)
    trials = [[trial.lr, trial.num_steps, trial.gain, trial.error] for trial in found.trials]
    max_norm = found.max_norm if math.isfinite(found.max_norm) else None
    numbers = {"lr": found.lr, "max_norm": max_norm, "confidence": found.confidence, "trials": trials,
               "seconds": found.seconds, "warnings": [note.kind for note in found.warnings]}  # fmt: skip
    return Prepared(optimizers, shape, found.num_gradients, numbers)


def random_search(recipe: Recipe, job: dict[str, Any], model: nn.Module, budget: float) -> Prepared:
    """The best of a few rates drawn at random, which any tuner must beat.

    At most eight rates, log-uniform on the range of the grid. Each trains from the same start on the same
    batches, with the run's schedule compressed into equally many steps. The mean loss of sixteen further
    batches, in training mode, decides. The budget counts the gradients of all trials together; a budget of
    at most 1 is a share of the run's steps.
    """
    kind, seed = job["kind"], job["seed"]
    gradients = round(budget * recipe.task.steps) if budget <= 1 else int(budget)
    count = max(1, min(MOST_TRIALS, gradients // FEWEST_STEPS))
    length = max(1, gradients // count)
    batches = list(islice(recipe.task.stream(seed, "measuring"), NUM_JUDGES + length))
    judges, seen = batches[:NUM_JUDGES], batches[NUM_JUDGES:]
    grid = GRIDS[kind]
    key = zlib.crc32(f"{recipe.task.name}/{kind}/{seed}/{gradients}/rates".encode())
    draws = np.random.default_rng(key).random(count)
    rates = [float(f"{grid.lowest * (grid.highest / grid.lowest) ** draw:.3g}") for draw in draws]
    max_norm = grid_max_norm(recipe, job, model)
    shape = SCHEDULES[SCHEDULE[kind]](length)
    with torch.random.fork_rng():
        losses = [_trial(recipe, kind, seed, lr, max_norm, shape, seen, judges) for lr in rates]
    lr = rates[int(np.argmin(losses))]
    kept = [loss if math.isfinite(loss) else None for loss in losses]
    found = {"lr": lr, "trials": list(zip(rates, kept, strict=True)), "length": length}
    whole = SCHEDULES[SCHEDULE[kind]](recipe.task.steps)
    return Prepared(make(recipe, kind, model, lr, max_norm), whole, count * length, found)


def _trial(
    recipe: Recipe, kind: str, seed: int, lr: float, max_norm: float, shape: list[float],
    batches: list[Batch], judges: list[Batch],
) -> float:  # fmt: skip
    model = recipe.task.start(seed).train()
    optimizers = make(recipe, kind, model, lr, max_norm)
    peaks = peaks_of(optimizers)
    for share, batch in zip(shape, batches, strict=True):
        scale_rates(optimizers, peaks, share)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = recipe.task.loss(model, batch)
        if not math.isfinite(loss.item()):
            return math.inf
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    with torch.no_grad():
        loss = float(np.mean([recipe.task.loss(model, batch).item() for batch in judges]))
    return loss if math.isfinite(loss) else math.inf


def peaks_of(optimizers: list[Optimizer]) -> list[list[float]]:
    """The rates of all groups of all optimizers."""
    return [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]


def scale_rates(optimizers: list[Optimizer], peaks: list[list[float]], share: float) -> None:
    """Set all rates to a share of their peaks."""
    for optimizer, of_groups in zip(optimizers, peaks, strict=True):
        for group, peak in zip(optimizer.param_groups, of_groups, strict=True):
            group["lr"] = peak * share


def first_norm(recipe: Recipe, seed: int, model: nn.Module) -> float:
    """Median gradient norm at the start."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    norms = []
    for batch in islice(recipe.task.stream(seed, "measuring"), 3):
        gradients = torch.autograd.grad(recipe.task.loss(model, batch), parameters, allow_unused=True)
        norms.append(global_norm(gradients).item())
    return float(np.median(norms))


def lr_find(recipe: Recipe, seed: int, kind: str = "adamw") -> tuple[float, int]:
    """Lightning's learning rate finder, written again: its suggestion, and the steps it took.

    100 steps of AdamW or SGD from 1e-8 to 1, loss smoothed by 0.98, an end at four times its lowest, and
    the rate where the smoothed loss falls most steeply, without the first ten steps and the last one.
    """
    model, rates = recipe.task.start(seed), np.geomspace(1e-8, 1.0, 100)
    optimizer: Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-8)
    if kind != "adamw":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-8, momentum=0.9 if kind == "momentum" else 0.0)
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
    made = torch.optim.NAdam(parameters, decoupled_weight_decay=True, **ALGOPERF)
    return Prepared([made], own, clips=1.0)


def prodigy(recipe: Recipe, model: nn.Module, shape: list[float]) -> Prepared:
    """Its README: lr 1, a cosine, safeguard_warmup with a warm-up, bias correction."""
    made = _package("Prodigy").Prodigy(
        recipe.groups(model, recipe.weight_decay), lr=1.0, weight_decay=recipe.weight_decay,
        safeguard_warmup=True, use_bias_correction=True, betas=recipe.betas,
    )  # fmt: skip
    return Prepared([made], shape, clips=1.0)


def schedule_free(recipe: Recipe, model: nn.Module, shape: list[float]) -> Prepared:
    """Its README: no schedule, a warm-up of its own."""
    made = _package("schedule-free").AdamWScheduleFree(
        recipe.groups(model, recipe.weight_decay), lr=0.0025, weight_decay=recipe.weight_decay,
        warmup_steps=round(0.1 * len(shape)),
    )  # fmt: skip
    return Prepared([made], None, clips=1.0)


def schedule_free_sgd(recipe: Recipe, model: nn.Module, shape: list[float]) -> Prepared:
    """Schedule-free SGD at its default rate, 1, with a warm-up of its own."""
    made = _package("schedule-free").SGDScheduleFree(
        model.parameters(), weight_decay=min(recipe.weight_decay, 5e-4), warmup_steps=round(0.1 * len(shape))
    )
    return Prepared([made], None)


def prodigy_plus(recipe: Recipe, model: nn.Module, shape: list[float]) -> Prepared:
    """Its README: all defaults, no schedule, no clipping outside."""
    made = _package("prodigy-plus-schedule-free").ProdigyPlusScheduleFree(
        recipe.groups(model, recipe.weight_decay), lr=1.0, betas=recipe.betas
    )
    return Prepared([made], None)


def momo(recipe: Recipe, model: nn.Module, shape: list[float]) -> Prepared:
    """Its README: MomoAdam at 1e-2, any schedule beside it, and the loss given to its step."""
    groups = recipe.groups(model, recipe.weight_decay)
    return Prepared([_package("MoMo").MomoAdam(groups, lr=1e-2)], shape, needs_loss=True)


RIVAL: dict[str, Callable[[Recipe, nn.Module, list[float]], Prepared]] = {
    "NadamW, AlgoPerf": nadamw, "Prodigy": prodigy, "schedule-free": schedule_free,
    "prodigy-plus-schedule-free": prodigy_plus, "MoMo": momo,
}  # fmt: skip


def step(prepared: Prepared, model: nn.Module, loss: Tensor) -> None:
    """One step, clipped where the method asks for it."""
    if math.isfinite(prepared.clips):
        nn.utils.clip_grad_norm_(model.parameters(), prepared.clips)
    for optimizer in prepared.optimizers:
        if prepared.needs_loss:
            optimizer.step(loss=loss)  # type: ignore[call-arg]
        else:
            optimizer.step()
