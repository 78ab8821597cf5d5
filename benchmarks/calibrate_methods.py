"""The methods of the calibration benchmark: curvestep's, the grid's settings, rivals with their defaults.

A method is a function ``(run) -> Trainer``. It may spend gradient evaluations before training (they count),
and it says which point it would deploy: schedule-free and DoG have an average for that.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from benchmarks.calibrate_data import Batch, Task
from torch import Tensor, nn
from torch.optim import Optimizer

from curvestep import ClippedAdamW, ClippedSGD, NormalizedSGD
from curvestep.vectors import global_norm


@dataclass(frozen=True)
class Run:
    """What a method may look at before it trains."""

    task: Task
    seed: int
    model: nn.Module
    options: dict[str, Any]

    def loss(self, batch: Batch) -> Tensor:
        """The task's loss of the model."""
        return self.task.loss(self.model, batch)

    def measuring(self, count: int) -> list[Batch]:
        """Batches that training does not use."""
        return list(islice(self.task.stream(self.seed, "measuring"), count))


@dataclass
class Trainer:
    """How to take a step, where the deployed model is, what was spent and chosen before training."""

    optimizer: Optimizer
    clip: Callable[[list[Tensor]], None] = lambda gradients: None
    after_step: Callable[[], None] = lambda: None
    deployed: Callable[[], Any] | None = None  # a context manager that gives the model to evaluate
    spent: int = 0
    chosen: dict[str, float] = field(default_factory=dict)


def gradients(model: nn.Module) -> list[Tensor]:
    """The gradients that are there."""
    return [p.grad for p in model.parameters() if p.grad is not None]


def clip_(grads: list[Tensor], threshold: float) -> None:
    """Shorten the gradient to ``threshold`` if it is longer."""
    norm = global_norm(grads).item()
    if norm > threshold:
        for g in grads:
            g.mul_(threshold / norm)


def initial_norm(run: Run, count: int = 4) -> float:
    """Median gradient norm at the start."""
    norms = []
    for batch in run.measuring(count):
        run.model.zero_grad()
        run.loss(batch).backward()
        norms.append(global_norm(gradients(run.model)).item())
    run.model.zero_grad()
    return float(np.median(norms))


# The grid, and fixed settings


def clipped(run: Run) -> Trainer:
    """ClippedSGD at ``lr`` and ``max_norm``, or at ``relative`` times the initial gradient norm."""
    lr, momentum = run.options["lr"], run.options.get("momentum", 0.0)
    max_norm = run.options.get("max_norm")
    if max_norm is None:
        max_norm = run.options["relative"]
        if math.isfinite(max_norm):
            max_norm *= initial_norm(run)
    # nonfinite="propagate" lets a diverging run show itself in the loss, as torch's SGD does.
    opt = ClippedSGD(run.model.parameters(), lr=lr, max_norm=max_norm, momentum=momentum, nonfinite=NONFINITE)
    return Trainer(opt, chosen={"lr": lr, "max_norm": max_norm})


def adamw(run: Run) -> Trainer:
    """Torch's AdamW at ``lr``, everything else its default."""
    return Trainer(torch.optim.AdamW(run.model.parameters(), lr=run.options["lr"]))


# Rivals that find a learning rate while they train


def dog(run: Run) -> Trainer:
    """DoG with the averaging and the ``reps_rel`` that its authors recommend."""
    from dog import DoG, PolynomialDecayAverager

    normalised = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in run.model.modules())
    opt = DoG(run.model.parameters(), reps_rel=1e-4 if normalised else 1e-6)
    averager = PolynomialDecayAverager(run.model)

    @contextmanager
    def average() -> Iterator[nn.Module]:
        yield averager.averaged_model

    return Trainer(opt, after_step=averager.step, deployed=average)


def prodigy(run: Run) -> Trainer:
    """Prodigy's defaults."""
    from prodigyopt import Prodigy

    return Trainer(Prodigy(run.model.parameters()))


def d_adaptation(run: Run) -> Trainer:
    """D-Adaptation's defaults, for SGD or Adam."""
    import dadaptation

    kind = {"SGD": dadaptation.DAdaptSGD, "Adam": dadaptation.DAdaptAdam}[run.options["kind"]]
    return Trainer(kind(run.model.parameters()))


def schedule_free(run: Run) -> Trainer:
    """Schedule-free SGD or AdamW at its default learning rate; the average is what it deploys."""
    import schedulefree

    kinds = {"SGD": schedulefree.SGDScheduleFree, "AdamW": schedulefree.AdamWScheduleFree}
    opt = kinds[run.options["kind"]](run.model.parameters())
    opt.train()

    @contextmanager
    def average() -> Iterator[nn.Module]:
        opt.eval()
        yield run.model
        opt.train()

    return Trainer(opt, deployed=average)


def lr_range(run: Run) -> Trainer:
    """Smith's range test (100 steps, lr from 1e-5 to 100, a tenth of the lr of the lowest loss), clip 1.0.

    As in fast.ai the loss is smoothed (0.98 with bias correction), the test ends at four times its lowest,
    and neither its first tenth nor its last five steps are looked at.
    """
    model, num = copy.deepcopy(run.model), 100
    opt = torch.optim.SGD(model.parameters(), lr=1e-5)
    rates = np.geomspace(1e-5, 100, num)
    average, smooth = 0.0, []
    for i, batch in enumerate(run.measuring(num)):
        opt.param_groups[0]["lr"] = rates[i]
        opt.zero_grad()
        loss = run.task.loss(model, batch)
        loss.backward()
        opt.step()
        average = 0.98 * average + 0.02 * loss.item()
        smooth.append(average / (1 - 0.98 ** (i + 1)))
        if not smooth[-1] < 4 * min(smooth[:-1], default=math.inf):
            break
    lr = lowest_loss_rate(rates, smooth) / 10
    sgd = torch.optim.SGD(run.model.parameters(), lr=lr)
    return Trainer(sgd, clip=lambda g: clip_(g, 1.0), spent=len(smooth), chosen={"lr": lr, "max_norm": 1.0})


def lowest_loss_rate(rates: np.ndarray, losses: list[float]) -> float:
    """The rate of the lowest loss of a range test, without its first tenth and its last five steps.

    The mean of the first few batches is noise, and may be the lowest of all; the last steps diverge. A test
    that ended within those has nothing else to offer than all its steps.
    """
    first = len(rates) // 10
    kept = losses[first:-5]
    return float(rates[first + int(np.argmin(kept))] if kept else rates[int(np.nanargmin(losses))])


# Rivals that find a threshold while they train, at the grid's best learning rate


def autoclip(run: Run) -> Trainer:
    """AutoClip: the 10th percentile of all gradient norms so far (Seetharaman et al., 2020)."""
    history: list[float] = []

    def clip(grads: list[Tensor]) -> None:
        history.append(global_norm(grads).item())
        clip_(grads, float(np.percentile(history, 10)))

    opt = torch.optim.SGD(run.model.parameters(), lr=run.options["lr"])
    return Trainer(opt, clip=clip, chosen={"lr": run.options["lr"]})


def zclip(run: Run) -> Trainer:
    """ZClip: norms z deviations above their average are pulled to z_max²/z (Kumar et al., 2025); defaults."""
    alpha, largest, warm_up = 0.97, 2.5, 25
    history: list[float] = []
    mean = var = 0.0

    def clip(grads: list[Tensor]) -> None:
        nonlocal mean, var
        norm = global_norm(grads).item()
        if len(history) < warm_up:
            history.append(norm)
            mean, var = float(np.mean(history)), float(np.var(history))
            return
        z = (norm - mean) / (math.sqrt(var) + 1e-6)
        if z > largest:
            norm = mean + largest**2 / z * math.sqrt(var)
            clip_(grads, norm)
        mean = alpha * mean + (1 - alpha) * norm
        var = alpha * var + (1 - alpha) * (norm - mean) ** 2

    opt = torch.optim.SGD(run.model.parameters(), lr=run.options["lr"])
    return Trainer(opt, clip=clip, chosen={"lr": run.options["lr"]})


# curvestep


def calibrated(run: Run) -> Trainer:
    """What :func:`curvestep.calibrate` says, for ``optimizer``.

    ``clip=False`` leaves its threshold out; ``free=True`` does not count its gradients, as those of the
    grid's search are not counted.
    """
    from curvestep import calibrate

    options = dict(run.options)
    clip, free = options.pop("clip", True), options.pop("free", False)
    kind = options.pop("optimizer", "ClippedSGD")
    if "clip_at" in options:
        options["clip_at"] = tuple(options["clip_at"])
    batches, num_steps = run.measuring(32), run.task.steps
    cal = calibrate(run.model, run.loss, batches, optimizer=kind, num_steps=num_steps, **options)
    params, momentum = run.model.parameters(), options.get("momentum", 0.0)
    max_norm = cal.max_norm if clip else math.inf
    if kind == "AdamW":
        opt: Optimizer = ClippedAdamW(params, lr=cal.lr, max_norm=max_norm, nonfinite=NONFINITE)
    elif kind == "NormalizedSGD":
        opt = NormalizedSGD(params, lr=cal.lr, offset=cal.max_norm, nonfinite=NONFINITE)
    else:
        opt = ClippedSGD(params, lr=cal.lr, max_norm=max_norm, momentum=momentum, nonfinite=NONFINITE)
    chosen = {"lr": cal.lr, "max_norm": max_norm, "low": cal.lr_interval[0], "high": cal.lr_interval[1]}
    return Trainer(opt, spent=0 if free else cal.num_gradients, chosen=chosen)


NONFINITE = "propagate"
METHODS = {
    method.__name__: method
    for method in (
        clipped, adamw, dog, prodigy, d_adaptation, schedule_free, lr_range, autoclip, zclip, calibrated,
    )
}  # fmt: skip
