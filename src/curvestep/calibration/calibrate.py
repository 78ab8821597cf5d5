"""Learning rate and clipping threshold before training, by short trials at the starting point.

Adam's learning rate has no unit. SGD's has one: its scale, which trials are made around, is the largest
working step along a batch's gradient at the start.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from curvestep.calibration import calibration_words as words, pilots
from curvestep.calibration.bracket import Gradients, step_along_gradient
from curvestep.calibration.loaders import Batch, Supply, check_batches, unmoved
from curvestep.calibration.lr_schedules import check_schedule, peak_lr, shares_of_parameters
from curvestep.calibration.method import Method, method_of
from curvestep.calibration.pilots import LONG, MOST_TRIALS, NUM_JUDGES, SHORT
from curvestep.calibration.result import Calibration
from curvestep.checks import check_count, check_positive
from curvestep.optimizer_family import Family
from curvestep.smoothness.estimators import each
from curvestep.smoothness.oracle import BatchReplay
from curvestep.smoothness.replay import trainable_parameters
from curvestep.smoothness.snapshot import PassState, restore_on_exit
from curvestep.smoothness.surroundings import Surroundings
from curvestep.tensors.vectors import difference, global_norm

CLIP_AT = (0.6, 1.75)  # thresholds by the first gradient norm: of batches with nothing, with all in common
ADAM_SCALE, ADAM_MAX_NORM = 0.004, 1.0  # of Adam, where it has no threshold of its own


def calibrate(
    model: nn.Module,
    loss_of_batch: Callable[[Batch], Tensor | float],
    batches: Iterable[Batch],
    *,
    optimizer: str | type | Optimizer = "ClippedSGD",
    momentum: float | None = None,
    weight_decay: float | None = None,
    max_norm: float | None = None,
    schedule: str = "constant",
    num_steps: int | None = None,
    budget: float | None = None,
    progress: bool | None = None,
) -> Calibration:
    r"""Learning rate and ``max_norm`` found by short trials where training is about to start.

    Up to five trials of 16 steps run the whole schedule, judged by batches that they do not step on. The
    smallest rate with 96 % of the best gain is taken. Where noise hides the gains, trials of twice the length
    follow. Those of SGD under a schedule have 48 plain steps, and 0.7 of the best rate is taken.

    Parameters, buffers, ``.grad``, optimizer, random states and a loader's own generator are the same bits
    afterwards, after an interrupt too. Batch size, and gradient accumulation inside ``loss_of_batch``, are
    part of what is measured. Under DDP and FSDP2 every rank calls with its share of each batch.

    Args:
        model: The model to be trained, in the mode it will be trained in: plain, DDP or FSDP2.
        loss_of_batch: Loss of a batch, a scalar; or a function that itself calls ``backward()`` for several
            micro-batches and returns the loss as a number.
        batches: At least three, better 24, for SGD 56; a data loader will do, read only as far as needed.
        optimizer: The instance that will train, or its class or name. Of an instance's learning rates the
            ratios count; for optimizers other than Adam's and SGD's trials begin at the largest.
        momentum: Of SGD, where only its class or name is given; so ``weight_decay``.
        weight_decay: Of the optimizer.
        max_norm: The threshold that training clips at outside of the optimizer, as by ``clip_grad_norm_``.
        schedule: ``"constant"``, or ``"warmup-decay"``: ``lr`` is then the peak of a warm-up over about a
            tenth of the steps and a decay to zero.
        num_steps: Steps that training will take, if known.
        budget: Gradients that the trials may take, or, below one, their share of ``num_steps``; each multiple
            of 80 repeats them on other batches. Default: a twentieth of ``num_steps``, at least 80, for SGD
            under a schedule 240; about 130 more where noise hides the answer.
        progress: Whether to show the trials on standard error. Default: where that is a terminal.

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Linear(2, 1, bias=False)
        >>> batches = [torch.randn(8, 2) for _ in range(24)]
        >>> loss = lambda x: (model(x) - x.sum(1, keepdim=True)).square().mean()
        >>> cal = calibrate(model, loss, batches, optimizer="AdamW", schedule="warmup-decay")
        >>> cal.max_norm, len(cal.trials), cal.num_gradients
        (1.0, 5, 82)
    """
    trainable_parameters(model)  # refuses what is no model, and a lazy one
    if not callable(loss_of_batch):
        raise TypeError(
            "`loss_of_batch` must be a function that takes a batch and returns its loss, got a "
            f"{type(loss_of_batch).__name__}. The order is `calibrate(model, loss_of_batch, batches)`."
        )
    check_batches(batches)
    check_schedule(schedule)
    method = method_of(optimizer, model, momentum=momentum, weight_decay=weight_decay)
    rule = LONG if method.family.is_descent and schedule == "warmup-decay" else SHORT
    gradients, may_double = budget_of(budget, num_steps, rule.num_steps), budget is None and rule is SHORT
    most = min(MOST_TRIALS, gradients // rule.num_steps)
    turns = gradients // (most * rule.num_steps)
    given = method.max_norm
    if max_norm is not None:  # what clips less does nothing
        given = min(given, check_positive("max_norm", max_norm))
    is_shown = sys.stderr.isatty() if progress is None else progress

    def show(text: str) -> None:
        if is_shown:
            print(text, file=sys.stderr, flush=True)

    show(words.before(method.name, rule.num_steps, gradients, may_double=may_double))
    began = perf_counter()
    surroundings = Surroundings(loss_of_batch, model)
    with restore_on_exit(surroundings.restore), unmoved(batches):
        supply = Supply(batches, model)
        _, steps = supply.split(NUM_JUDGES, turns * rule.num_steps)
        passes = BatchReplay(model, loss_of_batch)
        with passes:
            with restore_on_exit(PassState(model).keep_large()):
                loss, grad_norm, num_idle = _look(passes, steps[0], method)
            scale, threshold = scale_and_threshold(passes, steps[:3], method, given)
            center = scale / 2 if schedule == "constant" else scale * 2
            trials = pilots.Pilots(passes, method, schedule, threshold, center, show)
            tried = trials.tried(supply, rule, turns, most, may_double=may_double)
    trials = pilots.longest(tried)
    lr, doubts = pilots.read(trials, schedule, scale)
    start = words.of_start(passes, method, grad_norm, num_idle, batches, len(supply.known))
    warnings = (*start, *words.of_trials(doubts, trials))  # the first is printed
    return Calibration(
        optimizer=method.name,
        family=method.family,
        threshold=method.threshold,
        momentum=method.momentum,
        lr=lr,
        max_norm=threshold,
        schedule=schedule,
        confidence=words.confidence(method.family, schedule, warnings),
        trials=tuple(tried),
        loss=loss,
        grad_norm=grad_norm,
        num_gradients=passes.num_gradients,
        seconds=perf_counter() - began,
        warnings=warnings,
        clips_outside=max_norm is not None,
    )


def budget_of(budget: float | None, num_steps: int | None, length: int) -> int:
    """Gradients of one search by trials of this length."""
    run = 0 if num_steps is None else check_count("num_steps", num_steps)
    if budget is None:
        return max(MOST_TRIALS * length, run // 20)
    gradients = check_positive("budget", budget)
    if gradients < 1:
        gradients *= run
    least = len(pilots.FIRST_OCTAVES) * length
    if gradients < least:
        raise ValueError(
            f"`budget` must be at least {least} gradients, three trials, got {gradients:.0f}. "
            "Below one it is a share of `num_steps`: give both."
        )
    return int(gradients)


def _look(passes: BatchReplay, batch: Batch, method: Method) -> tuple[float, float, int]:
    """Loss and gradient norm of a batch, and how many parameters with a gradient the optimizer leaves."""
    loss, gradients = passes.gradient_of(batch)
    norm = global_norm(gradients).item()
    check_start(loss, norm)
    shares = shares_of_parameters(method.optimizer, passes.parameters)
    trained = [share > 0 for share, g in zip(shares, gradients, strict=True) if g is not None]
    if not any(trained):
        raise ValueError("`optimizer` trains no parameter that the loss depends on, or with an lr of zero.")
    passes.check_repeatable(batch, gradients, tolerance=1 - pilots.SUFFICIENT)
    return loss, norm, trained.count(False)


def scale_and_threshold(
    passes: BatchReplay, batches: Sequence[Batch], method: Method, given: float
) -> tuple[float, float]:
    """The lr to try around, and the threshold: ``given``, or one of our own where that is infinite."""
    scale, threshold = ADAM_SCALE, ADAM_MAX_NORM
    if method.family.is_descent:
        shares = shares_of_parameters(method.optimizer, passes.parameters)
        step, threshold = _step_and_threshold(passes, batches, shares)
        scale = step * (1.0 - method.momentum)
    elif method.family is not Family.ADAM:
        scale, threshold = peak_lr(method.optimizer), math.inf
    if math.isfinite(given):
        threshold = given
    return method.lr_of(scale, threshold), threshold


def _step_and_threshold(
    passes: BatchReplay, batches: Sequence[Batch], shares: Sequence[float]
) -> tuple[float, float]:
    r"""The median step, and the threshold :math:`c_0^{1-\rho^2} c_1^{\rho^2} \lVert g \rVert`.

    :math:`\rho` is the mean cosine between the batches' gradients. Where they agree, the norm at the start is
    that of a signal, which fades; where they do not, it is that of noise, which the signal will exceed.
    """
    steps, norms, guess = list[float](), list[float](), None
    total: Gradients = [None] * len(shares)  # of the directions, with the other sign
    for batch in batches:
        at = partial(_gradient_at, passes, batch)
        guess, gradients = step_along_gradient(at, passes.parameters, shares, guess)
        steps.append(guess)  # the next search begins there
        norms.append(global_norm(gradients).item())
        units = each(lambda g: g.to(torch.promote_types(g.dtype, torch.float32)) / norms[-1], gradients)
        total = difference(total, units, overwrite=True)
    passes.restart()
    count = len(norms)
    agreement = (global_norm(total).item() ** 2 - count) / max(1, count * (count - 1))
    weight = min(max(agreement, 0.0), 1.0) ** 2
    return median(steps), CLIP_AT[0] ** (1.0 - weight) * CLIP_AT[1] ** weight * median(norms)


def _gradient_at(
    passes: BatchReplay, batch: Batch, direction: Gradients, fraction: float
) -> tuple[float, Gradients]:
    passes.move(direction, fraction)
    loss, gradients = passes.gradient_of(batch)
    if fraction == 0:
        check_start(loss, global_norm(gradients).item())
    return loss, each(Tensor.to_dense, gradients)


def check_start(loss: float, grad_norm: float) -> None:
    """Refuse a start from which nothing can be trained."""
    if not math.isfinite(loss):
        raise ValueError(f"The loss at the start is {loss}. Look at the initialisation and the batch.")
    if not math.isfinite(grad_norm):
        raise ValueError(
            "The gradient at the start is not finite although the loss is, as of a root at zero."
        )
    if grad_norm == 0:
        raise ValueError("The gradient at the start is zero. Are all parameters zero, or all units dead?")
